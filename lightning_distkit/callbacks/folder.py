"""Where callbacks put their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def folder_of(trainer: Any) -> Path:
    """Where checkpoints are, or would be. Called on every rank: Lightning has them agree on its log_dir."""
    checkpoints = getattr(trainer.checkpoint_callback, "dirpath", None)
    return Path(checkpoints or trainer.log_dir or trainer.default_root_dir)
