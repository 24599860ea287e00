"""How much of a pipe's time its stages do nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_distkit.core.pipeline.timeline import Timeline


class PipelineBubble(Metric):
    """Of the time from a step's first action to its last, over all stages, the share in which a stage does nothing.

    Updated with `Timeline`\\ s, ``metric.update(timeline)``: measured ones, as ``PipelineTimeline.timeline`` is, or
    simulated ones. `compute` is over all steps and ranks; NaN before the first.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    busy: Tensor
    whole: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("busy", "whole"):  # seconds, of all stages together
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, timeline: Timeline) -> None:
        """Add a step."""
        if not isinstance(timeline, Timeline):
            raise TypeError(f"PipelineBubble is updated with a Timeline, got {type(timeline).__name__}")
        self.busy += sum(slot.end - slot.begin for rank in timeline.ranks for slot in rank)
        self.whole += timeline.duration * len(timeline.ranks)

    def compute(self) -> Tensor:
        return (1 - self.busy / self.whole).float()
