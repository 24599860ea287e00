"""Frames between the ranks of a pipe: sizes first, then each tensor from its own memory; received ahead of compute.

A frame is a header of 64 bytes, if need be a pickle, and one message for each tensor. The header says to which call,
stage and micro-batch the frame belongs, and the number of a description: shapes, dtypes and all plain values. Only a
description that the channel has not had yet is sent, as the pickle. So anything may change from one micro-batch to the
next, and nothing is agreed on beforehand: gloo aborts the process on a message that is longer than its buffer, and takes
a shorter one silently.

Sending never blocks: what is under way is held, and waited for, by one thread. Receiving is done by one thread for each
channel (a sender and a `Direction`). It is told what to expect when a call begins (`plan` knows), so it waits for a
message only where one is to come, and between calls for work. It is ahead of compute by a frame, or by as many as it
takes to reach the frame that is asked for.

Headers and pickles always travel by a gloo group of the pipe's own, payloads by the device's backend. With NCCL all
messages between two ranks that share a communicator are done one after another on one stream, so an early receive would
hold up every send behind it, and two ranks could wait for each other for ever. Hence there is a communicator for each
direction and each of the two ways between ranks, and a receive is posted only when the frame's header is here: then the
sender has queued the payload already, and nothing but the sender's own earlier payloads, in the same order here as there,
is before it. gloo has no such order between tags.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distkit.core.ledger import Ledger
from lightning_distkit.core.pipeline.failure import Failure
from lightning_distkit.core.pipeline.frames import Description, Parcel, as_bytes, from_bytes
from lightning_distkit.core.pipeline.plan import Direction, Message
from lightning_distkit.core.reuse import Buffers

# Call, source, stage, micro-batch, signature, status, number of the description, length of the pickle.
_HEADER = struct.Struct("<8q")
_KNOWN, _NEW, _FAILURE = 0, 1, 2  # status
_MAX_DESCRIPTIONS = 1024  # that a channel remembers, then it begins anew
_AHEAD = 1  # frames that may lie here unread while compute is busy with another
# A message is waited for from when the call begins, however long compute takes: whoever needs it has the timeout.
_FOREVER = timedelta(days=365)
_READ_IN_ONE = (Direction.OUTPUT, Direction.INPUT_GRADIENT, Direction.STATE)  # to be held whole in any case


@dataclass(frozen=True)
class Ends:
    """The processes of a pipe.

    Args:
        control: a gloo group that nobody else uses.
        payload: on a device other than the CPU, the groups that carry tensors: by direction, and whether upwards.
        device: where tensors are received.
        global_ranks: of each rank of the group, its number in the world.
        timeout: seconds that a rank waits for a frame of another.
    """

    control: dist.ProcessGroup
    payload: dict[tuple[Direction, bool], dist.ProcessGroup]
    device: torch.device
    global_ranks: Sequence[int]
    timeout: float

    def payload_group(self, message: Message) -> dist.ProcessGroup:
        return self.payload.get((message.direction, message.source < message.target), self.control)


class Broken(Exception):  # noqa: N818  # never leaves this package
    """The pipe cannot go on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class Transport:
    """One rank's channels to and from the others.

    Args:
        ledger: where bytes, messages and waiting are counted.
    """

    def __init__(self, ends: Ends, ledger: Ledger) -> None:
        self.ends = ends
        self.rank = dist.get_rank(ends.control)
        self.ledger = ledger
        self.waited = 0.0  # seconds, since the beginning
        self._inbox = _Inbox()
        self._incoming: dict[tuple[int, Direction], _Incoming] = {}
        self._outgoing: dict[tuple[int, Direction], _Outgoing] = {}
        self._under_way = _UnderWay()
        self._watch = _Watch(ends, self.rank)
        self._call = (0, 0)
        self._sent = (0, 0)  # bytes, messages

    def begin(self, number: int, signature: int, expected: Iterable[tuple[int, Direction, list[Message]]]) -> None:
        """Start a call: from now on the frames that it will bring are received.

        Args:
            number: of the call, the same on every rank.
            signature: of its kind.
            expected: by source and direction, what will come, in order.
        """
        self._call = (number, signature)
        for source, direction, messages in expected:
            if (source, direction) not in self._incoming:
                self._incoming[source, direction] = _Incoming(self.ends, self._inbox)
            self._incoming[source, direction].expect(number, signature, messages)

    def receive(self, message: Message) -> Parcel | Failure:
        """What has been sent as ``message``; blocks.

        Raises:
            Broken: the sender is lost, or late, or in another call.
        """
        channel = self._incoming[message.source, message.direction]
        begin = perf_counter()
        frame = self._inbox.take(message, channel, lambda: self._watch.look(begin, message.source, message.stage))
        self._waited_since(begin)
        if isinstance(frame, Failure) and frame.is_fatal:
            raise Broken(frame)
        if isinstance(frame, _Pending):
            frame = frame.here()
        return frame

    def send(self, message: Message, what: Parcel | Failure) -> None:
        """Start to send; never blocks, and never raises: who is lost is seen by those who receive."""
        channel = self._outgoing.get((message.target, message.direction))
        if channel is None:
            channel = self._outgoing[message.target, message.direction] = _Outgoing(self.ends)
        works, nbytes, n_messages = channel.send(message, *self._call, what)
        self._under_way.add(message, works)
        self._sent = (self._sent[0] + nbytes, self._sent[1] + n_messages)

    def finish(self) -> None:
        """Wait until all that was sent has been taken; every frame that was to come must have been received.

        Raises:
            Broken: who is to take it is lost or late.
        """
        begin = perf_counter()
        lost = self._under_way.wait(lambda message: self._watch.look(begin, message.target, -1))
        self._waited_since(begin)
        self.ledger.add(nbytes=self._sent[0], n_messages=self._sent[1])
        self._sent = (0, 0)
        if lost is not None:
            raise Broken(_lost(self.ends, lost.target, "it took no more frames"))

    def refuse(self, number: int, why: str) -> None:
        """Say that this rank does not take part in a call; those who wait for its frames learn of it in a second."""
        self._watch.refuse(number, why)

    def watch(self, number: int) -> None:
        """Look out for refusals of this call."""
        self._watch.number = number

    def broken_by(self, failure: Failure) -> Failure:
        """Close all channels. Returns what all ranks agree to have been the cause: the first to be noted."""
        self._inbox.close()
        agreed = self._watch.verdict(failure)
        # gloo closes all connections of a group in which a receive has timed out: so who waits for this rank learns at
        # once that there is a verdict.
        with contextlib.suppress(RuntimeError):
            other = (self.rank + 1) % self.ends.control.size()
            self.ends.control.recv([torch.empty(1)], other, 0).wait(timedelta(milliseconds=1))
        self.close()
        return agreed

    def close(self) -> None:
        """End the threads."""
        self._inbox.close()
        for channel in self._incoming.values():
            channel.close()
        self._under_way.close()

    def _waited_since(self, begin: float) -> None:
        self._watch.over()
        waited = perf_counter() - begin
        self.waited += waited
        self.ledger.add(waited_s=waited)


