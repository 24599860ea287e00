"""What else people do with a Trainer: as on one device, or an error on every rank that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint, Timer
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_distkit import PipeStrategy
from tests.ranks import run_ranks
from tests.strategies.pipe_modules import CLASSES, Net, loader, metrics, one_device, rows, trainer, weights


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class SeveralLoaders(Net):
    def training_step(self, batch: dict[str, list[Tensor]], batch_idx: int) -> Tensor:  # type: ignore[override]
        words, classes = (torch.cat(its) for its in zip(batch["a"], batch["b"], strict=True))
        return super().training_step([words, classes], batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def train_dataloader(self) -> Any:
        return CombinedLoader({"a": loader(10, 4), "b": loader(22, 6)}, "max_size_cycle")

    def val_dataloader(self) -> Any:
        return [loader(10, 4), loader(7, 3)]


class Reloaded(Net):
    """Longer in each epoch."""

    def train_dataloader(self) -> Any:
        return loader(8 * (self.current_epoch + 1))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(rows(13))


class Streamed(Net):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=5)


class ByName(Net):
    """A batch with texts, numbers and an object of one's own."""

    def train_dataloader(self) -> Any:
        def collate(items: list[Any]) -> dict[str, Any]:
            words, classes = (torch.stack(its) for its in zip(*items, strict=True))
            return {"words": words, "classes": classes, "names": ["a", "b"], "n": 3, "own": Path("x")}

        return DataLoader(rows(self.n_rows), batch_size=8, collate_fn=collate)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:  # type: ignore[override]
        assert (batch["names"], batch["n"], batch["own"]) == (["a", "b"], 3, Path("x"))
        return super().training_step([batch["words"], batch["classes"]], batch_idx)


class Hooked(Net):
    """Overrides what people override, has a buffer, and computes at the epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5))
        self.f1 = torchmetrics.MetricCollection([torchmetrics.F1Score("multiclass", num_classes=CLASSES)])
        self.kept: list[Tensor] = []

    def forward(self, words: Tensor) -> Tensor:
        return self.scale * super().forward(words)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:  # type: ignore[override]
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 + batch_idx)
        super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        output = self(batch[0])
        self.f1.update(output, batch[1])
        self.kept.append(output)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.f1.compute())
        self.f1.reset()
        self.log("mean", self.all_gather(torch.cat(self.kept)).mean())
        self.kept.clear()


class WithLosses(Net):
    """A loss module with a parameter, and a loss that uses weights of the pipe's neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]) * self.temperature, batch[1]) + 1e-2 * self.head.weight.square().sum()
        self.log("loss", loss, prog_bar=True)
        return loss


class Notes(Callback):
    """Says with what it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.calls.append(("zero", trainer.global_step))

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.calls.append(("backward", trainer.global_step))


KINDS: dict[str, tuple[type[Net], Callable[[], dict[str, Any]]]] = {
    "plateau": (Plateau, lambda: {"max_epochs": 4}),
    "several loaders": (SeveralLoaders, lambda: {"max_epochs": 2}),
    "reloaded": (Reloaded, lambda: {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}),
    "streamed": (Streamed, lambda: {"max_epochs": 2}),
    "by name": (ByName, dict),
    "hooked": (Hooked, lambda: {"max_epochs": 2}),
    "losses": (WithLosses, dict),
    "no validation": (Net, lambda: {"limit_val_batches": 0}),
    "no training": (Net, lambda: {"limit_train_batches": 0}),
    "half of all": (Net, lambda: {"limit_train_batches": 0.5, "val_check_interval": 1, "num_sanity_val_steps": -1}),
    "seldom": (Net, lambda: {"check_val_every_n_epoch": 2, "max_epochs": 3}),
    "profiled": (Net, lambda: {"profiler": "simple"}),
    "anomalies": (Net, lambda: {"detect_anomaly": True}),
    "timed": (Net, lambda: {"callbacks": [Timer("00:00:10:00")], "max_time": "00:01:00:00"}),
    "noted": (Net, lambda: {"callbacks": [Notes()], "accumulate_grad_batches": 2}),
    "steps": (Net, lambda: {"max_steps": 5, "max_epochs": -1, "min_steps": 4}),
    "no inference mode": (Net, lambda: {"inference_mode": False}),
    "own sampler": (Net, lambda: {"use_distributed_sampler": False}),
    "overfit": (Net, lambda: {"overfit_batches": 1, "max_epochs": 2}),
}


def trained(kind: str, make: Any, folder: Path) -> tuple[dict[str, Tensor], dict[str, float], Any]:
    cls, arguments = KINDS[kind]
    its = arguments()
    net = cls()
    fit: pl.Trainer = make(folder, **its)
    fit.fit(net)
    notes = [each.calls for each in its.get("callbacks", ()) if isinstance(each, Notes)]
    lr = [group["lr"] for each in fit.optimizers for group in each.param_groups]
    return weights(net), metrics(fit), (fit.global_step, fit.current_epoch, lr, notes)


ARMS: dict[str, dict[str, Any]] = {"gpipe": {}, "1f1b": {"schedule": "1f1b"}, "last": {"outputs": "last"}}


def over_stages(arm: str, folder: Path) -> dict[str, Any]:
    def make(folder: Path, **arguments: Any) -> pl.Trainer:
        return trainer(PipeStrategy(3, **ARMS[arm]), folder, **arguments)

    return {kind: trained(kind, make, folder) for kind in KINDS if arm != "1f1b" or kind != "several loaders"}


@pytest.fixture(scope="module", params=ARMS)
def on_two_stages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, over_stages, request.param, tmp_path_factory.mktemp("pipe"), timeout=170)


@pytest.mark.filterwarnings("ignore")
def test_whatever_the_trainer_is_told_equals_one_device(on_two_stages: list[dict[str, Any]], tmp_path: Path) -> None:
    for kind in on_two_stages[0]:
        wanted = trained(kind, one_device, tmp_path)
        for each in on_two_stages:
            torch.testing.assert_close(
                each[kind][0], wanted[0], rtol=1e-5, atol=1e-6, msg=lambda m, k=kind: f"{k}: {m}"
            )
            assert each[kind][1] == pytest.approx(wanted[1], rel=1e-4), kind
            assert each[kind][2] == wanted[2], kind


class NoLoss(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        return None


class Nothing(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    train_dataloader = Net.data
    n_rows = 8

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0].float()).mean()


class Words(Net):
    """What the pipe refuses, on every rank."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers("a word")


