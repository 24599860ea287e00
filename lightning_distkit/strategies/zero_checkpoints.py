"""The Trainer's sharded checkpoints: written while training goes on if wished, and old ones kept until a new one is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.zero import SavedTensor, ShardedCheckpointWriter, read_sharded_checkpoint

logger = logging.getLogger(__name__)

_LAZY = ("state_dict", "optimizer_states")  # who loads these reads what it needs; what the rest is for, nobody knows


class ShardedCheckpoints:
    """What a strategy that saves them keeps.

    Args:
        asynchronous: whether training goes on meanwhile.
    """

    def __init__(self, asynchronous: bool) -> None:
        self._asynchronous = asynchronous
        self._writer: ShardedCheckpointWriter | None = None
        self._world: dist.ProcessGroup | None = None  # that of the writer
        self._superseded: list[Callable[[], None]] = []  # removals, to be done when the one under way is in its place
        self.is_training = False  # so that somebody will wait

    def save(
        self, checkpoint: dict[str, Any], path: Any, replicated: Iterable[Tensor], timeout: timedelta | None
    ) -> None:
        """As `ShardedCheckpointWriter.save`."""
        self.wait()
        if self._writer is None or self._world is not dist.group.WORLD:
            self._writer, self._world = ShardedCheckpointWriter(timeout=timeout), dist.group.WORLD
        asynchronous = self._asynchronous and self.is_training
        self._writer.save(checkpoint, path, replicated=replicated, asynchronous=asynchronous)

    def wait(self) -> None:
        """Until none is under way; raises what went wrong, and then what it supersedes is kept."""
        superseded, self._superseded = self._superseded, []
        if self._writer is not None:
            self._writer.wait()
        for remove in superseded:
            remove()

    def finish(self, failed: bool) -> None:
        """`wait`, at the end. After an error of the training, another one is only said."""
        self.is_training = False
        try:
            self.wait()
        except Exception:
            if not failed:
                raise
            logger.exception("the last checkpoint could not be saved either; those before it are still there")

    def remove(self, remove: Callable[[], None]) -> None:
        """Call this at once, or, as it may remove the only complete one, when the one under way is in its place."""
        if self._writer is not None and self._writer.is_under_way:
            self._superseded.append(remove)
        else:
            remove()


def read(path: Path, weights_only: bool, device: torch.device) -> dict[str, Any]:
    """As `read_sharded_checkpoint`; every rank raises, or none.

    Of weights and optimizers nothing is read yet; all else is.

    Args:
        device: of this rank, for messages.
    """
    checkpoint: dict[str, Any] = {}
    refusal = None
    try:
        checkpoint = read_sharded_checkpoint(path, weights_only=weights_only)
    except ValueError as error:
        refusal = str(error)
    Group.of(None).refuse_together(refusal, device)
    return {key: value if key in _LAZY else _read(value) for key, value in checkpoint.items()}


def _read(tree: Any) -> Any:
    if isinstance(tree, SavedTensor):
        return tree.read()
    if isinstance(tree, dict):
        for key, value in tree.items():
            tree[key] = _read(value)
    elif type(tree) in (list, tuple):
        return type(tree)(_read(value) for value in tree)
    return tree


def refuse_other_shapes(module: torch.nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Before anything is loaded, of which torch would tell only afterwards.

    Raises:
        ValueError: a tensor is of another shape than the module's of that name.
    """
    for name, value in module.state_dict(keep_vars=True).items():
        other = state_dict.get(name)
        if not (isinstance(value, Tensor) and isinstance(other, Tensor)) or torch.nn.parameter.is_lazy(value):
            continue
        if other.shape != value.shape:
            raise ValueError(
                f"the checkpoint must be one of this {type(module).__name__}, but {name} must be of shape "
                f"{tuple(value.shape)}, got {tuple(other.shape)}"
            )
