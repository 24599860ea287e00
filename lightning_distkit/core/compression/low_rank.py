"""Gradients that travel as two thin factors, and which of a bucket's do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.distributed import GradBucket

from lightning_distkit.core.collectives import Messages
from lightning_distkit.core.compression.allreduce import whole_mean_
from lightning_distkit.core.compression.products import product_, products_
from lightning_distkit.core.compression.remainder import Remainder, multiply_

if TYPE_CHECKING:
    from lightning_distkit.core.compression.powersgd_state import PowerSGDState

Side = Literal["p", "q"]
"""Which factor: P has the matrix's rows, Q its columns."""


@dataclass(eq=False)
class LowRank:
    """A gradient that travels as factors P (n, r) and Q (m, r); they are kept as rows, (r, n) and (r, m).

    On a row-major matrix the products are up to 13 times faster so.
    """

    parameters: Sequence[Tensor]  # whose gradient it is; of the batched hook several
    position: int  # of the first of them in the module's order
    matrix: Tensor  # (n, m), a view of the bucket
    r: int  # columns of its factors
    error: Remainder | None  # (n, m), of this rank alone; None without error feedback

    @property
    def parameter(self) -> Tensor:
        """Under which its factors are remembered."""
        return self.parameters[0]

    def factor_shape(self, side: Side) -> tuple[int, int]:
        return self.r, self.n if side == "p" else self.m

    @property
    def n(self) -> int:
        return self.matrix.shape[0]

    @property
    def m(self) -> int:
        return self.matrix.shape[1]


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Halves are factorised, and their errors remembered, in single precision: there is no QR for them."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def low_rank_and_rest(
    state: PowerSGDState, bucket: GradBucket, *, sides: Sequence[Side] = ("p", "q")
) -> tuple[list[LowRank], list[Tensor], list[Tensor]]:
    """The gradients of a bucket that travel as factors, and those that travel whole; both views of the bucket.

    To a gradient that travels whole what was left out before is added, from when it was compressed; last comes of which
    parameters. These errors are to be forgotten if the step is finite.

    Args:
        sides: the factors that travel in this step, to be counted.
    """
    items: list[LowRank] = []
    rest: list[Tensor] = []
    repaid: list[Tensor] = []
    n_sent = 0
    dtype = factor_dtype(bucket.buffer().dtype)
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        n, m = _matrix_shape(parameter)
        r = min(n, m, state.rank_of(parameter)) if gradient.dim() > 1 and not gradient.is_complex() else 0
        if r and state.should_compress(n, m, r):
            error = state.errors.of(parameter, n, m, dtype) if state.use_error_feedback else None
            items.append(LowRank([parameter], state.position_of(parameter), gradient.view(n, m), r, error))
            n_sent += sum(prod(items[-1].factor_shape(side)) for side in sides)
        else:
            rest.append(gradient)
            if state.use_error_feedback and state.errors.repay_(parameter, gradient):
                repaid.append(parameter)
            n_sent += gradient.numel()
    state.count(bucket, before=bucket.buffer().numel(), after=n_sent)
    if state.measurement is not None and items:  # a bucket without is measured by who averages it
        compressed = {item.parameter for item in items}
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter not in compressed:
                state.measurement.add([parameter], gradient.nbytes, wanted=gradient)
    return items, rest, repaid


def _matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter's gradient as it lies in the bucket.

    The bucket keeps the parameter's memory order (channels last, transposed), though DDP shows it with the parameter's
    shape. So the rows are what is outermost in memory, not always the first dimension.
    """
    if parameter.dim() < 2 or parameter.numel() == 0:
        return parameter.numel(), 1
    n = parameter.shape[memory_order(parameter)[0]]
    return n, parameter.numel() // n


def memory_order(parameter: Tensor) -> tuple[int, ...]:
    """Its dimensions from the outermost in memory to the innermost."""
    strides = parameter.stride()
    return tuple(sorted(range(len(strides)), key=lambda d: (-strides[d], d)))


def shape_by_shape(items: Sequence[LowRank], *, same_shape: bool) -> list[list[LowRank]]:
    """All items, shape by shape, those of one shape together if asked for, and otherwise one by one.

    So the factors of one shape are neighbours and can be one batch. One by one, what was just written is still in the
    cache when it is multiplied.
    """
    by_shape: dict[object, list[LowRank]] = {}
    for item in items:
        by_shape.setdefault((item.matrix.shape, item.r), []).append(item)
    return list(by_shape.values()) if same_shape else [[item] for alike in by_shape.values() for item in alike]


def new_factors(items: Sequence[LowRank], side: Side, dtype: torch.dtype) -> tuple[Tensor, dict[LowRank, Tensor]]:
    """Memory for a factor of each item, in one piece, and each one's view of it."""
    shapes = [item.factor_shape(side) for item in items]
    whole = torch.empty(sum(map(prod, shapes)), dtype=dtype, device=items[0].matrix.device)
    parts = whole.split([prod(shape) for shape in shapes])
    return whole, {item: part.view(shape) for item, part, shape in zip(items, parts, shapes, strict=True)}


