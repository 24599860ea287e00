"""The layers of an `nn.ModuleList` as a pipe, where the module that owns them calls one after another in its forward.

So Transformers models do, with masks and positions beside the hidden states. Nothing of their forward is rewritten:
each layer but the last only notes what else it was called with, and hands on something that stands for its output; the
last one sends the first one's hidden states, and all notes, through the pipe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_distkit.core.pipeline.microbatch import NoChunk
from lightning_distkit.core.pipeline.within import find_sequential, is_plain_sequential

Note = tuple[tuple[Any, ...], dict[str, Any]]  # what one layer is called with

# The keys of what goes through the pipe.
_TENSORS, _NOTES, _IS_WHOLE = "tensors of a layer list", "notes of a layer list", "is whole"
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


def find_layers(module: nn.Module, given: str | nn.Module | None = None) -> tuple[str, nn.Module]:
    """The part of ``module`` that can be cut into stages, and its path: an `nn.Sequential` or an `nn.ModuleList`.

    Args:
        given: the path, or the part itself; by default the one plain `nn.Sequential`, or list of several layers of one
            class, that is in no other.

    Raises:
        ValueError: there is none, or there are several; or what is given is none.
    """
    if given is None:
        found = _candidates(module)
        if len(found) == 1:
            return next(iter(found.items()))
        listed = ", ".join(map(repr, found)) or "none"
        raise ValueError(
            f"the layers of {type(module).__name__} that become stages must be an nn.Sequential or an nn.ModuleList of "
            f'one class, and one alone if it is not named, found {listed}; name it: module="path.to.it"'
        )
    paths = {path: each for path, each in module.named_modules() if path == given or each is given}
    path, part = next(iter(paths.items()), ("", None))
    return (path, part) if isinstance(part, nn.ModuleList) and len(part) else find_sequential(module, given)


def _candidates(module: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for path, each in module.named_modules():
        inside = any(not other or path.startswith(f"{other}.") for other in found)
        is_list = isinstance(each, nn.ModuleList) and len(each) > 1 and len({type(layer) for layer in each}) == 1
        is_list = is_list and bool(path)  # by itself it has no forward
        if (is_list or is_plain_sequential(each)) and not inside:
            found[path] = each
    return found


class LayerList:
    """Puts an `nn.Sequential` in the place of an `nn.ModuleList`, ready to become a pipe, until `undo`.

    It has the list's layers under their names, and can be iterated, indexed and sliced as the list.

    Args:
        path: that of the list in ``module``.

    Raises:
        ValueError: a layer is in it twice.
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        self.path = path
        self._parent = module.get_submodule(path.rpartition(".")[0])
        self._name = path.rpartition(".")[2]
        self._list = module.get_submodule(path)
        layers = list(self._list._modules.values())
        if len(set(layers)) < len(layers):
            raise ValueError(
                f"the layers of {path} must be different objects, to be on different ranks, but {len(layers)} of them "
                f"are {len(set(layers))}; name other layers"
            )
        self.sequential = nn.Sequential(OrderedDict(self._list.named_children()))
        self.sequential.training = self._list.training  # and not train(), which would set the layers'
        self._parent._modules[self._name] = self.sequential
        self._hidden: Tensor | None = None
        self._notes: list[Note] = []  # of the forward under way
        # What wrappers (adapters, Accelerate's hooks) had put on the objects before.
        self._forwards = [vars(layer).get("forward") for layer in self.sequential]
        for index, layer in enumerate(self.sequential):
            # An attribute of the object, as its class may have other objects elsewhere. A layer's hooks run twice: on
            # every rank where the owner calls it, with a stand-in, and within the pipe on the rank that has it.
            layer.forward = _Turn(self, index, layer.forward)

    def undo(self) -> None:
        """Put the list back, with the layers that are there now."""
        for layer, forward in zip(self.sequential, self._forwards, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward
        self._list._modules.update(self.sequential._modules)
        self._parent._modules[self._name] = self._list

    def called(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Layer ``index`` was called by the owner's forward."""
        hidden, note = _noted(self.path, index, args, kwargs)
        if index == 0:
            self._hidden, self._notes = hidden, []
        elif index != len(self._notes) or not isinstance(hidden, StandIn):
            raise RuntimeError(
                f"the layers of {self.path} must be called each once, in order, the next with what the last has "
                f"returned, as a pipe runs them; layer {index} was called after {len(self._notes)} others, with "
                f"{type(hidden).__name__}"
            )
        self._notes.append(note)
        assert self._hidden is not None
        if len(self._notes) < len(self.sequential):
            return StandIn.of(self._hidden, f"layer {index} of {self.path}")
        packed = _packed(self._hidden, self._notes)
        self._hidden, self._notes = None, []
        return self.sequential(packed)

    def __len__(self) -> int:
        return len(self.sequential)


class _Turn:
    """What one of the layers does in the place of its ``forward``."""

    def __init__(self, its: LayerList, index: int, forward: Callable[..., Any]) -> None:
        self._its = its
        self._index = index
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], dict) and _NOTES in args[0]:
            return self._within(args[0])
        return self._its.called(self._index, args, kwargs)

    def _within(self, values: dict[str, Any]) -> Any:
        """Within the pipe: compute, for one micro-batch."""
        tensors = values[_TENSORS]
        if values[_IS_WHOLE] and self._index == 0:
            tensors = [tensors[0].squeeze(0), *tensors[1:]]
        note = values[_NOTES][self._index]
        args, kwargs = pytree.tree_map_only(_Number, lambda each: tensors[each.at], note)
        output = self._forward(*args, **kwargs)
        hidden = output[0] if isinstance(output, tuple) else output
        if self._index < len(self._its) - 1:
            return {**values, _TENSORS: [hidden, *tensors[1:]]}
        return (hidden,) if isinstance(output, tuple) else hidden


