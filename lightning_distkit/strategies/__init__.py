"""Strategies for Lightning's Trainer, thin adapters around core, and the names under which Lightning knows them.

Importing this imports no Lightning; a strategy is loaded when it is asked for.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from lightning_distkit.strategies.compression import CommHookDDPStrategy as CommHookDDPStrategy
    from lightning_distkit.strategies.compression import PowerSGDDDPStrategy as PowerSGDDDPStrategy
    from lightning_distkit.strategies.pipeline import PipeStrategy as PipeStrategy
    from lightning_distkit.strategies.zero import ZeroStrategy as ZeroStrategy

_MODULES = {
    "CommHookDDPStrategy": "compression",
    "PipeStrategy": "pipeline",
    "PowerSGDDDPStrategy": "compression",
    "ZeroStrategy": "zero",
}

NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "powersgd": ("PowerSGDDDPStrategy", {}),
    "batched_powersgd": ("PowerSGDDDPStrategy", {"hook": "batched_powersgd"}),
    "acp_sgd": ("PowerSGDDDPStrategy", {"hook": "acp_sgd"}),
    "zero_stage_1": ("ZeroStrategy", {"stage": 1}),
    "zero_stage_2": ("ZeroStrategy", {"stage": 2}),
    "zero_stage_3": ("ZeroStrategy", {"stage": 3}),
    "pipe": ("PipeStrategy", {}),
    "ddp_noop": ("CommHookDDPStrategy", {"hook": "noop"}),
}
"""Name -> class and arguments. A new strategy is one line here, and one above for a new class."""

START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
"""Suffix of a name -> how Lightning starts the processes; the convention of "ddp_*"."""

WRONG_MIRROR = (
    "lightning_distkit works with `lightning.pytorch`, whose classes are others than those of `pytorch_lightning`: "
    "write `import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`, everywhere"
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(registry: Any) -> None:
    """Make every name, with every suffix, known to Lightning's registry; again does nothing."""
    for name, (cls, arguments) in NAMES.items():
        for suffix, start_method in START_METHODS.items():
            if name + suffix not in registry:
                description = f"{cls} of lightning_distkit with `start_method` '{start_method}'"
                # Not the class itself: whoever imports it first is in the middle of that when Lightning calls for this.
                make = partial(_make, cls)
                registry.register(name + suffix, make, description, start_method=start_method, **arguments)


def register_refusals(registry: Any) -> None:
    """In the registry of ``pytorch_lightning``, answer every name by saying what to import instead."""
    for name in NAMES:
        for suffix in START_METHODS:
            if name + suffix not in registry:
                registry.register(name + suffix, _refuse, WRONG_MIRROR, refused=name + suffix)


def _make(cls: str, **arguments: Any) -> Any:
    return __getattr__(cls)(**arguments)


def _refuse(refused: str) -> NoReturn:
    raise TypeError(f"strategy={refused!r}: {WRONG_MIRROR}")
