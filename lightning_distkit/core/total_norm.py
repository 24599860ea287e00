"""The norm of tensors that are spread over ranks, as one vector."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from lightning_distkit.core.collectives import Group


def total_norm(
    tensors: Sequence[Tensor], norm_type: float, group: Group, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The norm of all ranks' ``tensors`` as one vector: a scalar, the same on every rank. Collective.

    Args:
        tensors: this rank's, which may be none; what several ranks have belongs to one of them.
        norm_type: above 0; may be infinite.
        dtype: of the result, the same on every rank.

    Raises:
        ValueError: another norm_type.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, or infinite, got {norm_type}")
    mine = get_total_norm(list(tensors), norm_type).to(device, dtype)
    if math.isinf(norm_type):
        group.all_reduce(mine, dist.ReduceOp.MAX).wait()
        return mine
    powers = mine**norm_type
    group.all_reduce(powers).wait()
    return powers ** (1 / norm_type)
