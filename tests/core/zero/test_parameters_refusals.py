"""Stage 3: wrong arguments are one error on every rank, before anything is sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_distkit.core.zero.dtensor_optimizer import DTensorOptimizer
from lightning_distkit.core.zero.parameters import shard_parameters
from tests.core.zero.stage_3 import (
    OPTIMIZERS,
    Net,
    trained,
)
from tests.ranks import run_ranks


def wrong_arguments() -> None:
    scalar = nn.Linear(2, 2)
    scalar.gain = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="gain has none"):
        shard_parameters(scalar)
    empty = nn.Linear(2, 2)
    empty.nothing = nn.Parameter(torch.empty(0, 3))
    with pytest.raises(ValueError, match=r"nothing is of shape \(0, 3\); freeze it, or leave it out"):
        shard_parameters(empty)
    empty.nothing.requires_grad_(False)
    shard_parameters(empty)(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match=r"must have one dtype.*0\.weight.*float32.*1\.weight.*float64"):
        shard_parameters(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), policy=None)
    with pytest.raises(ValueError, match="matches none of Net"):
        shard_parameters(Net(), policy=nn.Conv2d)
    with pytest.raises(ValueError, match="n_prefetched must be at least 0, got -1"):
        shard_parameters(Net(), n_prefetched=-1)
    module = shard_parameters(Net())
    with pytest.raises(ValueError, match="sharded already"):
        shard_parameters(module)
    with pytest.raises(TypeError, match="cannot shard LBFGS"):
        DTensorOptimizer(torch.optim.LBFGS(trained(module)), module)
    with pytest.raises(ValueError, match="as shard_parameters has left it"):
        DTensorOptimizer(OPTIMIZERS["sgd"](Net()), module)
    with pytest.raises(ValueError, match="matches none of"):  # on rank 1 alone
        shard_parameters(Net(), policy=nn.Conv2d if dist.get_rank() == 1 else nn.Linear)
    other = nn.Linear(2 + dist.get_rank(), 2)
    with pytest.raises(ValueError, match="must be made alike on every rank"):
        shard_parameters(other)


class Keeping(nn.Module):
    """Has its weight a second time, where nobody sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.kept = [self.linear.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kept[0] + self.linear(x)


def uses_what_was_replaced() -> None:
    module = shard_parameters(Keeping())
    loss = module(torch.ones(1, 2)).sum()
    with pytest.raises(RuntimeError, match=r"shape \(2, 2\) must be used as it is in its module now"):
        loss.backward()


def test_a_parameter_kept_from_before_is_an_error_and_not_silently_left_untrained() -> None:
    run_ranks(2, uses_what_was_replaced)


def test_wrong_arguments_are_errors_on_every_rank() -> None:
    run_ranks(2, wrong_arguments)
