"""What each rank writes of a checkpoint: its tensors, as boxes of whole ones, and the rest, which is small.

A checkpoint is a nested dict, as for ``torch.save``. Its tensors of more than one element are written apart, each rank
some; None stands in their places, and a table says which is where.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.zero.boxes import boxes, views
from lightning_distkit.core.zero.bucket import memory_order
from lightning_distkit.core.zero.whole_tensors import cut_of, local

Offsets = tuple[int, ...]
Path = tuple[Any, ...]  # the keys and indices that lead to something in a nested dict


@dataclass(frozen=True)
class Part:
    """What this rank writes of a tensor: boxes of it, by their offsets; there may be none."""

    shape: torch.Size  # of the whole
    boxes: dict[Offsets, Tensor]

    @classmethod
    def whole(cls, tensor: Tensor) -> Part:
        """All of a tensor, which no other rank writes."""
        return cls(tensor.shape, {(0,) * tensor.dim(): tensor})

    @classmethod
    def of_run(cls, flat: Tensor, begin: int, like: Tensor) -> Part:
        """A run of elements; see `views`."""
        return cls(like.shape, dict(views(flat, begin, like)))

    @classmethod
    def of_dtensor(cls, tensor: DTensor) -> Part:
        """This rank's shard; of a mesh with replicas, the first one speaks for all."""
        cut, mine = cut_of(tensor), local(tensor)
        if not cut.first or not mine.numel():
            return cls(tensor.shape, {})
        begin = min(cut.rank * -(-tensor.shape[cut.dim] // cut.world_size), tensor.shape[cut.dim])
        return cls(tensor.shape, {tuple(begin if dim == cut.dim else 0 for dim in range(tensor.dim())): mine})

    def staged(self) -> Part:
        """A copy on the CPU, which training does not change. Blocks until it is made."""
        # Contiguous whatever the source: the reader takes elements from where row-major order has them.
        return Part(
            self.shape,
            {at: torch.empty(box.shape, dtype=box.dtype).copy_(box.detach()) for at, box in self.boxes.items()},
        )

    @property
    def nbytes(self) -> int:
        return sum(box.nbytes for box in self.boxes.values())


def whole_part(value: Any) -> Any:
    """A tensor that one rank has, and so writes; anything small as it is."""
    return Part.whole(value) if isinstance(value, Tensor) and value.numel() > 1 else value


class OfThisRank(dict[Any, Any]):
    """A dict of which each rank has only some keys: in the checkpoint stand those of all. Not one within another."""


@dataclass
class Contents:
    """A checkpoint, taken apart, as one rank has it."""

    rest: Any = None  # the checkpoint without its large tensors
    parts: dict[str, Part] = field(default_factory=dict)
    places: dict[str, list[Path]] = field(default_factory=dict)  # where each of those stands: tied ones several times
    dicts: dict[Path, OfThisRank] = field(default_factory=dict)  # without large tensors, too

    def beyond_rank_0(self) -> Contents:
        """What rank 0 cannot know by itself: what is in `OfThisRank`."""
        places = {
            name: paths
            for name, paths in self.places.items()
            if any(paths[0][: len(path)] == path for path in self.dicts)
        }
        return Contents(places=places, dicts=self.dicts)


def take_apart(checkpoint: Mapping[str, Any], replicated: Iterable[Tensor], group: Group) -> Contents:
    """What this rank has to write.

    Args:
        replicated: tensors that are the same on every rank: each rank writes a share of them, alike in bytes. Other
            plain tensors are taken from rank 0.

    Raises:
        ValueError: two places have the same name.
    """
    return _Splitter(replicated, group).split(checkpoint)


class _Splitter:
    def __init__(self, replicated: Iterable[Tensor], group: Group) -> None:
        self._group = group
        self._replicated = {_memory(tensor) for tensor in replicated if not isinstance(tensor, DTensor)}
        self._names: dict[Any, str] = {}  # by memory
        self._shared: dict[str, Tensor] = {}
        self._found = Contents()

    def split(self, checkpoint: Mapping[str, Any]) -> Contents:
        self._found.rest = self._rest(checkpoint, ())
        self._found.parts.update(_shares(self._shared, self._group))
        return self._found

    def _rest(self, tree: Any, path: Path) -> Any:
        if isinstance(tree, Part | Tensor):
            return self._tensor(tree, path)
        if isinstance(tree, OfThisRank):
            mine = OfThisRank({key: self._rest(value, (*path, key)) for key, value in tree.items()})
            self._found.dicts[path] = mine
            return dict(mine)
        if type(tree) in (dict, OrderedDict):
            rest = copy.copy(tree)  # an OrderedDict of a module has attributes
            rest.update({key: self._rest(value, (*path, key)) for key, value in tree.items()})
            return rest
        if type(tree) in (list, tuple):
            return type(tree)(self._rest(value, (*path, index)) for index, value in enumerate(tree))
        return tree

    def _tensor(self, tensor: Part | Tensor, path: Path) -> Any:
        if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
            if tensor.numel() <= 1:
                return tensor.detach().to("cpu", copy=True)
            if _memory(tensor) not in self._replicated and self._group.rank != 0:
                return None
        name = ".".join(map(str, path))
        if isinstance(tensor, Tensor):
            first = self._names.setdefault(_memory(tensor), name)
            if first != name:
                self._found.places[first].append(path)
                return None
        if name in self._found.places:
            raise ValueError(
                f"two different places in a checkpoint must have different names, but {self._found.places[name][0]} "
                f"and {path} are both {name!r}: rename a key"
            )
        self._found.places[name] = [path]
        if isinstance(tensor, Part):
            self._found.parts[name] = tensor
        elif isinstance(tensor, DTensor):
            self._found.parts[name] = Part.of_dtensor(tensor)
        elif _memory(tensor) in self._replicated:
            self._shared[name] = tensor.detach()
        else:
            self._found.parts[name] = Part.whole(tensor.detach())
        return None


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """The same for two tensors that are one and the same memory.

    Of shards without elements nobody can say; but rank 0 has some of every tensor, and what it finds counts.
    """
    mine = local(tensor)
    if not mine.numel():
        return (id(tensor),)
    return mine.data_ptr(), tensor.shape, mine.stride(), mine.dtype


def _shares(tensors: Mapping[str, Tensor], group: Group) -> Iterator[tuple[str, Part]]:
    """Of tensors that every rank has, this one's share: one after the other, cut where the bytes are alike."""
    total, at = sum(tensor.nbytes for tensor in tensors.values()), 0
    first, last = (total * rank // group.world_size for rank in (group.rank, group.rank + 1))
    for name, tensor in tensors.items():
        # Rounded down on every rank alike, so that no element is lost or written twice.
        begin, end = (min(max(cut - at, 0) // tensor.element_size(), tensor.numel()) for cut in (first, last))
        at += tensor.nbytes
        order = memory_order(tensor)
        back = sorted(range(len(order)), key=order.__getitem__)
        mine = {}
        for offsets, sizes in boxes(begin, end, [tensor.shape[dim] for dim in order]):
            where = tuple(offsets[dim] for dim in back)
            mine[where] = tensor[tuple(slice(o, o + sizes[dim]) for o, dim in zip(where, back, strict=True))]
        yield name, Part(tensor.shape, mine)


def put_together(of_ranks: list[Contents]) -> tuple[Any, dict[str, list[Path]]]:
    """The rest of the whole checkpoint, and where which tensor stands in it.

    Args:
        of_ranks: rank 0's, then what the others have beyond that.
    """
    rest = of_ranks[0].rest
    places: dict[str, list[Path]] = {}
    for contents in of_ranks:
        for path, mine in contents.dicts.items():
            _merge(_at(rest, path), mine)
        for name, paths in contents.places.items():
            places.setdefault(name, paths)
    return rest, places


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _merge(into: dict[Any, Any], other: Mapping[Any, Any]) -> None:
    """Add what ``into`` lacks; numbers stay in order."""
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into.setdefault(key, value)
    if all(isinstance(key, int) for key in into):
        for key in sorted(into):
            into[key] = into.pop(key)


def fill(tree: Any, tensors: Mapping[Path, Tensor], path: Path = ()) -> Any:
    """The checkpoint again: its rest with the tensors in their places."""
    if path in tensors:
        return tensors[path]
    if isinstance(tree, dict):
        for key in list(tree):
            tree[key] = fill(tree[key], tensors, (*path, key))
    elif type(tree) in (list, tuple):
        return type(tree)(fill(value, tensors, (*path, index)) for index, value in enumerate(tree))
    return tree
