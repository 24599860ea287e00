"""What is measured is what a direct computation finds, for every hook of the table."""

from __future__ import annotations

from math import isqrt

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distkit.core.compression import HOOKS, PowerSGDState
from lightning_distkit.core.compression.measurement import total
from tests.core.compression.bodies import LOW_RANK, by_name, flat, mlp, own_gradients, train
from tests.ranks import run_ranks

R = 2
Squares = dict[str, tuple[float, float, float]]


def projected(wanted: Tensor, approximation: Tensor, *, rows: bool) -> Tensor:
    """What is left of a matrix in the column space, or the row space, of an approximation of rank R."""
    u, _, vh = torch.linalg.svd(approximation.double())
    return wanted.double() @ vh[:R].mT @ vh[:R] if rows else u[:, :R] @ u[:, :R].mT @ wanted.double()


def measured(hook: str) -> tuple[Squares, Squares, Squares, float]:
    """By name: |M|², |M - C|², |E|² as measured and computed directly, and as summed over ranks; the ledger's ratio."""
    net = mlp(20, 30, 30, 10)
    model = by_name(hook, net)
    state = model._comm_hooks[0][1]
    if not hasattr(state, "measure"):
        pytest.fail("the hook of the table has a state of ours")
    if isinstance(state, PowerSGDState):
        state.matrix_approximation_rank = R
    train(model, 6, 20)
    errors = state.error_dict if isinstance(state, PowerSGDState) else {}
    takes_rows = hook == "acp_sgd" and state.factors.turn == "p"
    state.measure()
    with own_gradients(net) as gradients:
        train(model, 1, 20, seed=7)

    direct: Squares = {}
    names = {parameter: name for name, parameter in net.named_parameters()}
    after = state.error_dict if isinstance(state, PowerSGDState) else {}
    numels = {parameter: parameter.numel() for parameter in net.parameters()}
    if hook == "batched_powersgd":
        [bucket] = state.errors._errors_of_buckets
        square = torch.cat([errors[p] for p in bucket])  # with the padding, which has an error, too
        numel, side = sum(numels[p] for p in bucket), isqrt(len(square))
        square[:numel] += torch.cat([gradients[p].flatten() for p in bucket])
        wanted, mean = square[:numel], square - torch.cat([after[p] for p in bucket])
        mean[:numel] = torch.cat([p.grad.flatten() for p in bucket])
        left = square.double() - projected(square.view(side, side), mean.view(side, side), rows=False).flatten()
        parts = left[:numel].split([numels[p] for p in bucket])
        for parameter, part, whole in zip(bucket, parts, wanted.split([numels[p] for p in bucket]), strict=True):
            error = after[parameter][: numels[parameter]]
            direct[names[parameter]] = tuple(float(t.double().square().sum()) for t in (whole, part, error))
    else:
        for parameter, name in names.items():
            wanted = gradients[parameter] + errors.get(parameter, torch.zeros(()))
            if hook in ("fp16", "bf16"):
                dtype = torch.float16 if hook == "fp16" else torch.bfloat16
                stands_for = (wanted.to(dtype) / 2).float() * 2
            elif hook == "noop":
                stands_for = torch.zeros_like(wanted)
            elif parameter in after:
                stands_for = projected(wanted, parameter.grad, rows=takes_rows)
            else:
                stands_for = wanted
            error = after.get(parameter, torch.zeros(()))
            squares = (wanted, wanted - stands_for, error)
            direct[name] = tuple(float(each.double().square().sum()) for each in squares)
    layers = state.last_measurement.layers
    ours = {names[p]: (layer.wanted, layer.left_out, layer.error) for p, layer in layers.items()}
    over_ranks = state.last_measurement.over_ranks(state.group)
    summed = {names[p]: (layer.wanted, layer.left_out, layer.error) for p, layer in over_ranks.items()}
    counts = state.ledger.last_step
    assert counts.wanted == pytest.approx(total(layers.values()).wanted)
    return ours, direct, summed, (counts.left_out / counts.wanted) ** 0.5


@pytest.mark.parametrize("hook", HOOKS)
def test_the_relative_error_is_that_of_a_direct_computation(hook: str) -> None:
    results = run_ranks(2, measured, hook)
    for ours, direct, _, ratio in results:
        assert ours.keys() == direct.keys()
        for name, squares in direct.items():
            assert [x**0.5 for x in ours[name]] == pytest.approx([x**0.5 for x in squares], rel=1e-5, abs=1e-9)
        left, wanted = (sum(squares[i] for squares in direct.values()) for i in (1, 0))
        assert ratio == pytest.approx((left / wanted) ** 0.5, rel=1e-5, abs=1e-9)
        low, high = {"allreduce": (0, 0), "noop": (1, 1)}.get(hook, (1e-5, 0.99))
        assert low <= ratio <= high
    assert results[0][2] == results[1][2]
    for name, squares in results[0][2].items():
        both = [a + b for a, b in zip(results[0][0][name], results[1][0][name], strict=True)]
        assert squares == pytest.approx(both, rel=1e-12)


def with_and_without(hook: str) -> tuple[Tensor, Tensor]:
    results = []
    for measures in (True, False):
        model = by_name(hook, mlp(20, 30, 30, 10))
        state = model._comm_hooks[0][1]
        train(model, 6, 20, before_step=lambda _, state=state, measures=measures: state.measure() if measures else None)
        results.append(flat(model))
    return results[0], results[1]


@pytest.mark.parametrize("hook", [name for name in HOOKS if name != "noop"])
def test_measuring_changes_nothing(hook: str) -> None:
    for measured_, plain in run_ranks(2, with_and_without, hook):
        assert torch.equal(measured_, plain)


def over_a_bad_step(hook: str) -> list[bool]:
    """Whether there is a measurement: not asked for; of a step with an inf on one rank; of the next one."""
    model = by_name(hook, mlp(20, 30, 30, 10))
    state = model._comm_hooks[0][1]
    train(model, 4, 20)
    there = [state.last_measurement is not None]
    state.measure()
    for bad in (True, False):
        x = torch.ones(4, 20)
        if bad and dist.get_rank() == 1:
            x[0, 0] = torch.inf
        model.zero_grad()
        model(x).sum().backward()
        there.append(state.last_measurement is not None)
    return there


@pytest.mark.parametrize("hook", LOW_RANK)
def test_a_step_that_is_not_finite_is_not_measured_but_the_next_one_is(hook: str) -> None:
    assert run_ranks(2, over_a_bad_step, hook) == [[False, False, True]] * 2
