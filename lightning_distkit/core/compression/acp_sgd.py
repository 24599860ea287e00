"""ACP-SGD: PowerSGD that computes and sends its two factors in turn, one in each step.

Source: Zhang et al., 2023, https://arxiv.org/abs/2306.08881, Algorithm 2. One product with the gradient, one
orthogonalisation and one message a step in place of two, half the bytes, and nothing to wait for before the last
bucket is here; a step of power iteration takes two steps of training.

As in our PowerSGD, and unlike the paper, the error is what the *averaged* approximation leaves of this rank's gradient.
The trajectory is the same, as only the errors' sum over the ranks enters into it; but so the sum also holds what
rounding took on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from torch.distributed import GradBucket

from lightning_distkit.core.collectives import Messages, Steps
from lightning_distkit.core.compression.hook import comm_hook
from lightning_distkit.core.compression.low_rank import (
    LowRank,
    Side,
    add_gradients_to_errors_,
    factor_dtype,
    give_up_,
    low_rank_and_rest,
    measure_,
    measure_errors_,
    multiply_by_gradients_and_errors_,
    new_factors,
    own_factors,
    shape_by_shape,
    whole_mean_and_forget_,
    write_products_,
)
from lightning_distkit.core.compression.powersgd import warm_up
from lightning_distkit.core.compression.powersgd_state import PowerSGDState


@partial(comm_hook, state_class=PowerSGDState)
def acp_sgd_hook(state: PowerSGDState, bucket: GradBucket) -> Steps:
    """Average the gradients over the ranks, approximately, by one factor of low rank a step: P and Q in turn.

    ``register_comm_hook(state, acp_sgd_hook)``. Until iteration ``state.start_powerSGD_iter`` it is a plain all-reduce.
    Every rank ends with the same bits. One collective a bucket, sent while backward goes on, as plain DDP's; the
    tensors that are not worth compressing travel in it.
    """
    return _by_layers(state, bucket) if state.is_compressing else warm_up(state, bucket)


def _by_layers(state: PowerSGDState, bucket: GradBucket) -> Steps:
    side = state.factors.turn
    items, rest, repaid = low_rank_and_rest(state, bucket, sides=[side])
    if items:
        yield from _one_factor_mean_(state, side, items, rest, repaid)
    else:
        yield from whole_mean_and_forget_(state, bucket, repaid)
    state.maybe_increase_iter(bucket)
    return bucket.buffer()


def _one_factor_mean_(
    state: PowerSGDState, side: Side, items: Sequence[LowRank], rest: Sequence[Tensor], repaid: Sequence[Tensor]
) -> Messages[None]:
    """Mean each item's matrix over the ranks approximately, and each tensor of ``rest`` exactly; both in place.

    Args:
        side: the factor that is computed and sent; the other one is what the step before learned.
    """
    world_size = state.group.world_size
    dtype = factor_dtype(items[0].matrix.dtype)
    wire = state.wire_dtype or items[0].matrix.dtype
    batches = shape_by_shape(items, same_shape=state.batch_tensors_with_same_shape)
    items = [item for batch in batches for item in batch]

    fixed = state.factors.orthonormal("q" if side == "p" else "p", items)
    everything, sought = new_factors(items, side, dtype)
    for batch in batches:  # P = (G + E) Q, or Q = (G + E)ᵀ P
        multiply_by_gradients_and_errors_(batch, sought, fixed, transposed=side == "p")

    # Divide first: a sum of halves over many ranks overflows sooner than their mean.
    sent = everything.to(wire).div_(world_size)
    for tensor in rest:
        tensor.div_(world_size)
    own = own_factors(sent, items, side, world_size) if state.measurement is not None else {}
    sums = yield (sent, *rest)
    if not sums.finite:
        # Some rank's gradient has an inf or a NaN, and by the sums every rank knows. Remember nothing of it.
        give_up_(state, items)
        return
    everything.copy_(sent)

    ps, qs = (sought, fixed) if side == "p" else (fixed, sought)
    for batch in batches:  # G = P Qᵀ, and E = G + E - P Qᵀ
        add_gradients_to_errors_(batch)
        measure_(state, batch, *((own, fixed) if side == "p" else (fixed, own)), sides=[side])
        write_products_(batch, ps, qs)
    state.factors.remember(side, sought)
    state.errors.forget(repaid)
    measure_errors_(state, items)
