"""The first stage's batch, and its random state, for all stages of a pipe.

Every rank has a data loader of its own. Where that shuffles or augments by chance, each would have another batch: the
first stage would see one and the loss of the last be of another. So it is with random numbers that a step draws, for a
mix of samples or a dropout outside of the pipe. What is sent here settles both, before the step.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.pipeline.frames import as_bytes

_SMALL = 2**16  # bytes of a tensor that travels in the envelope
_FIRST = 2**14  # bytes of the first message; generators take 11000 of them


class SharedBatches:
    """Gives every rank of a pipe what rank 0 has.

    Args:
        group: the pipe's ranks.
        control: the same ones, for messages on the CPU: a gloo group, or ``group`` if that is one.
        device: where large tensors travel.
    """

    def __init__(self, group: Group, control: Group, device: torch.device) -> None:
        self._group = group
        self._control = control
        self._device = device

    def share(self, batch: Any) -> Any:
        """Rank 0's batch on every rank; its own tensors on rank 0. From then on all draw the same random numbers.

        Collective.

        Args:
            batch: any nest; what is in an object that is unknown to torch's pytree is pickled with it.

        Raises:
            PeerError: rank 0 is lost.
            TypeError: on every rank, if the batch cannot be pickled.
        """
        if self._group.world_size == 1:
            return batch
        if self._group.rank == 0:
            self._broadcast_object((pytree.tree_map(_stand_in, batch), random_state(self._device)))
            for leaf in pytree.tree_leaves(batch):
                if _is_large(leaf):
                    self._broadcast(leaf.detach().contiguous())
            return batch
        received, state = self._broadcast_object(None)
        set_random_state(state, self._device)
        return pytree.tree_map(self._filled, received)  # in the same order

    def _broadcast_object(self, value: Any) -> Any:
        is_first = self._group.rank == 0
        pickled = b""
        if is_first:
            try:
                pickled = pickle.dumps(value)
            except Exception as error:  # which the others are told, as they wait
                value = _Refused(
                    "a batch is sent to all stages, so it must be of tensors and of what can be pickled, but: "
                    f"{error}. Leave that out of it, or have all stages load the same batches and share_batches=False"
                )
                pickled = pickle.dumps(value)
        first = bytearray(_FIRST)  # its begin says how long all is; mostly there is no second
        if is_first:
            begin = len(pickled).to_bytes(8, "little") + pickled[: _FIRST - 8]
            first[: len(begin)] = begin
        self._give(torch.frombuffer(first, dtype=torch.uint8))
        length = int.from_bytes(first[:8], "little")
        rest = bytearray(pickled[_FIRST - 8 :]) if is_first else bytearray(max(0, length - _FIRST + 8))
        if rest:
            self._give(torch.frombuffer(rest, dtype=torch.uint8))
        received = value if is_first else pickle.loads((first[8:] + rest)[:length])
        if isinstance(received, _Refused):
            raise TypeError(received.reason)
        return received

    def _broadcast(self, tensor: Tensor) -> Tensor:
        message = as_bytes(tensor)  # gloo does not know every dtype
        if message.device.type == "cpu":
            self._give(message)
        else:
            self._group.broadcast_(message).wait()
        return tensor

    def _give(self, message: Tensor) -> None:
        """Fill it with rank 0's on all ranks.

        Rank 0 does not stop at a rank that is gone: the others would then wait for it, and not know why. It goes on
        with them to the next call of the pipe, which says on all of them which stage it was.
        """
        if message.numel() == 0:
            return
        if self._group.rank != 0:
            self._control.receive(message, 0)
            return
        sent = []
        for rank in range(1, self._group.world_size):
            with contextlib.suppress(RuntimeError):
                sent.append(dist.isend(message, group=self._control.process_group, group_dst=rank))
        for work in sent:
            with contextlib.suppress(RuntimeError):
                assert work is not None
                work.wait()

    def _filled(self, leaf: Any) -> Any:
        if isinstance(leaf, _Large):
            return self._broadcast(leaf.empty(self._device))
        return leaf.tensor.to(self._device) if isinstance(leaf, _OfDevice) else leaf


def _stand_in(leaf: Any) -> Any:
    """What travels in the envelope."""
    if not isinstance(leaf, Tensor):
        return leaf
    if _is_large(leaf):
        return _Large(leaf)
    return leaf.detach().clone() if leaf.device.type == "cpu" else _OfDevice(leaf.detach().cpu())


@dataclass
class _Refused:
    """In place of a batch."""

    reason: str


class _Large:
    """A tensor that is sent by itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.is_on_cpu = tensor.device.type == "cpu"

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.is_on_cpu else device)


class _OfDevice:
    """A small tensor that belongs on the rank's device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _is_large(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.nbytes > _SMALL


def random_state(device: torch.device) -> dict[str, Any]:
    """Of all generators that a step may draw from: torch's of the CPU and ``device``, Python's, numpy's if in use."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type not in ("cpu", "meta"):
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on as from `random_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
