"""torchmetrics over what core counts; for any trainer, or none."""

from lightning_distkit.metrics.compression import ApproximationError, CompressionRate, WireBytes

__all__ = ["ApproximationError", "CompressionRate", "WireBytes"]
