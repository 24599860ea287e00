"""Stage 3: parameters that are unused, tied or frozen, and buffers, do as under DDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_distkit.core.zero.dtensor_optimizer import DTensorOptimizer
from lightning_distkit.core.zero.module_state import module_full_state_dict
from lightning_distkit.core.zero.parameters import shard_parameters, unshard_parameters
from lightning_distkit.core.zero.sharding import sharding_of
from tests.core.compression.bodies import distance
from tests.core.zero.stage_3 import (
    whole,
)
from tests.ranks import run_ranks


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Branch() for _ in range(2))

    def forward(self, x: Tensor, use_b: bool) -> Tensor:
        for block in self.blocks:
            x = block(x, use_b)
        return x


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, use_b: bool) -> Tensor:
        x = self.a(x).tanh()
        return self.b(x) if use_b else x


def unused_here() -> float:
    """Each block's b is used on rank 1 in even steps, on none in odd ones; where weight decay matters."""
    results = []
    for ours in (False, True):
        module: Any = Branches()
        module = shard_parameters(module) if ours else DistributedDataParallel(module, find_unused_parameters=True)
        optimizer: Any = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
        optimizer = DTensorOptimizer(optimizer, module) if ours else optimizer
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            module(x, dist.get_rank() == 1 and step % 2 == 0).square().mean().backward()
            optimizer.step()
        results.append(whole(module))
    return distance(*results)


def test_parameters_unused_on_one_rank_or_on_all_equal_ddps() -> None:
    assert max(run_ranks(2, unused_here)) < 1e-6


class TiedBlocks(nn.Module):
    """Two layers that share with the root, and two that share with each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.layers[1].weight = self.first.weight
        self.layers[3].weight = self.layers[2].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def tied() -> tuple[float, list[str], list[str], bool]:
    results = []
    for ours in (False, True):
        module: Any = TiedBlocks()
        module = shard_parameters(module) if ours else DistributedDataParallel(module)
        optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer = DTensorOptimizer(optimizer, module) if ours else optimizer
        for step in range(5):
            optimizer.zero_grad()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            module(x).square().mean().backward()
            optimizer.step()
        results.append(whole(module))
    sharding = sharding_of(module)
    assert sharding is not None
    state = module_full_state_dict(module)
    unshard_parameters(module)
    still = module.layers[1].weight is module.first.weight and module.layers[3].weight is module.layers[2].weight
    return distance(*results), list(sharding.blocks), list(state), still


def test_tied_parameters_stay_tied_wherever_they_are() -> None:
    for rank, (off, blocks, names, still) in enumerate(run_ranks(2, tied)):
        assert off < 1e-6
        assert blocks == ["layers.0", "layers.1", "layers.4"]
        assert names == (list(TiedBlocks().state_dict()) if rank == 0 else [])
        assert still


def buffers() -> list[Tensor]:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    shard_parameters(module)
    x = torch.full((3, 4), float(dist.get_rank())) + torch.eye(3, 4)
    module(x).sum().backward()
    return [module[1].running_mean.clone(), module_full_state_dict(module).get("1.running_mean", torch.empty(0))]


def test_buffers_stay_those_of_each_rank() -> None:
    (first, saved), (second, _) = run_ranks(2, buffers)
    assert not torch.equal(first, second)
    assert torch.equal(saved, first)
