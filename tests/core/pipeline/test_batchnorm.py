"""Running statistics are those of whole batches."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from lightning_distkit.core.pipeline.batchnorm import DeferredBatchNorm, convert, whole_batch
from lightning_distkit.core.pipeline.checkpoint import Surroundings

BATCHES = [16, 10, 3, 7, 1, 32]
KINDS = [(nn.BatchNorm1d, (3, 4)), (nn.BatchNorm2d, (3, 4, 2)), (nn.BatchNorm3d, (3, 2, 2, 2))]


def statistics(norm: nn.Module) -> dict[str, Tensor]:
    return {name: its for name, its in norm.state_dict().items() if name not in ("weight", "bias")}


@pytest.mark.parametrize("momentum", [0.1, None, 1.0])
@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_statistics_equal_those_of_the_whole_batch(
    kind: type[nn.Module], shape: tuple[int, ...], momentum: float | None
) -> None:
    whole = kind(shape[0], momentum=momentum)
    deferred = convert(nn.Sequential(deepcopy(whole)))
    for n_rows in BATCHES:
        x = torch.randn(n_rows, *shape) * 3 + 5
        whole(x)
        with whole_batch(deferred):
            for piece in x.tensor_split(min(n_rows, 4)):
                deferred(piece)
        torch.testing.assert_close(statistics(deferred[0]), statistics(whole))
    assert whole.num_batches_tracked == len(BATCHES)
    torch.testing.assert_close(deferred.eval()(x), whole.eval()(x))


def test_values_far_from_zero_keep_their_variance() -> None:
    whole = nn.BatchNorm1d(2, momentum=1.0)
    deferred = convert(deepcopy(whole))
    x = torch.randn(64, 2) + 3e3  # the difference of sums of squares would be all rounding
    whole(x)
    with whole_batch(deferred):
        for piece in x.split(8):
            deferred(piece)
    torch.testing.assert_close(deferred.running_var, x.double().var(0).float(), rtol=1e-4, atol=0)


def test_each_micro_batch_is_normalized_as_by_an_ordinary_one() -> None:
    plain = nn.BatchNorm1d(3)
    nn.init.normal_(plain.weight)
    deferred = convert(deepcopy(plain))
    x = torch.randn(8, 3, requires_grad=True)
    with whole_batch(deferred):
        got = torch.autograd.grad(deferred(x).square().sum(), [x, deferred.weight])
    for one, other in zip(got, torch.autograd.grad(plain(x).square().sum(), [x, plain.weight]), strict=True):
        assert torch.equal(one, other)


def test_outside_of_a_batch_it_is_an_ordinary_one() -> None:
    plain = nn.BatchNorm1d(3)
    deferred = convert(deepcopy(plain))
    for mode in (True, False):
        x = torch.randn(8, 3)
        assert torch.equal(deferred.train(mode)(x), plain.train(mode)(x))
    torch.testing.assert_close(deferred.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_a_second_run_does_not_count_neither_within_the_batch_nor_after_it() -> None:
    whole = nn.BatchNorm1d(3)
    deferred = convert(deepcopy(whole))
    x = torch.randn(8, 3)
    whole(x)
    with whole_batch(deferred):
        then = Surroundings("cpu", deferred)
        for piece in x.split(4):
            deferred(piece)
            with then.again():
                deferred(piece)
    with then.again():
        deferred(x)
    torch.testing.assert_close(statistics(deferred), statistics(whole))


def test_a_batch_that_fails_leaves_nothing_for_the_next() -> None:
    whole = nn.BatchNorm1d(3)
    deferred = convert(deepcopy(whole))

    def fails() -> None:
        with whole_batch(deferred):
            deferred(torch.full((4, 3), 1e6) + torch.randn(4, 3))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    torch.testing.assert_close(statistics(deferred), statistics(whole))
    x = torch.randn(8, 3)
    whole(x)
    with whole_batch(deferred):
        deferred(x)
    torch.testing.assert_close(statistics(deferred), statistics(whole))


def test_a_batch_that_does_not_reach_it_changes_nothing() -> None:
    deferred = convert(nn.BatchNorm1d(3))
    with whole_batch(deferred):
        pass
    with whole_batch(deferred):
        deferred(torch.zeros(0, 3))
    with whole_batch(deferred.eval()):
        deferred(torch.randn(4, 3))
    torch.testing.assert_close(deferred.state_dict(), nn.BatchNorm1d(3).state_dict())


def test_conversion_is_in_place_and_leaves_the_rest_as_it_was() -> None:
    class Own(nn.BatchNorm1d):
        pass

    calls: list[Sequence[int]] = []
    inner = nn.BatchNorm2d(3, eps=0.1, affine=False)
    inner.register_forward_hook(lambda module, args, output: calls.append(tuple(output.shape)))
    module = nn.Sequential(
        nn.Sequential(inner), nn.SyncBatchNorm(3), Own(3), nn.BatchNorm1d(3, track_running_stats=False)
    )
    keys, others = list(module.state_dict()), [type(each) for each in list(module)[1:3]]
    assert convert(convert(module)) is module
    assert list(module.state_dict()) == keys
    assert [type(each) for each in list(module)[1:3]] == others
    assert module[0][0] is inner
    assert isinstance(inner, DeferredBatchNorm)
    assert isinstance(inner, nn.BatchNorm2d)
    with whole_batch(inner):
        inner(torch.randn(2, 3, 2, 2))
        with pytest.raises(ValueError, match="expected 4D input"):
            inner(torch.randn(2, 3))
    assert calls == [(2, 3, 2, 2)]
    with whole_batch(module):
        assert torch.isfinite(module[3](torch.randn(4, 3))).all()  # it has no running statistics


def test_doubles_stay_doubles() -> None:
    whole = nn.BatchNorm1d(3).double()
    deferred = convert(deepcopy(whole))
    x = torch.randn(8, 3, dtype=torch.float64)
    whole(x)
    with whole_batch(deferred):
        for piece in x.split(3):
            deferred(piece)
    torch.testing.assert_close(statistics(deferred), statistics(whole), rtol=1e-14, atol=1e-14)


def test_one_value_of_each_channel_is_refused_with_the_way_out() -> None:
    deferred = convert(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"got input of shape \(1, 3\); use fewer chunks"), whole_batch(deferred):
        deferred(torch.randn(1, 3))
