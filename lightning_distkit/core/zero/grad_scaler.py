"""Loss scaling where each rank sees only its shard of the gradients: an inf on one skips the step on all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_distkit.core.zero.optimizer import ZeroOptimizer


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler``, for a `ZeroOptimizer` too. With torch's own, such an optimizer refuses to step."""

    def unscale_(self, optimizer: Optimizer) -> None:
        _mark(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        _mark(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if not isinstance(optimizer, ZeroOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        optimizer.reduce_gradients()
        found = super()._unscale_grads_(optimizer.inner, inv_scale, found_inf, allow_fp16)
        # A rank whose shard has no gradients has found nothing, but takes part.
        anywhere = sum(found.values(), torch.zeros_like(found_inf)).to(optimizer.device)
        optimizer.group.all_reduce(anywhere, dist.ReduceOp.MAX).wait()
        return {optimizer.device: anywhere}


def _mark(optimizer: Optimizer) -> None:
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.is_unscaled_by_ours = True
