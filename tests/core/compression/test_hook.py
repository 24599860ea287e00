"""DDP's contract, kept by us and asked of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_distkit.core.compression import (
    HOOKS,
    PowerSGDState,
    allreduce_hook,
    attach,
    bf16_compress_hook,
    bf16_compress_wrapper,
    comm_hook,
    fp16_compress_wrapper,
    ledger_of,
    noop_hook,
    powerSGD_hook,
)
from tests.core.compression.bodies import MANY_BUCKETS, by_name, flat, mlp, powersgd, train
from tests.ranks import run_ranks

SUMMING = [name for name in HOOKS if name != "noop"]


def gradient(name: str, n_steps: int, ddp: dict[str, Any]) -> Tensor:
    model = by_name(name, mlp(20, 30, 30, 10), **ddp)
    train(model, n_steps, 20)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("ddp", [{}, MANY_BUCKETS], ids=["one bucket", "many buckets"])
@pytest.mark.parametrize("name", SUMMING)
def test_every_rank_ends_with_the_same_gradient(name: str, ddp: dict[str, Any]) -> None:
    first, second, third = run_ranks(3, gradient, name, 5, ddp)
    assert first.isfinite().all()
    assert torch.equal(first, second)
    assert torch.equal(first, third)


def without_and_with(name: str, ddp: dict[str, Any]) -> tuple[Tensor, Tensor]:
    plain = DistributedDataParallel(mlp(20, 30, 10), **ddp)
    train(plain, 3, 20)
    hooked = by_name(name, mlp(20, 30, 10), **ddp)
    train(hooked, 3, 20)
    return flat(plain), flat(hooked)


@pytest.mark.parametrize("world_size", [2, 3])
def test_allreduce_is_plain_ddp(world_size: int) -> None:
    for plain, hooked in run_ranks(world_size, without_and_with, "allreduce", MANY_BUCKETS):
        if world_size == 2:
            assert torch.equal(plain, hooked)
        else:
            torch.testing.assert_close(plain, hooked)


@pytest.mark.parametrize(("name", "precision"), [("fp16", 1e-3), ("bf16", 1e-2)])
def test_halves_are_near_plain_ddp(name: str, precision: float) -> None:
    for plain, hooked in run_ranks(2, without_and_with, name, MANY_BUCKETS):
        torch.testing.assert_close(plain, hooked, rtol=precision, atol=precision)


def each_ones_own_gradient() -> bool:
    model = by_name("noop", mlp(20, 30, 10))
    alone = mlp(20, 30, 10)
    x = torch.full((4, 20), 1.0 + dist.get_rank())
    for each in (model, alone):
        each(x).square().mean().backward()
    return all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), alone.parameters(), strict=True))


def test_noop_leaves_each_rank_its_own() -> None:
    assert run_ranks(2, each_ones_own_gradient) == [True, True]


def registered_as_in_torch() -> Tensor:
    """The bare register_comm_hook, with a process group or None as state."""
    results = []
    for state, hook in ((None, allreduce_hook), (dist.group.WORLD, bf16_compress_hook), (None, noop_hook)):
        model = DistributedDataParallel(mlp(20, 30, 10), **MANY_BUCKETS)
        model.register_comm_hook(state, hook)
        train(model, 2, 20)
        results.append(flat(model))
    state = PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model = DistributedDataParallel(mlp(20, 30, 10), **MANY_BUCKETS)
    model.register_comm_hook(state, powerSGD_hook)
    train(model, 4, 20)
    return torch.cat([*results[:2], flat(model)])


def test_bare_registration_works_off_cuda_too() -> None:
    first, second = run_ranks(2, registered_as_in_torch)
    assert torch.equal(first, second)


def encode_and_decode(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
    """The example of torch's page on register_comm_hook."""
    encoded = bucket.buffer().half() / dist.get_world_size()
    future = dist.all_reduce(encoded, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].float())


def with_encode_and_decode() -> Tensor:
    model = DistributedDataParallel(mlp(20, 30, 10))
    attach(model, None, encode_and_decode)
    train(model, 2, 20)
    return flat(model)


