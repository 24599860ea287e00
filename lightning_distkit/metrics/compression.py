"""What gradient compression saves and what it leaves out.

All are updated with the `Counts` of steps, ``metric.update(ledger.last_step)`` after each, so they go into one
``MetricCollection``. `compute` is over all ranks, and so the same on each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_distkit.core.ledger import Counts


class _OverCounts(Metric):
    """Sums of some fields of `Counts`, over steps and ranks."""

    is_differentiable = False
    full_state_update = False
    fields: tuple[str, ...]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in self.fields:
            # Doubles count bytes exactly up to 9e15. `Metric.half` and the like would round them; it ignores them.
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, counts: Counts) -> None:
        """Add a step.

        Args:
            counts: ``ledger.last_step`` of the strategy or the hook's state; or a sum of several steps.
        """
        if not isinstance(counts, Counts):
            raise TypeError(f"{type(self).__name__} is updated with ledger.last_step, got {type(counts).__name__}")
        for name in self.fields:
            setattr(self, name, getattr(self, name) + getattr(counts, name))

    def _sum(self, name: str) -> Tensor:
        value = getattr(self, name)
        assert isinstance(value, Tensor)
        return value


class WireBytes(_OverCounts):
    """Bytes that all ranks together put on the wire, as a ring all-reduce does."""

    fields = ("nbytes",)
    higher_is_better = False

    def compute(self) -> Tensor:
        return self._sum("nbytes")


class CompressionRate(_OverCounts):
    """Bytes that plain all-reduces of the gradients would have sent, over the bytes that were sent.

    Infinite where nothing was sent at all, 1 in a world of one.
    """

    fields = ("nbytes_whole", "nbytes")
    higher_is_better = True

    def compute(self) -> Tensor:
        whole, sent = self._sum("nbytes_whole"), self._sum("nbytes")
        return torch.where(whole > 0, whole / sent, 1).float()


class ApproximationError(_OverCounts):
    """``sqrt(Σ |M - C|² / Σ |M|²)``: of all that was to be sent, the part that the messages do not stand for.

    M is a rank's gradient with what was left out before, C what its message stands for. 0 for the plain mean, 1 if
    nothing is sent. Counts only steps that were measured (``state.measure()`` before them, or `CompressionStatsLogger`
    at its steps); NaN before the first.
    """

    fields = ("wanted", "left_out")
    higher_is_better = False

    def compute(self) -> Tensor:
        return (self._sum("left_out") / self._sum("wanted")).sqrt().float()
