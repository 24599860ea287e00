"""The memory of error feedback: what compression has left out of each gradient so far, of this rank alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.compression.remainder import Remainder

logger = logging.getLogger(__name__)


class ErrorMemory:
    """An error for each parameter; or for a whole bucket, until its parameters come in other buckets."""

    def __init__(self) -> None:
        self._errors: dict[Tensor, Remainder] = {}  # (n, m)
        self._errors_of_buckets: dict[tuple[Tensor, ...], Remainder] = {}  # (side, side)

    def of(self, parameter: Tensor, n: int, m: int, dtype: torch.dtype) -> Remainder:
        """That of a parameter whose gradient travels as an (n, m) matrix; zeros at first."""
        if parameter not in self._errors:
            self._take_apart([parameter])
        error = self._errors.get(parameter)
        if error is None:
            error = _zeros(n, m, parameter.device, dtype)
        elif error.whole.shape != (n, m) or error.whole.dtype != dtype:  # of a bucket, or sent otherwise before
            error = Remainder(error.settle_().flatten()[: n * m].to(dtype, copy=True).view(n, m))
        self._errors[parameter] = error
        return error

    def of_bucket(self, parameters: Sequence[Tensor], side: int, dtype: torch.dtype) -> Remainder:
        """That of a bucket that travels as a (side, side) matrix; put together from what is known of each parameter."""
        if tuple(parameters) not in self._errors_of_buckets:
            self._take_apart(parameters)
            square = _zeros(side, side, parameters[0].device, dtype)
            for parameter, part in _parts(square.whole, parameters):
                if parameter in self._errors:
                    known = self._errors.pop(parameter).settle_().flatten()[: part.numel()]
                    part[: known.numel()] = known
            self._errors_of_buckets[tuple(parameters)] = square
        return self._errors_of_buckets[tuple(parameters)]

    def repay_(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Add what was left out before to a gradient that now travels whole; whether there was something.

        It is still remembered, for the step may not be finite; `forget` it then.
        """
        self._take_apart([parameter])
        if parameter not in self._errors:
            return False
        error = self._errors[parameter].value().flatten()[: gradient.numel()]
        # Both in the order of memory, which is not always that of the gradient's shape.
        in_memory = gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())
        in_memory.add_(error.to(gradient.dtype))
        return True

    def forget(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            del self._errors[parameter]

    def restore(self, parameter: Tensor, error: Remainder) -> None:
        self._errors[parameter] = error

    def all(self) -> dict[Tensor, Remainder]:
        """Those of all parameters, not copied; only parts of buckets are, flat, the last one with the padding."""
        errors = dict(self._errors)
        for bucket, square in self._errors_of_buckets.items():
            errors.update((parameter, Remainder(part)) for parameter, part in _parts(square.value(), bucket))
        return errors

    def scale_(self, factor: float) -> None:
        for error in (*self._errors.values(), *self._errors_of_buckets.values()):
            error.settle_().mul_(factor)

    def _take_apart(self, parameters: Sequence[Tensor]) -> None:
        """Forget the buckets with any of these parameters, and remember each of their parameters by itself."""
        for bucket in [each for each in self._errors_of_buckets if not set(each).isdisjoint(parameters)]:
            square = self._errors_of_buckets.pop(bucket).settle_()
            self._errors.update((parameter, Remainder(part)) for parameter, part in _parts(square, bucket))


def gathered(error: Mapping[Any, Tensor], group: Group) -> list[dict[Any, Tensor]] | None:
    """The ``error`` of every rank's `PowerSGDState.state_dict`, on the CPU of rank 0; None on the others.

    Every rank must call it. One parameter at a time is gathered, so the device never holds more than that.
    """
    by_key = [(key, group.gather(error[key])) for key in sorted(error)]
    if group.rank != 0:
        return None
    return [{key: each[rank].cpu() for key, each in by_key if each is not None} for rank in range(group.world_size)]


def redistributed(shared: Mapping[str, Any], errors: Sequence[Mapping[Any, Tensor]], world_size: int) -> dict[str, Any]:
    """What each rank of a world of another size is to load, so that the sum of all errors stays what it was.

    Args:
        shared: of a rank's `PowerSGDState.state_dict`, the same on every rank.
        errors: the ``error`` of each rank.
        world_size: the ranks that there are now.
    """
    sums = {}
    for key in errors[0]:
        factors = shared["factors"].get(key, (None, None))
        sums[key] = torch.stack([Remainder(each[key], *factors).value() for each in errors]).sum(0)
    return {"shared": {**shared, "factors": {}}, "error": {key: total / world_size for key, total in sums.items()}}


def _zeros(n: int, m: int, device: torch.device, dtype: torch.dtype) -> Remainder:
    logger.info("A zero tensor of length %s that represents local error is created.", n * m)
    return Remainder(torch.zeros(n, m, device=device, dtype=dtype))


def _parts(square: Tensor, parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each parameter of a bucket and its part of the bucket's square, a flat view; the last has the padding as well."""
    numels = [parameter.numel() for parameter in parameters]
    numels[-1] += square.numel() - sum(numels)
    return list(zip(parameters, square.view(-1).split(numels), strict=True))
