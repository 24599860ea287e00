"""What a `DistributedPipe` is made of, found alike on every rank before anything is sent: arguments, groups, layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import LBFGS, Optimizer

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.pipeline.checkpoint import CHECKPOINT_MODES
from lightning_distkit.core.pipeline.plan import Direction
from lightning_distkit.core.pipeline.schedules import SCHEDULES
from lightning_distkit.core.pipeline.skip import SkipKey
from lightning_distkit.core.pipeline.watch import Ends

OUTPUTS = ("all", "last")


def groups_of(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> tuple[Group, Group]:
    """Those of the pipeline, and of the data replicas of this rank's stages.

    Raises:
        ValueError: both are given, or the mesh has not two dimensions.
    """
    if mesh is None:
        return Group.of(group), Group()
    if group is not None:
        raise ValueError("group and mesh both say which processes are meant; give one of them")
    if mesh.ndim != 2:
        raise ValueError(f"mesh must have two dimensions, data and pipeline, got {mesh.ndim}")
    data, pipeline = mesh.get_group(0), mesh.get_group(1)
    return Group.of(pipeline), Group(data) if dist.get_world_size(data) > 1 else Group()


def check(
    module: object,
    chunks: object,
    checkpoint: object,
    schedule: object,
    n_stages_per_rank: object,
    outputs: object,
    timeout: float,
) -> None:
    """
    Raises:
        TypeError, ValueError: an argument of `DistributedPipe` is wrong.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"the module of a pipe must be an nn.Sequential, got {type(module).__name__}")
    check_arguments(chunks, checkpoint, schedule, n_stages_per_rank, outputs)
    if not timeout > 0:
        raise ValueError(f"timeout must be positive, got {timeout:g} seconds")


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise a ValueError if it cannot train one stage's parameters."""
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS needs all parameters at once, and a stage has its own alone; use another optimizer, as AdamW"
        )


def check_arguments(
    chunks: object, checkpoint: object, schedule: object, n_stages_per_rank: object, outputs: object
) -> None:
    """Those that can be checked before there is a module.

    Raises:
        ValueError: one of them is wrong.
    """
    for name, number in (("chunks", chunks), ("n_stages_per_rank", n_stages_per_rank)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name} must be a positive integer, got {number!r}")
    for name, value, known in (
        ("checkpoint", checkpoint, CHECKPOINT_MODES),
        ("schedule", schedule, tuple(SCHEDULES)),
        ("outputs", outputs, OUTPUTS),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    assert isinstance(n_stages_per_rank, int)
    try:
        SCHEDULES[str(schedule)](1, 1, n_stages_per_rank)
    except ValueError as error:
        raise ValueError(f"n_stages_per_rank: {error}") from None


def agreed(
    find_balance: Callable[[], list[int]], given: dict[str, Any], pipeline: Group, data: Group, device: torch.device
) -> list[int]:
    """The balance that the first rank finds.

    Raises:
        TypeError, ValueError: on every rank, what ``find_balance`` raises on one; or ``given`` differs between ranks.
    """
    error: Exception | None = None
    found: tuple[list[int], str, str] = ([], "", "")
    try:
        found = (find_balance(), "", "")
    except Exception as refusal:
        error = refusal
        found = ([], type(refusal).__name__, str(refusal))
    balance = found[0]
    for group in (pipeline, data):
        where = control_device(group, device)
        everyones = group.everyones(found, where)
        for rank, (_, kind, text) in enumerate(everyones):
            if kind:
                raise error or (TypeError if kind == "TypeError" else ValueError)(f"{text} (rank {rank})")
        group.agree("DistributedPipe", given, where)
        balance = everyones[0][0] if group is pipeline else group.everyones(balance, where)[0]
    return balance


def is_gloo(group: Group) -> bool:
    return group.process_group is None or dist.get_backend(group.process_group) == "gloo"


def control_device(group: Group, device: torch.device) -> torch.device:
    """Where a group's small messages must be."""
    return torch.device("cpu") if is_gloo(group) else device


def device_of(module: object) -> torch.device:
    """That of the first tensor that is not on meta."""
    if isinstance(module, nn.Module):
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                return tensor.device
    return torch.get_default_device()


def skip_keys(skips: Mapping[SkipKey, tuple[int, int]], stage: int, pops: bool) -> dict[int, list[SkipKey]]:
    """For each other stage, the keys of what goes from it to ``stage``, or the other way."""
    result: dict[int, list[SkipKey]] = {}
    for key, (stashes_at, pops_at) in skips.items():
        here, there = (pops_at, stashes_at) if pops else (stashes_at, pops_at)
        if here == stage and there != stage:
            result.setdefault(there, []).append(key)
    return result


def tied_parameters(
    module: nn.Module, names_of: Sequence[Sequence[str]], n_ranks: int
) -> list[tuple[list[str], tuple[int, ...]]]:
    """Of each parameter that several ranks have, its names and the ranks."""
    rank_of = {name: stage % n_ranks for stage, names in enumerate(names_of) for name in names}
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    ranks = [(its, tuple(sorted({rank_of[name.split(".")[0]] for name in its}))) for its in names.values()]
    return [(its, each) for its, each in ranks if len(each) > 1]


def ends_of(pipeline: Group, device: torch.device, timeout: float, n_stages: int) -> Ends:
    """The groups that a pipe's frames travel by, made anew: nobody else's messages come between."""
    assert pipeline.process_group is not None
    ranks = dist.get_process_group_ranks(pipeline.process_group)
    payload = {}
    if device.type != "cpu" and not is_gloo(pipeline):
        backend = dist.get_default_backend_for_device(device)
        for direction in Direction:
            for upwards in (False, True):
                payload[direction, upwards] = _new_group(ranks, backend, timeout)
    return Ends(gloo_twin(pipeline, timeout), payload, device, ranks, n_stages, timeout)


def gloo_twin(group: Group, timeout: float) -> dist.ProcessGroup:
    """The same processes in a gloo group that nobody else knows."""
    assert group.process_group is not None
    return _new_group(dist.get_process_group_ranks(group.process_group), "gloo", timeout)


def _new_group(ranks: list[int], backend: str, timeout: float) -> dist.ProcessGroup:
    # Synchronised among its own ranks alone: other pipes of a mesh make theirs, with no common order.
    made: dist.ProcessGroup = dist.new_group(
        ranks, backend=backend, timeout=timedelta(seconds=timeout), use_local_synchronization=True
    )
    return made
