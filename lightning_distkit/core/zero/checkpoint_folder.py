"""The folder of a sharded checkpoint: put in its place at once when it is complete, and checked before it is read.

It is one of ``torch.distributed.checkpoint``, ``.metadata`` and ``*.distcp``, and beside them ``meta.pt``: the
checkpoint without its large tensors, with a table of where those stand.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_distkit.core.zero.parts import fill
from lightning_distkit.core.zero.saved_tensor import Files

META = "meta.pt"  # Lightning's name: by it, it takes a folder for a sharded checkpoint
METADATA = ".metadata"  # torch's
TABLE = "sharded_tensors"  # the key of the table in META: name -> where it stands, as paths of keys


# -- in its place


def saving_folder(path: Path) -> Path:
    """Where a checkpoint is written that will be at ``path``; one that was not finished is left there.

    In a folder of its own, as whoever looks for ``*.ckpt`` beside ``path`` must not find it.
    """
    return path.parent / ".saving" / path.name


def replaced_folder(path: Path) -> Path:
    """Where what was at ``path`` is for the moment in which it is replaced."""
    return path.parent / ".replaced" / path.name


def put_in_place(path: Path) -> None:
    """Make what is in `saving_folder` the checkpoint at ``path``.

    Whenever the process is killed, a complete checkpoint is at ``path``, or else what was there is in
    `replaced_folder`, where `existing` finds it: a folder cannot be exchanged for another in one step.
    """
    with replacing(path):
        saving_folder(path).rename(path)
    with suppress(OSError):  # another is being saved beside this one
        saving_folder(path).parent.rmdir()


@contextmanager
def replacing(path: Path) -> Iterator[None]:
    """Within this, nothing is at ``path``, and something is to be put there; what was there comes back on an error."""
    old = replaced_folder(path)
    if os.path.lexists(path):
        remove(old)
        old.parent.mkdir(exist_ok=True)
        path.rename(old)
    try:
        yield
    except BaseException:
        if os.path.lexists(old):
            remove(path)
            old.rename(path)
        raise
    _sync(path.parent)
    remove(old)
    with suppress(OSError):
        old.parent.rmdir()


def remove(path: Path) -> None:
    """Whatever is there, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def existing(path: Path) -> Path:
    """``path``, or where its checkpoint is if the process was killed while it was replaced."""
    old = replaced_folder(path)
    return old if not os.path.lexists(path) and old.exists() else path


def _sync(folder: Path) -> None:
    """Make sure that names in it are on the disk."""
    with suppress(OSError):  # not every file system knows this
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# -- read


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether there is a folder that is, or was to be, a sharded checkpoint, of ours or of others."""
    return path.is_dir() and ((path / META).is_file() or (path / METADATA).is_file())


def read_sharded_checkpoint(path: str | Path, *, weights_only: bool = True) -> dict[str, Any]:
    """The checkpoint that was saved at ``path``, as it was given; its large tensors are read when they are used.

    They are `SavedTensor`. ``load_state_dict`` of `ZeroOptimizer`, of `DTensorOptimizer` and of modules takes them,
    as does `load_module_full_state_dict`; the sharded ones read from them what they need. To be called on any number
    of ranks, whatever the number of those that saved it, or in a single process without a process group.

    Args:
        weights_only: as for ``torch.load``, of what is not in the large tensors.

    Raises:
        ValueError: there is no such checkpoint, it is not complete, or something else has made it.
    """
    folder = existing(Path(path))
    if not folder.is_dir():
        what = "a file: torch.load opens it" if folder.is_file() else "nothing"
        raise ValueError(f"a sharded checkpoint must be a folder, but at {path} there is {what}")
    if lacking := [name for name in (META, METADATA) if not (folder / name).is_file()]:
        raise ValueError(
            f"a sharded checkpoint must have {META} and {METADATA}, but {path} lacks {' and '.join(lacking)}: it is "
            "none, or was not copied completely"
        )
    meta = _opened(folder / META, lambda file: torch.load(file, map_location="cpu", weights_only=weights_only))
    if not isinstance(meta, dict) or TABLE not in meta:
        raise ValueError(
            f"{path} must be a checkpoint that was saved here, but its {META} has no {TABLE!r}: something else has "
            "written it, which can read it, or convert it to one file"
        )
    metadata = _opened(folder / METADATA, lambda file: _Unpickler(file).load())
    table: dict[str, list[tuple[Any, ...]]] = meta.pop(TABLE)
    _check(folder, metadata, table)
    files = Files(folder, metadata)
    tensors = {path: files.tensor(name) for name, paths in table.items() for path in paths}
    filled = fill(meta, tensors)
    assert isinstance(filled, dict)
    return filled


def _opened(path: Path, load: Any) -> Any:
    try:
        with path.open("rb") as file:
            return load(file)
    except Exception as error:  # pickle promises none in particular
        raise ValueError(f"{path} cannot be read; it may be truncated, or made by something else: {error}") from error


_PARTS_OF_METADATA = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("", "Posix", "Windows")),
}


class _Unpickler(pickle.Unpickler):
    """Of ``.metadata``: what it consists of, and no code of whoever has written it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PARTS_OF_METADATA:
            return super().find_class(module, name)
        if module in ("torch", "torch.distributed.checkpoint.metadata") and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, torch.dtype) or getattr(found, "__module__", "") == Metadata.__module__:
                return found
        raise pickle.UnpicklingError(f"it has a {module}.{name}, which does not belong there")


def _check(folder: Path, metadata: Any, table: Mapping[str, Any]) -> None:
    """All that the table names must be in the metadata, and all that those name in files that are long enough."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(f"{folder / METADATA} must hold torch's Metadata, and does not")
    ends: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        if index.fqn in table:
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name in table:
        meta = metadata.state_dict_metadata.get(name)
        if not isinstance(meta, TensorStorageMetadata) or not is_complete(meta):
            raise ValueError(f"{folder} must have all of {name}, but {METADATA} says where only of some other tensors")
    for name, end in sorted(ends.items()):
        nbytes = (folder / name).stat().st_size if (folder / name).is_file() else None
        if nbytes is None or nbytes < end:
            what = "it is missing" if nbytes is None else f"it has {nbytes}"
            raise ValueError(
                f"{folder / name} must have {end} bytes, but {what}: the checkpoint is truncated; take an older one, "
                "or copy it again"
            )


def is_complete(meta: TensorStorageMetadata) -> bool:
    """Whether the chunks, none of which overlap, are all of the tensor."""
    return sum(prod(chunk.sizes) for chunk in meta.chunks) == prod(meta.size)
