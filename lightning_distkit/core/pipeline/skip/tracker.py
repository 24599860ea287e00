"""Where skip tensors are between the layer that stashes them and the one that pops them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from lightning_distkit.core.pipeline.skip.namespace import Namespace

SkipKey = tuple[Namespace | None, str]  # None: the namespace of those that are not isolated


class Tracker:
    """Skip tensors by their keys; each is stashed once and popped once."""

    def __init__(self, skips: Mapping[SkipKey, Tensor | None] | None = None) -> None:
        self.stashed: dict[SkipKey, Tensor | None] = dict(skips or {})

    def save(self, key: SkipKey, tensor: Tensor | None) -> None:
        self.stashed[key] = tensor

    def load(self, key: SkipKey) -> Tensor | None:
        """
        Raises:
            RuntimeError: nobody has stashed it.
        """
        try:
            return self.stashed.pop(key)
        except KeyError:
            raise RuntimeError(f"'{key[1]}' has not been stashed") from None


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.tracker = Tracker()  # of skippable layers that run outside of a pipe


_this_thread = _ThisThread()


def current() -> Tracker:
    """The tracker of the layers that now run in this thread."""
    return _this_thread.tracker


@contextmanager
def carried(skips: Mapping[SkipKey, Tensor | None] | None = None) -> Iterator[Tracker]:
    """Run layers with the skip tensors that come in from others, and no further ones.

    So layers are a function: from values and ``skips`` to values and, when they have run, the tracker's ``stashed``,
    which is what they stashed and did not pop themselves.
    """
    before, _this_thread.tracker = _this_thread.tracker, Tracker(skips)
    try:
        yield _this_thread.tracker
    finally:
        _this_thread.tracker = before
