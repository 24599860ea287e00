"""A loop as Accelerate's users write it, and what tests of the plugins run in it on each rank.

It says nothing of any plugin; the oracle is the same loop with plain Accelerate, which is DDP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_plugins import Accelerator, PipePlugin, PowerSGDPlugin, ZeroPlugin
from accelerate_plugins.plugin import Plugin

MAKERS: dict[str, Callable[[], Plugin | None]] = {
    "none": lambda: None,
    "powersgd": lambda: PowerSGDPlugin(start_powerSGD_iter=2, min_compression_rate=1),
    "acp_sgd": lambda: PowerSGDPlugin(hook="acp_sgd", start_powerSGD_iter=2, min_compression_rate=1),
    "batched_powersgd": lambda: PowerSGDPlugin(hook="batched_powersgd", start_powerSGD_iter=2, min_compression_rate=1),
    "zero_1": lambda: ZeroPlugin(stage=1),  # all parameters in one bucket, and of the next in several
    "zero_2": lambda: ZeroPlugin(stage=2, bucket_cap_mb=0.002),
    "zero_3": lambda: ZeroPlugin(stage=3),
    "pipe": lambda: PipePlugin(chunks=3),
    "pipes 1": lambda: PipePlugin(pipeline_parallel_size=1),
    "pipes": lambda: PipePlugin(chunks=3, pipeline_parallel_size=2),
}
COMPRESSIONS = ["powersgd", "acp_sgd", "batched_powersgd"]
STAGES = ["zero_1", "zero_2", "zero_3"]
PLUGINS = ["powersgd", *STAGES]


class Net(nn.Module):
    """An MLP of several buckets, with statistics of a BatchNorm and a tied matrix."""

    def __init__(self, width: int = 32, tied: bool = False, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)))
        self.last = nn.Linear(width, 16 if tied else 4)
        if tied:
            self.last.weight = nn.Parameter(self.first.weight.detach().mT.contiguous())
            self.again = nn.Linear(width, 16, bias=False)
            self.again.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.layers(self.norm(self.first(x))))
        if hasattr(self, "again"):
            return (out + self.again(self.first(x)))[:, :4].contiguous()
        return out


def rows(n: int = 48) -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 16, generator=random), torch.randn(n, 4, generator=random))


def make(name: str, **arguments: Any) -> accelerate.Accelerator:
    plugin = MAKERS[name]()
    if plugin is None:
        return accelerate.Accelerator(cpu=True, **arguments)
    return Accelerator(plugin=plugin, cpu=True, **arguments)


@dataclass
class Run:
    """One training: everything that a loop has, prepared."""

    accelerator: Any
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any
    losses: list[float] = field(default_factory=list)  # means over the ranks, of each micro-step
    rates: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        name: str,
        *,
        net: Callable[[], nn.Module] = Net,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, 1e-2),
        n_rows: int = 48,
        batch: int = 4,
        shuffle: bool = False,
        decay: float = 0.9,
        **arguments: Any,
    ) -> Run:
        set_seed(0)
        seedable = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)  # or a resumed epoch is another one
        accelerator = make(name, dataloader_config=seedable, **arguments)
        model = net()
        made = optimizer(model.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: decay**step)
        loader = DataLoader(rows(n_rows), batch, shuffle=shuffle)
        return cls(accelerator, *accelerator.prepare(model, made, loader, schedule))

    def train(
        self,
        n: int | None = None,
        skip: int = 0,
        clip: float | None = None,
        value: float | None = None,
        save: dict[int, Path] | None = None,
    ) -> Run:
        """``n`` micro-steps, all of an epoch by default, after the first ``skip`` of it; saved where ``save`` says."""
        accelerator = self.accelerator
        loader = accelerator.skip_first_batches(self.loader, skip) if skip else self.loader
        for number, (x, y) in enumerate(loader):
            if number == n:
                break
            with accelerator.accumulate(self.model):
                loss = (self.model(x).float() - y).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip is not None:
                    self.norms.append(float(accelerator.clip_grad_norm_(self.model.parameters(), clip)))
                if accelerator.sync_gradients and value is not None:
                    accelerator.clip_grad_value_(self.model.parameters(), value)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            if save is not None and number + 1 in save:
                accelerator.save_state(str(save[number + 1]))
        return self

    def weights(self) -> Tensor:
        """Whole, on rank 0; empty on the others in stage 3."""
        state = self.accelerator.get_state_dict(self.model)
        return torch.cat([value.flatten().double() for value in state.values()]) if state else torch.empty(0)
