"""Layers one after another, as in `nn.Sequential`, which may hand on several values."""

from __future__ import annotations

from typing import Any

from torch import nn


class PipeSequential(nn.Sequential):
    """Some consecutive layers of a pipe. The first gets all arguments, each other what the one before it returned.

    A tuple that is returned is the next layer's positional arguments; anything else is its one argument.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(self) == 0:
            return args[0] if len(args) == 1 else args
        first, *others = self
        values = first(*args, **kwargs)
        for layer in others:
            values = call(layer, values)
        return values


def call(layers: nn.Module, values: Any) -> Any:
    """Call ``layers`` with what others have returned, as `PipeSequential` does between two of its own."""
    return layers(*values) if isinstance(values, tuple) else layers(values)
