"""``distkit convert``: one ordinary file of a sharded checkpoint, or what is wrong with it."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
import torch

from lightning_distkit.cli.__main__ import main
from lightning_distkit.core.zero import ShardedCheckpointWriter, ZeroOptimizer


class Config:
    """What a checkpoint may hold that is no tensor."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    module = torch.nn.Linear(5, 3)
    optimizer = ZeroOptimizer(torch.optim.AdamW, module.parameters())
    module(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    state = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.sharded_state_dict()], "epoch": 2}
    with ShardedCheckpointWriter() as writer:
        writer.save(state, tmp_path / "run.ckpt", replicated=module.parameters())
        writer.save({**state, "config": Config()}, tmp_path / "objects.ckpt", replicated=module.parameters())
    torch.save({**state, "optimizer_states": [optimizer.state_dict()]}, tmp_path / "wanted.ckpt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def distkit(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["distkit", *arguments])
    main()


def test_it_is_what_would_have_been_saved_whole(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distkit(monkeypatch, "convert", "run.ckpt", "out.ckpt")
    got, wanted = (torch.load(run / name, weights_only=True) for name in ("out.ckpt", "wanted.ckpt"))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    with zipfile.ZipFile(run / "out.ckpt") as archive:
        assert archive.testzip() is None
    assert {path.name for path in run.iterdir()} == {"run.ckpt", "objects.ckpt", "wanted.ckpt", "out.ckpt"}


def test_objects_are_loaded_if_that_is_wished(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"meta\.pt cannot be read"):
        distkit(monkeypatch, "convert", "objects.ckpt", "out.ckpt")
    assert not (run / "out.ckpt").exists()
    distkit(monkeypatch, "convert", "objects.ckpt", "out.ckpt", "--weights_only=false")
    assert isinstance(torch.load(run / "out.ckpt", weights_only=False)["config"], Config)


def test_what_is_wrong_is_said_and_nothing_is_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"at missing\.ckpt there is nothing"):
        distkit(monkeypatch, "convert", "missing.ckpt", "out.ckpt")
    with pytest.raises(SystemExit, match=r"there is a file: torch\.load opens it"):
        distkit(monkeypatch, "convert", "wanted.ckpt", "out.ckpt")
    with pytest.raises(SystemExit, match=r"run\.ckpt must not be there yet"):
        distkit(monkeypatch, "convert", "run.ckpt", "run.ckpt")
    [shard] = (run / "run.ckpt").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    shard.write_bytes(content[:-100])
    with pytest.raises(SystemExit, match="the checkpoint is truncated"):
        distkit(monkeypatch, "convert", "run.ckpt", "out.ckpt")
    content[:] = bytes(len(content))
    shard.write_bytes(content)
    with pytest.raises(SystemExit, match=r"distcp is damaged: at \d+ there is no tensor"):
        distkit(monkeypatch, "convert", "run.ckpt", "out.ckpt")
    assert {path.name for path in run.iterdir()} == {"run.ckpt", "objects.ckpt", "wanted.ckpt"}
