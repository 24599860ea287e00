"""Data where several ranks see one batch: loaders, schedules, and values of all, by pipe and not by process."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import PartialState
from accelerate.utils import PROFILE_PATTERN_NAME, ProfileKwargs
from accelerate.utils.operations import recursively_apply
from torch import Tensor

from accelerate_plugins.methods import PluginMethods
from lightning_distkit.core.pipeline.grid import Grid
from lightning_distkit.core.pipeline.shared_batch import SharedBatches, random_state, set_random_state


class ReplicaMethods(PluginMethods):
    """What of `accelerate.Accelerator` counts processes, where it is pipes that have batches of their own."""

    grid: Grid
    _device: torch.device
    _batches: SharedBatches | None  # of the first stage, for the others

    @property
    def data_parallel_size(self) -> int:
        """The number of pipes, each of which has batches of its own."""
        return self.grid.data.world_size

    @property
    def pipeline_parallel_size(self) -> int:
        """The number of ranks of a pipe."""
        return self.grid.stages.world_size

    def adopt(self, plugin: Any) -> None:
        super().adopt(plugin)
        _share_what_is_skipped()

    # Whoever asks wants to know how many batches there are in a step, to scale a rate or a loss, and which is his.
    @property
    def num_processes(self) -> int:
        """The number of pipes: the ranks of one act as one process."""
        return self.grid.data.world_size

    @property
    def process_index(self) -> int:
        """Which pipe this rank is in."""
        return self.grid.data.rank

    @property
    def is_last_process(self) -> bool:
        # Of a pipe's ranks, which have one index, one at most.
        return bool(self.state.is_last_process)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        # Accelerate names the file by process_index, so that all stages of a pipe would write the same one.
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        without = copy.copy(handler)
        without.output_trace_dir = None
        with super().profile(without) as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            name = PROFILE_PATTERN_NAME.format(suffix=self.state.process_index)
            Path(handler.output_trace_dir).mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(Path(handler.output_trace_dir, name)))
            self.wait_for_everyone()

    @property
    def dispatch_batches(self) -> bool:
        # Accelerate's default for iterable datasets gives each process a slice of what the first one has read.
        return bool(super().dispatch_batches)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        # The state's own, asked of an object that counts pipes.
        with PartialState.split_between_processes(self, inputs, apply_padding) as own:  # type: ignore[arg-type]
            yield own

    # -- loaders and schedules

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        return self._shared(super().prepare_data_loader(*args, **kwargs))

    def _shared(self, loader: Any) -> Any:
        return _shared(loader, self._batches, self._device) if self._batches is not None else loader

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared: Any = super().prepare_scheduler(scheduler)
        kind: Any = type(prepared)
        if kind is AcceleratedScheduler:
            prepared.__class__ = SchedulerOfPipes
            prepared.n_pipes = self.data_parallel_size
        return prepared

    # -- values of all: the stages of a pipe have the same, so one of them counts

    def gather(self, tensor: Any) -> Any:
        if self.data_parallel_size == 1:
            return tensor
        return recursively_apply(self._gathered, tensor, error_on_other_type=True)

    def _gathered(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach().contiguous()
        tensor = tensor[None] if tensor.dim() == 0 else tensor
        each = [torch.empty_like(tensor) for _ in range(self.data_parallel_size)]
        dist.all_gather(each, tensor, group=self.grid.data.process_group)
        return torch.cat(each)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object or not _are_tensors(input_data):
            # That gathers lists of objects over all processes: the first stage's, and of the others none.
            return super().gather_for_metrics(input_data if self.grid.stages.rank == 0 else [], True)
        return super().gather_for_metrics(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        def reduced(each: Tensor) -> Tensor:
            total = each.detach().clone()
            self.grid.data.all_reduce(total).wait()
            if reduction == "mean":
                total /= self.data_parallel_size
            return total if scale == 1.0 else total * scale

        return recursively_apply(reduced, tensor, error_on_other_type=True)

    def check_trigger(self) -> bool:
        # By reduce it would be asked of the ranks with this one's stages only.
        is_set = self.flag_tensor is not None and bool(self.flag_tensor.item())
        if not any(self.grid.everyone.everyones(is_set, torch.device("cpu"))):
            return False
        self.flag_tensor = None  # as it is at first
        return True


class SharedLoader(DataLoaderShard):
    """Gives every rank of a pipe the first one's batches. Iterating it is collective."""

    batches: SharedBatches
    generators_of: torch.device
    resumes = False  # in the middle of an epoch

    def __iter__(self) -> Iterator[Any]:
        # To begin an epoch, torch's loader draws a number; the run that is resumed had done so before it was saved.
        before = random_state(self.generators_of) if self.resumes else None
        for batch in super().__iter__():
            if before is not None:
                set_random_state(before, self.generators_of)
                before = None
            yield self.batches.share(batch)


def _shared(loader: Any, batches: SharedBatches, device: torch.device) -> Any:
    """The same loader, that gives every stage the first one's batches."""
    kind: Any = type(loader)
    if kind is DataLoaderShard:
        # Accelerate's class has a property of this name, which cannot be set.
        vars(object)["__class__"].__set__(loader, SharedLoader)
        loader.batches, loader.generators_of = batches, device
    return loader


def _share_what_is_skipped() -> None:
    """Have ``accelerate.skip_first_batches`` make a `SharedLoader` of one; again does nothing.

    It is a function, that Trainer and scripts call as it is, and makes a plain loader of any. So it is changed wherever
    it has been imported to.
    """
    original: Any = accelerate.skip_first_batches
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        loader = original(dataloader, num_batches)
        if isinstance(dataloader, SharedLoader):
            loader = _shared(loader, dataloader.batches, dataloader.generators_of)
            loader.resumes = True
        return loader

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("skip_first_batches") is original:
            vars(module)["skip_first_batches"] = skip_first_batches


class SchedulerOfPipes(AcceleratedScheduler):
    """Steps once for each pipe, as Accelerate's does for each process: its steps are rows seen, as in one process."""

    n_pipes: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        is_due = self.gradient_state.sync_gradients and not any(each.step_was_skipped for each in self.optimizers)
        if not (is_due and self.step_with_optimizer) or self.split_batches:
            super().step(*args, **kwargs)
            return
        for _ in range(self.n_pipes):
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", self.scheduler._step_count):
                self.scheduler.step(*args, **kwargs)


def _are_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda each: each, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
