"""PowerSGD: send two thin factors of each gradient matrix in place of the matrix.

Source: Vogels et al., 2019, https://arxiv.org/abs/1905.13727, Algorithms 1 and 2. Where the paper is silent this is
torch's ``powerSGD_hook``: the error is what the *averaged* approximation leaves of this rank's own gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from torch.distributed import GradBucket

from lightning_distkit.core.collectives import Messages, Steps
from lightning_distkit.core.compression.allreduce import whole_mean_
from lightning_distkit.core.compression.hook import comm_hook
from lightning_distkit.core.compression.low_rank import (
    LowRank,
    add_gradients_to_errors_,
    factor_dtype,
    give_up_,
    low_rank_and_rest,
    measure_,
    measure_errors_,
    multiply_by_gradients_and_errors_,
    multiply_by_sums_,
    new_factors,
    own_factors,
    shape_by_shape,
    take_gradients_from_errors_,
    whole_mean_and_forget_,
    write_products_,
)
from lightning_distkit.core.compression.orthogonalize import orthonormalized
from lightning_distkit.core.compression.powersgd_state import PowerSGDState


@partial(comm_hook, state_class=PowerSGDState)
def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Steps:
    """Average the gradients over the ranks, approximately, by matrices of low rank.

    ``register_comm_hook(state, powerSGD_hook)``. Until iteration ``state.start_powerSGD_iter`` it is a plain
    all-reduce. Every rank ends with the same bits. One or two collectives a bucket: the tensors that are not worth
    compressing travel with the first factors, and the second factors of all buckets travel together.
    """
    return _by_layers(state, bucket) if state.is_compressing else warm_up(state, bucket)


def warm_up(state: PowerSGDState, bucket: GradBucket) -> Steps:
    """The plain mean, before compression starts."""
    yield from whole_mean_(state, bucket)
    state.maybe_increase_iter(bucket)
    return bucket.buffer()


def _by_layers(state: PowerSGDState, bucket: GradBucket) -> Steps:
    items, rest, repaid = low_rank_and_rest(state, bucket)
    if items:
        yield from low_rank_mean_(state, items, rest, repaid)
    else:
        yield from whole_mean_and_forget_(state, bucket, repaid)
    state.maybe_increase_iter(bucket)
    return bucket.buffer()


def low_rank_mean_(
    state: PowerSGDState, items: Sequence[LowRank], rest: Sequence[Tensor], repaid: Sequence[Tensor]
) -> Messages[None]:
    """Mean each item's matrix over the ranks approximately, and each tensor of ``rest`` exactly; both in place.

    The passes over memory are as few as the algorithm allows: gradient and error are multiplied where they lie, and
    the products written where they are needed. Nothing is remembered before every rank knows that the step is finite.
    """
    world_size = state.group.world_size
    dtype = factor_dtype(items[0].matrix.dtype)
    wire = state.wire_dtype or items[0].matrix.dtype
    batches = shape_by_shape(items, same_shape=state.batch_tensors_with_same_shape)
    items = [item for batch in batches for item in batch]

    old_qs = state.factors.orthonormal("q", items)
    all_ps, ps = new_factors(items, "p", dtype)
    for batch in batches:  # P = (G + E) Q
        multiply_by_gradients_and_errors_(batch, ps, old_qs, transposed=True)

    # P is made orthonormal, so its scale is of no account: the mean in place of the sum, lest halves overflow.
    sent = all_ps.to(wire).div_(world_size)
    for tensor in rest:
        tensor.div_(world_size)
    sums = yield (sent, *rest)
    all_ps.copy_(sent)
    if not sums.finite:
        # Some rank's gradient has an inf or a NaN, and by the sums every rank knows. Remember nothing of it.
        give_up_(state, items)
        return

    ps = dict(zip(items, orthonormalized(list(ps.values()), state.orthogonalization_epsilon), strict=True))
    all_qs, qs = new_factors(items, "q", dtype)
    for batch in batches:  # Q = (G + E)ᵀ P
        add_gradients_to_errors_(batch)
        multiply_by_sums_(batch, qs, ps)
    sent = all_qs.to(wire).div_(world_size)
    if state.measurement is not None:
        measure_(state, items, ps, own_factors(sent, items, "q", world_size), sides=("p", "q"))
    sums = yield (sent,)
    if not sums.finite:  # this factor is larger than the first and overflowed, most likely on its way in 16 bits
        take_gradients_from_errors_(items)
        give_up_(state, items)
        return
    all_qs.copy_(sent)

    for batch in batches:
        write_products_(batch, ps, qs)
    state.factors.remember("q", qs)
    state.errors.forget(repaid)
    measure_errors_(state, items)
