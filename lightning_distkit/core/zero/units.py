"""What is gathered together in a sharded module, decided on paper: the blocks and the root, and no parameter in two.

FSDP2 wants each parameter in one group. One that the root uses, too, is the root's, which is whole for as long as any
block computes. Blocks that share a parameter among each other are no blocks: what contains them gathers it all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_distkit.core.collectives import Group


@dataclass
class Unit:
    """A block, or the root (without a name): the parameters that are gathered together."""

    name: str
    module: nn.Module
    params: dict[nn.Parameter, str]  # and their names
    ignored: set[nn.Parameter]  # of those in it, what the root has


def units_of(root: nn.Module, blocks: Mapping[str, nn.Module]) -> list[Unit]:
    """The root and the blocks that remain when no parameter is in two of them."""
    blocks = dict(blocks)
    while True:
        tops = set(blocks.values())
        units = [
            Unit(name, each, dict(_own(each, tops - {each}, name)), set())
            for name, each in {"": root, **blocks}.items()
        ]
        holders: dict[nn.Parameter, list[Unit]] = {}
        for unit in units:
            for param in unit.params:
                holders.setdefault(param, []).append(unit)
        shared = {param: held_by for param, held_by in holders.items() if len(held_by) > 1}
        dissolved = {unit.name for held_by in shared.values() if held_by[0].name for unit in held_by}
        if not dissolved:
            for param, held_by in shared.items():
                for unit in held_by[1:]:
                    unit.ignored.add(param)
                    del unit.params[param]
            return units
        blocks = {name: each for name, each in blocks.items() if name not in dissolved}


def _own(module: nn.Module, others: set[nn.Module], prefix: str) -> Iterable[tuple[nn.Parameter, str]]:
    """Parameters of ``module`` that are not of ``others`` below it."""
    for name, param in module.named_parameters(recurse=False):
        yield param, f"{prefix}.{name}".lstrip(".")
    for name, child in module.named_children():
        if child not in others:
            yield from _own(child, others, f"{prefix}.{name}".lstrip("."))


def check(module: nn.Module, units: Sequence[Unit]) -> None:
    """Raise a ValueError for what cannot be sharded so."""
    for name, param in module.named_parameters():
        if param.ndim == 0:
            raise ValueError(
                f"a parameter must have a dimension to be cut along, but {name} has none; make it one of shape (1,)"
            )
        if param.numel() == 0 and param.requires_grad:  # FSDP2 cannot reduce its gradient
            raise ValueError(
                f"a trained parameter must have an element, but {name} is of shape {tuple(param.shape)}; freeze it, or "
                "leave it out"
            )
        if isinstance(param, DTensor):
            raise ValueError(f"parameters must be plain tensors, but {name} is a DTensor already")
    for unit in units:
        dtypes: dict[torch.dtype, str] = {}  # and the first parameter of each
        for param, name in unit.params.items():
            if param.requires_grad:
                dtypes.setdefault(param.dtype, name)
        if len(dtypes) > 1:
            (one, its), (other, others) = list(dtypes.items())[:2]
            raise ValueError(
                f"the trained parameters of one block must have one dtype, but in {unit.name or 'the root'!r} {its} is "
                f"{one} and {others} is {other}; convert them, or let the policy make blocks of those that differ"
            )


def agree(module: nn.Module, units: Sequence[Unit], group: Group, device: torch.device) -> None:
    """Raise a ValueError on every rank, if another rank would shard another module, or in another way."""
    values = {
        "the blocks": [unit.name for unit in units],
        "the parameters": [
            (name, tuple(p.shape), str(p.dtype), p.requires_grad, p.is_meta) for name, p in module.named_parameters()
        ],
        "the buffers": [(name, tuple(b.shape), str(b.dtype)) for name, b in module.named_buffers()],
    }
    group.agree("a sharded module", values, device)
