"""Clipping as a loop says it: by parameters, whichever sharded optimizers step them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

from lightning_distkit.core.total_norm import total_norm
from lightning_distkit.core.zero import norm
from lightning_distkit.core.zero.dtensor_optimizer import DTensorOptimizer
from lightning_distkit.core.zero.optimizer import ZeroOptimizer

Sharded = ZeroOptimizer | DTensorOptimizer


@torch.no_grad()
def clip_grad_norm_(
    optimizers: Sequence[Sharded],
    params: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_`` on the whole gradients of ``params``: of one optimizer, several, or a part.

    Collective.

    Args:
        optimizers: of one group of ranks, all those that step any of ``params``.
        params: the same on every rank. One that is trained, but not by these optimizers, must have no gradient.

    Returns:
        the norm before, the same on every rank.

    Raises:
        ValueError: on every rank, if a gradient is there that nobody reduces.
    """
    params = list(dict.fromkeys(params))
    shares = _shares(optimizers, params)
    first = optimizers[0]
    group = first.group_of_shards() if isinstance(first, DTensorOptimizer) else first.group
    pieces = [piece for optimizer, its in shares for piece in optimizer.pieces(its)]
    dtype = reduce(torch.promote_types, (param.dtype for param in params), torch.float32)
    total = total_norm([p.grad for p in pieces if p.grad is not None], norm_type, group, first.device, dtype)
    norm.clip_(pieces, max_norm, total, error_if_nonfinite)
    for optimizer, _ in shares:
        optimizer.edited()
    return total


@torch.no_grad()
def clip_grad_value_(optimizers: Sequence[Sharded], params: Iterable[Tensor], clip_value: float) -> None:
    """As ``torch.nn.utils.clip_grad_value_`` on the whole gradients of ``params``; as `clip_grad_norm_` otherwise."""
    for optimizer, its in _shares(optimizers, list(dict.fromkeys(params))):
        norm.clip_values_(optimizer.pieces(its), clip_value, (param.dtype for param in its))
        optimizer.edited()


def _shares(optimizers: Sequence[Sharded], params: Sequence[Tensor]) -> list[tuple[Sharded, list[Tensor]]]:
    """Each optimizer that steps some of ``params``, and which."""
    shares: list[tuple[Sharded, list[Tensor]]] = []
    rest = dict.fromkeys(params)
    for optimizer in optimizers:
        own = {param for param_group in optimizer.param_groups for param in param_group["params"]}
        if mine := [param for param in rest if param in own]:
            shares.append((optimizer, mine))
            rest = dict.fromkeys(param for param in rest if param not in own)
    trained = [param for param in rest if param.requires_grad]
    if trained and optimizers:  # the same on every rank, unlike who has gradients
        shapes = [tuple(param.shape) for param in trained if param.grad is not None]
        refusal = (
            "clipping must be by parameters of prepared optimizers, whose gradients ZeRO reduces; those of shape "
            f"{', '.join(map(str, shapes))} have a gradient of this rank alone: give them to an optimizer, freeze them "
            "(requires_grad_(False)), or leave them out"
        )
        optimizers[0].group.refuse_together(refusal if shapes else None, optimizers[0].device)
    return shares
