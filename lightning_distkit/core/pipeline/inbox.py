"""Where threads leave what they have received, and what is known of that which is being sent."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Generic, TypeVar

import torch.distributed as dist

from lightning_distkit.core.pipeline.plan import Direction, Message
from lightning_distkit.core.pipeline.watch import FIRST_LOOK

AHEAD = 1  # frames of a channel that may lie here unread while compute is busy with another
# A message is waited for from when the call begins, however long compute takes: whoever needs it has the timeout.
FOREVER = timedelta(days=365)
_HELD_IN_ANY_CASE = (Direction.OUTPUT, Direction.INPUT_GRADIENT, Direction.STATE)  # so there is no reason to hold back

Frame = TypeVar("Frame")
Channel = tuple[int, Direction]
Look = Callable[[], float]
"""Called now and then while one waits: raises if it is in vain, and returns the seconds until the next look."""


def channel_of(message: Message) -> Channel:
    """By what it comes."""
    return message.source, message.direction


class Inbox(Generic[Frame]):
    """Frames that are here and not read yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frames: dict[Message, Frame] = {}
        self._unread: Counter[Channel] = Counter()
        self._wanted: Channel | None = None  # whose next frames are asked for
        self._is_closed = False

    def admits(self, message: Message) -> bool:
        """Wait until its channel may receive it; False if nothing is wanted any more."""
        channel = channel_of(message)
        with self._changed:
            if message.direction not in _HELD_IN_ANY_CASE:
                self._changed.wait_for(
                    lambda: self._unread[channel] < AHEAD or self._wanted == channel or self._is_closed
                )
            return not self._is_closed

    def put(self, message: Message, frame: Frame) -> None:
        with self._changed:
            self._frames[message] = frame
            self._unread[channel_of(message)] += 1
            self._changed.notify_all()

    def take(self, message: Message, look: Look) -> Frame:
        """Wait for a frame."""
        channel, pause = channel_of(message), FIRST_LOOK
        while True:
            with self._changed:
                if message not in self._frames:
                    self._wanted = channel
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: message in self._frames, pause)
                    self._wanted = None
                if message in self._frames:
                    self._unread[channel] -= 1
                    self._changed.notify_all()
                    return self._frames.pop(message)
            pause = look()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._frames.clear()
            self._changed.notify_all()

    @property
    def messages(self) -> set[Message]:
        """Those that are unread."""
        with self._changed:
            return set(self._frames)


class UnderWay:
    """What is being sent, in order of sending.

    Works of a device's backend do not block the host. They are waited for by `wait`, on the stream of who sent them: a
    thread's own stream would order nothing.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: dict[Message, None] = {}
        self._not_taken: Message | None = None
        self._of_streams: list[dist.Work] = []

    def add(self, message: Message) -> None:
        with self._changed:
            self._messages[message] = None

    def add_of_streams(self, works: list[dist.Work]) -> None:
        self._of_streams = [work for work in self._of_streams if not work.is_completed()] + works

    def done(self, message: Message, taken: bool) -> None:
        with self._changed:
            del self._messages[message]
            if not taken and self._not_taken is None:
                self._not_taken = message
            if not self._messages:
                self._changed.notify_all()

    def wait(self, look: Callable[[Message], float]) -> Message | None:
        """Wait for all. Returns the first message that was not taken, if one was not."""
        pause = FIRST_LOOK
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: not self._messages, pause):
                    break
                late = next(iter(self._messages))
            pause = look(late)
        for work in self._of_streams:
            work.wait()
        self._of_streams.clear()
        not_taken, self._not_taken = self._not_taken, None
        return not_taken