Factors = Mapping[LowRank, Tensor]


def multiply_by_gradients_and_errors_(
    batch: Sequence[LowRank], outs: Factors, lefts: Factors, *, transposed: bool = False
) -> None:
    """``out = left @ (G + E)``, or by the transpose, for matrices of one shape; both are only read."""
    dtype = outs[batch[0]].dtype
    matrices = [item.matrix.to(dtype) for item in batch]
    of_batch = [outs[item] for item in batch], [lefts[item] for item in batch]
    products_(*of_batch, [matrix.mT if transposed else matrix for matrix in matrices])
    errors = [item.error for item in batch if item.error is not None]
    if errors:
        multiply_(*of_batch, errors, transposed=transposed, add=True)


def add_gradients_to_errors_(batch: Sequence[LowRank]) -> None:
    for item in batch:
        if item.error is not None:
            item.error.add_(item.matrix)


def take_gradients_from_errors_(batch: Sequence[LowRank]) -> None:
    """Undo `add_gradients_to_errors_`, but for rounding."""
    for item in batch:
        if item.error is not None:
            item.error.whole.sub_(item.matrix)


def multiply_by_sums_(batch: Sequence[LowRank], outs: Factors, lefts: Factors) -> None:
    """``out = left @ (G + E)`` for matrices of one shape, where the gradients were added to the errors already."""
    of_batch = [outs[item] for item in batch], [lefts[item] for item in batch]
    errors = [item.error for item in batch if item.error is not None]
    if errors:
        multiply_(*of_batch, errors)
    else:
        products_(*of_batch, [item.matrix.to(outs[item].dtype) for item in batch])


def write_products_(batch: Sequence[LowRank], ps: Factors, qs: Factors) -> None:
    """``G = P Qᵀ``, and what is left in the errors, to which the gradients were added: ``E = E - P Qᵀ``."""
    lefts, rights = [ps[item].mT for item in batch], [qs[item] for item in batch]
    if batch[0].matrix.dtype == rights[0].dtype:
        products_([item.matrix for item in batch], lefts, rights)
        for item in batch:
            if item.error is not None:
                item.error.subtract_(ps[item], qs[item])
    else:
        largest = torch.finfo(batch[0].matrix.dtype).max  # saturated: an inf here would stay in the error for ever
        for item, left, right in zip(batch, lefts, rights, strict=True):
            item.matrix.copy_(torch.mm(left, right).clamp_(-largest, largest))
            if item.error is not None:
                item.error.whole.sub_(item.matrix)  # what the cast took is part of the error


def own_factors(sent: Tensor, items: Sequence[LowRank], side: Side, world_size: int) -> dict[LowRank, Tensor]:
    """What the message of this rank alone, already divided by the world size, has of each item: copies."""
    whole, factors = new_factors(items, side, factor_dtype(items[0].matrix.dtype))
    whole.copy_(sent).mul_(world_size)
    return factors


def measure_(
    state: PowerSGDState, items: Sequence[LowRank], ps: Factors, qs: Factors, *, sides: Sequence[Side]
) -> None:
    """Note what was to be sent and what the factors of this rank leave of it, if the step is measured.

    Args:
        sides: the factors that travel.
    """
    if state.measurement is None:
        return
    for item in items:
        scratch = state.measurement.scratch(item.matrix, ps[item].dtype)
        wanted = item.error.value(out=scratch) if item.error is not None else scratch.copy_(item.matrix)
        itemsize = (state.wire_dtype or item.matrix.dtype).itemsize
        nbytes_sent = itemsize * sum(prod(item.factor_shape(side)) for side in sides)
        state.measurement.add(item.parameters, nbytes_sent, wanted)
        product_(wanted, ps[item].mT, qs[item], sign=-1)
        state.measurement.add_left_out(item.parameters, wanted)


def measure_errors_(state: PowerSGDState, items: Sequence[LowRank]) -> None:
    """Note what is remembered for the next step, if the step is measured."""
    for item in items:
        if state.measurement is not None and item.error is not None:
            scratch = state.measurement.scratch(item.matrix, item.error.whole.dtype)
            state.measurement.add_error(item.parameters, item.error.value(out=scratch))


def whole_mean_and_forget_(state: PowerSGDState, bucket: GradBucket, repaid: Sequence[Tensor]) -> Messages[None]:
    """The plain mean of a bucket in which nothing is compressed; the repaid errors are forgotten if it is finite."""
    sums = yield from whole_mean_(state, bucket)
    if repaid and sums.finite:
        state.errors.forget(repaid)


def give_up_(state: PowerSGDState, items: Sequence[LowRank]) -> None:
    """The step is not finite: say so in the gradients, for a GradScaler or whoever skips it."""
    if state.measurement is not None:
        state.measurement.is_finite = False
    for item in items:
        item.matrix.fill_(torch.nan)
