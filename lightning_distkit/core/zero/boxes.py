"""A run of a tensor's elements, as two cuts through a flat bucket leave it, as boxes of the whole tensor.

Boxes are what ``torch.distributed.checkpoint`` knows: so whoever reads needs to know neither the cuts, nor in which
order the elements lie in memory. A run is at most ``2 n - 1`` boxes of an n-dimensional tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from torch import Tensor

from lightning_distkit.core.zero.bucket import memory_order

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, one of each for every dimension."""


def boxes(begin: int, end: int, shape: Sequence[int]) -> list[Box]:
    """The elements from ``begin`` to ``end``, in row-major order, as boxes that follow one another in that order."""
    if begin >= end:
        return []
    if not shape:
        return [((), ())]
    inner = tuple(shape[1:])
    row = prod(inner)
    (first, head), (last, tail) = divmod(begin, row), divmod(end, row)
    if first == last:
        return _in_row(first, head, tail, inner)
    found = _in_row(first, head, row, inner) if head else []
    full = first + 1 if head else first
    if full < last:
        found.append(((full, *(0 for _ in inner)), (last - full, *inner)))
    return found + _in_row(last, 0, tail, inner)


def _in_row(row: int, begin: int, end: int, inner: Sequence[int]) -> list[Box]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes(begin, end, inner)]


def views(flat: Tensor, begin: int, like: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The boxes of a run: their offsets in the whole tensor, and views of ``flat``.

    Args:
        flat: what the run has, one-dimensional, in the order in which the elements of ``like`` lie in memory.
        begin: the first element's place in that order.
        like: of the whole tensor's shape and strides.
    """
    order = memory_order(like)
    back = sorted(range(len(order)), key=order.__getitem__)
    at = 0
    for offsets, sizes in boxes(begin, begin + flat.numel(), [like.shape[dim] for dim in order]):
        numel = prod(sizes)
        yield tuple(offsets[dim] for dim in back), flat[at : at + numel].view(sizes).permute(back)
        at += numel
