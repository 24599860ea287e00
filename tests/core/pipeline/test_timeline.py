"""The clock on paper: what waits for what, costs that differ, and schedules that cannot work."""

from __future__ import annotations

import pytest

from lightning_distkit.core.pipeline.schedules import Action, gpipe, interleaved_1f1b, one_f_one_b
from lightning_distkit.core.pipeline.timeline import DeadlockError, Slot, Timeline, draw, simulate


def actions(text: str) -> list[Action]:
    """ "F0.1 B0.1" as a list."""
    return [Action(word[0], *map(int, word[1:].split("."))) for word in text.split()]  # type: ignore[arg-type]


def times(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {str(slot.action): (slot.begin, slot.end) for rank in timeline.ranks for slot in rank}


def test_stages_that_differ_and_messages_that_take_time_are_waited_for() -> None:
    timeline = simulate(one_f_one_b(2, 2), forward=[1, 3], backward=[2, 6], message=0.5)
    assert times(timeline) == {
        "F0.0": (0, 1),
        "F0.1": (1, 2),
        "F1.0": (1.5, 4.5),
        "B1.0": (4.5, 10.5),
        "F1.1": (10.5, 13.5),
        "B0.0": (11, 13),
        "B1.1": (13.5, 19.5),
        "B0.1": (20, 22),
    }
    assert timeline.duration == 22
    assert timeline.bubbles == pytest.approx([1 - 6 / 22, 1 - 18 / 22])
    assert timeline.bubble == pytest.approx(1 - 24 / 44)
    assert timeline.live_activations == [2, 1]


def test_a_message_to_the_own_rank_takes_no_time() -> None:
    assert simulate(interleaved_1f1b(1, 2, 2), message=5).bubble == 0


def test_forwards_alone_are_a_timeline() -> None:
    forwards = [[action for action in rank if action.kind == "F"] for rank in gpipe(3, 4)]
    timeline = simulate(forwards)
    assert timeline.draw() == ["F0 F1 F2 F3 .. ..", ".. F0 F1 F2 F3 ..", ".. .. F0 F1 F2 F3"]
    assert timeline.live_activations == [4, 4, 4]


def test_ranks_that_wait_for_each_other_are_named_with_what_they_wait_for() -> None:
    first, second = actions("F0.0 B0.0 F0.1 B0.1"), actions("F1.0 F1.1 B1.0 B1.1")
    with pytest.raises(DeadlockError) as error:
        simulate([first, second])
    assert str(error.value).endswith(
        "wait for each other: rank 0 with B0.0 for B1.0 on rank 1; rank 1 with F1.1 for F0.1 on rank 0"
    )


def test_a_backward_before_its_own_forward_is_a_deadlock() -> None:
    with pytest.raises(DeadlockError, match=r"rank 0 with B0\.0 for F0\.0 on rank 0"):
        simulate([actions("B0.0 F0.0")])


def test_an_action_that_is_missing_or_there_twice_is_named() -> None:
    with pytest.raises(ValueError, match=r"B0\.0 on rank 0 needs B1\.0, which no rank does"):
        simulate([actions("F0.0 B0.0"), actions("F1.0")])
    with pytest.raises(ValueError, match=r"once, but F0\.0 is on rank 0 and 1"):
        simulate([actions("F0.0"), actions("F0.0")])


@pytest.mark.parametrize("wrong", [[1, 1, 1], [1], -1])
def test_costs_must_be_one_a_stage(wrong: float | list[float]) -> None:
    with pytest.raises(ValueError, match="forward must be a cost of at least 0, or 2 of them, one a stage"):
        simulate(one_f_one_b(2, 2), forward=wrong)


def test_a_drawing_takes_the_longest_unit_that_fits_and_columns_as_wide_as_needed() -> None:
    assert draw("1f1b", 1, 2, forward=2, backward=4) == ["F0 B0--- F1 B1---"]
    assert draw("gpipe", 1, 11)[0].startswith("F0  F1  F2 ")
    assert draw("gpipe", 2, 11)[1].startswith("... F0  F1 ")
    assert draw("gpipe", 1, 1, forward=0) == ["B0"]  # what takes no time is not seen
    with pytest.raises(ValueError, match="whole times"):
        simulate(gpipe(2, 2), forward=0.5).draw()


def test_a_drawing_of_nothing_that_exists_says_what_there_is() -> None:
    with pytest.raises(ValueError, match="one of gpipe, 1f1b, interleaved_1f1b, got '2f2b'"):
        draw("2f2b", 2, 2)
    with pytest.raises(ValueError, match="multiple of n_stages_per_rank, got 3 and 2"):
        draw("interleaved_1f1b", 3, 2, 2)


def test_what_was_measured_is_a_timeline_too() -> None:
    first, second = actions("F0.0 B0.0"), actions("F1.0 B1.0")
    ranks = (
        (Slot(first[0], 10.0, 11.0), Slot(first[1], 15.0, 16.5)),
        (Slot(second[0], 11.5, 12.5), Slot(second[1], 13.0, 15.0)),
    )
    measured = Timeline(ranks)
    assert measured.duration == 6.5
    assert measured.bubbles == pytest.approx([4 / 6.5, 3.5 / 6.5])
    assert Timeline(()).duration == 0
