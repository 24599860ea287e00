"""The settings of compressed gradients: those of `PowerSGDState`, which hook, when it starts, what is logged."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import torch
import torch.distributed as dist

from accelerate_plugins.plugin import Plugin, arguments_of, default_of
from lightning_distkit.core.compression import PowerSGDState
from lightning_distkit.core.compression.matrix_rank import MatrixRank, is_by_name


@dataclass(kw_only=True)
class PowerSGDPlugin(Plugin):
    """DDP whose gradients travel as factors of low rank.

    The fields down to ``wire_dtype`` are the arguments of `lightning_distkit.core.compression.PowerSGDState`, where
    they are explained, with its defaults.

    Args:
        hook: "powersgd"; "acp_sgd", which sends the two factors in turn: half the bytes and one message a step;
            "batched_powersgd": one matrix for each bucket, much less accurate.
        warmup_share: in place of ``start_powerSGD_iter``, the share of ``total_steps`` after which compression starts;
            0.1 is a good begin.
        total_steps: optimizer steps of the whole training, which Accelerate cannot know.
        lr_warmup_steps: with ``warmup_share``, steps of the learning rate's warm-up, before whose end compression does
            not start.
        stats_every_n_steps: optimizer steps between two entries of statistics in the trackers (`accelerator.log`);
            None for no statistics.
        stats_per_layer: also log the relative error of each compressed parameter.

    Raises:
        ValueError: a wrong setting.
    """

    matrix_approximation_rank: MatrixRank = default_of(PowerSGDState, "matrix_approximation_rank")
    start_powerSGD_iter: int = default_of(PowerSGDState, "start_powerSGD_iter")
    min_compression_rate: float = default_of(PowerSGDState, "min_compression_rate")
    use_error_feedback: bool = default_of(PowerSGDState, "use_error_feedback")
    warm_start: bool = default_of(PowerSGDState, "warm_start")
    orthogonalization_epsilon: float = default_of(PowerSGDState, "orthogonalization_epsilon")
    random_seed: int = default_of(PowerSGDState, "random_seed")
    compression_stats_logging_frequency: int = default_of(PowerSGDState, "compression_stats_logging_frequency")
    batch_tensors_with_same_shape: bool = default_of(PowerSGDState, "batch_tensors_with_same_shape")
    wire_dtype: torch.dtype | Literal["bf16", "fp16", "bfloat16", "float16"] | None = default_of(
        PowerSGDState, "wire_dtype"
    )
    hook: Literal["powersgd", "batched_powersgd", "acp_sgd"] = "powersgd"
    warmup_share: float | None = None
    total_steps: int | None = None
    lr_warmup_steps: int = 0
    stats_every_n_steps: int | None = None
    stats_per_layer: bool = False

    methods = "accelerate_plugins.compression_methods:CompressionMethods"
    alone = "its hook belongs to DDP"
    explained_by = "lightning_distkit.core.compression:PowerSGDState"

    def __post_init__(self) -> None:
        if self.hook not in ("powersgd", "batched_powersgd", "acp_sgd"):
            raise ValueError(f'hook must be "powersgd", "batched_powersgd" or "acp_sgd", got {self.hook!r}')
        if self.hook == "batched_powersgd" and is_by_name(self.matrix_approximation_rank):
            raise ValueError(
                "batched_powersgd compresses whole buckets, so its matrix_approximation_rank must not depend on names, "
                f"got {self.matrix_approximation_rank!r}"
            )
        for name, value, least in (
            ("total_steps", self.total_steps, 1),
            ("lr_warmup_steps", self.lr_warmup_steps, 0),
            ("stats_every_n_steps", self.stats_every_n_steps, 1),
        ):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        self._check_warmup()
        self.make_state(None)  # a wrong argument raises here and now, not in every process later

    def _check_warmup(self) -> None:
        if self.warmup_share is None:
            for name in ("total_steps", "lr_warmup_steps"):
                if getattr(self, name):
                    raise ValueError(f"{name} says nothing without warmup_share; give that too, or leave it out")
            return
        is_share = isinstance(self.warmup_share, float) and 0 < self.warmup_share < 1
        if not is_share:
            raise ValueError(
                f"warmup_share must be a share of all steps between 0 and 1, got {self.warmup_share!r}; 0.1 is a good "
                "begin, and the number of a step is start_powerSGD_iter"
            )
        if self.total_steps is None:
            raise ValueError(
                f"warmup_share={self.warmup_share} is a share of all steps, whose number Accelerate cannot know: give "
                "total_steps, or the number of a step as start_powerSGD_iter"
            )
        if self.start_powerSGD_iter != PowerSGDPlugin.start_powerSGD_iter:
            raise ValueError(
                "warmup_share says when compression starts, and so does "
                f"start_powerSGD_iter={self.start_powerSGD_iter}; give one of them"
            )

    def make_state(self, process_group: dist.ProcessGroup | None) -> PowerSGDState:
        """What the hook of one model is told and remembers."""
        arguments: dict[str, Any] = arguments_of(self, PowerSGDState)
        if self.warmup_share is not None and self.total_steps is not None:
            share = ceil(self.warmup_share * self.total_steps)
            arguments["start_powerSGD_iter"] = max(2, share, self.lr_warmup_steps)
        return PowerSGDState(process_group, **arguments)
