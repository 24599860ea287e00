"""What a pipe's stages do and hold is measured, logged and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_distkit import PipeStrategy
from lightning_distkit.callbacks import MemoryMonitor, PipelineTimeline
from lightning_distkit.core.pipeline.schedules import Action
from lightning_distkit.core.pipeline.timeline import Slot, Timeline, bubble_on_paper
from lightning_distkit.metrics import PipelineBubble
from tests.ranks import run_ranks
from tests.strategies.pipe_modules import one_device, trainer

WIDTH, ROWS, CHUNKS = 64, 64, 8


class Deep(pl.LightningModule):
    """Eight alike layers, each of which saves one activation a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(8)))

    def configure_pipeline(self) -> nn.Sequential:
        return self.layers

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.layers(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> Any:
        random = torch.Generator().manual_seed(1)
        data = TensorDataset(*(torch.randn(4 * ROWS, WIDTH, generator=random) for _ in range(2)))
        return DataLoader(data, batch_size=ROWS)


def measured(schedule: str, folder: Path) -> dict[str, Any]:
    memory, timeline = MemoryMonitor(every_n_steps=2), PipelineTimeline(every_n_steps=2)
    logger = CSVLogger(folder)
    strategy = PipeStrategy(CHUNKS, checkpoint="never", schedule=schedule)
    fit = trainer(strategy, folder, callbacks=[memory, timeline], logger=logger)
    fit.fit(Deep())
    bubble = PipelineBubble()
    assert timeline.timeline is not None
    bubble.update(timeline.timeline)
    return {
        "ranks": memory.ranks,
        "timeline": timeline.timeline,
        "history": timeline.history,
        "bubble": float(bubble.compute()),
        "logged": sorted(logger.experiment.metrics_keys) if fit.is_global_zero else [],
        "folder": Path(fit.log_dir),
    }


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_each_rank_holds_its_stage_and_the_activations_that_the_schedule_predicts(
    schedule: str, tmp_path: Path
) -> None:
    n_stages = 4
    results = run_ranks(n_stages, measured, schedule, tmp_path)
    first = results[0]
    layer = 4 * WIDTH * WIDTH
    live = [CHUNKS] * n_stages if schedule == "gpipe" else [4, 3, 2, 1]
    for rank, held in enumerate(first["ranks"]):
        assert held["parameters"] == held["gradients"] == 2 * layer
        assert held["optimizer"] == 4 * layer + 2 * 4  # two moments, and steps
        # Of each row the two layers keep their input and what tanh gave; on the last rank there is the loss as well.
        a_micro_batch = 2 * 2 * 4 * WIDTH * ROWS // CHUNKS
        most = live[rank] * a_micro_batch
        loss = 4 * 4 * WIDTH * ROWS if rank == n_stages - 1 or schedule == "gpipe" else 0
        assert 0.7 * most <= held["activations"] <= most + loss
    for each in results:
        assert each["ranks"] == first["ranks"]
        assert each["timeline"] == first["timeline"]
        actions = [{slot.action for slot in rank} for rank in each["timeline"].ranks]
        assert all(len(its) == 2 * CHUNKS for its in actions)
        assert [entry["step"] for entry in each["history"]] == [2, 4]
        entry = each["history"][-1]
        assert entry["bubble_on_paper"] == bubble_on_paper(n_stages, CHUNKS)
        assert entry["bubble"] == pytest.approx(each["bubble"], abs=1e-6)
        assert 0 < entry["bubble"] < 1
        for rank in range(n_stages):
            assert all(entry[f"stage{rank}/{name}_ms"] > 0 for name in ("forward", "backward", "waiting"))
    assert "pipeline/stage3/waiting_ms" in first["logged"]
    assert "memory/rank3/activations" in first["logged"]
    trace = json.loads((first["folder"] / "pipeline_trace.json").read_text())["traceEvents"]
    assert {each["cat"] for each in trace if each["ph"] == "X"} >= {"forward", "backward", "waiting"}
    for name in ("pipeline.png", "memory.png"):
        assert (first["folder"] / name).read_bytes().startswith(b"\x89PNG")


def test_the_bubbles_share_is_that_of_the_time_in_which_stages_do_nothing() -> None:
    metric = PipelineBubble()
    busy = (Slot(Action("F", 0, 0), 0.0, 1.0), Slot(Action("B", 0, 0), 3.0, 4.0))
    half = (Slot(Action("F", 1, 0), 1.0, 2.0), Slot(Action("B", 1, 0), 2.0, 3.0))
    metric.update(Timeline((busy, half)))
    assert float(metric.compute()) == 0.5
    metric.update(Timeline(((Slot(Action("F", 0, 0), 0.0, 8.0),), ())))
    assert float(metric.compute()) == pytest.approx(0.5)
    with pytest.raises(TypeError, match="is updated with a Timeline, got int"):
        metric.update(1)  # type: ignore[arg-type]


def test_what_they_cannot_watch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r'sees what a pipe does: Trainer\(strategy="pipe"'):
        one_device(tmp_path, callbacks=[PipelineTimeline()]).fit(Deep())
    for make in (PipelineTimeline, MemoryMonitor):
        with pytest.raises(ValueError, match="every_n_steps must be a whole number of at least 1, got 0"):
            make(every_n_steps=0)


def test_memory_is_monitored_on_one_device_too(tmp_path: Path) -> None:
    monitor = MemoryMonitor(every_n_steps=1)
    one_device(tmp_path, callbacks=[monitor]).fit(Deep())
    [held] = monitor.ranks
    assert held["parameters"] == held["gradients"] == 8 * 4 * WIDTH * WIDTH
    assert held["activations"] >= 8 * 4 * WIDTH * ROWS
