"""Parameters that stand in several modules: which of these gives them their first values.

A constructor makes them apart and ties them, so those of one module are kept and the other's are lost; afterwards
nothing tells which. So it must be said, as transformers' modules do: `_tied_weights_keys` names those that follow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lightning_distkit.core.zero.fsdp_state import param_groups_of


@dataclass(frozen=True)
class Place:
    """One of those where a parameter is."""

    name: str  # the qualified one
    holder: nn.Module
    attribute: str
    follows: bool  # whether its own first values are lost

    @property
    def param(self) -> nn.Parameter:
        param = self.holder._parameters[self.attribute]
        assert param is not None
        return param


def places(module: nn.Module) -> list[list[Place]]:
    """Of each parameter, those where it is."""
    following = [
        re.compile(f"{re.escape(prefix)}{'.' if prefix else ''}(.*{key})$")
        for prefix, each in module.named_modules()
        for key in getattr(each, "_tied_weights_keys", None) or ()
    ]
    found: dict[nn.Parameter, list[Place]] = {}
    for prefix, each in module.named_modules():
        for attribute, param in each.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}".lstrip(".")
            follows = any(pattern.match(name) for pattern in following)
            found.setdefault(param, []).append(Place(name, each, attribute, follows))
    return list(found.values())


def tie(module: nn.Module, of_params: list[list[Place]]) -> None:
    """Put one object in all places of a parameter again, after ``module._apply`` has put a new one in each."""
    managed = set(_managed(module))
    for its in of_params:
        # FSDP2 has taken up the one in the place that it knows.
        first = next((place for place in its if (place.holder, place.attribute) in managed), its[0]).param
        for place in its:
            place.holder._parameters[place.attribute] = first


def _managed(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for param_group in param_groups_of(module):
        for each in param_group.fsdp_params:
            yield each._module_info.module, each._module_info.param_name
