"""Stage 3 speaks of whole parameters and states, takes them at any world size, and makes the module plain again."""

from __future__ import annotations

import copy
import io
import pickle
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.zero.dtensor_optimizer import DTensorOptimizer
from lightning_distkit.core.zero.module_state import load_module_full_state_dict, module_full_state_dict
from lightning_distkit.core.zero.parameters import shard_parameters, unshard_parameters
from tests.core.compression.bodies import distance
from tests.core.zero.stage_3 import (
    OPTIMIZERS,
    Net,
    batch,
    steps,
    whole,
)
from tests.ranks import run_ranks


def save(name: str, n_steps: int) -> Any:
    module = shard_parameters(Net())
    optimizer = DTensorOptimizer(OPTIMIZERS[name](module), module)
    steps(module, optimizer, n_steps)
    return module_full_state_dict(module), optimizer.state_dict()


def load_and_go_on(name: str, states: Any, n_steps: int) -> tuple[Tensor, Tensor]:
    """Here at this world size, and in a plain module and optimizer; every rank has the same batches."""
    module_state, optimizer_state = states
    before = pickle.dumps(states)
    results = []
    for ours in (True, False):
        module: nn.Module = Net()
        with torch.no_grad():
            for param in module.parameters():
                param.zero_()
        module = shard_parameters(module) if ours else module
        optimizer: Any = OPTIMIZERS[name](module)
        if ours:
            optimizer = DTensorOptimizer(optimizer, module)
            load_module_full_state_dict(module, module_state)
            optimizer.load_state_dict(optimizer_state)
        else:
            module.load_state_dict(module_state)
            optimizer.load_state_dict(copy.deepcopy(optimizer_state))
        for step in range(n_steps):
            i = torch.randint(11, (6,), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(i), i.flip(0)).backward()
            optimizer.step()
        results.append(whole(module))
    assert pickle.dumps(states) == before  # what was given is not written to
    return results[0], results[1]


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon", "adafactor"])
def test_a_full_state_loads_at_any_world_size_and_into_plain_torch(name: str) -> None:
    states = run_ranks(3, save, name, 3)[0]
    for world_size in (1, 2, 4):
        for ours, plains in run_ranks(world_size, load_and_go_on, name, states, 3):
            assert distance(ours, plains) < 1e-6


def plain_state(name: str) -> Any:
    module = Net()
    optimizer = OPTIMIZERS[name](module)
    steps(module, optimizer, 3)
    return module.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_plain_torchs_state_loads(name: str) -> None:
    states = run_ranks(1, plain_state, name)[0]
    for ours, plains in run_ranks(3, load_and_go_on, name, states, 3):
        assert distance(ours, plains) < 1e-6


def save_and_load_at_once(name: str, n_steps: int) -> tuple[bool, bool, float]:
    """Nothing changes by it; and the run goes on as the one that was not disturbed."""
    undisturbed, module = shard_parameters(Net()), shard_parameters(Net())
    theirs = DTensorOptimizer(OPTIMIZERS[name](undisturbed), undisturbed)
    optimizer = DTensorOptimizer(OPTIMIZERS[name](module), module)
    steps(undisturbed, theirs, n_steps)
    steps(module, optimizer, n_steps)
    for_all = [module_full_state_dict(module), optimizer.state_dict()]
    dist.broadcast_object_list(for_all)
    load_module_full_state_dict(module, for_all[0])
    optimizer.load_state_dict(for_all[1])
    same_module = torch.equal(whole(module), whole(undisturbed))
    again = optimizer.state_dict()
    same_state = not again or all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(again["state"][number][key]))
        for number, state in for_all[1]["state"].items()
        for key, value in state.items()
    )
    steps(undisturbed, theirs, 2, first=n_steps)
    steps(module, optimizer, 2, first=n_steps)
    return same_module, same_state, float((whole(module) - whole(undisturbed)).abs().max())


@pytest.mark.parametrize("n_steps", [0, 3])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_save_then_load_at_once_changes_nothing(name: str, n_steps: int) -> None:
    assert run_ranks(2, save_and_load_at_once, name, n_steps) == [(True, True, 0.0)] * 2


def refused() -> tuple[list[str], bool]:
    """On rank 1 alone the state is wrong; both refuse, and nothing has changed."""
    module = shard_parameters(Net())
    optimizer = DTensorOptimizer(OPTIMIZERS["adam"](module), module)
    steps(module, optimizer, 1)
    states = [module_full_state_dict(module), optimizer.state_dict()]
    dist.broadcast_object_list(states)
    before, said = whole(module), []
    wrong = copy.deepcopy(states)
    if dist.get_rank() == 1:
        wrong[0]["gain"] = torch.ones(2)
        wrong[1]["state"][0]["exp_avg"] = torch.ones(2, 2)
    for load, state in (
        (partial(load_module_full_state_dict, module), wrong[0]),
        (optimizer.load_state_dict, wrong[1]),
    ):
        with pytest.raises(ValueError, match="shape") as error:
            load(state)
        said.append(str(error.value))
    with pytest.raises(ValueError, match="lacks"):
        load_module_full_state_dict(module, {"foreign": torch.ones(1)})
    for malformed in ({}, {"param_groups": 3, "state": {}}, None):
        with pytest.raises(ValueError, match="as torch makes them"):
            optimizer.load_state_dict(malformed if dist.get_rank() == 0 else states[1])
    return said, torch.equal(before, whole(module))


