"""A checkpoint file that is mapped and not read: each rank then reads only what it takes."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO


def load_mapped(
    path: Any, weights_only: bool | None, checkpoint_io: CheckpointIO, otherwise: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """The checkpoint at ``path``, mapped where it is a file of torch's; else what ``otherwise()`` loads.

    Raises:
        RuntimeError: it is a file that cannot be read.
    """
    file = Path(path)
    if type(checkpoint_io) is TorchCheckpointIO and file.is_file() and zipfile.is_zipfile(file):
        loaded: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=bool(weights_only))
        return loaded
    try:
        return otherwise()
    except Exception as error:
        if not file.is_file():
            raise
        raise RuntimeError(f"{file} cannot be read as a checkpoint; it may be truncated: {error}") from error
