"""PowerSGD and ACP-SGD as slowly and plainly as they can be written: all ranks in one process, a matrix at a time.

Sources: Vogels et al., 2019, Algorithms 1 and 2, with torch's choice of the error; Zhang et al., 2023, Algorithm 2,
with the paper's own: what this rank's own factor, not the mean of all, leaves of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable

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
        self.factors: dict[str, Tensor] = {}  # from which the next step starts

    def means(self, gradients: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """One step: for each name, each rank's gradient (n, m); in the order in which DDP's buckets come."""
        generator: torch.Generator | None = None
        result = {}
        for name, each in gradients.items():
            n, m = each[0].shape
            if not self.warm_start or name not in self.factors:
                if generator is None:
                    generator = torch.Generator().manual_seed(int(self.random.randint(1_000_000_000)))
                self.factors[name] = torch.randn(1, self.length(n, m), min(n, m, self.r), generator=generator)[0]
            errors = self.errors.get(name, [torch.zeros(n, m) for _ in each])
            whole = [g + e for g, e in zip(each, errors, strict=True)] if self.error_feedback else each
            result[name], self.errors[name], self.factors[name] = self.step(whole, self.factors[name])
        return result

    def length(self, n: int, m: int) -> int:
        return m

    def step(self, whole: list[Tensor], q: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """The approximate mean, each rank's error, and the factor for the next step."""
        q = torch.linalg.qr(q).Q
        p = torch.linalg.qr(sum(g @ q for g in whole)).Q
        q = sum(g.mT @ p for g in whole) / len(whole)
        return p @ q.mT, [g - p @ q.mT for g in whole], q


class AlternatingReference(Reference):
    """ACP-SGD."""

    sends_p = False

    def means(self, gradients: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        self.sends_p = not self.sends_p
        return super().means(gradients)

    def length(self, n: int, m: int) -> int:
        return m if self.sends_p else n

    def step(self, whole: list[Tensor], fixed: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        fixed = torch.linalg.qr(fixed).Q
        own = [g @ fixed if self.sends_p else g.mT @ fixed for g in whole]
        approximated: Callable[[Tensor], Tensor] = lambda f: f @ fixed.mT if self.sends_p else fixed @ f.mT  # noqa: E731
        mean = sum(own) / len(own)
        return approximated(mean), [g - approximated(f) for g, f in zip(whole, own, strict=True)], mean
