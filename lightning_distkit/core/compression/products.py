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
                product_(out, left, right, sign=int(add))


def product_(out: Tensor, left: Tensor, right: Tensor, *, sign: int = 0) -> None:
    """``out = left @ right``, or with a sign of 1 or -1 ``out += sign * left @ right``, in the memory of ``out``."""
    inner, m = right.shape
    if out.device.type == "cpu" and out.numel() >= 1 << 18 and (inner <= 2 or (inner <= 4 and m % 1024 == 0)):
        # A large product of two thin factors is bound by memory, and as fast as a few outer products; MKL takes up to
        # three times as long for it where the rows of `out` are a multiple of 4096 bytes apart.
        for i in range(inner):
            if i == 0 and sign == 0:
                torch.mul(left[:, :1], right[0], out=out)
            else:
                out.addcmul_(left[:, i : i + 1], right[i], value=sign or 1)
    else:
        out.addmm_(left, right, beta=abs(sign), alpha=sign or 1)


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
