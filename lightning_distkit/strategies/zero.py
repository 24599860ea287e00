"""ZeRO in Lightning's Trainer: DDP's numbers, with optimizer state, gradients and parameters sharded over the ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from lightning_distkit.core.collectives import Group, says_that_a_peer_is_lost, what_happened
from lightning_distkit.core.ledger import Ledger
from lightning_distkit.core.zero import (
    DTensorOptimizer,
    GradScaler,
    ZeroOptimizer,
    is_sharded_checkpoint,
    module_sharded_state_dict,
    sharding_of,
    sync_buffers,
)
from lightning_distkit.core.zero.arguments import check_stage
from lightning_distkit.core.zero.checkpoint_folder import existing, replacing
from lightning_distkit.core.zero.policy import Policy
from lightning_distkit.strategies import WRONG_MIRROR
from lightning_distkit.strategies.checkpoint_file import load_mapped
from lightning_distkit.strategies.zero_checkpoints import ShardedCheckpoints, read, refuse_other_shapes
from lightning_distkit.strategies.zero_stages import ShardedParameters, Stage, WholeParameters, is_on_meta

core_logger = logging.getLogger("lightning_distkit.core.zero")


class ZeroStrategy(DDPStrategy):
    """Each rank keeps its shard of the optimizer's state (stage 1), of the gradients (2), of the parameters (3).

    ``Trainer(strategy="zero_stage_2")``. The module is used as it is, without a wrapper; losses and weights are those
    of plain ``ddp``. Checkpoints are ordinary ones: they open under any stage and number of ranks, under ``ddp`` and on
    one device, and theirs open here. Sharded ones open here, whether or not such are saved, under any stage and number
    of ranks; ``distkit convert`` makes ordinary ones of them.

    Args:
        stage: 1, 2 or 3.
        bucket_cap_mb: stages 1 and 2: MiB that travel together; 25 by default.
        elementwise: whether the optimizer may step slices of parameters; by default as its class says.
        policy: stage 3: which modules are gathered as one block; see `find_blocks`. "auto" by default.
        mixed_precision: stage 3: FSDP2's ``MixedPrecisionPolicy``; the Trainer's ``precision`` works without it.
        reshard_after_forward: stage 3: as in ``fully_shard``.
        save_distributed_checkpoint: each rank writes its part, and a checkpoint is a folder, which all must share.
        asynchronous_checkpoint: of those, training goes on as soon as each rank has copied its part to the CPU. There
            is one at a time; what goes wrong is raised at the next one, or at the end of the fit.
        process_group_backend, timeout, start_method, and those before: as in `DDPStrategy`.

    Raises:
        ValueError: another stage, or an argument that belongs to another.
    """

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 1,
        bucket_cap_mb: float | None = None,
        elementwise: bool | None = None,
        policy: Policy = "auto",
        mixed_precision: MixedPrecisionPolicy | None = None,
        reshard_after_forward: bool | None = None,
        save_distributed_checkpoint: bool = False,
        asynchronous_checkpoint: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        check_stage(
            stage,
            bucket_cap_mb=bucket_cap_mb,
            policy=policy,
            mixed_precision=mixed_precision,
            reshard_after_forward=reshard_after_forward,
            without="strategy='ddp'",
        )
        if asynchronous_checkpoint and not save_distributed_checkpoint:
            raise ValueError(
                "asynchronous_checkpoint needs save_distributed_checkpoint=True, as only then each rank has its part "
                "to itself; for whole checkpoints there is Lightning's AsyncCheckpointIO"
            )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.stage = stage
        self._stage: Stage = (
            ShardedParameters(policy, mixed_precision, reshard_after_forward, elementwise)
            if stage == 3
            else WholeParameters(stage == 2, bucket_cap_mb or 25, elementwise)
        )
        self._sharded = ShardedCheckpoints(asynchronous_checkpoint) if save_distributed_checkpoint else None
        self._group: Group | None = None
        self._has_failed = False

    @property
    def ledger(self) -> Ledger | None:
        """What this rank sent in the last fit; None before it."""
        return self._group.ledger if self._group is not None else None

    # -- setting up

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return self._stage.loads_after_setup

    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        self._has_failed = False
        if self._sharded is not None and type(self.checkpoint_io) is not TorchCheckpointIO:
            raise ValueError(
                f"save_distributed_checkpoint=True writes without a checkpoint_io, got {type(self.checkpoint_io)}: "
                "leave one of them out; asynchronous_checkpoint=True saves while training goes on"
            )
        self._stage.check(self.lightning_module.trainer)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            self.configure_ddp()

    def model_to_device(self) -> None:
        assert self.model is not None
        if not is_on_meta(self.model):  # else it is made where it belongs
            super().model_to_device()

    def configure_ddp(self) -> None:
        """In the place of DDP's wrapper there is none: the ranks start alike, and the optimizers do the rest."""
        assert self.lightning_module is not None
        self._group = Group(dist.group.WORLD)
        self._stage.prepare(self.lightning_module, self._group, self.root_device)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        sharded = {id(optimizer): self._shard(optimizer) for optimizer in self.optimizers}
        self.optimizers = list(sharded.values())
        for config in self.lr_scheduler_configs:
            config.scheduler.optimizer = sharded.get(id(config.scheduler.optimizer), config.scheduler.optimizer)

    def _shard(self, optimizer: Optimizer) -> Optimizer:
        assert self._group is not None
        assert self.lightning_module is not None
        sharded = self._stage.shard(optimizer, self.lightning_module, self._group)
        if sharded is optimizer:
            return optimizer
        if (chosen := getattr(sharded, "chosen", None)) is not None and not core_logger.isEnabledFor(logging.INFO):
            rank_zero_info(chosen)  # or else core's own line of it is seen
        # Monitors and logs know an optimizer by its class's name.
        sharded.__class__ = type(type(optimizer).__name__, (type(sharded),), {})
        return sharded

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        # On the instance, as a subclass would have another name, and so another key in checkpoints.
        plugin.clip_grad_by_norm = _clip_by_norm  # type: ignore[method-assign]
        plugin.clip_grad_by_value = _clip_by_value  # type: ignore[method-assign]
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            plugin.scaler.__class__ = GradScaler  # the same scaler, which now asks all ranks
        for optimizer in self.optimizers:
            if isinstance(optimizer, ZeroOptimizer):
                optimizer.is_unscaled_by_ours = True  # or Lightning would neither unscale nor clip

    # -- steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._sync_buffers()
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._sync_buffers()
        return super().validation_step(*args, **kwargs)

    def _sync_buffers(self) -> None:
        """As DDP does before every forward."""
        if self._group is not None and self.model is not None:
            sync_buffers(self.model, self._group)

    # -- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        if self._sharded is not None and sharding_of(self.lightning_module) is not None:
            return module_sharded_state_dict(self.lightning_module)
        return self._stage.state_dict(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        refuse_other_shapes(self.lightning_module, checkpoint["state_dict"])
        self._stage.load_state_dict(self.lightning_module, checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if self._sharded is not None and isinstance(optimizer, ZeroOptimizer | DTensorOptimizer):
            return optimizer.sharded_state_dict()
        return optimizer.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._sharded is None:
            path = Path(filepath)
            with replacing(path) if self.is_global_zero and is_sharded_checkpoint(path) else nullcontext():
                super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError("storage_options are for a CheckpointIO, without which sharded checkpoints are saved")
        assert self.lightning_module is not None
        # In stages 1 and 2, and after the fit, parameters are whole and alike on every rank: each writes a share.
        replicated = self.lightning_module.parameters()
        self._sharded.save(checkpoint, self.broadcast(str(filepath)), replicated, self._timeout)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self._sharded is None:
            super().remove_checkpoint(filepath)
        else:
            self._sharded.remove(partial(super().remove_checkpoint, filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(checkpoint_path)
        if self._sharded is not None:
            self._sharded.wait()
        if existing(path).is_dir():
            return read(path, bool(weights_only), self.root_device)
        return load_mapped(
            checkpoint_path,
            weights_only,
            self.checkpoint_io,
            lambda: super(ZeroStrategy, self).load_checkpoint(checkpoint_path, weights_only=weights_only),
        )

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._sharded is not None:
            self._sharded.is_training = True

    # -- the end

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._sharded is not None:
            self._sharded.finish(failed=False)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._has_failed = True  # so others may be anywhere, and nothing that needs them may follow
        # Often it is not our collective that meets the loss of a rank first, but one of Lightning's or a metric's.
        if isinstance(exception, RuntimeError) and says_that_a_peer_is_lost(exception):
            exception.args = (what_happened(exception, self.global_rank, self.world_size),)

    def teardown(self) -> None:
        if self._sharded is not None:
            self._sharded.finish(self._has_failed)
        for optimizer in self.optimizers:
            if isinstance(optimizer, ZeroOptimizer):
                optimizer.release()
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(self.precision_plugin).pop(name, None)
        if self.lightning_module is not None and self._group is not None:
            (self._stage.abandon if self._has_failed else self._stage.restore)(self.lightning_module)
        module = self.lightning_module
        if module is not None and is_on_meta(module):
            # It could not be made, and so it cannot be moved to the CPU: that error would hide the one that says why.
            self._lightning_module = None
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: our names are in `strategies.NAMES`. Inherited, this would register "ddp" a second time."""

    def __repr__(self) -> str:
        # What a Trainer of the mirror package prints as "invalid strategy name".
        return f"<{type(self).__name__}, stage={self.stage}. {WRONG_MIRROR}>"


def _clip_by_norm(optimizer: Any, clip_val: float) -> None:
    getattr(optimizer, "_optimizer", optimizer).clip_grad_norm_(clip_val)


def _clip_by_value(optimizer: Any, clip_val: float) -> None:
    getattr(optimizer, "_optimizer", optimizer).clip_grad_value_(clip_val)
