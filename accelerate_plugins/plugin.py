"""What a plugin is: settings, and the class whose methods carry them out; and the table of all plugins.

A new plugin is one file, and one line in `PLUGINS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from accelerate_plugins.methods import PluginMethods

PLUGINS: dict[str, tuple[str, dict[str, Any]]] = {
    "powersgd": ("accelerate_plugins.compression:PowerSGDPlugin", {}),
    "batched_powersgd": ("accelerate_plugins.compression:PowerSGDPlugin", {"hook": "batched_powersgd"}),
    "acp_sgd": ("accelerate_plugins.compression:PowerSGDPlugin", {"hook": "acp_sgd"}),
    "pipe": ("accelerate_plugins.pipe:PipePlugin", {}),
    "zero": ("accelerate_plugins.zero:ZeroPlugin", {}),
    "zero_stage_1": ("accelerate_plugins.zero:ZeroPlugin", {"stage": 1}),
    "zero_stage_2": ("accelerate_plugins.zero:ZeroPlugin", {"stage": 2}),
    "zero_stage_3": ("accelerate_plugins.zero:ZeroPlugin", {"stage": 3}),
}
"""Name -> where its class is, and what the name says already. The names are those of the Lightning strategies."""


@dataclass(kw_only=True)
class Plugin:
    """Settings of one technique; the fields of a subclass are the arguments of a core object.

    Raises:
        ValueError: at construction, what is wrong with the settings.
    """

    methods: ClassVar[str]  # where the class is, a `PluginMethods`, that carries the settings out
    alone: ClassVar[str]  # why no other distributed engine can be beside it
    explained_by: ClassVar[str | None] = None  # where the core object is whose docstring explains the settings

    def methods_class(self) -> type[PluginMethods]:
        cls: type[PluginMethods] = load(self.methods)
        return cls

    def agreement(self) -> dict[str, Any]:
        """What must be the same on every rank, as plain values."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}


def load(path: str) -> Any:
    """What stands under "module:name"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def default_of(function: Any, name: str) -> Any:
    """A dataclass field that has the default of the parameter ``name`` of ``function``."""
    return field(default=inspect.signature(function).parameters[name].default)


def arguments_of(plugin: Plugin, function: Any) -> dict[str, Any]:
    """Those fields of ``plugin`` that are parameters of ``function``."""
    taken = inspect.signature(function).parameters
    return {each.name: getattr(plugin, each.name) for each in fields(plugin) if each.name in taken}


def _plain(value: Any) -> Any:
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    return getattr(value, "__qualname__", None) or (
        type(value).__qualname__ if " at 0x" in repr(value) else repr(value)
    )
