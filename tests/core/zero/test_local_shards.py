"""Stage 3: code that treats every element alike may work on what each rank holds, and ends as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from lightning_distkit.core.zero import ShardedCopy, local_shards, shard_parameters, without_weights
from lightning_distkit.core.zero.fsdp_state import reshard
from tests.core.zero.stage_3 import Net, batch, whole
from tests.ranks import run_ranks

AVERAGES: dict[str, dict[str, Any]] = {
    "equal": {},
    "exponential": {"avg_fn": get_ema_avg_fn(0.9), "use_buffers": True},
    "exponential, many at a time": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
}


def move(module: nn.Module, step: int) -> None:
    """Some change of all weights, whole or in shards: the same numbers for the same element."""
    with torch.no_grad():
        for param in module.parameters():
            value = param.full_tensor() if isinstance(param, DTensor) else param
            moved = value * (1 - 0.1 * step) + step * torch.arange(value.numel()).view_as(value).sin()
            if isinstance(param, DTensor):
                moved = torch.distributed.tensor.distribute_tensor(moved, param.device_mesh, param.placements)
            param.copy_(moved)


def averaged(name: str) -> tuple[dict[str, Any], dict[str, Any], list[bool]]:
    """What is saved, what one device saves, and whether what was loaded and what was made whole are that."""
    plain, module = Net(), Net()
    alone = AveragedModel(plain, **AVERAGES[name])
    empty = without_weights(module)
    shard_parameters(module)
    ours = AveragedModel(nn.Module(), **AVERAGES[name])
    copy = ShardedCopy(empty, module, takes_values=True)
    ours.module = empty
    n_held = sum(param.numel() for param in empty.parameters())
    for step in range(4):
        move(plain, step)
        move(module, step)
        alone.update_parameters(plain)
        with local_shards(module):
            ours.update_parameters(module)
    saved = ours.state_dict()
    for_all = [alone.state_dict()]
    dist.broadcast_object_list(for_all)
    with torch.no_grad():
        for param in empty.parameters():
            param.zero_()
    ours.load_state_dict(for_all[0])
    copy.make_whole()
    again = ours.state_dict()
    return (
        saved,
        for_all[0],
        [
            all(torch.equal(again[key], value) for key, value in for_all[0].items()),
            empty.head.weight is empty.embedding.weight,
            n_held == sum(param.to_local().numel() for param in module.parameters()),  # type: ignore[attr-defined]
        ],
    )


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_over_shards_is_that_of_one_device_to_the_bit(name: str) -> None:
    (saved, wanted, right), (others, _, others_right) = run_ranks(2, averaged, name)
    assert list(saved) == list(wanted)
    assert all(torch.equal(saved[key], value) for key, value in wanted.items())
    assert list(others) == ["n_averaged"]
    assert right == others_right == [True, True, True]


def kept_whole() -> tuple[bool, bool]:
    """A whole copy keeps its own values, and a reference to it is enough."""
    module = Net()
    own = Net()
    move(own, 1)
    shard_parameters(module)
    copy = ShardedCopy(own, module, takes_values=False)
    n_held = sum(param.numel() for param in own.parameters())
    copy.make_whole()
    wanted = Net()
    move(wanted, 1)
    return torch.equal(whole(own), whole(wanted)), n_held < whole(wanted).numel()


def test_a_whole_copy_keeps_its_own_values_and_this_ranks_shards_of_them() -> None:
    assert run_ranks(2, kept_whole) == [(True, True)] * 2


def looked_at() -> tuple[bool, bool, bool, Tensor, Tensor]:
    module, plain = shard_parameters(Net()), Net()
    with torch.no_grad():
        module(batch(0))  # leaves the root whole
    params = list(module.parameters())
    with local_shards(module):
        inside = list(module.parameters())
        are_plain = all(type(param) is nn.Parameter for param in inside)
        tied = module.head.weight is module.embedding.weight
        out = module(batch(0)).detach()  # a forward within it
        for param in inside:
            param.data.mul_(2)
    reshard(module)
    back = all(isinstance(param, DTensor) for param in module.parameters()) and len(params) == len(inside)
    with torch.no_grad():
        wanted = plain(batch(0))
        for param in plain.parameters():
            param.mul_(2)
    assert torch.allclose(whole(module), whole(plain))
    return are_plain, tied, back, out, wanted


def test_within_it_parameters_are_this_ranks_shards_in_the_same_memory() -> None:
    for are_plain, tied, back, out, wanted in run_ranks(2, looked_at):
        assert are_plain
        assert tied
        assert back
        assert torch.allclose(out, wanted, atol=1e-6)


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        for n, layer in enumerate(self.layers):
            if not (skip and n == 1):
                x = layer(x)
        return x


def prefetched_and_not_used() -> bool:
    module = shard_parameters(Skipping())
    x = torch.ones(2, 4)
    with torch.no_grad():
        module(x, skip=True)  # the first layer has begun to gather the second
    with local_shards(module):
        for param in module.parameters():
            param.data.zero_()
    with torch.no_grad():
        return bool((module(x, skip=False) == 0).all())


def test_what_was_gathered_ahead_and_not_used_is_not_used_later() -> None:
    assert run_ranks(2, prefetched_and_not_used) == [True, True]
