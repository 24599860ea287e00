"""What the stages of ZeRO do differently in the Trainer: with whole parameters (1, 2), or with sharded ones (3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Protocol

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method
from torch.optim import Optimizer

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.zero import (
    DTensorOptimizer,
    ZeroOptimizer,
    check_initialisable,
    initialise,
    load_module_full_state_dict,
    module_full_state_dict,
    shard_gradients,
    shard_parameters,
    sharding_of,
    sync_module_states,
    unshard_parameters,
)
from lightning_distkit.core.zero.fsdp_state import interrupt, param_groups_of, reshard
from lightning_distkit.core.zero.policy import Policy
from lightning_distkit.strategies.zero_callbacks import TakenOver, take_over

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def is_on_meta(module: nn.Module) -> bool:
    return any(each.is_meta for each in (*module.parameters(), *module.buffers()))


class Stage(Protocol):
    """What `ZeroStrategy` asks of a stage; every method is collective."""

    loads_after_setup: bool  # whether a checkpoint's weights are loaded into the prepared module

    def check(self, trainer: Any) -> None:
        """Refuse what cannot work, and prepare what is to be set up, before anything is done."""

    def prepare(self, module: LightningModule, group: Group, device: torch.device) -> None:
        """Make the module ready, in place; it may be on the meta device."""

    def shard(self, optimizer: Optimizer, module: LightningModule, group: Group) -> Optimizer:
        """The sharded optimizer; the same one, if it is Lightning's word for "no optimizer"."""

    def state_dict(self, module: LightningModule) -> dict[str, Any]:
        """Whole, at least on rank 0."""

    def load_state_dict(self, module: LightningModule, state_dict: Mapping[str, Any], strict: bool) -> None: ...
    def restore(self, module: LightningModule) -> None:
        """Make the module plain again, in place, whole on every rank."""

    def abandon(self, module: LightningModule) -> None:
        """In the place of `restore` after an error, when others may be anywhere: not collective."""


class WholeParameters:
    """Stages 1 and 2: the module stays a plain one.

    Args:
        shards_gradients: stage 2.
        bucket_cap_mb, elementwise: of `ZeroOptimizer`.
    """

    loads_after_setup = False

    def __init__(self, shards_gradients: bool, bucket_cap_mb: float, elementwise: bool | None) -> None:
        self._shards_gradients = shards_gradients
        self._bucket_cap_mb = bucket_cap_mb
        self._elementwise = elementwise

    def check(self, trainer: Any) -> None:
        pass

    def prepare(self, module: LightningModule, group: Group, device: torch.device) -> None:
        if is_on_meta(module):
            check_initialisable(module)
            initialise(module, device, group, loaded=None)
        sync_module_states(module, group)

    def shard(self, optimizer: Optimizer, module: LightningModule, group: Group) -> Optimizer:
        if not optimizer.param_groups:
            raise MisconfigurationException(
                "in stages 1 and 2 it is the optimizer that averages gradients over the ranks, and "
                'configure_optimizers returned none: return one, or use strategy="ddp", which averages them in backward'
            )
        sharded = ZeroOptimizer(
            optimizer, group=group, bucket_cap_mb=self._bucket_cap_mb, elementwise=self._elementwise
        )
        return shard_gradients(sharded) if self._shards_gradients else sharded

    def state_dict(self, module: LightningModule) -> dict[str, Any]:
        return module.state_dict()

    def load_state_dict(self, module: LightningModule, state_dict: Mapping[str, Any], strict: bool) -> None:
        if is_on_meta(module):  # this comes before `prepare`, and loading into meta would do nothing
            initialise(module, torch.device("cpu"), Group(), loaded=set(state_dict))
        module.load_state_dict(state_dict, strict=strict)

    def restore(self, module: LightningModule) -> None:
        pass

    def abandon(self, module: LightningModule) -> None:
        pass


