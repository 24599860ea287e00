"""The statistics that are logged, when they are, and the picture at the end."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_distkit import CommHookDDPStrategy, PowerSGDDDPStrategy
from lightning_distkit.callbacks import CompressionStatsLogger
from tests.ranks import run_ranks
from tests.strategies.modules import EARLY, Net, trainer

LOGGED = {"rate", "nbytes", "total_nbytes", "relative_error", "error_norm", "computing_ms", "waiting_ms"}


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "version_0" / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["compression/rate"]]


def fitted(strategy: Any, callback: CompressionStatsLogger, folder: Path, net: Net, **arguments: Any) -> Any:
    loggers = [CSVLogger(folder, name="", version=0), TensorBoardLogger(folder, name="", version=0)]
    fit = trainer(strategy, folder, callbacks=[callback], logger=loggers, **arguments)
    fit.fit(net)
    return fit


def logs(strategy: Any, callback: CompressionStatsLogger, folder: Path, arguments: Any) -> tuple[Any, Any, int]:
    fit = fitted(strategy, callback, folder, Net(n_batches=8), **arguments)
    return callback.history, callback.layers, fit.strategy.ledger.total.nbytes


@pytest.mark.parametrize("per_layer", [False, True])
def test_every_logger_gets_the_figures_at_their_steps(per_layer: bool, tmp_path: Path) -> None:
    callback = CompressionStatsLogger(every_n_steps=3, per_layer=per_layer, prog_bar=True)
    strategy = PowerSGDDDPStrategy(**EARLY)
    (history, layers, nbytes), (other, _, _) = run_ranks(2, logs, strategy, callback, tmp_path, {"max_epochs": 2})
    assert [each["step"] for each in history] == [3, 6, 9, 12, 15]
    compressed = ["net.0.weight", "net.2.weight", "net.4.weight"]
    wanted = LOGGED | ({f"relative_error/{name}" for name in compressed} if per_layer else set())
    for each, also in zip(history, other, strict=True):
        assert each.keys() == wanted | {"step"}
        for name in ("rate", "relative_error", "error_norm"):
            assert each[name] == also[name]
    assert [name for name, layer in layers.items() if layer.is_compressed] == compressed[::-1]
    assert history[0]["rate"] < history[1]["rate"] == pytest.approx(history[2]["rate"], rel=0.05)
    assert 0 < history[-1]["relative_error"] < 1
    assert history[-1]["total_nbytes"] <= nbytes
    for row, each in zip(rows(tmp_path), history, strict=True):
        assert float(row["step"]) == each["step"]
        for name in wanted:
            assert float(row[f"compression/{name}"]) == pytest.approx(each[name])


@pytest.mark.parametrize("hook", ["allreduce", "noop", "bf16"])
def test_other_hooks_are_logged_too(hook: str, tmp_path: Path) -> None:
    callback = CompressionStatsLogger(every_n_steps=4)
    for history, _, _ in run_ranks(2, logs, CommHookDDPStrategy(hook), callback, tmp_path, {}):
        assert history[-1]["rate"] == pytest.approx({"allreduce": 1, "noop": 1e9, "bf16": 2}[hook], rel=0.1) or (
            hook == "noop" and history[-1]["rate"] > 10  # the small message of the logging itself
        )
        expected = {"allreduce": 0.0, "noop": 1.0}.get(hook)
        assert history[-1]["relative_error"] == expected or expected is None
        assert history[-1]["error_norm"] == 0


def test_accumulation_counts_optimizer_steps(tmp_path: Path) -> None:
    callback = CompressionStatsLogger(every_n_steps=2)
    arguments = {"accumulate_grad_batches": 2}
    for history, _, _ in run_ranks(2, logs, PowerSGDDDPStrategy(**EARLY), callback, tmp_path, arguments):
        assert [each["step"] for each in history] == [2, 4]
        assert all("relative_error" in each for each in history)


class TwoOptimizers(Net):
    """Two optimizers, so two steps a batch."""

    def __init__(self) -> None:
        super().__init__(n_batches=8)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]


def two_optimizers(folder: Path) -> list[dict[str, float]]:
    callback = CompressionStatsLogger(every_n_steps=4, figure=False)
    fitted(PowerSGDDDPStrategy(**EARLY), callback, folder, TwoOptimizers())
    return callback.history


def test_several_steps_a_batch_are_not_missed(tmp_path: Path) -> None:
    for history in run_ranks(2, two_optimizers, tmp_path):
        assert [each["step"] for each in history] == [4, 8, 12, 16]
        assert all("relative_error" in each for each in history)


def idle(folder: Path) -> tuple[bool, float]:
    """Off the logging steps nothing is measured."""
    callback = CompressionStatsLogger(every_n_steps=100, figure=False)
    fit = fitted(PowerSGDDDPStrategy(**EARLY), callback, folder, Net())
    return fit.strategy.comm_state.last_measurement is None, fit.strategy.ledger.total.wanted


def test_off_the_logging_steps_nothing_is_done(tmp_path: Path) -> None:
    assert run_ranks(2, idle, tmp_path) == [(True, 0.0)] * 2


def test_a_picture_at_the_end(tmp_path: Path) -> None:
    callback = CompressionStatsLogger(every_n_steps=2)
    arguments = {"enable_checkpointing": True}
    run_ranks(2, logs, PowerSGDDDPStrategy(**EARLY), callback, tmp_path, arguments)
    [picture] = tmp_path.rglob("compression.png")
    assert picture.parent.name == "checkpoints"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "version_0"))
    events.Reload()
    assert "compression" in events.Tags()["images"]
    assert "compression/rate" in events.Tags()["scalars"]


def resumed(folder: Path) -> list[float]:
    def fit(callback: CompressionStatsLogger, **arguments: Any) -> None:
        fit = trainer(PowerSGDDDPStrategy(**EARLY), folder, callbacks=[callback], **arguments)
        fit.fit(Net(), ckpt_path=(arguments and str(folder / "half.ckpt")) or None)
        fit.save_checkpoint(folder / "half.ckpt")

    fit(CompressionStatsLogger(2, figure=False))
    again = CompressionStatsLogger(2, figure=False)
    fit(again, max_epochs=2)
    return [each["step"] for each in again.history]


def test_the_history_goes_on_after_a_resume(tmp_path: Path) -> None:
    assert run_ranks(2, resumed, tmp_path) == [[2, 4, 6, 8, 10, 12]] * 2


@pytest.mark.parametrize("every_n_steps", [0, -1, 1.5, True])
def test_a_wrong_number_of_steps_is_refused(every_n_steps: Any) -> None:
    with pytest.raises(ValueError, match="every_n_steps must be a whole number of at least 1, got"):
        CompressionStatsLogger(every_n_steps)


def test_a_figure_without_matplotlib_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-distkit\[plot\]', or give figure=False"):
        CompressionStatsLogger()
    CompressionStatsLogger(figure=False)


def refused(strategy: Any, folder: Path) -> str:
    fit = trainer(strategy, folder, callbacks=[CompressionStatsLogger(figure=False)])
    with pytest.raises(MisconfigurationException) as raised:
        fit.fit(Net())
    return str(raised.value)


def own_hook(state: Any, bucket: Any) -> Any:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize(
    ("strategy", "got"),
    [("ddp", "got DDPStrategy"), (CommHookDDPStrategy(own_hook, "mine"), "CommHookDDPStrategy with the state str")],
)
def test_a_strategy_that_counts_nothing_is_refused(strategy: Any, got: str, tmp_path: Path) -> None:
    for said in run_ranks(2, refused, strategy, tmp_path):
        assert "CompressionStatsLogger sees what the hooks of lightning_distkit do" in said
        assert said.endswith(got)
