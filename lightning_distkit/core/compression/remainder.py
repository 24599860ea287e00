"""What compression leaves out of a gradient, to be added to the next one: error feedback with few passes over memory.

The error is ``E = M - P Qᵀ``, where M is all that was to be sent. The product is not subtracted at once: to take a few
of them from M together costs no more passes over M than to take one. Until then they are kept as thin factors, and
taken into account in every product of the error. Nothing but its rounding depends on that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_distkit.core.compression.products import product_, products_

# So many rows of factors are subtracted in the time of one (MKL; measured on matrices of 4 MB).
_FACTORS_AT_ONCE = 16


class Remainder:
    """The error of one matrix: ``whole - pᵀ q``, or ``whole`` where there are no factors.

    Args:
        whole: (n, m), of this rank alone; its memory is used.
        p: (s, n), the same on every rank.
        q: (s, m), the same on every rank.
    """

    def __init__(self, whole: Tensor, p: Tensor | None = None, q: Tensor | None = None) -> None:
        self.whole = whole
        self.p = p
        self.q = q

    def to(self, device: torch.device) -> Remainder:
        """A copy on that device."""
        p, q = (factor if factor is None else factor.to(device, copy=True) for factor in (self.p, self.q))
        return Remainder(self.whole.to(device, copy=True), p, q)

    def value(self, out: Tensor | None = None) -> Tensor:
        """The error itself, a copy; in the memory of ``out``, if there is one."""
        copy = self.whole.clone() if out is None else out.copy_(self.whole)
        return Remainder(copy, self.p, self.q).settle_()

    def settle_(self) -> Tensor:
        """Subtract now; the error itself, in ``whole``."""
        if self.p is not None and self.q is not None:
            product_(self.whole, self.p.mT, self.q, sign=-1)
        self.p = self.q = None
        return self.whole

    def subtract_(self, p: Tensor, q: Tensor) -> None:
        """``error -= pᵀ q``, with factors (r, n) and (r, m); where these are few, later."""
        if self.p is not None and self.q is not None:
            p, q = torch.cat([self.p, p]), torch.cat([self.q, q])
        self.p, self.q = p, q

    def add_(self, matrix: Tensor) -> None:
        """``error += matrix``."""
        if self.p is not None and self.p.shape[0] >= _FACTORS_AT_ONCE:
            self.settle_()  # here, where the memory is written anyway
        self.whole.add_(matrix)


def multiply_(
    outs: Sequence[Tensor],
    lefts: Sequence[Tensor],
    remainders: Sequence[Remainder],
    *,
    transposed: bool = False,
    add: bool = False,
) -> None:
    """``out = left @ error`` for each, all of one shape; the errors are only read.

    Args:
        transposed: the error's transpose in place of the error.
        add: ``out +=`` in place of ``out =``.
    """
    products_(outs, lefts, [each.whole.mT if transposed else each.whole for each in remainders], add=add)
    for out, left, each in zip(outs, lefts, remainders, strict=True):
        if each.p is not None and each.q is not None:
            first, second = (each.q, each.p) if transposed else (each.p, each.q)
            out.addmm_(left @ first.mT, second, alpha=-1)
