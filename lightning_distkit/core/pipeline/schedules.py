"""Schedules: what each rank of a pipe does, in which order; lists, made on paper.

In the drawings a row is a rank and a column a unit of time; F2 is the forward of micro-batch 2, B2 its backward, and
with several stages a rank F3.2 that of stage 3. `timeline` makes them and proves the lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, order=True)
class Action:
    """The forward or the backward of one micro-batch through one stage."""

    kind: Literal["F", "B"]
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


Schedule = Callable[[int, int, int], list[list[Action]]]
"""From the numbers of ranks, micro-batches and stages a rank: for each rank its actions in order.

Stage s lives on rank s % n_ranks. All ranks do the forwards of their stages in one common order, and so the backwards:
what a rank receives from another arrives in the order in which it needs it.
"""


def gpipe(n_ranks: int, n_micro_batches: int, n_stages_per_rank: int = 1) -> list[list[Action]]:
    """All forwards, then all backwards from the last micro-batch to the first.

        F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0
        .. F0 F1 F2 F3 .. .. B3 B2 B1 B0 ..
        .. .. F0 F1 F2 F3 B3 B2 B1 B0 .. ..

    Source: Huang et al., 2019, https://arxiv.org/abs/1811.06965, figure 2c. With p ranks and m micro-batches the
    bubble is (p - 1) / (m + p - 1) of the time, and each rank holds the activations of all m micro-batches.

    With v stages a rank, one after the other for all micro-batches (breadth first: Lamy-Poirier, 2022,
    https://arxiv.org/abs/2211.05953), the bubble is (p - 1) / (v m + p - 1) where m is at least p.
    """
    _check(n_ranks, n_micro_batches, n_stages_per_rank)
    ranks = []
    for rank in range(n_ranks):
        order = [
            (stage, micro_batch)
            for stage in range(rank, n_ranks * n_stages_per_rank, n_ranks)
            for micro_batch in range(n_micro_batches)
        ]
        ranks.append([*(Action("F", *each) for each in order), *(Action("B", *each) for each in reversed(order))])
    return ranks


def one_f_one_b(n_ranks: int, n_micro_batches: int, n_stages_per_rank: int = 1) -> list[list[Action]]:
    """A backward as soon as there can be one, then a forward and a backward in turn.

        F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
        .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

    Source: Narayanan et al., 2021, https://arxiv.org/abs/2006.09503, there PipeDream-Flush. The bubble is gpipe's,
    (p - 1) / (m + p - 1), but rank r never holds more than p - r micro-batches: p on the first, one on the last.

    Raises:
        ValueError: several stages a rank.
    """
    _check(n_ranks, n_micro_batches, n_stages_per_rank)
    if n_stages_per_rank != 1:
        raise ValueError(f"1f1b has one stage a rank, got {n_stages_per_rank}; use interleaved_1f1b or gpipe")
    order = range(n_micro_batches)
    return [
        _in_turn(
            [Action("F", rank, micro_batch) for micro_batch in order],
            [Action("B", rank, micro_batch) for micro_batch in order],
            n_ahead=n_ranks - rank - 1,
        )
        for rank in range(n_ranks)
    ]


def interleaved_1f1b(n_ranks: int, n_micro_batches: int, n_stages_per_rank: int = 2) -> list[list[Action]]:
    """1f1b with v stages a rank, each a v-th as long, so that a bubble is as well.

        F0.0 F0.1 F2.0 F2.1 .... B2.0 .... B2.1 B0.0 B0.1
        .... F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1 ....

    Source: Narayanan et al., 2021, https://arxiv.org/abs/2104.04473, section 2.2. A group of micro-batches goes through
    a rank's first stage, then through its second, and so on. There a group is of p micro-batches, and m must be a
    multiple of p. Here m may be anything: the lengths of groups differ by at most one, and are at least p where m is,
    as a shorter group lengthens the bubble or leaves ranks waiting for each other.

    The bubble is (p - 1) / (v m + p - 1) where m is at least p. Rank r holds up to (v - 1) g + 2 (p - r) - 1
    micro-batches, g the longest group, in one of v stages each. (v p - 1) / (p - 1) times as many messages cross as
    with 1f1b.
    """
    _check(n_ranks, n_micro_batches, n_stages_per_rank)
    if n_stages_per_rank == 1:
        return one_f_one_b(n_ranks, n_micro_batches)
    groups = _groups(n_micro_batches, max(1, n_micro_batches // n_ranks))
    rounds = range(n_stages_per_rank)
    order = [(n, micro_batch) for group in groups for n in rounds for micro_batch in group]
    ranks = []
    for rank in range(n_ranks):
        forwards = [Action("F", n * n_ranks + rank, micro_batch) for n, micro_batch in order]
        backwards = [Action("B", (n_stages_per_rank - 1 - n) * n_ranks + rank, micro_batch) for n, micro_batch in order]
        # The last rank is ahead by what must go through its other stages first; each rank before it by one forward
        # more for the way there, and one for the way back.
        n_ahead = (n_stages_per_rank - 1) * len(groups[0]) + 2 * (n_ranks - rank - 1)
        ranks.append(_in_turn(forwards, backwards, n_ahead))
    return ranks


SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
}


def _check(n_ranks: int, n_micro_batches: int, n_stages_per_rank: int) -> None:
    numbers = {"n_ranks": n_ranks, "n_micro_batches": n_micro_batches, "n_stages_per_rank": n_stages_per_rank}
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")


def _in_turn(forwards: list[Action], backwards: list[Action], n_ahead: int) -> list[Action]:
    """``n_ahead`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    n_ahead = min(n_ahead, len(forwards))
    actions = forwards[:n_ahead]
    for forward, backward in zip(forwards[n_ahead:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - n_ahead :]


def _groups(n_micro_batches: int, n_groups: int) -> list[range]:
    """Neighbours together, as many in each group as in another or one more; longer groups first."""
    length, n_longer = divmod(n_micro_batches, n_groups)
    begins = [n * length + min(n, n_longer) for n in range(n_groups + 1)]
    return [range(begins[n], begins[n + 1]) for n in range(n_groups)]
