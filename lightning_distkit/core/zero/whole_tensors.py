"""From the DTensor of which this rank has a shard to the whole tensor on one rank, and back: a tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_distkit.core.collectives import naming_the_cause
from lightning_distkit.core.ledger import Ledger


@dataclass(frozen=True)
class Cut:
    """How a DTensor is cut: along one dimension over one group, as FSDP2 does, and the same on all other mesh axes."""

    dim: int
    group: dist.ProcessGroup  # the ranks that have one shard each
    rank: int  # of this process within it
    world_size: int
    first: bool  # whether this is the replica that speaks for all

    def piece(self, whole: Tensor, rank: int) -> Tensor:
        """The view of ``whole`` that is the shard of ``rank``; as torch.chunk, so the last ones may be empty."""
        length = whole.size(self.dim)
        split = -(-length // self.world_size)
        begin = min(rank * split, length)
        return whole.narrow(self.dim, begin, min(split, length - begin))


def cut_of(tensor: DTensor) -> Cut:
    """How it is cut.

    Raises:
        ValueError: not as FSDP2 cuts a plain parameter.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    cuts = [axis for axis, placement in enumerate(placements) if type(placement) is Shard]
    if len(cuts) != 1 or not all(type(each) in (Shard, Replicate) for each in placements):
        raise ValueError(
            f"a DTensor must be cut along one dimension, over one axis of its mesh, got {placements}: parameters that "
            "another parallelism has cut before are not supported; shard plain ones"
        )
    (axis,) = cuts
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"this rank must be in the mesh of its parameters, but is not in {mesh}")
    first = all(at == 0 for other, at in enumerate(coordinate) if other != axis)
    dim = placements[axis].dim  # type: ignore[attr-defined]  # a Shard
    return Cut(dim % tensor.ndim, mesh.get_group(axis), coordinate[axis], mesh.size(axis), first)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, the same memory; a plain tensor itself."""
    return detached(tensor).to_local() if isinstance(tensor, DTensor) else tensor.detach()


def detached(tensor: DTensor) -> DTensor:
    """``detach()``, which torch declares to return a Tensor."""
    return cast(DTensor, tensor.detach())


def full(tensor: DTensor) -> Tensor:
    """The whole tensor, on every rank."""
    return detached(tensor).full_tensor()


def shard_like(mine: Tensor, like: DTensor) -> DTensor:
    """``mine`` as this rank's shard of a tensor of the shape, and cut as, ``like``; the memory is shared."""
    return DTensor.from_local(
        mine, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def take_shard(whole: Tensor, like: DTensor, dtype: torch.dtype | None = None) -> DTensor:
    """This rank's shard of ``whole``, copied; cut and placed as ``like``, of its own dtype by default."""
    cut = cut_of(like)
    mine = cut.piece(whole, cut.rank)
    copied = torch.empty(mine.shape, dtype=dtype or mine.dtype, device=local(like).device)
    return shard_like(copied.copy_(mine), like)


def gather(pairs: Sequence[tuple[DTensor, int]], ledger: Ledger | None = None) -> list[Tensor | None]:
    """The whole of each tensor on the rank (of its shard group) named beside it, on its device; None elsewhere.

    Collective over the group. All are under way at once: the caller gives as many as may be whole at a time. What is
    sent is counted if there is a ``ledger``.
    """
    wholes: list[Tensor | None] = []
    exchange = _Exchange()
    for tensor, to in pairs:
        cut, mine = cut_of(tensor), local(tensor)
        if cut.rank != to:
            exchange.send(mine, to, cut)
            wholes.append(None)
            continue
        whole = torch.empty(tensor.shape, dtype=mine.dtype, device=mine.device)
        cut.piece(whole, to).copy_(mine)
        for rank in range(cut.world_size):
            if rank != to:
                exchange.receive(cut.piece(whole, rank), rank, cut)
        wholes.append(whole)
    exchange.wait(ledger)
    return wholes


def scatter_(triples: Sequence[tuple[DTensor, int, Tensor | None]], ledger: Ledger | None = None) -> None:
    """Fill each tensor's shards from the whole one that the rank named beside it holds; the reverse of `gather`."""
    exchange = _Exchange()
    for tensor, owner, whole in triples:
        cut, mine = cut_of(tensor), local(tensor)
        if whole is None:
            exchange.receive(mine, owner, cut)
            continue
        mine.copy_(cut.piece(whole, owner))
        for rank in range(cut.world_size):
            if rank != owner:
                exchange.send(cut.piece(whole, rank).to(mine.dtype), rank, cut)
    exchange.wait(ledger)


class _Exchange:
    """Messages between two ranks each, all under way at once; those without elements are not sent."""

    def __init__(self) -> None:
        self._works: list[tuple[dist.Work | None, Cut]] = []
        self._late: list[tuple[Tensor, Tensor]] = []  # where to copy what was received in other memory, and that
        self._alive: list[Tensor] = []

    def send(self, tensor: Tensor, to: int, cut: Cut) -> None:
        if tensor.numel():
            tensor = tensor.contiguous()
            self._alive.append(tensor)
            with naming_the_cause(cut.group):
                self._works.append((dist.isend(tensor, group=cut.group, group_dst=to), cut))

    def receive(self, into: Tensor, sender: int, cut: Cut) -> None:
        if into.numel():
            received = into if into.is_contiguous() else torch.empty_like(into, memory_format=torch.contiguous_format)
            if received is not into:
                self._late.append((into, received))
            with naming_the_cause(cut.group):
                self._works.append((dist.irecv(received, group=cut.group, group_src=sender), cut))

    def wait(self, ledger: Ledger | None) -> None:
        begin = perf_counter()
        for work, cut in self._works:
            with naming_the_cause(cut.group):
                if work is not None:
                    work.wait()
        for into, received in self._late:
            into.copy_(received)
        if ledger is not None:
            nbytes = sum(tensor.nbytes for tensor in self._alive)
            ledger.add(nbytes=nbytes, n_messages=1, waited_s=perf_counter() - begin)
