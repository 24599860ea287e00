"""What the compressor remembers, saved and loaded."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_distkit.core.compression import (
    HOOKS,
    PowerSGDState,
    attach,
    gathered,
    powerSGD_hook,
    redistributed,
)
from tests.core.compression.bodies import LOW_RANK, MANY_BUCKETS, by_name, distance, flat, mlp, powersgd, train
from tests.ranks import run_ranks


def resumed(hook: str, warm_start: bool, how: str, ddp_after: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Six steps, against three, a save, a load into a new model and three more."""
    arguments = {"matrix_approximation_rank": 2, "warm_start": warm_start}
    function = HOOKS[hook].hook
    whole, _ = powersgd(mlp(20, 30, 30, 10), function, **arguments)
    train(whole, 4, 20)
    train(whole, 4, 20, seed=500)

    net = mlp(20, 30, 30, 10)
    model, state = powersgd(net, function, **arguments)
    train(model, 4, 20)
    if how == "pickle":
        loaded = pickle.loads(pickle.dumps(state))
        assert loaded.state_dict() is not None  # saved again before a step: nothing is lost
        loaded = pickle.loads(pickle.dumps(loaded))
    else:
        names = {parameter: name for name, parameter in net.named_parameters()} if how == "names" else None
        file = io.BytesIO()
        torch.save(state.state_dict(names), file)
        file.seek(0)
        loaded = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1, **arguments)
        loaded.load_state_dict(torch.load(file, weights_only=True), names)
    again = DistributedDataParallel(net, **ddp_after)
    attach(again, loaded, function)
    train(again, 4, 20, seed=500)
    assert loaded.iter == 8
    return flat(again), flat(whole)


@pytest.mark.parametrize("how", ["pickle", "numbers", "names"])
@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize("hook", LOW_RANK)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(hook: str, warm_start: bool, how: str) -> None:
    for again, whole in run_ranks(2, resumed, hook, warm_start, how, {}):
        assert torch.equal(again, whole) or hook == "batched_powersgd"
        assert distance(again, whole) < 1e-1


@pytest.mark.parametrize("warm_start", [True, False])
def test_other_buckets_after_a_resume_change_nothing(warm_start: bool) -> None:
    for again, whole in run_ranks(2, resumed, "powersgd", warm_start, "names", MANY_BUCKETS):
        assert distance(again, whole) < 1e-6


def with_another_world_size(hook: str) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    net = mlp(20, 30, 30, 10)
    model = by_name(hook, net)
    state = model._comm_hooks[0][1]
    train(model, 5, 20)
    saved = state.state_dict()
    errors = gathered(saved["error"], state.group)
    order = {parameter: i for i, parameter in enumerate(net.parameters())}
    now = {order[parameter]: error for parameter, error in state.error_dict.items()}
    return redistributed(saved["shared"], errors, 3)["error"] if errors is not None else {}, now


@pytest.mark.parametrize("hook", LOW_RANK)
def test_another_world_size_keeps_the_sum_of_the_errors(hook: str) -> None:
    (shares, first), (_, second) = run_ranks(2, with_another_world_size, hook)
    assert shares.keys() == first.keys()
    assert len(shares) == (6 if hook == "batched_powersgd" else 3)
    for key, share in shares.items():
        torch.testing.assert_close(3 * share, first[key] + second[key])


def loads(kind: str) -> str:
    net = mlp(20, 30, 30, 10)
    names = {parameter: name for name, parameter in net.named_parameters()}
    model, state = powersgd(net)
    train(model, 4, 20)
    fresh = PowerSGDState(None, start_powerSGD_iter=2)
    try:
        if kind == "without names":
            fresh.load_state_dict(state.state_dict(names))
        elif kind == "with names":
            fresh.load_state_dict(state.state_dict(), names)
        elif kind == "nothing":
            fresh.load_state_dict({})
        elif kind == "incomplete names":
            state.state_dict({p: n for p, n in names.items() if n != "0.weight"})
        elif kind == "fewer layers":
            fresh.load_state_dict(state.state_dict())
            other = DistributedDataParallel(mlp(20, 30, 30, 30, 10))
            attach(other, fresh, powerSGD_hook)
            other(torch.ones(1, 20)).sum().backward()
        elif kind == "another model":
            fresh.load_state_dict(state.state_dict(names), {p: n for n, p in mlp(20, 31, 30, 10).named_parameters()})
        else:
            fresh.load_state_dict(state.state_dict(names), {p: "x" + n for p, n in names.items()})
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("without names", "was saved with the parameters' names and must be loaded with them"),
        ("with names", "was saved without the parameters' names and must be loaded without them"),
        ("fewer layers", "of a model with 6 trainable parameters, this one has 8"),
        ("incomplete names", "parameters of shape (30, 20) are compressed, but have no name"),
        ("nothing", "this is not what state_dict() returned"),
        ("another model", "load the checkpoint of this model"),
        ("other names", "the loaded compression state has the parameter"),
    ],
)
def test_a_state_of_something_else_is_refused(kind: str, says: str) -> None:
    for said in run_ranks(2, loads, kind):
        assert says in said


def scale_before_the_first_step() -> tuple[float, float]:
    net = mlp(20, 30, 30, 10)
    model, state = powersgd(net)
    state.gradient_scale = 1024.0
    train(model, 5, 20)
    loaded = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    loaded.load_state_dict(state.state_dict())
    loaded.gradient_scale = 2.0  # what a new GradScaler begins with, before the parameters are known
    again = DistributedDataParallel(net)
    attach(again, loaded, powerSGD_hook)
    norm = sum(float(error.norm()) for error in state.error_dict.values())
    again.zero_grad()
    (again(torch.ones(1, 20)).sum() * 0).backward()
    first = next(iter(net.parameters()))
    return norm / 512, float((loaded.error_dict[first] + first.grad).norm() / state.error_dict[first].norm() * norm)


def test_a_scale_that_is_set_after_loading_rescales_what_was_loaded() -> None:
    for should_be, is_ in run_ranks(2, scale_before_the_first_step):
        assert is_ == pytest.approx(should_be, rel=1e-4)


def in_another_memory_format() -> str:
    def conv(memory_format: torch.memory_format) -> Any:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3)).to(memory_format=memory_format)
        return powersgd(net)

    model, state = conv(torch.contiguous_format)
    other, loaded = conv(torch.channels_last)
    for _ in range(3):
        model(torch.randn(2, 8, 5, 5)).sum().backward()
    loaded.load_state_dict(state.state_dict())
    try:
        other(torch.randn(2, 8, 5, 5)).sum().backward()
    except ValueError as error:
        return str(error)
    return "no error"


def test_another_memory_format_is_refused() -> None:
    for said in run_ranks(2, in_another_memory_format):
        assert "the order of its dimensions in memory was (0, 1, 2, 3) and is (0, 2, 3, 1)" in said
