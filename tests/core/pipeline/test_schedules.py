"""Schedules: what they are on paper, each by its drawing, and what must hold for any numbers."""

from __future__ import annotations

import inspect
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_distkit.core.pipeline.schedules import SCHEDULES, Action, gpipe, interleaved_1f1b, one_f_one_b
from lightning_distkit.core.pipeline.timeline import bubble_on_paper, draw, live_activations, simulate

NUMBERS = st.integers(1, 8), st.integers(1, 40), st.integers(1, 4)  # ranks, micro-batches, stages a rank


def n_stages_of(name: str, n_stages_per_rank: int) -> int:
    return 1 if name == "1f1b" else n_stages_per_rank


def test_the_drawings_are_those_of_the_papers() -> None:
    assert draw("gpipe", n_stages=3, n_microbatches=4) == [
        "F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0",
        ".. F0 F1 F2 F3 .. .. B3 B2 B1 B0 ..",
        ".. .. F0 F1 F2 F3 B3 B2 B1 B0 .. ..",
    ]
    assert draw("1f1b", n_stages=2, n_microbatches=3) == [
        "F0 F1 .. B0 F2 B1 .. B2",
        ".. F0 B0 F1 B1 F2 B2 ..",
    ]
    assert draw("1f1b", n_stages=4, n_microbatches=8, backward=2) == [
        "F0 F1 F2 F3 .. .. .. .. .. .. B0--- F4 B1--- F5 B2--- F6 B3--- F7 B4--- .. B5--- .. B6--- .. B7---",
        ".. F0 F1 F2 .. .. .. .. B0--- F3 B1--- F4 B2--- F5 B3--- F6 B4--- F7 B5--- .. B6--- .. B7--- .. ..",
        ".. .. F0 F1 .. .. B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- F6 B5--- F7 B6--- .. B7--- .. .. .. ..",
        ".. .. .. F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- F6 B6--- F7 B7--- .. .. .. .. .. ..",
    ]
    assert draw("interleaved_1f1b", n_stages=4, n_microbatches=4, n_stages_per_rank=2) == [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 .... B2.2 .... B2.3 B0.2 B0.3",
        ".... F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3 ....",
    ]


