"""What stages 1 and 2 hold of gradients that travel, counted from the sizes of the buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from lightning_distkit.core.reuse import best_fit
from lightning_distkit.core.zero.outline import Weight, nbytes_of, share
from lightning_distkit.core.zero.reduction import IN_FLIGHT


def bucket_nbytes(trained: Sequence[Weight], cap: int, *, may_cut: bool) -> Iterator[int]:
    """Bytes of each bucket, as ZeroOptimizer makes them of parameters in the order of the module: last ones first.

    Args:
        may_cut: of a number of parameters, whose weights are not real ones: equal buckets, wherever that cuts.
    """
    if may_cut:
        left = nbytes_of(trained)
        while left > 0:
            yield min(cap, left)
            left -= cap
        return
    open_ones: dict[torch.dtype, int] = {}
    for weight in reversed(trained):
        so_far = open_ones.get(weight.dtype, 0)
        if so_far and so_far + weight.nbytes > cap:
            yield so_far
            so_far = 0
        open_ones[weight.dtype] = so_far + weight.nbytes
    yield from open_ones.values()


def most_in_flight(buckets: Sequence[int], world_size: int, *, frees_whole: bool) -> int:
    """Bytes of the blocks that reductions lend and keep, and in stage 2 of what is whole beside the shards so far.

    A bucket under way is there as it was packed, and so is what is received for it.

    Args:
        frees_whole: stage 2, where the whole gradients of a bucket are there until it is packed, and the shards of
            those under way are not yet.
    """
    free: list[int] = []
    under_way: deque[tuple[list[int], int]] = deque()  # blocks lent for a bucket, and its bytes
    shards = most = 0
    for n, bucket in enumerate([*buckets, *buckets]):  # a second time with the blocks of the first
        if n == len(buckets):
            free += [block for blocks, _ in under_way for block in blocks]
            under_way.clear()
            shards = most = 0
        if len(under_way) == IN_FLIGHT:
            blocks, before = under_way.popleft()
            free += blocks
            shards += share(before, world_size)
        under_way.append(([_lent(free, nbytes) for nbytes in (bucket, bucket - share(bucket, world_size))], bucket))
        most = max(most, shards + bucket)
    lent = sum(free) + sum(sum(blocks) for blocks, _ in under_way)
    return lent + (max(0, most - sum(share(each, world_size) for each in buckets)) if frees_whole else 0)


def _lent(free: list[int], nbytes: int) -> int:
    """The block that `Buffers` would lend, in bytes; it is taken away from the free ones."""
    fits = best_fit(free, nbytes)
    if fits is not None:
        return free.pop(fits)
    if free:
        free.remove(max(free))
    return nbytes
