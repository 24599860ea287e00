"""Checkpoints of a pipe in the Trainer: ordinary ones, whole in one file or each rank's part in a folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_distkit.core.compression import PowerSGDState
from lightning_distkit.core.pipeline.merged_state import merged, own_optimizer_state
from lightning_distkit.core.pipeline.starting_values import is_whole
from lightning_distkit.core.pipeline.within import PipeWithin
from lightning_distkit.strategies.checkpoint_file import load_mapped
from lightning_distkit.strategies.pipeline_folder import is_folder, load_folder, save_folder
from lightning_distkit.strategies.pipeline_memory import CHECKPOINT_KEY, own_memory, whole_memory
from lightning_distkit.strategies.pipeline_ranks import RanksOfPipes


class PipeCheckpoints(RanksOfPipes):
    """A strategy of pipes that saves and loads the whole of what its ranks have in parts.

    Args:
        save_distributed_checkpoint: write folders.
        hook_arguments: of a named compressor between the replicas, with "hook", its name; they go into checkpoints, and
            are compared with those there.
        arguments: those of `RanksOfPipes`.
    """

    def __init__(
        self,
        save_distributed_checkpoint: bool = False,
        hook_arguments: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._saves_folders = save_distributed_checkpoint
        self._hook_arguments = dict(hook_arguments or {})
        self._part: PipeWithin | None = None  # while there is a pipe
        self._fitted: LightningModule | None = None
        self._averages_outside = True  # gradients of layers around the pipe, on this rank
        self.comm_state: Any = None  # of the data_parallel_hook, in the fit under way or the last one

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        # The parts of a folder are read when it is known which are needed.
        return self._saves_folders or (self.lightning_module is not None and not is_whole(self.lightning_module))

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
        # Not where only weights are saved, nor of another module than the one that was fitted.
        if "optimizer_states" in checkpoint and self._fitted is self.lightning_module:
            checkpoint = self._with_memory(checkpoint)
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
            lambda: super(PipeCheckpoints, self).load_checkpoint(checkpoint_path, weights_only=weights_only),
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
        if isinstance(self.comm_state, PowerSGDState):
            self._load_memory(self.comm_state, checkpoint)

    # What a compressor between the replicas remembers

    def _with_memory(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(self.comm_state, PowerSGDState) or self._control is None or self.data_parallel_size == 1:
            return checkpoint
        # Where a rank has raised, as when OnExceptionCheckpoint saves, the other replicas may be anywhere.
        all_here = sys.exc_info()[1] is None
        if not all_here and not self._is_first_replica:
            return checkpoint
        self._meet_after_an_exception()
        stages = self._control if self._is_first_replica else None
        memory = whole_memory(self.comm_state, self._names(), stages, with_errors=all_here)
        return (
            checkpoint
            if memory is None
            else {**checkpoint, CHECKPOINT_KEY: memory | {"arguments": self._hook_arguments}}
        )

    def _load_memory(self, state: PowerSGDState, checkpoint: Mapping[str, Any]) -> None:
        saved = checkpoint.get(CHECKPOINT_KEY)
        n_replicas, n_stages = self._resolved_sizes()
        if saved is None:
            state.iter = checkpoint["global_step"]
            if n_replicas > 1:
                rank_zero_info(
                    f"The checkpoint was saved without PowerSGD; its {state.iter} steps count as warm-up, and "
                    f"compression starts at step {max(state.iter, state.start_powerSGD_iter)}."
                )
            return
        others = {
            name: value for name, value in saved["arguments"].items() if self._hook_arguments.get(name, value) != value
        }
        if others:
            rank_zero_info(
                "PowerSGD continues with other arguments than those it was saved with: "
                + "; ".join(f"{name}={self._hook_arguments[name]!r}, was {value!r}" for name, value in others.items())
            )
        errors = saved["errors"]
        if errors is None:
            rank_zero_info(
                "The checkpoint was saved while an exception was handled: what compression had left out is lost."
            )
        elif n_replicas == 1:
            rank_zero_info(
                f"The checkpoint was saved by {len(errors)} pipes and is loaded by one, which sends "
                "no gradients to others: what compression had left out is lost."
            )
        elif len(errors) != n_replicas:
            rank_zero_info(
                f"The checkpoint was saved by {len(errors)} pipes and is loaded by {n_replicas}: each takes an equal "
                "share of what compression had left out."
            )
        replica, rank = divmod(self.global_rank, n_stages)
        names = self._names()
        state.load_state_dict(own_memory(saved, names, rank, n_stages, replica, n_replicas), names)

    def _names(self) -> dict[Tensor, str]:
        """Of all parameters whose gradients are averaged here, in the whole module."""
        assert self.lightning_module is not None
        others = set(self._part.outside()) if self._part is not None and not self._averages_outside else set()
        named = self.lightning_module.named_parameters()
        return {each: name for name, each in named if not each.is_meta and each not in others}
