"""The models that the pipeline benchmarks cut into stages, and the pipes that run them: ours and torch's own.

A step is forward, loss and backward of one batch, the gradients dropped before. There is no optimizer in it: in any
pipe each rank steps its own parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from benchmarks.models import mlp
from lightning_distkit.core.pipeline import DistributedPipe

N_TOKENS, WIDTH, LENGTH = 2048, 256, 64
N_BLOCKS = 12  # that cost the same, in each model
TORCHS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Step(Protocol):
    """One of those compared."""

    module: nn.Module  # this rank's

    def __call__(self) -> Tensor | None:
        """Take a step; its loss, on a rank that has it."""


class Embedding(nn.Module):
    """Tokens (batch, length) to (batch, length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(N_TOKENS, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens) + self.positions
        return embedded


def transformer() -> nn.Sequential:
    """Embedding, 11 layers, output layer: that one and its loss cost about as much as a layer, the embedding little."""
    layers = [
        nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(N_BLOCKS - 1)
    ]
    return nn.Sequential(Embedding(), *layers, nn.Linear(WIDTH, N_TOKENS))


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), tokens.flatten())


@dataclass(frozen=True)
class Model:
    """What is trained, on one batch of made-up data."""

    make: Callable[[], nn.Sequential]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    ends: tuple[int, ...]  # of each block, in layers

    def balance(self, n_stages: int) -> list[int]:
        """The number of layers of each stage: as many blocks in each."""
        if N_BLOCKS % n_stages:
            raise ValueError(f"stages must share out {N_BLOCKS} blocks, got {n_stages}; use 2, 3, 4, 6 or 12")
        ends = [0, *self.ends[N_BLOCKS // n_stages - 1 :: N_BLOCKS // n_stages]]
        return [end - begin for begin, end in pairwise(ends)]


MODELS = {
    "mlp": Model(
        mlp,
        lambda: (torch.randn(512, 1024), torch.randn(512, 1024)),
        F.mse_loss,
        (*range(2, 24, 2), 23),
    ),
    "transformer": Model(
        transformer,
        lambda: (torch.randint(N_TOKENS, (32, LENGTH)), torch.randint(N_TOKENS, (32, LENGTH))),
        cross_entropy,
        tuple(range(2, 14)),
    ),
}


class OneProcess:
    """The whole model and the whole batch on rank 0; the others have nothing to do."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.module, (self.inputs, self.wanted) = made(model)

    def __call__(self) -> Tensor | None:
        if dist.get_rank() > 0:
            return None
        self.module.zero_grad()
        loss = self.model.loss(self.module(self.inputs), self.wanted)
        loss.backward()
        return loss.detach()


def made(model: Model) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    """The same on every rank and in every arm."""
    torch.manual_seed(0)
    return model.make(), model.batch()


class Torchs:
    """torch.distributed.pipelining, a stage a rank."""

    def __init__(self, model: Model, schedule: str, chunks: int) -> None:
        module, (self.inputs, self.wanted) = made(model)
        self.rank, n_ranks = dist.get_rank(), dist.get_world_size()
        self.is_last = self.rank == n_ranks - 1
        ends = [0, *accumulate(model.balance(n_ranks))]
        self.module = module[ends[self.rank] : ends[self.rank + 1]]
        stage = PipelineStage(self.module, self.rank, n_ranks, torch.device("cpu"))
        self.pipe = TORCHS[schedule](stage, chunks, loss_fn=model.loss)

    def __call__(self) -> Tensor | None:
        self.module.zero_grad()
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": self.wanted, "losses": losses} if self.is_last else {}
        self.pipe.step(*([self.inputs] if self.rank == 0 else []), **given)
        return torch.stack(losses).mean().detach() if losses else None


class Ours:
    """`DistributedPipe`, a step of which also tells where its time went.

    Args:
        inside: the pipe takes the loss of each micro-batch; else the caller takes that of the whole output.
    """

    def __init__(
        self,
        model: Model,
        schedule: str,
        chunks: int,
        *,
        inside: bool,
        checkpoint: str = "never",
        n_stages_per_rank: int = 1,
        outputs: str = "all",
    ) -> None:
        self.model, self.inside = model, inside
        module, (self.inputs, self.wanted) = made(model)
        self.module = DistributedPipe(
            module,
            chunks,
            checkpoint,
            balance=model.balance(dist.get_world_size() * n_stages_per_rank),
            schedule=schedule,
            n_stages_per_rank=n_stages_per_rank,
            outputs=outputs,
        )
        self.has_output = outputs == "all" or self.module.is_last
        self.neither = 0.0  # seconds of the last step in which this rank's pipe neither computed nor waited for another

    def __call__(self) -> Tensor:
        self.module.zero_grad()
        before, begin, outside = self._busy(), perf_counter(), 0.0
        if self.inside:
            loss = self.module.loss(self.inputs, loss=self.model.loss, targets=(self.wanted,))
            loss.backward()
        else:
            times = []
            output = self.module(self.inputs)
            output.register_hook(lambda _: times.append(perf_counter()))  # when the loss's own backward is done
            times.append(perf_counter())
            loss = self.model.loss(output, self.wanted) if self.has_output else output
            del output
            loss.backward()
            outside = times[1] - times[0]
        self.neither = perf_counter() - begin - outside - (self._busy() - before)
        return loss.detach()

    def _busy(self) -> float:
        seconds = self.module.seconds
        return seconds["computed"] + seconds["waited"]
