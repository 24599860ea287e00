"""A training that plain DDP and each stage of ZeRO can do, to compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_distkit.core.zero import ZeroOptimizer, shard_gradients


class Net(nn.Module):
    """Sizes that no world size divides, a tied weight, a frozen one, a scalar, and channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.hidden = nn.Linear(45, 7)
        self.again = nn.Linear(7, 7, bias=False)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.again.weight
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.hidden(self.conv(x).flatten(1)))
        x = torch.tanh(self.tied(torch.tanh(self.again(x))))
        return self.out(self.frozen(x) * self.scale)


class Matrices(nn.Module):
    """Matrices only, for Muon."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(11, 13, bias=False)
        self.second = nn.Linear(13, 6, bias=False)
        self.third = nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only, and groups that are interleaved in the module's order."""
    params = list(module.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), 1e-2),
    "adamw": lambda m: torch.optim.AdamW(two_groups(m), 1e-2),
    "adamw_fused": lambda m: torch.optim.AdamW(two_groups(m), 1e-2, fused=True),
    "adamw_foreach": lambda m: torch.optim.AdamW(two_groups(m), 1e-2, foreach=True, amsgrad=True),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), 1e-2),
    "muon": lambda m: torch.optim.Muon(m.parameters(), 1e-2, weight_decay=0.1),
}


def module_for(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Matrices() if name == "muon" else Net()


def batches(module: nn.Module, n: int, seed: int = 1) -> Iterator[Tensor]:
    """This rank's."""
    generator = torch.Generator().manual_seed(seed + 1000 * dist.get_rank())
    for _ in range(n):
        shape = (4, 11) if isinstance(module, Matrices) else (4, 3, 5, 5)
        yield torch.randn(shape, generator=generator)


def train(
    name: str, stage: int, n_steps: int = 20, *, accumulate: int = 1, clip: float | None = None, **arguments: Any
) -> dict[str, Tensor]:
    """The parameters after so many steps, the same on every rank; stage 0 is DDP."""
    module = module_for(name)
    optimizer = OPTIMIZERS[name](module)
    forward, zero = sharded(module, optimizer, stage, **arguments)
    for n, batch in enumerate(batches(module, n_steps * accumulate)):
        is_last = (n + 1) % accumulate == 0
        with nullcontext() if stage or is_last else forward.no_sync():  # type: ignore[operator]
            (forward(batch).square().mean() / accumulate).backward()
        if not is_last:
            continue
        if clip is not None:
            if stage == 0:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            else:
                zero.clip_grad_norm_(clip)  # type: ignore[union-attr]
        (zero or optimizer).step()
        (zero or optimizer).zero_grad()
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


def sharded(
    module: nn.Module, optimizer: Optimizer, stage: int, **arguments: Any
) -> tuple[nn.Module, ZeroOptimizer | None]:
    if stage == 0:
        return DistributedDataParallel(module), None
    zero = ZeroOptimizer(optimizer, group=dist.group.WORLD, **arguments)
    return module, shard_gradients(zero) if stage == 2 else zero
