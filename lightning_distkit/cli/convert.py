"""A sharded checkpoint as one ordinary file, which opens under every strategy and without any."""

from __future__ import annotations

import sys

from lightning_distkit.core.zero.convert import convert_sharded_checkpoint


def convert(checkpoint: str, out: str, weights_only: bool = True) -> None:
    """Make one ordinary file of a sharded checkpoint, as it would have been saved whole.

    One tensor is in memory at a time, and no GPU or other process is needed.

    Args:
        checkpoint: the folder.
        out: the file to be written; it must not be there yet.
        weights_only: load only tensors and plain values, as torch.load does. Say false if you trust the checkpoint, and
            it holds objects, such as hyperparameters of your own classes.
    """
    try:
        convert_sharded_checkpoint(checkpoint, out, weights_only=weights_only)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
