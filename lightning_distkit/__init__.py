"""Gradient compression, ZeRO and pipelines for PyTorch Lightning: one word in the Trainer.

``import lightning_distkit`` makes the names of its strategies known to Lightning, whichever of the two is imported
first, and imports nothing heavy: Lightning's part is loaded when Lightning is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from lightning_distkit.strategies import CommHookDDPStrategy as CommHookDDPStrategy
    from lightning_distkit.strategies import PipeStrategy as PipeStrategy
    from lightning_distkit.strategies import PowerSGDDDPStrategy as PowerSGDDDPStrategy
    from lightning_distkit.strategies import ZeroStrategy as ZeroStrategy

__version__ = "0.1.0"
__all__ = ["CommHookDDPStrategy", "PipeStrategy", "PowerSGDDDPStrategy", "ZeroStrategy"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("lightning_distkit.strategies"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Lightning looks a name up before it loads any entry point, and has none for strategies: only an import can register.
@wrapt.when_imported("lightning.pytorch.strategies")
def _register(module: Any) -> None:
    import_module("lightning_distkit.strategies").register(module.StrategyRegistry)


# `pytorch_lightning` has the same classes a second time; a strategy made of the one is none to the other's Trainer.
@wrapt.when_imported("pytorch_lightning.strategies")
def _register_refusals(module: Any) -> None:
    import_module("lightning_distkit.strategies").register_refusals(module.StrategyRegistry)