def test_fewer_micro_batches_than_ranks_or_one_are_drawn_as_well() -> None:
    assert draw("1f1b", n_stages=3, n_microbatches=2) == [
        "F0 F1 .. .. .. B0 .. B1",
        ".. F0 F1 .. B0 .. B1 ..",
        ".. .. F0 B0 F1 B1 .. ..",
    ]
    for name in ("gpipe", "1f1b"):
        assert draw(name, n_stages=2, n_microbatches=1) == ["F0 .. .. B0", ".. F0 B0 .."]
    assert draw("interleaved_1f1b", n_stages=4, n_microbatches=1, n_stages_per_rank=2) == [
        "F0.0 .... F2.0 .... .... B2.0 .... B0.0",
        ".... F1.0 .... F3.0 B3.0 .... B1.0 ....",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_schedule_says_of_itself_is_its_drawing(name: str) -> None:
    lines = (inspect.getdoc(SCHEDULES[name]) or "").splitlines()
    drawing = [line.strip() for line in lines if line.startswith(("    F0", "    .."))]
    n_stages = {"interleaved_1f1b": 4}.get(name, len(drawing))
    n_microbatches = 1 + max(int(word[1:].split(".")[-1]) for word in drawing[0].split() if word.strip("."))
    assert drawing == draw(name, n_stages, n_microbatches, n_stages // len(drawing))


@pytest.mark.parametrize("name", SCHEDULES)
@given(*NUMBERS)
def test_every_stage_does_each_micro_batch_forward_and_then_backward_once(name: str, p: int, m: int, v: int) -> None:
    v = n_stages_of(name, v)
    ranks = SCHEDULES[name](p, m, v)
    assert len(ranks) == p
    for rank, actions in enumerate(ranks):
        stages = range(rank, p * v, p)
        assert sorted(actions) == sorted(Action(kind, stage, i) for kind in "FB" for stage in stages for i in range(m))  # type: ignore[arg-type]
        at = {action: n for n, action in enumerate(actions)}
        assert all(at[Action("F", stage, i)] < at[Action("B", stage, i)] for stage in stages for i in range(m))


@pytest.mark.parametrize("name", SCHEDULES)
@given(*NUMBERS, st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 10))
def test_no_rank_waits_forever_whatever_things_cost(
    name: str, p: int, m: int, v: int, forward: float, backward: float, message: float
) -> None:
    simulate(SCHEDULES[name](p, m, n_stages_of(name, v)), forward, backward, message)


@pytest.mark.parametrize("name", SCHEDULES)
@given(*NUMBERS)
def test_what_a_rank_receives_from_another_comes_in_the_order_in_which_it_is_needed(
    name: str, p: int, m: int, v: int
) -> None:
    v = n_stages_of(name, v)
    sent, needed = defaultdict(list), defaultdict(list)
    for rank, actions in enumerate(SCHEDULES[name](p, m, v)):
        for action in actions:
            step = 1 if action.kind == "F" else -1
            if 0 <= action.stage + step < p * v:
                sent[action.kind, rank, (rank + step) % p].append((action.stage + step, action.micro_batch))
            if 0 <= action.stage - step < p * v:
                needed[action.kind, (rank - step) % p, rank].append((action.stage, action.micro_batch))
    assert sent == needed


@pytest.mark.parametrize("name", SCHEDULES)
@given(*NUMBERS, st.integers(1, 5), st.integers(1, 5))
def test_the_bubble_is_the_one_on_paper(name: str, p: int, m: int, v: int, forward: int, backward: int) -> None:
    v = n_stages_of(name, v)
    timeline = simulate(SCHEDULES[name](p, m, v), forward, backward)
    assert timeline.bubble == pytest.approx(bubble_on_paper(p, m, v), abs=1e-9)
    if v == 1:
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-9)
    elif m >= p:
        assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-9)


@given(st.integers(2, 8), st.integers(1, 5), st.integers(2, 4))
def test_interleaving_v_stages_makes_the_idle_time_a_vth(p: int, n_groups: int, v: int) -> None:
    m = p * n_groups
    whole = simulate(one_f_one_b(p, m), forward=v, backward=2 * v)  # a stage that is v of the others
    pieces = simulate(interleaved_1f1b(p, m, v), forward=1, backward=2)
    assert pieces.bubble * pieces.duration == pytest.approx(whole.bubble * whole.duration / v)


@given(st.integers(1, 8), st.integers(1, 40))
def test_1f1b_holds_p_to_1_and_gpipe_all(p: int, m: int) -> None:
    assert [live_activations(rank) for rank in one_f_one_b(p, m)] == [min(m, p - rank) for rank in range(p)]
    assert [live_activations(rank) for rank in gpipe(p, m)] == [m] * p


@given(*NUMBERS)
def test_interleaved_1f1b_holds_what_it_says(p: int, m: int, v: int) -> None:
    v += 1
    longest = -(-m // max(1, m // p))
    held = [min(v * m, (v - 1) * longest + 2 * (p - rank) - 1) for rank in range(p)]
    assert [live_activations(rank) for rank in interleaved_1f1b(p, m, v)] == held


@given(st.integers(1, 8), st.integers(1, 40))
def test_interleaving_one_stage_is_1f1b(p: int, m: int) -> None:
    assert interleaved_1f1b(p, m, 1) == one_f_one_b(p, m)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_number_that_makes_no_schedule_is_named(name: str, wrong: tuple[int, int, int]) -> None:
    argument = ("n_ranks", "n_micro_batches", "n_stages_per_rank")[wrong.index(0)]
    with pytest.raises(ValueError, match=f"^{argument} must be at least 1, got 0$"):
        SCHEDULES[name](*wrong)


def test_1f1b_refuses_several_stages_a_rank_and_says_what_takes_them() -> None:
    with pytest.raises(ValueError, match="one stage a rank, got 2; use interleaved_1f1b or gpipe"):
        one_f_one_b(2, 4, 2)