class _Number:
    """Stands in a note for a tensor: where it is in the list of them. At 0 are the hidden states."""

    def __init__(self, at: int) -> None:
        self.at = at


def _noted(path: str, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Note]:
    """The hidden states, the first argument, and all arguments with a `_Number` in their place."""
    first = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(first, Tensor):
        raise TypeError(
            f"the first argument of the layers of {path} must be the hidden states, a tensor, for a pipe; layer "
            f"{index} got {type(first).__name__}"
        )
    if args:
        note = (_Number(0), *args[1:]), kwargs
    else:
        note = (), {**kwargs, next(iter(kwargs)): _Number(0)}
    for leaf in pytree.tree_leaves(note):
        if isinstance(leaf, StandIn) or not isinstance(leaf, (Tensor, _Number, *_PLAIN)):
            names = [name for name, value in kwargs.items() if any(each is leaf for each in pytree.tree_leaves(value))]
            raise TypeError(
                f"the layers of {path} must be called with tensors and plain values, as these go from stage to stage, "
                f"but layer {index} got {names[0] if names else 'an argument'} of type {type(leaf).__name__}"
                f"{'; a pipe cannot fill a cache: use_cache=False' if 'Cache' in type(leaf).__name__ else ''}"
            )
    return first, note


def _packed(hidden: Tensor, notes: Sequence[Note]) -> dict[str, Any]:
    """What goes through the pipe. A tensor that several layers get is in it once."""
    others: list[Tensor] = []
    numbers: dict[int, _Number] = {}

    def number(tensor: Tensor) -> _Number:
        if id(tensor) not in numbers:
            numbers[id(tensor)] = _Number(len(others) + 1)
            others.append(tensor)
        return numbers[id(tensor)]

    noted = pytree.tree_map_only(Tensor, number, list(notes))
    if any(_may_be_of_rows(each, hidden) for each in others):
        # One micro-batch, of one row: whatever they are, it is right.
        whole = [hidden.unsqueeze(0), *map(NoChunk, others)]
        return {_TENSORS: whole, _NOTES: noted, _IS_WHOLE: True}
    rows = [each if each.shape[:1] == hidden.shape[:1] else NoChunk(each) for each in others]
    return {_TENSORS: [hidden, *rows], _NOTES: noted, _IS_WHOLE: False}


def _may_be_of_rows(tensor: Tensor, hidden: Tensor) -> bool:
    """Whether its first dimension may be the batch's and may as well be another, of the same length.

    With one or two dimensions, positions or a mask: the sequence's. With three, of which the second is not the
    sequence's, a bias of attention: the heads', as MPT's (n_heads, 1, length).
    """
    if hidden.dim() < 2 or tensor.shape[:1] != hidden.shape[:1]:
        return False
    if tensor.dim() == 3:
        return tensor.shape[1] != hidden.shape[1] or hidden.shape[1] == 1
    return tensor.dim() in (1, 2) and hidden.dim() > 2 and hidden.shape[0] == hidden.shape[1]


class StandIn(Tensor):
    """What a layer seems to have returned, until the last one is called: nothing can be computed with it.

    It can be indexed by 0, as layers may return the hidden states alone or first in a tuple.
    """

    _what: str

    @classmethod
    def of(cls, hidden: Tensor, what: str) -> StandIn:
        """With the shape, dtype and device of ``hidden``."""
        made = hidden.detach().as_subclass(cls)
        made._what = what
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], int) and args[1] == 0:
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            if func in (Tensor.size, Tensor.dim, Tensor.__len__, Tensor.__repr__, Tensor.is_floating_point):
                return func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") == "__get__" and not isinstance(value := func(*args), Tensor):
                return value  # shape, dtype, device
        which = next(each._what for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, StandIn))
        raise RuntimeError(
            f"what a layer returns must go to the next layer as it is, for a pipe to run them all, but "
            f"{getattr(func, '__name__', func)} was called with what {which} has returned; hidden states of single "
            "layers cannot be had"
        )
