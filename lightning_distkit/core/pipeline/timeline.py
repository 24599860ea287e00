"""A schedule on paper: when each action runs if it costs so much, as a drawing, a bubble, and what must be held.

    timeline = simulate(SCHEDULES["1f1b"](4, 8, 1))
    timeline.bubble, timeline.live_activations

An action begins when its rank has done the one before it and what it needs has arrived. Sending costs the ranks
nothing. A `Timeline` may as well hold what a run has measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from lightning_distkit.core.pipeline.schedules import SCHEDULES, Action

Costs = float | Sequence[float]  # of one micro-batch: in every stage, or one for each; in any unit of time


class DeadlockError(ValueError):
    """Ranks that wait for each other: each does last what another needs first."""


@dataclass(frozen=True)
class Slot:
    """An action and when it ran."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What each rank did and when."""

    ranks: tuple[tuple[Slot, ...], ...]  # each rank's own in order

    @property
    def duration(self) -> float:
        """From the first begin to the last end, over all ranks."""
        slots = [slot for rank in self.ranks for slot in rank]
        return max(slot.end for slot in slots) - min(slot.begin for slot in slots) if slots else 0.0

    @property
    def bubbles(self) -> list[float]:
        """For each rank the share of the duration in which it does nothing."""
        busy = [sum(slot.end - slot.begin for slot in rank) for rank in self.ranks]
        return [1 - each / self.duration if self.duration else 0.0 for each in busy]

    @property
    def bubble(self) -> float:
        """The same for all ranks together."""
        return sum(self.bubbles) / len(self.ranks)

    @property
    def live_activations(self) -> list[int]:
        """For each rank how many it holds at most: those of one micro-batch in one stage count as one."""
        return [live_activations([slot.action for slot in rank]) for rank in self.ranks]

    @cached_property
    def several_stages_a_rank(self) -> bool:
        return any(len({slot.action.stage for slot in rank}) > 1 for rank in self.ranks)

    def label(self, action: Action) -> str:
        """As short as is clear: without the stage, where no rank has two."""
        return str(action) if self.several_stages_a_rank else f"{action.kind}{action.micro_batch}"

    def draw(self) -> list[str]:
        """A line a rank, a column a unit of time: what begins there, "-" while it goes on, "." for nothing.

        Raises:
            ValueError: times that are not whole numbers.
        """
        slots = [slot for rank in self.ranks for slot in rank]
        times = [time for slot in slots for time in (slot.begin, slot.end)]
        if any(time != int(time) for time in times):
            raise ValueError("only whole times make a drawing of letters; give costs that are whole numbers")
        unit = gcd(*(int(time) for time in times)) or 1
        n_columns = max((int(time) // unit for time in times), default=0)
        labels = {slot.action: self.label(slot.action) for slot in slots}
        width = max(map(len, labels.values()), default=1)
        lines = []
        for rank in self.ranks:
            columns = ["." * width] * n_columns
            for slot in rank:
                begin, end = int(slot.begin) // unit, int(slot.end) // unit
                if begin < end:
                    length = (end - begin) * (width + 1) - 1
                    columns[begin] = labels[slot.action].ljust(length, "-" if end - begin > 1 else " ")
                    columns[begin + 1 : end] = [""] * (end - begin - 1)
            lines.append(" ".join(column for column in columns if column).rstrip(" "))
        return lines


def live_activations(actions: Sequence[Action]) -> int:
    """How many activations a rank that does ``actions`` holds at most, from a forward until its backward has ended."""
    most = alive = 0
    for action in actions:
        alive += 1 if action.kind == "F" else -1
        most = max(most, alive)
    return most


def simulate(
    ranks: Sequence[Sequence[Action]], forward: Costs = 1, backward: Costs = 2, message: float = 0
) -> Timeline:
    """When each action runs. A forward needs that of the stage before, a backward its forward and the stage behind.

    Args:
        ranks: of each its actions in order; a stage belongs to one rank. Forwards may stand alone, as in evaluation.
        forward: what one costs.
        backward: what one costs; with recomputation that includes another forward.
        message: how long an activation or its gradient is on its way from one rank to another.

    Raises:
        ValueError: an action that is there twice, or a backward in one stage and not in the stages behind it; or
            costs below 0, or not as many as stages.
        DeadlockError: ranks that wait for each other.
    """
    owners = _owners(ranks)
    n_stages = 1 + max((action.stage for action in owners), default=-1)
    costs = {"F": _each(forward, n_stages, "forward"), "B": _each(backward, n_stages, "backward")}

    def needed(action: Action) -> list[Action]:
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind == "F":
            return [Action("F", stage - 1, micro_batch)] if stage > 0 else []
        behind = [Action("B", stage + 1, micro_batch)] if stage + 1 < n_stages else []
        return [Action("F", stage, micro_batch), *behind]

    for action, rank in owners.items():
        for each in needed(action):
            if each not in owners:
                raise ValueError(f"{action} on rank {rank} needs {each}, which no rank does")
    if message < 0:
        raise ValueError(f"message must be a time of at least 0, got {message}")
    ended: dict[Action, float] = {}
    done: list[list[Slot]] = [[] for _ in ranks]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            free = done[rank][-1].end if done[rank] else 0
            for action in actions[len(done[rank]) :]:
                if any(each not in ended for each in needed(action)):
                    break
                arrived = [ended[each] + (message if owners[each] != rank else 0) for each in needed(action)]
                begin = max([free, *arrived])
                free = ended[action] = begin + costs[action.kind][action.stage]
                done[rank].append(Slot(action, begin, free))
                moved = True
    waiting = []
    for rank, actions in enumerate(ranks):
        for action in actions[len(done[rank]) :][:1]:
            missing = " and ".join(f"{each} on rank {owners[each]}" for each in needed(action) if each not in ended)
            waiting.append(f"rank {rank} with {action} for {missing}")
    if waiting:
        raise DeadlockError(f"every action must come to its turn, but ranks wait for each other: {'; '.join(waiting)}")
    return Timeline(tuple(map(tuple, done)))


def _owners(ranks: Sequence[Sequence[Action]]) -> dict[Action, int]:
    """Which rank does what."""
    owners: dict[Action, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if action in owners:
                raise ValueError(f"each action must be there once, but {action} is on rank {owners[action]} and {rank}")
            owners[action] = rank
    return owners


def _each(costs: Costs, n_stages: int, name: str) -> list[float]:
    each = list(costs) if isinstance(costs, Sequence) else [costs] * n_stages
    if len(each) != n_stages or min(each, default=0) < 0:
        raise ValueError(f"{name} must be a cost of at least 0, or {n_stages} of them, one a stage; got {costs}")
    return each


def draw(
    name: str,
    n_stages: int,
    n_microbatches: int,
    n_stages_per_rank: int = 1,
    forward: Costs = 1,
    backward: Costs = 1,
) -> list[str]:
    """The drawing of a schedule of the table, a line a rank.

    Raises:
        ValueError: a name that is not in the table, or stages that cannot be shared out to ranks.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r}")
    if n_stages_per_rank < 1 or n_stages % n_stages_per_rank:
        raise ValueError(f"n_stages must be a multiple of n_stages_per_rank, got {n_stages} and {n_stages_per_rank}")
    ranks = SCHEDULES[name](n_stages // n_stages_per_rank, n_microbatches, n_stages_per_rank)
    return simulate(ranks, forward, backward).draw()


def bubble_on_paper(n_ranks: int, n_micro_batches: int, n_stages_per_rank: int = 1) -> float:
    """The bubble of every schedule of the table where all stages cost the same and messages nothing.

    With m micro-batches and p ranks (p - 1) / (m + p - 1); with v stages a rank, and m at least p, (p - 1) / (v m + p -
    1). A pipe's efficiency is at most 1 minus that: with one stage a rank m / (m + p - 1).
    """
    busy = n_stages_per_rank * n_micro_batches
    # From one of its stages to the next a rank goes when all micro-batches are through, or the first one is round.
    round_trips = (n_stages_per_rank - 1) * max(n_micro_batches, n_ranks)
    return 1 - busy / (round_trips + n_micro_batches + n_ranks - 1)