class _Outgoing:
    """The sending end of a channel."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._known: dict[Any, int] = {}

    def send(
        self, message: Message, number: int, signature: int, what: Parcel | Failure
    ) -> tuple[list[tuple[dist.Work, bool]], int, int]:
        """The works under way, each with whether it blocks the host; bytes and messages."""
        payload: list[Tensor] = []
        pickled = b""
        if isinstance(what, Failure):
            status, described = _FAILURE, 0
            pickled = pickle.dumps(what)
        else:
            description = what.description()
            status, described = _KNOWN, self._known.get(description, -1)
            if described < 0:
                if len(self._known) == _MAX_DESCRIPTIONS:
                    self._known.clear()
                status, described = _NEW, len(self._known)
                self._known[description] = described
                pickled = pickle.dumps(description)
            payload = [as_bytes(tensor) for tensor in what.tensors if tensor.numel()]
        numbers = [number, message.source, message.stage, message.micro_batch, signature, status, described]
        control = [_row(bytearray(_HEADER.pack(*numbers, len(pickled))))]
        if pickled:
            control.append(_row(bytearray(pickled)))
        tag, group = int(message.direction), self._ends.payload_group(message)
        works: list[tuple[dist.Work, bool]] = []
        with contextlib.suppress(RuntimeError):  # the target is lost
            works += [(self._ends.control.send([row], message.target, tag), True) for row in control]
            works += [(group.send([row], message.target, tag), group is self._ends.control) for row in payload]
        sent = control + payload
        return works, sum(row.nbytes for row in sent), len(sent)


def _row(memory: bytearray) -> Tensor:
    """The same memory as bytes of a tensor."""
    return torch.frombuffer(memory, dtype=torch.uint8)


class _Incoming:
    """The receiving end of a channel: a thread that waits for work, and then for what it has been told will come."""

    def __init__(self, ends: Ends, inbox: _Inbox) -> None:
        self._ends = ends
        self._inbox = inbox
        self._work: SimpleQueue[tuple[int, int, list[Message]] | None] = SimpleQueue()
        self._known: dict[int, tuple[bytes, tuple[Description, ...]]] = {}
        self._buffers = Buffers()
        self._end: Failure | None = None  # why nothing can come any more
        self.n_unread = 0  # guarded by the inbox
        threading.Thread(target=self._serve, daemon=True, name="pipe-receive").start()

    def expect(self, number: int, signature: int, messages: list[Message]) -> None:
        self._work.put((number, signature, messages))

    def close(self) -> None:
        self._work.put(None)

    def _serve(self) -> None:
        if self._ends.device.type == "cuda":
            torch.cuda.set_device(self._ends.device)
        while (work := self._work.get()) is not None:
            number, signature, messages = work
            for message in messages:
                if not self._inbox.admits(message, self):
                    return
                self._inbox.put(message, self, self._end or self._receive(message, number, signature))

    def _receive(self, message: Message, number: int, signature: int) -> Parcel | _Pending | Failure:
        control, tag = self._ends.control, int(message.direction)
        try:
            header = bytearray(_HEADER.size)
            control.recv([_row(header)], message.source, tag).wait(_FOREVER)
            *numbers, status, described, length = _HEADER.unpack(header)
            if numbers != [number, message.source, message.stage, message.micro_batch, signature]:
                self._end = _mismatch(self._ends, message, number, numbers)
                return self._end
            if length:
                pickled = bytearray(length)
                control.recv([_row(pickled)], message.source, tag).wait(_FOREVER)
                if status == _FAILURE:
                    failure: Failure = pickle.loads(pickled)
                    return failure
                self._known[described] = pickle.loads(pickled)
            return self._payload(message, *self._known[described])
        except Exception as error:
            self._end = _lost(self._ends, message.source, str(error))
            return self._end

    def _payload(
        self, message: Message, skeleton: bytes, described: tuple[Description, ...]
    ) -> Parcel | _Pending:
        group, tag = self._ends.payload_group(message), int(message.direction)
        tensors, works = [], []
        for shape, dtype, _ in described:
            numel = 1
            for length in shape:
                numel *= length
            row = self._buffers.take(numel * dtype.itemsize, torch.uint8, self._ends.device)
            if numel:
                works.append(group.recv([row], message.source, tag))
            tensors.append(from_bytes(row, shape, dtype))
        parcel = Parcel(skeleton, tensors, [wanted for _, _, wanted in described])
        if group is not self._ends.control:
            return _Pending(parcel, works)
        for work in works:
            work.wait(_FOREVER)
        return parcel


class _Pending:
    """A frame whose tensors are ordered by streams: to be waited for by the thread that uses them."""

    def __init__(self, parcel: Parcel, works: list[dist.Work]) -> None:
        self._parcel = parcel
        self._works = works

    def here(self) -> Parcel:
        for work in self._works:
            work.wait()  # the current stream waits; the host does not
        for tensor in self._parcel.tensors:
            # They were allocated by the receiving thread, on its own current stream.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self._parcel


class _Inbox:
    """Frames that are here and not read yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frames: dict[Message, Parcel | _Pending | Failure] = {}
        self._wanted: _Incoming | None = None  # somebody waits for a frame of that channel
        self._closed = False

    def admits(self, message: Message, channel: _Incoming) -> bool:
        """Wait until the channel may receive one more; False if none will be wanted any more."""
        if message.direction in _READ_IN_ONE:
            return not self._closed
        with self._changed:
            self._changed.wait_for(lambda: channel.n_unread <= _AHEAD or self._wanted is channel or self._closed)
            return not self._closed

    def put(self, message: Message, channel: _Incoming, frame: Parcel | _Pending | Failure) -> None:
        with self._changed:
            self._frames[message] = frame
            channel.n_unread += 1
            self._changed.notify_all()

    def take(self, message: Message, channel: _Incoming, look: Any) -> Parcel | _Pending | Failure:
        """Wait for a frame; ``look()`` is called now and then while it is not here, and says when to look again."""
        pause = 0.0
        while True:
            with self._changed:
                if message not in self._frames:
                    self._wanted = channel
                    self._changed.notify_all()
                    if pause == 0.0:
                        pause = FIRST_LOOK
                    self._changed.wait_for(lambda: message in self._frames, pause)
                    self._wanted = None
                if message in self._frames:
                    channel.n_unread -= 1
                    self._changed.notify_all()
                    return self._frames.pop(message)
            pause = look()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._frames.clear()
            self._changed.notify_all()


