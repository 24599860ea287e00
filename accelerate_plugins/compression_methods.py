"""PowerSGD in Accelerate: DDP as ever, with the hook really attached, and each rank's own error in checkpoints."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accelerate_plugins.compression import PowerSGDPlugin
from accelerate_plugins.methods import PluginMethods
from lightning_distkit.core.compression import HOOKS, PowerSGDState, attach, redistributed
from lightning_distkit.core.compression.statistics import Statistics
from lightning_distkit.core.ledger import Ledger

logger = logging.getLogger(__name__)

_FILE = "powersgd_{rank}.bin"  # of each rank, as random_states_{rank}.pkl: nothing is written twice


@dataclass
class Compressed:
    """One model and its compressor."""

    model: DistributedDataParallel
    state: PowerSGDState
    statistics: Statistics = field(init=False)
    n_logged: int = 0  # steps in which statistics were last logged
    was_compressing: bool | None = None

    def __post_init__(self) -> None:
        self.statistics = Statistics(self.state)

    def names(self) -> dict[Tensor, str]:
        """Of the parameters, as the module has them that the user has made."""
        named = self.model.module.named_parameters()
        return {parameter: name.replace("_orig_mod.", "") for name, parameter in named}


class CompressionMethods(PluginMethods):
    """What `PowerSGDPlugin` changes."""

    plugin: PowerSGDPlugin

    def adopt(self, plugin: Any) -> None:
        super().adopt(plugin)
        self._compressed: list[Compressed] = []
        if self.num_processes == 1:
            logger.info("PowerSGD compresses nothing: there is one process, which sends nothing")

    # -- what can be asked

    @property
    def powersgd_state(self) -> PowerSGDState | None:
        """The compressor's state of the model prepared first; None before that, and in one process."""
        return self._compressed[0].state if self._compressed else None

    @property
    def powersgd_states(self) -> list[PowerSGDState]:
        """Those of all models, in the order in which they were prepared."""
        return [each.state for each in self._compressed]

    @property
    def ledger(self) -> Ledger | None:
        """What this rank sent and waited for, for the model prepared first; None before that."""
        return self._compressed[0].state.ledger if self._compressed else None

    def compression_stats(self) -> tuple[float, int, int]:
        """The rate, and the numbers of elements before and after compression, of the model prepared first."""
        return self._compressed[0].state.compression_stats() if self._compressed else (0, 0, 0)

    # -- training

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        self.refuse_comm_hook()
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        wrapper = getattr(prepared, "_orig_mod", prepared)  # of torch.compile
        is_new = all(each.model is not wrapper for each in self._compressed)
        if isinstance(wrapper, DistributedDataParallel) and is_new:
            state = self.plugin.make_state(wrapper.process_group)
            # Not by DistributedDataParallelKwargs: its table of hooks is closed, and torch's crashes on gloo.
            attach(wrapper, state, HOOKS[self.plugin.hook].hook)
            self._compressed.append(Compressed(wrapper, state))
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        for each in self._compressed:
            if self.scaler is not None:
                each.state.gradient_scale = self.scaler.get_scale()
            every = self.plugin.stats_every_n_steps
            if every is not None and (each.state.ledger.n_steps + 1) % every == 0:
                each.state.measure()
        super().backward(loss, **kwargs)
        if self.plugin.stats_every_n_steps is not None:
            for number, each in enumerate(self._compressed):
                self._log(each, f"_{number}" if number else "")

    def _log(self, each: Compressed, suffix: str) -> None:
        """What this backward has brought to an end, if it is time; the same decision on every rank."""
        n_steps, every = each.state.ledger.n_steps, self.plugin.stats_every_n_steps
        values: dict[str, float] = {}
        if each.state.is_compressing != each.was_compressing:
            each.was_compressing = each.state.is_compressing
            values[f"powersgd{suffix}/is_compressing"] = float(each.was_compressing)
        if every is not None and n_steps != each.n_logged and n_steps % every == 0:
            each.n_logged = n_steps
            numbers = each.statistics.collect(each.names(), self.plugin.stats_per_layer)
            values |= {f"compression{suffix}/{name}": value for name, value in numbers.items()}
        if values:
            self.log(values, step=each.state.iter)

    def end_training(self) -> None:
        for each in self._compressed:
            state = each.state
            if 0 < state.iter <= state.start_powerSGD_iter and not state.compression_stats()[1]:
                logger.warning(
                    "PowerSGD has compressed nothing yet: %s steps are done, and it starts after %s. For a short "
                    "training set start_powerSGD_iter or warmup_share.",
                    state.iter,
                    state.start_powerSGD_iter,
                )
        super().end_training()

    def free_memory(self, *objects: Any) -> Any:
        self._compressed.clear()
        return super().free_memory(*objects)

    # -- checkpoints

    def save_own_state(self, output_dir: str) -> None:
        if not self._compressed:
            return
        saved = {
            "world_size": self.num_processes,
            "models": [
                {**each.state.state_dict(each.names()), "start_powerSGD_iter": each.state.start_powerSGD_iter}
                for each in self._compressed
            ],
        }
        torch.save(saved, Path(output_dir, _FILE.format(rank=self.process_index)))
        if self.is_main_process:  # those of a larger world that has saved here before
            for path in Path(output_dir).glob(_FILE.format(rank="*")):
                if int(path.stem.rpartition("_")[2]) >= self.num_processes:
                    path.unlink()

    def load_own_state(self, models: list[nn.Module], input_dir: str) -> None:
        if not self._compressed:
            return
        found, refusal = None, None
        try:
            found = self._read(Path(input_dir))
        except (OSError, ValueError, RuntimeError) as error:
            refusal = str(error)
        self.group.refuse_together(refusal, self.device)  # others would wait for this rank in the first step
        if found is None:
            logger.warning("%s was saved without PowerSGD: its warm-up begins anew", input_dir)
            return
        for each, saved in zip(self._compressed, found, strict=True):
            if self.plugin.warmup_share is not None:  # the step that the first run has chosen
                each.state.start_powerSGD_iter = saved["start_powerSGD_iter"]
            each.state.load_state_dict(saved, each.names())

    def _read(self, folder: Path) -> list[dict[str, Any]] | None:
        """What this rank is to load for each model; None if nothing was saved."""
        first = folder / _FILE.format(rank=0)
        own = folder / _FILE.format(rank=self.process_index)
        if not first.exists() and not own.exists():
            return None
        of_ranks = [_load(first if first.exists() else own)]
        world_size = of_ranks[0]["world_size"]
        if len(of_ranks[0]["models"]) != len(self._compressed):
            raise ValueError(
                f"{folder} is of {len(of_ranks[0]['models'])} compressed models, and {len(self._compressed)} are "
                "prepared; prepare as many, in the same order, before load_state"
            )
        if world_size == self.num_processes:
            found: list[dict[str, Any]] = _load(own)["models"]
            return found
        of_ranks += [_load(folder / _FILE.format(rank=rank)) for rank in range(1, world_size)]
        logger.info(
            "%s was saved by %s ranks and is loaded by %s: each takes an equal share of what compression had left out",
            *(folder, world_size, self.num_processes),
        )
        return [
            {
                **redistributed(its[0]["shared"], [one["error"] for one in its], self.num_processes),
                "start_powerSGD_iter": its[0]["start_powerSGD_iter"],
            }
            for its in zip(*(each["models"] for each in of_ranks), strict=True)
        ]


def _load(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(
            f"{path} is missing: each rank has saved what it alone knows; collect the files of all ranks in one folder"
        )
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be read; it may be truncated: {error}") from error
    return saved
