"""Several pipes side by side: as DDP with as many ranks as there are pipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_distkit import PipeStrategy, PowerSGDDDPStrategy
from tests.ranks import run_ranks
from tests.strategies.modules import EARLY
from tests.strategies.pipe_modules import Net, loader, metrics, trainer, weights


class Sampled(Net):
    """Lightning's sampler shares the rows out; every rank remembers the first word of each that it saw."""

    def __init__(self) -> None:
        super().__init__(n_rows=24)
        self.seen: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += batch[0].sum(1).tolist()
        mine = batch[1].float().mean()
        self.log("mean", mine, sync_dist=True)
        self.log("rows", float(len(batch[0])), sync_dist=True, reduce_fx="sum")
        if isinstance(self.trainer.strategy, PipeStrategy) and self.trainer.strategy._steps is None:
            assert self.all_gather(mine).shape == (2,)  # the replicas, not the ranks
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def train_dataloader(self) -> Any:
        return loader(self.n_rows, batch_size=4, shuffle=True)


class Rivals(Sampled):
    """Two networks with a backward each; that of the second does not go through the pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.rival = nn.Linear(5, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for optimizer, network in zip(self.optimizers(), (self, self.rival), strict=True):
            optimizer.zero_grad()
            words = batch[0] if network is self else batch[0].float()
            self.manual_backward(F.cross_entropy(network(words), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        own = [parameter for name, parameter in self.named_parameters() if not name.startswith("rival")]
        return torch.optim.Adam(own, 1e-2), torch.optim.SGD(self.rival.parameters(), 0.1)


KINDS: dict[str, dict[str, Any]] = {"gpipe": {}, "1f1b": {"schedule": "1f1b"}, "last": {"outputs": "last"}}


def fitted(kind: str, cls: type[Sampled], folder: Path, **arguments: Any) -> dict[str, Any]:
    net = cls()
    strategy: Any = "ddp_find_unused_parameters_true"
    if kind:
        strategy = PipeStrategy(chunks=2, data_parallel_size=2, **KINDS[kind])
    fit = trainer(strategy, folder, max_epochs=2, **arguments)
    fit.fit(net)
    return {"weights": weights(net), "metrics": metrics(fit), "seen": net.seen}


def all_fitted(kinds: list[str], folder: Path) -> list[dict[str, Any]]:
    """The one with several optimizers comes last."""
    fits = [fitted(each, Sampled, folder, accumulate_grad_batches=2, gradient_clip_val=0.2) for each in kinds]
    return [*fits, fitted(kinds[-1], Rivals, folder)]


def test_two_pipes_of_two_stages_equal_ddp_with_two_ranks(tmp_path: Path) -> None:
    wanted = run_ranks(2, all_fitted, [""], tmp_path)
    got = run_ranks(4, all_fitted, list(KINDS), tmp_path)
    for rank, results in enumerate(got):
        for n, result in enumerate(results):
            theirs = wanted[rank // 2][n // len(KINDS)]
            is_cut = n in (1, 2)  # and every rank runs a part of the step, or nothing
            assert is_cut or result["seen"] == theirs["seen"]
            torch.testing.assert_close(result["weights"], theirs["weights"], rtol=1e-6, atol=1e-6)
            for name, value in theirs["metrics"].items():
                # What is not synchronised is the replica's own.
                torch.testing.assert_close(result["metrics"][name], value, rtol=1e-5, atol=1e-6)
            assert result["metrics"] == got[rank // 2 * 2][n]["metrics"]


class Compressed(pl.LightningModule):
    """All in the pipe, so that stages have together what DDP's ranks have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.layers(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)

    def train_dataloader(self) -> Any:
        random = torch.Generator().manual_seed(1)
        x, y = (torch.randn(32, 32, generator=random) for _ in range(2))
        return DataLoader(TensorDataset(x, 0.1 * y), batch_size=4)


def compressed(pipes: bool, folder: Path) -> tuple[int, int, float, Tensor]:
    net = Compressed()
    strategy = (
        PipeStrategy(2, data_parallel_size=2, data_parallel_hook="powersgd", data_parallel_hook_arguments=EARLY)
        if pipes
        else PowerSGDDDPStrategy(**EARLY)
    )
    fit = trainer(strategy, folder, max_epochs=4)
    fit.fit(net)
    counted = strategy.comm_state.ledger
    flat = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    return counted.last_step.nbytes, counted.last_step.nbytes_whole, float(fit.callback_metrics["loss"]), flat


def test_bytes_between_replicas_are_those_of_powersgd(tmp_path: Path) -> None:
    ddp = run_ranks(2, compressed, False, tmp_path)
    pipes = run_ranks(4, compressed, True, tmp_path)
    assert pipes[0][0] + pipes[1][0] == ddp[0][0]
    assert pipes[0][1] + pipes[1][1] == ddp[0][1]
    assert ddp[0][0] < ddp[0][1] / 5
    for each in pipes:
        torch.testing.assert_close(each[3], pipes[0][3], rtol=0, atol=0)
        assert each[2] == pipes[0][2] < 0.05
