"""Another matrix_approximation_rank for each parameter, and over time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
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
    rank = {"no pattern": {"0.*": 1}, "no parameter": {"o.*": 1, "*": 2}}.get(kind, {"*": 1})
    state = PowerSGDState(None, rank, start_powerSGD_iter=2)
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
        ("no parameter", "0 steps: matrix_approximation_rank has the pattern 'o.*', which matches no parameter"),
        ("no names", "2 steps: matrix_approximation_rank={'*': 1} needs the parameters' names: attach the hook with"),
        ("batched", "2 steps: the batched hook takes a number or a schedule"),
    ],
)
def test_what_cannot_be_is_said_on_every_rank(kind: str, says: str) -> None:
    for said in run_ranks(2, refused, kind):
        assert says in said


def back_to_whole(hook: str, to: Any, with_inf: bool) -> tuple[float, list[float]]:
    """What is left of the errors when r is such that nothing is compressed; and the sums' defect."""
    net = mlp(20, 30, 30, 10)
    model, state = powersgd(net, HOOKS[hook].hook, MANY_BUCKETS, min_compression_rate=2 if to == 16 else 1)
    train(model, 6, 20)
    off = []
    state.matrix_approximation_rank = to
    for step in range(3):
        before = state.error_dict
        model.zero_grad()
        with own_gradients(net) as gradients:
            x = torch.ones(8, 20) * (1 + step)
            if with_inf and step == 0:
                x[0, 0] = torch.inf
            model(x).square().mean().backward()
        after = state.error_dict
        if with_inf and step == 0:
            assert all(torch.equal(before[p], after[p]) for p in before)
            continue
        for parameter, error in before.items():
            left = after.get(parameter, torch.zeros_like(error)).flatten()[: parameter.numel()]
            came = error.flatten()[: parameter.numel()] + gradients[parameter].flatten()
            mean = torch.stack([came - left, parameter.grad.flatten()])
            dist.all_reduce(mean)
            off.append(float((mean[0] - mean[1]).norm() / mean[1].norm()))
    return sum(float(error.norm()) for error in state.error_dict.values()), off


@pytest.mark.parametrize("with_inf", [False, True])
@pytest.mark.parametrize(
    ("hook", "to"), [("powersgd", 16), ("acp_sgd", 16), ("acp_sgd", {"*": 0}), ("powersgd", {0: 0})]
)
def test_a_layer_that_is_whole_again_gets_its_error_back(hook: str, to: Any, with_inf: bool) -> None:
    for left, off in run_ranks(2, back_to_whole, hook, to, with_inf):
        assert left == 0
        assert off
        assert max(off) < 1e-6


def batched_back_to_whole() -> float:
    model, state = powersgd(mlp(20, 30, 30, 10), HOOKS["batched_powersgd"].hook)
    train(model, 6, 20)
    state.matrix_approximation_rank = {0: 0}
    train(model, 1, 20)
    return sum(float(error.norm()) for error in state.error_dict.values())


def test_a_bucket_that_is_whole_again_gets_its_error_back() -> None:
    assert run_ranks(2, batched_back_to_whole) == [0.0, 0.0]


def made_otherwise(on_rank_1: dict[str, Any]) -> str:
    arguments = {"matrix_approximation_rank": 2, **(on_rank_1 if dist.get_rank() == 1 else {})}
    try:
        train(powersgd(mlp(20, 30, 10), HOOKS["acp_sgd"].hook, **arguments)[0], 3, 20)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("on_rank_1", "says"),
    [
        ({"matrix_approximation_rank": 3}, "matrix_approximation_rank is 2 on rank 0 and 3 on rank 1"),
        ({"random_seed": 3}, "random_seed is 0 on rank 0 and 3 on rank 1"),
        ({"wire_dtype": "bf16"}, "wire_dtype is None on rank 0 and torch.bfloat16 on rank 1"),
    ],
)
def test_ranks_that_were_told_otherwise_are_told_so(on_rank_1: dict[str, Any], says: str) -> None:
    for said in run_ranks(2, made_otherwise, on_rank_1):
        assert said == "PowerSGDState must be made alike on every rank, but " + says
