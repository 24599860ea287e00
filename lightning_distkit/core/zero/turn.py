"""Where a rank is among the backwards of stage 2: so that one that made more or fewer than the others is found out.

A *turn* ends with a step, and with a ``zero_grad`` that drops gradients. Each message of gradients says whether its
rank is in an even or in an odd turn, and one in whose sum there are both is an error. That is enough: where two ranks
first differ, one still makes a backward, and the other is in the turn behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_distkit.core.collectives import PeerError

N_FLAGS = 2  # "a rank is in an even turn", "in an odd one"
_ALIKE = (
    "stage 2 reduces gradients in every backward, so between two steps, or calls of zero_grad, every rank must make "
    "equally many, and this one has made {n_rounds}: make them alike, accumulate within no_sync(), or use stage 1, "
    "which reduces at the step alone"
)


class Turn:
    """This rank's.

    Args:
        reduces_in_backward: as stage 2 does; else ranks may make as many backwards as they like.
    """

    def __init__(self, reduces_in_backward: bool) -> None:
        self._reduces_in_backward = reduces_in_backward
        self.n_rounds = 0  # in it
        self._is_odd = False
        self._unread: deque[tuple[Tensor, torch.Event, str]] = deque()  # on CUDA: whether others were in another turn

    def end(self) -> None:
        self.n_rounds = 0
        self._is_odd = not self._is_odd

    def mark_(self, flags: Tensor) -> None:
        """Make a message's two flags, both one so far, say which turn it is of."""
        flags[int(not self._is_odd)] = 0

    def check(self, flags: Tensor) -> None:
        """Raise a RuntimeError if ``flags``, summed over the ranks, are of two turns; all ranks do.

        On CUDA that is said a little later, when the device has come there: to wait would cost more than the message.
        """
        others = flags.real[int(not self._is_odd)]
        said = _ALIKE.format(n_rounds=self.n_rounds)
        if flags.device.type == "cpu":
            _refuse(others, said)
            return
        while self._unread and self._unread[0][1].query():
            copied, _, its = self._unread.popleft()
            _refuse(copied, its)
        # Pinned, or the copy would wait. The event is recorded behind it, on the stream that has waited for the sum.
        copied = torch.empty((), dtype=others.dtype, pin_memory=True).copy_(others, non_blocking=True)
        event = torch.Event(flags.device)
        event.record()
        self._unread.append((copied, event, said))

    @contextmanager
    def naming_the_cause(self) -> Iterator[None]:
        """On gloo a rank that makes a backward and one that makes a step wait for each other until the timeout."""
        try:
            yield
        except PeerError as error:
            if not self._reduces_in_backward:
                raise
            raise PeerError(f"{error}. Or, as {_ALIKE.format(n_rounds=self.n_rounds)}") from error


def _refuse(others: Tensor, said: str) -> None:
    if others > 0:
        raise RuntimeError(f"the ranks did not make the same backwards: {said}")
