"""The values with which a module begins: rank 0's, or those of the first rank that has them, or newly drawn ones.

After a fit, or an exception in one, a layer may be on one rank and on the meta device on others. What is on meta
everywhere in the pipe is left to the pipe; outside of it, every rank makes it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.pipeline.frames import as_bytes
from lightning_distkit.core.pipeline.materialise import _children_first, _give_memory, _reset_of
from lightning_distkit.core.pipeline.materialise import check as check_meta

_CPU = torch.device("cpu")


def is_whole(module: nn.Module) -> bool:
    """Whether nothing is on the meta device."""
    return not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


@torch.no_grad()
def even_out(module: nn.Module, sequential: nn.Sequential, own: Collection[str], world: Group) -> None:
    """Give all ranks the same values of ``module``, each those that it needs. Collective.

    Args:
        sequential: the part of which only the layers named in ``own`` will be here.
        world: all ranks, for messages on the CPU.

    Raises:
        ValueError: something is on meta everywhere and cannot be initialised.
    """
    if all(world.everyones(is_whole(module), _CPU)):
        for tensor in _distinct(module):
            _broadcast(tensor, world)
        return
    inside = set(sequential.modules())
    _make_outside(module, inside, world)
    needed = {id(each) for name, layer in sequential.named_children() if name in own for each in _distinct(layer)}
    needed |= {id(each) for part in module.modules() if part not in inside for each in _slots(part)}
    tensors = _distinct(module)
    is_here = world.everyones([not each.is_meta for each in tensors], _CPU)
    is_needed = world.everyones([not each.is_meta or id(each) in needed for each in tensors], _CPU)
    for n, tensor in enumerate(tensors):
        holders = [rank for rank, here in enumerate(is_here) if here[n]]
        if not holders:
            continue
        takers = [rank for rank, needs in enumerate(is_needed) if needs[n] and rank != holders[0]]
        if world.rank == holders[0]:
            for rank in takers:
                world.send(tensor.detach().to("cpu").contiguous(), rank)
        elif world.rank in takers:
            value = world.receive(torch.empty(tensor.shape, dtype=tensor.dtype), holders[0])
            if tensor.is_meta:
                _replace(module, tensor, value)
            else:
                tensor.copy_(value)


def _broadcast(tensor: Tensor, world: Group) -> None:
    message = tensor.detach().to("cpu").contiguous()
    world.broadcast_(as_bytes(message)).wait()  # gloo does not know every dtype
    if message.data_ptr() != tensor.data_ptr():
        tensor.copy_(message)


def _make_outside(module: nn.Module, inside: set[nn.Module], world: Group) -> None:
    """What is on meta on all ranks is drawn on all, and then is rank 0's."""
    parts = [each for each in _children_first(module) if each not in inside]
    on_meta = world.everyones([any(tensor.is_meta for tensor in _slots(each)) for each in parts], _CPU)
    lost = [all(of[n] for of in on_meta) for n in range(len(parts))]
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part, is_lost in zip(parts, lost, strict=True):
        if is_lost:
            if _reset_of(part) is None:
                check_meta(module)
            _give_memory(part, _CPU, made)
    for part, is_lost in zip(parts, lost, strict=True):
        if is_lost and (reset := _reset_of(part)) is not None:
            reset()


def _slots(part: nn.Module) -> list[Tensor]:
    """A module's own tensors, without those of its children."""
    return [each for each in (*part._parameters.values(), *part._buffers.values()) if each is not None]


def _distinct(module: nn.Module) -> list[Tensor]:
    """Its tensors in order, tied ones once."""
    return list({id(tensor): tensor for part in module.modules() for tensor in _slots(part)}.values())


def _replace(module: nn.Module, before: Tensor, value: Tensor) -> None:
    after = nn.Parameter(value, before.requires_grad) if isinstance(before, nn.Parameter) else value
    for part in module.modules():
        for slots in (part._parameters, part._buffers):
            for key, tensor in slots.items():
                if tensor is before:
                    slots[key] = after  # type: ignore[assignment]
