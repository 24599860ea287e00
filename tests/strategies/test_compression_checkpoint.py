"""Checkpoints of compressed training: resumed to the last bit, and opened elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_distkit import PowerSGDDDPStrategy
from tests.ranks import run_ranks
from tests.strategies.modules import EARLY, Net, first_half, parameters, second_half, trainer


def uninterrupted(folder: Path, arguments: dict[str, Any]) -> Tensor:
    net = Net()
    trainer(PowerSGDDDPStrategy(**EARLY, **arguments), folder, max_epochs=2).fit(net)
    return parameters(net)


def second_half_alone(folder: Path) -> None:
    second_half(folder, "auto", limit_val_batches=0)


@pytest.mark.parametrize("arguments", [{"matrix_approximation_rank": 2}, {"warm_start": False}], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(arguments: dict[str, Any], tmp_path: Path) -> None:
    whole = run_ranks(2, uninterrupted, tmp_path, arguments)
    strategy = PowerSGDDDPStrategy(**EARLY, **arguments)
    run_ranks(2, first_half, tmp_path, strategy)
    for expected, (again, _) in zip(whole, run_ranks(2, second_half, tmp_path, strategy), strict=True):
        assert torch.equal(again, expected)


def test_each_rank_gets_its_own_error_back(tmp_path: Path) -> None:
    saved = run_ranks(2, first_half, tmp_path, PowerSGDDDPStrategy(**EARLY))
    loaded = run_ranks(2, second_half, tmp_path, PowerSGDDDPStrategy(**EARLY))
    for before, (_, after) in zip(saved, loaded, strict=True):
        assert before.keys() == after.keys() - {"iter"}
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.equal(saved[0]["net.0.weight"], saved[1]["net.0.weight"])


def test_another_number_of_ranks_keeps_the_sum_of_the_errors(tmp_path: Path) -> None:
    saved = run_ranks(2, first_half, tmp_path, PowerSGDDDPStrategy(**EARLY))
    loaded = run_ranks(3, second_half, tmp_path, PowerSGDDDPStrategy(**EARLY))
    for name in saved[0]:
        before = sum(errors[name] for errors in saved)
        after = sum(errors[name] for _, errors in loaded)
        torch.testing.assert_close(after, before)


def test_the_checkpoint_opens_under_ddp_and_on_one_device(tmp_path: Path) -> None:
    run_ranks(2, first_half, tmp_path, PowerSGDDDPStrategy(**EARLY))
    a, b = run_ranks(2, second_half, tmp_path, "ddp")
    assert torch.equal(a[0], b[0])
    run_ranks(1, second_half_alone, tmp_path)
    Net.load_from_checkpoint(tmp_path / "half.ckpt", weights_only=True)
    weights = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert "PowerSGDDDPStrategy" not in weights


def test_a_checkpoint_of_plain_ddp_opens_and_counts_as_warm_up(tmp_path: Path) -> None:
    run_ranks(2, first_half, tmp_path, "ddp")
    for _, at_start in run_ranks(2, second_half, tmp_path, PowerSGDDDPStrategy(**EARLY)):
        assert at_start == {"iter": torch.tensor(6)}


def other_module(folder: Path) -> bool:
    fit = trainer(PowerSGDDDPStrategy(**EARLY), folder)
    fit.fit(Net())
    fit.validate(Net(width=16), verbose=False)
    fit.save_checkpoint(folder / "other.ckpt")
    return "PowerSGDDDPStrategy" in torch.load(folder / "other.ckpt", weights_only=True)


def test_another_module_is_saved_without_the_fitted_ones_state(tmp_path: Path) -> None:
    assert run_ranks(2, other_module, tmp_path) == [False, False]


def with_other_arguments(folder: Path) -> None:
    second_half(folder, PowerSGDDDPStrategy(min_compression_rate=1))


def test_other_arguments_than_those_saved_are_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, first_half, tmp_path, PowerSGDDDPStrategy(**EARLY))
    run_ranks(2, with_other_arguments, tmp_path)
    assert "other arguments than those it was saved with: start_powerSGD_iter=1000, was 2\n" in capfd.readouterr().out
