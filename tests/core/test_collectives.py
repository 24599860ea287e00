"""Sums in one order, and a lost rank that is an error."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distkit.core.collectives import Group, PeerError, Round, Rounds, Steps, run
from lightning_distkit.core.ledger import Counts, Ledger
from tests.ranks import RankDied, run_ranks


def twice(value: float) -> Steps:
    """The sum of the sum."""
    tensor = torch.full((3,), value)
    yield tensor
    again = tensor.clone()
    yield again
    return again


def sums() -> tuple[Tensor, list[Tensor], Counts]:
    group = Group(dist.group.WORLD)
    alone = run(twice(1.0 + group.rank), group)
    before = group.ledger.total
    rounds = Rounds(group)
    for i in range(5):
        rounds.start(twice(float(i)))
    together = rounds.finish()
    after = group.ledger.total
    return alone, together, Counts(after.nbytes - before.nbytes, after.n_messages - before.n_messages)


def test_several_under_way_share_their_later_messages() -> None:
    for alone, together, counts in run_ranks(3, sums):
        assert alone.tolist() == [18.0] * 3
        assert [each[0].item() for each in together] == [9.0 * i for i in range(5)]
        assert counts == Counts(nbytes=10 * 16, n_messages=6)  # 12 bytes are 16 on the wire: 2 (3 - 1) / 3


def test_a_world_of_one_runs_the_same_code() -> None:
    group = Group()
    assert run(twice(2.0), group).tolist() == [2.0] * 3
    assert group.ledger.total.nbytes == 0
    assert [each.tolist() for each in group.gather(torch.ones(1)) or []] == [[1.0]]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_round_knows_whether_its_sums_are_finite(bad: float) -> None:
    assert Round([torch.ones(3), torch.empty(0)]).finite
    assert Round([torch.full((3,), 3e38)]).finite
    assert Round([torch.full((3,), 1e300, dtype=torch.float64)]).finite
    assert not Round([torch.ones(3), torch.tensor([0.0, bad])]).finite
    assert not Round([torch.tensor([bad], dtype=torch.float16)]).finite


def test_the_ledger_tells_steps_apart() -> None:
    ledger = Ledger()
    ledger.add(nbytes=5, n_messages=1)
    ledger.step()
    ledger.add(nbytes=7, n_messages=2, waited_s=0.5)
    assert ledger.last_step == Counts(nbytes=5, n_messages=1)
    assert ledger.total == Counts(nbytes=12, n_messages=3, waited_s=0.5)
    ledger.step()
    assert (ledger.n_steps, ledger.last_step) == (2, Counts(nbytes=7, n_messages=2, waited_s=0.5))


def gather_in_order() -> list[float] | None:
    group = Group(dist.group.WORLD)
    gathered = group.gather(torch.tensor([float(group.rank)]))
    return None if gathered is None else [each.item() for each in gathered]


def test_gather_brings_all_to_rank_zero() -> None:
    assert run_ranks(3, gather_in_order) == [[0.0, 1.0, 2.0], None, None]


def dies() -> float:
    group = Group(dist.group.WORLD)
    group.all_reduce(torch.ones(10)).wait()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(PeerError, match="rank 0 of 2 could not finish a collective: another rank died"):
        group.all_reduce(torch.ones(10)).wait()
    return time.monotonic() - begin


def test_a_killed_rank_is_an_error_on_the_other_within_the_timeout() -> None:
    seconds, died = run_ranks(2, dies, return_exceptions=True, pg_timeout=20)
    assert isinstance(died, RankDied)
    assert seconds < 20


def late() -> float:
    group = Group(dist.group.WORLD)
    begin = time.monotonic()
    if group.rank == 1:
        time.sleep(5)
        return 0.0
    with pytest.raises(PeerError, match="was later than the process group's timeout"):
        group.all_reduce(torch.ones(10)).wait()
    return time.monotonic() - begin


def test_a_rank_that_is_too_late_is_an_error_not_a_hang() -> None:
    seconds, _ = run_ranks(2, late, pg_timeout=2)
    assert 1 < seconds < 4.5
