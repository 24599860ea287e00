"""A pipe in Lightning's Trainer: one `nn.Sequential` of an ordinary LightningModule, its layers on several ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import LBFGS, Optimizer

from lightning_distkit.core.collectives import Group, PeerError, says_that_a_peer_is_lost, what_happened
from lightning_distkit.core.compression import HOOKS
from lightning_distkit.core.compression.hook import check_hook
from lightning_distkit.core.ledger import Ledger
from lightning_distkit.core.pipeline.assembly import check_arguments
from lightning_distkit.core.pipeline.dist import DistributedPipe
from lightning_distkit.core.pipeline.grid import Grid
from lightning_distkit.core.pipeline.lost import RollCall
from lightning_distkit.core.pipeline.merged_state import merged, own_optimizer_state
from lightning_distkit.core.pipeline.shared_batch import SharedBatches
from lightning_distkit.core.pipeline.sizes import check_size, resolved_sizes
from lightning_distkit.core.pipeline.stage_norm import StageGradScaler, clip_grad_norm_, grad_norm
from lightning_distkit.core.pipeline.starting_values import is_whole
from lightning_distkit.core.pipeline.within import PipeWithin, find_sequential
from lightning_distkit.strategies import WRONG_MIRROR
from lightning_distkit.strategies.checkpoint_file import load_mapped
from lightning_distkit.strategies.pipeline_folder import is_folder, load_folder, save_folder
from lightning_distkit.strategies.pipeline_steps import MicroSteps
from lightning_distkit.strategies.pipeline_trainer import average_models, check_trainer, sync_metrics

Size = int | Literal["auto"]


class PipeStrategy(DDPStrategy):
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
        outputs: "all", as every rank computes the loss.
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
        check_arguments(chunks, checkpoint, schedule, n_stages_per_rank, "all")
        _check_outputs(outputs)
        check_size("pipeline_parallel_size", pipeline_parallel_size)
        check_size("data_parallel_size", data_parallel_size)
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
        self._pipe_arguments: dict[str, Any] = {
            "chunks": chunks,
            "checkpoint": checkpoint,
            "deferred_batch_norm": deferred_batch_norm,
            "schedule": schedule,
            "n_stages_per_rank": n_stages_per_rank,
            "outputs": outputs,
        }
        self._balance = balance
        self._path = module
        self._sizes = (data_parallel_size, pipeline_parallel_size)
        self._make_hook = _hook_maker(data_parallel_hook, data_parallel_hook_arguments or {})
        self._share_batches = share_batches
        self._sync_replicated = sync_replicated
        self._saves_folders = save_distributed_checkpoint
        self._has_failed = False
        self._grid: Grid | None = None  # and what is in it
        self._mesh: DeviceMesh | None = None
        self._world: dist.ProcessGroup | None = None  # that the groups below are parts of
        self._everyone: Group | None = None  # these two for messages on the CPU
        self._control: Group | None = None
        self._stages: Group | None = None
        self._part: PipeWithin | None = None
        self._batches: SharedBatches | None = None
        self._roll_call: RollCall | None = None
        self._steps: MicroSteps | None = None
        self._restore_metrics: Callable[[], None] | None = None
        self._is_accumulating = False
        self._is_in_parts = False  # and stays so
        self.comm_state: Any = None  # of the data_parallel_hook, in the fit under way or the last one

    # -- the ranks

    @property
    def data_parallel_size(self) -> int:
        """The number of pipes, each of which has batches of its own."""
        return self._resolved_sizes()[0]

    @property
    def pipeline_parallel_size(self) -> int:
        """The number of ranks of a pipe."""
        return self._resolved_sizes()[1]

    def _resolved_sizes(self) -> tuple[int, int]:
        return resolved_sizes(*self._sizes, self.num_nodes * self.num_processes)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        data, pipeline = self._resolved_sizes()
        return {"num_replicas": data, "rank": self.global_rank // pipeline}

    def setup_environment(self) -> None:
        sizes = self._resolved_sizes()
        super().setup_environment()
        if self._world is dist.group.WORLD:  # a second fit
            return
        self._world = dist.group.WORLD
        self._grid = Grid.of(sizes, self.root_device, self._timeout)
        self._mesh, self._everyone = self._grid.mesh, self._grid.everyone
        self._stages, self._control = self._grid.stages, self._grid.control

    @property
    def _data_group(self) -> dist.ProcessGroup:
        assert self._mesh is not None
        group: dist.ProcessGroup = self._mesh.get_group("data")
        return group

    # -- setting up

    @property
    def pipe(self) -> DistributedPipe | None:
        """The pipe, while there is one."""
        return self._part.pipe if self._part is not None else None

    @property
    def ledger(self) -> Ledger | None:
        """What this rank sent to other stages in the fit under way; None outside of one."""
        return self._part.pipe.ledger if self._part is not None else None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        # The parts of a folder are read when it is known which are needed.
        return self._saves_folders or (self.lightning_module is not None and not is_whole(self.lightning_module))

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
        self._put_pipe_into(module)
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
        self._roll_call = RollCall(self._control)
        batches = SharedBatches(self._stages, self._control, self.root_device)
        batches.share(None)  # layers around the pipe draw the same numbers from here on
        self._batches = batches if self._share_batches else None
        if is_fitting and self._pipe_arguments["schedule"] != "gpipe":
            assert self._part is not None
            self._steps = MicroSteps(module, self._part, self._stages, self._control, self.root_device)

    def _apply_layer_sync(self, is_fitting: bool) -> None:
        if not is_fitting or not self._layer_sync or self.data_parallel_size == 1:
            return
        assert self.model is not None
        self.model = self._layer_sync.apply(self.model)
        for each in self.model.modules():
            if isinstance(each, nn.SyncBatchNorm):
                each.process_group = self._data_group

    def _put_pipe_into(self, module: LightningModule) -> None:
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
        if self._make_hook is not None:
            state, hook = self._make_hook(self._data_group)
            self.comm_state = state
            self._part.pipe.register_comm_hook(state, hook)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if isinstance(optimizer, LBFGS):
                raise ValueError(
                    "LBFGS needs all parameters at once, and a stage has its own alone; use another optimizer, as AdamW"
                )

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
        batch = super().batch_to_device(batch, device, dataloader_idx)
        return self._batches.share(batch) if self._batches is not None else batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._steps is None or self.lightning_module is None or not self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        scaler = getattr(self.precision_plugin, "scaler", None)
        with self.precision_plugin.train_step_context():
            return self._steps.run(args, scaler.get_scale() if scaler is not None else 1.0)

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
        syncs = self._sync_replicated
        if syncs is None:
            syncs = self.root_device.type != "cpu" and not torch.are_deterministic_algorithms_enabled()
        if not syncs or self._is_accumulating or self._part is None:
            return
        assert self._stages is not None
        for parameter in self._part.outside():
            if parameter.grad is not None:
                self._stages.broadcast_(parameter.grad).wait()

    def over_stages(self, value: Any) -> list[Any]:
        """What every rank of this pipe gave, in their order: the same on each. Collective."""
        assert self._control is not None
        return self._control.everyones(value, torch.device("cpu"))

    def grad_norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients that ``optimizer`` has, over all stages: the same on every rank. Collective."""
        assert self._part is not None
        assert self._stages is not None
        parameters = list(self.precision_plugin.main_params(optimizer))
        return grad_norm(parameters, self._part.counts, self._stages, self.root_device, norm_type)

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        parameters = list(self.precision_plugin.main_params(optimizer))
        clip_grad_norm_(parameters, clip_val, self.grad_norm(optimizer))

    # -- values over ranks: stages of one pipe have the same, so only the data replicas count

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if group is None and self._mesh is not None:
            if self.data_parallel_size == 1:
                return tensor
            group = self._data_group
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._mesh is None or group not in (None, dist.group.WORLD):  # which LightningModule names by default
            return super().all_gather(tensor, group, sync_grads)
        if sync_grads:
            return super().all_gather(tensor, self._data_group, sync_grads)
        gathered = [torch.empty_like(tensor) for _ in range(self.data_parallel_size)]
        dist.all_gather(gathered, tensor.detach().contiguous(), group=self._data_group)
        return torch.stack(gathered)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        if self._everyone is None:
            return decision
        total = torch.tensor(int(decision))
        self._everyone.all_reduce(total).wait()
        return bool(total == self._everyone.world_size) if all else bool(total)

    # -- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        state: dict[str, Any] = self.lightning_module.state_dict()
        if self._saves_folders:
            return state
        if self._part is not None:
            part = self._part
            state = self._merged(state, lambda path: part.owner(path[0]), adds_keys=False)
        elif not is_whole(self.lightning_module):  # after a fit, or an exception in one
            state = self._merged(state, adds_keys=False)
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = getattr(optimizer, "_optimizer", optimizer).state_dict()
        return state if self._saves_folders else self._merged(state)

    def _merged(self, nest: Any, owner: Any = None, adds_keys: bool = True) -> Any:
        """The whole on rank 0."""
        if self._control is None or not self._is_first_replica:
            return nest
        self._meet_after_an_exception()
        return merged(nest, self._control, owner, adds_keys)

    @property
    def _is_first_replica(self) -> bool:
        return self.global_rank < self.pipeline_parallel_size

    def _meet_after_an_exception(self) -> None:
        """As when OnExceptionCheckpoint saves: a rank may be alone with its exception."""
        if sys.exc_info()[1] is not None and self._control is not None:
            self._control.meet("saving a checkpoint after an exception", timedelta(seconds=30))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._saves_folders and self._control is not None:
            if self._is_first_replica:
                self._meet_after_an_exception()
                save_folder(checkpoint, Path(filepath), self._control)
            return
        if self._control is not None:  # what callbacks have put into it may be in parts
            checkpoint = self._merged(checkpoint, adds_keys=False)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if is_folder(checkpoint_path):
            return load_folder(Path(checkpoint_path), bool(weights_only), self._is_here)
        return load_mapped(
            checkpoint_path,
            weights_only,
            self.checkpoint_io,
            lambda: super(PipeStrategy, self).load_checkpoint(checkpoint_path, weights_only=weights_only),
        )

    def _is_here(self, name: str) -> bool:
        """Whether what has this name in a folder is needed on this rank."""
        if self._part is None:
            return True
        kind, rest = name.split(".", 1)
        if kind == "model":
            return self._part.owner(rest) in (None, self._part.pipe.rank)
        n, number, _ = rest.split(".", 2)
        if int(n) >= len(self.optimizers):
            return False
        parameters = [each for group in self.optimizers[int(n)].param_groups for each in group["params"]]
        return int(number) < len(parameters) and not parameters[int(number)].is_meta

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        own = [own_optimizer_state(*each) for each in zip(self.optimizers, states, strict=False)]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": own})

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
        part, self._part, self._roll_call = self._part, None, None
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


def _check_outputs(outputs: str) -> None:
    if outputs != "all":
        raise ValueError(f'outputs must be "all", as every rank computes the loss, got {outputs!r}')


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
