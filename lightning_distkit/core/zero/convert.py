"""A sharded checkpoint as the one file that ``torch.save`` would have made; without a process group."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from lightning_distkit.core.zero.checkpoint_folder import read_sharded_checkpoint
from lightning_distkit.core.zero.saved_tensor import SavedTensor


def convert_sharded_checkpoint(path: str | Path, out: str | Path, *, weights_only: bool = True) -> None:
    """Write the checkpoint in the folder ``path`` to the file ``out``, which is there when it is complete.

    One tensor is in memory at a time; beside ``out`` as much space is needed again until it is written.

    Args:
        weights_only: as for ``torch.load``, of what is not in the large tensors.

    Raises:
        ValueError: there is no such checkpoint, or it is not complete.
        FileExistsError: there is something at ``out``.
    """
    out = Path(out)
    if os.path.lexists(out):
        raise FileExistsError(f"{out} must not be there yet; move it away, or name another file")
    checkpoint = read_sharded_checkpoint(path, weights_only=weights_only)
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        torch.save(_Mapped(Path(scratch)).all_of(checkpoint), Path(scratch, out.name))
        Path(scratch, out.name).rename(out)


class _Mapped:
    """Tensors in files of their own, so that the kernel need not keep them in memory until they are saved."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Tensor] = {}  # by name, as tied ones are to be one tensor

    def all_of(self, tree: Any) -> Any:
        if isinstance(tree, SavedTensor):
            if tree.key not in self._known:
                self._known[tree.key] = self._mapped(tree)
            return self._known[tree.key]
        if type(tree) in (dict, OrderedDict):
            for key, value in tree.items():
                tree[key] = self.all_of(value)
        elif type(tree) in (list, tuple):
            return type(tree)(self.all_of(value) for value in tree)
        return tree

    def _mapped(self, saved: SavedTensor) -> Tensor:
        file = self._folder / str(len(self._known))
        mapped = torch.from_file(str(file), shared=True, size=saved.numel(), dtype=saved.dtype).view(saved.shape)
        file.unlink()
        return mapped.copy_(saved)
