"""The modules that hold given parameters, which an optimizer is not told: who else reduces, and what shares memory.

They are looked for among all living objects (`living_modules`), as neither a module nor a wrapper leaves a mark on a
parameter. An optimizer does it when it is made and when it steps first.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

NO_WRAPPER = (
    "the gradients would be reduced twice. Give the plain module and train it as it is, without a wrapper: ZeRO itself "
    "does what DistributedDataParallel does"
)


def living_modules() -> list[nn.Module]:
    """All modules of this process, even one whose constructor has not ended."""
    kinds: set[type] = set()
    to_do: list[type] = [nn.Module]
    while to_do:
        kind = to_do.pop()
        if kind not in kinds:
            kinds.add(kind)
            to_do += type.__subclasses__(kind)
    # Not isinstance(), which may run the code of a proxy.
    return [each for each in gc.get_objects() if type(each) in kinds]


def modules_with(params: Collection[Tensor], living: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of the living modules that have any of these parameters, themselves or below."""
    wanted = set(params)
    known: dict[nn.Module, bool] = {}

    def has(module: nn.Module) -> bool:
        if module not in known:
            known[module] = False  # should it contain itself
            own = _values(module, "_parameters")
            below = _values(module, "_modules")
            known[module] = any(each in wanted for each in own) or any(has(each) for each in below)
        return known[module]

    return [module for module in living if has(module)]


def refusal(params: Sequence[Tensor], living: Sequence[nn.Module]) -> str | None:
    """Why these may not be moved and have their gradients reduced, or None."""
    if any(isinstance(param, DTensor) for param in params):
        return (
            "the parameters must be plain tensors, but some are DTensors, as fully_shard and shard_parameters leave "
            "them: their gradients are sharded already, so wrap the optimizer in DTensorOptimizer"
        )
    for module in modules_with(params, living):
        if isinstance(module, FullyShardedDataParallel):
            return f"the module must be plain, but is in FullyShardedDataParallel already: {NO_WRAPPER}"
    if _overlap(params):
        return (
            "the parameters must not share memory, but two different ones do; tie them by using one parameter in "
            "both places"
        )
    if (shared := _shared_buffer(params, living)) is not None:
        return (
            f"a buffer must not share memory with a parameter, but {shared} does, and would not follow it when it is "
            "moved: register a copy as the buffer, or use the parameter itself"
        )
    return None


def wrapped(module: nn.Module) -> str | None:
    """Why ``module``, or one within, is not to be sharded: it is a wrapper that reduces gradients. None if none is."""
    for each in module.modules():
        if isinstance(each, DistributedDataParallel | FullyShardedDataParallel):
            return f"the module must be plain, but is in {type(each).__name__} already: {NO_WRAPPER}"
    return None


class WithoutDDP:
    """Makes sure that no gradient of given parameters is reduced by a DistributedDataParallel, too.

    A wrapper may be there and out of use, as the one that a Trainer keeps from its last fit. So those that there are
    refuse when they are called.
    """

    def __init__(self) -> None:
        self._seen: dict[DistributedDataParallel, RemovableHandle] = {}

    def watch(self, params: Collection[Tensor], living: Sequence[nn.Module]) -> list[DistributedDataParallel]:
        """Let all wrappers of ``params`` refuse; returns those that were not known."""
        around = modules_with(params, living)
        new = [each for each in around if isinstance(each, DistributedDataParallel) and each not in self._seen]
        self._seen.update({each: each.register_forward_pre_hook(_refuse) for each in new})
        return new

    def release(self) -> None:
        for handle in self._seen.values():
            handle.remove()
        self._seen.clear()


def _refuse(module: DistributedDataParallel, inputs: Any) -> None:
    if torch.is_grad_enabled() and module.require_backward_grad_sync:
        raise RuntimeError(f"the module must be plain, but is called through DistributedDataParallel: {NO_WRAPPER}")


def _values(module: nn.Module, kind: str) -> list[Any]:
    """Of one that may be in the middle of its constructor."""
    return [each for each in vars(module).get(kind, {}).values() if each is not None]


def _range(tensor: Tensor) -> tuple[int, int] | None:
    """Where its elements are in memory; None if they are nowhere, or not to be known."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return None
    if tensor.is_meta or not tensor.numel():
        return None
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + tensor.element_size() * (1 + last)


def _ranges(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return sorted(each for tensor in tensors if (each := _range(tensor)) is not None)


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """Whether any memory is in two of them."""
    return any(end > begin for (_, end), (begin, _) in pairwise(_ranges(tensors)))


def _shared_buffer(params: Sequence[Tensor], living: Sequence[nn.Module]) -> str | None:
    """The name of a living module's buffer that has memory of one of ``params``, which have none in common."""
    taken = _ranges(params)
    begins = [begin for begin, _ in taken]
    for module in living:
        for name, buffer in vars(module).get("_buffers", {}).items():
            if isinstance(buffer, Tensor) and (its := _range(buffer)) is not None:
                at = bisect_left(begins, its[1]) - 1  # the last that begins before its end
                if at >= 0 and taken[at][1] > its[0]:
                    return f"{name!r} of {type(module).__name__}"
    return None
