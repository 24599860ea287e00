"""Layers on the meta device get memory and values one at a time; this rank keeps its own.

Values are those that the whole module has when it is made on a real device after the same ``torch.manual_seed``, for
modules that draw in ``reset_parameters`` as torch's do: every rank draws for all layers in order, so that its own get
their numbers and the generator stands alike on all ranks afterwards, and drops those of others at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from lightning_distkit.core.pipeline.placeholder import Absent


def check(module: nn.Module) -> None:
    """
    Raises:
        ValueError: something on the meta device has no ``reset_parameters`` to give it values.
    """
    for name, each in module.named_modules():
        own = [*each.named_parameters(recurse=False), *each.named_buffers(recurse=False)]
        lost = [key for key, tensor in own if tensor.is_meta and not isinstance(tensor, Absent)]
        if lost and _reset_of(each) is None and not _is_reset_above(module, name):
            raise ValueError(
                f"what is on the meta device must be initialised by reset_parameters of its module, but "
                f"{type(each).__name__} {name!r} has none for {', '.join(lost)}; define it, or make the module on a "
                "real device"
            )


@torch.no_grad()
def materialise(module: nn.Sequential, own: Collection[str], device: torch.device) -> None:
    """Give memory on ``device`` to those children of ``module`` that are named in ``own`` and are on meta, in place."""
    tensors = (*module.parameters(), *module.buffers())
    if not any(tensor.is_meta and not isinstance(tensor, Absent) for tensor in tensors):
        return
    tied: dict[nn.Parameter, nn.Parameter] = {}
    for name, layer in module.named_children():
        mine, made = (layer, tied) if name in own else (copy.deepcopy(layer), {})
        resets = [reset for each in _children_first(mine) if (reset := _reset_of(each)) and _lacks_values(each)]
        for each in mine.modules():
            _give_memory(each, device, made)
        for reset in resets:
            reset()


def _give_memory(module: nn.Module, device: torch.device, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """To what ``module`` itself, without its children, has on meta; ``made`` keeps tied what was."""
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            if parameter not in made:
                empty = torch.empty_like(parameter, device=device)
                made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[key] = made[parameter]
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = torch.empty_like(buffer, device=device)


def _lacks_values(module: nn.Module) -> bool:
    """Whether it must be reset: what is real has values already, perhaps trained ones."""
    return any(
        tensor.is_meta
        for each in module.modules()
        if each is module or _reset_of(each) is None
        for tensor in (*each.parameters(recurse=False), *each.buffers(recurse=False))
    )


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(reset := getattr(module, name, None)):
            return reset  # type: ignore[no-any-return]
    return None


def _is_reset_above(module: nn.Module, name: str) -> bool:
    """Whether a module that contains it resets it: torch's attention does that with its children."""
    parts = name.split(".")
    above = [module.get_submodule(".".join(parts[:n])) for n in range(1, len(parts))]
    return any(_reset_of(each) is not None for each in above)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """As constructors end: a module after all that it contains."""
    for child in module.children():
        yield from _children_first(child)
    yield module
