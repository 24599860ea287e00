"""Many products of matrices, those of one shape as one batch where they lie at equal distances in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def products_(
    outs: Sequence[Tensor],
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    *,
    add: bool = False,
    batched: bool = False,
) -> None:
    """``out = left @ right`` for each, or ``out += left @ right``, in the memory of ``outs``.

    Args:
        add: add to ``outs``.
        batched: multiply matrices of one shape as one batch where that needs no copy: where all their outs, lefts and
            rights each lie at equal distances in one storage.
    """
    if batched:
        by_shape: dict[tuple[torch.Size, torch.Size], list[int]] = {}
        for i, (left, right) in enumerate(zip(lefts, rights, strict=True)):
            by_shape.setdefault((left.shape, right.shape), []).append(i)
        for alike in by_shape.values():
            of_one_shape = [[some[i] for i in alike] for some in (outs, lefts, rights)]
            batches = [_as_batch(some) for some in of_one_shape]
            match [batch for batch in batches if batch is not None]:
                case [out, left, right] if add:
                    out.baddbmm_(left, right)
                case [out, left, right]:
                    torch.bmm(left, right, out=out)
                case _:
                    products_(*of_one_shape, add=add)
        return
    for out, left, right in zip(outs, lefts, rights, strict=True):
        if add:
            out.addmm_(left, right)
        else:
            torch.mm(left, right, out=out)


def _as_batch(matrices: Sequence[Tensor]) -> Tensor | None:
    """A view (k, n, m) of k matrices (n, m) that lie at equal distances in one storage; None if they do not."""
    first = matrices[0]
    if len(matrices) == 1:
        return first.unsqueeze(0)
    storage, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    distance = matrices[1].storage_offset() - begin
    for i, matrix in enumerate(matrices):
        if (
            matrix.untyped_storage().data_ptr() != storage
            or matrix.stride() != first.stride()
            or matrix.storage_offset() != begin + i * distance
        ):
            return None
    return first.as_strided((len(matrices), *first.shape), (distance, *first.stride()), begin) if distance > 0 else None
