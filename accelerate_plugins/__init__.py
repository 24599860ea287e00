"""The techniques of ``lightning_distkit.core`` as plugins of Hugging Face Accelerate; imports nothing of Lightning.

From code ``Accelerator(plugin=ZeroPlugin(stage=2))``; before an unmodified script
``accelerate launch -m accelerate_plugins --plugin zero_stage_2 train.py``. Names are loaded when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate_plugins.accelerator import Accelerator as Accelerator
    from accelerate_plugins.compression import PowerSGDPlugin as PowerSGDPlugin
    from accelerate_plugins.pipe import PipePlugin as PipePlugin
    from accelerate_plugins.zero import ZeroPlugin as ZeroPlugin

_MODULES = {"Accelerator": "accelerator", "PipePlugin": "pipe", "PowerSGDPlugin": "compression", "ZeroPlugin": "zero"}
__all__ = ["Accelerator", "PipePlugin", "PowerSGDPlugin", "ZeroPlugin"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
