"""What every rank has written a part of is the whole, for any stage and number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_distkit.core.zero import (
    ShardedCheckpointWriter,
    ZeroOptimizer,
    convert_sharded_checkpoint,
    read_sharded_checkpoint,
)
from tests.core.zero.sharded import STAGES, assert_same, load, made, parameters, save, saved, step
from tests.core.zero.training import OPTIMIZERS, module_for
from tests.ranks import run_ranks

NAMES = ["adamw", "muon", "adafactor"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_read_is_what_the_whole_form_says_though_training_went_on(
    stage: int, name: str, tmp_path: Path
) -> None:
    run_ranks(3, saved, name, stage, tmp_path)
    wanted = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    assert wanted["model"]["seen"].tolist() == [0, 0, 0]
    for kind in ("sharded", "asynchronous"):
        assert_same(read_sharded_checkpoint(tmp_path / kind), wanted)
        convert_sharded_checkpoint(tmp_path / kind, tmp_path / f"{kind}.ckpt")
        assert_same(torch.load(tmp_path / f"{kind}.ckpt", weights_only=True), wanted)
    names = {"sharded", "asynchronous", "whole.ckpt", "sharded.ckpt", "asynchronous.ckpt"}
    assert {path.name for path in tmp_path.iterdir()} == names  # nothing is left from on the way


def test_torchs_own_tool_reads_it(tmp_path: Path) -> None:
    run_ranks(3, saved, "adamw", 2, tmp_path)
    dcp_to_torch_save(tmp_path / "sharded", tmp_path / "torchs.pt")
    torchs = torch.load(tmp_path / "torchs.pt", weights_only=True)
    wanted = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    for name, value in wanted["model"].items():
        if name not in ("tied.weight", "scale"):  # tied ones once, under the first of their names; the rest is small
            assert torch.equal(torchs[f"model.{name}"], value)
    for number, state in wanted["optimizer"]["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            if state[name].numel() > 1:
                assert torch.equal(torchs[f"optimizer.state.{number}.{name}"], state[name])


def goes_on(name: str, stage: int, folder: Path) -> tuple[bool, Tensor]:
    """Whether from the sharded one all is as from the whole one; and the parameters two steps later."""
    ends = []
    for read in (lambda: read_sharded_checkpoint(folder / "sharded"), lambda: torch.load(folder / "whole.ckpt")):
        both = made(name, stage)
        step(*both, 1, seed=9)  # there is something to be replaced
        load(both, read())
        step(*both, 2, seed=2)
        ends.append(parameters(both[0]))
    return torch.equal(*ends), ends[0]


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("stage", STAGES)
def test_any_stage_on_any_number_of_ranks_goes_on_exactly(stage: int, name: str, tmp_path: Path) -> None:
    uninterrupted = run_ranks(3, saved, name, stage, tmp_path)[0]
    same, end = run_ranks(3, goes_on, name, stage, tmp_path)[0]
    assert same
    assert torch.equal(end, uninterrupted)
    others = [other for other in STAGES if other != stage]
    for world_size, other in ((2, others[0]), (2, others[1]), (1, others[1])):
        assert [same for same, _ in run_ranks(world_size, goes_on, name, other, tmp_path)] == [True] * world_size


def test_without_a_process_group_it_is_the_same(tmp_path: Path) -> None:
    module = module_for("adamw")
    optimizer = ZeroOptimizer(OPTIMIZERS["adamw"](module))
    module(torch.ones(2, 3, 5, 5)).square().mean().backward()
    optimizer.step()
    with ShardedCheckpointWriter() as writer:
        for asynchronous in (False, True):
            save(writer, (module, optimizer), tmp_path / "alone", asynchronous=asynchronous)
            writer.wait()
            assert_same(read_sharded_checkpoint(tmp_path / "alone")["optimizer"], optimizer.state_dict())
