"""What `CompressionStatsLogger` costs: every so many steps, against none, in one run.

    python -m benchmarks.logging_cost

Two ranks train the benchmark's mlp under the Trainer with strategy="powersgd". The logger's own steps are compared with
their neighbours, so that whatever else the machine does falls on both: what a logged step takes longer, divided by
`every_n_steps`, as a share of a step. The picture at the end is timed alone. JSON lines.
"""

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.hosts import Host, as_torchrun_tells_it, one_host, run_on
from benchmarks.models import MODELS
from lightning_distkit import PowerSGDDDPStrategy
from lightning_distkit.callbacks import CompressionStatsLogger

EVERY_N_STEPS = 50


class Module(pl.LightningModule):
    """The benchmark's mlp; notes when each step ends."""

    def __init__(self) -> None:
        super().__init__()
        make, _, self.loss = MODELS["mlp"]
        self.net = make()
        self.ends: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0]), batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.ends.append(time.perf_counter())  # when the callbacks of the step before are done, too

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def train(host: Host, n_steps: int, per_layer: bool) -> tuple[list[float], float]:
    """On every rank: milliseconds of each step, and of the picture."""
    as_torchrun_tells_it(hosts=1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.randn(2, 64 * 8, 1024)
    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        stats = CompressionStatsLogger(EVERY_N_STEPS, per_layer=per_layer, figure=True)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=PowerSGDDDPStrategy(start_powerSGD_iter=2),
            max_steps=n_steps,
            max_epochs=-1,
            callbacks=[stats],
            logger=CSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=folder,
        )
        trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=64))
        begin = time.perf_counter()
        stats.on_train_end(trainer, module)
        picture = 1e3 * (time.perf_counter() - begin)
    return [1e3 * (b - a) for a, b in zip(module.ends, module.ends[1:], strict=False)], picture


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    chosen = parser.parse_args()
    for per_layer in (False, True):
        with one_host() as hosts:
            ranks = run_on(hosts, 2, train, chosen.steps, per_layer, timeout=900)
        steps, picture = ranks[0]
        logged = range(EVERY_N_STEPS - 1, len(steps) - 5, EVERY_N_STEPS)  # the last step of each 50
        usual = statistics.median(steps)
        extra = [steps[i] - statistics.median(steps[i - 5 : i] + steps[i + 1 : i + 6]) for i in logged]
        figures = {
            "per_layer": per_layer,
            "step_ms": usual,
            "logged_step_takes_longer_ms": statistics.median(extra),
            "n_logged": len(extra),
            "share_of_step": statistics.median(extra) / EVERY_N_STEPS / usual,
            "picture_ms": picture,
        }
        print(json.dumps(figures | {"every_n_steps": EVERY_N_STEPS}))


if __name__ == "__main__":
    main()
