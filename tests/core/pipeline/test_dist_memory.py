"""What a schedule promises to hold is what is held."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_distkit.core.pipeline.dist import DistributedPipe
from lightning_distkit.core.pipeline.schedules import SCHEDULES
from lightning_distkit.core.pipeline.timeline import simulate
from tests.core.pipeline.models import SCHEDULES_AND_STAGES, mlp
from tests.ranks import run_ranks


class Token:
    """Lives as long as the graph that it is in."""


class Counted(torch.autograd.Function):
    alive = 0
    most = 0

    @classmethod
    def ended(cls) -> None:
        cls.alive -= 1

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = Token()
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)
        weakref.finalize(ctx.token, Counted.ended)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Watched(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Counted.apply(super().forward(x)) if torch.is_grad_enabled() else super().forward(x)


def live(schedule: str, n_stages_per_rank: int, checkpoint: str, n_micro_batches: int) -> int:
    """The most graphs of a micro-batch through a stage that this rank had at once."""
    n_stages = dist.get_world_size() * n_stages_per_rank
    pipe = DistributedPipe(
        nn.Sequential(*(Watched(4, 4) for _ in range(n_stages))),
        n_micro_batches,
        checkpoint,
        balance=[1] * n_stages,
        schedule=schedule,
        n_stages_per_rank=n_stages_per_rank,
    )
    for _ in range(2):
        pipe.loss(torch.ones(n_micro_batches, 4), loss=torch.mean).backward()
    assert Counted.alive == 0  # without a garbage collection: no cycle holds a graph
    return Counted.most


@pytest.mark.parametrize(("schedule", "n_stages_per_rank"), SCHEDULES_AND_STAGES)
def test_live_activations_are_those_of_the_drawing(schedule: str, n_stages_per_rank: int) -> None:
    promised = simulate(SCHEDULES[schedule](4, 8, n_stages_per_rank)).live_activations
    assert run_ranks(4, live, schedule, n_stages_per_rank, "never", 8) == list(promised)


def test_1f1b_holds_p_then_fewer_down_to_one_micro_batch() -> None:
    assert run_ranks(4, live, "1f1b", 1, "never", 8) == [4, 3, 2, 1]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_with_checkpointing_one_graph_is_alive_at_a_time(schedule: str) -> None:
    assert run_ranks(2, live, schedule, 1, "always", 6) == [1, 1]


def unused_calls(checkpoint: str) -> tuple[int, int]:
    """Outputs that nobody differentiates, and calls that failed, leave nothing behind."""
    pipe = DistributedPipe(nn.Sequential(Watched(4, 4), Watched(4, 4)), 3, checkpoint, balance=[1, 1])
    x = torch.ones(6, 4)
    out = pipe(x)
    kept = weakref.ref(next(iter(out.grad_fn.next_functions[0][0].drain._call.kept.values())))
    held = Counted.alive
    gc.disable()
    del out
    assert kept() is None
    assert Counted.alive == 0
    gc.enable()
    with torch.no_grad():
        pipe(x)
    with pytest.raises(TypeError):
        pipe.loss(x, loss=lambda out: None)
    gc.collect()  # an exception's traceback holds frames
    return held, Counted.alive


@pytest.mark.parametrize(("checkpoint", "held"), [("never", 3), ("except_last", 1), ("always", 0)])
def test_a_call_without_backward_is_freed_with_its_output(checkpoint: str, held: int) -> None:
    assert run_ranks(2, unused_calls, checkpoint) == [(held, 0), (held, 0)]


def threads() -> tuple[int, int]:
    """Pipes that are gone take their threads with them."""
    import threading

    before = threading.active_count()
    pipe = DistributedPipe(mlp(4, 4, 4), 2)
    pipe(torch.ones(4, 4)).sum().backward()
    during = threading.active_count() - before
    del pipe
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("pipe-"):
            thread.join(5)
    return during, threading.active_count() - before


def test_the_threads_of_a_pipe_end_with_it() -> None:
    for during, after in run_ranks(2, threads):
        assert during > 0
        assert after == 0
