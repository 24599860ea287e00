"""A nest of tensors and plain values, taken apart for the wire: the tensors, and all else as a few bytes.

The bytes are a pickle in which tensors are numbers. So anything that can be pickled may hold tensors at any place.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Description = tuple[tuple[int, ...], torch.dtype, bool]
"""Shape, dtype, and whether a gradient is wanted."""


class Parcel:
    """A nest taken apart.

    Args:
        skeleton: the nest without its tensors, pickled; empty for a nest that is one tensor.
        tensors: those of the nest, each once, in the order of the pickle.
        wants_grad: of each tensor, whether its gradient is to come back.
    """

    __slots__ = ("skeleton", "tensors", "wants_grad")

    def __init__(self, skeleton: bytes, tensors: list[Tensor], wants_grad: list[bool]) -> None:
        self.skeleton = skeleton
        self.tensors = tensors
        self.wants_grad = wants_grad

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """The nest with other tensors in place of its own; what is no tensor is made anew."""
        if not self.skeleton:
            return tensors[0]
        return _Unpickler(self.skeleton, tensors).load()

    def wanted(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of as many tensors whose gradients are to come back."""
        return [tensor for tensor, wanted in zip(tensors, self.wants_grad, strict=True) if wanted]

    def description(self) -> tuple[bytes, tuple[Description, ...]]:
        """All but the tensors' values, hashable."""
        each = zip(self.tensors, self.wants_grad, strict=True)
        return self.skeleton, tuple((tuple(tensor.shape), tensor.dtype, wanted) for tensor, wanted in each)


def pack(values: Any) -> Parcel:
    """Take a nest apart. Gradients are wanted for the tensors that require them.

    Raises:
        TypeError: something in it cannot be pickled, or is a tensor without plain memory.
    """
    if isinstance(values, Tensor):
        skeleton, tensors = b"", [values]
    else:
        file = io.BytesIO()
        pickler = _Pickler(file)
        try:
            pickler.dump(values)
        except Exception as error:
            raise TypeError(
                f"what goes from stage to stage must be tensors and values that can be pickled, but: {error}"
            ) from error
        skeleton, tensors = file.getvalue(), pickler.tensors
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise TypeError(
                f"a tensor that goes from stage to stage must be dense, got layout {tensor.layout}, dtype "
                f"{tensor.dtype}; call to_dense() or dequantize() in the layer before"
            )
    return Parcel(skeleton, tensors, [tensor.requires_grad for tensor in tensors])


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, skeleton: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's own memory as one row of bytes; a copy where it is not contiguous."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().view(-1).view(torch.uint8)


def from_bytes(row: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor whose bytes these are; the same memory."""
    return row.view(dtype).view(shape)
