"""Parameters as views of one flat tensor that is cut into a shard for each rank.

Where each parameter lies is a `Layout`, decided on paper and the same on every rank; a `Bucket` is the memory. Two ways
to lay out: `slices` cuts wherever the shards end, so that all are equally long; `whole_parameters` gives each parameter
to one rank, for optimizers that need whole matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ALIGNMENT = 16  # elements: every parameter and shard begins at a multiple, for vector instructions


@dataclass(frozen=True)
class Piece:
    """The part of one parameter, in memory order, that lies in one rank's shard."""

    index: int  # of the parameter in the bucket
    owner: int  # the rank
    begin: int  # element of the parameter
    end: int
    at: int  # element of the shard


@dataclass(frozen=True)
class Layout:
    """Where each parameter and each rank's shard is in the flat tensor, in elements."""

    begins: tuple[int, ...]  # of each parameter
    splits: tuple[int, ...]  # numel of each rank's shard
    pieces: tuple[Piece, ...]  # by owner

    def of(self, owner: int) -> tuple[Piece, ...]:
        return tuple(piece for piece in self.pieces if piece.owner == owner)

    @property
    def numel(self) -> int:
        return sum(self.splits)


def alike(params: Sequence[Tensor], cap: float) -> Iterator[list[Tensor]]:
    """What may be one bucket: parameters of one dtype and device, last ones first, as backward comes to them.

    Args:
        cap: bytes, which a parameter alone may exceed.
    """
    open_ones: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for param in reversed(params):
        kind = (param.dtype, param.device)
        together = open_ones.setdefault(kind, [])
        if together and sum(each.nbytes for each in together) + param.nbytes > cap:
            yield open_ones.pop(kind)
            together = open_ones.setdefault(kind, [])
        together.append(param)
    yield from open_ones.values()


def slices(numels: Sequence[int], world_size: int) -> Layout:
    """One parameter after the other, and shards of one length, wherever that cuts."""
    begins, end = [], 0
    for numel in numels:
        begins.append(end)
        end += _aligned(numel)
    split = _aligned(-(-end // world_size))
    pieces = []
    for owner in range(world_size):
        low, high = owner * split, (owner + 1) * split
        for index, (first, numel) in enumerate(zip(begins, numels, strict=True)):
            begin, end = max(low, first), min(high, first + numel)
            if begin < end:
                pieces.append(Piece(index, owner, begin - first, end - first, begin - low))
    return Layout(tuple(begins), (split,) * world_size, tuple(pieces))


def whole_parameters(numels: Sequence[int], owners: Sequence[int], world_size: int) -> Layout:
    """Each parameter in the shard of its owner; shards are as long as that takes."""
    begins, splits, pieces = [0] * len(numels), [], []
    end = 0
    for owner in range(world_size):
        low = end
        for index in (index for index, its in enumerate(owners) if its == owner):
            begins[index] = end
            pieces.append(Piece(index, owner, 0, numels[index], end - low))
            end += _aligned(numels[index])
        splits.append(end - low)
    return Layout(tuple(begins), tuple(splits), tuple(pieces))


def balanced(numels: Sequence[int], loads: list[int]) -> list[int]:
    """An owner for each parameter: the largest first, each to the rank with the least so far.

    Args:
        loads: elements that each rank has already; brought up to date.
    """
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += numels[index]
    return owners


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor``'s elements in the order in which those of ``like``, of the same shape, lie in memory: a flat tensor.

    A view where both lie alike; channels_last and transposed parameters are the reason.
    """
    return tensor.permute(memory_order(like)).reshape(-1)


def in_shape_of(flat: Tensor, like: Tensor) -> Tensor:
    """The inverse of `in_memory_order`: a view of ``flat`` in the shape and memory format of ``like``."""
    order = memory_order(like)
    back = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([like.shape[dim] for dim in order]).permute(back)


def memory_order(tensor: Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])


class Bucket:
    """Parameters of one dtype and device, moved into one flat tensor whose views they become.

    Args:
        params: whole, with the same values on every rank or about to get them.
        layout: of their numels.
        rank: this one.
    """

    def __init__(self, params: Sequence[Tensor], layout: Layout, rank: int) -> None:
        self.params = tuple(params)
        self.layout = layout
        self.rank = rank
        self.flat = params[0].new_zeros(layout.numel, requires_grad=False)  # whole, the same on every rank
        for param, begin in zip(params, layout.begins, strict=True):
            view = self.flat[begin : begin + param.numel()]
            view.copy_(in_memory_order(param.detach(), param))
            param.data = in_shape_of(view, param)
        self.pieces: dict[Tensor, Tensor] = dict(self._views(self.shards[rank], rank))  # what this rank steps
        self.shard_grad: Tensor | None = None  # of this rank's shard: the mean over the ranks

    @cached_property
    def shards(self) -> tuple[Tensor, ...]:
        """The flat tensor, cut: one view for each rank."""
        return tuple(self.flat.split(self.layout.splits))

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def moved(self) -> Iterator[Tensor]:
        """Parameters that are no longer where the bucket has them, as after ``module.to(...)``."""
        begin, end = self.flat.data_ptr(), self.flat.data_ptr() + self.flat.nbytes
        return (param for param in self.params if param.numel() and not begin <= param.data_ptr() < end)

    def part_of(self, param: Tensor, whole: Tensor) -> Tensor:
        """Of a tensor of ``param``'s shape, what belongs to this rank's piece of it, in the piece's shape: a view."""
        for piece in self.layout.of(self.rank):
            if self.params[piece.index] is param:
                part = in_memory_order(whole, param)[piece.begin : piece.end]
                return in_shape_of(part, param) if part.numel() == param.numel() else part
        raise KeyError(f"rank {self.rank} has no piece of a parameter of shape {tuple(param.shape)}")

    def set_gradients(self, used: dict[Tensor, bool]) -> None:
        """Let each piece of this rank have its part of ``shard_grad``; what is not in ``used`` keeps what it has."""
        assert self.shard_grad is not None
        for param, grad in self._views(self.shard_grad, self.rank):
            if used[param]:
                self.pieces[param].grad = grad

    def forget_gradient(self, param: Tensor) -> None:
        """As if ``param`` had got none: further ones are then added to zero."""
        piece = self.pieces.get(param)
        if piece is not None and piece.grad is not None:
            piece.grad.zero_()
            piece.grad = None

    def clear_gradients(self) -> None:
        self.shard_grad = None
        for piece in self.pieces.values():
            piece.grad = None

    def _views(self, shard: Tensor, owner: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of a tensor as long as ``owner``'s shard, each parameter's part: in its own shape where it is whole."""
        for piece in self.layout.of(owner):
            param = self.params[piece.index]
            view = shard[piece.at : piece.at + piece.end - piece.begin]
            yield param, in_shape_of(view, param) if view.numel() == param.numel() else view
