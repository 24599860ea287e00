"""ZeRO in Accelerate: no wrapper around the model; the optimizer that `prepare` returns reduces, clips and saves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakIdKeyDictionary

from accelerate_plugins.methods import PluginMethods, listed
from accelerate_plugins.model_files import read_model, with_tied
from accelerate_plugins.zero import ZeroPlugin
from lightning_distkit.core.ledger import Ledger
from lightning_distkit.core.zero import (
    DTensorOptimizer,
    GradScaler,
    ZeroOptimizer,
    check_initialisable,
    clip_grad_norm_,
    clip_grad_value_,
    initialise,
    load_module_full_state_dict,
    module_full_state_dict,
    shard_gradients,
    shard_parameters,
    sharding_of,
    sync_buffers,
    sync_module_states,
)

Sharded = ZeroOptimizer | DTensorOptimizer


class ZeroMethods(PluginMethods):
    """What `ZeroPlugin` changes in stages 1 and 2, where parameters stay whole."""

    plugin: ZeroPlugin

    def adopt(self, plugin: Any) -> None:
        super().adopt(plugin)
        self._sharded: list[tuple[Optimizer, Sharded]] = []  # what the user has made, and what is in its place
        self._ended: WeakSet[Optimizer] = WeakSet()  # sharded ones that `free_memory` has released

    @property
    def ledger(self) -> Ledger:
        """What this rank sent."""
        return self.group.ledger

    # -- preparing

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if getattr(model, "_is_accelerate_prepared", False) or evaluation_mode:
            return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[no-any-return]
        self.refuse_comm_hook()
        return self._shard_model(model, device_placement)

    def _shard_model(self, model: nn.Module, device_placement: bool | None) -> nn.Module:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.group.agree("the model", {n: f"{tuple(each.shape)}, {each.dtype}" for n, each in tensors}, self.device)
        if any(each.is_meta for _, each in tensors):
            check_initialisable(model)
            initialise(model, self.device, self.group, loaded=None)
        # All that Accelerate does but for DDP's wrapper: place, mixed precision, compile.
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        sync_module_states(model, self.group)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        if getattr(optimizer, "_is_accelerate_prepared", False):
            self._take_up(optimizer)
            return super().prepare_optimizer(optimizer, device_placement)
        if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
            raise TypeError(
                f"ZeRO cannot shard {type(optimizer).__name__}: its train() and eval() change whole parameters; use "
                "another optimizer, or plain DDP"
            )
        sharded = self._shard(optimizer)
        sharded.register_step_post_hook(lambda *_: self._sync_buffers(sharded))
        self._sharded.append((optimizer, sharded))
        if isinstance(self.scaler, torch.amp.GradScaler):
            self.scaler.__class__ = GradScaler  # the same scaler, which now asks all ranks
        # Its state is placed already, and to say it would take all ranks.
        return super().prepare_optimizer(sharded, device_placement=False)

    def _take_up(self, prepared: Any) -> None:
        """It may have been prepared before `free_memory`, as a Trainer's is in its second fit: go on with its state."""
        sharded = getattr(prepared, "optimizer", None)
        if isinstance(sharded, Sharded) and sharded in self._ended:
            self._ended.discard(sharded)
            if isinstance(sharded, ZeroOptimizer) and self.plugin.stage == 2:
                shard_gradients(sharded)
            self._sharded.append((prepared, sharded))

    def _shard(self, optimizer: Optimizer) -> Sharded:
        given = {"bucket_cap_mb": self.plugin.bucket_cap_mb, "elementwise": self.plugin.elementwise}
        arguments: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        sharded = ZeroOptimizer(optimizer, group=self.group, **arguments)
        return shard_gradients(sharded) if self.plugin.stage == 2 else sharded

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        for users, sharded in self._sharded:
            if getattr(scheduler, "optimizer", None) is users:
                scheduler.optimizer = sharded  # or it would wait for the steps of all optimizers
        return super().prepare_scheduler(scheduler)

    def _sync_buffers(self, optimizer: Sharded) -> None:
        """After each step rank 0's buffers are everybody's, as after DDP's next forward.

        Not in the forward, as the model has no wrapper: one rank may evaluate it alone.
        """
        if self.ddp_handler is None or self.ddp_handler.broadcast_buffers:
            for model in self._models:
                if _share(model, optimizer):
                    sync_buffers(model, self.group)

    def free_memory(self, *objects: Any) -> Any:
        for _, sharded in self._sharded:
            if isinstance(sharded, ZeroOptimizer):
                sharded.release()
            self._ended.add(sharded)
        self._sharded.clear()
        return super().free_memory(*objects)

    # -- training

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for _, sharded in self._sharded:
                if _share(model, sharded):
                    stack.enter_context(sharded.no_sync())
            yield

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        optimizers = self._to_clip()
        if not optimizers:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[no-any-return]
        return clip_grad_norm_(optimizers, listed(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        optimizers = self._to_clip()
        if optimizers:
            clip_grad_value_(optimizers, listed(parameters), clip_value)
        else:
            super().clip_grad_value_(parameters, clip_value)

    def _to_clip(self) -> list[Sharded]:
        if not self.sync_gradients:
            raise RuntimeError(
                "clip where accelerator.sync_gradients is True: here gradients are still being accumulated, each "
                "rank's own, and ZeRO clips what all ranks have summed"
            )
        self.unscale_gradients()
        return [sharded for _, sharded in self._sharded]

    # -- checkpoints

    def has_part_of(self, model: nn.Module) -> bool:
        return sharding_of(model) is not None

    def load_whole(self, model: nn.Module, state: dict[str, Any], strict: bool = True) -> None:
        load_module_full_state_dict(model, with_tied(state, model), strict)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        self.refuse_saving_on_each_node()
        return super().save_state(output_dir, safe_serialization, **kwargs)

    def load_own_state(self, models: list[nn.Module], input_dir: str) -> None:
        for number, model in enumerate(models):
            module = self.unwrap_model(model, keep_torch_compile=False)
            self.load_whole(module, read_model(Path(input_dir), number))
        # Accelerate would load whole tensors into shards, or refuse to load into parameters that share a bucket.
        models.clear()

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """On each machine's main process copies on the CPU; on the others the tensors themselves."""
        state: dict[str, Any] = super().get_state_dict(model, unwrap)
        return _apart(state) if self.is_local_main_process else state

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        super().save(_apart(obj) if safe_serialization and isinstance(obj, dict) else obj, f, safe_serialization)


class ShardedParametersMethods(ZeroMethods):
    """What `ZeroPlugin` changes in stage 3, where no rank has whole parameters."""

    def adopt(self, plugin: Any) -> None:
        super().adopt(plugin)
        self._replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter as the user made it -> its shard

    def _shard_model(self, model: nn.Module, device_placement: bool | None) -> nn.Module:
        before = dict(model.named_parameters(remove_duplicate=False))
        is_placed = self.device_placement if device_placement is None else device_placement
        if is_placed and not any(each.is_meta for each in before.values()):
            model.to(self.device)
        shard_parameters(
            model,
            self.group,
            policy=self.plugin.policy,
            mixed_precision=self.plugin.mixed_precision,  # type: ignore[arg-type]  # made of a mapping by then
            reshard_after_forward=self.plugin.reshard_after_forward,
        )
        after = dict(model.named_parameters(remove_duplicate=False))
        for name, param in before.items():
            self._replaced[param] = after[name]
        model.register_forward_pre_hook(_refuse_inference_mode, prepend=True)
        prepared: nn.Module = PluginMethods.prepare_model(self, model, device_placement=False, evaluation_mode=True)
        return prepared

    def _shard(self, optimizer: Optimizer) -> Sharded:
        state = optimizer.state_dict() if optimizer.state else None
        for param_group in optimizer.param_groups:
            param_group["params"] = [self._replaced.get(param, param) for param in param_group["params"]]
        optimizer.state.clear()
        sharded = DTensorOptimizer(optimizer, self._module_of(optimizer), elementwise=self.plugin.elementwise)
        if state is not None:
            sharded.load_state_dict(state)
        return sharded

    def _module_of(self, optimizer: Optimizer) -> nn.Module:
        first = next((param for param_group in optimizer.param_groups for param in param_group["params"]), None)
        for model in self._models:
            module: nn.Module = self.unwrap_model(model, keep_torch_compile=False)
            if any(param is first for param in module.parameters()):
                return module
        raise ValueError(
            "stage 3 shards the optimizer's parameters with their model, but the model has not been prepared: call "
            "prepare(model, optimizer), or prepare the model first"
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """On rank 0 the whole one, on the CPU; an empty one on the others. Collective."""
        # Accelerate takes out what is tied, as safetensors needs it, of an OrderedDict only.
        return OrderedDict(module_full_state_dict(self.unwrap_model(model, keep_torch_compile=False)))


def _apart(state: dict[str, Any]) -> dict[str, Any]:
    """The same on the CPU, each tensor in memory of its own.

    Parameters that are views of one bucket would be taken for one another by whoever writes safetensors.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}
    result: OrderedDict[str, Any] = OrderedDict()
    for name, value in state.items():
        if isinstance(value, Tensor):
            # Tied ones stay so.
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype, "" if value.numel() else name)
            if key not in copies:
                copies[key] = value.detach().to("cpu", copy=True)
            result[name] = copies[key]
        else:
            result[name] = value
    if hasattr(state, "_metadata"):  # the modules' versions
        result._metadata = state._metadata  # type: ignore[attr-defined]
    return result


def _share(model: nn.Module, optimizer: Sharded) -> bool:
    """Whether the optimizer steps any parameter of the model."""
    own = {param for param_group in optimizer.param_groups for param in param_group["params"]}
    return any(param in own for param in model.parameters())


def _refuse_inference_mode(module: nn.Module, args: Any) -> None:
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "in stage 3 the forward gathers parameters, which torch.inference_mode() does not allow: use "
            "torch.no_grad()"
        )
