"""PowerSGD as slowly and plainly as it can be written: all ranks in one process, one matrix at a time.

Source: Vogels et al., 2019, Algorithms 1 and 2, with torch's choice of the error.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor


class Reference:
    """Means of matrices over the ranks, by factors of rank ``r``."""

    def __init__(self, r: int, *, error_feedback: bool = True, warm_start: bool = True, seed: int = 0) -> None:
        self.r = r
        self.error_feedback = error_feedback
        self.warm_start = warm_start
        self.random = numpy.random.RandomState(seed)
        self.errors: dict[str, list[Tensor]] = {}  # of each rank
        self.qs: dict[str, Tensor] = {}

    def means(self, gradients: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """One step: for each name, each rank's gradient (n, m); in the order in which DDP's buckets come."""
        generator: torch.Generator | None = None
        result = {}
        for name, each in gradients.items():
            n, m = each[0].shape
            if not self.warm_start or name not in self.qs:
                if generator is None:
                    generator = torch.Generator().manual_seed(int(self.random.randint(1_000_000_000)))
                self.qs[name] = torch.randn(1, m, min(n, m, self.r), generator=generator)[0]
            errors = self.errors.get(name, [torch.zeros(n, m) for _ in each])
            whole = [g + e for g, e in zip(each, errors, strict=True)] if self.error_feedback else each
            q = torch.linalg.qr(self.qs[name]).Q
            p = torch.linalg.qr(sum(g @ q for g in whole)).Q
            q = sum(g.mT @ p for g in whole) / len(whole)
            result[name] = p @ q.mT
            self.errors[name] = [g - result[name] for g in whole]
            self.qs[name] = q
        return result
