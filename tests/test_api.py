"""The public names, their arguments and defaults: what a release may not change by accident.

After a change that is meant, ``python -m tests.test_api`` writes them anew; it belongs into docs/changelog.md as well.
"""

from __future__ import annotations

import difflib
import enum
import inspect
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

LIST = Path(__file__).parent / "api.txt"
MODULES = [
    "lightning_distkit",
    "lightning_distkit.callbacks",
    "lightning_distkit.metrics",
    "lightning_distkit.core.compression",
    "lightning_distkit.core.pipeline",
    "lightning_distkit.core.pipeline.skip",
    "lightning_distkit.core.zero",
    "accelerate_plugins",
]


def public_names(module: Any) -> list[str]:
    """Those of ``__all__``; where there is none, those that are imported as themselves."""
    return sorted(
        getattr(module, "__all__", None)
        or (
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", module.__name__) != "typing"
            if not inspect.ismodule(value) and not isinstance(value, type(annotations))
        )
    )


def described(value: Any) -> Iterator[str]:
    """A line for the object, and for a class one for each public method and property that it adds to its bases."""
    if typing.get_origin(value) is not None:
        yield f" = {value}"
        return
    if not callable(value):
        keys = f" of {sorted(map(str, value))}" if isinstance(value, (dict, list, tuple, set, frozenset)) else ""
        yield f": {type(value).__name__}{keys}"
        return
    yield str(inspect.signature(value)).replace("'", "").replace('"', "")
    if not inspect.isclass(value) or issubclass(value, enum.Enum):
        return
    for name, member in sorted(vars(value).items()):
        if name.startswith("_") or any(hasattr(base, name) for base in value.__bases__):
            continue
        if isinstance(member, property):
            yield f".{name}"
        elif callable(inspect.unwrap(getattr(value, name))):
            yield f".{name}{inspect.signature(getattr(value, name))}".replace("'", "").replace('"', "")


def listed() -> str:
    lines = []
    for path in MODULES:
        module = import_module(path)
        for name in public_names(module):
            first, *rest = described(getattr(module, name))
            lines += [f"{path}.{name}{first}", *(f"    {line}" for line in rest)]
    return "\n".join(lines) + "\n"


def test_public_names_arguments_and_defaults_are_those_that_are_listed() -> None:
    now, before = listed(), LIST.read_text()
    changes = "\n".join(difflib.unified_diff(before.splitlines(), now.splitlines(), "listed", "now", lineterm="", n=0))
    assert now == before, f"{changes}\n\nIf that is meant: python -m tests.test_api, and a line in docs/changelog.md"


if __name__ == "__main__":
    LIST.write_text(listed())
