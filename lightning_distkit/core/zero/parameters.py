"""ZeRO stage 3: each rank keeps a shard of every parameter; a block is whole only while it computes.

It is FSDP2's ``fully_shard``, with what a user of DDP expects around it: blocks that are found, rank 0's values, tied
parameters in any place, parameters that a rank has not used, and on gloo a transport that is faster than gloo's own.

Source: Rajbhandari et al., 2020, "ZeRO", https://arxiv.org/abs/1910.02054, section 5.3; Zhao et al., 2023, "PyTorch
FSDP", https://arxiv.org/abs/2304.11277.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_distkit.core.collectives import Group, default_device
from lightning_distkit.core.zero.fsdp_state import param_groups_of, reshard, state_of
from lightning_distkit.core.zero.fsdp_transport import use_point_to_point
from lightning_distkit.core.zero.holders import WithoutDDP, living_modules, refusal, wrapped
from lightning_distkit.core.zero.initialise import check_initialisable, initialise
from lightning_distkit.core.zero.module_state import load_module_full_state_dict
from lightning_distkit.core.zero.policy import Policy, find_blocks
from lightning_distkit.core.zero.replaced import refuse_gradients
from lightning_distkit.core.zero.sharding import ATTRIBUTE, Sharding, sharding_of
from lightning_distkit.core.zero.unfreezing import follow
from lightning_distkit.core.zero.units import agree, check, units_of
from lightning_distkit.core.zero.unused import Unused
from lightning_distkit.core.zero.whole_tensors import detached, full, gather

Module = TypeVar("Module", bound=nn.Module)

_ATTRIBUTES = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", ATTRIBUTE)  # that plain modules have not


def shard_parameters(
    module: Module,
    group: dist.ProcessGroup | Group | None = None,
    *,
    mesh: DeviceMesh | None = None,
    policy: Policy = "auto",
    mixed_precision: MixedPrecisionPolicy | None = None,
    offload: OffloadPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    n_prefetched: int = 1,
    find_unused_parameters: bool = True,
    point_to_point: bool | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
) -> Module:
    """Shard the parameters of ``module``, in place, block by block and the rest as the root; returns ``module``.

    Parameters become DTensors, so an optimizer is made afterwards, and wrapped in `DTensorOptimizer`. Their values are
    rank 0's. Those of a module on the meta device are initialised here (`initialise`) or loaded, a layer at a time. A
    block shares no parameter with another one: what the root uses, too, is the root's, and blocks that share among
    each other are left to what contains them. Buffers stay as they are on each rank, after rank 0's at the beginning:
    whoever wants DDP's ``broadcast_buffers`` broadcasts them before the forward. Every rank must run the same blocks
    in forward and backward; within a block, parameters may be unused on some ranks.

    Collective over the group. With a world of one and no process group, the module stays as it is.

    Args:
        module: on the CPU, on the accelerator, or on the meta device.
        group: the ranks; by default all, or a world of one where torch.distributed is not initialized. Its ledger
            counts what the transport on gloo sends.
        mesh: in place of ``group``: one axis of ranks, or (replicate, shard).
        policy: which modules are blocks; see `find_blocks`.
        mixed_precision, offload, reshard_after_forward: as ``fully_shard``'s ``mp_policy``, ``offload_policy`` and
            ``reshard_after_forward``.
        n_prefetched: blocks, in the order of ``module.named_modules()``, whose all-gather is started ahead of need.
        find_unused_parameters: whether parameters may have a gradient on one rank and none on another; costs one
            message of a byte per parameter a step. Otherwise such a difference ends in an error of the backend.
        point_to_point: whether to gather and reduce with `fsdp_transport`; by default on the CPU.
        state_dict: the whole one, on every rank, to load instead of rank 0's values.

    Raises:
        ValueError: on every rank, before anything is sent: a policy that matches nothing, a parameter without a
            dimension or a trained one without elements, several dtypes in one block, a module that is sharded already
            or on the wrong device.
    """
    ranks = _group(group, mesh)
    if ranks.process_group is None:
        _load_or_refuse_meta(module, ranks, state_dict)
        return module
    try:
        if any(isinstance(each, FSDPModule) for each in module.modules()):
            raise ValueError(
                "the module must be plain, but is sharded already; unshard_parameters makes it plain again"
            )
        if (why := wrapped(module)) is not None:
            raise ValueError(why)
        if n_prefetched < 0:
            raise ValueError(f"n_prefetched must be at least 0, got {n_prefetched}")
        units = units_of(module, find_blocks(module, policy))
        device = _device(module, ranks)
        check(module, units)
        living = living_modules()
        if (why := refusal(list(module.parameters()), living)) is not None:
            raise ValueError(why)
        if state_dict is None:
            check_initialisable(module)
        why_not = None
    except ValueError as error:  # raised on every rank, as others would wait for this one
        why_not = str(error)
    ranks.refuse_together(why_not, default_device(ranks.process_group))
    agree(module, units, ranks, device)
    if mesh is None:
        mesh = DeviceMesh.from_group(ranks.process_group, device.type)
    meta = [name for name, each in _tensors(module) if each.is_meta]
    _broadcast(module, ranks, device, state_dict is None)

    without_ddp = WithoutDDP()
    without_ddp.watch(list(module.parameters()), living)
    arguments: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
    arguments |= {"mp_policy": mixed_precision} if mixed_precision is not None else {}
    arguments |= {"offload_policy": offload} if offload is not None else {}
    refuse_gradients(module.parameters())  # of those that are replaced now
    for unit in reversed(units):  # the inner ones first
        fully_shard(unit.module, ignored_params=unit.ignored or None, **arguments)
    blocks = {unit.name: unit.module for unit in units if unit.name}
    unused = Unused() if find_unused_parameters else None
    for param_group in param_groups_of(module):
        follow(param_group)
        if unused is not None:
            unused.attach(param_group)
    module.__dict__[ATTRIBUTE] = Sharding(ranks, blocks, unused, without_ddp)
    root = cast(FSDPModule, module)
    if point_to_point if point_to_point is not None else device.type == "cpu":
        use_point_to_point(param_groups_of(module), ranks.ledger)
    if n_prefetched:
        _prefetch([root, *(cast(FSDPModule, block) for block in blocks.values())], n_prefetched)

    if meta:
        initialise(module, device, ranks, loaded=None if state_dict is None else set(state_dict))
    if state_dict is not None:
        load_module_full_state_dict(module, state_dict)
    return module


@torch.no_grad()
def unshard_parameters(module: Module, rank_0_only: bool = False) -> Module:
    """Make the module plain again, in place, with whole parameters; returns ``module``.

    Nothing of FSDP2 is left: it can be copied, pickled, trained, or sharded again. Its parameters are new objects, and
    gradients are dropped; an optimizer's state is taken over by `DTensorOptimizer.state_dict`. Collective.

    Args:
        rank_0_only: leave the parameters of all other ranks on the meta device, without memory.
    """
    sharding = sharding_of(module)
    if sharding is None:
        return module
    sharding.group.meet("unshard_parameters")
    sharding.without_ddp.release()
    reshard(module)
    for param_group in param_groups_of(module):
        for fsdp_param in param_group.fsdp_params:
            sharded: DTensor = fsdp_param.sharded_param
            if rank_0_only:
                (whole,) = gather([(detached(sharded), 0)])
                if sharding.group.rank != 0:
                    whole = None  # of another replica
            else:
                whole = full(sharded)
            if whole is None:
                whole = torch.empty(sharded.shape, dtype=sharded.dtype, device="meta")
            fsdp_param._setattr_on_modules(nn.Parameter(whole, requires_grad=sharded.requires_grad))
            fsdp_param._post_load_hook_handle.remove()
        for name in ("_module_to_pre_save_state_dict_hook_handle", "_module_to_pre_load_state_dict_hook_handle"):
            for handle in getattr(param_group, name).values():
                handle.remove()
    for each in list(module.modules()):
        if isinstance(each, FSDPModule):
            _strip(each)
        for name in _ATTRIBUTES:
            each.__dict__.pop(name, None)
    return module


def _strip(module: Any) -> None:
    """Take FSDP2's hooks, class and state away from one module."""
    state = state_of(module)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    module.__class__ = type(module).__mro__[2]  # [FSDP + its name, FSDPModule, the plain class, ...]
    for key in (STATE_KEY, REGISTRY_KEY):
        entries = module.__dict__.get(key, {})
        for name in [name for name in entries if getattr(name, "__name__", name) == fully_shard.__name__]:
            del entries[name]
        if not entries:
            module.__dict__.pop(key, None)
    _module_state_mapping.pop(module, None)


