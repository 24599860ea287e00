"""What the tests of this folder run on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_distkit.core.compression import HOOKS, PowerSGDState, attach, powerSGD_hook

MANY_BUCKETS = {"bucket_cap_mb": 0.001}
LOW_RANK = ["powersgd", "batched_powersgd", "acp_sgd"]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def mlp(*widths: int, bias: bool = True, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(
    model: nn.Module,
    n_steps: int,
    width: int,
    *,
    seed: int = 100,
    lr: float = 0.1,
    before_step: Callable[[int], None] = lambda step: None,
) -> None:
    """SGD on random data, other data on each rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    random = torch.Generator().manual_seed(seed + dist.get_rank())
    for step in range(n_steps):
        x = torch.randn(8, width, generator=random)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        before_step(step)
        optimizer.step()


@contextmanager
def own_gradients(model: nn.Module) -> Iterator[dict[Tensor, Tensor]]:
    """What each parameter's gradient is on this rank before it is sent, filled during backward."""
    gradients: dict[Tensor, Tensor] = {}
    handles = [p.register_hook(lambda g, p=p: gradients.__setitem__(p, g.clone())) for p in model.parameters()]
    yield gradients
    for handle in handles:
        handle.remove()


def powersgd(
    model: nn.Module, hook: Any = powerSGD_hook, ddp: Any = None, **arguments: Any
) -> tuple[Any, PowerSGDState]:
    """The model under DDP with PowerSGD from step 2 on, and the state."""
    wrapped = DistributedDataParallel(model, **(ddp or {}))
    state = PowerSGDState(None, **{"start_powerSGD_iter": 2, "min_compression_rate": 1, **arguments})
    attach(wrapped, state, hook)
    return wrapped, state


def by_name(name: str, model: nn.Module, **ddp: Any) -> Any:
    """The model under DDP with the hook of that name, compressing from step 2 on."""
    arguments = {"start_powerSGD_iter": 2, "min_compression_rate": 1} if name in LOW_RANK else {}
    wrapped = DistributedDataParallel(model, **ddp)
    attach(wrapped, *HOOKS[name](wrapped.process_group, **arguments))
    return wrapped
