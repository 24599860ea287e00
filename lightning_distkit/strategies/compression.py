"""DDP with a communication hook: any hook, and PowerSGD with its state in the checkpoint."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_distkit.core.collectives import says_that_a_peer_is_lost, what_happened
from lightning_distkit.core.compression import HOOKS, CommState, PowerSGDState, attach, gathered, redistributed
from lightning_distkit.core.compression.hook import Hook, check_hook
from lightning_distkit.core.compression.matrix_rank import MatrixRank, is_by_name
from lightning_distkit.core.ledger import Ledger
from lightning_distkit.strategies import WRONG_MIRROR

CHECKPOINT_KEY = "PowerSGDDDPStrategy"
_REPLACED = {"ddp_comm_hook": "hook", "ddp_comm_state": "state", "ddp_comm_wrapper": "hook=wrapper(hook)"}


class CommHookDDPStrategy(DDPStrategy):
    """`DDPStrategy` with a communication hook that is really attached, on every type of device.

    Args:
        hook: a name in `lightning_distkit.core.compression.HOOKS`, an import path, or a function
            ``hook(state, bucket) -> Future[Tensor]`` as DDP's ``register_comm_hook`` takes it.
        state: the hook's first argument; by default what a named hook needs.
        ddp_kwargs: all that `DDPStrategy` and ``DistributedDataParallel`` take.

    Raises:
        ValueError: no hook has that name.
        TypeError: nobody takes one of the keywords.
    """

    def __init__(
        self,
        hook: str | Callable[[Any, GradBucket], Future[Tensor]] = "allreduce",
        state: Any = None,
        **ddp_kwargs: Any,
    ) -> None:
        self._refuse_unknown(ddp_kwargs)
        super().__init__(**ddp_kwargs)
        self._hook_name = hook
        self._hook, self._make_state = _hook_and_state(hook, state)
        self.comm_state: Any = None

    @property
    def ledger(self) -> Ledger | None:
        """What this rank sent and waited for in the last fit; None before it, or if the hook is not one of ours."""
        return self.comm_state.ledger if isinstance(self.comm_state, CommState) else None

    def configure_ddp(self) -> None:
        # Not by ddp_comm_hook=: Lightning registers that one on CUDA only, and drops it silently elsewhere.
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self.comm_state = self._make_state(self.model.process_group)
        attach(self.model, self.comm_state, self._hook)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        # Often it is not our collective that meets the loss of a rank first, but one of Lightning's or a metric's.
        if isinstance(exception, RuntimeError) and says_that_a_peer_is_lost(exception):
            exception.args = (what_happened(exception, self.global_rank, self.world_size),)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: our names are in `strategies.NAMES`. Inherited, this would register "ddp" a second time."""

    @classmethod
    def _refuse_unknown(cls, keywords: Mapping[str, Any]) -> None:
        """DDP would notice a wrong keyword too, but only after all processes were started."""
        for name, instead in _REPLACED.items():
            if keywords.get(name) is not None:  # LightningCLI hands over every default
                raise TypeError(f"{cls.__name__} takes {instead} in place of {name}")
        known = {
            name
            for takes in (DDPStrategy.__init__, DistributedDataParallel.__init__, cls.__init__)
            for name in inspect.signature(takes).parameters
        } - {"self", "module", "kwargs", "ddp_kwargs"}
        for name in keywords.keys() - known:
            meant = "".join(f"; did you mean {match}?" for match in get_close_matches(name, known, 1))
            own = [each for each in inspect.signature(cls.__init__).parameters if each in known]
            raise TypeError(
                f"{cls.__name__} takes no {name!r}{meant or '; '} It takes {', '.join(own)} and what DDPStrategy and "
                "DistributedDataParallel take"
            )

    def __repr__(self) -> str:
        # What a Trainer of the mirror package prints as "invalid strategy name".
        return f"<{type(self).__name__}, hook={self._hook_name!r}. {WRONG_MIRROR}>"


