"""Callbacks for Lightning's Trainer."""

from __future__ import annotations

from lightning_distkit.callbacks.compression_stats import CompressionStatsLogger
from lightning_distkit.callbacks.memory_monitor import MemoryMonitor
from lightning_distkit.callbacks.pipeline_timeline import PipelineTimeline
from lightning_distkit.callbacks.powersgd_warmup import PowerSGDWarmup

__all__ = ["CompressionStatsLogger", "MemoryMonitor", "PipelineTimeline", "PowerSGDWarmup"]
