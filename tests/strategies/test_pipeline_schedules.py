"""With 1f1b a step is one for each micro-batch, with outputs="last" the last stage's: numbers are one device's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_distkit import PipeStrategy
from tests.ranks import run_ranks
from tests.strategies.pipe_modules import CLASSES, Net, metrics, one_device, rows, trainer, weights
from tests.strategies.test_pipeline import Result, trained

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "interleaved_1f1b": {"schedule": "interleaved_1f1b", "n_stages_per_rank": 2},
    "loss on the last stage": {"outputs": "last"},
}
ALIKE = [
    "plain",
    "clipped, accumulated",
    "scheduled",
    "shuffled",
    "manual",
    "frozen",
    "finetuning",
    "averaging",
    "limited",
    "64-true",
    "bf16-mixed",
    "16-mixed",
    "16-mixed, overflow",
]


class Logs(Net):
    """Logs in all ways, returns more than a loss, and has a residual connection around the pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.confusion = torchmetrics.ConfusionMatrix("multiclass", num_classes=CLASSES)
        self.returned: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        words = self.embedding(batch[0]).mean(1)
        output = self.head(self.layers(words) + words)
        loss = F.cross_entropy(output, batch[1])
        self.train_accuracy(output, batch[1])
        self.confusion.update(output, batch[1])
        self.log("accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.log_dict({"loss": loss, "twice": 2 * loss}, on_epoch=True, batch_size=len(batch[0]))
        self.log("largest", output.max(), reduce_fx="max", on_epoch=True)
        self.log("rows", float(len(output)), reduce_fx="sum", on_epoch=True, on_step=False)
        return {"loss": loss, "output": output}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.returned += [outputs["loss"], outputs["output"].detach()]

    def on_train_epoch_end(self) -> None:
        table = self.confusion.compute()
        self.log("diagonal", table.diagonal().sum().float())


class Ignores(Net):
    """The mean is over the rows that count, which are not evenly spread."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), self.targets(batch), ignore_index=-1)
        self.log("loss", loss)
        return loss

    @staticmethod
    def targets(batch: list[Tensor]) -> Tensor:
        return torch.where(batch[0][:, 0] > 6, batch[1], -1)

    def micro_batch_weight(self, batch: list[Tensor]) -> float:
        return float((self.targets(batch) >= 0).sum())


def logged(make: Any, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for cls in (Logs, Ignores):
        net = cls()
        fit: pl.Trainer = make(folder, max_epochs=2)
        fit.fit(net)
        found[cls.__name__] = (weights(net), metrics(fit), getattr(net, "returned", []))
    return found


class NoLoss(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self(batch[0])


class Twice(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self(batch[0]) + self(batch[0])).square().mean()


class Never(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.head.weight.square().mean()


class FailsBefore(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        raise ZeroDivisionError("before the pipe")


REFUSED = {
    NoLoss: "must return its loss, or a mapping with it, got NoneType",
    Twice: "must call the nn.Sequential once, but one called it again",
    Never: "must call the nn.Sequential once, but one returned without",
    FailsBefore: "before the pipe",
}


def all_of(schedule: str, folder: Path) -> dict[str, Any]:
    def make(folder: Path, **arguments: Any) -> pl.Trainer:
        return trainer(PipeStrategy(chunks=3, **SCHEDULES[schedule]), folder, **arguments)

    said = {}
    for cls in REFUSED:
        with pytest.raises((ValueError, RuntimeError, ZeroDivisionError)) as error:
            make(folder).fit(cls())
        said[cls.__name__] = str(error.value)
    return {"kinds": {kind: trained(kind, make, folder) for kind in ALIKE}, "logs": logged(make, folder), "said": said}


@pytest.fixture(scope="module", params=SCHEDULES)
def on_two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, all_of, request.param, tmp_path_factory.mktemp("pipe"), timeout=170)


def test_training_with_a_step_a_micro_batch_or_a_loss_on_the_last_stage_equals_one_devices(
    on_two_ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    for kind in ALIKE:
        wanted: Result = trained(kind, one_device, tmp_path)
        first, second = (each["kinds"][kind] for each in on_two_ranks)
        rounded = {"rtol": 2e-2, "atol": 1e-2} if "16" in kind else {"rtol": 1e-6, "atol": 1e-6}
        for got in (first, second):
            torch.testing.assert_close(got["weights"], wanted["weights"], **rounded)
            assert got["steps"] == wanted["steps"], kind
            assert got["scale"] == wanted["scale"], kind
            assert got["norms"] == pytest.approx(wanted["norms"], rel=5e-2 if "16" in kind else 1e-5), kind
            assert got["metrics"] == pytest.approx(wanted["metrics"], rel=5e-2 if "16" in kind else 1e-5), kind
        assert first["metrics"] == second["metrics"], kind
        torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)


def test_values_are_logged_once_with_the_right_weights_and_metrics_are_whole(
    on_two_ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    wanted = logged(one_device, tmp_path)
    for got in on_two_ranks:
        for name, its in wanted.items():
            torch.testing.assert_close(got["logs"][name][0], its[0], rtol=1e-6, atol=1e-6)
            assert got["logs"][name][1] == pytest.approx(its[1], rel=1e-5)
            torch.testing.assert_close(got["logs"][name][2], its[2], rtol=1e-5, atol=1e-6)
        assert got["logs"]["Logs"][1] == on_two_ranks[0]["logs"]["Logs"][1]


def test_a_step_that_cannot_be_cut_is_refused_on_every_rank(on_two_ranks: list[dict[str, Any]]) -> None:
    for each in on_two_ranks:
        for cls, text in REFUSED.items():
            assert text in each["said"][cls.__name__]


class Quiet(Net):
    """Has nothing to send but its output."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("rows", float(len(self(batch[0]))), reduce_fx="sum")


def sent_by_the_last(folder: Path) -> list[int]:
    sent = []
    for outputs in ("all", "last"):
        strategy = PipeStrategy(chunks=2, outputs=outputs)
        net = Quiet()

        class Counts(pl.Callback):
            def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
                assert isinstance(trainer.strategy, PipeStrategy)
                assert trainer.strategy.ledger is not None
                sent.append(trainer.strategy.ledger.last_step.nbytes)

        fit = trainer(strategy, folder, callbacks=[Counts()])
        fit.fit(net, *(DataLoader(rows(24), batch_size=8) for _ in range(2)))
        assert fit.callback_metrics["rows"] == 24  # in evaluation every rank has the output
    return sent


def test_the_output_is_sent_to_nobody_where_the_loss_is_on_the_last_stage(tmp_path: Path) -> None:
    (_, _), (with_output, without) = run_ranks(2, sent_by_the_last, tmp_path)
    output = 8 * 8 * 4  # rows, columns of the last layer, bytes
    assert with_output - output - 200 < without <= with_output - output