class PowerSGDDDPStrategy(CommHookDDPStrategy):
    """`DDPStrategy` whose gradients travel as factors of low rank. ``Trainer(strategy="powersgd")``

    All but ``hook`` and ``ddp_kwargs`` are the arguments of `PowerSGDState`, where they are explained.

    Checkpoints open under plain ``ddp`` and on one device, and theirs open here. Beside the usual they have, under
    "PowerSGDDDPStrategy", what the compressor remembers, each rank's own error included: that is one copy of the
    compressed gradients for each rank. A resumed run continues as if it had not been interrupted, to the last bit where
    plain DDP does (two ranks; with "batched_powersgd" not quite, as DDP's first buckets are others); with another
    number of ranks the errors are shared out anew, their sum kept.

    Args:
        hook: "powersgd"; "acp_sgd", which sends the two factors in turn: half the bytes and one message a step;
            "batched_powersgd": one matrix for each bucket, much less accurate.
        ddp_kwargs: all that `DDPStrategy` and ``DistributedDataParallel`` take. ``gradient_as_bucket_view`` is on
            unless it is given: the gradients then lie in DDP's buckets, which saves a copy of them in every step, and
            in memory what the error feedback takes.
    """

    def __init__(
        self,
        matrix_approximation_rank: MatrixRank = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        wire_dtype: torch.dtype | str | None = None,
        hook: Literal["powersgd", "batched_powersgd", "acp_sgd"] = "powersgd",
        **ddp_kwargs: Any,
    ) -> None:
        if hook not in ("powersgd", "batched_powersgd", "acp_sgd"):
            raise ValueError(
                f'hook must be "powersgd", "batched_powersgd" or "acp_sgd", got {hook!r}; the others are for '
                "CommHookDDPStrategy"
            )
        if hook == "batched_powersgd" and is_by_name(matrix_approximation_rank):
            raise ValueError(
                "batched_powersgd compresses whole buckets, so its matrix_approximation_rank must not depend on names, "
                f"got {matrix_approximation_rank!r}"
            )
        ddp_kwargs.setdefault("gradient_as_bucket_view", True)
        super().__init__(hook, **ddp_kwargs)  # as it stands, or jsonargparse does not find what DDP takes
        arguments: dict[str, Any] = {
            "matrix_approximation_rank": matrix_approximation_rank,
            "start_powerSGD_iter": start_powerSGD_iter,
            "min_compression_rate": min_compression_rate,
            "use_error_feedback": use_error_feedback,
            "warm_start": warm_start,
            "orthogonalization_epsilon": orthogonalization_epsilon,
            "random_seed": random_seed,
            "compression_stats_logging_frequency": compression_stats_logging_frequency,
            "batch_tensors_with_same_shape": batch_tensors_with_same_shape,
            "wire_dtype": wire_dtype,
        }
        self._fitted: LightningModule | None = None
        self._arguments = {"hook": hook, **arguments}
        PowerSGDState(None, **arguments)  # a wrong argument raises here and now, not in every process later
        self._make_state = partial(PowerSGDState, **arguments)

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self._fitted = self.lightning_module

    @property
    def powersgd_state(self) -> PowerSGDState | None:
        """The compressor's state, of the fit under way or the last one; None before it."""
        assert self.comm_state is None or isinstance(self.comm_state, PowerSGDState)
        return self.comm_state

    def compression_stats(self) -> tuple[float, int, int]:
        """The rate, and the numbers of elements before and after compression, in this fit or the last one.

        A fit that was resumed counts on from the checkpoint, unlike ``ledger``.
        """
        return self.comm_state.compression_stats() if self.comm_state is not None else (0, 0, 0)

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None and self.comm_state is not None:
            self.comm_state.gradient_scale = scaler.get_scale()

    def teardown(self) -> None:
        state = self.comm_state
        if state is not None and 0 < state.iter <= state.start_powerSGD_iter and not state.compression_stats()[1]:
            rank_zero_info(
                f"PowerSGD has compressed nothing yet: {state.iter} steps are done, and it starts after "
                f"{state.start_powerSGD_iter}. For a short training set start_powerSGD_iter or use PowerSGDWarmup."
            )
        super().teardown()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        # Not where only weights are saved, nor of another module than the one that was fitted.
        if self.comm_state is not None and "optimizer_states" in checkpoint and self._fitted is self.lightning_module:
            state = self.comm_state.state_dict(self._parameter_names())
            # Every rank is here, so the errors can be gathered; unless one of them has raised, as when
            # OnExceptionCheckpoint saves: then it may be alone, and must not wait for the others.
            all_here = sys.exc_info()[1] is None or self.world_size == 1
            errors = gathered(state["error"], self.comm_state.group) if all_here else None
            checkpoint[CHECKPOINT_KEY] = {"shared": state["shared"], "errors": errors, "arguments": self._arguments}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self.comm_state is None:
            return
        saved = checkpoint.get(CHECKPOINT_KEY)
        if saved is None:
            self.comm_state.iter = checkpoint["global_step"]
            rank_zero_info(
                f"The checkpoint was saved without PowerSGD; its {self.comm_state.iter} steps count as warm-up, and "
                f"compression starts at step {max(self.comm_state.iter, self.comm_state.start_powerSGD_iter)}."
            )
            return
        others = {name: value for name, value in saved["arguments"].items() if self._arguments[name] != value}
        if others:
            rank_zero_info(
                "PowerSGD continues with other arguments than those it was saved with: "
                + "; ".join(f"{name}={self._arguments[name]!r}, was {value!r}" for name, value in others.items())
            )
        shared, errors = saved["shared"], saved["errors"]
        if errors is None:
            rank_zero_info(
                "The checkpoint was saved while an exception was handled: what compression had left out is lost."
            )
            state = {"shared": {**shared, "factors": {}}, "error": {}}
        elif len(errors) == self.world_size:
            state = {"shared": shared, "error": errors[self.global_rank]}
        else:
            state = redistributed(shared, errors, self.world_size)
            rank_zero_info(
                f"The checkpoint was saved by {len(errors)} ranks and is loaded by {self.world_size}: each takes an "
                "equal share of what compression had left out."
            )
        self.comm_state.load_state_dict(state, self._parameter_names())

    def _parameter_names(self) -> dict[Tensor, str]:
        assert self.lightning_module is not None
        return {parameter: name for name, parameter in self.lightning_module.named_parameters()}


def _hook_and_state(hook: Any, state: Any) -> tuple[Hook, Callable[[dist.ProcessGroup], Any]]:
    """The hook's function, and what makes its state of DDP's process group."""
    if isinstance(hook, str) and "." in hook:
        module, _, name = hook.rpartition(".")
        hook = getattr(import_module(module), name)
    if isinstance(hook, str):
        if hook not in HOOKS:
            raise ValueError(f"hook must be one of {', '.join(HOOKS)}, an import path or a function, got {hook!r}")
        if state is None:
            return HOOKS[hook].hook, HOOKS[hook].make_state
        HOOKS[hook].hook.checked_state(state)  # type: ignore[attr-defined]
        return HOOKS[hook].hook, partial(_given, state)
    check_hook(hook)
    return hook, partial(_given, state)


def _given(state: Any, process_group: dist.ProcessGroup) -> Any:
    return state
