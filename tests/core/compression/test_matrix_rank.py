"""Another matrix_approximation_rank for each parameter, and over time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_distkit.core.compression import HOOKS, PowerSGDState, attach, powerSGD_hook
from lightning_distkit.core.compression.matrix_rank import matrix_rank
from tests.core.compression.bodies import LOW_RANK, MANY_BUCKETS, flat, mlp, own_gradients, powersgd, train
from tests.ranks import run_ranks

BY_NAME = {"0.*": 3, "2.*": {0: 1, 4: 2}, "*": 0}


@pytest.mark.parametrize(
    ("name", "iteration", "wanted"), [("0.weight", 9, 3), ("2.weight", 3, 1), ("2.weight", 4, 2), ("4.weight", 5, 0)]
)
def test_the_first_pattern_and_the_latest_entry_hold(name: str, iteration: int, wanted: int) -> None:
    assert matrix_rank(BY_NAME, name, iteration) == wanted
    assert matrix_rank({0: 1, 4: 2, 2: 7}, None, iteration) == (7 if iteration == 3 else 2)


def by_name_trains() -> tuple[Tensor, list[dict[str, int]], dict[str, float]]:
    net = mlp(20, 30, 30, 10)
    model, state = powersgd(net, ddp=MANY_BUCKETS, matrix_approximation_rank=BY_NAME)
    names = {parameter: name for name, parameter in net.named_parameters()}
    rows: list[dict[str, int]] = []
    train(model, 6, 20, before_step=lambda _: rows.append({names[p]: len(q) for p, q in state.q_memory_dict.items()}))
    return flat(model), rows, {names[p]: float(error.norm()) for p, error in state.error_dict.items()}


def test_each_parameter_gets_its_own() -> None:
    (first, rows, errors), (second, *_) = run_ranks(2, by_name_trains)
    assert torch.equal(first, second)
    assert rows[3:] == [{"0.weight": 3, "2.weight": 1}, *[{"0.weight": 3, "2.weight": 2}] * 2]
    assert errors.keys() == {"0.weight", "2.weight"}


Changed = tuple[Tensor, Tensor, dict[int, Tensor], dict[int, Tensor]]


def changed(hook: str, r: Any, warm_start: bool) -> Changed:
    """The parameters of a run in which r changes on the way, those of the same run resumed in the middle of it."""
    runs = []
    arguments = {"matrix_approximation_rank": r or 1, "warm_start": warm_start}
    for interrupted in (False, True):
        net = mlp(20, 30, 30, 10)
        model, state = powersgd(net, HOOKS[hook].hook, **arguments)
        train(model, 4, 20)
        for number in (2, 4):
            if r is None:
                state.matrix_approximation_rank = number
            order = {parameter: i for i, parameter in enumerate(net.parameters())}
            before = {order[parameter]: error for parameter, error in state.error_dict.items()}
            train(model, 2, 20, seed=number, lr=0)
            if interrupted:
                saved = state.state_dict()
                state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1, **arguments)
                state.load_state_dict(saved)
                model = DistributedDataParallel(net)
                attach(model, state, HOOKS[hook].hook)
        train(model, 3, 20)
        runs.append(flat(net))
    return runs[0], runs[1], before, {order[p]: error for p, error in state.error_dict.items()}


@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize("r", [None, {0: 1, 4: 2, 6: 4}], ids=["set", "schedule"])
@pytest.mark.parametrize("hook", LOW_RANK)
def test_a_change_keeps_ranks_equal_and_resumes(hook: str, r: Any, warm_start: bool) -> None:
    (whole, resumed, *_), (other, *_) = run_ranks(2, changed, hook, r, warm_start)
    assert torch.equal(whole, other)
    if hook == "batched_powersgd":  # after a resume DDP's first buckets are others
        assert resumed.isfinite().all()
    else:
        assert torch.equal(resumed, whole)


def error_over_a_change(hook: str) -> tuple[float, float]:
    """How far the errors' sum is from what conservation demands, around a change of r; in parts of its norm."""
    net = mlp(20, 30, 30, 10)
    model, state = powersgd(net, HOOKS[hook].hook, matrix_approximation_rank=4)
    off = []
    for r in (4, 1, 3):
        state.matrix_approximation_rank = r
        for _ in range(3):
            before = state.error_dict
            model.zero_grad()
            with own_gradients(net) as gradients:
                model(torch.randn(8, 20)).square().mean().backward()
            for parameter, error in state.error_dict.items():
                # On each rank: what was remembered and what came are what was used and what is remembered.
                came = before.get(parameter, torch.zeros_like(error)) + gradients[parameter]
                off.append(float((came - parameter.grad - error).norm() / came.norm()))
    return max(off), len(off)


@pytest.mark.parametrize("hook", ["powersgd", "acp_sgd"])
def test_nothing_is_lost_when_it_changes(hook: str) -> None:
    for off, n_compared in run_ranks(2, error_over_a_change, hook):
        assert n_compared > 20
        assert off < 1e-6


def learned() -> tuple[bool, bool]:
    model, state = powersgd(mlp(20, 30, 30, 10), matrix_approximation_rank=2)
    train(model, 5, 20)
    before = {parameter: q.clone() for parameter, q in state.q_memory_dict.items()}
    state.matrix_approximation_rank = 3
    starts = {}
    original = state.factors.orthonormal

    def spying(side: Any, items: Any) -> Any:
        known = original(side, items)
        starts.update({item.parameter: state.factors.q[item.parameter].clone() for item in items})
        return known

    state.factors.orthonormal = spying  # type: ignore[method-assign]
    train(model, 1, 20)
    return (
        all(torch.equal(starts[parameter][:2], q) for parameter, q in before.items()),
        all(len(q) == 3 for q in starts.values()),
    )


def test_what_was_learned_is_kept() -> None:
    assert run_ranks(2, learned) == [(True, True)] * 2


def refused(kind: str) -> str:
    net = mlp(20, 30, 30, 10)
    model = DistributedDataParallel(net)
    state = PowerSGDState(None, {"0.*": 1} if kind == "no pattern" else {"*": 1}, start_powerSGD_iter=2)
    try:
        if kind == "no names":
            model.register_comm_hook(state, powerSGD_hook)
        else:
            attach(model, state, HOOKS["batched_powersgd" if kind == "batched" else "powersgd"].hook)
        train(model, 3, 20)
    except (ValueError, RuntimeError) as error:
        return f"{state.ledger.n_steps} steps: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no pattern", "0 steps: matrix_approximation_rank must say something about every parameter, but no pattern"),
        ("no names", "2 steps: matrix_approximation_rank={'*': 1} needs the parameters' names: attach the hook with"),
        ("batched", "2 steps: the batched hook takes a number or a schedule"),
    ],
)
def test_what_cannot_be_is_said_on_every_rank(kind: str, says: str) -> None:
    for said in run_ranks(2, refused, kind):
        assert says in said
