"""One stage of a pipe that lives here: its layers, and the skip connections that end or begin in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_distkit.core.pipeline.checkpoint import InPlace
from lightning_distkit.core.pipeline.sequential import PipeSequential
from lightning_distkit.core.pipeline.skip import SkipKey, carried


class Stage:
    """One stage that lives here.

    Args:
        pops: for each stage that stashes something for this one, in order, the keys.
        stashes: for each stage that pops something of this one, in order, the keys.
    """

    def __init__(
        self,
        index: int,
        layers: PipeSequential,
        device: torch.device,
        pops: dict[int, list[SkipKey]],
        stashes: dict[int, list[SkipKey]],
    ) -> None:
        self.index = index
        self.layers = layers
        self.device = device
        self.pops = pops
        self.stashes = stashes
        self.in_place = InPlace(f"stage {index}")
        self._buffers: set[int] = set()

    def refresh(self, layers: Mapping[str, nn.Module]) -> None:
        """At the beginning of a call: somebody may have put another layer, or buffer, in place of one."""
        self.layers._modules.update(layers)
        self._buffers = {buffer.untyped_storage().data_ptr() for buffer in self.layers.buffers()}

    def is_buffer(self, tensor: Tensor) -> bool:
        """Whether its memory is a buffer's."""
        return bool(self._buffers) and tensor.untyped_storage().data_ptr() in self._buffers

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], skips: Sequence[list[Tensor | None]]) -> Any:
        """What the stage returns, and for each stage that pops what it has stashed for that one."""
        keys = [key for its in self.pops.values() for key in its]
        values = [value for its in skips for value in its]
        with carried(dict(zip(keys, values, strict=True))) as tracker:
            output = self.layers(*args, **kwargs)
        return output, [[tracker.stashed.get(key) for key in its] for its in self.stashes.values()]
