"""A pipe in Lightning's Trainer: one `nn.Sequential` of an ordinary LightningModule, its layers on several ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightning_distkit.core.collectives import Group, PeerError, says_that_a_peer_is_lost, what_happened
from lightning_distkit.core.compression import HOOKS, PowerSGDState
from lightning_distkit.core.compression.hook import check_hook
from lightning_distkit.core.ledger import Ledger
from lightning_distkit.core.pipeline.assembly import check_arguments, check_optimizer
from lightning_distkit.core.pipeline.dist import DistributedPipe
from lightning_distkit.core.pipeline.lost import RollCall
from lightning_distkit.core.pipeline.shared_batch import SharedBatches
from lightning_distkit.core.pipeline.stage_norm import StageGradScaler, clip_grad_norm_, grad_norm
from lightning_distkit.core.pipeline.within import find_sequential
from lightning_distkit.strategies import WRONG_MIRROR
from lightning_distkit.strategies.pipeline_checkpoints import PipeCheckpoints
from lightning_distkit.strategies.pipeline_last import LastStageSteps
from lightning_distkit.strategies.pipeline_ranks import Size
from lightning_distkit.strategies.pipeline_sigterm import Sigterm
from lightning_distkit.strategies.pipeline_steps import MicroSteps
from lightning_distkit.strategies.pipeline_trainer import average_models, check_trainer, sync_metrics


class PipeStrategy(PipeCheckpoints):
    """Trains an ordinary LightningModule whose layers are in stages, each on a rank. ``Trainer(strategy="pipe")``

    One `nn.Sequential` of the module becomes a `DistributedPipe`; the layers around it are on every rank, and alike.
    Every rank runs the module's steps as they are, sees the same batch (that of the first stage), gets the pipe's whole
    output, and logs the same values. Only its own stage has memory there: parameters of others are placeholders.

    Checkpoints are ordinary ones: they open with any number of stages, under ``ddp`` and on one device, and theirs open
    here. After a fit the module is whole again on every rank; if it was made on the meta device, it stays in parts.
    After an exception it stays in parts as well, and may be fitted again.

    Args:
        chunks, checkpoint, deferred_batch_norm, balance, n_stages_per_rank: as in `DistributedPipe`.
        schedule: "gpipe": a ``training_step`` runs on every rank with the pipe's output for the whole batch. "1f1b" and
            "interleaved_1f1b": in automatic optimization it runs once for each micro-batch, and fewer activations are
            held. It must then call the `nn.Sequential` once, and return a mean over the micro-batch; the batch's loss
            is the mean over its rows, or over what the module's ``micro_batch_weight(batch)`` counts. Attributes that
            it sets are set on the last stage.
        outputs: "last": in automatic optimization with "gpipe" the pipe's output is sent to nobody. ``training_step``
            ends on the last stage, and runs up to where it calls the pipe on the others, which get the loss and the
            values that were logged. It must call the `nn.Sequential` once. Elsewhere, and with "all", every rank has
            the output.
        module: path of the `nn.Sequential`; by default what the LightningModule's ``configure_pipeline()`` returns (the
            path, or the part), or else the only one.
        pipeline_parallel_size: number of stages; by default all ranks.
        data_parallel_size: number of such pipes, each with batches of its own; by default as many as ranks allow.
        data_parallel_hook: how gradients travel between these: a name in `lightning_distkit.core.compression.HOOKS`, or
            a function as for DDP's ``register_comm_hook``, or it with its state: ``(state, hook)``.
        data_parallel_hook_arguments: for the state of a hook that is named, as ``{"matrix_approximation_rank": 2}``.
        share_batches: whether the first stage's batch and random state are sent to the other stages. Without it the
            loaders of all stages must give the same batches, and steps must draw the same random numbers.
        sync_replicated: whether the gradients of layers around the pipe are made the first stage's on all stages. By
            default where kernels may add in any order: on CUDA, unless torch uses deterministic algorithms.
        save_distributed_checkpoint: write a folder, each rank its own part, in place of one file. Only this strategy
            reads it, with any number of stages.
        process_group_backend, timeout, start_method, and those before: as in `DDPStrategy`.

    Raises:
        ValueError, TypeError: an argument is not as above.
    """

    def __init__(
        self,
        chunks: int = 8,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        *,
        balance: str | Sequence[int] = "auto",
        schedule: str = "gpipe",
        n_stages_per_rank: int = 1,
        outputs: str = "all",
        module: str | None = None,
        pipeline_parallel_size: Size = "auto",
        data_parallel_size: Size = "auto",
        data_parallel_hook: Any = None,
        data_parallel_hook_arguments: dict[str, Any] | None = None,
        share_batches: bool = True,
        sync_replicated: bool | None = None,
        save_distributed_checkpoint: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        # Here and now, not in every process later.
        check_arguments(chunks, checkpoint, schedule, n_stages_per_rank, outputs)
        super().__init__(
            data_parallel_size=data_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            hook_arguments=_all_arguments(data_parallel_hook, data_parallel_hook_arguments or {}),
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._pipe_arguments: dict[str, Any] = {
            "chunks": chunks,
            "checkpoint": checkpoint,
            "deferred_batch_norm": deferred_batch_norm,
            "schedule": schedule,
            "n_stages_per_rank": n_stages_per_rank,
        }
        self._on_last = outputs == "last" and schedule == "gpipe"  # with others the loss is taken there anyway
        self._balance = balance
        self._path = module
        self._make_hook = _hook_maker(data_parallel_hook, data_parallel_hook_arguments or {})
        self._share_batches = share_batches
        self._sync_replicated = sync_replicated
        self._has_failed = False
        self._batches: SharedBatches | None = None
        self._roll_call: RollCall | None = None
        self._sigterm: Sigterm | None = None
        self._steps: MicroSteps | None = None
        self._restore_metrics: Callable[[], None] | None = None
        self._is_accumulating = False
        self._is_in_parts = False  # and stays so

    # -- setting up

    @property
    def pipe(self) -> DistributedPipe | None:
        """The pipe, while there is one."""
        return self._part.pipe if self._part is not None else None

    @property
    def ledger(self) -> Ledger | None:
        """What this rank sent to other stages in the fit under way; None outside of one."""
        return self._part.pipe.ledger if self._part is not None else None

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None
        self._has_failed = False
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        module = self.lightning_module
        assert module is not None
        check_trainer(trainer, module)
        # Lightning would shuffle by a sampler of its own, for one replica too.
        connector = trainer._accelerator_connector
        connector.use_distributed_sampler = connector.use_distributed_sampler and self.data_parallel_size > 1
        self._apply_layer_sync(is_fitting)
        self.precision_plugin.convert_module(module)
        self._put_pipe_into(module, is_fitting)
        for copied in average_models(trainer.callbacks):
            assert self._part is not None
            self._part.empty_copy(copied)
        self.model_to_device()
        self._restore_metrics = sync_metrics(module, self._data_group)
        if is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
        assert self._stages is not None
        assert self._control is not None
        self._sigterm = Sigterm(trainer, self._control, Group(self._data_group), self.root_device)
        self._roll_call = RollCall(self._control)
        batches = SharedBatches(self._stages, self._control, self.root_device)
        batches.share(None)  # layers around the pipe draw the same numbers from here on
        self._batches = batches if self._share_batches else None
        if is_fitting and (self._pipe_arguments["schedule"] != "gpipe" or self._on_last):
            assert self._part is not None
            kind = LastStageSteps if self._on_last else MicroSteps
            self._steps = kind(module, self._part, self._stages, self._control, self.root_device)

    def _apply_layer_sync(self, is_fitting: bool) -> None:
        if not is_fitting or not self._layer_sync or self.data_parallel_size == 1:
            return
        assert self.model is not None
        self.model = self._layer_sync.apply(self.model)
        for each in self.model.modules():
            if isinstance(each, nn.SyncBatchNorm):
                each.process_group = self._data_group

    def _put_pipe_into(self, module: LightningModule, is_fitting: bool) -> None:
        assert self._grid is not None
        given = self._path
        if given is None and callable(configure := getattr(module, "configure_pipeline", None)):
            given = configure()
        path, _ = find_sequential(module, given)
        tensors = (*module.parameters(), *module.buffers())
        self._is_in_parts = any(each.is_meta and getattr(each, "never_here", True) for each in tensors)
        self._part = self._grid.put_pipe_into(
            module, path, self._balance, self.root_device, timeout=self._timeout, **self._pipe_arguments
        )
        # Where the loss is taken on the last stage alone, that has these gradients, and gives them to the others.
        self._averages_outside = not self._on_last or self._part.pipe.is_last or not module.automatic_optimization
        if not self._averages_outside:
            self._part.pipe.also_average(())
        if is_fitting and self._make_hook is not None:  # what the last fit has left stays, for a checkpoint
            state, hook = self._make_hook(self._data_group)
            self.comm_state, self._fitted = state, module
            self._part.register_comm_hook(state, hook)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            check_optimizer(optimizer)

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        assert self._stages is not None
        # On the instance, as a subclass would have another name, and so another key in checkpoints.
        plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            StageGradScaler.take_over(plugin.scaler, self._stages, self.root_device)

    # -- steps

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._sigterm is not None:
            self._sigterm.before_batch()
        batch = super().batch_to_device(batch, device, dataloader_idx)
        return self._batches.share(batch) if self._batches is not None else batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._steps is None or not self._automatic:
            return super().training_step(*args, **kwargs)
        scaler = getattr(self.precision_plugin, "scaler", None)
        with self.precision_plugin.train_step_context():
            return self._steps.run(args, scaler.get_scale() if scaler is not None else 1.0)

    @property
    def _automatic(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.automatic_optimization

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        assert self._part is not None
        self._is_accumulating = True
        try:
            with self._part.pipe.no_sync():
                yield
        finally:
            self._is_accumulating = False

    def pre_backward(self, closure_loss: Tensor) -> None:
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None and hasattr(self.comm_state, "gradient_scale"):
            self.comm_state.gradient_scale = scaler.get_scale()

    def post_backward(self, closure_loss: Tensor) -> None:
        if isinstance(self._steps, LastStageSteps) and self._automatic:
            if not self._is_accumulating:
                self._steps.share_gradients()
            return
        if not self._is_accumulating and self._part is not None:
            assert self._stages is not None
            self._part.sync_outside(self._stages, self._sync_replicated)

    def grad_norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients that ``optimizer`` has, over all stages: the same on every rank. Collective."""
        assert self._part is not None
        assert self._stages is not None
        parameters = list(self.precision_plugin.main_params(optimizer))
        return grad_norm(parameters, self._part.counts, self._stages, self.root_device, norm_type)

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        parameters = list(self.precision_plugin.main_params(optimizer))
        clip_grad_norm_(parameters, clip_val, self.grad_norm(optimizer))

    # -- the end

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._has_failed = True  # so others may be anywhere, and nothing that needs them may follow
        # Often it is not the pipe that meets the loss of a rank first, but one of Lightning's collectives.
        if isinstance(exception, PeerError):
            exception.args = (f"{self._who_is_lost()}{exception}",)
        elif isinstance(exception, RuntimeError) and says_that_a_peer_is_lost(exception):
            said = what_happened(exception, self.global_rank, self.world_size)
            exception.args = (f"{self._who_is_lost()}{said}",)

    def _who_is_lost(self) -> str:
        """Names the stages of this pipe whose processes are gone, if any is; for an error."""
        if self._roll_call is None:
            return ""
        first = self.global_rank - self.global_rank % self.pipeline_parallel_size
        gone = self._roll_call.missing()
        named = ", ".join(f"stage {each} (rank {first + each})" for each in gone)
        return f"{named} {'is' if len(gone) == 1 else 'are'} gone. " if gone else ""

    def teardown(self) -> None:
        plugin = self.precision_plugin
        vars(plugin).pop("clip_grad_by_norm", None)
        if isinstance(scaler := getattr(plugin, "scaler", None), StageGradScaler):
            scaler.hand_back()
        if self._restore_metrics is not None:
            self._restore_metrics()
        if self._roll_call is not None:
            self._roll_call.close()
        if self._sigterm is not None:
            self._sigterm.restore()
        part, self._part, self._roll_call, self._sigterm = self._part, None, None, None
        self._batches, self._steps, self._restore_metrics = None, None, None
        if part is not None and (self._has_failed or self._control is None):
            part.abandon()
        elif part is not None:
            assert self._control is not None
            _optimizers_to_device(self.optimizers, torch.device("cpu"))  # before the module is whole again
            # One that was made on meta is too large for a rank; but a launcher that forks takes rank 0's with it.
            of_all = range(self._control.world_size)
            part.restore(self._control, of_all if not self._is_in_parts else of_all[: self._start_method != "popen"])
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: our names are in `strategies.NAMES`. Inherited, this would register "ddp" a second time."""

    def __repr__(self) -> str:
        # What a Trainer of the mirror package prints as "invalid strategy name".
        return f"<{type(self).__name__}, {self._pipe_arguments['schedule']}. {WRONG_MIRROR}>"


def _all_arguments(hook: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Of a named compressor that remembers something, with its defaults: as the strategy "powersgd" saves them."""
    if not isinstance(hook, str) or getattr(HOOKS.get(hook), "make_state", None) is not PowerSGDState:
        return {}
    takes = inspect.signature(PowerSGDState).parameters.values()
    defaults = {each.name: each.default for each in takes if each.default is not each.empty}
    return {"hook": hook, **defaults, **arguments}


def _hook_maker(hook: Any, arguments: dict[str, Any]) -> Callable[[dist.ProcessGroup], tuple[Any, Any]] | None:
    if hook is None:
        return None
    if isinstance(hook, str):
        if hook not in HOOKS:
            raise ValueError(f"data_parallel_hook must be one of {', '.join(HOOKS)}, or a function, got {hook!r}")
        HOOKS[hook](None, **arguments)  # a wrong argument raises here
        return lambda group: HOOKS[hook](group, **arguments)
    if arguments:
        raise ValueError("data_parallel_hook_arguments are for a hook that is named; give its state: (state, hook)")
    state, function = hook if isinstance(hook, tuple) else (None, hook)
    check_hook(function)
    return lambda group: (state if state is not None else group, function)
