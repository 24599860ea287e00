"""Stage 3: layers frozen and unfrozen between steps are trained as in one process on all ranks' batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_distkit.core.zero import DTensorOptimizer, shard_parameters
from tests.core.compression.bodies import distance
from tests.core.zero.stage_3 import whole
from tests.ranks import run_ranks


class Layered(nn.Module):
    """Blocks, and a root with parameters of its own, of which parts are frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(5, 5)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def switch(module: Any, optimizer: Any, step: int) -> None:
    """A whole block, half a block and the root's own are unfrozen, and one is frozen again."""
    late = {2: [*module.layers[0].parameters()], 4: [*module.layers[1][2].parameters(), *module.stem.parameters()]}
    if step in late:
        for param in late[step]:
            param.requires_grad_(True)
        optimizer.add_param_group({"params": late[step], "lr": 5e-3})
    if step == 6:
        module.layers[2].requires_grad_(False)


def trained(module: Any, ours: bool, policy: MixedPrecisionPolicy | None, optimizer_class: Any) -> Tensor:
    for part in (module.stem, module.layers[0], module.layers[1][2]):
        part.requires_grad_(False)
    if ours:
        shard_parameters(module, policy=nn.Sequential, mixed_precision=policy)
    optimizer = optimizer_class([param for param in module.parameters() if param.requires_grad], lr=1e-2)
    if ours:
        optimizer = DTensorOptimizer(optimizer, module)
    for step in range(8):
        switch(module, optimizer, step)
        optimizer.zero_grad()
        mine = [batch(step, dist.get_rank())] if ours else [batch(step, rank) for rank in range(dist.get_world_size())]
        module(torch.cat(mine)).square().mean().backward()
        if ours:
            assert all(param.grad.dtype == param.dtype for param in module.parameters() if param.grad is not None)
        optimizer.step()
    return whole(module)


def ours_and_one_process(policy: MixedPrecisionPolicy | None, optimizer_class: Any) -> float:
    begin = whole(Layered())
    ours = trained(Layered(), True, policy, optimizer_class)
    return distance(ours - begin, trained(Layered(), False, policy, optimizer_class) - begin)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adafactor])
def test_layers_unfrozen_on_the_way_equal_one_process_with_all_batches(optimizer_class: Any) -> None:
    for off in run_ranks(3, ours_and_one_process, None, optimizer_class):
        assert off < 1e-5


def test_the_gradients_of_layers_unfrozen_on_the_way_are_of_the_parameters_dtype() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for off in run_ranks(2, ours_and_one_process, policy, torch.optim.SGD):
        assert off < 0.05


def unfrozen_of_another_dtype() -> str:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16().requires_grad_(False))
    shard_parameters(module, policy=None)
    module[1].requires_grad_(True)
    with pytest.raises(ValueError, match="must have one dtype") as error:
        module(torch.ones(2, 4))
    return str(error.value)


def test_unfreezing_what_has_another_dtype_is_an_error_that_says_so() -> None:
    for said in run_ranks(2, unfrozen_of_another_dtype):
        assert "'the root' are torch.bfloat16 and torch.float32" in said
