"""One training of the demo: two processes, one strategy; what it measured goes to a JSON file.

Run: python examples/demo_training.py powersgd 400 powersgd.json
"""

import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import task
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning_task import LanguageModel, Sources
from torch import Tensor

from lightning_distkit import CommHookDDPStrategy, PowerSGDDDPStrategy
from lightning_distkit.callbacks import PowerSGDWarmup

MATRIX_APPROXIMATION_RANK = 8
START = 0.05  # share of the steps before compression starts: as long as the learning rate warms up
N_VALIDATIONS = 5

STRATEGIES = {
    "ddp": lambda: CommHookDDPStrategy("allreduce"),  # what strategy="ddp" does, with its bytes counted
    "powersgd": lambda: PowerSGDDDPStrategy(matrix_approximation_rank=MATRIX_APPROXIMATION_RANK),
    "ddp_noop": lambda: "ddp_noop",
}


class Recorder(Callback):
    """Keeps what happened in ``record``: the losses of this rank, and what all of them sent."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {
            "train_loss": [],  # one a step
            "nbytes": [],  # sent by this rank up to the end of each step
            "seconds": [],  # of each step, without loading data and without validation
            "validation": [],  # [steps done, loss over all ranks]
        }

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        self.record["seconds"].append(time.perf_counter() - self.started)
        self.record["train_loss"].append(outputs["loss"].item())
        self.record["nbytes"].append(trainer.strategy.ledger.total.nbytes)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.record["validation"].append([trainer.global_step, trainer.callback_metrics["validation_loss"].item()])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        of_each_rank = trainer.strategy.all_gather(torch.tensor(trainer.strategy.ledger.total.nbytes))
        self.record["nbytes_of_all_ranks"] = int(of_each_rank.sum())
        state = getattr(trainer.strategy, "powersgd_state", None)
        self.record["matrix_approximation_rank"] = state.matrix_approximation_rank if state is not None else None
        self.record["nbytes_of_gradients"] = sum(p.numel() * p.element_size() for p in pl_module.parameters())


class Lines(ProgressBar):
    """A progress bar for output that goes to a file: a whole line now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True

    def disable(self) -> None:
        self.is_enabled = False  # the Trainer does this on every rank but the first

    def enable(self) -> None:
        self.is_enabled = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        done, n_steps = trainer.global_step, trainer.max_steps
        if self.is_enabled and (done % max(1, n_steps // 8) == 0 or done == n_steps):
            metrics = self.get_metrics(trainer, pl_module)
            losses = ", ".join(f"{name} {metrics[name]:.3f}" for name in sorted(metrics) if name.endswith("loss"))
            print(f"[{'#' * round(24 * done / n_steps):24}] {done:4} of {n_steps} steps: {losses}", flush=True)


def main(name: str, n_steps: int, out: Path) -> None:
    # Of what Lightning has to say only what matters here: not that there is no GPU, nor that there are no workers.
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda record: "PowerSGD" in str(record.msg))
    logging.getLogger("lightning.fabric.utilities.distributed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")

    pl.seed_everything(0, verbose=False)
    recorder = Recorder()
    callbacks = [recorder, RichProgressBar(leave=False) if sys.stdout.isatty() else Lines()]
    if name == "powersgd":
        callbacks.append(PowerSGDWarmup(START))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=STRATEGIES[name](),
        callbacks=callbacks,
        max_epochs=1,
        max_steps=n_steps,
        gradient_clip_val=1.0,
        val_check_interval=max(1, n_steps // N_VALIDATIONS),
        check_val_every_n_epoch=None,
        limit_val_batches=0 if name == "ddp_noop" else None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(), Sources())
    if trainer.is_global_zero:
        out.write_text(json.dumps(recorder.record))
    # Lightning leaves gloo's threads running, and now and then such a process ends with "terminate called".
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    task.use_loopback()
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
