"""What `PipeStrategy` in the Trainer costs over the same steps with the bare `DistributedPipe`, in one run.

    python -m benchmarks.pipeline_trainer

Two ranks, the benchmark's mlp, SGD. Rounds of steps with the one and with the other in turn, in the same processes, so
that whatever else the machine does falls on both; a step's time is the median over a round, the cost the median over
rounds. It has in it the Trainer's own loop, and that the batch is sent. JSON lines.
"""

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.hosts import as_torchrun_tells_it, one_host, run_on
from benchmarks.models import MODELS
from lightning_distkit import PipeStrategy
from lightning_distkit.core.pipeline.dist import DistributedPipe

CHUNKS = 4


class Module(pl.LightningModule):
    """The benchmark's mlp; notes when each step begins."""

    def __init__(self, layers: torch.nn.Sequential) -> None:
        super().__init__()
        self.layers = layers
        self.loss = MODELS["mlp"][2]
        self.begins: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(self.layers(batch[0]), batch[1])
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.begins.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def in_trainer(data: TensorDataset, batch_size: int, schedule: str) -> list[float]:
    module = Module(MODELS["mlp"][0]())
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipeStrategy(CHUNKS, schedule=schedule),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=batch_size))
    return module.begins


def bare(data: TensorDataset, batch_size: int, schedule: str) -> list[float]:
    pipe = DistributedPipe(MODELS["mlp"][0](), CHUNKS, schedule=schedule, balance="size")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
    loss_of = MODELS["mlp"][2]
    begins = []
    for x, y in DataLoader(data, batch_size=batch_size):
        begins.append(time.perf_counter())
        loss = loss_of(pipe(x), y) if schedule == "gpipe" else pipe.loss(x, loss=loss_of, targets=y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return begins


def rounds(schedule: str, batch_size: int, n_steps: int, n_rounds: int) -> list[tuple[float, float]]:
    """On every rank: of each round milliseconds a step, bare and in the Trainer."""
    as_torchrun_tells_it(hosts=1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(*torch.randn(2, batch_size * n_steps, 1024))
    result = []
    for _ in range(n_rounds):
        steps = []
        for run in (bare, in_trainer):
            begins = run(data, batch_size, schedule)
            steps.append(1e3 * statistics.median(b - a for a, b in pairwise(begins[3:])))
        result.append((steps[0], steps[1]))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    for schedule in ("gpipe", "1f1b"):
        with one_host() as hosts:
            ranks = run_on(hosts, 2, rounds, schedule, chosen.batch_size, chosen.steps, chosen.rounds, timeout=900)
        figures = {
            "schedule": schedule,
            "bare_ms": statistics.median(step for step, _ in ranks[0]),
            "in_trainer_ms": statistics.median(step for _, step in ranks[0]),
            "takes_longer": statistics.median(there / here - 1 for here, there in ranks[0]),
        }
        print(json.dumps(figures | {"batch_size": chosen.batch_size, "rounds": chosen.rounds}))


if __name__ == "__main__":
    main()
