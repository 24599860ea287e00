"""What of a Trainer, its callbacks, loggers and metrics, must be told of a pipe, or cannot work with one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors


def check_trainer(trainer: Any, module: LightningModule) -> None:
    """Refuse what cannot work.

    Raises:
        MisconfigurationException: with the way out.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, ModelPruning):
            raise MisconfigurationException(
                "ModelPruning compares the parameters of all layers, and with a pipe no rank has them: prune on one "
                "device and go on from the checkpoint"
            )
    if getattr(module, "_compiler_ctx", None) is not None:
        raise MisconfigurationException(
            "with a pipe the whole LightningModule cannot be compiled: compile layers of the nn.Sequential instead"
        )
    if trainer.strategy.data_parallel_size == 1:
        # Lightning counts ranks, and all of them log the same.
        warnings.filterwarnings("ignore", "It is recommended to use .*sync_dist=True", PossibleUserWarning)
    for logger in trainer.loggers:
        if getattr(logger, "_log_graph", False):
            raise MisconfigurationException(
                f"{type(logger).__name__}(log_graph=True) runs the module on rank 0 alone, and with a pipe all ranks "
                "must: leave it out"
            )


def average_models(callbacks: Iterable[Any]) -> list[nn.Module]:
    """The copies of the module that callbacks keep averages in."""
    found: list[nn.Module] = []
    for callback in callbacks:
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            average: Any = callback._average_model
            if average is not None:
                found.append(average.module if isinstance(callback, WeightAveraging) else average)
    return found


def sync_metrics(module: nn.Module, data_group: dist.ProcessGroup) -> Callable[[], None]:
    """Have torchmetrics in ``module`` gather over the data replicas alone; what is returned undoes it."""
    gather = _OverReplicas(data_group)
    changed = [
        each
        for each in module.modules()
        if isinstance(each, Metric) and each.dist_sync_fn is None and each.process_group is None
    ]
    for each in changed:
        each.dist_sync_fn = gather

    def undo() -> None:
        for each in changed:
            each.dist_sync_fn = None

    return undo


class _OverReplicas:
    """A function that copies of a metric share: a process group cannot be copied."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, result: Tensor, group: Any = None) -> list[Tensor]:
        return gather_all_tensors(result, self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _OverReplicas:
        return self
