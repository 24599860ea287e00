"""What each stage of a pipe does and when, measured: numbers for loggers, a picture, and a trace for a browser."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_distkit.callbacks.compression_figure import need_matplotlib
from lightning_distkit.callbacks.folder import folder_of
from lightning_distkit.callbacks.pipeline_figure import timeline_figure
from lightning_distkit.core.pipeline.dist import DistributedPipe
from lightning_distkit.core.pipeline.engine import Event
from lightning_distkit.core.pipeline.schedules import Action
from lightning_distkit.core.pipeline.timeline import Slot, Timeline, bubble_on_paper
from lightning_distkit.strategies.pipeline import PipeStrategy

Stages = list[list[Event]]  # of each rank of the pipe, seconds since a moment that is the same for all


class PipelineTimeline(Callback):
    """Record a step now and then, and log to every logger of the Trainer:

    ==================================  =============================================================================
    ``pipeline/bubble``                 of the time from the step's first action to its last, the share in which a
                                        stage does nothing, over all stages
    ``pipeline/bubble_on_paper``        the same as the schedule has it if all stages take equally long
    ``pipeline/stage0/forward_ms``      milliseconds of this step that rank 0 of the pipe spent in forwards,
    ``pipeline/stage0/backward_ms``     in backwards (what is computed again included),
    ``pipeline/stage0/waiting_ms``      and waiting for the others; so for each rank
    ==================================  =============================================================================

    At the end of fit there are ``pipeline.png``, and ``pipeline_trace.json`` for chrome://tracing or
    https://ui.perfetto.dev, beside the checkpoints. At other steps nothing is done. Times are those of the host: on
    CUDA those of launching.

    Args:
        every_n_steps: optimizer steps between two records.
        figure: draw the last one. Needs matplotlib.
        trace: write the last one for a browser.

    Attributes:
        timeline: the last one, the same on every rank of the pipe; None before it.
        history: what was logged, with "step".

    Raises:
        ValueError: ``every_n_steps`` is not a whole number of at least 1.
        ModuleNotFoundError: ``figure`` without matplotlib.
        MisconfigurationException: at the start of fit, the strategy has no pipe.
    """

    def __init__(self, every_n_steps: int = 50, figure: bool = True, trace: bool = True) -> None:
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise ValueError(f"every_n_steps must be a whole number of at least 1, got {every_n_steps!r}; 50 is usual")
        if figure:
            need_matplotlib()
        self.every_n_steps = every_n_steps
        self.figure = figure
        self.trace = trace
        self.timeline: Timeline | None = None
        self.history: list[dict[str, float]] = []
        self._stages: Stages = []
        self._began = 0.0
        self._on_paper = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _pipe(trainer)
        self.timeline, self.history, self._stages = None, [], []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if (trainer.global_step + 1) % self.every_n_steps == 0 or self.every_n_steps == 1:
            pipe = _pipe(trainer)
            _strategy(trainer).over_stages(None)  # hosts have clocks of their own: this moment is the same for all
            self._began = perf_counter()
            pipe.record = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pipe = _pipe(trainer)
        if not pipe.record:
            return
        own = [replace(each, begin=each.begin - self._began, end=each.end - self._began) for each in pipe.events]
        pipe.record = False
        self._stages = _strategy(trainer).over_stages(own)
        self.timeline = Timeline(tuple(tuple(map(_slot, filter(_is_compute, its))) for its in self._stages))
        n_micro_batches = 1 + max((each.micro_batch for each in own if _is_compute(each)), default=0)
        self._on_paper = bubble_on_paper(pipe.n_ranks, n_micro_batches, pipe.n_stages // pipe.n_ranks)
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        assert self.timeline is not None
        metrics = {"bubble": self.timeline.bubble, "bubble_on_paper": self._on_paper}
        for rank, events in enumerate(self._stages):
            for name, kind in (("forward", "F"), ("backward", "B")):
                seconds = sum(each.end - each.begin - each.waited for each in events if each.kind == kind)
                metrics[f"stage{rank}/{name}_ms"] = 1e3 * seconds
            metrics[f"stage{rank}/waiting_ms"] = 1e3 * sum(each.waited for each in events)
        self.history.append({"step": trainer.global_step, **metrics})
        for logger in trainer.loggers:
            logger.log_metrics({f"pipeline/{name}": value for name, value in metrics.items()}, step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = folder_of(trainer)
        if self.timeline is None or not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
            return
        folder.mkdir(parents=True, exist_ok=True)
        if self.figure:
            path = folder / "pipeline.png"
            timeline_figure(self.timeline, self._on_paper).savefig(path, dpi=120)
            rank_zero_info(f"What each stage did in step {self.history[-1]['step']:.0f}: {path}")
        if self.trace:
            (folder / "pipeline_trace.json").write_text(json.dumps(chrome_trace(self._stages)))


def chrome_trace(stages: Sequence[Sequence[Event]]) -> dict[str, Any]:
    """Events of all ranks in Chrome's format, which Perfetto reads, too."""
    names = {"F": "forward", "B": "backward"}
    trace: list[dict[str, Any]] = []
    for rank, events in enumerate(stages):
        trace.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        for each in events:
            what = f"{each.kind}{each.micro_batch}" if each.kind in names else each.kind
            row = {"pid": 0, "tid": rank, "ph": "X", "args": {"stage": each.stage, "micro-batch": each.micro_batch}}
            waited_until = each.begin + each.waited
            if each.waited > 0:
                trace.append(row | _when(f"waiting for {what}", "waiting", each.begin, waited_until))
            trace.append(row | _when(what, names.get(each.kind, "other"), waited_until, each.end))
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def _when(name: str, category: str, begin: float, end: float) -> dict[str, Any]:
    return {"name": name, "cat": category, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}


def _is_compute(event: Event) -> bool:
    return event.kind in ("F", "B")


def _slot(event: Event) -> Slot:
    # Waiting comes first; but for a backward's recomputation, which is then drawn a little late.
    kind: Any = event.kind
    return Slot(Action(kind, event.stage, event.micro_batch), event.begin + event.waited, event.end)


def _strategy(trainer: Trainer) -> PipeStrategy:
    if not isinstance(trainer.strategy, PipeStrategy):
        raise MisconfigurationException(
            f'PipelineTimeline sees what a pipe does: Trainer(strategy="pipe"), got {type(trainer.strategy).__name__}'
        )
    return trainer.strategy


def _pipe(trainer: Trainer) -> DistributedPipe:
    pipe = _strategy(trainer).pipe
    assert pipe is not None
    return pipe
