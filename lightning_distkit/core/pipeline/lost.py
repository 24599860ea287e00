"""Which processes of a group are gone, found out when something has failed already.

A process that is gone shows itself only to whoever exchanges a message with it; others wait for ranks that wait. So
each has a thread that answers when one of them asks who is there: by the group's store, as connections are of no use.
"""

from __future__ import annotations

import contextlib
import threading
from time import perf_counter, sleep

import torch.distributed as dist

from lightning_distkit.core.collectives import Group

_EVERY = 0.5  # seconds between two looks at whether somebody asks
_PATIENCE = 3.0  # seconds to answer


class RollCall:
    """Answers, and asks, for this rank of a group, until it is closed."""

    _n_made = 0  # in this process; the same on every rank, so that an old question is not taken for a new one

    def __init__(self, group: Group) -> None:
        self._rank, self._world_size = group.rank, group.world_size
        RollCall._n_made += 1
        self._prefix = f"roll call {RollCall._n_made}"
        self._closed = threading.Event()
        if group.process_group is not None and group.world_size > 1:
            self._store = dist.distributed_c10d._get_process_group_store(group.process_group)
            threading.Thread(target=self._answer, name="roll call", daemon=True).start()

    def _answer(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store has died with its process
            while not self._closed.wait(_EVERY):
                if self._store.check([self._prefix]):
                    self._store.set(f"{self._prefix}/{self._rank}", "here")
                    return

    def missing(self) -> list[int]:
        """The ranks that do not answer within some seconds; may be called on one rank or on several."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        if not others or self._closed.is_set():
            return []
        deadline = perf_counter() + _PATIENCE
        try:
            self._store.set(self._prefix, "asked")
            while others and perf_counter() < deadline:
                others = [rank for rank in others if not self._store.check([f"{self._prefix}/{rank}"])]
                sleep(0.05)
        except RuntimeError:  # rank 0 of the world has the store
            return [0] if self._rank != 0 else []
        return others

    def close(self) -> None:
        """Answer no more."""
        self._closed.set()
