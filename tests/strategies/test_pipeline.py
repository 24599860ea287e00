"""Lightning trains over stages as it does on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_distkit import PipeStrategy
from tests.ranks import run_ranks
from tests.strategies.pipe_modules import Net, loader, metrics, one_device, trainer, weights

Result = dict[str, Any]


class Shuffled(Net):
    def train_dataloader(self) -> Any:
        return loader(self.n_rows, shuffle=True)


class Scheduled(Net):
    """Two groups, and a schedule by steps."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5), "interval": "step"}
        ]


class Manual(Net):
    """Two optimizers for parts of the pipe and around it, each with its loss, one clipped; a schedule by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for n, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            loss = F.cross_entropy(self(batch[0]), batch[1], label_smoothing=0.1 * n)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log(f"loss{n}", loss)
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam([*self.embedding.parameters(), *self.layers[0].parameters()], 1e-2)
        second = torch.optim.SGD([*self.layers[2:].parameters(), *self.head.parameters()], 0.1, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.9)]


class Frozen(Net):
    """The first stage has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in (*self.embedding.parameters(), *self.layers[:4].parameters()):
            parameter.requires_grad = False

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Plain(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Backbone(Net):
    """Frozen at first, then in a group of its own."""

    @property
    def backbone(self) -> nn.Module:
        return self.layers

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Overflows(Net):
    """One stage has an inf in its gradient in the second step."""

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop.batch_idx == 1 and self.layers[2].weight.grad is not None:
            self.layers[2].weight.grad.view(-1)[0] = torch.inf


class Averaged(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=lambda average, current, n: average + (current - average) / (n + 1))


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))


KINDS: dict[str, tuple[Callable[[], Net], Callable[[], dict[str, Any]]]] = {
    "plain": (Net, dict),
    "clipped, accumulated": (
        Net,
        lambda: {"gradient_clip_val": 0.2, "accumulate_grad_batches": 2, "max_epochs": 2},
    ),
    "clipped by value": (Net, lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulated by schedule": (
        Net,
        lambda: {"callbacks": [GradientAccumulationScheduler({0: 3, 1: 2})], "max_epochs": 2},
    ),
    "scheduled": (Scheduled, lambda: {"max_epochs": 2}),
    "shuffled": (Shuffled, dict),
    "manual": (Manual, dict),
    "frozen": (Frozen, dict),
    "finetuning": (
        Backbone,
        lambda: {"callbacks": [BackboneFinetuning(1, backbone_initial_ratio_lr=0.1)], "max_epochs": 3},
    ),
    "averaging": (Net, lambda: {"callbacks": [Averaged()], "max_epochs": 2}),
    "swa": (Plain, lambda: {"callbacks": [StochasticWeightAveraging(1e-2, swa_epoch_start=1)], "max_epochs": 3}),
    "early stopping": (
        Net,
        lambda: {"callbacks": [EarlyStopping("val_accuracy", mode="max", patience=0)], "max_epochs": 5},
    ),
    "limited": (Net, lambda: {"limit_train_batches": 2, "limit_val_batches": 1, "max_steps": 3, "max_epochs": -1}),
    "overfit": (Net, lambda: {"overfit_batches": 2, "max_epochs": 2}),
    "fast": (Net, lambda: {"fast_dev_run": 2}),
    "64-true": (Net, lambda: {"precision": "64-true"}),
    "bf16-true": (Net, lambda: {"precision": "bf16-true"}),
    "bf16-mixed": (Net, lambda: {"precision": "bf16-mixed"}),
    "16-mixed": (Net, lambda: {"plugins": [scaled()], "gradient_clip_val": 0.2}),
    "16-mixed, overflow": (Overflows, lambda: {"plugins": [scaled()]}),
}


def trained(kind: str, make_trainer: Callable[..., pl.Trainer], folder: Path) -> Result:
    cls, arguments = KINDS[kind]
    torch.manual_seed(3)
    net = cls()
    fit = make_trainer(folder=folder, **arguments())
    fit.fit(net)
    scaler = getattr(fit.precision_plugin, "scaler", None)
    return {
        "weights": weights(net),
        "metrics": metrics(fit),
        "norms": net.norms,
        "steps": (fit.global_step, fit.current_epoch),
        "scale": scaler.get_scale() if scaler is not None else None,
        "types": {type(parameter) for parameter in net.parameters()},
    }


def over_stages(folder: Path, **arguments: Any) -> pl.Trainer:
    return trainer(PipeStrategy(chunks=3), folder, **arguments)


def all_trained(folder: Path) -> dict[str, Result]:
    return {kind: trained(kind, over_stages, folder) for kind in KINDS}


@pytest.fixture(scope="module")
def on_two_stages(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Result]]:
    return run_ranks(2, all_trained, tmp_path_factory.mktemp("pipe"), timeout=170)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_training_equals_one_devices(
    kind: str, on_two_stages: list[dict[str, Result]], tmp_path: Path
) -> None:
    wanted = trained(kind, one_device, tmp_path)
    first, second = (each[kind] for each in on_two_stages)
    rounded = {"rtol": 2e-2, "atol": 1e-2} if "16" in kind else {"rtol": 1e-6, "atol": 1e-6}
    for got in (first, second):
        assert list(got["weights"]) == list(wanted["weights"])
        torch.testing.assert_close(got["weights"], wanted["weights"], **rounded)
        assert got["steps"] == wanted["steps"]
        assert got["scale"] == wanted["scale"]
        assert got["norms"] == pytest.approx(wanted["norms"], rel=5e-2 if "16" in kind else 1e-5)
        assert got["metrics"] == pytest.approx(wanted["metrics"], rel=5e-2 if "16" in kind else 1e-5)
        assert got["types"] == {nn.Parameter}
    assert first["metrics"] == second["metrics"]
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)


def test_every_parameter_of_every_stage_moves_in_the_first_step(on_two_stages: list[dict[str, Result]]) -> None:
    before = weights(Net())
    after = on_two_stages[0]["limited"]["weights"]
    assert all((after[name] != value).any() for name, value in before.items())
