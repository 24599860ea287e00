"""The plain mean of the gradients: what DDP does without a hook, counted in the ledger."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import GradBucket

from lightning_distkit.core.collectives import Group, Steps
from lightning_distkit.core.compression.hook import CommState, comm_hook


def mean_(buffer: Tensor, group: Group) -> Steps:
    """The mean of ``buffer`` over the ranks, in place."""
    # Divide first, as DDP does: a sum of halves over many ranks overflows sooner than their mean.
    yield buffer.div_(group.world_size)
    return buffer


@comm_hook
def allreduce_hook(state: CommState, bucket: GradBucket) -> Steps:
    """Average the gradients over the ranks: bit for bit what DDP does by itself, if the world size is a power of 2.

    ``register_comm_hook(process_group or None, allreduce_hook)``
    """
    return mean_(bucket.buffer(), state.group)
