"""A rank that is told to end takes the others with it, wherever they are."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_distkit import PipeStrategy
from tests.ranks import run_ranks
from tests.strategies.pipe_modules import Net, loader, one_device, trainer, weights

PLACES = ("before the pipe", "behind the pipe", "in validation", "between steps")


class Told(Net):
    """Is told to end on one rank, in the third step."""

    def __init__(self, rank: int, place: str) -> None:
        super().__init__()
        self.rank, self.place = rank, place

    def here(self, place: str) -> None:
        if place == self.place and self.global_rank == self.rank and self.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.here("before the pipe")
        loss = super().training_step(batch, batch_idx)
        self.here("behind the pipe")
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.here("in validation")
        super().validation_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.here("between steps")


def told_to_end(rank: int, folder: Path) -> dict[str, tuple[int, float]]:
    """At which step each fit ended, and after how many seconds."""
    found = {}
    for place in PLACES:
        saves = OnExceptionCheckpoint(folder, f"{place} {rank}")
        fit = trainer("pipe", folder, max_epochs=3, callbacks=[saves], enable_checkpointing=True, val_check_interval=2)
        begin = perf_counter()
        with pytest.raises(SIGTERMException):
            fit.fit(Told(rank, place))
        found[place] = (fit.global_step, perf_counter() - begin)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_rank_ends_all_before_the_same_batch_with_a_whole_checkpoint(rank: int, tmp_path: Path) -> None:
    first, second = run_ranks(2, told_to_end, rank, tmp_path)
    for place in PLACES:
        at = 2 if place in ("in validation", "between steps") else 3
        assert first[place][0] == second[place][0]
        assert at <= first[place][0] <= at + rank  # of what comes to another, the first stage may hear a batch later
        assert first[place][1] < 20
        net = Net()
        one_device(tmp_path, max_steps=first[place][0], max_epochs=3).fit(net)
        saved = torch.load(tmp_path / f"{place} {rank}.ckpt", weights_only=True)
        torch.testing.assert_close(saved["state_dict"], weights(net), rtol=1e-6, atol=1e-6)


class Predicts(Net):
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().predict_step(batch, batch_idx)


def told_elsewhere(folder: Path) -> int:
    seen = 0

    class Counted(Predicts):
        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            nonlocal seen
            seen += 1
            return super().predict_step(batch, batch_idx)

    with pytest.raises(SIGTERMException):
        trainer("pipe", folder).predict(Counted(), loader(40, batch_size=4))
    return seen


def test_sigterm_ends_a_prediction_on_all_stages(tmp_path: Path) -> None:
    assert run_ranks(2, told_elsewhere, tmp_path) == [2, 2]


def told_in_one_pipe(folder: Path) -> int:
    net = Told(3, "behind the pipe")
    fit = trainer(PipeStrategy(2, data_parallel_size=2), folder, max_epochs=9)
    with pytest.raises(SIGTERMException):
        fit.fit(net)
    return fit.global_step


def test_sigterm_in_one_of_two_pipes_ends_both(tmp_path: Path) -> None:
    steps = run_ranks(4, told_in_one_pipe, tmp_path)
    assert steps == [steps[0]] * 4
    assert steps[0] in (3, 4)
