"""What an optimizer is not told, it finds: wrappers that reduce too, and buffers with a parameter's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_distkit.core.zero import ZeroOptimizer, shard_gradients, shard_parameters, unshard_parameters
from lightning_distkit.core.zero.holders import living_modules, modules_with
from tests.ranks import run_ranks

WAY_OUT = "Give the plain module and train it as it is, without a wrapper"


def zero(module: nn.Module, stage: int) -> ZeroOptimizer:
    optimizer = ZeroOptimizer(torch.optim.SGD, module.parameters(), lr=0.1)
    return shard_gradients(optimizer) if stage == 2 else optimizer


def step(forward: nn.Module, optimizer: ZeroOptimizer) -> str:
    try:
        forward(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def wrapped_by_ddp(stage: int) -> dict[str, str]:
    said = {}
    module = nn.Linear(3, 3)
    wrapper = DistributedDataParallel(module)
    optimizer = zero(wrapper, stage)
    said["before"] = step(wrapper, optimizer)
    said["by itself, the wrapper left alone"] = step(module, optimizer)
    with torch.no_grad():
        wrapper(torch.ones(2, 3))
    optimizer.release()
    said["when the optimizer is done with"] = step(wrapper, optimizer)

    module = nn.Linear(3, 3)
    optimizer = zero(module, stage)
    said["after"] = step(DistributedDataParallel(module), optimizer)
    return said


@pytest.mark.parametrize("stage", [1, 2])
def test_what_ddp_reduces_is_not_reduced_again(stage: int) -> None:
    for said in run_ranks(2, wrapped_by_ddp, stage):
        for when in ("before", "after"):
            assert "the gradients would be reduced twice" in said[when]
            assert WAY_OUT in said[when]
        assert said["by itself, the wrapper left alone"] == ""
        assert "DistributedDataParallel" not in said["when the optimizer is done with"]


def fsdp(use_orig_params: bool) -> nn.Module:
    return FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=use_orig_params, device_id=torch.device("cpu"))


def first_stage(module: nn.Module) -> None:
    zero(module, 1)


WRAPPED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "fully_shard": (lambda: fully_shard(nn.Linear(4, 4)), first_stage),
    "FSDP": (lambda: fsdp(use_orig_params=False), first_stage),
    "FSDP, original parameters": (lambda: fsdp(use_orig_params=True), first_stage),
    "stage 3 of DDP": (lambda: DistributedDataParallel(nn.Linear(4, 4)), shard_parameters),
    "stage 3 around DDP": (lambda: nn.Sequential(DistributedDataParallel(nn.Linear(4, 4))), shard_parameters),
    "stage 3 of FSDP": (lambda: fsdp(use_orig_params=True), shard_parameters),
}


def wrapped_by_others() -> dict[str, str]:
    said = {}
    for name, (make, shard) in WRAPPED.items():
        module = make()
        with pytest.raises(ValueError, match=r"must be plain") as error:
            shard(module)
        said[name] = str(error.value)
    return said


def test_what_is_sharded_or_wrapped_already_is_refused() -> None:
    for said in run_ranks(2, wrapped_by_others):
        assert "wrap the optimizer in DTensorOptimizer" in said.pop("fully_shard")
        for name, its in said.items():
            assert ("DistributedDataParallel" if "DDP" in name else "FullyShardedDataParallel") in its
            assert WAY_OUT in its


def inside_ddp() -> tuple[str, float]:
    module = nn.Linear(4, 4)
    wrapper = DistributedDataParallel(module)
    shard_parameters(module)
    with pytest.raises(RuntimeError) as error:
        wrapper(torch.ones(2, 4))
    unshard_parameters(module)
    return str(error.value), float(DistributedDataParallel(module)(torch.ones(2, 4)).sum().detach())


def test_what_is_inside_ddp_and_sharded_by_stage_3_is_refused_when_ddp_is_called() -> None:
    for said, _ in run_ranks(2, inside_ddp):
        assert WAY_OUT in said


class Aliased(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        weight = self.linear.weight.detach()
        buffers = {
            "whole": lambda: weight,
            "part": lambda: weight[1:2],
            "transposed": weight.t,
            "larger": self.larger,
            "none": weight.clone,
        }
        self.register_buffer("buffer", buffers[how]())

    def larger(self) -> Tensor:
        memory = torch.ones(64)
        self.linear.weight.data = memory[20:36].view(4, 4)
        return memory

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def aliased(how: str, stage: int) -> str:
    module = Aliased(how)
    try:
        if stage == 3:
            shard_parameters(module)
        else:
            zero(module, stage)
    except ValueError as error:
        return str(error)
    return ""


def aliased_in_all_ways(stage: int) -> dict[str, str]:
    return {how: aliased(how, stage) for how in ("whole", "part", "transposed", "larger", "none")}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_buffer_with_a_parameters_memory_is_refused(stage: int) -> None:
    for said in run_ranks(2, aliased_in_all_ways, stage):
        assert said.pop("none") == ""
        for its in said.values():
            assert "a buffer must not share memory with a parameter, but 'buffer' of Aliased does" in its
            assert "register a copy as the buffer" in its


def refused_on_one_rank() -> str:
    return aliased("whole" if dist.get_rank() == 0 else "none", 1)


def test_what_one_rank_refuses_all_do() -> None:
    first, second = run_ranks(2, refused_on_one_rank)
    assert "a buffer must not share memory" in first
    assert "(rank 0)" in second


def test_modules_are_found_from_the_leaf_to_the_root_and_no_others() -> None:
    leaf = nn.Linear(2, 2)
    root = nn.Sequential(nn.ModuleDict({"a": leaf}), nn.Linear(2, 2))
    found = modules_with([leaf.bias], living_modules())
    assert {id(each) for each in found} == {id(each) for each in (leaf, root, root[0])}
