"""What every plugin changes of ``accelerate.Accelerator``: a mixin that stands before the user's class."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
import torch.distributed as dist
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.optim import Optimizer

from accelerate_plugins.model_files import with_tied
from accelerate_plugins.plugin import Plugin
from lightning_distkit.core.collectives import Group

logger = logging.getLogger(__name__)
_outliving: list[Any] = []  # process groups, until the interpreter ends
_SETTLING = 0.1  # seconds


class PluginMethods(accelerate.Accelerator):
    """Public methods of `accelerate.Accelerator` as a plugin has them; see `accelerator.construct`.

    All of them but `unwrap_model` are to be called on every rank.
    """

    plugin: Plugin
    group: Group  # all ranks, or a world of one; its ledger counts what ZeRO sends

    def adopt(self, plugin: Plugin) -> None:
        """Become the Accelerator of ``plugin``, once, when all else is constructed. Collective.

        Raises:
            ValueError: on every rank, if it is not the same on all.
        """
        self.plugin = plugin
        self.group = Group.of(None) if self.use_distributed else Group()
        what = {"plugin": type(plugin).__name__, **plugin.agreement()}
        self.group.agree("the Accelerator's plugin", what, self.device)
        self.register_save_state_pre_hook(lambda models, weights, output_dir: self.save_own_state(output_dir))
        self.register_load_state_pre_hook(self.load_own_state)

    def save_own_state(self, output_dir: str) -> None:
        """Write what Accelerate does not know of; collective."""

    def load_own_state(self, models: list[nn.Module], input_dir: str) -> None:
        """Read what `save_own_state` has written; collective.

        Args:
            models: those that Accelerate is going to load; what is loaded here is to be taken out of the list.
        """

    def has_part_of(self, model: nn.Module) -> bool:
        """Whether a rank has but a part of the parameters of a prepared model."""
        return False

    def load_whole(self, model: nn.Module, state: dict[str, Any], strict: bool = True) -> None:
        """Load a whole state dict, that every rank has, into a model of which each has a part."""
        model.load_state_dict(with_tied(state, model), strict)

    def whole_state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict of all ranks' parts, on rank 0. Collective."""
        state: dict[str, Any] = optimizer.state_dict()
        return state

    # Models go first, whatever the order of the arguments: optimizers are made of what the models then have.
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        order = sorted(range(len(args)), key=lambda at: not isinstance(args[at], nn.Module))
        if device_placement is not None and len(device_placement) == len(args):
            device_placement = [device_placement[at] for at in order]
        prepared = super().prepare(*(args[at] for at in order), device_placement=device_placement)
        return prepared if len(args) == 1 else tuple(prepared[order.index(at)] for at in range(len(args)))

    def end_training(self) -> None:
        # It destroys the process group. On gloo that ends threads which may be waiting for Python's lock, and a DDP
        # model that outlives the group would end them while it holds that lock, for ever. So the group outlives it.
        if dist.is_initialized():
            _outliving.append(dist.group.WORLD)
            # And those threads let go of the last messages' tensors only after they have said that these are done. That
            # takes the same lock; a thread that asks for it once the interpreter is ending aborts the process.
            time.sleep(_SETTLING)
        super().end_training()

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        location = super().save_state(output_dir, safe_serialization, **kwargs)
        self.wait_for_everyone()  # or a rank reads, or ends the others by leaving, while one still writes
        return location

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        # Mapped, not read, and not to the device: of what is saved whole, a rank may need a part.
        load_kwargs = {"mmap": True, **(load_kwargs or {})}
        super().load_state(input_dir, load_kwargs, **{"map_location": "cpu", **kwargs})
        # It is in a file of each rank; one that was not there before has none, and would accumulate out of step.
        self.step = self.group.everyones(self.step, self.device)[0]

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        is_even = self.even_batches if even_batches is None else even_batches
        if not is_even and self.num_processes > 1:
            raise ValueError(
                f"join_uneven_inputs(even_batches=False) cannot work with {type(self.plugin).__name__}: every rank has "
                "a part in every step, so one that is out of data cannot be stood in for. Leave even_batches=True, "
                "which repeats rows until all ranks have as many batches, or drop_last=True in the DataLoader"
            )
        yield

    def refuse_comm_hook(self) -> None:
        """Raise a ValueError if the user's DDP settings have a hook of their own."""
        handler: DistributedDataParallelKwargs | None = self.ddp_handler
        if handler is not None and handler.comm_hook != DDPCommunicationHookType.NO:
            raise ValueError(
                f"comm_hook={handler.comm_hook} of DistributedDataParallelKwargs cannot be had beside "
                f"{type(self.plugin).__name__}, which reduces the gradients itself; take one of them out"
            )

    def refuse_saving_on_each_node(self) -> None:
        """Raise a ValueError if each machine is to have the files."""
        if self.project_configuration.save_on_each_node:
            raise ValueError(
                f"save_on_each_node=True cannot be had with {type(self.plugin).__name__}: the whole state is gathered "
                "on the main process only; save to a folder that all machines share"
            )


@contextmanager
def instead(owner: Any, name: str, function: Any) -> Iterator[None]:
    """Within this, one object has another method."""
    before = owner.__dict__.get(name)
    owner.__dict__[name] = function
    try:
        yield
    finally:
        del owner.__dict__[name]
        if before is not None:
            owner.__dict__[name] = before


def listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """What clipping is given, as a list."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