def test_a_users_own_hook_runs() -> None:
    first, second = run_ranks(2, with_encode_and_decode)
    assert torch.equal(first, second)


@comm_hook
def signs(state: Any, bucket: dist.GradBucket) -> Any:
    """A hook of a newcomer: one generator."""
    votes = bucket.buffer().sign()
    yield votes
    return bucket.buffer().copy_(votes.sign())


def with_own_steps() -> Tensor:
    model = DistributedDataParallel(mlp(20, 30, 10), **MANY_BUCKETS)
    attach(model, None, signs)
    model(torch.randn(4, 20)).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_a_hook_is_one_generator() -> None:
    first, second = run_ranks(2, with_own_steps)
    assert torch.equal(first, second)
    assert set(first.tolist()) <= {-1.0, 0.0, 1.0}


def wrapped(wrapper: Any) -> tuple[Tensor, int]:
    model, state = powersgd(mlp(20, 30, 30, 10), wrapper(powerSGD_hook), MANY_BUCKETS)
    train(model, 5, 20)
    plain, plain_state = powersgd(mlp(20, 30, 30, 10), powerSGD_hook, MANY_BUCKETS)
    train(plain, 5, 20)
    torch.testing.assert_close(flat(model), flat(plain), rtol=0.05, atol=0.05)
    return flat(model), plain_state.ledger.total.nbytes / state.ledger.total.nbytes


@pytest.mark.parametrize("wrapper", [fp16_compress_wrapper, bf16_compress_wrapper])
def test_a_wrapper_halves_what_a_hook_sends(wrapper: Any) -> None:
    (first, ratio), (second, _) = run_ranks(2, wrapped, wrapper)
    assert torch.equal(first, second)
    assert ratio == 2


# Breaches of the contract


def returns_nothing(state: object, bucket: dist.GradBucket) -> None:
    return None


def returns_a_list(state: object, bucket: dist.GradBucket) -> Future[Any]:
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future()


