"""What is not a whole sharded checkpoint, or cannot be one, is refused with the reason, and nothing has changed."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lightning_distkit.core.zero import SavedTensor, ShardedCheckpointWriter, read_sharded_checkpoint
from tests.core.zero.sharded import made, saved, step
from tests.core.zero.test_sharded_checkpoint_killed import no_space
from tests.ranks import run_ranks


def unwritable(folder: Path) -> list[str]:
    said = []
    writer = ShardedCheckpointWriter()
    for checkpoint in (
        {"function": lambda: 0} if dist.get_rank() == 0 else {},
        {"a": {"b.c": torch.ones(2)}, "a.b": {"c": torch.zeros(2)}},
    ):
        with pytest.raises(ValueError, match="must") as error:
            writer.save(checkpoint, folder / "none")
        said.append(str(error.value))
    assert not any(folder.iterdir())
    return said


def test_what_cannot_be_saved_is_refused_on_every_rank_before_anything_is_written(tmp_path: Path) -> None:
    for unpicklable, ambiguous in run_ranks(2, unwritable, tmp_path):
        assert "something that torch.save can write" in unpicklable
        assert "both 'a.b.c': rename a key" in ambiguous


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("bomb",)


# As another pickle may say it: the same by way of a module that belongs there.
DOTTED_BOMB = b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x8c\x08os.mkdir\x93\x8c\x04bomb\x85R."


def foreign(folder: Path) -> None:
    """As torch and Lightning would write it."""
    shutil.rmtree(folder)
    dcp.save({"w": torch.ones(4)}, checkpoint_id=folder, no_dist=True)
    torch.save({"epoch": 1}, folder / "meta.pt")


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing shard": (lambda f: (f / "__1_0.distcp").unlink(), "bytes, but it is missing: the checkpoint is truncated"),
    "short shard": (lambda f: _cut(f / "__1_0.distcp"), "__1_0.distcp must have"),
    "missing meta": (lambda f: (f / "meta.pt").unlink(), "lacks meta.pt"),
    "missing metadata": (lambda f: (f / ".metadata").unlink(), "lacks .metadata"),
    "short meta": (lambda f: _cut(f / "meta.pt"), "meta.pt cannot be read; it may be truncated"),
    "short metadata": (lambda f: _cut(f / ".metadata"), ".metadata cannot be read; it may be truncated"),
    "none": (shutil.rmtree, "there is nothing"),
    "a file": (lambda f: (shutil.rmtree(f), f.touch()), "there is a file: torch.load opens it"),
    "empty": (lambda f: (shutil.rmtree(f), f.mkdir()), "lacks meta.pt and .metadata: it is none"),
    "code": (lambda f: (f / ".metadata").write_bytes(pickle.dumps(Bomb())), "which does not belong there"),
    "hidden": (lambda f: (f / ".metadata").write_bytes(DOTTED_BOMB), "os.mkdir, which does not belong there"),
}


def _cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def test_what_is_not_complete_or_foreign_is_said_before_anything_is_read(tmp_path: Path) -> None:
    run_ranks(2, saved, "adamw", 2, tmp_path)
    for name, (breaks, says) in BROKEN.items():
        broken = shutil.copytree(tmp_path / "sharded", tmp_path / name)
        breaks(broken)
        with pytest.raises(ValueError, match=r"must|cannot") as error:
            read_sharded_checkpoint(broken)
        assert says in str(error.value)
    assert not Path("bomb").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_what_others_have_written_is_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    foreign(tmp_path / "others")
    with pytest.raises(ValueError, match="something else has written it"):
        read_sharded_checkpoint(tmp_path / "others")


def cannot_read(folder: Path) -> tuple[str, bool]:
    both = made("adamw", 2)
    step(*both, 1, seed=1)
    before = {name: value.clone() for state in both[1].state.values() for name, value in state.items()}
    checkpoint = read_sharded_checkpoint(folder / "sharded")
    if dist.get_rank() == 1:
        SavedTensor.read_box = no_space  # type: ignore[assignment]
    with pytest.raises(ValueError, match="state could not be read") as error:
        both[1].load_state_dict(checkpoint["optimizer"])
    after = {name: value for state in both[1].state.values() for name, value in state.items()}
    return str(error.value), all(torch.equal(after[name], before[name]) for name in before)


def test_a_rank_that_cannot_read_its_part_changes_nothing_on_any(tmp_path: Path) -> None:
    run_ranks(2, saved, "adamw", 2, tmp_path)
    for said, unchanged in run_ranks(2, cannot_read, tmp_path):
        assert "No space left on device" in said
        assert unchanged
