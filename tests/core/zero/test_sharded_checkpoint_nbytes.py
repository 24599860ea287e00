"""Of a sharded checkpoint each rank reads only what it needs, and all write alike; what is the same is written once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_distkit.core.zero import ShardedCheckpointWriter, convert_sharded_checkpoint, read_sharded_checkpoint
from tests.core.zero.sharded import STAGES, Made, assert_same, load, save, saved, zeroed
from tests.ranks import run_ranks


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


NBYTES = 4 * 4 * (512 * 512 + 512)  # of the parameters, and of each moment


def wide(stage: int) -> Made:
    return zeroed(Wide(), lambda module: torch.optim.AdamW(module.parameters(), 1e-3), stage)


def wide_saved(stage: int, folder: Path) -> None:
    module, optimizer = wide(stage)
    module(torch.ones(1, 512)).square().mean().backward()
    optimizer.step()
    with ShardedCheckpointWriter() as writer:
        save(writer, (module, optimizer), folder / "wide")


def nbytes_read(stage: int, folder: Path) -> int:
    """By the system's count."""
    both = wide(stage)
    read_sharded_checkpoint(folder / "wide")["model"]["layers.0.weight"][:1].clone()  # what is imported on the way
    before = _rchar()
    load(both, read_sharded_checkpoint(folder / "wide"))
    return _rchar() - before


def _rchar() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


# Only the system's own count of what was read proves that files are not read whole; ours could not tell.
@pytest.mark.parametrize(("stage", "ranks", "other", "readers"), [(2, 4, 3, 2), (3, 2, 2, 3), (1, 1, 3, 4)])
def test_each_rank_reads_only_what_it_needs(stage: int, ranks: int, other: int, readers: int, tmp_path: Path) -> None:
    run_ranks(ranks, wide_saved, stage, tmp_path)
    needed = NBYTES * 3 / readers if other == 3 else NBYTES + NBYTES * 2 / readers  # weights are whole in stage 2
    for read in run_ranks(readers, nbytes_read, other, tmp_path):
        assert needed <= read < 1.15 * needed  # headers and tables


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_write_alike(stage: int, tmp_path: Path) -> None:
    run_ranks(4, wide_saved, stage, tmp_path)
    written = [path.stat().st_size for path in (tmp_path / "wide").glob("*.distcp")]
    assert len(written) == 4
    assert max(written) < 1.1 * 3 * NBYTES / 4


@pytest.mark.parametrize("stage", [2, 3])
def test_tied_parameters_are_written_once_and_are_one_in_the_converted_file(stage: int, tmp_path: Path) -> None:
    run_ranks(5, saved, "adamw", stage, tmp_path)  # for 7 rows: the last one has none
    assert b"model.tied.weight" not in (tmp_path / "sharded" / ".metadata").read_bytes()
    convert_sharded_checkpoint(tmp_path / "sharded", tmp_path / "converted.ckpt")
    converted = torch.load(tmp_path / "converted.ckpt", weights_only=True)
    assert converted["model"]["tied.weight"].data_ptr() == converted["model"]["again.weight"].data_ptr()
    assert_same(converted, torch.load(tmp_path / "whole.ckpt", weights_only=True))


def test_a_saved_tensor_is_a_tensor_that_is_not_written_to(tmp_path: Path) -> None:
    with ShardedCheckpointWriter() as writer:
        writer.save({"t": (values := torch.randn(6, 5)), "half": values.half(), "flags": values > 0}, tmp_path / "c")
    checkpoint = read_sharded_checkpoint(tmp_path / "c")
    saved = checkpoint["t"]
    files = saved._files
    assert isinstance(saved, Tensor)
    assert saved.shape == values.shape
    assert torch.equal(saved[2:4, 1:], values[2:4, 1:])
    assert files.nbytes_read == (1 * 5 + 4) * 4  # from the first of them to the last
    assert torch.equal(saved * 2 + values, values * 3)
    assert torch.equal(saved.t().clone(), values.t())
    assert torch.equal(checkpoint["half"], values.half())
    assert torch.equal(checkpoint["flags"], values > 0)
    with pytest.raises(RuntimeError, match="t is in a file and may not be written to"):
        saved.add_(1)
