"""States of which each stage has a part, made whole on the first, and back: of modules, optimizers, copies of them.

Every rank has a nest of dicts and lists; the parts of other stages are tensors on the meta device there, or keys that
are missing. Tensors come one at a time, so that beyond the whole there is never more than one under way.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_distkit.core.collectives import Group

_CPU = torch.device("cpu")
_HERE, _META, _OTHER = "tensor", "meta tensor", "other"

Path = tuple[Any, ...]
Kind = tuple[str, Any, Any]  # of what stands at a path: which of the above, its shape, its dtype


def merged(nest: Any, group: Group, owner: Callable[[Path], int | None] | None = None, adds_keys: bool = True) -> Any:
    """On rank 0 the nest with all parts, others' on the CPU; on other ranks their own unchanged. Collective.

    Where a tensor is on meta on rank 0, it is taken from the first rank that has it.

    Args:
        group: the pipe's ranks, for messages on the CPU.
        owner: of a path the rank to take it from, if that is known.
        adds_keys: take what stands under keys that rank 0 has not. Where all keys are numbers, they are put in order.
    """
    if group.world_size == 1:
        return nest
    own = dict(_leaves(nest))
    kinds = group.everyones({path: _kind(value) for path, value in own.items()}, _CPU)
    taken: dict[Path, Any] = {}
    for path in dict.fromkeys(path for each in kinds for path in each):
        source = _source(path, kinds, owner, adds_keys)
        if source == 0:
            continue
        what, shape, dtype = kinds[source][path]
        if group.rank == source:
            _send(own[path], what, group)
        elif group.rank == 0:
            taken[path] = _receive(what, shape, dtype, source, group)
    return _filled(nest, _tree(taken)) if group.rank == 0 else nest


def _source(
    path: Path, kinds: list[dict[Path, Kind]], owner: Callable[[Path], int | None] | None, adds_keys: bool
) -> int:
    known = owner(path) if owner is not None else None
    if known is not None and path in kinds[known]:
        return known
    if path in kinds[0] and kinds[0][path][0] != _META:
        return 0
    if path not in kinds[0] and not adds_keys:
        return 0
    return next((rank for rank, each in enumerate(kinds) if path in each and each[path][0] != _META), 0)


def _leaves(nest: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(nest, dict):
        for key, value in nest.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(nest, (list, tuple)):
        for n, value in enumerate(nest):
            yield from _leaves(value, (*path, n))
    else:
        yield path, nest


def _kind(value: Any) -> Kind:
    if not isinstance(value, Tensor):
        return _OTHER, None, None
    return (_META if value.is_meta else _HERE), value.shape, value.dtype


def _send(value: Any, what: str, group: Group) -> None:
    if what == _HERE:
        group.send(value.detach().to("cpu").contiguous(), 0)
        return
    message = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    group.send(torch.tensor([message.numel()]), 0)
    group.send(message, 0)


def _receive(what: str, shape: Any, dtype: Any, source: int, group: Group) -> Any:
    if what == _HERE:
        return group.receive(torch.empty(shape, dtype=dtype), source)
    length = group.receive(torch.zeros(1, dtype=torch.int64), source)
    return pickle.loads(group.receive(torch.empty(int(length), dtype=torch.uint8), source).numpy().tobytes())


class _Taken:
    """What was taken at one path."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _tree(taken: dict[Path, Any]) -> Any:
    """The same by the first key, then by the second, and so on."""
    root: dict[Any, Any] = {}
    for path, value in taken.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = _Taken(value)
    return root


def _filled(nest: Any, taken: Any) -> Any:
    """A copy of the nest, its tensors not copied, with what was taken in its places."""
    if isinstance(taken, _Taken):
        return taken.value
    if not taken:
        return nest
    if isinstance(nest, dict) or nest is None:
        before: dict[Any, Any] = nest if nest is not None else {}
        result = type(before)()
        if hasattr(before, "__dict__"):
            vars(result).update(vars(before))  # versions, in a module's state dict
        keys = [*before, *(key for key in taken if key not in before)]
        if len(keys) > len(before) and all(isinstance(key, int) for key in keys):
            keys.sort()
        for key in keys:
            result[key] = _filled(before.get(key), taken.get(key))
        return result
    values = [_filled(value, taken.get(n)) for n, value in enumerate(nest)]
    return type(nest)(*values) if hasattr(nest, "_fields") else type(nest)(values)


def own_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """What of a whole optimizer's state is of parameters that are here."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    here = {n for n, each in enumerate(parameters) if not each.is_meta}
    # The numbers in the state are those in its own groups, which go by position.
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    kept = {number for n, number in enumerate(numbers) if n in here}
    return {**state, "state": {number: value for number, value in state["state"].items() if number in kept}}
