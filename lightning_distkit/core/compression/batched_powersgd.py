"""Batched PowerSGD: the bucket as one square matrix, in place of a matrix for each layer.

Fewer and larger products, but layers without a common structure share the factors: much less accurate than
`powerSGD_hook`, so try that one first. Source: torch's ``batched_powerSGD_hook``.
"""

from __future__ import annotations

from functools import partial
from math import isqrt

from torch.distributed import GradBucket

from lightning_distkit.core.collectives import Steps
from lightning_distkit.core.compression.hook import comm_hook
from lightning_distkit.core.compression.low_rank import LowRank, factor_dtype, whole_mean_and_forget_
from lightning_distkit.core.compression.powersgd import low_rank_mean_, warm_up
from lightning_distkit.core.compression.powersgd_state import PowerSGDState


@partial(comm_hook, state_class=PowerSGDState)
def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Steps:
    """Average the gradients over the ranks, approximately, by one square matrix of low rank for each bucket.

    ``register_comm_hook(state, batched_powerSGD_hook)``. Until iteration ``state.start_powerSGD_iter`` it is a plain
    all-reduce. Every rank ends with the same bits.
    """
    return _as_square(state, bucket) if state.is_compressing else warm_up(state, bucket)


def _as_square(state: PowerSGDState, bucket: GradBucket) -> Steps:
    buffer = bucket.buffer()
    length = buffer.numel()
    side = isqrt(length - 1) + 1 if length else 0
    r = min(side, state.rank_of_bucket())
    if r == 0 or buffer.is_complex():
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True) if state.use_error_feedback else ()
        repaid = [parameter for parameter, gradient in pairs if state.errors.repay_(parameter, gradient)]
        yield from whole_mean_and_forget_(state, bucket, repaid)
        state.maybe_increase_iter(bucket)
        return buffer
    state.count(bucket, before=length, after=2 * side * r)
    square = buffer.new_zeros(side * side)
    square[:length] = buffer
    parameters, dtype = bucket.parameters(), factor_dtype(buffer.dtype)
    error = state.errors.of_bucket(parameters, side, dtype) if state.use_error_feedback else None
    item = LowRank(parameters, state.position_of(parameters[0]), square.view(side, side), r, error)
    yield from low_rank_mean_(state, [item], [], [])
    buffer.copy_(square[:length])
    state.maybe_increase_iter(bucket)
    return buffer
