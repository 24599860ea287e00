"""The bytes that each rank holds: parameters, gradients, optimizer state, activations; counted, on any device."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from lightning_distkit.callbacks.compression_figure import need_matplotlib
from lightning_distkit.callbacks.folder import folder_of
from lightning_distkit.callbacks.pipeline_figure import memory_figure
from lightning_distkit.core.collectives import Group


class MemoryMonitor(Callback):
    """Count a step now and then, on every rank, and log to every logger of the Trainer, for each rank:

    =============================  ==================================================================================
    ``memory/rank0/parameters``    bytes of parameters and buffers
    ``memory/rank0/gradients``     bytes of gradients right before the optimizer's step
    ``memory/rank0/optimizer``     bytes of the optimizer's state after it
    ``memory/rank0/activations``   most bytes at any one time that were saved for a backward, parameters not counted
    =============================  ==================================================================================

    Works with any strategy whose optimizers and modules have plain tensors. At the end of fit there is ``memory.png``
    beside the checkpoints. At other steps nothing is done.

    Args:
        every_n_steps: optimizer steps between two counts.
        figure: draw the last one. Needs matplotlib.

    Attributes:
        ranks: the last count, of each rank in order, the same on every rank; empty before it.

    Raises:
        ValueError: ``every_n_steps`` is not a whole number of at least 1.
        ModuleNotFoundError: ``figure`` without matplotlib.
    """

    def __init__(self, every_n_steps: int = 50, figure: bool = True) -> None:
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise ValueError(f"every_n_steps must be a whole number of at least 1, got {every_n_steps!r}; 50 is usual")
        if figure:
            need_matplotlib()
        self.every_n_steps = every_n_steps
        self.figure = figure
        self.ranks: list[dict[str, float]] = []
        self._saved: Saved | None = None
        self._gradients = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ranks, self._saved = [], None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if (trainer.global_step + 1) % self.every_n_steps == 0 and self._saved is None:
            self._saved = Saved(pl_module)
            self._saved.__enter__()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._gradients = _nbytes([each.grad for each in pl_module.parameters() if each.grad is not None])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._saved is None:
            return
        saved, self._saved = self._saved, None
        saved.__exit__()
        own = {
            "parameters": float(_nbytes([*pl_module.parameters(), *pl_module.buffers()])),
            "gradients": float(self._gradients),
            "optimizer": float(_nbytes([leaf for each in trainer.optimizers for leaf in _state(each)])),
            "activations": float(saved.most),
        }
        self.ranks = Group.of(None).everyones(own, trainer.strategy.root_device)
        named = {f"memory/rank{n}/{name}": value for n, its in enumerate(self.ranks) for name, value in its.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._saved is not None:
            self._saved.__exit__()
            self._saved = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = folder_of(trainer)
        if not self.figure or not self.ranks or not trainer.is_global_zero:
            return
        folder.mkdir(parents=True, exist_ok=True)
        memory_figure(self.ranks).savefig(folder / "memory.png", dpi=120)
        rank_zero_info(f"What each rank holds: {folder / 'memory.png'}")


class Saved:
    """Counts the bytes that are saved for backwards between `__enter__` and `__exit__`, each memory once.

    Args:
        module: whose parameters and buffers are not counted.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.most = 0
        self._now = 0
        self._holders: dict[int, int] = {}  # of each memory
        self._own = {_memory(each) for each in (*module.parameters(), *module.buffers()) if not each.is_meta}
        self._hooks = saved_tensors_hooks(lambda tensor: _Held(self, tensor), lambda held: held.tensor)

    def __enter__(self) -> Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def hold(self, memory: int, nbytes: int) -> None:
        if memory in self._own:
            return
        self._holders[memory] = self._holders.get(memory, 0) + 1
        if self._holders[memory] == 1:
            self._now += nbytes
            self.most = max(self.most, self._now)

    def release(self, memory: int, nbytes: int) -> None:
        if memory in self._holders:
            self._holders[memory] -= 1
            if self._holders[memory] == 0:
                del self._holders[memory]
                self._now -= nbytes


class _Held:
    """A saved tensor, from when it is saved until its graph is freed."""

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.tensor = tensor
        self._saved = saved
        self._what = (_memory(tensor), tensor.untyped_storage().nbytes())
        saved.hold(*self._what)

    def __del__(self) -> None:
        self._saved.release(*self._what)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _nbytes(tensors: list[Any]) -> int:
    """Of those that are here, each once."""
    return sum({id(each): each.nbytes for each in tensors if not each.is_meta}.values())


def _state(optimizer: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
