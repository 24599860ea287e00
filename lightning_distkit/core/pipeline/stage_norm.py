"""The norm of gradients over all stages, clipping by it, and loss scaling: what one stage finds holds for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.total_norm import total_norm


def grad_norm(
    parameters: Iterable[Tensor],
    counts: Callable[[Tensor], bool],
    group: Group,
    device: torch.device,
    norm_type: float = 2.0,
) -> Tensor:
    """The norm of the gradients of all stages as one vector: a scalar, the same on every rank. Collective.

    Args:
        parameters: this rank's, other stages' placeholders among them or not.
        counts: whether a parameter counts on this rank; what several ranks have counts on one.

    Raises:
        ValueError: norm_type is not above 0.
    """
    grads = [each.grad for each in parameters if each.grad is not None and counts(each)]
    return total_norm(grads, norm_type, group, device, torch.float64)


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale this rank's gradients so that the norm over all stages, which is ``norm``, is at most ``max_norm``."""
    clip_grads_with_norm_([each for each in parameters if each.grad is not None], max_norm, norm)


class StageGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose stages skip a step together, if one of them finds an inf or a NaN."""

    stages: Group
    device: torch.device
    before: type[torch.amp.GradScaler]

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # A stage without gradients has found nothing, but takes part.
        anywhere = sum((each.to(self.device) for each in found.values()), torch.zeros(1, device=self.device))
        self.stages.all_reduce(anywhere, dist.ReduceOp.MAX).wait()
        return {self.device: anywhere}

    @classmethod
    def take_over(cls, scaler: Any, stages: Group, device: torch.device) -> None:
        """Make of a scaler, in place, one that asks all stages."""
        before = type(scaler)
        scaler.__class__ = cls
        scaler.stages, scaler.device, scaler.before = stages, device, before

    def hand_back(self) -> None:
        """Make it an ordinary one again."""
        before = self.before
        del self.stages, self.device, self.before
        self.__class__ = before  # type: ignore[assignment]
