"""A pipeline in Accelerate: the model's layers on several ranks, each of which runs the loop as it is."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accelerate_plugins import config
from accelerate_plugins.methods import instead, listed
from accelerate_plugins.model_files import names_of_tied, read_model
from accelerate_plugins.pipe import PipePlugin
from accelerate_plugins.replicas import ReplicaMethods
from lightning_distkit.core.ledger import Ledger
from lightning_distkit.core.pipeline.assembly import check_optimizer
from lightning_distkit.core.pipeline.grid import Grid
from lightning_distkit.core.pipeline.layer_list import LayerList, find_layers
from lightning_distkit.core.pipeline.merged_state import merged, own_optimizer_state
from lightning_distkit.core.pipeline.shared_batch import SharedBatches
from lightning_distkit.core.pipeline.sizes import resolved_sizes
from lightning_distkit.core.pipeline.stage_norm import StageGradScaler, clip_grad_norm_, grad_norm
from lightning_distkit.core.pipeline.within import PipeWithin

logger = logging.getLogger(__name__)

_NUMBERS = "pipe_random_states.bin"  # of the generators that pipes' calls draw from


@dataclass
class Piped:
    """One model that has a pipe."""

    prepared: nn.Module  # what the user has: the pipe itself where the model is nothing else, or the model
    part: PipeWithin
    layers: LayerList | None  # if it was an `nn.ModuleList`
    tied: list[list[str]]  # names of parameters that are one

    @property
    def module(self) -> nn.Module:
        """As the user has made it; other stages' parameters are placeholders."""
        return self.part.module

    def end(self) -> None:
        """Take the pipe out. Each rank keeps its layers, and the model may be prepared again."""
        self.part.abandon()
        if self.layers is not None:
            self.layers.undo()
        vars(self.prepared).pop("_is_accelerate_prepared", None)


