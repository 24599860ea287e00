"""An error on one rank is raised on all of them, at once, with its stage's name; and nothing hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_distkit.core.pipeline.dist import DistributedPipe
from lightning_distkit.core.pipeline.failure import Failure, StageError
from tests.core.pipeline.models import SCHEDULES_AND_STAGES, all_equal
from tests.ranks import RankDied, run_ranks


class Sore(nn.Module):
    """Passes values on, and does what it is armed with in the third micro-batch."""

    armed: str | None = None
    seconds = 0.0

    def __init__(self, error: type[BaseException] = ValueError) -> None:
        super().__init__()
        self.error = error
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        if self.n == 3:  # in the third micro-batch
            if self.armed == "forward":
                raise self.error("the forward is sore")
            if self.armed == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.armed == "sleep":
                time.sleep(self.seconds)
            if self.armed == "boundary":
                return None  # type: ignore[return-value]
        out = x * 1
        if self.armed == "backward" and out.requires_grad:
            out.register_hook(self.hook)
        if self.armed == "kill in backward" and out.requires_grad:
            out.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        return out

    def hook(self, grad: Tensor) -> None:
        self.n += 1
        if self.n >= 3:
            raise self.error("the backward is sore")

    def arm(self, how: str | None, seconds: float = 0.0) -> None:
        self.armed, self.seconds, self.n = how, seconds, 0


def sore_pipe(schedule: str = "gpipe", n_stages_per_rank: int = 1, **arguments: Any) -> tuple[DistributedPipe, Any]:
    """A pipe with a `Sore` in each stage, and a step of training with it."""
    n_stages = dist.get_world_size() * n_stages_per_rank
    torch.manual_seed(0)
    layers = [layer for _ in range(n_stages) for layer in (nn.Linear(4, 4), Sore())]
    arguments = {"checkpoint": "never", "timeout": 20, **arguments}
    pipe = DistributedPipe(
        nn.Sequential(*layers),
        4,
        balance=[2] * n_stages,
        schedule=schedule,
        n_stages_per_rank=n_stages_per_rank,
        **arguments,
    )

    def step(inside: bool = schedule != "gpipe") -> float:
        x = torch.ones(8, 4)
        value = pipe.loss(x, loss=lambda out: out.square().mean()) if inside else pipe(x).square().mean()
        value.backward()
        return value.item()

    return pipe, step


def arm(pipe: DistributedPipe, stage: int, how: str | None, seconds: float = 0.0) -> None:
    for name, layer in pipe.named_children():
        if isinstance(layer, Sore):
            layer.arm(how if int(name) // 2 == stage else None, seconds)


def raised(step: Callable[[], Any]) -> StageError:
    try:
        step()
    except StageError as error:
        return error
    raise AssertionError("nothing was raised")


def exceptions_everywhere(schedule: str, n_stages_per_rank: int) -> list[list[tuple[type, str, bool]]]:
    """Each stage fails in forward and in backward; after each the pipe works as if nothing had been."""
    pipe, step = sore_pipe(schedule, n_stages_per_rank)
    arm(pipe, -1, None)
    healthy = step()
    seen = []
    for how in ("forward", "backward", "boundary"):
        for stage in range(pipe.n_stages):
            arm(pipe, stage, how)
            begin = time.monotonic()
            error = raised(step)
            assert time.monotonic() - begin < 10
            assert error.failure.stage == stage
            assert isinstance(error, TypeError if how == "boundary" else ValueError)
            assert ("at least one tensor" if how == "boundary" else f"the {how} is sore") in str(error)
            assert str(error).startswith(f"stage {stage} (rank {stage % pipe.n_ranks})")
            assert "Traceback" in str(error)
            assert (error.__cause__ is not None) == (stage % pipe.n_ranks == pipe.rank)
            assert_clean(pipe)
            seen.append(str(error))
            arm(pipe, -1, None)
            assert step() == healthy
    return seen


def assert_clean(pipe: DistributedPipe) -> None:
    """No frame is left over."""
    transport = pipe._engine.transport
    assert transport is not None
    assert transport.is_clean()


@pytest.mark.parametrize(("schedule", "n_stages_per_rank"), SCHEDULES_AND_STAGES)
def test_an_exception_in_any_stage_is_raised_by_all_ranks_in_the_same_call_and_the_pipe_goes_on(
    schedule: str, n_stages_per_rank: int
) -> None:
    assert all_equal(run_ranks(3, exceptions_everywhere, schedule, n_stages_per_rank))


def failing_loss() -> list[str]:
    seen = []
    for schedule, n in SCHEDULES_AND_STAGES:
        pipe, step = sore_pipe(schedule, n)
        healthy = step(True)

        def fails(out: Tensor) -> Tensor:
            raise KeyError("no such class")

        error = raised(lambda pipe=pipe, fails=fails: pipe.loss(torch.ones(8, 4), loss=fails))
        assert isinstance(error, KeyError)
        assert error.failure.stage == pipe.n_stages - 1
        assert "no such class" in str(error)
        error = raised(lambda pipe=pipe: pipe.loss(torch.ones(8, 4), loss=lambda out: out))
        assert isinstance(error, TypeError)
        assert "without dimensions" in str(error)
        assert step(True) == healthy
        seen.append(str(error))
    return seen


def test_a_loss_function_that_raises_is_the_last_stages_failure_on_every_rank() -> None:
    assert all_equal(run_ranks(2, failing_loss))


def two_fail_at_once() -> str:
    """Stages 0 and 2 both raise in the same call, before either knows of the other."""
    pipe, step = sore_pipe()
    for layer in pipe.children():
        if isinstance(layer, Sore) and pipe.rank in (0, 2):
            layer.arm("forward")
            layer.error = [KeyError, TypeError, ValueError][pipe.rank]
    return str(raised(step))


def test_when_two_stages_raise_at_once_all_ranks_raise_the_same_one_of_the_two() -> None:
    assert all_equal(run_ranks(3, two_fail_at_once))


def interrupt() -> str:
    pipe, step = sore_pipe()
    for layer in pipe.children():
        if isinstance(layer, Sore) and pipe.rank == 1:
            layer.arm("forward")
            layer.error = KeyboardInterrupt
    try:
        step()
    except StageError as error:
        kind = f"{type(error).__name__} {error.failure.kind}"
    except KeyboardInterrupt:
        kind = "interrupted"
    arm(pipe, -1, None)
    step()
    return kind


def test_an_interrupt_stays_one_on_its_rank_and_is_an_error_on_the_others() -> None:
    assert run_ranks(2, interrupt) == ["StageError KeyboardInterrupt", "interrupted"]


def killed(rank: int, schedule: str, how: str) -> tuple[str, str, float]:
    pipe, step = sore_pipe(schedule, timeout=30)
    arm(pipe, -1, None)
    step()
    arm(pipe, rank, how)
    begin = time.monotonic()
    first = raised(step)
    took = time.monotonic() - begin
    again = raised(step)
    assert again.failure == first.failure
    assert first.failure.is_fatal
    return str(first), str(again), took


@pytest.mark.parametrize(("schedule", "how"), [("gpipe", "kill"), ("1f1b", "kill in backward")])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_when_a_rank_is_killed_the_others_raise_at_once_and_name_it(rank: int, schedule: str, how: str) -> None:
    outcomes = run_ranks(4, killed, rank, schedule, how, return_exceptions=True, timeout=25)
    assert isinstance(outcomes.pop(rank), RankDied)
    for outcome in outcomes:
        assert not isinstance(outcome, BaseException), outcome
        first, _, took = outcome
        assert f"stage {rank} (rank {rank}) is lost" in first
        assert took < 10  # the timeout is 30 s
    assert all_equal([first for first, _, _ in outcomes])


def asleep(rank: int, schedule: str, timeout: float) -> tuple[str, float]:
    pipe, step = sore_pipe(schedule, timeout=timeout)
    arm(pipe, -1, None)
    step()
    arm(pipe, rank, "sleep", 2 * timeout)
    begin = time.monotonic()
    error = raised(step)
    took = time.monotonic() - begin
    raised(step)
    assert time.monotonic() - begin - took < 0.5  # at once
    if pipe.rank != rank:
        time.sleep(1.5 * timeout)  # or the one who sleeps would be told by the end of the others
    return str(error), took


@pytest.mark.parametrize(("rank", "schedule"), [(0, "1f1b"), (1, "gpipe"), (3, "1f1b")])
def test_when_a_stage_sleeps_past_the_timeout_the_others_raise_at_the_timeout_and_name_it(
    rank: int, schedule: str
) -> None:
    timeout = 2.0
    outcomes = run_ranks(4, asleep, rank, schedule, timeout, timeout=40)
    for number, (error, took) in enumerate(outcomes):
        assert f"stage {rank} (rank {rank}) is late" in error, error
        if number != rank:
            assert timeout - 0.2 < took < 2 * timeout
    assert all_equal([error.split(":")[0] for error, _ in outcomes])


def other_calls(how: str) -> str:
    pipe, step = sore_pipe(timeout=20)
    step()
    x = torch.ones(8, 4)
    rank = pipe.rank

    def call() -> None:
        if how == "rows":
            pipe(x[: 8 if rank == 0 else 3])
        elif how == "grad":
            with torch.set_grad_enabled(rank == 0):
                pipe.loss(x, loss=torch.sum)
        elif how == "order":
            first, second = pipe(x), pipe(2 * x)
            for out in [first, second] if rank == 0 else [second, first]:
                out.sum().backward()
        elif how == "input gradients":
            pipe(x.requires_grad_(rank == 0)).sum().backward()
        elif how == "kind":
            if rank == 0:
                pipe.loss(x, loss=torch.sum)
            else:
                pipe(x)

    begin = time.monotonic()
    error = raised(call)
    assert time.monotonic() - begin < 5
    assert error.failure.is_fatal
    return str(error)


@pytest.mark.parametrize("how", ["rows", "grad", "order", "input gradients", "kind"])
def test_ranks_that_make_different_calls_are_told_so(how: str) -> None:
    errors = run_ranks(2, other_calls, how)
    assert "must make the same calls" in errors[0]
    assert all_equal(errors)


def refused_on_one() -> str:
    pipe, step = sore_pipe(timeout=20)
    step()
    begin = time.monotonic()
    try:
        pipe(torch.ones(8, 4) if pipe.rank else "no tensor")
    except (TypeError, StageError) as error:
        assert time.monotonic() - begin < 5
        return str(error)
    raise AssertionError


def test_inputs_that_one_rank_alone_refuses_do_not_leave_the_others_waiting() -> None:
    for error in run_ranks(3, refused_on_one):
        assert "at least one tensor" in error


def refused_by_all() -> list[str]:
    pipe, step = sore_pipe()
    healthy, errors = step(), []
    bad: list[Any] = [
        ((), {}, TypeError),
        ((3, "x"), {}, TypeError),
        ((torch.ones(8, 4), torch.ones(7, 4)), {}, ValueError),
    ]
    for args, kwargs, kind in bad:
        with pytest.raises(kind) as info:
            pipe(*args, **kwargs)
        errors.append(str(info.value))
    with pytest.raises(ValueError, match="positive together") as info:
        pipe.loss(torch.ones(8, 4), loss=torch.sum, weight=lambda: 0)
    assert step() == healthy  # nothing was sent, and the pipe goes on
    return errors


def test_wrong_inputs_are_refused_on_every_rank_before_anything_is_sent() -> None:
    assert all_equal(run_ranks(2, refused_by_all))


def test_a_stage_error_keeps_the_type_of_the_original_where_that_is_pythons_own_and_is_picklable() -> None:
    import pickle

    for kind in ("ValueError", "TypeError", "KeyError", "ZeroDivisionError", "OSError", "NotABuiltin", "RuntimeError"):
        error = Failure("text", kind, 1, 1).error()
        assert isinstance(error, StageError)
        copied = pickle.loads(pickle.dumps(error))
        assert type(copied) is type(error)
        assert copied.failure == error.failure
        assert "text" in str(copied)
    assert isinstance(Failure("", "ValueError").error(), ValueError)
    assert isinstance(Failure("", "KeyError").error(), KeyError)
    assert not isinstance(Failure("", "KeyboardInterrupt").error(), KeyboardInterrupt)
