"""When PowerSGD starts: after a number of steps, or after a share of all of them."""

from __future__ import annotations

from math import ceil, isinf
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_distkit.core.compression import PowerSGDState


class PowerSGDWarmup(Callback):
    """Begin with plain all-reduce, as early gradients bear compression badly, and then compress.

    It sets ``start_powerSGD_iter``, says so once, and logs "powersgd/is_compressing" as 0 at the start and 1 at the
    switch. A resumed run keeps the step that the first run chose.

    Args:
        start: the step at which compression starts, at least 2; or, between 0 and 1, the share of all optimizer steps
            after which it does. 0.1 is a good begin.
        lr_warmup_steps: steps of the learning rate's warm-up, before whose end compression does not start.

    Raises:
        ValueError: ``start`` is neither.
        MisconfigurationException: the strategy does not compress by PowerSGD, or a share is asked for of a training
            that has no end.
    """

    def __init__(self, start: float = 0.1, lr_warmup_steps: int = 0) -> None:
        is_step = isinstance(start, int) and not isinstance(start, bool) and start >= 2
        is_share = isinstance(start, float) and 0 < start < 1
        if not is_step and not is_share:
            raise ValueError(
                f"start must be a step of at least 2 or a share of all steps between 0 and 1, got {start!r}; 0.1 is a "
                "good begin"
            )
        if not isinstance(lr_warmup_steps, int) or isinstance(lr_warmup_steps, bool) or lr_warmup_steps < 0:
            raise ValueError(f"lr_warmup_steps must be a whole number of at least 0, got {lr_warmup_steps!r}")
        self.start = start
        self.lr_warmup_steps = lr_warmup_steps
        self.start_powerSGD_iter: int | None = None  # once chosen; the same on every rank
        self._has_started = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not hasattr(trainer.strategy, "powersgd_state"):
            raise MisconfigurationException(
                f'PowerSGDWarmup needs Trainer(strategy="powersgd"), got {type(trainer.strategy).__name__}; change the '
                "strategy or leave the callback out"
            )
        self.start_powerSGD_iter = None  # of an earlier fit; a checkpoint's comes later

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = _state(trainer)
        if self.start_powerSGD_iter is None:
            self.start_powerSGD_iter = max(2, self._chosen(trainer), self.lr_warmup_steps)
        state.start_powerSGD_iter = self.start_powerSGD_iter
        self._has_started = state.is_compressing
        rank_zero_info(
            f"PowerSGD compresses from step {self.start_powerSGD_iter} of {trainer.estimated_stepping_batches} on; "
            f"done so far: {state.iter}."
        )
        self._log(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._has_started and _state(trainer).is_compressing:
            self._has_started = True
            rank_zero_info(f"PowerSGD compresses from now on: step {trainer.global_step}.")
            self._log(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"start_powerSGD_iter": self.start_powerSGD_iter}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.start_powerSGD_iter = state_dict["start_powerSGD_iter"]

    def _chosen(self, trainer: Trainer) -> int:
        if isinstance(self.start, int):
            return self.start
        n_steps = trainer.estimated_stepping_batches
        if isinf(n_steps) or n_steps <= 0:  # -1 is Lightning's word for a loader whose length nobody knows
            raise MisconfigurationException(
                f"start={self.start} is a share of all steps, but this training has no end: set max_epochs or "
                "max_steps, or give the number of a step in place of a share"
            )
        return ceil(self.start * n_steps)

    def _log(self, trainer: Trainer) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({"powersgd/is_compressing": float(self._has_started)}, step=trainer.global_step)


def _state(trainer: Trainer) -> PowerSGDState:
    state = getattr(trainer.strategy, "powersgd_state", None)
    assert isinstance(state, PowerSGDState)
    return state
