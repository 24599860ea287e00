"""Reduce-scatter and all-gather of a flat tensor by messages between each two ranks: for gloo, faster than its own.

Every rank sends each other rank what that one needs, at once, and nothing else: ``(W - 1) / W`` of the tensor, which is
what a ring sends, in one hop in place of ``W - 1``. All is sent and received without blocking, so there is no order in
which two ranks could wait for each other; and two messages between the same ranks arrive in the order of issue, so it
is enough that every rank issues the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_distkit.core.reuse import Buffers

# A message of one kind is never taken for one of the other: ranks that disagree on what comes next wait, and time out.
_REDUCE, _GATHER = 1, 2


class Exchange:
    """Messages under way."""

    def __init__(self, sends: Sequence[dist.Work], receives: Sequence[dist.Work]) -> None:
        self._sends = sends
        self._receives = receives

    def wait(self) -> None:
        for work in (*self._receives, *self._sends):
            work.wait()


class Sum(Exchange):
    """The others' contributions under way, each to be added to this rank's as it comes, in the order of ranks."""

    def __init__(
        self, sends: Sequence[dist.Work], receives: Sequence[dist.Work], received: Tensor, total: Tensor
    ) -> None:
        super().__init__(sends, receives)
        self._received = received  # (W - 1, numel of the shard)
        self._total = total

    def wait(self) -> None:
        # Nobody sends to an empty shard.
        for work, contribution in zip(self._receives, self._received, strict=self._total.numel() > 0):
            work.wait()
            self._total += contribution
        for work in self._sends:
            work.wait()


def reduce_scatter_(
    shards: Sequence[Tensor], rank: int, group: dist.ProcessGroup, buffers: Buffers | None = None
) -> Exchange:
    """Start to sum each rank's shard over the ranks, in place: of the result, this rank has ``shards[rank]``.

    Until it was waited for, the receive buffer is alive: ``W - 1`` times this rank's shard.
    """
    mine = shards[rank]
    take = (buffers or Buffers()).take
    received = take((len(shards) - 1) * mine.numel(), mine.dtype, mine.device).view(len(shards) - 1, mine.numel())
    receives = _receive(dict(zip(_others(shards, rank), received, strict=True)), group, _REDUCE)
    sends = _send({peer: shards[peer] for peer in _others(shards, rank)}, group, _REDUCE)
    return Sum(sends, receives, received, mine)


def all_gather_(shards: Sequence[Tensor], rank: int, group: dist.ProcessGroup) -> Exchange:
    """Start to fill every rank's ``shards`` with those of their owners, in place."""
    others = _others(shards, rank)
    receives = _receive({peer: shards[peer] for peer in others}, group, _GATHER)
    return Exchange(_send(dict.fromkeys(others, shards[rank]), group, _GATHER), receives)


def _others(shards: Sequence[Tensor], rank: int) -> list[int]:
    return [peer for peer in range(len(shards)) if peer != rank]


def _send(to: dict[int, Tensor], group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
    works = [dist.isend(tensor, group=group, tag=tag, group_dst=peer) for peer, tensor in to.items() if tensor.numel()]
    return [work for work in works if work is not None]


def _receive(into: dict[int, Tensor], group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
    works = [
        dist.irecv(tensor, group=group, tag=tag, group_src=peer) for peer, tensor in into.items() if tensor.numel()
    ]
    return [work for work in works if work is not None]
