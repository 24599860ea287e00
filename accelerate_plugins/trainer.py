"""Hugging Face's Trainer under a plugin: it writes checkpoints by itself, on one rank, not by Accelerator's methods.

Each change is around a method that keeps its signature from transformers 4.40 to 5; what it does itself stays its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from torch import nn

from accelerate_plugins.methods import PluginMethods, instead


def adapt(trainer: Any) -> None:
    """Change the class ``transformers.Trainer``, in place; again does nothing."""
    if not hasattr(trainer.save_model, "__wrapped__"):
        for name, around in _AROUND.items():
            setattr(trainer, name, _changed(getattr(trainer, name), around))


def _changed(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.accelerator, PluginMethods):
            return original(self, *args, **kwargs)
        with around(self, *args, **kwargs):
            return original(self, *args, **kwargs)

    return method


@contextmanager
def _saving_the_model(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Every rank is here, and only one goes on to where the state is asked for."""
    module = _module(self)
    if not self.accelerator.has_part_of(module):
        yield
        return
    state, save = self.accelerator.get_state_dict(module), self._save
    with instead(self, "_save", lambda output_dir=None, state_dict=None: save(output_dir, state_dict or state)):
        yield


@contextmanager
def _saving_the_optimizer(self: Any, output_dir: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    state = self.accelerator.whole_state_of(self.optimizer)
    with instead(self.optimizer, "state_dict", lambda: state):
        yield
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    self.accelerator.save_own_state(output_dir)
    self.accelerator.wait_for_everyone()  # the one that writes may go on to delete older folders


@contextmanager
def _loading_the_optimizer(self: Any, checkpoint: str | None, *args: Any, **kwargs: Any) -> Iterator[None]:
    yield
    if checkpoint is not None:
        self.accelerator.load_own_state([], checkpoint)


@contextmanager
def _loading_the_model(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    from torch.nn.modules.module import _IncompatibleKeys

    module = _module(self)
    if not self.accelerator.has_part_of(module):
        yield
        return

    plain = module.load_state_dict

    def load(state_dict: dict[str, Any], strict: bool = True, assign: bool = False) -> _IncompatibleKeys:
        with instead(module, "load_state_dict", plain):
            self.accelerator.load_whole(module, state_dict, strict)
        return _IncompatibleKeys([], [])

    with instead(module, "load_state_dict", load):
        yield


def _module(self: Any) -> nn.Module:
    module: nn.Module = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
    return module


_AROUND = {
    "save_model": _saving_the_model,
    "_save_optimizer_and_scheduler": _saving_the_optimizer,
    "_load_optimizer_and_scheduler": _loading_the_optimizer,
    "_load_from_checkpoint": _loading_the_model,
    "_load_best_model": _loading_the_model,
}
