"""Stage 2: ranks that did not make the same backwards are told so, and nobody gets a sum of two different ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_distkit.core.collectives import PeerError
from lightning_distkit.core.zero import ZeroOptimizer, shard_gradients
from tests.ranks import run_ranks


def made() -> tuple[nn.Module, ZeroOptimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    return module, shard_gradients(ZeroOptimizer(torch.optim.SGD, module.parameters(), lr=0.1, bucket_cap_mb=1e-5))


def backward(module: nn.Module) -> None:
    module(torch.ones(2, 3)).sum().backward()


def another_number(n_more: int) -> str:
    """Without a step, so that no message is of another kind than the one that it meets."""
    module, optimizer = made()
    assert len(optimizer.buckets) > 1
    with pytest.raises(RuntimeError) as error:  # noqa: PT012
        for _ in range(3):
            for _ in range(1 + (n_more if dist.get_rank() == 0 else 0)):
                backward(module)
            optimizer.zero_grad()
    assert not isinstance(error.value, PeerError)
    return str(error.value)


@pytest.mark.parametrize("n_more", [1, 2, 3])
def test_a_backward_more_on_one_rank_is_an_error_on_all_and_not_a_wrong_sum(n_more: int) -> None:
    for said in run_ranks(3, another_number, n_more):
        assert "the ranks did not make the same backwards" in said
        assert "accumulate within no_sync(), or use stage 1" in said


def steps_while_another_rank_reduces(clips: bool) -> str:
    module, optimizer = made()
    with pytest.raises(PeerError) as error:  # noqa: PT012
        for _ in range(2 if dist.get_rank() == 0 else 1):
            backward(module)
        if clips:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    return str(error.value)


@pytest.mark.parametrize("clips", [False, True])
def test_a_timeout_for_such_a_reason_names_it(clips: bool) -> None:
    first, second = run_ranks(2, steps_while_another_rank_reduces, clips, pg_timeout=2)
    for said in (first, second):
        assert "Or, as stage 2 reduces gradients in every backward" in said
        assert "this one has made 1" in said


def steps_alone() -> str:
    """In stage 1, where ranks may make as many backwards as they like."""
    module = nn.Linear(3, 3)
    optimizer = ZeroOptimizer(torch.optim.SGD, module.parameters(), lr=0.1)
    backward(module)
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(PeerError) as error:
        optimizer.step()
    return str(error.value)


def test_stage_1_does_not_name_what_cannot_be_its_reason() -> None:
    said, _ = run_ranks(2, steps_alone, pg_timeout=1)
    assert "was later than the process group's timeout" in said
    assert "stage 2" not in said


def without_a_backward(drop: str) -> list[list[float]]:
    """Rank 1 has nothing to do in the second step; and it calls zero_grad more often."""
    moved = []
    for stage in (1, 2):
        param = nn.Parameter(torch.zeros(4))
        optimizer = ZeroOptimizer(torch.optim.SGD, [param], lr=1.0)
        if stage == 2:
            shard_gradients(optimizer)
        for n in range(3):
            if n != 1 or dist.get_rank() == 0:
                (param * (n + 1)).sum().backward()
            optimizer.step()
            if drop == "by the optimizer":
                for _ in range(1 + dist.get_rank()):
                    optimizer.zero_grad()
            else:
                param.grad = None
        moved.append(param.detach().tolist())
    return moved


@pytest.mark.parametrize("drop", ["by the optimizer", "by the user"])
def test_a_rank_without_a_backward_takes_part_with_zeros(drop: str) -> None:
    for first, second in run_ranks(2, without_a_backward, drop):
        assert first == second == [-(1 + 2 / 2 + 3)] * 4


def stepped_twice() -> tuple[list[float], list[float]]:
    """With the gradients of one backward, as any optimizer may."""
    param, plain = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    optimizers = [shard_gradients(ZeroOptimizer(torch.optim.SGD, [param], lr=1.0)), torch.optim.SGD([plain], lr=1.0)]
    for each, optimizer in zip((param, plain), optimizers, strict=True):
        each.sum().backward()
        optimizer.step()
        optimizer.step()
        (2 * each).sum().backward()
        optimizer.step()
    return param.detach().tolist(), plain.detach().tolist()


def test_gradients_stay_until_they_are_dropped_however_often_they_are_stepped() -> None:
    for got, wanted in run_ranks(2, stepped_twice):
        assert got == wanted
