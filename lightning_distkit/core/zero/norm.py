"""Clipping gradients that are spread over ranks, by their norm or by value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_


def clip_(params: Sequence[Tensor], max_norm: float, norm: Tensor, error_if_nonfinite: bool) -> None:
    """Scale the gradients of ``params`` so that the whole norm, which is ``norm``, is at most ``max_norm``.

    Raises:
        RuntimeError: on every rank, if the norm is not finite and that is to be an error.
    """
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the norm of all gradients must be finite to clip by it, got {norm.item()}")
    clip_grads_with_norm_(list(params), max_norm, norm)


def clip_values_(params: Sequence[Tensor], clip_value: float, dtypes: Iterable[torch.dtype]) -> None:
    """Bring each element of the gradients of ``params``, which may be none, between ``-clip_value`` and ``clip_value``.

    Args:
        dtypes: of all parameters, also those of other ranks.

    Raises:
        ValueError: on every rank, if some are complex.
    """
    if complexes := sorted({str(dtype) for dtype in dtypes if dtype.is_complex}):
        raise ValueError(
            f"gradients clipped by value must be real, got {' and '.join(complexes)}; clip by norm, or train "
            "torch.view_as_real of such a parameter"
        )
    if params:  # torch raises where there are none
        clip_grad_value_(params, clip_value)
