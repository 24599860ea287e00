"""What a setting may be, as data: a JSON schema made of a plugin's annotations, for editors and for our own check."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import fields
from inspect import cleandoc
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from accelerate_plugins.plugin import PLUGINS, Plugin, load

Schema = dict[str, Any]

_SIMPLE: dict[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_IN_WORDS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "null": "null",
    "object": "a mapping",
    "array": "a list",
}


def schema() -> Schema:
    """Of a whole file, any plugin."""
    names: dict[type[Plugin], list[str]] = {}
    for name, (path, _) in PLUGINS.items():
        names.setdefault(load(path), []).append(name)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "accelerate_plugins",
        "type": "object",
        "oneOf": [
            {
                "properties": {"plugin": {"enum": its_names, "description": "which plugin"}, **settings(cls)},
                "required": ["plugin"],
                "additionalProperties": False,
            }
            for cls, its_names in names.items()
        ],
    }


def settings(cls: type[Plugin]) -> dict[str, Schema]:
    """Of each setting of one plugin: what it may be in a file, what it does, and its default."""
    # The one annotation that is not imported at run time; a file cannot hold such an object anyway.
    hints = get_type_hints(cls, localns={"MixedPrecisionPolicy": type})
    explained = descriptions(cls)
    return {
        each.name: {
            **_schema_of(hints[each.name]),
            "description": explained.get(each.name, ""),
            "default": each.default,
        }
        for each in fields(cls)
    }


def descriptions(cls: type[Plugin]) -> dict[str, str]:
    """What the docstrings say, of the plugin itself and of the core object that explains the rest."""
    explained: dict[str, str] = {}
    for source in (load(cls.explained_by) if cls.explained_by else None, cls):
        _, _, args = cleandoc(source.__doc__ or "").partition("Args:\n") if source is not None else ("", "", "")
        for name, text in re.findall(r"^    (\w+): (.*(?:\n        .*)*)", args, re.MULTILINE):
            explained[name] = re.sub(r"\s+", " ", text)
    return explained


def _schema_of(annotation: Any) -> Schema:
    """Of those values of an annotation that a file can hold; nothing of classes, functions and torch's dtypes."""
    if annotation in _SIMPLE:
        return {"type": _SIMPLE[annotation]}
    origin = get_origin(annotation)
    if origin is Literal:
        return {"enum": list(get_args(annotation))}
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema_of(get_args(annotation)[1])}
    if origin is list:
        return {"type": "array", "items": _schema_of(get_args(annotation)[0])}
    if origin in (Union, types.UnionType):
        either = [one for each in get_args(annotation) if (one := _schema_of(each))]
        return either[0] if len(either) == 1 else {"anyOf": either}
    return {}


def fits(value: Any, its: Schema) -> bool:
    """Whether ``value`` is what the schema says; of the forms that `_schema_of` makes."""
    if "anyOf" in its:
        return any(fits(value, each) for each in its["anyOf"])
    if "enum" in its:
        return any(value == each and type(value) is type(each) for each in its["enum"])
    if its["type"] == "object":
        return isinstance(value, Mapping) and all(fits(each, its["additionalProperties"]) for each in value.values())
    if its["type"] == "array":
        return isinstance(value, list) and all(fits(each, its["items"]) for each in value)
    if its["type"] == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return any(type(value) is each for each, name in _SIMPLE.items() if name == its["type"])


def in_words(its: Schema) -> str:
    """What must be."""
    if "anyOf" in its:
        return " or ".join(dict.fromkeys(in_words(each) for each in its["anyOf"]))
    if "enum" in its:
        return "one of " + ", ".join(map(str, its["enum"]))
    return _IN_WORDS[its["type"]]
