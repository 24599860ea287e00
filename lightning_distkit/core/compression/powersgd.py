"""PowerSGD: send two thin factors of each gradient matrix in place of the matrix.

Source: Vogels et al., 2019, https://arxiv.org/abs/1905.13727, Algorithms 1 and 2. Where the paper is silent this is
torch's ``powerSGD_hook``: the error is what the *averaged* approximation leaves of this rank's own gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.distributed import GradBucket

from lightning_distkit.core.collectives import Steps
from lightning_distkit.core.compression.allreduce import mean_
from lightning_distkit.core.compression.hook import comm_hook
from lightning_distkit.core.compression.orthogonalize import orthogonalize_
from lightning_distkit.core.compression.powersgd_state import LowRank, PowerSGDState, factor_dtype
from lightning_distkit.core.compression.products import products_
from lightning_distkit.core.compression.remainder import multiply_


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
    buffer = yield from mean_(bucket.buffer(), state.group)
    state.maybe_increase_iter(bucket)
    return buffer


def _by_layers(state: PowerSGDState, bucket: GradBucket) -> Steps:
    buffer = bucket.buffer()
    items: list[LowRank] = []
    rest: list[Tensor] = []  # travel whole
    n_sent = 0
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        n, m = _matrix_shape(parameter)
        r = min(n, m, state.matrix_approximation_rank)
        if gradient.dim() > 1 and not gradient.is_complex() and state.should_compress(n, m, r):
            error = state.error_of(parameter, n, m, factor_dtype(buffer.dtype))
            items.append(LowRank(parameter, gradient.view(n, m), r, error))
            n_sent += (n + m) * r
        else:
            rest.append(gradient)
            n_sent += gradient.numel()
    state.count(bucket, before=buffer.numel(), after=n_sent)
    if items:
        yield from low_rank_mean_(state, items, rest)
    else:
        yield from mean_(buffer, state.group)
    state.maybe_increase_iter(bucket)
    return buffer


def _matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter's gradient as it lies in the bucket.

    The bucket keeps the parameter's memory order (channels last, transposed), though DDP shows it with the parameter's
    shape. So the rows are what is outermost in memory, not always the first dimension.
    """
    if parameter.dim() < 2 or parameter.numel() == 0:
        return parameter.numel(), 1
    outermost = max(range(parameter.dim()), key=lambda d: (parameter.stride(d), -d))
    n = parameter.shape[outermost]
    return n, parameter.numel() // n


def low_rank_mean_(state: PowerSGDState, items: Sequence[LowRank], rest: Sequence[Tensor]) -> Steps:
    """Mean each item's matrix over the ranks approximately, and each tensor of ``rest`` exactly; both in place.

    The passes over memory are as few as the algorithm allows: gradient and error are multiplied where they lie, and
    the products written where they are needed. Nothing is remembered before every rank knows that the step is finite.
    """
    wire = items[0].matrix.dtype
    dtype = factor_dtype(wire)
    by_shape: dict[object, list[LowRank]] = {}
    for item in items:
        by_shape.setdefault(item.matrix.shape, []).append(item)
    # Shape by shape, so that the factors of one shape are neighbours and can be one batch. If they are not to be, one
    # matrix after the other: what was just written is still in the cache when it is multiplied.
    items = [item for alike in by_shape.values() for item in alike]
    together = list(by_shape.values()) if state.batch_tensors_with_same_shape else [[item] for item in items]

    # Factors are kept as rows, (r, n) and (r, m): on a row-major matrix the products are up to 13 times faster so.
    qs = dict(zip(items, state.factors(items), strict=True))  # (r, m) each, the same on every rank
    all_ps, ps = _factors(items, [(item.r, item.n) for item in items], dtype)
    # P = (G + E) Q
    for some in together:
        of_some = [ps[item] for item in some], [qs[item] for item in some]
        products_(*of_some, [item.matrix.to(dtype).mT for item in some])
        errors = [item.error for item in some if item.error is not None]
        if errors:
            multiply_(*of_some, errors, transposed=True)

    # P is made orthonormal, so its scale is of no account: the mean in place of the sum, lest halves overflow.
    message = torch.cat([all_ps.to(wire), *(tensor.flatten() for tensor in rest)]).div_(state.group.world_size)
    sums = yield message
    all_ps.copy_(message[: all_ps.numel()])
    for tensor, mean in zip(rest, message[all_ps.numel() :].split([t.numel() for t in rest]), strict=True):
        tensor.copy_(mean.view_as(tensor))
    if not sums.finite:
        # Some rank's gradient has an inf or a NaN, and by the sums every rank knows. Say so in the gradients, for a
        # GradScaler or whoever skips the step, and remember nothing of it.
        for item in items:
            item.matrix.fill_(torch.nan)
        return message

    orthogonalize_(list(ps.values()), state.orthogonalization_epsilon)
    all_qs, new_qs = _factors(items, [(item.r, item.m) for item in items], dtype)
    # Q = (G + E)ᵀ P
    for some in together:
        of_some = [new_qs[item] for item in some], [ps[item] for item in some]
        errors = [item.error for item in some if item.error is not None]
        for item in some:
            if item.error is not None:
                item.error.add_(item.matrix)
        if errors:
            multiply_(*of_some, errors)
        else:
            products_(*of_some, [item.matrix.to(dtype) for item in some])
    message = all_qs.to(wire).div_(state.group.world_size)
    sums = yield message
    if not sums.finite:  # this factor is larger than the first and overflowed, most likely on its way in 16 bits
        for item in items:
            if item.error is not None:
                item.error.whole.sub_(item.matrix)
            item.matrix.fill_(torch.nan)
        return message
    all_qs.copy_(message)

    # G = P Qᵀ, and E = G + E - P Qᵀ
    for some in together:
        factors = [ps[item].mT for item in some], [new_qs[item] for item in some]
        if wire == dtype:
            products_([item.matrix for item in some], *factors)
            for item in some:
                if item.error is not None:
                    item.error.subtract_(ps[item], new_qs[item])
        else:
            largest = torch.finfo(wire).max  # saturated: an inf here would stay in the error for ever
            for item, p, q in zip(some, *factors, strict=True):
                item.matrix.copy_(torch.mm(p, q).clamp_(-largest, largest))
                if item.error is not None:
                    item.error.whole.sub_(item.matrix)  # what the cast took is part of the error
    if state.warm_start:
        for item, q in new_qs.items():
            # From a factor of zeros nothing would ever grow again: after a gradient of zeros keep the old one.
            state.q_memory_dict[item.parameter] = torch.where(torch.linalg.vector_norm(q) > 0, q, qs[item])
    return message


def _factors(
    items: Sequence[LowRank], shapes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> tuple[Tensor, dict[LowRank, Tensor]]:
    """Memory for a factor of each item, in one piece, and each one's view of it."""
    whole = torch.empty(sum(map(prod, shapes)), dtype=dtype, device=items[0].matrix.device)
    parts = whole.split([prod(shape) for shape in shapes])
    return whole, {item: part.view(shape) for item, part, shape in zip(items, parts, shapes, strict=True)}
