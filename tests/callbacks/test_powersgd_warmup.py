"""When compression starts: by step, by share, not before the learning rate's warm-up, and the same after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, IterableDataset

from lightning_distkit import PowerSGDDDPStrategy
from lightning_distkit.callbacks import PowerSGDWarmup
from tests.ranks import run_ranks
from tests.strategies.modules import Net, trainer


class Watching(Net):
    """Notes at each step whether the gradients are of low rank."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.low_rank: list[bool] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.low_rank.append(self.matrix_ranks == [1, 1, 1])


def starts(callback: PowerSGDWarmup, folder: Path, **arguments: Any) -> tuple[list[bool], str]:
    net = Watching(n_batches=10)
    logger = CSVLogger(folder, name="", version=0)
    strategy = PowerSGDDDPStrategy(min_compression_rate=1)
    fit = trainer(strategy, folder, callbacks=[callback], logger=logger, log_every_n_steps=1, **arguments)
    fit.fit(net)
    return net.low_rank, Path(logger.log_dir, "metrics.csv").read_text() if fit.is_global_zero else ""


@pytest.mark.parametrize(
    ("callback", "first"),
    [
        (PowerSGDWarmup(4), 4),
        (PowerSGDWarmup(0.3), 6),  # of 2 x 10 steps
        (PowerSGDWarmup(0.01), 2),
        (PowerSGDWarmup(0.1, lr_warmup_steps=7), 7),
    ],
    ids=["step", "share", "never before 2", "after the learning rate's warm-up"],
)
def test_compression_starts_when_it_is_told(callback: PowerSGDWarmup, first: int, tmp_path: Path) -> None:
    for low_rank, _ in run_ranks(2, starts_after_two_epochs, callback, tmp_path):
        assert low_rank == [False] * first + [True] * (20 - first)


def starts_after_two_epochs(callback: PowerSGDWarmup, folder: Path) -> tuple[list[bool], str]:
    return starts(callback, folder, max_epochs=2)


def test_the_switch_is_logged_once(tmp_path: Path) -> None:
    (_, metrics), _ = run_ranks(2, starts_after_two_epochs, PowerSGDWarmup(4), tmp_path)
    header, *rows = [line.split(",") for line in metrics.splitlines()]
    column = header.index("powersgd/is_compressing")
    assert [row[column] for row in rows if row[column]] == ["0.0", "1.0"]


def saved(folder: Path) -> int | None:
    callback = PowerSGDWarmup(0.5)
    fit = trainer(PowerSGDDDPStrategy(), folder, callbacks=[callback])
    fit.fit(Net(n_batches=10))
    fit.save_checkpoint(folder / "half.ckpt")
    return callback.start_powerSGD_iter


def resumed_longer(folder: Path) -> int:
    fit = trainer(PowerSGDDDPStrategy(), folder, callbacks=[PowerSGDWarmup(0.5)], max_epochs=4)
    fit.fit(Net(n_batches=10), ckpt_path=folder / "half.ckpt")
    return fit.strategy.powersgd_state.start_powerSGD_iter


def test_a_resumed_run_keeps_the_step_even_if_it_is_longer(tmp_path: Path) -> None:
    assert run_ranks(2, saved, tmp_path) == [5, 5]
    assert run_ranks(2, resumed_longer, tmp_path) == [5, 5]


@pytest.mark.parametrize("start", [0, 1, -3, 1.0, 0.0, 1.5, True, "0.1"])
def test_a_start_that_is_neither_step_nor_share_is_refused(start: Any) -> None:
    with pytest.raises(ValueError, match="start must be a step of at least 2 or a share"):
        PowerSGDWarmup(start)


class Endless(Net):
    """A training whose length nobody knows."""

    def train_dataloader(self) -> Any:
        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter([(torch.ones(16), torch.ones(4))] * 8)

        return DataLoader(Stream(), batch_size=4)


def without_length(folder: Path) -> str:
    try:
        trainer(PowerSGDDDPStrategy(), folder, callbacks=[PowerSGDWarmup(0.1)]).fit(Endless())
    except MisconfigurationException as error:
        return str(error)
    return "no error"


def test_a_share_of_a_loader_without_length_is_refused(tmp_path: Path) -> None:
    for said in run_ranks(2, without_length, tmp_path):
        assert "this training has no end" in said


def second_fit(folder: Path) -> list[int | None]:
    callback = PowerSGDWarmup(0.5)
    fit = trainer(PowerSGDDDPStrategy(), folder, callbacks=[callback])
    chosen = []
    for max_epochs in (1, 3):
        fit.fit_loop.max_epochs = max_epochs
        fit.fit(Net(n_batches=10))
        chosen.append(callback.start_powerSGD_iter)
    return chosen


def test_a_second_fit_chooses_anew(tmp_path: Path) -> None:
    assert run_ranks(2, second_fit, tmp_path) == [[5, 15], [5, 15]]


@pytest.mark.parametrize("steps", [-1, 1.5, True, None])
def test_wrong_warmup_steps_are_refused(steps: Any) -> None:
    with pytest.raises(ValueError, match="lr_warmup_steps must be a whole number of at least 0"):
        PowerSGDWarmup(0.1, lr_warmup_steps=steps)


def misused(strategy: Any, folder: Path, arguments: dict[str, Any]) -> str:
    try:
        trainer(strategy, folder, callbacks=[PowerSGDWarmup(0.1)], **arguments).fit(Net())
    except MisconfigurationException as error:
        return str(error)
    return "no error"


def test_a_strategy_that_does_not_compress_is_refused(tmp_path: Path) -> None:
    for said in run_ranks(2, misused, "ddp", tmp_path, {}):
        assert said.startswith('PowerSGDWarmup needs Trainer(strategy="powersgd"), got DDPStrategy')


def test_a_share_of_a_training_without_end_is_refused(tmp_path: Path) -> None:
    for said in run_ranks(2, misused, PowerSGDDDPStrategy(), tmp_path, {"max_epochs": -1}):
        assert "this training has no end: set max_epochs or max_steps" in said