def _group(group: dist.ProcessGroup | Group | None, mesh: DeviceMesh | None) -> Group:
    if mesh is not None:
        if group is not None:
            raise ValueError("either a group or a mesh must be given, got both")
        if mesh.ndim > 2:
            raise ValueError(f"the mesh must have one axis, or two (replicate, shard), got {mesh.ndim}: {mesh}")
        return _whole_mesh(mesh)
    return Group.of(group)


def _whole_mesh(mesh: DeviceMesh) -> Group:
    if mesh.ndim == 1:
        return Group(mesh.get_group(0))
    if mesh.size() == dist.get_world_size():
        return Group(dist.group.WORLD)
    raise ValueError(f"a mesh of two axes must be over all ranks, got {mesh.size()} of {dist.get_world_size()}")


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _device(module: nn.Module, group: Group) -> torch.device:
    """Where to train: where the module is; for one on meta, where the process group's tensors are."""
    types = {each.device.type for _, each in _tensors(module)} - {"meta"}
    if len(types) > 1:
        raise ValueError(f"the module must be on one type of device, got {', '.join(sorted(types))}; move it")
    backend = dist.get_backend(group.process_group)
    kind = types.pop() if types else default_device(group.process_group).type
    if kind == "cpu" and backend == "nccl":
        raise ValueError(
            "the module is on the CPU, and the process group's backend is nccl, which needs CUDA: move the module, or "
            'initialize with backend="gloo"'
        )
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


@torch.no_grad()
def _broadcast(module: nn.Module, group: Group, device: torch.device, values: bool) -> None:
    """Rank 0's values, a tensor at a time; and contiguous ones, as FSDP2 demands."""
    for _, each in _tensors(module):
        if not each.is_meta:
            if each.device != device:
                each.data = each.data.to(device)
            if not each.is_contiguous():
                each.data = each.data.contiguous()
            if values:
                group.broadcast_(each.data).wait()


def _prefetch(modules: Sequence[FSDPModule], n: int) -> None:
    """The root and the blocks, in the order of their forward."""
    for at, each in enumerate(modules):
        if following := list(modules[at + 1 : at + 1 + n]):
            each.set_modules_to_forward_prefetch(following)
        before = list(reversed(modules[1:])) if at == 0 else list(reversed(modules[1:at]))
        if before:
            each.set_modules_to_backward_prefetch(before[:n])


def _load_or_refuse_meta(module: nn.Module, group: Group, state_dict: Mapping[str, Tensor] | None) -> None:
    """A world of one without a process group: no sharding, the same values."""
    if any(each.is_meta for _, each in _tensors(module)):
        if state_dict is None:
            check_initialisable(module)
        initialise(module, torch.device("cpu"), group, loaded=None if state_dict is None else set(state_dict))
    if state_dict is not None:
        module.load_state_dict(state_dict)