def returns_half(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer()[: bucket.buffer().numel() // 2])
    return future


def returns_three(state: object, bucket: dist.GradBucket) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(3)
    return future


def takes_one(bucket: dist.GradBucket) -> None:
    return None


def breach(kind: str) -> str:
    model = DistributedDataParallel(mlp(4, 4))
    try:
        if kind == "no DDP model":
            attach(mlp(4, 4), None, allreduce_hook)  # type: ignore[arg-type]
        elif kind == "twice":
            attach(model, None, allreduce_hook)
            attach(model, None, noop_hook)
        elif kind == "after backward":
            model(torch.ones(1, 4)).sum().backward()
            attach(model, None, allreduce_hook)
        elif kind == "wrapped":
            attach(model, None, fp16_compress_wrapper(returns_nothing))
            model(torch.ones(1, 4)).sum().backward()
        elif kind == "wrapped three":
            attach(model, None, bf16_compress_wrapper(returns_three))
            model(torch.ones(1, 4)).sum().backward()
        elif kind == "wrapped nothing":
            fp16_compress_wrapper(None)  # type: ignore[arg-type]
        elif kind == "sparse":
            model = DistributedDataParallel(nn.Embedding(5, 4, sparse=True))
            attach(model, None, allreduce_hook)
            model(torch.tensor([1])).sum().backward()
        elif kind == "two models":
            state = PowerSGDState(None)
            attach(model, state, powerSGD_hook)
            attach(DistributedDataParallel(mlp(4, 4)), state, powerSGD_hook)
        elif kind == "no function":
            attach(model, None, "powersgd")  # type: ignore[arg-type]
        elif kind == "wrong state":
            attach(model, 3, allreduce_hook)
        elif kind == "torch's state":
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState as Torchs

            model.register_comm_hook(Torchs(None), powerSGD_hook)
            model(torch.ones(1, 4)).sum().backward()
        else:
            attach(model, None, globals()[kind])
            model(torch.ones(1, 4)).sum().backward()
    except (TypeError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("returns_nothing", "the hook returns_nothing must return a torch.futures.Future, also where it sends nothing"),
        ("returns_a_list", "the hook returns_a_list must hold one tensor of the bucket's shape (20,), got list"),
        ("returns_half", "must hold one tensor of the bucket's shape (20,), got shape (10,)"),
        ("wrapped", "the hook returns_nothing must return a torch.futures.Future"),
        ("wrapped three", "the hook returns_three must hold one tensor of the bucket's shape (20,), got int"),
        ("wrapped nothing", "a hook must be callable as hook(state, bucket), got None"),
        ("sparse", "sparse gradients cannot be sent by a hook; use nn.Embedding(..., sparse=False)"),
        ("two models", "this PowerSGDState is registered with another model, Sequential; make one for each model"),
        ("takes_one", "the hook takes_one must take (state, bucket)"),
        ("twice", "this model has the hook allreduce_hook already"),
        ("after backward", "the hook allreduce_hook must be attached before the first backward"),
        ("no DDP model", "attached to a DistributedDataParallel model, got Sequential"),
        ("no function", "a hook must be callable as hook(state, bucket), got 'powersgd'"),
        ("torch's state", "powerSGD_hook must be registered with a PowerSGDState, got torch.distributed.algorithms"),
        ("wrong state", "a hook's state must be a process group or None, got int"),
    ],
)
def test_a_breach_is_said_clearly_and_on_every_rank(kind: str, says: str) -> None:
    for said in run_ranks(2, breach, kind):
        assert says in said


def two_models_in_one_backward() -> tuple[Tensor, Tensor]:
    first, second = (by_name("fp16", mlp(20, 20, 20, seed=i), **MANY_BUCKETS) for i in range(2))
    x = torch.full((4, 20), 1.0 + dist.get_rank())
    (first(x).sum() * second(x).sum()).backward()
    return tuple(torch.cat([p.grad.flatten() for p in model.parameters()]) for model in (first, second))


def test_two_models_in_one_backward_do_not_meet() -> None:
    assert all(torch.equal(a, b) for a, b in zip(*run_ranks(2, two_models_in_one_backward), strict=True))


def two_models_of_one_group() -> bool:
    models = [DistributedDataParallel(mlp(20, 20, 20, seed=i), **MANY_BUCKETS) for i in range(2)]
    for model in models:
        attach(model, None, allreduce_hook)
    x = torch.ones(4, 20)
    (models[0](x).sum() + models[1](x).sum()).backward()
    return ledger_of(None).n_steps == 2


def test_two_models_may_share_the_state_none() -> None:
    assert run_ranks(2, two_models_of_one_group) == [True, True]


class Branches(nn.Module):
    """Uses one half of itself or the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(20, 20), nn.Linear(20, 20)
        self.use_a = True

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if self.use_a else self.b(x)


def one_branch_a_rank(name: str) -> Tensor:
    model = by_name(name, Branches(), find_unused_parameters=True, **MANY_BUCKETS)
    for step in range(4):
        model.module.use_a = (step + dist.get_rank()) % 2 == 0
        model(torch.randn(4, 20)).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("name", SUMMING)
def test_parameters_unused_on_one_rank(name: str) -> None:
    first, second = run_ranks(2, one_branch_a_rank, name)
    assert torch.equal(first, second)


def accumulated(name: str, ddp: dict[str, Any]) -> tuple[Tensor, int, int]:
    model = by_name(name, mlp(20, 30, 10), **ddp)
    state = model._comm_hooks[0][1]
    random = torch.Generator().manual_seed(dist.get_rank())
    for step in range(4):
        model.zero_grad()
        if step or not ddp.get("static_graph"):  # there plain DDP cannot begin with a backward that is not synchronised
            with model.no_sync():
                model(torch.randn(4, 20, generator=random)).sum().backward()
        model(torch.randn(4, 20, generator=random)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), state.ledger.n_steps, getattr(state, "iter", 4)


@pytest.mark.parametrize("ddp", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}, MANY_BUCKETS])
@pytest.mark.parametrize("name", SUMMING)
def test_accumulation_synchronises_once_a_step_with_every_option_of_ddp(name: str, ddp: dict[str, Any]) -> None:
    (first, *counts), (second, *_) = run_ranks(2, accumulated, name, ddp)
    assert torch.equal(first, second)
    assert counts == [4, 4]
