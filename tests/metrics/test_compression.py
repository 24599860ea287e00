"""Metrics over the ledger: right over steps and ranks, alone, in a collection, and with ``self.log``."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchmetrics import MetricCollection

from lightning_distkit import PowerSGDDDPStrategy
from lightning_distkit.core.ledger import Counts
from lightning_distkit.metrics import ApproximationError, CompressionRate, WireBytes
from tests.ranks import run_ranks
from tests.strategies.modules import EARLY, Net, trainer

FIRST = Counts(nbytes=100, nbytes_whole=1000, wanted=9.0, left_out=1.0)
SECOND = Counts(nbytes=300, nbytes_whole=1000)  # not measured
ALL = {"WireBytes": 400.0, "CompressionRate": 5.0, "ApproximationError": 1 / 3}


def everything() -> MetricCollection:
    return MetricCollection([WireBytes(), CompressionRate(), ApproximationError()])


def test_over_steps() -> None:
    metrics = everything()
    for counts in (FIRST, SECOND):
        metrics.update(counts)
    assert {name: float(value) for name, value in metrics.compute().items()} == pytest.approx(ALL)
    again = pickle.loads(pickle.dumps(metrics))
    assert {name: float(value) for name, value in again.compute().items()} == pytest.approx(ALL)
    metrics.reset()
    metrics.update(FIRST)
    assert float(metrics.compute()["WireBytes"]) == 100


def test_forward_gives_the_step_and_keeps_the_sum() -> None:
    metric = CompressionRate()
    assert float(metric(FIRST)) == 10
    assert float(metric(SECOND)) == pytest.approx(1000 / 300)
    assert float(metric.compute()) == 5


def test_bytes_are_exact_beyond_what_single_precision_holds() -> None:
    metric = WireBytes()
    for _ in range(3):
        metric.update(Counts(nbytes=2**40 + 1))
    assert int(metric.compute()) == 3 * (2**40 + 1)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_where_there_is_nothing() -> None:
    rate = CompressionRate()
    rate.update(Counts())
    assert float(rate.compute()) == 1
    rate.update(Counts(nbytes_whole=7))
    assert float(rate.compute()) == float("inf")
    assert ApproximationError().compute().isnan()


@pytest.mark.parametrize("cls", [WireBytes, CompressionRate, ApproximationError])
def test_what_is_no_count_is_refused(cls: Any) -> None:
    with pytest.raises(TypeError, match=r"is updated with ledger.last_step, got float"):
        cls().update(1.0)


def over_ranks() -> tuple[dict[str, float], float]:
    metrics = everything()
    metrics.update((FIRST, SECOND)[dist.get_rank()])
    summed = {name: float(value) for name, value in metrics.compute().items()}
    metrics.reset()
    metrics.update(FIRST)
    return summed, float(metrics.compute()["WireBytes"])


def test_over_ranks() -> None:
    for summed, after_reset in run_ranks(2, over_ranks):
        assert summed == pytest.approx(ALL)
        assert after_reset == 200


class Logging(Net):
    def __init__(self) -> None:
        super().__init__(n_batches=8)
        self.metrics = everything()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.strategy.comm_state.measure()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.metrics.update(self.trainer.strategy.ledger.last_step)
        self.log_dict(self.metrics, on_step=False, on_epoch=True)


def logged(folder: Path) -> tuple[dict[str, float], Counts]:
    fit = trainer(PowerSGDDDPStrategy(**EARLY), folder)
    fit.fit(Logging())
    return {name: float(value) for name, value in fit.callback_metrics.items()}, fit.strategy.ledger.total


def test_with_self_log(tmp_path: Path) -> None:
    (first, a), (second, b) = run_ranks(2, logged, tmp_path)
    assert {name: first[name] for name in ALL} == {name: second[name] for name in ALL}
    assert first["WireBytes"] == a.nbytes + b.nbytes
    assert first["CompressionRate"] == pytest.approx((a.nbytes_whole + b.nbytes_whole) / (a.nbytes + b.nbytes))
    expected = torch.tensor((a.left_out + b.left_out) / (a.wanted + b.wanted)).sqrt()
    assert first["ApproximationError"] == pytest.approx(float(expected))
    assert 0 < first["ApproximationError"] < 1
