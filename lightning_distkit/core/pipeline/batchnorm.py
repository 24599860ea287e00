"""BatchNorm's running statistics are updated once a batch, by those of the whole batch, and not of each micro-batch.

Source: torchgpipe (Kim et al., 2020, https://arxiv.org/abs/2004.09910), section 3.4. Here the variance is the unbiased
one, as in torch, and a batch ends when the pipe's call does, however many micro-batches it had. Each micro-batch is
normalized by its own statistics, as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_distkit.core.pipeline.checkpoint import is_recomputing

M = TypeVar("M", bound=nn.Module)


class DeferredBatchNorm(_BatchNorm):
    """A BatchNorm that collects statistics between `begin` and `commit`. At other times it is an ordinary one."""

    _pending: Moments | None = None  # None outside of a batch

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        if self._pending is None or self.running_mean is None or not self.training or is_recomputing():
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        n_values = input.numel() // input.shape[1]  # of each channel
        if n_values == 1:
            raise ValueError(
                "BatchNorm must have more than one value of each channel in a micro-batch, got input of shape "
                f"{tuple(input.shape)}; use fewer chunks, or drop a last batch that is so short"
            )
        # With momentum 1 the running statistics become those of the micro-batch: they cost nothing extra.
        mean, variance = torch.zeros_like(self.running_mean), torch.ones_like(self.running_mean)
        output = F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        if n_values:
            self._pending.add(n_values, mean, variance)
        return output

    def begin(self) -> None:
        """From now on statistics are collected, and others that may be pending are forgotten."""
        self._pending = Moments()

    def commit(self) -> None:
        """One update of the running statistics by all that was collected; if nothing was, none."""
        pending, self._pending = self._pending, None
        if pending is None or pending.count == 0:
            return
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        for statistic, value in ((self.running_mean, pending.mean), (self.running_var, pending.variance)):
            statistic.copy_((1 - share) * statistic + share * value)

    def discard(self) -> None:
        """Forget what was collected."""
        self._pending = None


class Moments:
    """Mean and unbiased variance (n_channels,) of values that come in several portions.

    Joined as in Chan et al., 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances": the
    difference of two large sums of squares would lose the variance of values that are far from zero.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(())
        self._squares = torch.zeros(())  # of the differences from the mean, summed

    def add(self, count: int, mean: Tensor, variance: Tensor) -> None:
        """Add ``count`` values, at least 2, whose mean and unbiased variance are given."""
        mean = mean.to(torch.promote_types(mean.dtype, torch.float32))
        squares = variance.to(mean.dtype) * (count - 1)
        if self.count == 0:
            self.count, self.mean, self._squares = count, mean, squares
            return
        total = self.count + count
        difference = mean - self.mean
        self.mean = self.mean + difference * (count / total)
        self._squares = self._squares + squares + difference.square() * (self.count * count / total)
        self.count = total

    @property
    def variance(self) -> Tensor:
        return self._squares / (self.count - 1)


class _Deferred1d(DeferredBatchNorm, nn.BatchNorm1d):
    pass


class _Deferred2d(DeferredBatchNorm, nn.BatchNorm2d):
    pass


class _Deferred3d(DeferredBatchNorm, nn.BatchNorm3d):
    pass


_DEFERRED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: _Deferred1d,
    nn.BatchNorm2d: _Deferred2d,
    nn.BatchNorm3d: _Deferred3d,
}


def convert(module: M) -> M:
    """Make each BatchNorm in ``module`` a deferred one, in place: parameters, buffers, hooks and keys stay.

    SyncBatchNorm, and classes of one's own, are left alone. Deferred ones may be converted again.

    Returns:
        the same module.
    """
    for each in module.modules():
        if type(each) in _DEFERRED:
            each.__class__ = _DEFERRED[type(each)]
    return module


def revert(module: M) -> M:
    """Undo `convert`, in place."""
    for each in module.modules():
        if isinstance(each, DeferredBatchNorm):
            each.__class__ = next(  # type: ignore[assignment]
                plain for plain, deferred in _DEFERRED.items() if deferred is type(each)
            )
            vars(each).pop("_pending", None)
    return module


def begin(module: nn.Module) -> None:
    """Call it before the first micro-batch of a batch."""
    for each in _deferred(module):
        each.begin()


def commit(module: nn.Module) -> None:
    """Call it when all micro-batches have been forward."""
    for each in _deferred(module):
        each.commit()


def discard(module: nn.Module) -> None:
    """Call it instead of `commit` when a batch has failed."""
    for each in _deferred(module):
        each.discard()


@contextmanager
def whole_batch(module: nn.Module) -> Iterator[None]:
    """`begin`, then `commit`, or `discard` after an exception."""
    begin(module)
    try:
        yield
    except BaseException:
        discard(module)
        raise
    commit(module)


def _deferred(module: nn.Module) -> Iterator[DeferredBatchNorm]:
    return (each for each in module.modules() if isinstance(each, DeferredBatchNorm))
