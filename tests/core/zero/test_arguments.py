"""What cannot work is one clear error on every rank, before anything is sent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_distkit.core.zero import ZeroOptimizer, shard_gradients
from tests.core.zero.training import Matrices
from tests.ranks import run_ranks


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


def other_shapes() -> None:
    ZeroOptimizer(torch.optim.SGD, nn.Linear(3, 2 + dist.get_rank()).parameters(), lr=0.1)


def of_two_optimizers() -> None:
    param = nn.Parameter(torch.ones(4))
    first, _ = (ZeroOptimizer(torch.optim.SGD, [param], lr=0.1) for _ in range(2))
    param.sum().backward()
    first.step()


def moved() -> None:
    module = nn.Linear(3, 3)
    optimizer = ZeroOptimizer(torch.optim.SGD, module.parameters(), lr=0.1)
    module.to(torch.float64)
    module(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()


def cuda_group() -> None:
    """As if the group were of NCCL."""
    get, dist.get_backend = dist.get_backend, lambda group=None: "nccl"  # type: ignore[assignment]
    try:
        ZeroOptimizer(torch.optim.SGD, nn.Linear(3, 3).parameters(), lr=0.1)
    finally:
        dist.get_backend = get


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "lbfgs": (
        lambda: ZeroOptimizer(torch.optim.LBFGS, nn.Linear(3, 3).parameters()),
        TypeError,
        "ZeRO cannot shard LBFGS: its step evaluates the loss again and again",
    ),
    "sparse": (
        lambda: ZeroOptimizer(torch.optim.SparseAdam, nn.Linear(3, 3).parameters()),
        TypeError,
        "ZeRO cannot shard SparseAdam: it is for sparse gradients",
    ),
    "closure": (
        lambda: ZeroOptimizer(NeedsClosure, nn.Linear(3, 3).parameters(), lr=0.1),
        TypeError,
        "ZeRO cannot shard NeedsClosure: its step needs a closure",
    ),
    "twice": (
        lambda: ZeroOptimizer(ZeroOptimizer(torch.optim.SGD, nn.Linear(3, 3).parameters(), lr=0.1)),
        TypeError,
        "the optimizer is sharded already",
    ),
    "no params": (
        lambda: ZeroOptimizer(torch.optim.SGD, lr=0.1),
        TypeError,
        "params must be given with a class of optimizer, here SGD",
    ),
    "both": (
        lambda: ZeroOptimizer(torch.optim.SGD(nn.Linear(3, 3).parameters(), 0.1), lr=0.1),
        TypeError,
        "SGD is made already, so neither params nor its arguments can be given",
    ),
    "bucket": (
        lambda: ZeroOptimizer(torch.optim.SGD, nn.Linear(3, 3).parameters(), bucket_cap_mb=0, lr=0.1),
        ValueError,
        "bucket_cap_mb must be above 0, got 0",
    ),
    "meta": (
        lambda: ZeroOptimizer(torch.optim.SGD, nn.Linear(3, 3, device="meta").parameters(), lr=0.1),
        ValueError,
        "must be on one type of device, and not on meta, got meta",
    ),
    "nccl": (cuda_group, ValueError, "the process group's backend is nccl, which needs CUDA"),
    "other shapes": (other_shapes, ValueError, "a ZeroOptimizer must be made alike on every rank, but parameter 0 is"),
    "moved": (moved, RuntimeError, "is no longer where ZeroOptimizer has put it"),
    "of two optimizers": (of_two_optimizers, RuntimeError, "or a ZeroOptimizer made later has it, too"),
    "shared memory": (
        lambda: ZeroOptimizer(torch.optim.SGD, [p := nn.Parameter(torch.ones(4)), nn.Parameter(p.data[:2])], lr=0.1),
        ValueError,
        "the parameters must not share memory, but two different ones do",
    ),
    "copied": (
        lambda: copy.deepcopy(ZeroOptimizer(torch.optim.SGD, nn.Linear(3, 3).parameters(), lr=0.1)),
        TypeError,
        "can be neither copied nor pickled",
    ),
    "norm": (
        lambda: ZeroOptimizer(torch.optim.SGD, nn.Linear(3, 3).parameters(), lr=0.1).grad_norm(-1),
        ValueError,
        "norm_type must be above 0, or infinite, got -1",
    ),
}


def raised(kind: str) -> tuple[str, str]:
    try:
        WRONG[kind][0]()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("kind", WRONG)
def test_every_rank_says_what_is_wrong(kind: str) -> None:
    for name, said in run_ranks(2, raised, kind):
        assert name == WRONG[kind][1].__name__
        assert WRONG[kind][2] in said


def with_scheduler(made_for: str) -> list[float]:
    module = Matrices()
    plain = torch.optim.SGD(module.parameters(), 1.0)
    zero = ZeroOptimizer(plain)
    shard_gradients(zero)
    scheduler = torch.optim.lr_scheduler.StepLR(plain if made_for == "the plain one" else zero, 1, gamma=0.5)
    rates = []
    for _ in range(3):
        module(torch.ones(1, 11)).sum().backward()
        zero.step()
        scheduler.step()
        rates.append(zero.inner.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("made_for", ["the plain one", "the sharded one"])
def test_a_scheduler_works_whichever_of_the_two_it_was_made_for(made_for: str) -> None:
    assert run_ranks(2, with_scheduler, made_for) == [[1.0, 0.5, 0.25]] * 2


def groups_added_late(stage: int) -> bool:
    results = []
    for sharded in (True, False):
        torch.manual_seed(0)
        module = Matrices()
        plain = torch.optim.AdamW(module.first.parameters(), 1e-2)
        optimizer: Any = ZeroOptimizer(plain, bucket_cap_mb=1e-4) if sharded else plain
        if sharded and stage == 2:
            shard_gradients(optimizer)
        for n in range(4):
            if n == 2:
                optimizer.add_param_group({"params": list(module.second.parameters()), "lr": 1e-3, "weight_decay": 0.3})
            module(torch.ones(2, 11)).square().mean().backward()
            optimizer.step()
            module.zero_grad()
        results.append([p.detach().clone() for p in module.parameters()])
    return all(torch.allclose(a, b, 1e-6, 1e-8) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("stage", [1, 2])
def test_param_groups_may_be_added_late(stage: int) -> None:
    assert run_ranks(3, groups_added_late, stage) == [True] * 3


def groups_set_anew() -> list[list[float]]:
    """As a callback does it on resuming: other groups, of other parameters, some of them not trained before."""
    results = []
    for zero_stage in (0, 1, 2):
        params = [nn.Parameter(torch.ones(5)) for _ in range(3)]
        plain = torch.optim.SGD(params[:2], 1.0)
        optimizer: Any = ZeroOptimizer(plain, bucket_cap_mb=1e-5) if zero_stage else plain
        if zero_stage == 2:
            shard_gradients(optimizer)
        rest = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        optimizer.param_groups = [{**rest, "params": params[1:], "lr": 0.5}, {**rest, "params": params[:1], "lr": 0.25}]
        sum(param.sum() for param in params).backward()
        optimizer.step()
        results.append([float(param[-1].detach()) for param in params])
    return results


def test_param_groups_may_be_set_anew() -> None:
    assert run_ranks(2, groups_set_anew) == [[[0.75, 0.5, 0.5]] * 3] * 2