class Unpickled(Net):
    def train_dataloader(self) -> Any:
        return DataLoader(
            rows(self.n_rows), batch_size=8, collate_fn=lambda items: [*default_collate(items), lambda: 0]
        )


def told(folder: Path) -> dict[str, str]:
    said = {}

    def said_by(name: str, action: Callable[[], Any]) -> None:
        with pytest.raises(Exception) as error:  # noqa: PT011  the test asks for its text
            action()
        said[name] = f"{type(error.value).__name__}: {error.value}"

    said_by("no loss", lambda: trainer("pipe", folder).fit(NoLoss()))
    said_by("no Sequential", lambda: trainer("pipe", folder).fit(Nothing()))
    said_by("stages", lambda: trainer(PipeStrategy(balance=[1, 2, 3]), folder).fit(Net()))
    said_by("layers", lambda: trainer(PipeStrategy(balance=[1, 2]), folder).fit(Net()))
    said_by("rows", lambda: trainer(PipeStrategy(schedule="1f1b"), folder).fit(SeveralLoaders()))
    said_by("refused", lambda: trainer(PipeStrategy(outputs="last"), folder).fit(Words()))
    said_by("unpickled", lambda: trainer("pipe", folder).fit(Unpickled()))
    said_by("compiled", lambda: trainer("pipe", folder).fit(torch.compile(Net())))
    said_by("batch size", lambda: Tuner(trainer("pipe", folder)).scale_batch_size(Net()))
    return said


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_work_says_what_to_do(tmp_path: Path) -> None:
    for said in run_ranks(2, told, tmp_path):
        assert "returning None in distributed training is not supported" in said["no loss"]
        assert "must be an nn.Sequential, and one alone if it is not named, found none" in said["no Sequential"]
        assert "balance must be 2 numbers of layers" in said["stages"]
        assert "balance must share out all 6 layers" in said["layers"]
        assert "must have the same number of rows" in said["rows"]
        assert "tensor" in said["refused"]
        assert "PeerError" not in said["refused"]
        assert "what can be pickled, but" in said["unpickled"]
        assert "compile layers of the nn.Sequential instead" in said["compiled"]
        assert "istributed" in said["batch size"]


class Hyper(Net):
    def __init__(self, width: int = 16, rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))


def with_hyperparameters(folder: Path) -> dict[str, Tensor]:
    net = Hyper(12)
    keep = ModelCheckpoint(folder, filename="it", monitor="val_loss")
    said: list[str] = []
    tells = LambdaCallback(on_fit_end=lambda trainer, module: said.append("end"))
    fit = trainer(PipeStrategy(2), folder, callbacks=[keep, tells], enable_checkpointing=True, enable_progress_bar=True)
    fit.fit(net)
    assert said == ["end"]
    assert keep.best_model_path
    fit.test(net, ckpt_path="best", verbose=False)
    return weights(net)


def test_a_checkpoint_opens_with_its_hyperparameters_without_us(tmp_path: Path) -> None:
    got = run_ranks(2, with_hyperparameters, tmp_path)[0]
    loaded = Hyper.load_from_checkpoint(tmp_path / "it.ckpt", weights_only=True)
    assert loaded.hparams["width"] == 12
    torch.testing.assert_close(weights(loaded), got, rtol=0, atol=0)