class PipeMethods(ReplicaMethods):
    """What `PipePlugin` changes."""

    plugin: PipePlugin

    def adopt(self, plugin: Any) -> None:
        super().adopt(plugin)
        try:
            sizes = resolved_sizes(plugin.data_parallel_size, plugin.pipeline_parallel_size, self.group.world_size)
        except ValueError as error:
            raise ValueError(f"{config.where('pipeline_parallel_size')}: {error}") from None
        self._refuse_settings()
        self._device = torch.device("cpu") if self.device.type == "cpu" else self.device  # cpu:0 on some ranks
        self._timeout = self._timeout_of_pipes()
        self.grid = Grid.of(sizes, self._device, self._timeout)
        self._shares = SharedBatches(self.grid.stages, self.grid.control, self._device)
        self._batches = self._shares if plugin.share_batches else None
        self._piped: list[Piped] = []
        self._n_piped = 0  # with those that are no more
        self._replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter as the user made it -> what is there
        self._ended: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()  # a pipe -> what it was made of

    def _refuse_settings(self) -> None:
        if self.dispatch_batches:
            raise ValueError(
                "dispatch_batches=True cannot be had with PipePlugin: it gives each process a slice of a batch, and "
                "all stages of a pipe need the whole; leave it out"
            )
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ValueError(
                "with a pipe the whole model cannot be compiled, but dynamo_backend is "
                f"{self.state.dynamo_plugin.backend.value}: compile the layers instead, before prepare"
            )

    def _timeout_of_pipes(self) -> timedelta | None:
        """The plugin's, or that of ``InitProcessGroupKwargs``, which else is the default group's alone."""
        if self.plugin.timeout is not None:
            return timedelta(seconds=self.plugin.timeout)
        given: timedelta | None = getattr(self.init_handler, "timeout", None)
        return given

    @property
    def ledger(self) -> Ledger | None:
        """What this rank sent to other stages, for the model prepared first; None before that."""
        return self._piped[0].part.pipe.ledger if self._piped else None

    # -- preparing

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        model = self._ended.get(model, model)
        if getattr(model, "_is_accelerate_prepared", False) or evaluation_mode:
            return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[no-any-return]
        self.refuse_comm_hook()
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.group.agree("the model", {n: f"{tuple(each.shape)}, {each.dtype}" for n, each in tensors}, self.device)
        piped = self._put_pipe_into(model)
        self._piped.append(piped)
        self._n_piped += 1
        # All that Accelerate does but for DDP's wrapper: place, mixed precision.
        prepared: nn.Module = super().prepare_model(piped.prepared, device_placement, evaluation_mode=True)
        for optimizer in self._optimizers:
            self._replace_parameters(optimizer)
        self._shares.share(None)  # layers around the pipe draw the same numbers from here on
        # Of its own, so that the global ones, by which samplers shuffle, are those of one process.
        seed = self.grid.everyone.everyones(torch.initial_seed(), torch.device("cpu"))[0]
        piped.part.pipe.numbers = torch.Generator().manual_seed(seed + self._n_piped)
        return prepared

    def _put_pipe_into(self, model: nn.Module) -> Piped:
        given = self.plugin.module
        if given is None and callable(configure := getattr(model, "configure_pipeline", None)):
            given = configure()
        path, found = find_layers(model, given)
        tied = names_of_tied(model)
        before = dict(model.named_parameters(remove_duplicate=False))
        arguments = {**self.plugin.pipe_arguments(), "timeout": self._timeout}
        layers = LayerList(model, path) if isinstance(found, nn.ModuleList) else None
        try:
            part = self.grid.put_pipe_into(model, path, arguments.pop("balance"), self._device, **arguments)
        except BaseException:
            if layers is not None:
                layers.undo()
            raise
        _use_no_cache(model)
        after = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in before.items():
            if after[name] is not parameter:
                self._replaced[parameter] = after[name]
        return Piped(model if path else part.pipe, part, layers, tied)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        if getattr(optimizer, "_is_accelerate_prepared", False):
            self._take_up(optimizer)  # it may be that of a pipe which is no more, as in a Trainer's second fit
            return super().prepare_optimizer(optimizer, device_placement)
        check_optimizer(optimizer)
        self._take_up(optimizer)
        # Of a whole state each rank takes its part.
        optimizer.register_load_state_dict_pre_hook(own_optimizer_state)
        return super().prepare_optimizer(optimizer, device_placement)

    def _take_up(self, optimizer: Optimizer) -> None:
        self._replace_parameters(optimizer)
        if isinstance(self.scaler, torch.amp.GradScaler) and not isinstance(self.scaler, StageGradScaler):
            StageGradScaler.take_over(self.scaler, self.grid.stages, self._device)

    def _replace_parameters(self, optimizer: Optimizer) -> None:
        """Other stages' parameters become placeholders, so that numbers in its state are the whole model's."""
        for param_group in optimizer.param_groups:
            for n, parameter in enumerate(param_group["params"]):
                if parameter in self._replaced:
                    param_group["params"][n] = self._replaced[parameter]
                    state = optimizer.state.pop(parameter, None)
                    if state is not None and not self._replaced[parameter].is_meta:
                        optimizer.state[self._replaced[parameter]] = state

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        unwrapped: nn.Module = super().unwrap_model(model, *args, **kwargs)
        piped = self._piped_of(model)
        return piped.module if piped is not None else unwrapped

    def _piped_of(self, model: nn.Module) -> Piped | None:
        return next((each for each in self._piped if model in (each.prepared, each.module)), None)

    def free_memory(self, *objects: Any) -> Any:
        for piped in self._piped:
            piped.end()
            if piped.prepared is not piped.module:
                self._ended[piped.prepared] = piped.module
        self._piped.clear()
        if isinstance(self.scaler, StageGradScaler):
            self.scaler.hand_back()
        return super().free_memory(*objects)

    # -- training

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        piped = self._piped_of(model)
        if piped is None:
            with super().no_sync(model):
                yield
        else:
            with piped.part.pipe.no_sync():
                yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)
        if self.sync_gradients:
            for piped in self._piped:
                piped.part.sync_outside(self.grid.stages, self.plugin.sync_replicated)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """The norm is over all stages: the same on every rank. Collective."""
        self.unscale_gradients()
        given = listed(parameters)
        norm = grad_norm(given, self._counts, self.grid.stages, self._device, norm_type)
        clip_grad_norm_(given, max_norm, norm)
        return norm

    def _counts(self, parameter: Tensor) -> bool:
        # To a pipe that has it not, a parameter is one that all ranks have.
        return any(piped.part.counts(parameter) for piped in self._piped) or (
            not self._piped and self.grid.stages.rank == 0
        )

    # -- checkpoints

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """On rank 0 the whole one, on the CPU; an empty one on the others. Collective."""
        if isinstance(model, _Whole):
            return model.state
        piped = self._piped_of(model)
        if piped is None:
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        if self.grid.data.rank != 0:
            return OrderedDict()
        own = piped.module.state_dict()
        state = merged(own, self.grid.control, lambda path: piped.part.owner(path[0]), adds_keys=False)
        if self.grid.stages.rank != 0:
            return OrderedDict()
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.detach().to("cpu", copy=True)
        for first, *others in piped.tied:
            state.update(dict.fromkeys(others, state[first]))
        whole: dict[str, Any] = state
        return whole

    def save_model(self, model: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        # Accelerate refuses a model with a parameter on meta.
        super().save_model(_Whole(self.get_state_dict(model)), save_directory, *args, **kwargs)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        self.refuse_saving_on_each_node()
        with ExitStack() as stack:
            for optimizer in self._optimizers:
                inner = getattr(optimizer, "optimizer", optimizer)
                stack.enter_context(instead(inner, "state_dict", partial(self._merged, inner.state_dict)))
            return super().save_state(output_dir, safe_serialization, **kwargs)

    def has_part_of(self, model: nn.Module) -> bool:
        return self._piped_of(model) is not None

    def whole_state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._merged(optimizer.state_dict)

    def _merged(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        state = state_dict()
        return merged(state, self.grid.control) if self.grid.data.rank == 0 else state

    def save_own_state(self, output_dir: str) -> None:
        if self.is_main_process:
            torch.save([each.get_state() for each in self._numbers()], Path(output_dir, _NUMBERS))

    def load_own_state(self, models: list[nn.Module], input_dir: str) -> None:
        if (path := Path(input_dir, _NUMBERS)).exists():  # not if it was saved without a pipe
            for each, state in zip(self._numbers(), torch.load(path, weights_only=True), strict=False):
                each.set_state(state)
        for number, model in enumerate(models):
            module = self.unwrap_model(model)
            self.load_whole(module, read_model(Path(input_dir), number))
        models.clear()

    def _numbers(self) -> list[torch.Generator]:
        return [each.part.pipe.numbers for each in self._piped if each.part.pipe.numbers is not None]


class _Whole(nn.Module):
    """Stands for a model whose state is here."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self.state = state


def _use_no_cache(model: nn.Module) -> None:
    """Have a Transformers model keep no keys and values: they would be in the layers of all stages."""
    for each in model.modules():
        settings: Any = getattr(each, "config", None)
        if getattr(settings, "use_cache", False) is True:
            settings.use_cache = False
            logger.info("use_cache of %s is off now, as a pipe cannot fill a cache", type(each).__name__)
