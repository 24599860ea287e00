"""Orthonormal rows: Householder's factorisation, a batch at a time.

Unlike Gram-Schmidt it is accurate for any input: rows that are nearly, or exactly, dependent are replaced by others
that are orthogonal to the rest, and zeros give no NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def orthonormalized(factors: Sequence[Tensor], epsilon: float = 0.0) -> list[Tensor]:
    """Factors with the space of these, (r, n) with r <= n in single or double precision, and orthonormal rows.

    Factors of one shape are handled together. A factor of one row that is all zeros stays so.

    Args:
        epsilon: added to each row's norm (that of its part orthogonal to the rows before) before it is divided by.
    """
    by_shape: dict[torch.Size, list[int]] = {}
    for i, factor in enumerate(factors):
        by_shape.setdefault(factor.shape, []).append(i)
    results = list(factors)
    for (r, _), alike in by_shape.items():
        batch = torch.stack([factors[i] for i in alike])  # (k, r, n): a copy, but of thin factors
        if r == 1:
            # By the largest element first: the squares of very small ones vanish, those of very large ones overflow.
            largest = torch.linalg.vector_norm(batch, torch.inf, dim=-1, keepdim=True)  # (k, 1, 1)
            batch = torch.where(largest > 0, batch / largest, 0)
            norm = torch.linalg.vector_norm(batch, dim=-1, keepdim=True)  # at least 1, or 0
            batch = batch / (norm + torch.where(largest > 0, epsilon / largest, 1))
        else:
            q, upper = torch.linalg.qr(batch.mT)  # (k, n, r), (k, r, r); the transposed batch is what LAPACK wants
            batch = q.mT.contiguous()
            if epsilon:
                norms = upper.diagonal(dim1=-2, dim2=-1).abs().unsqueeze(-1)  # (k, r, 1)
                batch = batch * (norms / (norms + epsilon))
        for i, rows in zip(alike, batch, strict=True):
            results[i] = rows
    return results
