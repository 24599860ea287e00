"""Products of several matrices, as one batch where they lie at equal distances in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def products_(outs: Sequence[Tensor], lefts: Sequence[Tensor], rights: Sequence[Tensor], *, add: bool = False) -> None:
    """``out = left @ right`` for each, in the memory of ``outs``; all of one shape.

    It is one batched product where that needs no copy: where all outs, all lefts and all rights each lie at equal
    distances in one storage.

    Args:
        add: ``out += left @ right`` instead.
    """
    batches = [_as_batch(each) for each in (outs, lefts, rights)] if len(outs) > 1 else []
    match [batch for batch in batches if batch is not None]:
        case [out, left, right] if add:
            out.baddbmm_(left, right)
        case [out, left, right]:
            torch.bmm(left, right, out=out)
        case _:
            for out, left, right in zip(outs, lefts, rights, strict=True):
                if add:
                    out.addmm_(left, right)
                else:
                    torch.mm(left, right, out=out)


def _as_batch(matrices: Sequence[Tensor]) -> Tensor | None:
    """A view (k, n, m) of k matrices (n, m) that lie at equal distances in one storage; None if they do not."""
    first = matrices[0]
    storage, begin, strides = first.untyped_storage().data_ptr(), first.storage_offset(), first.stride()
    distance = matrices[1].storage_offset() - begin
    for i, matrix in enumerate(matrices):
        if (
            matrix.untyped_storage().data_ptr() != storage
            or matrix.stride() != strides
            or matrix.storage_offset() != begin + i * distance
        ):
            return None
    return first.as_strided((len(matrices), *first.shape), (distance, *strides), begin) if distance > 0 else None
