"""A rank that dies, fails or lags behind in the Trainer: the others are told, and what was saved is intact."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.ranks import RankDied, run_ranks
from tests.strategies.modules import Net as PlainNet
from tests.strategies.modules import parameters, trainer
from tests.strategies.test_zero import STAGES, strategy_for
from tests.strategies.test_zero_checkpoint import Net as Resumable


def killed(stage: int, when: str, folder: Path) -> str:
    class Dies(Resumable):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if self.global_rank == 1 and self.global_step == 4 and when == "step":
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(batch, batch_idx)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.global_rank == 1 and self.global_step == 5 and when == "save":
                os.kill(os.getpid(), signal.SIGKILL)

    every = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    try:
        trainer(strategy_for(stage), folder, enable_checkpointing=True, callbacks=[every]).fit(Dies())
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("when", ["step", "save"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_rank_is_an_error_that_says_so_and_the_last_checkpoint_loads(
    stage: int, when: str, tmp_path: Path
) -> None:
    said, died = run_ranks(2, killed, stage, when, tmp_path, return_exceptions=True, pg_timeout=20)
    assert isinstance(died, RankDied)
    assert "rank 0 of 2 could not finish a collective: another rank died" in said
    (tmp_path / "step=4.ckpt").rename(tmp_path / "half.ckpt")
    assert all(torch.load(each, weights_only=True) for each in tmp_path.glob("*.ckpt"))
    resumed = run_ranks(2, goes_on, stage, tmp_path)
    assert resumed[0] == resumed[1] == 12


class Uneven(Resumable):
    """Rank 1 has a batch less, and so is in another collective than rank 0, which is Lightning's."""

    def data(self) -> Any:
        self.n_batches = 6 - self.trainer.global_rank
        return PlainNet.data(self)

    train_dataloader = data


def uneven(folder: Path) -> str:
    with pytest.raises(RuntimeError) as error:
        trainer(strategy_for(1), folder).fit(Uneven())
    return str(error.value)


def test_ranks_with_unlike_numbers_of_batches_are_told_what_happened(tmp_path: Path) -> None:
    for rank, said in enumerate(run_ranks(2, uneven, tmp_path, pg_timeout=3)):
        assert f"rank {rank} of 2 could not finish a collective: another rank died, or was later than" in said


def goes_on(stage: int, folder: Path) -> int:
    fit = trainer(strategy_for(stage), folder, max_epochs=2, max_steps=12)
    fit.fit(Resumable(), ckpt_path=folder / "half.ckpt")
    return fit.global_step


class Fails(Resumable):
    def __init__(self) -> None:
        super().__init__()
        self.own = torch.nn.Parameter(torch.ones(4))  # in no block, so the root is gathered before the step

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_step == self.fail_at:
            if self.runs_forward:
                self.net(batch[0])
            raise ZeroDivisionError("on purpose")
        return super().training_step(batch, batch_idx)


def failed_and_fitted_again(stage: int, folder: Path) -> list[str]:
    errors = []
    for runs_forward in (False, True):
        net = Fails()
        net.fail_at, net.runs_forward = 2, runs_forward
        with pytest.raises(ZeroDivisionError) as error:
            trainer(strategy_for(stage), folder).fit(net)
        errors.append(str(error.value))
        net.fail_at = -1
        trainer(strategy_for(stage), folder).fit(net)
        assert parameters(net).isfinite().all()
    return errors


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_is_the_users_own_and_the_module_may_be_fitted_again(stage: int, tmp_path: Path) -> None:
    assert run_ranks(2, failed_and_fitted_again, stage, tmp_path) == [["on purpose"] * 2] * 2
