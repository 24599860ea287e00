"""The plain mean of the gradients: what DDP does without a hook, counted in the ledger."""

from __future__ import annotations

from torch.distributed import GradBucket

from lightning_distkit.core.collectives import Messages, Round, Steps
from lightning_distkit.core.compression.hook import CommState, comm_hook


def whole_mean_(state: CommState, bucket: GradBucket) -> Messages[Round]:
    """The mean of the bucket over the ranks, in place; and the round in which it was summed."""
    buffer = bucket.buffer()
    if state.measurement is not None:
        state.measurement.add(bucket.parameters(), buffer.nbytes, wanted=buffer)
    # Divide first, as DDP does: a sum of halves over many ranks overflows sooner than their mean.
    return (yield buffer.div_(state.group.world_size))


@comm_hook
def allreduce_hook(state: CommState, bucket: GradBucket) -> Steps:
    """Average the gradients over the ranks: bit for bit what DDP does by itself, if the world size is a power of 2.

    ``register_comm_hook(process_group or None, allreduce_hook)``
    """
    return _mean(state, bucket)


def _mean(state: CommState, bucket: GradBucket) -> Steps:
    yield from whole_mean_(state, bucket)
    return bucket.buffer()
