"""Layers one after another, as in `nn.Sequential`, which may hand on several values."""

from __future__ import annotations

from typing import Any

from torch import nn


class PipeSequential(nn.Sequential):
    """Some consecutive layers of a pipe. The first gets all arguments, each other what the one before it returned.

    A tuple that is returned is the next layer's positional arguments; anything else is its one argument.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values: Any = args
        for layer in self:
            values = layer(*values, **kwargs) if isinstance(values, tuple) else layer(values, **kwargs)
            kwargs = {}
        return values


def call(layers: nn.Module, values: Any) -> Any:
    """Call ``layers`` with what others have returned, as `PipeSequential` does between two of its own."""
    return layers(*values) if isinstance(values, tuple) else layers(values)
