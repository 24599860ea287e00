"""A second run is the first one's twin, and leaves no trace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_distkit.core.pipeline.checkpoint import (
    InPlace,
    Surroundings,
    checkpointed,
    is_checkpointed,
    is_recomputing,
)


def gradients(module: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    return [*torch.autograd.grad(run(x).square().sum(), [x, *module.parameters()])]


def small(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 3))


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_except_last_means_the_last_micro_batch_that_there_is(mode: str) -> None:
    for n in (1, 2, 5):
        wanted = {"always": [True] * n, "except_last": [True] * (n - 1) + [False], "never": [False] * n}[mode]
        assert [is_checkpointed(mode, index, n) for index in range(n)] == wanted


def test_dropout_masks_are_the_same_bits_in_recomputation() -> None:
    module, x = small(nn.Dropout(0.5)), torch.randn(8, 4)
    for wanted, got in zip(gradients(module, x, module), gradients(module, x, twice(module)), strict=True):
        assert torch.equal(wanted, got)


def twice(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpointed(module, x, layers=module)


def test_random_numbers_go_on_as_if_there_had_been_no_recomputation() -> None:
    module, x = small(nn.Dropout(0.5)), torch.randn(8, 4)

    def afterwards(run: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(1)
        y = run(x)
        torch.rand(5)  # in between
        y.sum().backward()
        return torch.rand(3)

    assert torch.equal(afterwards(module), afterwards(twice(module)))


def test_autocast_is_seen_in_recomputation() -> None:
    seen = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((x.dtype, is_recomputing()))
            return x.sin()

    module, x = small(Look()), torch.randn(8, 4)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpointed(module, x, layers=module)

    def plain(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    got = gradients(module, x, run)
    assert seen == [(torch.bfloat16, False), (torch.bfloat16, True)]
    for one, other in zip(got, gradients(module, x, plain), strict=True):
        assert torch.equal(one, other)


def test_surroundings_come_back_and_go_again_even_after_an_error() -> None:
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.float16):
        then = Surroundings()
    wanted = torch.rand(2)
    now = torch.get_rng_state()

    def fails() -> None:
        with torch.no_grad(), then.again():
            assert torch.equal(torch.rand(2), wanted)
            assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == (True, torch.float16)
            assert torch.is_grad_enabled()
            assert is_recomputing()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert torch.equal(torch.get_rng_state(), now)
    assert not is_recomputing()
    assert not torch.is_autocast_enabled("cpu")
    with then.again():  # as often as one likes
        assert torch.equal(torch.rand(2), wanted)


def test_recomputations_of_two_threads_do_not_mix_their_random_numbers() -> None:
    modules = [small(nn.Dropout(0.5)) for _ in range(2)]

    def masks(n: int) -> tuple[Surroundings, Tensor]:
        torch.manual_seed(n)
        return Surroundings(), torch.rand(100)

    thens = [masks(n) for n in range(2)]
    torch.manual_seed(9)
    before = torch.get_rng_state()
    faults = []

    def recompute(n: int) -> None:
        then, wanted = thens[n]
        for _ in range(50):
            with then.again():
                got = torch.cat([torch.rand(1) for _ in range(100)])
            if not torch.equal(got, wanted) or is_recomputing():
                faults.append(n)

    threads = [threading.Thread(target=recompute, args=(n,)) for n in range(len(modules))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("deferred", [False, True])
def test_running_statistics_are_updated_once_though_the_layers_run_twice(deferred: bool) -> None:
    module, x = small(nn.BatchNorm1d(6)), torch.randn(8, 4)
    other = small(nn.BatchNorm1d(6))
    checkpointed(module, x, layers=module if not deferred else nn.ModuleList([module])).sum().backward()
    other(x).sum().backward()
    torch.testing.assert_close(module.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert module[1].track_running_stats
    assert module[1].num_batches_tracked == 1


def test_layers_may_write_to_their_input_in_place() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2).exp()

    def layers(x: Tensor) -> Tensor:
        return Double()(x)

    watch = InPlace("a layer")
    x = torch.randn(3, requires_grad=True)
    for _ in range(2):  # it knows from the first
        x.grad = None
        h = x * 1
        checkpointed(layers, h, in_place=watch).sum().backward()
        torch.testing.assert_close(x.grad, 2 * (2 * x).exp().detach())
        assert torch.equal(h, x)


def test_layers_that_begin_to_write_to_their_input_are_refused() -> None:
    watch = InPlace("partition 1")
    checkpointed(lambda x: x.exp(), torch.randn(3, requires_grad=True) * 1, in_place=watch)
    with pytest.raises(RuntimeError, match="partition 1 changed its input in place this time"):
        checkpointed(lambda x: x.relu_(), torch.randn(3, requires_grad=True) * 1, in_place=watch)


def test_an_input_that_was_written_to_before_backward_is_refused() -> None:
    x = torch.randn(3)
    weight = torch.randn(3, requires_grad=True)
    y = checkpointed(lambda x: (x * weight).exp(), x)
    z = checkpointed(lambda values: (values["x"] * weight).exp(), {"x": x})
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # torch's own
        y.sum().backward()
    with pytest.raises(RuntimeError, match="was written to after their first run"):
        z.sum().backward()


def test_a_container_may_be_emptied_by_the_layers() -> None:
    def layers(values: dict[str, Tensor]) -> Tensor:
        return values.pop("x").exp()

    x, kept = torch.randn(3, requires_grad=True), {}
    kept["x"] = x
    checkpointed(layers, kept).sum().backward()
    torch.testing.assert_close(x.grad, x.exp().detach())
    assert kept == {"x": x}


def test_what_needs_no_gradient_says_so() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    assert not checkpointed(frozen, torch.randn(2, 4)).requires_grad
    y, mask, n = checkpointed(lambda x, mask: (x * mask, mask, 3), torch.randn(2, requires_grad=True), torch.ones(2))
    assert (y.requires_grad, mask.requires_grad, n) == (True, False, 3)


@pytest.mark.parametrize("inner", ["reentrant", "non-reentrant", "ours"])
def test_layers_that_checkpoint_themselves_work_within_it(inner: str) -> None:
    block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh())

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Any:
            if inner == "ours":
                return checkpointed(self.block, x, layers=self.block)
            return checkpoint(self.block, x, use_reentrant=inner == "reentrant")

    torch.manual_seed(0)
    front, back = nn.Linear(4, 6), nn.Linear(6, 3)
    plain, own = nn.Sequential(front, block, back), nn.Sequential(front, Own(), back)
    x = torch.randn(8, 4)
    wanted = accumulated(plain, x, plain)
    for one, other in zip(wanted, accumulated(own, x, twice(own)), strict=True):
        assert torch.equal(one, other)


def accumulated(module: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """As `gradients`, by backward: reentrant checkpoints know nothing else."""
    torch.manual_seed(1)
    module.zero_grad()
    x = x.clone().requires_grad_()
    run(x).square().sum().backward()
    return [each.grad.clone() for each in (x, *module.parameters())]


def test_backward_may_be_called_again_on_a_retained_graph() -> None:
    module, x = small(nn.Dropout(0.5)), torch.randn(8, 4)
    y = checkpointed(module, x, layers=module)
    y.sum().backward(retain_graph=True)
    once = [param.grad.clone() for param in module.parameters()]
    y.sum().backward()
    for param, one in zip(module.parameters(), once, strict=True):
        assert torch.equal(param.grad, 2 * one)  # type: ignore[arg-type]


def test_an_error_in_the_second_run_is_the_users_own_and_nothing_stays_changed() -> None:
    class FailsAgain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if is_recomputing():
                raise ZeroDivisionError
            return x.exp()

    module = small(FailsAgain(), nn.BatchNorm1d(6))
    before = torch.get_rng_state()
    y = checkpointed(module, torch.randn(8, 4), layers=module)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert module[2].track_running_stats
    assert not is_recomputing()
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_runs_again_where_there_are_no_gradients() -> None:
    module, x = small(), torch.randn(8, 4)
    with torch.no_grad():
        assert torch.equal(checkpointed(module, x, layers=module), module(x))
