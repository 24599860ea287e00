"""What a pipe of one process returns: a handle of its output, as if that might be on another host."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class LocalRef:
    """A handle where RPC is not initialized, else an ``RRef``: the output is here, at its owner."""

    _value: Any  # DDP finds the tensors in a dataclass, and in what pytree knows

    def local_value(self) -> Any:
        """The output."""
        return self._value

    def to_here(self, timeout: float = -1.0) -> Any:
        """The output, too; there is nothing to wait for."""
        return self._value

    def is_owner(self) -> bool:
        """Always so."""
        return True


pytree.register_pytree_node(LocalRef, lambda ref: ([ref.local_value()], None), lambda values, _: LocalRef(*values))


def referred(output: Any) -> Any:
    """An ``RRef`` if RPC is initialized (it gives a named tuple back as a plain one), or else a `LocalRef`."""
    rpc = sys.modules.get("torch.distributed.rpc")
    try:
        rpc.get_worker_info()  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # there is no RPC, or it is not initialized
        return LocalRef(output)
    return rpc.RRef(output)  # type: ignore[union-attr]
