"""What compression leaves out of a gradient, to be added to the next one: error feedback with fewer passes over memory.

The error is ``E = M - P Qᵀ``, where M is all that was to be sent. It is not subtracted at once, but when M's memory is
written the next time anyway; until then M stays beside the two thin factors. Nothing but its rounding depends on that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_distkit.core.compression.products import product_, products_


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

    def value(self) -> Tensor:
        """The error itself, a copy."""
        return Remainder(self.whole.clone(), self.p, self.q).settle_()

    def settle_(self) -> Tensor:
        """Subtract now; the error itself, in ``whole``."""
        if self.p is not None and self.q is not None:
            product_(self.whole, self.p.mT, self.q, sign=-1)
        self.p = self.q = None
        return self.whole


def add_products_(outs: Sequence[Tensor], lefts: Sequence[Tensor], remainders: Sequence[Remainder]) -> None:
    """``out += left @ errorᵀ`` for each, all of one shape; the errors are only read."""
    products_(outs, lefts, [each.whole.mT for each in remainders], add=True)
    for out, left, each in zip(outs, lefts, remainders, strict=True):
        if each.p is not None and each.q is not None:
            out.addmm_(left @ each.q.mT, each.p, alpha=-1)
