"""What was a parameter before the module was sharded is none any more, and whoever still trains it is told.

A module that keeps its parameters a second time, in a list or in another object, would go on with the old ones: whole
on every rank, and never stepped.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def refuse_gradients(params: Iterable[Tensor]) -> None:
    """Have each of these, which are no parameters of a module now, raise a RuntimeError when it gets a gradient."""
    for param in params:
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_refuse)  # goes with the tensor, and keeps nothing alive


def _refuse(param: Tensor) -> None:
    raise RuntimeError(
        f"a parameter of shape {tuple(param.shape)} must be used as it is in its module now, where shard_parameters "
        "has put shards, but the one before has got a gradient, which nobody steps: look parameters up in each forward "
        "(self.layer.weight), and keep none elsewhere"
    )
