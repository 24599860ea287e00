"""Tensors of a sharded checkpoint that are read when they are used, and of which only what is used is read.

A chunk is the file that ``torch.save`` makes of one tensor: a zip archive with the elements, not compressed, as one
record. ``torch.load`` would read all of it; here the record is found and a run of it read.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.utils._pytree import tree_map

_LOCAL_HEADER = 30  # bytes of a zip record's header before the name, whose length, and that of what follows, end it


class Files:
    """The files of a sharded checkpoint.

    Args:
        folder: where they are.
        metadata: what stands in which.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self.folder = folder
        self.nbytes_read = 0  # of elements; headers come on top
        self._metadata = metadata

    def tensor(self, name: str) -> SavedTensor:
        """The whole tensor of this name, of which nothing is read yet."""
        meta = self._metadata.state_dict_metadata[name]
        assert isinstance(meta, TensorStorageMetadata)
        return SavedTensor(self, name, (0,) * len(meta.size), meta.size, meta.properties.dtype)

    @torch.no_grad()
    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of a tensor, from all the chunks that have something of it.

        Raises:
            OSError, ValueError: a file is damaged, or was changed after the checkpoint was opened.
        """
        meta = self._metadata.state_dict_metadata[name]
        assert isinstance(meta, TensorStorageMetadata)
        box = torch.empty(list(sizes), dtype=meta.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for item in create_read_items_for_chunk_list(name, meta, [wanted]):
            info = self._metadata.storage_data[item.storage_index]
            chunk = meta.chunks[item.storage_index.index or 0]
            values = self._read(info, chunk.sizes, item.storage_offsets, item.lengths, box.dtype)
            _inside(box, item.dest_offsets, item.lengths).copy_(values)
        return box

    def _read(
        self, info: Any, sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """A box of a chunk of these sizes: from its first element to its last, which of rows is nothing else."""
        strides = [prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
        begin = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        end = sum((o + n - 1) * stride for o, n, stride in zip(offsets, lengths, strides, strict=True)) + 1
        itemsize = torch.empty((), dtype=dtype).element_size()
        buffer = bytearray((end - begin) * itemsize)
        path = self.folder / info.relative_path
        with path.open("rb", buffering=0) as file:  # or else each header would read a whole buffer
            try:
                file.seek(_elements(file, info.offset, info.length) + begin * itemsize)
            except (ValueError, zipfile.BadZipFile) as error:
                raise ValueError(f"{path} is damaged: at {info.offset} there is no tensor") from error
            rest = memoryview(buffer)
            while rest:
                n = file.readinto(rest)  # at most 2 GiB at a time
                if not n:
                    raise ValueError(f"{path} has become shorter since it was opened")
                rest = rest[n:]
        self.nbytes_read += len(buffer)
        return torch.frombuffer(buffer, dtype=dtype).as_strided(list(lengths), strides)


def _inside(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    return tensor[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]


def _elements(file: Any, offset: int, length: int) -> int:
    """Where in ``file`` the elements begin of the tensor that is saved at ``offset``."""
    with zipfile.ZipFile(_View(file, offset, length)) as archive:
        [record] = [each for each in archive.infolist() if each.filename.endswith("/data/0")]
    file.seek(offset + record.header_offset)
    header = file.read(_LOCAL_HEADER)
    before = sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return int(offset + record.header_offset + _LOCAL_HEADER + before)


class _View(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + to < 0:
            raise OSError("before the beginning")  # what zipfile expects of a file that is too short for it
        self._at = base + to
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        read = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(read)] = read
        self._at += len(read)
        return len(read)


class SavedTensor(Tensor):
    """A tensor in a file; it may not be written to.

    Slices of it are such tensors, too, and whatever else is done with it reads what it covers, each time anew.
    """

    key: str  # in the checkpoint
    _files: Files
    _offsets: tuple[int, ...]

    @staticmethod
    def __new__(
        cls, files: Files, name: str, offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype
    ) -> SavedTensor:
        made = Tensor._make_wrapper_subclass(cls, torch.Size(sizes), dtype=dtype, device=torch.device("cpu"))
        assert isinstance(made, SavedTensor)
        made._files, made.key, made._offsets = files, name, tuple(offsets)
        return made

    def read(self) -> Tensor:
        """A plain tensor of the same values."""
        return self._files.read(self.key, self._offsets, self.shape)

    def read_box(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The same for a box of it."""
        offsets = [mine + other for mine, other in zip(self._offsets, offsets, strict=True)]
        return self._files.read(self.key, offsets, sizes)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # as torch's, which is untyped
        return f"SavedTensor({self.key!r}, {tuple(self.shape)}, {self.dtype})"

    def _sliced(self, dim: int, begin: int | None, end: int | None) -> SavedTensor:
        first, last, _ = slice(begin, end).indices(self.shape[dim])
        offsets, sizes = list(self._offsets), list(self.shape)
        offsets[dim], sizes[dim] = offsets[dim] + first, max(last - first, 0)
        return SavedTensor(self._files, self.key, offsets, sizes, self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares no method, but what it puts in its place
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.slice.Tensor:
            saved, *where = args
            dim, begin, end, step = where + [0, None, None, 1][len(where) :]
            if step == 1:
                return saved._sliced(dim, begin, end)
        if func is torch.ops.aten.detach.default:
            return args[0]._sliced(0, None, None)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, SavedTensor) and argument.alias_info is not None and argument.alias_info.is_write:
                raise RuntimeError(f"{value.key} is in a file and may not be written to: clone() it")
        args, kwargs = tree_map(lambda each: each.read() if isinstance(each, SavedTensor) else each, (args, kwargs))
        return func(*args, **(kwargs or {}))
