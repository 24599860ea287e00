"""Lightning's callbacks that average or unfreeze weights, in stage 3: each rank averages the shards that it holds.

They go through ``module.parameters()`` one by one. So during their hooks these are plain shards (`local_shards`), as
are those of the averaged model (`ShardedCopy`); what they save and load is whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_distkit.core.zero import ShardedCopy, local_shards, without_weights
from lightning_distkit.core.zero.fsdp_state import reshard
from lightning_distkit.core.zero.module_state import sharded_part
from lightning_distkit.core.zero.whole_tensors import local

_AVERAGING_HOOKS = (
    "on_train_epoch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
)


def take_over(trainer: Trainer) -> list[TakenOver]:
    """Change those of the trainer's callbacks for which shards make a difference, before their setup."""
    taken: list[TakenOver] = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            taken.append(StochasticAveraging(callback, trainer))
        elif isinstance(callback, WeightAveraging):
            taken.append(Averaging(callback, trainer))
        elif isinstance(callback, BaseFinetuning):
            taken.append(Finetuning(callback, trainer))
    return taken


class TakenOver:
    """A callback from before its setup to the end of a fit or an evaluation.

    What is changed are attributes of the object: a subclass would have another name, and so another key in checkpoints.
    """

    def __init__(self, callback: Any, trainer: Trainer) -> None:
        self._callback = callback
        self._trainer = trainer
        self._changed: list[str] = []

    def _change(self, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        vars(self._callback).pop(name, None)  # of a trainer that came to no end
        method = getattr(self._callback, name)
        if getattr(type(self._callback), name) is getattr(Callback, name):
            return  # it does nothing
        setattr(self._callback, name, wraps(method)(change(method)))
        self._changed.append(name)

    def before_sharding(self, module: LightningModule) -> None: ...
    def after_sharding(self, module: LightningModule) -> None: ...
    def release(self) -> None:
        """Have the callback be as it was, with whole weights on every rank. Collective."""
        self.abandon()

    def abandon(self) -> None:
        """Have the callback be as it was, without what needs other ranks."""
        for name in self._changed:
            vars(self._callback).pop(name, None)


class Finetuning(TakenOver):
    """A BaseFinetuning."""

    def __init__(self, callback: BaseFinetuning, trainer: Trainer) -> None:
        super().__init__(callback, trainer)
        self._change("on_train_epoch_start", self._resharding)
        self._change("load_state_dict", self._restarting)

    def _resharding(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def resharding(trainer: Trainer, module: LightningModule) -> None:
            reshard(module)  # or it might unfreeze what is whole now and gone in the next step
            method(trainer, module)

        return resharding

    def _restarting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def restarting(state: dict[str, Any]) -> None:
            method(state)
            # Checkpoints are loaded into what is sharded, so after on_fit_start, which looks for this.
            BaseFinetuning.on_fit_start(self._callback, self._trainer, self._trainer.lightning_module)

        return restarting


class Averaging(TakenOver):
    """A WeightAveraging."""

    def __init__(self, callback: Callback, trainer: Trainer) -> None:
        super().__init__(callback, trainer)
        self._copied: nn.Module | None = None
        self._sharded: ShardedCopy | None = None
        self._change("setup", _without_copying)
        self._change("on_load_checkpoint", _with_own_part)
        for name in _AVERAGING_HOOKS:
            self._change(name, _on_local_shards)

    @property
    def _is_fitting(self) -> bool:
        return self._trainer.state.fn == TrainerFn.FITTING

    def before_sharding(self, module: LightningModule) -> None:
        if self._is_fitting:
            self._copied = without_weights(module)
        elif self._callback._average_model is not None:  # of an earlier fit
            self._copied = self._callback._average_model.module

    def after_sharding(self, module: LightningModule) -> None:
        if self._copied is not None:
            self._sharded = ShardedCopy(self._copied, module, takes_values=self._is_fitting)
            if self._is_fitting:
                self._callback._average_model.module = self._copied.to(self._callback._device or module.device)

    def release(self) -> None:
        if self._sharded is not None:
            self._sharded.make_whole()
        super().abandon()

    def abandon(self) -> None:
        self._callback._average_model = None
        super().abandon()


class StochasticAveraging(Averaging):
    """A StochasticWeightAveraging: its copy is the averaged model itself, made anew whatever the trainer does."""

    def __init__(self, callback: StochasticWeightAveraging, trainer: Trainer) -> None:
        super().__init__(callback, trainer)
        self._change("load_state_dict", self._restarting)

    def before_sharding(self, module: LightningModule) -> None:
        self._copied = without_weights(module)

    def after_sharding(self, module: LightningModule) -> None:
        assert self._copied is not None
        self._sharded = ShardedCopy(self._copied, module, takes_values=True)
        self._callback._average_model = self._copied

    def _restarting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def restarting(state: dict[str, Any]) -> None:
            method(state)
            # Checkpoints are loaded into what is sharded, so after on_fit_start, which looks for this.
            if self._is_fitting and self._callback._scheduler_state is not None:
                self._callback._clear_schedulers(self._trainer)

        return restarting


def _without_copying(setup: Callable[..., Any]) -> Callable[..., Any]:
    def without_copying(trainer: Trainer, module: LightningModule, stage: str) -> None:
        # The whole module would be copied here, on every rank; `after_sharding` puts a copy of the shards in its place.
        module.__dict__["__deepcopy__"] = lambda _: nn.Module()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*WeightAveraging doesn't support sharding")
                setup(trainer, module, stage)
        finally:
            del module.__dict__["__deepcopy__"]

    return without_copying


def _on_local_shards(hook: Callable[..., Any]) -> Callable[..., Any]:
    def on_local_shards(trainer: Trainer, module: LightningModule, *args: Any, **kwargs: Any) -> None:
        with local_shards(module):
            hook(trainer, module, *args, **kwargs)

    return on_local_shards


def _with_own_part(on_load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    def with_own_part(trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        own = dict(checkpoint)
        if "current_model_state" in checkpoint:  # for the module, into which FSDP2 loads DTensors
            own["current_model_state"] = sharded_part(module, checkpoint["current_model_state"])
        # For its average, of which Lightning may copy all that is here.
        part = sharded_part(module, checkpoint["state_dict"])
        own["state_dict"] = {name: local(value) if isinstance(value, Tensor) else value for name, value in part.items()}
        on_load_checkpoint(trainer, module, own)

    return with_own_part
