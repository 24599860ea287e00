"""The state of a `DTensorOptimizer` as the plain optimizer would say it, gathered parameter by parameter; and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.zero.foreign_state import why_foreign
from lightning_distkit.core.zero.parts import OfThisRank, whole_part
from lightning_distkit.core.zero.whole_tensors import cut_of, gather, local, shard_like, take_shard

if TYPE_CHECKING:
    from lightning_distkit.core.zero.dtensor_optimizer import DTensorOptimizer


@torch.no_grad()
def gathered_state(optimizer: DTensorOptimizer) -> dict[str, Any]:
    """What ``DTensorOptimizer.state_dict`` promises."""
    optimizer.group.meet("state_dict")
    packed = _packed(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for number, param in enumerate(optimizer.params):
        if isinstance(param, DTensor) and not optimizer.elementwise:
            its = _from_owner(optimizer, param)
        else:
            its = {name: _on_rank_0(value) for name, value in optimizer.state.get(param, {}).items()}
        if its:
            state[number] = its
    return {"state": state, **packed} if optimizer.group.rank == 0 else {}


def sharded_state(optimizer: DTensorOptimizer) -> dict[str, Any]:
    """What ``DTensorOptimizer.sharded_state_dict`` promises."""
    if optimizer.elementwise:
        return optimizer.optimizer.state_dict()
    state: dict[int, dict[str, Any]] = OfThisRank()
    for number, param in enumerate(optimizer.params):
        its = (optimizer.owners.state if isinstance(param, DTensor) else optimizer.state).get(param, {})
        if its:
            state[number] = {name: whole_part(value) for name, value in its.items()}
    return {"state": state, **_packed(optimizer)}


def _packed(optimizer: DTensorOptimizer) -> dict[str, Any]:
    """The plain state dict without the state."""
    held, optimizer.state = optimizer.state, type(optimizer.state)(dict)
    try:
        packed = optimizer.optimizer.state_dict()
    finally:
        optimizer.state = held
    return {name: value for name, value in packed.items() if name != "state"}


def _on_rank_0(value: Any) -> Any:
    if isinstance(value, DTensor):
        (whole,) = gather([(value, 0)])
        return whole.cpu() if whole is not None else None
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value


def _from_owner(optimizer: DTensorOptimizer, param: DTensor) -> dict[str, Any]:
    """The state of a parameter that one rank has whole, on rank 0; on the others nothing of use."""
    cut, owner = cut_of(param), optimizer.owners.of(param, optimizer.params)
    group = Group(cut.group)
    mine = optimizer.owners.state.get(param, {}) if cut.rank == owner else {}
    if owner == 0:
        return {name: _on_rank_0(value) for name, value in mine.items()}
    header = group.everyones(
        {name: (value.shape, value.dtype) if isinstance(value, Tensor) else value for name, value in mine.items()},
        local(param).device,
    )[owner]
    its: dict[str, Any] = {}
    for name, value in header.items():
        if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype)):
            its[name] = value
        elif cut.rank == owner:
            group.send(mine[name].contiguous().to(local(param).device), 0)
        elif cut.rank == 0:
            received = torch.empty(value[0], dtype=value[1], device=local(param).device)
            its[name] = group.receive(received, owner).cpu()
    return its


@torch.no_grad()
def load_whole_state(optimizer: DTensorOptimizer, state_dict: Mapping[str, Any]) -> None:
    """What ``DTensorOptimizer.load_state_dict`` promises."""
    refusal = why_foreign(optimizer.optimizer, optimizer.param_groups, optimizer.elementwise, state_dict)
    optimizer.group.refuse_together(refusal, optimizer.device)
    params, ids = optimizer.params, [number for saved in state_dict["param_groups"] for number in saved["params"]]
    stand_ins: dict[Tensor, Tensor] = {}
    state: dict[int, dict[str, Any]] = {}
    for number, param in dict(zip(ids, params, strict=True)).items():
        its = state_dict["state"].get(number)
        if isinstance(param, DTensor) and not optimizer.elementwise:
            stand_ins[param] = optimizer.owners.whole(param)
            if optimizer.owners.of(param, optimizer.params) != cut_of(param).rank:
                its = None
        if its is not None:
            state[number] = {name: _own_part(value, param, optimizer.elementwise) for name, value in its.items()}
    with optimizer.stepping(stand_ins):
        optimizer.owners.state.clear()
        optimizer.optimizer.load_state_dict({**state_dict, "state": state})
        for param, stood in stand_ins.items():
            if stood in optimizer.state:
                optimizer.owners.state[param] = optimizer.state.pop(stood)
            else:
                del optimizer.owners.wholes[param]


def _own_part(value: Any, param: Tensor, elementwise: bool) -> Any:
    """A copy: torch's optimizers keep what they are given, and may not write to the caller's, or to a file."""
    if not isinstance(value, Tensor):
        return value
    if elementwise and isinstance(param, DTensor) and value.shape == param.shape:
        return take_shard(value, param)
    return value.clone()


def as_dtensors(state: dict[str, Any], param: Tensor, before: dict[str, Any]) -> dict[str, Any]:
    """The state of a shard as that of the DTensor; the DTensors that there were stay the same objects."""
    shape = local(param).shape
    whole: dict[str, Any] = {}
    for name, value in state.items():
        old = before.get(name)
        if isinstance(old, DTensor) and old.to_local().data_ptr() == value.data_ptr() and old.to_local().numel():
            whole[name] = old
        elif isinstance(value, Tensor) and value.shape == shape:
            whole[name] = shard_like(value, cast(DTensor, param))
        else:
            whole[name] = value
    return whole
