"""Whatever ends a save half-way, the checkpoint before is whole, and it is said on every rank."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_distkit.core.collectives import PeerError
from lightning_distkit.core.zero import ShardedCheckpointWriter, read_sharded_checkpoint
from lightning_distkit.core.zero import sharded_checkpoint as module_under_test
from lightning_distkit.core.zero.checkpoint_folder import put_in_place, saving_folder
from tests.core.zero.sharded import assert_same, made, save, step, whole
from tests.ranks import RankDied, run_ranks


def killed(asynchronous: bool, folder: Path) -> str:
    both = made("adamw", 2)
    step(*both, 1, seed=1)
    writer = ShardedCheckpointWriter()
    save(writer, both, folder / "last")
    if dist.get_rank() == 0:
        torch.save(whole(both), folder / "whole.ckpt")
    else:
        whole(both)
    step(*both, 1, seed=2)
    if dist.get_rank() == 1:
        module_under_test._Writer.write_data = _die  # type: ignore[method-assign]
    with pytest.raises(PeerError) as error:  # noqa: PT012  where depends on asynchronous
        save(writer, both, folder / "last", asynchronous=asynchronous)
        writer.wait()
    return str(error.value)


def _die(*unused: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_killed_in_mid_save_leaves_the_checkpoint_before(asynchronous: bool, tmp_path: Path) -> None:
    survivors = run_ranks(3, killed, asynchronous, tmp_path, return_exceptions=True)
    assert isinstance(survivors.pop(1), RankDied)
    for said in survivors:
        assert "another rank died" in said
    assert_same(read_sharded_checkpoint(tmp_path / "last"), torch.load(tmp_path / "whole.ckpt", weights_only=True))
    assert (tmp_path / ".saving" / "last").exists()
    run_ranks(2, saved_over, tmp_path)  # over what was left, and on fewer ranks
    assert {path.name for path in tmp_path.iterdir()} == {"last", "whole.ckpt"}
    assert len(list((tmp_path / "last").glob("*.distcp"))) == 2
    read_sharded_checkpoint(tmp_path / "last")


def saved_over(folder: Path) -> None:
    with ShardedCheckpointWriter() as writer:
        save(writer, made("adamw", 2), folder / "last")


def killed_between_the_renames(folder: Path) -> None:
    rename = Path.rename

    def dying(self: Path, target: Path) -> Path:
        if self == saving_folder(folder / "last"):
            os._exit(9)
        return rename(self, target)

    Path.rename = dying  # type: ignore[method-assign]
    put_in_place(folder / "last")


def test_killed_in_the_moment_of_replacing_the_one_before_is_found(tmp_path: Path) -> None:
    run_ranks(2, saved_over, tmp_path)
    shutil.copytree(tmp_path / "last", saving_folder(tmp_path / "last"))
    [died] = run_ranks(1, killed_between_the_renames, tmp_path, return_exceptions=True)
    assert isinstance(died, RankDied)
    assert not (tmp_path / "last").exists()
    read_sharded_checkpoint(tmp_path / "last")
    run_ranks(2, saved_over, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def full_disk(asynchronous: bool, folder: Path) -> tuple[str, bool]:
    both = made("adamw", 2)
    with ShardedCheckpointWriter() as writer:
        save(writer, both, folder / "last")
        before = (folder / "last").stat().st_ino
        dist.barrier()
        if dist.get_rank() == 1:
            module_under_test._Writer.write_data = no_space  # type: ignore[method-assign]
        with pytest.raises(RuntimeError) as error:  # noqa: PT012  where depends on asynchronous
            save(writer, both, folder / "last", asynchronous=asynchronous)
            assert asynchronous
            save(writer, both, folder / "other")
        writer.wait()  # it is said once
        return str(error.value), (folder / "last").stat().st_ino == before


def no_space(*unused: Any) -> None:
    raise OSError("No space left on device")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_cannot_write_is_named_on_every_rank_and_nothing_is_replaced(
    asynchronous: bool, tmp_path: Path
) -> None:
    for said, untouched in run_ranks(2, full_disk, asynchronous, tmp_path):
        assert "rank 1 says OSError('No space left on device')" in said
        assert untouched
