"""Frames between the ranks of a pipe: sizes first, then each tensor from its own memory; received ahead of compute.

A frame is a header of 64 bytes, if need be a pickle, and one message for each tensor. The header says to which call,
stage and micro-batch the frame belongs, and the number of a description: shapes, dtypes and all plain values. Only a
description that the channel has not had yet is sent, as the pickle. So anything may change from one micro-batch to the
next, and nothing is agreed on beforehand: gloo aborts the process on a message that is longer than its buffer, and
takes a shorter one silently.

Each channel (two ranks and a `Direction`) has a thread at either end, so that compute neither sends nor waits until it
needs something. The one that sends holds a frame until it was taken. The one that receives is told what to expect when
a call begins (`plan` knows), so it waits for a message only where one is to come, and between calls for work. It is
ahead of compute by a frame, or by as many as it takes to reach the frame that is asked for.

gloo sends a message only when the other side has said that it has memory for it. So that a frame need not go to and fro
for each of its messages, the tensors' memory is offered together with the header's: within a call the next frame is
likely to have the description of the last one. The tensors of each description have a tag of their own; if another one
comes, the offer stands until one of that description does.

Headers and pickles always travel by a gloo group of the pipe's own, payloads by the device's backend. With NCCL all
messages between two ranks that share a communicator are done one after another on one stream, so an early receive would
hold up every send behind it, and two ranks could wait for each other for ever. Hence there is a communicator for each
direction and each of the two ways between ranks, and a receive is posted only when the frame's header is here: then the
sender has queued the payload already (before it gave the header to its thread), and nothing but its own earlier
payloads, in the same order here as there, is before it. gloo has no such order between tags.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from math import prod
from queue import SimpleQueue
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distkit.core.ledger import Ledger
from lightning_distkit.core.pipeline.failure import Failure
from lightning_distkit.core.pipeline.frames import Description, Parcel, as_bytes, from_bytes
from lightning_distkit.core.pipeline.inbox import FOREVER, Channel, Inbox, UnderWay, channel_of
from lightning_distkit.core.pipeline.plan import Direction, Message
from lightning_distkit.core.pipeline.watch import Broken, Ends, Watch, lost, mismatch
from lightning_distkit.core.reuse import Buffers

# Call, source, stage, micro-batch, signature, status, number of the description, length of the pickle.
_HEADER = struct.Struct("<8q")
_KNOWN, _NEW, _FAILURE = 0, 1, 2  # status
_MAX_DESCRIPTIONS = 1024  # that a channel remembers, then it forgets them all; their numbers are never used again
_MAX_OFFERS = 4  # of memory, that stand


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
        self.watch = Watch(ends, self.rank)
        self._inbox: Inbox[Parcel | _Coming | Failure] = Inbox()
        self._under_way = UnderWay()
        self._incoming: dict[Channel, _Incoming] = {}
        self._outgoing: dict[Channel, _Outgoing] = {}
        self._call = (0, 0)
        self._n_sent = (0, 0)  # bytes, messages

    def begin(self, number: int, signature: int, expected: Iterable[Sequence[Message]]) -> None:
        """Start a call: from now on the frames that it will bring are received.

        Args:
            number: of the call, the same on every rank.
            signature: of its kind.
            expected: of each channel, what will come, in order.
        """
        self._call = (number, signature)
        for messages in expected:
            channel = channel_of(messages[0])
            if channel not in self._incoming:
                self._incoming[channel] = _Incoming(self.ends, self._inbox)
            self._incoming[channel].expect(number, signature, messages)

    def receive(self, message: Message) -> Parcel | Failure:
        """What has been sent as ``message``; blocks.

        Raises:
            Broken: the sender is lost, or late, or in another call.
        """
        begin = perf_counter()
        frame = self._inbox.take(message, lambda: self.watch.look(begin, message.source))
        self._waited_since(begin)
        if isinstance(frame, Failure) and frame.is_fatal:
            raise Broken(frame)
        if isinstance(frame, Parcel) and self.ends.wire != self.ends.device:
            frame.tensors = [tensor.to(self.ends.device) for tensor in frame.tensors]
        return frame.here() if isinstance(frame, _Coming) else frame

    def send(self, message: Message, what: Parcel | Failure) -> None:
        """Start to send; never blocks, and never raises: who is lost is found by `receive` and `finish`."""
        channel = (message.target, message.direction)
        if channel not in self._outgoing:
            self._outgoing[channel] = _Outgoing(self.ends, self._under_way)
        nbytes, n_messages = self._outgoing[channel].send(message, *self._call, what)
        self._n_sent = (self._n_sent[0] + nbytes, self._n_sent[1] + n_messages)

    def finish(self) -> None:
        """Wait until all that was sent has been taken; every frame that was to come must have been received.

        Raises:
            Broken: who is to take it is lost or late.
        """
        begin = perf_counter()
        not_taken = self._under_way.wait(lambda message: self.watch.look(begin, message.target))
        self._waited_since(begin)
        self.ledger.add(nbytes=self._n_sent[0], n_messages=self._n_sent[1])
        self._n_sent = (0, 0)
        if not_taken is not None:
            raise Broken(lost(self.ends, not_taken.target, "it took no more frames"))

    def broken_by(self, failure: Failure) -> Failure:
        """Close all channels. Returns what all ranks give as the cause: the first that one of them has noted."""
        agreed = self.watch.verdict(failure)
        self.close()
        # gloo closes all connections of a group in which a receive has timed out. So whoever waits for this rank learns
        # at once that there is a verdict, and this rank's threads end.
        with contextlib.suppress(RuntimeError):
            neighbour = (self.rank + 1) % len(self.ends.global_ranks)
            self.ends.control.recv([torch.empty(1)], neighbour, 0).wait(timedelta(milliseconds=1))
        return agreed

    def close(self) -> None:
        """End the threads that wait for work."""
        self._inbox.close()
        for incoming in self._incoming.values():
            incoming.close()
        for outgoing in self._outgoing.values():
            outgoing.close()

    def is_clean(self) -> bool:
        """Whether nothing is under way, unread, or still to come."""
        return not self._inbox.messages and all(channel.is_idle for channel in self._incoming.values())

    def _waited_since(self, begin: float) -> None:
        self.watch.over()
        waited = perf_counter() - begin
        self.waited += waited
        self.ledger.add(waited_s=waited)


class _Outgoing:
    """The sending end of a channel."""

    def __init__(self, ends: Ends, under_way: UnderWay) -> None:
        self._ends = ends
        self._under_way = under_way
        self._known: dict[tuple[bytes, tuple[Description, ...]], int] = {}
        self._n_described = 0
        self._work: SimpleQueue[tuple[Message, list[tuple[Tensor, int]]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name="pipe-send").start()

    def send(self, message: Message, number: int, signature: int, what: Parcel | Failure) -> tuple[int, int]:
        """Returns the numbers of bytes and of messages."""
        status, described, pickled = self._described(what)
        tensors = [] if isinstance(what, Failure) else what.tensors
        payload = [as_bytes(tensor).to(self._ends.wire) for tensor in tensors if tensor.numel()]
        of_message = (number, message.source, message.stage, message.micro_batch, signature)
        header = _HEADER.pack(*of_message, status, described, len(pickled))
        control = [_row(bytearray(each)) for each in (header, pickled) if each]
        group = self._ends.payload_group(message)
        self._under_way.add(message)
        rows = [(row, int(message.direction)) for row in control]
        if group is self._ends.control:
            rows += [(row, _tag(message.direction, described)) for row in payload]
        else:  # from the stream that has made them
            sent = [group.send([row], message.target, int(message.direction)) for row in payload]
            self._under_way.add_of_streams(sent)
        self._work.put((message, rows))
        return sum(row.nbytes for row in control + payload), len(control + payload)

    def close(self) -> None:
        self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            message, taken = work[0], self._send(*work)
            del work  # or the memory of what was sent is held until something else is
            self._under_way.done(message, taken)

    def _send(self, message: Message, rows: list[tuple[Tensor, int]]) -> bool:
        """Whether it was taken; not if the target is lost.

        Args:
            rows: each message and its tag.
        """
        try:
            works = [self._ends.control.send([row], message.target, tag) for row, tag in rows]
            for work in works:
                work.wait(FOREVER)
        except RuntimeError:
            return False
        return True

    def _described(self, what: Parcel | Failure) -> tuple[int, int, bytes]:
        """Status, number of the description, and a pickle if there must be one."""
        if isinstance(what, Failure):
            return _FAILURE, 0, pickle.dumps(what)
        description = what.description()
        number = self._known.get(description)
        if number is not None:
            return _KNOWN, number, b""
        if len(self._known) == _MAX_DESCRIPTIONS:
            self._known.clear()
        number = self._known[description] = self._n_described
        self._n_described += 1
        return _NEW, number, pickle.dumps(description)


class _Incoming:
    """The receiving end of a channel: a thread that waits for work, and then for what it has been told will come."""

    def __init__(self, ends: Ends, inbox: Inbox[Parcel | _Coming | Failure]) -> None:
        self._ends = ends
        self._inbox = inbox
        self._work: SimpleQueue[tuple[int, int, Sequence[Message]] | None] = SimpleQueue()
        self._known: dict[int, tuple[bytes, tuple[Description, ...]]] = {}
        self._buffers = Buffers()
        self._offers: dict[int, _Coming] = {}  # memory for a frame, by the number of its description
        self._last: int | None = None  # the description of this call's last frame
        self._end: Failure | None = None  # why nothing can come any more
        threading.Thread(target=self._serve, daemon=True, name="pipe-receive").start()

    def expect(self, number: int, signature: int, messages: Sequence[Message]) -> None:
        self._work.put((number, signature, messages))

    def close(self) -> None:
        self._work.put(None)

    @property
    def is_idle(self) -> bool:
        return self._work.empty()

    def _serve(self) -> None:
        if self._ends.wire.type == "cuda":
            torch.cuda.set_device(self._ends.device)
        while (work := self._work.get()) is not None:
            number, signature, messages = work
            self._last = None
            for message in messages:
                if not self._inbox.admits(message):
                    return
                # And keep no reference: a frame is free when whoever has read it lets it go.
                self._inbox.put(message, self._end or self._receive(message, number, signature))

    def _receive(self, message: Message, number: int, signature: int) -> Parcel | _Coming | Failure:
        control, tag = self._ends.control, int(message.direction)
        try:
            header = bytearray(_HEADER.size)
            work = control.recv([_row(header)], message.source, tag)
            self._offer(message)
            work.wait(FOREVER)
            *numbers, status, described, length = _HEADER.unpack(header)
            if numbers != [number, message.source, message.stage, message.micro_batch, signature]:
                self._end = mismatch(self._ends, message, number, numbers)
                return self._end
            if length:
                pickled = bytearray(length)
                control.recv([_row(pickled)], message.source, tag).wait(FOREVER)
                if status == _FAILURE:
                    failure: Failure = pickle.loads(pickled)
                    return failure
                self._known[described] = pickle.loads(pickled)
                self._known.pop(described - _MAX_DESCRIPTIONS, None)
            self._last = described
            coming = self._offers.pop(described, None) or self._coming(message, described)
            if self._ends.payload_group(message) is not self._ends.control:
                return coming
            for each in coming.works:
                each.wait(FOREVER)
            return coming.parcel
        except Exception as error:
            self._end = lost(self._ends, message.source, str(error))
            return self._end

    def _offer(self, message: Message) -> None:
        """Offer memory for a frame like the last one; not by NCCL, whose receives are done in the order of posting."""
        last = self._last
        if last is None or last in self._offers or len(self._offers) == _MAX_OFFERS:
            return
        if self._ends.payload_group(message) is self._ends.control:
            self._offers[last] = self._coming(message, last)

    def _coming(self, message: Message, described: int) -> _Coming:
        skeleton, descriptions = self._known[described]
        group = self._ends.payload_group(message)
        tag = _tag(message.direction, described) if group is self._ends.control else int(message.direction)
        tensors, works = [], []
        for shape, dtype, _ in descriptions:
            row = self._buffers.take(prod(shape) * dtype.itemsize, torch.uint8, self._ends.wire)
            if row.numel():
                works.append(group.recv([row], message.source, tag))
            tensors.append(from_bytes(row, shape, dtype))
        return _Coming(Parcel(skeleton, tensors, [wants_grad for _, _, wants_grad in descriptions]), works)


class _Coming:
    """A frame whose tensors are under way. On streams, the thread that uses them is to wait for them."""

    def __init__(self, parcel: Parcel, works: list[dist.Work]) -> None:
        self.parcel = parcel
        self.works = works

    def here(self) -> Parcel:
        """The frame, for the current stream."""
        for work in self.works:
            work.wait()  # the current stream waits; the host does not
        for tensor in self.parcel.tensors:
            # The receiving thread has allocated it, on a current stream of its own.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self.parcel


def _tag(direction: Direction, described: int) -> int:
    """Of the tensors of a description, where gloo carries them; headers and pickles have the direction's number."""
    return (1 + described) * len(Direction) + int(direction)


def _row(memory: bytearray) -> Tensor:
    """The same memory as bytes of a tensor."""
    return torch.frombuffer(memory, dtype=torch.uint8)
