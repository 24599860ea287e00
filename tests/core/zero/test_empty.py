"""An optimizer with nothing to train, or nothing at all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_distkit.core.zero import ZeroOptimizer, shard_gradients
from tests.ranks import run_ranks


class Without(torch.optim.SGD):
    """As the one that stands for "no optimizer" in Lightning."""

    def add_param_group(self, param_group: dict[str, object]) -> None:
        pass


def frozen_first(stage: int) -> list[bool]:
    """Steps, norms, clips and saves; then a layer is unfrozen, and a group is added."""
    results = []
    for is_zero in (True, False):
        torch.manual_seed(0)
        module, late = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)
        plain = torch.optim.SGD([{"params": module.parameters()}, {"params": []}], lr=0.1)
        optimizer: torch.optim.Optimizer = plain
        if is_zero:
            optimizer = ZeroOptimizer(plain)
            if stage == 2:
                shard_gradients(optimizer)
            assert optimizer.clip_grad_norm_(1.0) == optimizer.grad_norm() == 0
        optimizer.step()
        optimizer.zero_grad()
        saved = optimizer.state_dict()
        assert not is_zero or dist.get_rank() != 0 or saved["state"] == {}
        optimizer.load_state_dict(saved if not is_zero else plain.state_dict())
        module.requires_grad_(True)
        optimizer.add_param_group({"params": late.parameters()})
        late(module(torch.ones(2, 3))).square().sum().backward()
        optimizer.step()
        results.append([each.detach().clone() for each in (*module.parameters(), *late.parameters())])
    return [bool(torch.allclose(got, wanted, rtol=1e-6)) for got, wanted in zip(*results, strict=True)]


@pytest.mark.parametrize("stage", [1, 2])
def test_all_may_be_frozen_and_some_be_trained_later(stage: int) -> None:
    assert run_ranks(2, frozen_first, stage) == [[True] * 4] * 2


def refused(kind: str) -> str:
    params = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError) as error:  # noqa: PT011, PT012
        if kind == "no group":
            ZeroOptimizer(Without(params, lr=0.1))
        elif kind == "no parameters":
            ZeroOptimizer(torch.optim.SGD, [], lr=0.1)
        else:
            ZeroOptimizer(torch.optim.SGD, [{"params": params if dist.get_rank() == 0 else []}], lr=0.1)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no group", "must have a param group, which may be empty, but Without has none"),
        ("no parameters", "optimizer got an empty parameter list"),
        ("on one rank", "the number of parameters is [1] on rank 0 and [0] on rank 1"),
    ],
)
def test_what_has_no_parameters_is_one_clear_error(kind: str, says: str) -> None:
    for said in run_ranks(2, refused, kind):
        assert says in said


def one_element(stage: int) -> float:
    param = nn.Parameter(torch.ones(1))
    optimizer = ZeroOptimizer(torch.optim.SGD, [param], lr=1.0)
    if stage == 2:
        shard_gradients(optimizer)
    (5 * param).sum().backward()
    optimizer.clip_grad_value_(0.25)
    optimizer.step()
    return param.item()


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_that_has_no_gradient_clips_by_value_with_the_others(stage: int) -> None:
    assert run_ranks(2, one_element, stage) == [0.75, 0.75]
