"""The state that each rank has a shard of is saved as the plain optimizer's, and comes back."""

from __future__ import annotations

import io
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.zero import ELEMENTWISE, ZeroOptimizer, shard_gradients
from tests.core.zero.training import OPTIMIZERS, Matrices, batches, module_for
from tests.ranks import run_ranks

STAGES = [1, 2]
EVERY: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    **{cls.__name__: (cls, {"lr": 1e-2}) for cls in ELEMENTWISE},
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "Muon": (torch.optim.Muon, {"lr": 1e-2}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
}


def step(module: nn.Module, optimizer: Optimizer, n_steps: int, seed: int) -> None:
    for batch in batches(module, n_steps, seed):
        module(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def round_trip(name: str, stage: int) -> tuple[bool, bool, bool]:
    """Whether a plain optimizer takes the state, whether it then says the same, and whether training goes on alike."""
    cls, arguments = EVERY[name]
    torch.manual_seed(0)
    module = Matrices()
    optimizer = ZeroOptimizer(cls, module.parameters(), bucket_cap_mb=1e-4, **arguments)
    if stage == 2:
        shard_gradients(optimizer)
    step(module, optimizer, 3, seed=1)
    weights = {key: value.clone() for key, value in module.state_dict().items()}
    [saved] = _sent_from_rank_0(optimizer.state_dict())

    plain = cls(Matrices().parameters(), **arguments)
    plain.load_state_dict(saved)
    said = plain.state_dict()
    alike = said["param_groups"] == saved["param_groups"] and all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(said["state"][n][key]))
        for n, state in saved["state"].items()
        for key, value in state.items()
    )

    step(module, optimizer, 2, seed=2)
    again = Matrices()
    again.load_state_dict(weights)
    resumed = ZeroOptimizer(cls, again.parameters(), bucket_cap_mb=1.0, **arguments)  # in other buckets
    resumed.load_state_dict(saved)
    step(again, resumed, 2, seed=2)
    goes_on = all(
        torch.allclose(a, b, 1e-6, 1e-8) for a, b in zip(module.parameters(), again.parameters(), strict=True)
    )
    return len(said["state"]) == 3, alike, goes_on


def _sent_from_rank_0(value: Any) -> list[Any]:
    sent = [value]
    dist.broadcast_object_list(sent)
    return sent


@pytest.mark.parametrize("name", EVERY)
def test_round_trip_for_every_torch_optimizer(name: str) -> None:
    assert run_ranks(3, round_trip, name, 1) == [(True, True, True)] * 3


def test_round_trip_in_stage_2() -> None:
    assert run_ranks(2, round_trip, "AdamW", 2) == [(True, True, True)] * 2


def saved_then_loaded(stage: int, at_once: bool) -> bool:
    """Whether 2 steps, save, load, 2 steps are 4 steps: into the same optimizer, without a step between."""
    results = []
    for interrupted in (False, True):
        module = module_for("adamw")
        optimizer = ZeroOptimizer(OPTIMIZERS["adamw"](module), bucket_cap_mb=1e-3)
        if stage == 2:
            shard_gradients(optimizer)
        step(module, optimizer, 2, seed=1)
        if interrupted:
            [saved] = _sent_from_rank_0(optimizer.state_dict())
            weights = {key: value.clone() for key, value in module.state_dict().items()}
            if not at_once:
                step(module, optimizer, 1, seed=9)
            optimizer.load_state_dict(saved)
            module.load_state_dict(weights)
        step(module, optimizer, 2, seed=2)
        results.append([p.detach().clone() for p in module.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_save_then_load_goes_on_as_if_undisturbed(stage: int, at_once: bool) -> None:
    assert all(run_ranks(2, saved_then_loaded, stage, at_once))


def bytes_of_the_file(stage: int) -> list[str]:
    """The keys of what a rank saves: wrapped or bare, the module is the same."""
    module = module_for("adamw")
    keys = list(module.state_dict())
    optimizer = ZeroOptimizer(OPTIMIZERS["adamw"](module))
    if stage == 2:
        shard_gradients(optimizer)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    bare = module_for("adamw")
    bare.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert list(module.state_dict()) == keys
    return keys


@pytest.mark.parametrize("stage", STAGES)
def test_same_keys_wrapped_and_bare(stage: int) -> None:
    assert len(run_ranks(2, bytes_of_the_file, stage)[0]) == 11


def alone(rank: int) -> str:
    module = Matrices()
    optimizer = ZeroOptimizer(torch.optim.Adam, module.parameters(), lr=1e-2)
    Group.meet.__defaults__ = (timedelta(seconds=1),)  # in place of minutes
    if dist.get_rank() != rank:
        return ""
    with pytest.raises(RuntimeError) as error:
        optimizer.state_dict()
    return str(error.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_called_on_one_rank_alone_it_is_an_error_and_no_hang(rank: int) -> None:
    said = run_ranks(2, alone, rank)[rank]
    assert (
        f"ZeroOptimizer.state_dict() must be called on every rank, as each has a part of what it returns; rank {rank}"
        in said
    )


def refused(kind: str) -> tuple[str, bool]:
    module = Matrices()
    optimizer = ZeroOptimizer(torch.optim.Adam, module.parameters(), lr=1e-2)
    step(module, optimizer, 1, seed=1)
    [saved] = _sent_from_rank_0(optimizer.state_dict())
    before = {key: value.clone() for state in optimizer.state.values() for key, value in state.items()}
    if kind == "groups":
        saved["param_groups"] *= 2
    elif kind == "shape":
        saved["state"][1]["exp_avg"] = torch.zeros(2, 2)
    elif kind == "on one rank" and dist.get_rank() == 1:
        saved = {"state": {}}
    with pytest.raises(ValueError) as error:  # noqa: PT011  the test asks for its text
        optimizer.load_state_dict(saved)
    after = {key: value for state in optimizer.state.values() for key, value in state.items()}
    return str(error.value), all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("groups", "the same param groups, of [3] parameters, got one of [3, 3]"),
        ("shape", "'exp_avg' of parameter 1 must fit the parameter's shape (6, 13), got (2, 2)"),
        ("on one rank", "must have 'state' and 'param_groups'"),
    ],
)
def test_what_is_not_its_state_is_refused_on_every_rank_and_changes_nothing(kind: str, says: str) -> None:
    for said, unchanged in run_ranks(2, refused, kind):
        assert says in said
        assert unchanged


def from_an_instance_with_state() -> bool:
    """An optimizer that has stepped already is taken over with its moments."""
    torch.manual_seed(0)
    module, other = Matrices(), Matrices()
    other.load_state_dict(module.state_dict())
    plain = torch.optim.Adam(module.parameters(), 1e-2)
    reference = torch.optim.Adam(other.parameters(), 1e-2)
    x = torch.ones(2, 11)
    for a, b in ((module, plain), (other, reference)):
        a(x).square().mean().backward()
        b.step()
        b.zero_grad()
    zero = ZeroOptimizer(plain)
    for a, b in ((module, zero), (other, reference)):
        a(x).square().mean().backward()
        b.step()
        b.zero_grad()
    return all(torch.allclose(a, b, 1e-6, 1e-8) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_an_optimizer_that_has_state_is_taken_over_with_it() -> None:
    assert run_ranks(2, from_an_instance_with_state) == [True, True]
