"""The gradients of a bucket on their way to their owners, and the buckets of one pass, a few of which travel at once.

Source: Rajbhandari et al., 2020, "ZeRO", https://arxiv.org/abs/1910.02054, section 5.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.zero.bucket import Bucket, in_memory_order
from lightning_distkit.core.zero.turn import N_FLAGS, Turn

IN_FLIGHT = 2  # buckets whose reduction is under way at once


class Reduction:
    """The gradients of one bucket on their way to their owners.

    On CUDA the packing runs on the current stream, the collective waits for that, and who waits for the collective
    orders its own stream behind it.
    """

    def __init__(self, bucket: Bucket, grads: Sequence[Tensor | None], group: Group, turn: Turn) -> None:
        self._bucket = bucket
        self._turn = turn
        self._used = {param: grad is not None for param, grad in zip(bucket.params, grads, strict=True)}
        layout = bucket.layout
        of_owner = [layout.of(owner) for owner in range(group.world_size)]
        # Behind each rank's shard: one flag for each of its pieces, and those of the turn.
        numels = [split + len(pieces) + N_FLAGS for split, pieces in zip(layout.splits, of_owner, strict=True)]
        self._parts = group.buffers.take(sum(numels), bucket.flat.dtype, bucket.flat.device).split(numels)
        for part, split, pieces in zip(self._parts, layout.splits, of_owner, strict=True):
            for piece in pieces:
                param = bucket.params[piece.index]
                target = part[piece.at : piece.at + piece.end - piece.begin]
                if (grad := grads[piece.index]) is None:
                    target.zero_()
                else:
                    # Divided before the sum, as DDP does: in half precision the sum of all might overflow.
                    values = in_memory_order(_dense(grad), param)[piece.begin : piece.end]
                    torch.mul(values, 1 / group.world_size, out=target)
            flags = [float(self._used[bucket.params[piece.index]]) for piece in pieces]
            part[split:] = 1.0 if all(flags) else part.new_tensor([*flags, *(1.0,) * N_FLAGS])
            turn.mark_(part[-N_FLAGS:])
        self._pending = group.reduce_scatter_(self._parts)

    def finish(self) -> None:
        """Wait, and add what came to the shard's gradient.

        Raises:
            PeerError: a rank is lost.
            RuntimeError: another rank is in another turn.
        """
        with self._turn.naming_the_cause():
            self._pending.wait()
        bucket, rank = self._bucket, self._bucket.rank
        end = bucket.layout.splits[rank]
        grads, flags, turns = self._parts[rank].tensor_split([end, self._parts[rank].numel() - N_FLAGS])
        self._turn.check(turns)
        if bucket.shard_grad is None:
            bucket.shard_grad = grads.clone()  # the packed gradients of all ranks' shards are not kept
        else:
            bucket.shard_grad += grads
        mine = [bucket.params[piece.index] for piece in bucket.layout.of(rank)]
        if not all(self._used[param] for param in mine):  # or else nobody needs to know, nor wait for the device
            self._used.update(zip(mine, (flag > 0 for flag in flags.real.tolist()), strict=True))
        bucket.set_gradients(self._used)


def _dense(grad: Tensor) -> Tensor:
    if grad.layout != torch.strided:
        raise TypeError(
            f"ZeRO needs dense gradients, got one of layout {grad.layout}; make the embedding with sparse=False"
        )
    return grad


class Round:
    """Reductions started in the order of the buckets, at most `IN_FLIGHT` of them under way."""

    def __init__(self, group: Group, turn: Turn) -> None:
        self._group = group
        self._turn = turn
        self._under_way: deque[Reduction] = deque()

    def start(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> None:
        if len(self._under_way) == IN_FLIGHT:
            self._under_way.popleft().finish()
        self._under_way.append(Reduction(bucket, grads, self._group, self._turn))

    def finish(self) -> None:
        while self._under_way:
            self._under_way.popleft().finish()
