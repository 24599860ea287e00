"""A module with all that makes sharding hard, and a training that plain torch, DDP and stage 3 can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 7  # divides by no world size here; the last ranks of 4 have an empty shard of what has 1 to 3 rows


class Net(nn.Module):
    """Repeated layers, odd sizes, a parameter of one element, a frozen one, one that is tied, and one unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, WIDTH)) for _ in range(3)
        )
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.never = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("shift", torch.tensor([0.5]))

    def forward(self, i: Tensor) -> Tensor:
        x = self.embedding(i)
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.head(self.frozen(x) * self.gain + self.shift.to(x.dtype))
        return out


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Interleaved, as weight-decay groups are."""
    params = trained(module)
    return [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in trained(module) if param.ndim == 2]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda module: torch.optim.SGD(trained(module), lr=0.1, momentum=0.9),
    "adam": lambda module: torch.optim.Adam(trained(module), lr=1e-2),
    "adamw": lambda module: torch.optim.AdamW(two_groups(module), lr=1e-2),
    "adamw_foreach": lambda module: torch.optim.AdamW(two_groups(module), lr=1e-2, foreach=True),
    "adamw_fused": lambda module: torch.optim.AdamW(two_groups(module), lr=1e-2, fused=True),
    "adagrad": lambda module: torch.optim.Adagrad(trained(module), lr=1e-2),
    "muon": lambda module: torch.optim.Muon(matrices(module), lr=1e-2),
    "adafactor": lambda module: torch.optim.Adafactor(trained(module), lr=1e-2),
}


def batch(step: int) -> Tensor:
    """Of this rank and step."""
    return torch.randint(11, (6,), generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def flat(params: list[Tensor]) -> Tensor:
    return torch.cat([param.flatten() for param in params])


def whole(module: nn.Module) -> Tensor:
    """All parameters whole, in order, without a collective of ours."""
    return flat([p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in module.parameters()])


def steps(
    module: nn.Module,
    optimizer: Any,
    n_steps: int,
    *,
    first: int = 0,
    n_micro_steps: int = 1,
    no_sync: Any = None,
    clip: Any = None,
) -> list[float]:
    norms = []
    for step in range(first, first + n_steps):
        optimizer.zero_grad()
        for micro_step in range(n_micro_steps):
            i = batch(step * n_micro_steps + micro_step)
            if no_sync is not None and micro_step < n_micro_steps - 1:
                with no_sync():
                    nn.functional.cross_entropy(module(i), i.flip(0)).backward()
            else:
                nn.functional.cross_entropy(module(i), i.flip(0)).backward()
        if clip is not None:
            norms.append(float(clip(0.05)))
        optimizer.step()
    return norms


def assert_same_state(ours: Any, plains: Any, rtol: float) -> None:
    """In the plain form: the same ids, groups, keys and shapes, and values that are close."""
    assert ours["param_groups"] == plains["param_groups"]
    assert list(ours["state"]) == list(plains["state"])
    for number, state in plains["state"].items():
        assert list(ours["state"][number]) == list(state)
        for key, value in state.items():
            torch.testing.assert_close(ours["state"][number][key], value, rtol=rtol, atol=1e-7)
