"""A small LightningModule and what the tests of strategies and callbacks run on each rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    """An MLP on data that differ from rank to rank; AdamW; remembers the ranks of its last gradients' matrices."""

    def __init__(self, n_batches: int = 6, width: int = 32, fail_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
        )
        self.n_batches = n_batches
        self.fail_at = fail_at
        self.matrix_ranks: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_step == self.fail_at:
            self.fail()
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def fail(self) -> None:
        raise ZeroDivisionError("on purpose")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.matrix_ranks = [
            int(torch.linalg.matrix_rank(p.grad.float(), rtol=1e-4)) for p in self.parameters() if p.dim() == 2
        ]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def data(self) -> DataLoader[Any]:
        random = torch.Generator().manual_seed(1 + self.trainer.global_rank)
        x, y = (torch.randn(4 * self.n_batches, n, generator=random) for n in (16, 4))
        return DataLoader(TensorDataset(x, y), batch_size=4)

    train_dataloader = val_dataloader = data


def trainer(strategy: Any, folder: Path, **arguments: Any) -> pl.Trainer:
    return pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": int(os.environ["WORLD_SIZE"]),
            "strategy": strategy,
            "max_epochs": 1,
            "default_root_dir": folder,
            "use_distributed_sampler": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": False,
            "enable_checkpointing": False,
            **arguments,
        }
    )


def parameters(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in module.parameters()])