def test_a_foreign_state_is_refused_on_every_rank_and_changes_nothing() -> None:
    (said, same), (others, others_same) = run_ranks(2, refused)
    assert same
    assert others_same
    assert "gain" in said[0]
    assert "gain" in others[0]
    assert "(rank 1)" in said[0]


def one_alone() -> str:
    module = shard_parameters(Net())
    if dist.get_rank() == 1:
        return ""
    Group.meet.__defaults__ = (timedelta(seconds=1),)  # in place of minutes
    with pytest.raises(RuntimeError, match="must be called on every rank") as error:
        module_full_state_dict(module)
    return str(error.value)


def test_a_full_state_asked_for_on_one_rank_alone_is_an_error() -> None:
    assert "module_full_state_dict" in run_ranks(2, one_alone)[0]


def dcp_save(folder: str) -> Tensor:
    module = shard_parameters(Net())
    module.never.requires_grad_(False)  # torch's own function wants a state of each that is trained
    optimizer = DTensorOptimizer(OPTIMIZERS["adamw"](module), module)
    steps(module, optimizer, 3)
    module_state, optimizer_state = get_state_dict(module, optimizer.optimizer)
    dcp.save({"module": module_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return whole(module)


def dcp_load(folder: str) -> tuple[Tensor, bool]:
    module = shard_parameters(Net())
    module.never.requires_grad_(False)
    optimizer = DTensorOptimizer(OPTIMIZERS["adamw"](module), module)
    module_state, optimizer_state = get_state_dict(module, optimizer.optimizer)
    state = {"module": module_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(module, optimizer.optimizer, model_state_dict=state["module"], optim_state_dict=state["optimizer"])
    loaded = whole(module)
    steps(module, optimizer, 1, first=3)
    state = optimizer.state_dict()
    return loaded, not state or all(float(each["step"]) == 4 for each in state["state"].values())


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchs_sharded_checkpoints_work_as_they_are(tmp_path: Path) -> None:
    saved = run_ranks(3, dcp_save, str(tmp_path))[0]
    for loaded, stepped in run_ranks(2, dcp_load, str(tmp_path)):
        assert torch.equal(loaded, saved)
        assert stepped


# Plain again


def plain_again(rank_0_only: bool) -> dict[str, Any]:
    module = shard_parameters(Net())
    optimizer = DTensorOptimizer(OPTIMIZERS["adam"](module), module)
    steps(module, optimizer, 2)
    module(batch(0))  # a forward alone leaves the root unsharded
    values = whole(module)
    returned = unshard_parameters(module, rank_0_only=rank_0_only)
    found: dict[str, Any] = {"returned": returned is module, "class": type(module).__name__}
    found["fsdp"] = any(isinstance(each, FSDPModule) for each in module.modules())
    found["plain"] = all(type(param) is nn.Parameter for param in module.parameters())
    found["keys"] = sorted(set(vars(module.layers[0])) ^ set(vars(Net().layers[0])))
    found["hooks"] = sum(
        len(hooks)
        for each in module.modules()
        for name, hooks in vars(each).items()
        if name.endswith("_hooks") and hooks
    )
    found["tied"] = module.head.weight is module.embedding.weight
    found["device"] = {param.device.type for param in module.parameters()}
    if found["device"] == {"cpu"}:
        found["same"] = torch.equal(whole(module), values)
        copied = pickle.loads(pickle.dumps(copy.deepcopy(module)))
        found["copied"] = torch.equal(copied(batch(0)), module(batch(0)))
        saved = io.BytesIO()
        torch.save(module, saved)
    if not rank_0_only:
        shard_parameters(module, policy=None)
        optimizer = DTensorOptimizer(OPTIMIZERS["adam"](module), module)
        steps(module, optimizer, 1)
        found["again"] = not torch.equal(whole(module), values)
    return found


PLAIN = {"returned": True, "class": "Net", "fsdp": False, "plain": True, "keys": [], "hooks": 0, "tied": True}


def test_an_unsharded_module_is_plain_and_can_be_sharded_again() -> None:
    assert (
        run_ranks(2, plain_again, False)
        == [PLAIN | {"device": {"cpu"}, "same": True, "copied": True, "again": True}] * 2
    )


def test_a_module_unsharded_on_rank_0_only_costs_the_others_nothing() -> None:
    first, second = run_ranks(2, plain_again, True)
    assert first == PLAIN | {"device": {"cpu"}, "same": True, "copied": True}
    assert second == PLAIN | {"device": {"meta"}}