FIRST_LOOK = 0.25  # seconds


class _UnderWay:
    """What is being sent. A thread holds it and waits for it, in order, so that its memory is free as soon as can be.

    Works of a device's backend do not block the host: they are waited for by `wait`, on the stream of who sent them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Message] = deque()
        self._lost: Message | None = None
        self._works: SimpleQueue[tuple[Message, list[dist.Work]] | None] = SimpleQueue()
        self._of_streams: list[dist.Work] = []
        threading.Thread(target=self._serve, daemon=True, name="pipe-sent").start()

    def add(self, message: Message, works: list[tuple[dist.Work, bool]]) -> None:
        if any(not blocks for _, blocks in works):
            self._of_streams = [work for work in self._of_streams if not work.is_completed()]
            self._of_streams += [work for work, blocks in works if not blocks]
        with self._changed:
            self._waiting.append(message)
        self._works.put((message, [work for work, blocks in works if blocks]))

    def wait(self, look: Any) -> Message | None:
        """Wait for all; the first message whose target was lost, if one was."""
        pause = FIRST_LOOK
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: not self._waiting, pause):
                    break
                late = self._waiting[0]
            pause = look(late)
        for work in self._of_streams:
            work.wait()
        self._of_streams.clear()
        lost, self._lost = self._lost, None
        return lost

    def close(self) -> None:
        self._works.put(None)

    def _serve(self) -> None:
        while (each := self._works.get()) is not None:
            message, taken = each[0], _wait_for(each[1])
            del each  # or the memory of what was sent is held until something else is
            with self._changed:
                self._lost = self._lost or (None if taken else message)
                self._waiting.popleft()
                if not self._waiting:
                    self._changed.notify_all()


class _Watch:
    """What the ranks tell each other by the group's store, when all is not well; nothing in a call that goes well.

    Whoever waits long notes for whom. Of those, the one who is waited for and has not noted that it waits itself is the
    cause, however far away. The first to know a cause notes it as the verdict; later ones take that.
    """

    def __init__(self, ends: Ends, rank: int) -> None:
        self._ends = ends
        self._rank = rank
        self._store = dist.distributed_c10d._get_process_group_store(ends.control)
        self._noted = False
        self.number = 0

    def look(self, begin: float, peer: int, stage: int) -> float:
        """Called by a rank that has waited for ``peer`` since ``begin``: seconds until it should look again.

        Raises:
            Broken: somebody knows that it waits in vain.
        """
        waited = perf_counter() - begin
        if (verdict := self._read("verdict")) is not None:
            raise Broken(_failure(verdict))
        for rank in range(self._ends.control.size()):
            if (refusal := self._read(f"refused/{self.number}/{rank}")) is not None:
                raise Broken(Failure(refusal.decode(), rank=self._ends.global_ranks[rank], is_fatal=True))
        if waited > self._ends.timeout / 2 and not self._noted:
            self._noted = True
            self._write(f"waiting/{self._rank}", f"{self.number} {peer}")
        if waited > self._ends.timeout:
            raise Broken(self._late(peer))
        return min(1.0, self._ends.timeout / 8)

    def over(self) -> None:
        """The waiting that was looked at has ended well."""
        if self._noted:
            self._noted = False
            self._write(f"waiting/{self._rank}", "")

    def refuse(self, number: int, why: str) -> None:
        self._write(f"refused/{number}/{self._rank}", why)

    def verdict(self, failure: Failure) -> Failure:
        """Note it, unless there is one; what all take."""
        try:
            return _failure(self._store.compare_set("verdict", "", pickle.dumps(failure).hex()))
        except RuntimeError:
            return failure

    def _late(self, peer: int) -> Failure:
        seen = {self._rank}
        while peer not in seen:
            seen.add(peer)
            note = self._read(f"waiting/{peer}")
            if note is None or not note.startswith(f"{self.number} ".encode()):
                break
            peer = int(note.split()[1])
        rank = self._ends.global_ranks[peer]
        return Failure(
            f"stage {peer} (rank {rank}) is late: rank {self._ends.global_ranks[self._rank]} has waited for more than "
            f"{self._ends.timeout:g} s. Its own log may say why; if it is only slow, give DistributedPipe a longer "
            "timeout. The pipe cannot be used any more: restart all ranks from the last checkpoint",
            "RuntimeError",
            peer,
            rank,
            is_fatal=True,
        )

    def _read(self, key: str) -> bytes | None:
        try:
            return bytes(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError:  # the store has died with its rank
            return None

    def _write(self, key: str, value: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(key, value)


def _failure(noted: bytes) -> Failure:
    failure: Failure = pickle.loads(bytes.fromhex(noted.decode()))
    return failure


def _wait_for(works: list[dist.Work]) -> bool:
    """Whether all was taken."""
    try:
        for work in works:
            work.wait(_FOREVER)
    except RuntimeError:
        return False
    return bool(works)


def _lost(ends: Ends, rank: int, why: str) -> Failure:
    return Failure(
        f"stage {rank} (rank {ends.global_ranks[rank]}) is lost: its process died, or closed the pipe. Its own log says "
        f"why; restart all ranks from the last checkpoint. The backend says: {why}",
        stage=rank,
        rank=ends.global_ranks[rank],
        is_fatal=True,
    )


def _mismatch(ends: Ends, message: Message, number: int, got: list[int]) -> Failure:
    here, there = ends.global_ranks[message.target], ends.global_ranks[message.source]
    return Failure(
        f"all ranks of a pipe must make the same calls with inputs of the same rows, but rank {here} is in call {number} "
        f"and was to receive {message.direction.name} of stage {message.stage}, micro-batch {message.micro_batch}, from "
        f"rank {there}, which sent that of call {got[0]}, stage {got[2]}, micro-batch {got[3]}. See what differs between "
        "the ranks: the number of rows, grad mode, whether inputs need gradients, or the order of calls and backwards",
        stage=message.source,
        rank=there,
        is_fatal=True,
    )
