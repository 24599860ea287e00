"""A small LightningModule and what the tests of strategies and callbacks run on each rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EARLY = {"start_powerSGD_iter": 2, "min_compression_rate": 1}
ZERO_NAMES = ["zero_stage_1", "zero_stage_2", "zero_stage_3"]
NAMES = ["powersgd", "batched_powersgd", "acp_sgd", "ddp_noop"]


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


def first_half(folder: Path, strategy: Any) -> dict[str, Tensor]:
    net = Net()
    fit = trainer(strategy, folder)
    fit.fit(net)
    fit.save_checkpoint(folder / "half.ckpt")
    fit.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    state = getattr(fit.strategy, "powersgd_state", None)
    names = {p: name for name, p in net.named_parameters()}
    return {names[p]: error for p, error in state.error_dict.items()} if state is not None else {}


def second_half(folder: Path, strategy: Any, **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    net = Net()
    errors: dict[str, Tensor] = {}

    class Watch(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            state = getattr(trainer.strategy, "powersgd_state", None)
            if state is not None:
                names = {p: name for name, p in module.named_parameters()}
                errors.update({names[p]: error.clone() for p, error in state.error_dict.items()})
                errors["iter"] = torch.tensor(state.iter)

    fit = trainer(strategy, folder, max_epochs=2, callbacks=[Watch()], **arguments)
    fit.fit(net, ckpt_path=folder / "half.ckpt")
    assert fit.global_step == 12
    return parameters(net), errors
