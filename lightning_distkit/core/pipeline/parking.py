"""Gradients that are made before their time: kept apart from ``.grad``, and added to it when they are due."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def set_aside(parameters: Iterable[nn.Parameter]) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Within this the parameters have no gradients; afterwards those that they had before.

    Yields:
        the gradients that were made within, once it has ended without an exception.
    """
    before = {parameter: parameter.grad for parameter in parameters}
    made: dict[nn.Parameter, Tensor] = {}
    for parameter in before:
        parameter.grad = None
    try:
        yield made
        made.update({parameter: parameter.grad for parameter in before if parameter.grad is not None})
    finally:
        for parameter, grad in before.items():
            parameter.grad = grad


@torch.no_grad()
def add(grads: Mapping[nn.Parameter, Tensor]) -> None:
    """Add to ``.grad``; where there is none, without a copy."""
    for parameter, grad in grads.items():
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad.add_(grad)
