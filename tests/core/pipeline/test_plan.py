"""On paper: what one rank is to receive another sends, in that order, and nobody waits in vain."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest

from lightning_distkit.core.pipeline.plan import Direction, Kind, Layout, Message, Step, incoming, plan
from lightning_distkit.core.pipeline.schedules import SCHEDULES

LAYOUTS = [
    Layout(1, 1),
    Layout(1, 3),
    Layout(2, 2),
    Layout(3, 3, skips=((0, 2),), tied=((0, 2), (2, 0))),
    Layout(4, 4, skips=((0, 3), (1, 2), (0, 1))),
    Layout(2, 4, skips=((0, 2), (0, 3), (1, 3)), tied=((0, 1), (1, 0))),
    Layout(3, 6, skips=((0, 5), (2, 3))),
    Layout(4, 12, tied=((0, 3), (3, 0), (0, 1), (1, 0), (1, 3), (3, 1))),
]
PAIRS = [
    (layout, schedule)
    for layout, schedule in itertools.product(LAYOUTS, SCHEDULES)
    if schedule != "1f1b" or layout.n_stages == layout.n_ranks
]
KINDS = [
    Kind(does, m, hands_out, grads)
    for does, m, hands_out, grads in itertools.product(("F", "B", "FB"), (1, 2, 3, 5, 8), (True, False), (True, False))
]


def carried_out(ranks: Sequence[Sequence[Step]]) -> list[Message]:
    """Do all steps as soon as what they receive was sent; the messages that were. Fails if somebody waits for ever."""
    at, sent = [0] * len(ranks), Counter[Message]()
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(ranks):
            while at[rank] < len(steps) and all(sent[message] for message in steps[at[rank]].receives):
                sent.update(steps[at[rank]].sends)
                at[rank] += 1
                moved = True
    assert at == [len(steps) for steps in ranks]
    return list(sent.elements())


@pytest.mark.parametrize(("layout", "schedule"), PAIRS, ids=str)
def test_every_frame_is_sent_once_and_received_once_and_nobody_waits_for_ever(layout: Layout, schedule: str) -> None:
    for kind in KINDS:
        ranks = plan(layout, schedule, kind)
        sent = carried_out(ranks)
        received = [message for steps in ranks for step in steps for message in step.receives]
        assert Counter(sent) == Counter(received)
        assert max(Counter(sent).values(), default=1) == 1
        for rank, steps in enumerate(ranks):
            assert all(message.source == rank for step in steps for message in step.sends)
            assert all(message.target == rank for step in steps for message in step.receives)


@pytest.mark.parametrize(("layout", "schedule"), PAIRS, ids=str)
def test_each_channel_brings_its_frames_in_the_order_in_which_they_are_wanted(layout: Layout, schedule: str) -> None:
    """So a channel that is ahead by a frame never holds one that is not the next to be read."""
    for kind in KINDS:
        ranks = plan(layout, schedule, kind)
        for source, target in itertools.permutations(range(layout.n_ranks), 2):
            for direction, messages in incoming(ranks[source], target).items():
                if direction in (Direction.SKIP, Direction.SKIP_BACKWARD):
                    continue  # two stages that pop on one rank may want them in another order
                wanted = [
                    message
                    for step in ranks[target]
                    for message in step.receives
                    if (message.source, message.direction) == (source, direction)
                ]
                assert wanted == messages


def test_a_failure_in_any_step_reaches_who_says_how_the_call_went() -> None:
    """Whoever fails sends failures from then on: they must reach the rank whose word all others take."""
    for layout, schedule in PAIRS:
        for kind in (each for each in KINDS if each.n_micro_batches in (1, 3)):
            ranks = plan(layout, schedule, kind)
            last_word = Direction.OUTPUT if kind.does == "F" else Direction.END
            speaker = layout.last_rank if kind.does == "F" else layout.first_rank
            for rank, steps in enumerate(ranks):
                for n, step in enumerate(steps):
                    if step.kind not in ("F", "B"):
                        continue
                    has_failed = {rank: n}  # from which step on each rank knows of it
                    spread(ranks, has_failed)
                    said = [any(each.direction == last_word for each in step.sends) for step in ranks[speaker]]
                    if layout.n_ranks > 1:
                        assert has_failed[speaker] <= len(said) - 1 - said[::-1].index(True)


def spread(ranks: Sequence[Sequence[Step]], has_failed: dict[int, int]) -> None:
    changed = True
    while changed:
        bad = {message for rank, since in has_failed.items() for step in ranks[rank][since:] for message in step.sends}
        changed = False
        for rank, steps in enumerate(ranks):
            for n, step in enumerate(steps):
                if any(message in bad for message in step.receives) and n < has_failed.get(rank, len(steps)):
                    has_failed[rank] = n
                    changed = True


def test_kinds_that_differ_have_signatures_that_differ() -> None:
    assert len({kind.signature for kind in KINDS}) == len(KINDS)
