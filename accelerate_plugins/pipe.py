"""The settings of a pipeline: those of `DistributedPipe`, where it is in a model, and how many ranks it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from accelerate_plugins.plugin import Plugin, arguments_of, default_of
from lightning_distkit.core.pipeline.assembly import check_arguments
from lightning_distkit.core.pipeline.dist import DistributedPipe
from lightning_distkit.core.pipeline.sizes import check_size


@dataclass(kw_only=True)
class PipePlugin(Plugin):
    """The layers of a model on several ranks, through which each batch goes in micro-batches.

    The first six are arguments of `lightning_distkit.core.pipeline.DistributedPipe`, where they are explained, as is
    ``timeout``.

    Args:
        chunks: micro-batches that a batch is split into; fewer where it has fewer rows.
        balance: layers of each stage in order; or "auto" or "size": so that stages have parameters alike.
        module: path of the layers in the model, an ``nn.Sequential`` or an ``nn.ModuleList``; by default what the
            model's ``configure_pipeline()`` returns (the path, or the part), or else the only ones.
        pipeline_parallel_size: number of ranks of a pipe; by default all.
        data_parallel_size: number of such pipes, each with batches of its own; by default as many as ranks allow.
        share_batches: whether the first stage's batch and random state are sent to the other stages. Without it the
            loaders of all stages must give the same batches, and steps must draw the same random numbers.
        sync_replicated: whether the gradients of layers around the pipe are made the first stage's on all stages. By
            default where kernels may add in any order: on CUDA, unless torch uses deterministic algorithms.

    Raises:
        ValueError: a wrong setting.
    """

    chunks: int = 8  # as PipeStrategy has it: with DistributedPipe's own, 1, ranks wait for each other
    checkpoint: Literal["always", "except_last", "never"] = default_of(DistributedPipe, "checkpoint")
    deferred_batch_norm: bool = default_of(DistributedPipe, "deferred_batch_norm")
    balance: Literal["auto", "size"] | list[int] = default_of(DistributedPipe, "balance")
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = default_of(DistributedPipe, "schedule")
    n_stages_per_rank: int = default_of(DistributedPipe, "n_stages_per_rank")
    module: str | None = None
    pipeline_parallel_size: int | Literal["auto"] = "auto"
    data_parallel_size: int | Literal["auto"] = "auto"
    share_batches: bool = True
    sync_replicated: bool | None = None
    timeout: float | None = default_of(DistributedPipe, "timeout")

    methods = "accelerate_plugins.pipe_methods:PipeMethods"
    alone = "each rank has layers of its own"
    explained_by = "lightning_distkit.core.pipeline.dist:DistributedPipe"

    def __post_init__(self) -> None:
        check_arguments(self.chunks, self.checkpoint, self.schedule, self.n_stages_per_rank, "all")
        check_size("pipeline_parallel_size", self.pipeline_parallel_size)
        check_size("data_parallel_size", self.data_parallel_size)
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout must be positive, got {self.timeout:g} seconds")

    def pipe_arguments(self) -> dict[str, Any]:
        """Those of `DistributedPipe`."""
        arguments = arguments_of(self, DistributedPipe)
        del arguments["module"]  # there the layers themselves
        return arguments
