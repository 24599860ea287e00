"""Who waits for whom, when a call goes on for too long; and the one cause that all ranks give when it cannot go on.

Ranks tell each other by the store of their group, and in a call that goes well nothing. Whoever waits for long notes
for whom. Of those that are waited for, the one that has not noted that it waits itself is the cause, however far away.
The first to know a cause notes it as the verdict, and all others take that for theirs.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist

from lightning_distkit.core.pipeline.failure import Failure
from lightning_distkit.core.pipeline.plan import Direction, Message

FIRST_LOOK = 0.25  # seconds that are nothing unusual


@dataclass(frozen=True)
class Ends:
    """The processes of a pipe.

    Args:
        control: a gloo group that nobody else uses.
        payload: the groups that carry tensors of the device, by direction, and whether upwards; none if the control
            group does, by way of the CPU.
        device: where tensors are.
        global_ranks: of each rank of the group, its number in the world.
        n_stages: of the pipe.
        timeout: seconds that a rank waits for another.
    """

    control: dist.ProcessGroup
    payload: dict[tuple[Direction, bool], dist.ProcessGroup]
    device: torch.device
    global_ranks: Sequence[int]
    n_stages: int
    timeout: float

    def payload_group(self, message: Message) -> dist.ProcessGroup:
        """Carries the tensors of a message."""
        return self.payload.get((message.direction, message.source < message.target), self.control)

    @property
    def wire(self) -> torch.device:
        """Where tensors must be to be sent."""
        return self.device if self.payload else torch.device("cpu")

    def who(self, rank: int) -> str:
        """A rank as users know it."""
        stages = [str(stage) for stage in range(rank, self.n_stages, len(self.global_ranks))]
        return f"stage{'s' * (len(stages) > 1)} {', '.join(stages)} (rank {self.global_ranks[rank]})"


class Broken(Exception):  # noqa: N818  # never leaves this package
    """The pipe cannot go on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class Watch:
    """One rank's look at the others.

    Attributes:
        number: of the call that it is in.
    """

    def __init__(self, ends: Ends, rank: int) -> None:
        self.number = 0
        self._ends = ends
        self._rank = rank
        self._store = dist.distributed_c10d._get_process_group_store(ends.control)
        self._has_noted = False

    def look(self, begin: float, peer: int) -> float:
        """To be called by a rank that has waited for ``peer`` since ``begin``: seconds until it should look again.

        Raises:
            Broken: it waits in vain.
        """
        if (verdict := self._read("verdict")) is not None:
            raise Broken(_failure(verdict))
        for rank in range(len(self._ends.global_ranks)):
            if (why := self._read(f"refused/{self.number}/{rank}")) is not None:
                raise Broken(Failure(why.decode(), rank=self._ends.global_ranks[rank], is_fatal=True))
        waited = perf_counter() - begin
        if waited > self._ends.timeout / 2 and not self._has_noted:
            self._has_noted = True
            self._write(f"waiting/{self._rank}", f"{self.number} {peer}")
        if waited > self._ends.timeout:
            raise Broken(self._late(peer))
        return min(1.0, self._ends.timeout / 8)

    def over(self) -> None:
        """This rank does not wait any more."""
        if self._has_noted:
            self._has_noted = False
            self._write(f"waiting/{self._rank}", "")

    def refuse(self, number: int, why: str) -> None:
        """Say that this rank does not take part in a call."""
        self._write(f"refused/{number}/{self._rank}", why)

    def verdict(self, failure: Failure) -> Failure:
        """Note a cause, if there is none yet; the one that all take."""
        try:
            return _failure(self._store.compare_set("verdict", "", pickle.dumps(failure).hex()))
        except RuntimeError:  # the store has died with its rank
            return failure

    def _late(self, peer: int) -> Failure:
        seen = {self._rank}
        while peer not in seen:
            seen.add(peer)
            note = self._read(f"waiting/{peer}")
            if note is None or not note.startswith(f"{self.number} ".encode()):
                break
            peer = int(note.split()[1])
        text = (
            f"{self._ends.who(peer)} is late: {self._ends.who(self._rank)} has waited for more than "
            f"{self._ends.timeout:g} s. The late one's own log may say why; if it is only slow, give DistributedPipe a "
            "longer timeout. This pipe cannot be used any more: restart all ranks from the last checkpoint"
        )
        return Failure(text, stage=peer, rank=self._ends.global_ranks[peer], is_fatal=True)

    def _read(self, key: str) -> bytes | None:
        try:
            return bytes(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError:
            return None

    def _write(self, key: str, value: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(key, value)


def _failure(noted: bytes) -> Failure:
    failure: Failure = pickle.loads(bytes.fromhex(noted.decode()))
    return failure


def lost(ends: Ends, rank: int, why: str) -> Failure:
    """That of a rank that cannot be reached."""
    text = (
        f"{ends.who(rank)} is lost: its process died, or closed the pipe. Its own log says why; restart all ranks from "
        f"the last checkpoint. The backend says: {why}"
    )
    return Failure(text, stage=rank, rank=ends.global_ranks[rank], is_fatal=True)


def mismatch(ends: Ends, message: Message, number: int, got: Sequence[int]) -> Failure:
    """That of a frame that is not ``message`` of call ``number``; ``got`` is its call, source, stage, micro-batch."""
    text = (
        "all ranks of a pipe must make the same calls, with inputs of as many rows, but "
        f"{ends.who(message.target)} is in call {number} and was to receive {message.direction.name} of stage "
        f"{message.stage}, micro-batch {message.micro_batch}, from {ends.who(message.source)}, which sent that of call "
        f"{got[0]}, stage {got[2]}, micro-batch {got[3]}. See what differs between the ranks: the number of rows, grad "
        "mode, whether inputs need gradients, or the order of calls and backwards"
    )
    return Failure(text, stage=message.source, rank=ends.global_ranks[message.source], is_fatal=True)
