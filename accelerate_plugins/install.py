"""Put a plugin into every Accelerator that a process makes, whoever makes it, and wherever he has imported it from."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import accelerate
import wrapt
from accelerate.state import PartialState

from accelerate_plugins import launch
from accelerate_plugins.accelerator import Accelerator, construct
from accelerate_plugins.plugin import Plugin


def install(plugin: Plugin) -> None:
    """From now on ``accelerate.Accelerator()``, and those of subclasses, carry out ``plugin``; again does nothing."""
    _of_accelerators(plugin)
    _of_states()
    # Its checkpoints are not Accelerate's. Not imported for that: who does not use it shall not pay for it.
    wrapt.when_imported("transformers.trainer")(_of_trainers)


def _of_accelerators(plugin: Plugin) -> None:
    original: Any = accelerate.Accelerator.__init__
    if hasattr(original, "__wrapped__"):
        return

    # In place, and not by another class of that name: whoever has imported the class already has this one, too.
    @wraps(original)
    def init(self: accelerate.Accelerator, *args: Any, **kwargs: Any) -> None:
        if isinstance(self, Accelerator):  # ours, which finds the plugin by itself
            original(self, *args, **kwargs)
        else:
            construct(self, partial(original, self), plugin, args, kwargs)

    accelerate.Accelerator.__init__ = init  # type: ignore[method-assign]


def _of_states() -> None:
    """A state that is made before the Accelerator (by TrainingArguments) does not look at ACCELERATE_USE_CPU."""
    original: Any = PartialState.__init__
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def init(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:
        original(self, cpu or launch.is_on_cpu_together(), **kwargs)

    PartialState.__init__ = init  # type: ignore[method-assign]


def _of_trainers(module: Any) -> None:
    from accelerate_plugins.trainer import adapt

    adapt(module.Trainer)
