"""An ordinary LightningModule with layers around its `nn.Sequential`, and what tests of the pipe run on each rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_distkit import PipeStrategy

WORDS, CLASSES = 11, 4


class Net(pl.LightningModule):
    """Embedding, pipe, head; Adam; remembers the norm of its gradients before every step."""

    def __init__(self, n_rows: int = 22, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.n_rows = n_rows
        self.embedding = nn.Embedding(WORDS, 8)
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(16, 8)
        )
        self.head = nn.Linear(8, CLASSES)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.norms: list[float] = []

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(words).mean(1)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]).float(), batch[1])
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        output = self(batch[0]).float()
        self.accuracy(output, batch[1])
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", F.cross_entropy(output, batch[1]), sync_dist=True)
        self.log("rows", float(len(output)), sync_dist=True, reduce_fx="sum")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, PipeStrategy):
            self.norms.append(float(strategy.grad_norm(optimizer)))
        else:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.norms.append(float(nn.utils.get_total_norm(grads)))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def data(self) -> DataLoader[Any]:
        return loader(self.n_rows)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = data


def rows(n_rows: int) -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (n_rows, 5), generator=random)
    return TensorDataset(words, torch.randint(CLASSES, (n_rows,), generator=random))


def loader(n_rows: int, batch_size: int = 8, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(rows(n_rows), batch_size=batch_size, **arguments)


def trainer(strategy: Any, folder: Path, **arguments: Any) -> pl.Trainer:
    return pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": int(os.environ.get("WORLD_SIZE", "1")),
            "strategy": strategy,
            "max_epochs": 1,
            "default_root_dir": folder,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": False,
            "enable_checkpointing": False,
            **arguments,
        }
    )


def one_device(folder: Path, **arguments: Any) -> pl.Trainer:
    """Without processes: what every number is compared with."""
    return trainer("auto", folder, devices=1, **arguments)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def metrics(fit: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in fit.callback_metrics.items()}
