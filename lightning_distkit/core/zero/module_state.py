"""The state of a module with sharded parameters in the ordinary whole form: written by rank 0, read by every rank.

No other rank ever holds more than its shards and one whole tensor under way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.zero.fsdp_state import reshard
from lightning_distkit.core.zero.sharding import sharding_of
from lightning_distkit.core.zero.whole_tensors import detached, gather, take_shard


@torch.no_grad()
def module_full_state_dict(module: nn.Module) -> dict[str, Any]:
    """On rank 0 what ``state_dict()`` of the plain module would be, on the CPU; on the other ranks an empty dict.

    Tied parameters stand under all their names and share memory. Buffers are rank 0's. Collective.

    Raises:
        RuntimeError: another rank did not call it.
    """
    sharding = sharding_of(module)
    if sharding is not None:
        sharding.group.meet("module_full_state_dict")
    return gathered(_sharded_state_dict(module), Group() if sharding is None else sharding.group)


def gathered(state: Mapping[str, Any], group: Group) -> dict[str, Any]:
    """``state`` with whole tensors in the place of DTensors, on the CPU of rank 0; on the others empty. Collective.

    What is one object under several names is sent once, and is one in the result.
    """
    wholes: dict[int, Tensor | None] = {}
    result: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            result[name] = value
            continue
        if id(value) not in wholes:
            wholes[id(value)] = _on_rank_0(value, group.rank)
        result[name] = wholes[id(value)]
    return result if group.rank == 0 else {}


def module_sharded_state_dict(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()`` with this rank's shards as DTensors, for `ShardedCheckpointWriter`; not collective.

    `load_module_full_state_dict` takes what `read_sharded_checkpoint` makes of it.
    """
    reshard(module)
    state: dict[str, Any] = module.state_dict()
    return state


@torch.no_grad()
def load_module_full_state_dict(module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
    """Take this rank's shards from a whole state dict, which every rank has, best from ``torch.load(mmap=True)``.

    Collective.

    Args:
        strict: whether it must have all that the module has, and nothing else.

    Raises:
        ValueError: on every rank, if on one of them it is another module's; nothing is changed then.
    """
    sharding = sharding_of(module)
    if sharding is None:
        module.load_state_dict(state_dict, strict=strict)
        return
    own = _sharded_state_dict(module)
    sharding.group.refuse_together(_refusal(module, own, state_dict, strict), _device(own))
    module.load_state_dict(sharded_part(module, state_dict), strict=strict)


def sharded_part(module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What ``load_state_dict`` of the sharded module takes: the same with DTensors, this rank's shards copied."""
    own = _sharded_state_dict(module)
    return {
        name: take_shard(value, its, its.dtype) if isinstance(its := own.get(name), DTensor) else value
        for name, value in state_dict.items()
    }


def _sharded_state_dict(module: nn.Module) -> dict[str, Any]:
    """With the parameters themselves, so that tied ones are the same object."""
    reshard(module)
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    return state


def _on_rank_0(value: Tensor, rank: int) -> Tensor | None:
    if isinstance(value, DTensor):
        (whole,) = gather([(detached(value), 0)])
        return whole.cpu() if whole is not None and rank == 0 else None
    return value.detach().to("cpu", copy=True) if rank == 0 else None


def _device(own: Mapping[str, Any]) -> torch.device:
    return next((each.device for each in own.values() if isinstance(each, Tensor)), torch.device("cpu"))


def _refusal(module: nn.Module, own: Mapping[str, Any], given: Any, strict: bool) -> str | None:
    """Why ``given`` is no state dict of ``module``, or None."""
    what = f"the state dict must be one of this {type(module).__name__}"
    if not isinstance(given, Mapping):
        return f"{what}, got a {type(given).__name__}"
    missing, unknown = [name for name in own if name not in given], [name for name in given if name not in own]
    if strict and (missing or unknown):
        return f"{what}, but it lacks {missing[:5]} and has {unknown[:5]} too many (at most five of each are named)"
    for name, value in own.items():
        other = given.get(name, value)
        if isinstance(value, Tensor) and not (isinstance(other, Tensor) and other.shape == value.shape):
            was = tuple(other.shape) if isinstance(other, Tensor) else type(other).__name__
            return f"{what}, but {name} must be of shape {tuple(value.shape)}, got {was}"
    return None
