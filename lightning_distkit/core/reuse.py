"""Memory on the CPU for messages, lent again once no tensor uses it: fresh pages cost as much as the sending."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor


def best_fit(free: Sequence[int], nbytes: int) -> int | None:
    """Which of the free blocks, whose bytes are given, to lend: the smallest that is large enough. None if none is."""
    return min((n for n, its in enumerate(free) if its >= nbytes), key=free.__getitem__, default=None)


class Buffers:
    """Lends vectors, and keeps as many blocks of memory as were ever lent at once.

    On CUDA it lends fresh ones: torch's allocator keeps memory itself there.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A vector, its values undefined; the memory comes back by itself when it and all of its views are gone."""
        nbytes = numel * dtype.itemsize
        if nbytes == 0 or device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        fits = best_fit([block.nbytes for block in self._free], nbytes)
        if fits is not None:
            block = self._free.pop(fits)
        else:
            if self._free:  # a larger one takes the place of the one that comes nearest
                del self._free[max(range(len(self._free)), key=lambda n: self._free[n].nbytes)]
            block = torch.empty(nbytes, dtype=torch.uint8)
        # An object that the lent tensor's storage keeps alive, and nothing else does. The memory is torch's own, so
        # that whoever counts torch's bytes counts these.
        lent = (ctypes.c_char * nbytes).from_address(block.data_ptr())
        weakref.finalize(lent, self._free.append, block).atexit = False
        return torch.frombuffer(lent, dtype=dtype)
