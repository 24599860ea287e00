"""What somebody has broken stages 1 and 2 with, once: several optimizers, late changes, errors on the way."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.core.zero.test_gradients import STAGES, zero
from tests.ranks import run_ranks


def one_backward_of_two_optimizers(stage: int) -> list[float]:
    """Rank 0 comes to the first optimizer's parameters in mid-backward, rank 1 never to one of them."""
    a, u, b, v = (nn.Parameter(torch.ones(16)) for _ in range(4))
    made = [zero(params, stage, lr=1.0) for params in ([a, u], [b, v])]
    loss = (10 * b + 10 * v).sum() + (a.sum() if dist.get_rank() else (a + u).sum())
    loss.backward()
    for each in made:
        each.step()
    return [float(each.detach()[0]) for each in (a, u, b, v)]


@pytest.mark.parametrize("stage", STAGES)
def test_two_optimizers_may_share_a_backward_whatever_each_rank_uses(stage: int) -> None:
    assert run_ranks(2, one_backward_of_two_optimizers, stage) == [[0.0, 0.5, -9.0, -9.0]] * 2


def clipped_then_changed() -> str:
    param = nn.Parameter(torch.ones(4))
    optimizer = zero([param], 1)
    for _ in range(2):  # as ever, step by step
        (3 * param).sum().backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        param.grad = None
    (3 * param).sum().backward()
    optimizer.clip_grad_norm_(0.1)
    (3 * param).sum().backward()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value)


def test_in_stage_1_gradients_may_not_change_between_clipping_and_the_step() -> None:
    for said in run_ranks(2, clipped_then_changed):
        assert "gradients have changed after they were clipped" in said


def goes_on_after(stage: int) -> tuple[float, float]:
    """An error in backward on every rank, after which the module's gradients are dropped and not the optimizer's."""
    moved = []
    for fails in (True, False):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        optimizer = zero(module.parameters(), stage)
        if fails:
            hidden = module[0](torch.ones(2, 3))
            hidden.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                module[1](hidden).sum().backward()
            module.zero_grad()
        for _ in range(2):
            module(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            module.zero_grad()
        moved.append(float(module[0].weight.detach().sum()))
    return moved[0], moved[1]


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_after_an_error_if_the_modules_gradients_are_dropped(stage: int) -> None:
    got, wanted = run_ranks(2, goes_on_after, stage)[0]
    assert got == pytest.approx(wanted, rel=1e-6)
