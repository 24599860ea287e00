"""Which plugin, and its settings: from a YAML file, the environment and the command line, one over the other.

    plugin: zero                    ACCELERATE_PLUGINS_CONFIG=zero2.yaml
    stage: 2                        ACCELERATE_PLUGINS_STAGE=3

A variable's name is the key's in capitals; it needs no file beside it. All of it is checked at once, in one way, so
that every rank says the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from accelerate_plugins.plugin import PLUGINS, Plugin, load
from accelerate_plugins.schema import fits, in_words, settings

PREFIX = "ACCELERATE_PLUGINS_"
CONFIG = PREFIX + "CONFIG"


class ConfigError(ValueError):
    """What is wrong, and where: the file or variable, and the key."""


@dataclass(frozen=True)
class Setting:
    """A value, and whence it came."""

    value: Any
    source: str


def known_keys() -> list[str]:
    """All keys of all plugins."""
    return ["plugin", *dict.fromkeys(key for path, _ in PLUGINS.values() for key in settings(load(path)))]


def from_environment() -> Plugin | None:
    """What the environment says; None if it says nothing.

    Raises:
        ConfigError: a file that cannot be read, a key that is unknown, a value that cannot be.
    """
    return plugin_of(gathered(os.environ.get(CONFIG), {}))


def gathered(file: str | os.PathLike[str] | None, overrides: Mapping[str, str]) -> dict[str, Setting]:
    """All settings: the file's, over them the environment's, over them ``overrides``, which are of the command line."""
    found = {} if file is None else _of_file(Path(file))
    by_capitals = {key.upper(): key for key in known_keys()}
    for name, text in os.environ.items():
        if not name.startswith(PREFIX) or name == CONFIG:
            continue
        capitals = name.removeprefix(PREFIX)
        if capitals not in by_capitals:
            raise ConfigError(f"{name}: no plugin has such a key{_did_you_mean(capitals, by_capitals, PREFIX)}")
        found[by_capitals[capitals]] = Setting(_parsed(text, name), name)
    return {**found, **{key: Setting(_parsed(text, f"--{key}"), f"--{key}") for key, text in overrides.items()}}


def plugin_of(found: Mapping[str, Setting]) -> Plugin | None:
    """The plugin that the settings describe; None if there are none."""
    if not found:
        return None
    if "plugin" not in found:
        first = next(iter(found.values()))
        raise ConfigError(f"{first.source}: plugin is missing; it must be one of {', '.join(PLUGINS)}")
    check(found)
    name, source = found["plugin"].value, found["plugin"].source
    path, preset = PLUGINS[name]
    cls: type[Plugin] = load(path)
    known = settings(cls)
    values: dict[str, Any] = dict(preset)
    for key, setting in found.items():
        if key == "plugin":
            continue
        value = _as_number(setting.value, known[key])
        if key in preset and value != preset[key]:
            raise ConfigError(
                f"{setting.source}: {key} is {preset[key]!r} by the name of plugin {name}, got {setting.value!r}; "
                "leave it out, or take another name"
            )
        values[key] = value
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        concerned = [setting.source for key, setting in found.items() if key != "plugin" and key in str(error)]
        raise ConfigError(f"{(concerned or [source])[0]}: {error}") from error


def check(found: Mapping[str, Setting]) -> None:
    """Raise a ConfigError if a name or one of the values cannot be, whatever the others are."""
    name, source = found["plugin"].value, found["plugin"].source
    if name not in PLUGINS:
        raise ConfigError(
            f"{source}: plugin must be one of {', '.join(PLUGINS)}, got {name!r}{_did_you_mean(str(name), PLUGINS)}"
        )
    known = settings(load(PLUGINS[name][0]))
    for key, setting in found.items():
        if key == "plugin":
            continue
        if key not in known:
            raise ConfigError(
                f"{setting.source}: {key} is no key of plugin {name}, which takes {', '.join(known)}"
                f"{_did_you_mean(key, known)}"
            )
        if not fits(_as_number(setting.value, known[key]), known[key]):
            raise ConfigError(f"{setting.source}: {key} must be {in_words(known[key])}, got {setting.value!r}")


def export(file: str | os.PathLike[str] | None, overrides: Mapping[str, str]) -> None:
    """Say the same in the environment, for processes that this one starts."""
    if file is not None:
        os.environ[CONFIG] = str(Path(file).resolve())
    for key, text in overrides.items():
        os.environ[PREFIX + key.upper()] = text


def where(key: str) -> str:
    """What one has to change to change ``key``."""
    variable = PREFIX + key.upper()
    return variable if variable in os.environ else os.environ.get(CONFIG, "Accelerator(plugin=...)")


def _of_file(path: Path) -> dict[str, Setting]:
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; `python -m accelerate_plugins config` writes one") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: this is no YAML file that can be read: {error}") from error
    if not isinstance(read, dict) or not all(isinstance(key, str) for key in read):
        raise ConfigError(f"{path}: the file must be a mapping of keys to values, as `plugin: zero`, got {read!r}")
    return {key: Setting(value, str(path)) for key, value in read.items()}


def _parsed(text: str, source: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {text!r} cannot be read as a YAML value: {error}") from error


def _as_number(value: Any, its: dict[str, Any]) -> Any:
    """YAML 1.1 takes 1e-8, without a point, for text."""
    if isinstance(value, str) and not fits(value, its):
        try:
            number = float(value)
        except ValueError:
            return value
        return number if fits(number, its) else value
    return value


def _did_you_mean(name: str, known: Any, prefix: str = "") -> str:
    return "".join(f"; did you mean {prefix}{match}?" for match in get_close_matches(name, list(known), 1))
