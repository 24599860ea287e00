"""torchmetrics over what core counts; for any trainer, or none."""

from lightning_distkit.metrics.compression import ApproximationError, CompressionRate, WireBytes
from lightning_distkit.metrics.pipeline import PipelineBubble

__all__ = ["ApproximationError", "CompressionRate", "PipelineBubble", "WireBytes"]
