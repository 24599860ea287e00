"""A word from one rank to the others of its group: one message, unless it is long."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

from lightning_distkit.core.collectives import Group, naming_the_cause

_FIRST = 2**12  # bytes of the first message, whatever there is to say
_LENGTH = 8  # of these the first ones say how long all is


def told(value: Any, group: Group, source: int) -> Any:
    """What rank ``source`` of the group gave; what others gave is ignored. Collective.

    Args:
        value: anything that can be pickled.
        group: for messages on the CPU.

    Raises:
        PeerError: a rank is lost.
    """
    if group.process_group is None or group.world_size == 1:
        return value
    speaks = group.rank == source
    pickled = pickle.dumps(value) if speaks else b""
    first = bytearray(_FIRST)
    if speaks:
        first[:_LENGTH] = len(pickled).to_bytes(_LENGTH, "little")
        begin = pickled[: _FIRST - _LENGTH]
        first[_LENGTH : _LENGTH + len(begin)] = begin
    with naming_the_cause(group.process_group):
        _broadcast(first, group, source)
        length = int.from_bytes(first[:_LENGTH], "little")
        rest = bytearray(pickled[_FIRST - _LENGTH :]) if speaks else bytearray(max(0, length - _FIRST + _LENGTH))
        if rest:
            _broadcast(rest, group, source)
    return value if speaks else pickle.loads((first[_LENGTH:] + rest)[:length])


def _broadcast(memory: bytearray, group: Group, source: int) -> None:
    dist.broadcast(torch.frombuffer(memory, dtype=torch.uint8), group=group.process_group, group_src=source)
