"""Stage 3: which gradients there are follows what the user does with them, as without ZeRO."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_distkit.core.zero import DTensorOptimizer, shard_parameters
from tests.ranks import run_ranks


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, use: str) -> Tensor:
        return sum((getattr(self, name).sum() for name in use), torch.zeros(()))


def step_twice_with_one_gradient(module: nn.Module, optimizer: Optimizer) -> None:
    module("ab").backward()
    optimizer.step()
    optimizer.step()


def keep_what_was_not_zeroed(module: nn.Module, optimizer: Optimizer) -> None:
    module("ab").backward()
    optimizer.step()
    module("a").backward()
    optimizer.step()


def drop_by_the_module(module: nn.Module, optimizer: Optimizer) -> None:
    module("ab").backward()
    module.zero_grad()
    module("a").backward()
    optimizer.step()


def look_between(module: nn.Module, optimizer: Optimizer) -> None:
    """A forward without backward between backward and step must not leave what is then out of date."""
    module("ab").backward()
    with torch.no_grad():
        module("ab")
    optimizer.step()
    optimizer.zero_grad()
    (module("ab") ** 2).backward()  # its gradient depends on the parameters
    optimizer.step()


def moved(way: Callable[[nn.Module, Optimizer], None]) -> tuple[list[Tensor], list[Tensor]]:
    plain, module = Two(), shard_parameters(Two(), policy=None)
    way(plain, torch.optim.AdamW(plain.parameters(), 0.1, weight_decay=0.5))
    way(module, DTensorOptimizer(torch.optim.AdamW(module.parameters(), 0.1, weight_decay=0.5), module))
    return [p.full_tensor().detach() for p in module.parameters()], [p.detach() for p in plain.parameters()]


@pytest.mark.parametrize(
    "way", [step_twice_with_one_gradient, keep_what_was_not_zeroed, drop_by_the_module, look_between]
)
def test_gradients_live_as_long_as_without_zero(way: Callable[[nn.Module, Optimizer], None]) -> None:
    for got, wanted in run_ranks(2, moved, way):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)