class ShardedParameters:
    """Stage 3: FSDP2.

    Args:
        policy, mixed_precision, reshard_after_forward: of `shard_parameters`.
        elementwise: of `DTensorOptimizer`.
    """

    loads_after_setup = True

    def __init__(
        self,
        policy: Policy,
        mixed_precision: MixedPrecisionPolicy | None,
        reshard_after_forward: bool | int | None,
        elementwise: bool | None,
    ) -> None:
        self._arguments: dict[str, Any] = {
            "policy": policy,
            "mixed_precision": mixed_precision,
            "reshard_after_forward": reshard_after_forward,
        }
        self._elementwise = elementwise
        self._callbacks: list[TakenOver] = []

    def check(self, trainer: Any) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, ModelPruning):
                raise MisconfigurationException(
                    f"{type(callback).__name__} masks whole parameters, and in stage 3 no rank has them: use stage 2, "
                    "which shards all but the parameters"
                )
        self._callbacks = take_over(trainer)
        for loop in (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ):
            loop.inference_mode = False  # FSDP2's views of gathered parameters may not be made in it

    def prepare(self, module: LightningModule, group: Group, device: torch.device) -> None:
        if sharding_of(module) is not None:  # an error had ended the last fit
            self._unshard(module)
        for callback in self._callbacks:
            callback.before_sharding(module)
        arguments = dict(self._arguments)
        if not module.automatic_optimization and arguments["policy"] == "auto":
            arguments["policy"] = "children"  # in case there are several backwards in a step
        shard_parameters(module, group, **arguments)
        for callback in self._callbacks:
            callback.after_sharding(module)
        for name in _STEPS:  # the module is the root, and Lightning calls these and not its forward
            register_fsdp_forward_method(module, name)
            if name != "training_step":  # no backward follows, and hooks are to find shards
                setattr(module, name, _resharding_after(getattr(module, name), module))

    def shard(self, optimizer: Optimizer, module: LightningModule, group: Group) -> Optimizer:
        if not optimizer.param_groups:
            return optimizer
        if not module.automatic_optimization and isinstance(module.optimizers(), list):
            _check_that_blocks_have_all(module)
        return DTensorOptimizer(optimizer, module, elementwise=self._elementwise)

    def state_dict(self, module: LightningModule) -> dict[str, Any]:
        return module_full_state_dict(module) if sharding_of(module) is not None else module.state_dict()

    def load_state_dict(self, module: LightningModule, state_dict: Mapping[str, Any], strict: bool) -> None:
        load_module_full_state_dict(module, state_dict, strict)

    def restore(self, module: LightningModule) -> None:
        for callback in self._callbacks:
            callback.release()
        self._unshard(module)

    def _unshard(self, module: LightningModule) -> None:
        unshard_parameters(module)
        for name in _STEPS:
            module.__dict__.pop(name, None)  # what register_fsdp_forward_method has put there

    def abandon(self, module: LightningModule) -> None:
        for callback in self._callbacks:
            callback.abandon()
        interrupt(module)  # the error may have come where a block was whole
        module.zero_grad()  # and where some gradients were shards and others not


def _resharding_after(step: Callable[..., Any], module: LightningModule) -> Callable[..., Any]:
    @wraps(step)
    def stepping(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        reshard(module)
        return result

    return stepping


def _check_that_blocks_have_all(module: LightningModule) -> None:
    """Raise if several backwards in one training_step cannot work.

    The root is gathered as its training_step begins and freed in the first backward, while a block is gathered in each
    of its forwards. That one sees, on CUDA, what an optimizer has just stepped: with the end of a backward FSDP2's
    "forward of the root" is over, so the next block that runs forward begins a new one, and its streams of gathers wait
    for the stream that the step ran on.
    """
    params = {each.sharded_param for group in param_groups_of(module, recurse=False) for each in group.fsdp_params}
    if names := [name for name, param in module.named_parameters() if param in params]:
        raise MisconfigurationException(
            "several optimizers in manual optimization mean several backwards in a step, and in stage 3 parameters "
            f"that no block has are whole for one only; here those are {', '.join(names[:5])}"
            f"{' and others' if len(names) > 5 else ''}: put them into a child module of their own (not shared by "
            "two), let the policy match it, or use stage 2, which shards all but the parameters"
        )
