"""What a user is told about the optimizer: that there must be one, and how it steps where that is not as usual."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_distkit import ZeroStrategy
from tests.ranks import run_ranks
from tests.strategies.modules import Net as MeasuringNet
from tests.strategies.modules import parameters, trainer


class Net(MeasuringNet):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class WithoutOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return None


def without_optimizer(strategy: Any, folder: Path) -> Any:
    """What the fit says, or else how many steps it has made, and whether all is as it was."""
    net = WithoutOptimizer()
    before = parameters(net)
    fit = trainer(strategy, folder)
    try:
        fit.fit(net)
    except MisconfigurationException as error:
        return str(error)
    return fit.global_step, torch.equal(parameters(net), before)


def all_without_optimizer(folder: Path) -> list[Any]:
    return [without_optimizer(strategy, folder) for strategy in ("ddp", *map(ZeroStrategy, (1, 2, 3)))]


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer:UserWarning")
def test_without_an_optimizer_stage_3_runs_as_ddp_does_and_the_others_say_why_not(tmp_path: Path) -> None:
    for ddp, first, second, third in run_ranks(2, all_without_optimizer, tmp_path):
        assert third == ddp
        for said in (first, second):
            assert 'configure_optimizers returned none: return one, or use strategy="ddp"' in said


class WholeMatrices(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def lines_said(stage: int, net: nn.Module, core_is_seen: bool, elementwise: bool | None, folder: Path) -> list[str]:
    """All that somebody who looks at the log sees of it; core's own lines are seen if one has asked for INFO."""
    seen = Lines()
    for name in ("lightning.pytorch", "lightning_distkit"):
        logging.getLogger(name).addHandler(seen)
    if core_is_seen:
        logging.getLogger("lightning_distkit").setLevel(logging.INFO)
    trainer(ZeroStrategy(stage, elementwise=elementwise), folder).fit(net)
    return [line for line in seen.lines if "whole matrices" in line]


def all_said(stage: int, folder: Path) -> dict[str, int]:
    return {
        "adafactor": len(lines_said(stage, WholeMatrices(), False, None, folder)),
        "adafactor, by the user's word": len(lines_said(stage, WholeMatrices(), False, False, folder)),
        "adamw": len(lines_said(stage, Net(), False, None, folder)),
        "adafactor, INFO": len(lines_said(stage, WholeMatrices(), True, None, folder)),
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_that_whole_parameters_are_stepped_is_said_once_and_on_rank_0(stage: int, tmp_path: Path) -> None:
    first, second = run_ranks(2, all_said, stage, tmp_path)
    assert first == {"adafactor": 1, "adafactor, by the user's word": 0, "adamw": 0, "adafactor, INFO": 1}
    assert set(second.values()) == {0}
