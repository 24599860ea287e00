"""Which frames cross between the ranks in one call: data, made on paper from a schedule.

So each channel carries a number of frames that both its ends know before the call begins. A rank that fails goes on
with the plan, sending its failure in place of values, and dropping what it receives: then no other rank waits in vain,
and no frame is left over for the next call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from lightning_distkit.core.pipeline.schedules import SCHEDULES, Action


class Direction(IntEnum):
    """What a channel carries. Each has messages, and on NCCL communicators, of its own."""

    FORWARD = 1  # values to the next stage
    BACKWARD = 2  # their gradients back
    SKIP = 3  # stashed tensors, straight to the stage that pops them
    SKIP_BACKWARD = 4
    OUTPUT = 5  # the last stage's, to all ranks
    INPUT_GRADIENT = 6  # the first stage's, to all ranks
    TIED = 7  # gradients of parameters that several ranks have
    END = 8  # the first stage's word on how the call went, to all ranks
    STATE = 9  # whole state dicts


class Message(NamedTuple):
    """One frame, from a rank to another or to itself; ``stage`` is the one that receives, or that the value is of."""

    source: int
    target: int
    direction: Direction
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Step:
    """What a rank does in one go: receive, then compute, then send."""

    kind: str  # "F", "B", "tied out", "tied in", "outputs", "input gradients", "end"
    stage: int = -1
    micro_batch: int = -1
    receives: tuple[Message, ...] = ()
    sends: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Layout:
    """What of a pipe decides which frames cross; the same on every rank.

    Args:
        skips: pairs of stages, the one that stashes and the one that pops, each pair once.
        tied: pairs of ranks that have a parameter in common, both ways.
    """

    n_ranks: int
    n_stages: int
    skips: tuple[tuple[int, int], ...] = ()
    tied: tuple[tuple[int, int], ...] = ()

    def rank_of(self, stage: int) -> int:
        return stage % self.n_ranks

    @property
    def first_rank(self) -> int:
        return 0

    @property
    def last_rank(self) -> int:
        return self.rank_of(self.n_stages - 1)

    def skips_from(self, stage: int) -> list[int]:
        """The stages that pop what this one stashes."""
        return [pops for stashes, pops in self.skips if stashes == stage]

    def skips_to(self, stage: int) -> list[int]:
        """The stages that stash what this one pops."""
        return [stashes for stashes, pops in self.skips if pops == stage]


@dataclass(frozen=True)
class Kind:
    """What sort of call it is; the same on every rank.

    Args:
        does: "F", "B", or "FB": forwards, backwards, or both in one.
        hands_out: every rank gets each micro-batch's output; if not, a word at the end alone.
        input_gradients: every rank gets them.
    """

    does: str
    n_micro_batches: int
    hands_out: bool = True
    input_gradients: bool = False

    @property
    def signature(self) -> int:
        """A number that differs if the kinds do."""
        does = ("F", "B", "FB").index(self.does)
        return ((self.n_micro_batches * 3 + does) * 2 + self.hands_out) * 2 + self.input_gradients


@lru_cache(maxsize=256)
def plan(layout: Layout, schedule: str, kind: Kind) -> tuple[tuple[Step, ...], ...]:
    """For each rank its steps in order."""
    lists = SCHEDULES[schedule](layout.n_ranks, kind.n_micro_batches, layout.n_stages // layout.n_ranks)
    ranks = [[_step(layout, kind, action) for action in actions if action.kind in kind.does] for actions in lists]
    result = []
    for rank, steps in enumerate(ranks):
        outputs = incoming(ranks[layout.last_rank], rank).get(Direction.OUTPUT, [])
        gradients = incoming(ranks[layout.first_rank], rank).get(Direction.INPUT_GRADIENT, [])
        closing = _tied(layout, rank) if "B" in kind.does else []
        if outputs:
            closing.append(Step("outputs", receives=tuple(outputs)))
        if gradients:
            closing.append(Step("input gradients", receives=tuple(gradients)))
        if "B" in kind.does:
            ends = tuple(_to_all(layout, layout.first_rank, Direction.END, 0, 0))
            mine = tuple(message for message in ends if message.target == rank)
            closing.append(Step("end", receives=mine, sends=ends if rank == layout.first_rank else ()))
        result.append((*steps, *closing))
    return tuple(result)


@lru_cache(maxsize=256)
def expected(layout: Layout, schedule: str, kind: Kind, rank: int) -> tuple[tuple[Message, ...], ...]:
    """For each channel of a rank, what comes by it from another, in order."""
    ranks = plan(layout, schedule, kind)
    others = (steps for source, steps in enumerate(ranks) if source != rank)
    return tuple(tuple(messages) for steps in others for messages in incoming(steps, rank).values())


def incoming(steps: Iterable[Step], target: int) -> dict[Direction, list[Message]]:
    """Of a rank's steps, what it sends to ``target``, in the order of sending."""
    result: dict[Direction, list[Message]] = {}
    for step in steps:
        for message in step.sends:
            if message.target == target:
                result.setdefault(message.direction, []).append(message)
    return result


def _step(layout: Layout, kind: Kind, action: Action) -> Step:
    return (_forward if action.kind == "F" else _backward)(layout, kind, action.stage, action.micro_batch)


def _forward(layout: Layout, kind: Kind, stage: int, i: int) -> Step:
    here, rank_of = layout.rank_of(stage), layout.rank_of
    receives = [Message(rank_of(stage - 1), here, Direction.FORWARD, stage, i)] if stage > 0 else []
    receives += [Message(rank_of(each), here, Direction.SKIP, stage, i) for each in layout.skips_to(stage)]
    last = stage == layout.n_stages - 1
    sends = [] if last else [Message(here, rank_of(stage + 1), Direction.FORWARD, stage + 1, i)]
    sends += [Message(here, rank_of(each), Direction.SKIP, each, i) for each in layout.skips_from(stage)]
    if last and (kind.hands_out or i == kind.n_micro_batches - 1):  # forwards of a stage are always in this order
        sends += _to_all(layout, here, Direction.OUTPUT, stage, i)
    return Step("F", stage, i, tuple(receives), tuple(sends))


def _backward(layout: Layout, kind: Kind, stage: int, i: int) -> Step:
    here, rank_of = layout.rank_of(stage), layout.rank_of
    last = stage == layout.n_stages - 1
    receives = [] if last else [Message(rank_of(stage + 1), here, Direction.BACKWARD, stage, i)]
    receives += [Message(rank_of(each), here, Direction.SKIP_BACKWARD, stage, i) for each in layout.skips_from(stage)]
    sends = [Message(here, rank_of(stage - 1), Direction.BACKWARD, stage - 1, i)] if stage > 0 else []
    sends += [Message(here, rank_of(each), Direction.SKIP_BACKWARD, each, i) for each in layout.skips_to(stage)]
    if stage == 0 and kind.input_gradients:
        sends += _to_all(layout, here, Direction.INPUT_GRADIENT, 0, i)
    return Step("B", stage, i, tuple(receives), tuple(sends))


def _tied(layout: Layout, rank: int) -> list[Step]:
    sends = [Message(a, b, Direction.TIED, 0, 0) for a, b in layout.tied if a == rank]
    receives = [Message(a, b, Direction.TIED, 0, 0) for a, b in layout.tied if b == rank]
    return [Step("tied out", sends=tuple(sends)), Step("tied in", receives=tuple(receives))] if sends else []


def _to_all(layout: Layout, source: int, direction: Direction, stage: int, i: int) -> list[Message]:
    others = (rank for rank in range(layout.n_ranks) if rank != source)
    return [Message(source, target, direction, stage, i) for target in others]
