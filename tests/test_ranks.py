from __future__ import annotations

import functools
import os
import re
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import RankDied, RemoteTraceback, run_ranks


def summed(numel: int, add: float = 0.0) -> Tensor:
    tensor = torch.full((numel,), float(dist.get_rank())) + add
    dist.all_reduce(tensor)
    return tensor


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_back_rank_by_rank(world_size: int) -> None:
    expected = torch.full((5,), float(sum(range(world_size))))
    results = run_ranks(world_size, summed, 5)
    assert len(results) == world_size
    assert all(torch.equal(result, expected) for result in results)


def test_a_body_may_be_a_partial_and_a_result_larger_than_a_pipe() -> None:
    for result in run_ranks(2, functools.partial(summed, add=1.0), 1_000_000):
        assert torch.equal(result, torch.full((1_000_000,), 3.0))


def marked(tensor: Tensor) -> Tensor:
    tensor += dist.get_rank() + 1
    dist.barrier()
    return tensor


def test_arguments_and_results_are_values_that_no_rank_shares() -> None:
    given = torch.zeros(3)
    results = run_ranks(2, marked, given)
    assert [result.tolist() for result in results] == [[1.0] * 3, [2.0] * 3]
    assert given.tolist() == [0.0] * 3


def environment() -> tuple[dict[str, str], str, int, bool]:
    return dict(os.environ), str(Path.cwd()), torch.get_num_threads(), dist.is_torchelastic_launched()


def test_a_rank_finds_what_torchrun_sets_and_the_callers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_LATE", "yes")
    for rank, (environ, folder, n_threads, launched) in enumerate(run_ranks(2, environment)):
        assert environ["RANK"] == environ["LOCAL_RANK"] == str(rank)
        assert environ["WORLD_SIZE"] == environ["LOCAL_WORLD_SIZE"] == "2"
        assert environ["GROUP_RANK"] == "0"
        assert int(environ["MASTER_PORT"]) > 0
        assert environ["SET_LATE"] == "yes"
        assert launched
        assert n_threads == 1
        assert not Path(folder).exists()


def drawn() -> Tensor:
    return torch.rand(3)


def test_a_rank_draws_the_same_random_numbers_every_time() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    assert all(torch.equal(got, wanted) for got in run_ranks(2, drawn))


def late_error(rank: int) -> None:
    if dist.get_rank() == rank:
        print("about to fail")
        raise ValueError(f"rank {rank} has no data")
    time.sleep(100)


def test_an_exception_is_raised_here_with_its_rank_traceback_and_output() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 has no data") as caught:
        run_ranks(3, late_error, 1)
    assert time.monotonic() - start < 30  # the others were not waited for
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    told = str(caught.value.__cause__)
    assert told.startswith("in rank 1:\nTraceback")
    assert "in late_error" in told
    assert "about to fail" in told


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def unpicklable() -> None:
    raise Unpicklable(1, 2)


def test_an_exception_that_cannot_travel_is_told_by_name() -> None:
    with pytest.raises(RuntimeError, match="Unpicklable: 1 and 2"):
        run_ranks(1, unpicklable)


def unpicklable_result() -> Any:
    return lambda: None


def test_a_result_that_cannot_travel_is_an_error() -> None:
    with pytest.raises((AttributeError, RuntimeError, TypeError), match=r"pickle|unpicklable_result"):
        run_ranks(1, unpicklable_result)


def even_ranks_raise() -> int:
    if dist.get_rank() % 2 == 0:
        raise KeyError(dist.get_rank())
    return dist.get_rank()


def test_exceptions_can_be_asked_for_as_results() -> None:
    first, second, third = run_ranks(3, even_ranks_raise, return_exceptions=True)
    assert isinstance(first, KeyError)
    assert first.args == (0,)
    assert second == 1
    assert isinstance(third, KeyError)


def die(rank: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_killed_rank_is_reported() -> None:
    with pytest.raises(RankDied, match="rank 1 was killed by SIGKILL before it had a result") as caught:
        run_ranks(2, die, 1)
    assert caught.value.exitcode == -signal.SIGKILL


def test_the_others_go_on_when_a_death_is_expected() -> None:
    first, second = run_ranks(2, die, 1, return_exceptions=True)
    assert "closed" in first or "reset" in first
    assert isinstance(second, RankDied)


def leave() -> None:
    os._exit(3)


def test_a_rank_that_exits_is_reported() -> None:
    with pytest.raises(RankDied, match="rank 0 exited with code 3"):
        run_ranks(1, leave)


def wait_for_nobody() -> None:
    if dist.get_rank() != 1:
        dist.barrier()


def loop_for_ever() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("body", "hung", "line"), [(wait_for_nobody, "0, 2", "in barrier"), (loop_for_ever, "0, 1, 2", "in loop_for_ever")]
)
def test_a_hang_ends_with_the_names_and_stacks_of_the_ranks_that_hang(body: Any, hung: str, line: str) -> None:
    with pytest.raises(TimeoutError, match=f"not finished after 2 s: rank {hung}\n") as caught:
        run_ranks(3, body, timeout=2)
    assert len(re.findall(line, str(caught.value))) >= hung.count(",") + 1


def test_a_collective_that_one_rank_leaves_out_raises_after_the_groups_timeout() -> None:
    first, second = run_ranks(2, wait_for_nobody, pg_timeout=0.5, return_exceptions=True)
    assert isinstance(first, RuntimeError)
    assert second is None


def warn(category: type[Warning]) -> str:
    warnings.warn("old", category, stacklevel=1)
    return "went on"


def test_a_warning_is_an_error_in_a_rank_as_it_is_here() -> None:
    with pytest.raises(FutureWarning, match="old"):
        run_ranks(1, warn, FutureWarning)


@pytest.mark.filterwarnings("ignore:old:FutureWarning")
def test_a_warning_that_a_test_ignores_is_ignored_in_its_ranks() -> None:
    assert run_ranks(1, warn, FutureWarning) == ["went on"]


def greet() -> None:
    print(f"hello from {dist.get_rank()}")
    print("and an error stream", file=sys.stderr)


def test_what_ranks_print_is_printed_here(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, greet)
    block = "--- printed by rank {0} ---\nhello from {0}\nand an error stream\n"
    assert capsys.readouterr().out == block.format(0) + block.format(1)


def own_process_id() -> int:
    return os.getpid()


def test_no_process_is_left_behind() -> None:
    for process_id in run_ranks(2, own_process_id):
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


def worlds_of_the_trainers() -> tuple[list[int], list[int]]:
    from accelerate import Accelerator
    from lightning.pytorch import Trainer

    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_progress_bar=False)
    trainer.strategy.setup_environment()
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.ones(1))
    assert isinstance(total, Tensor)
    return [trainer.global_rank, trainer.world_size], [accelerator.process_index, int(total)]


def test_both_trainers_take_the_world_as_it_is() -> None:
    assert run_ranks(2, worlds_of_the_trainers) == [([rank, 2], [rank, 2]) for rank in range(2)]
