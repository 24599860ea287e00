"""What one process put on the wire and how long it waited, counted where it happens."""

from __future__ import annotations

from operator import add
from typing import Any, NamedTuple


class Counts(NamedTuple):
    """What was sent and how the time went.

    On CUDA the two times are those of the host, which hands work to the device and goes on: they are the times of
    launching, not of the kernels.
    """

    nbytes: int = 0  # bytes that this rank sent
    n_messages: int = 0  # collectives
    waited_s: float = 0.0  # seconds blocked until a collective ended
    computed_s: float = 0.0  # seconds spent making messages and reading them
    nbytes_whole: int = 0  # bytes that it would have sent as a plain all-reduce of all gradients
    # Only of steps that were measured (`core.compression.measurement`):
    wanted: float = 0.0  # square of the norm of all that this rank was to send
    left_out: float = 0.0  # of what compression left out of that

    def __add__(self, other: tuple[Any, ...]) -> Counts:
        return Counts(*map(add, self, other))


class Ledger:
    """The counts of one process: since the beginning, of the last finished step, and of the step under way."""

    def __init__(self) -> None:
        self.n_steps = 0
        self.last_step = Counts()
        self._finished = Counts()
        self._current = Counts()

    def __repr__(self) -> str:
        return f"<Ledger of {self.n_steps} steps, total={self.total}>"

    @property
    def total(self) -> Counts:
        """All that was counted so far, an unfinished step included."""
        return self._finished + self._current

    def add(self, **counts: float) -> None:
        """Add to the step under way; the keywords are the fields of `Counts`."""
        self._current += Counts(**counts)  # type: ignore[arg-type]

    def step(self) -> None:
        """Close the step under way: it becomes ``last_step``."""
        self.n_steps += 1
        self.last_step = self._current
        self._finished += self._current
        self._current = Counts()
