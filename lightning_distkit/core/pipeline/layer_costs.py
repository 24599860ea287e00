"""What each layer of an `nn.Sequential` costs, in bytes or in seconds.

Source of the idea: torchgpipe (Kim et al., 2020, https://arxiv.org/abs/2004.09910), `balance_by_size` and
`balance_by_time`. Here skippable layers are measured as well, and the module stays as it was.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_distkit.core.pipeline.microbatch import NoChunk
from lightning_distkit.core.pipeline.sequential import call
from lightning_distkit.core.pipeline.skip.tracker import SkipKey, carried

PARAMETER_COPIES = 4.0  # the parameter, its gradient, and what Adam has of it

Result = tuple[Any, dict[SkipKey, Tensor | None]]  # what a layer returns, and the skip tensors then under way
Visit = Callable[[int, Callable[[], Result]], Result]  # gets a layer's number, and what runs it


def layer_nbytes(module: nn.Sequential, sample: Any = None, parameter_copies: float = PARAMETER_COPIES) -> list[float]:
    """Bytes of each layer: its parameters, so many times, its buffers, and what it keeps of ``sample`` for backward.

    A parameter counts in each layer that has it, as each stage will have a copy. A tensor that several layers keep
    counts in the first. The module may be on the meta device.

    Args:
        module: as it will be trained.
        sample: the inputs of a micro-batch, a tuple for several; without it nothing is run.
        parameter_copies: how many times its size a parameter costs.

    Raises:
        RuntimeError: a layer does not run on what the sample gives.
    """
    nbytes = [
        parameter_copies * sum(each.nbytes for each in layer.parameters())
        + sum(each.nbytes for each in layer.buffers())
        for layer in module
    ]
    if sample is None:
        return nbytes
    own = {_memory(each) for each in (*module.parameters(), *module.buffers())}
    counted: dict[int, Tensor] = {}  # held, so that no other tensor gets their memory

    def weighed(n: int, forward: Callable[[], Result]) -> Result:
        def keep(tensor: Tensor) -> Tensor:
            memory = _memory(tensor)
            if memory not in own and memory not in counted:
                nbytes[n] += _nbytes(tensor)
                counted[memory] = tensor.detach()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            values, skips = forward()
        handed_on = {_memory(each) for each in pytree.tree_leaves((values, list(skips.values()))) if _is_tensor(each)}
        for memory in counted.keys() - handed_on:
            del counted[memory]
        return values, skips

    _run_each_layer(module, sample, weighed)
    return nbytes


def layer_seconds(module: nn.Sequential, sample: Any, n_times: int = 5) -> list[float]:
    """Seconds of each layer's forward and backward: the median of several, after one that does not count.

    Args:
        module: as it will be trained: what is frozen, or in front of all that is trained, has no backward.
        sample: the inputs of a micro-batch, a tuple for several.
        n_times: how many.

    Raises:
        ValueError: the module is on the meta device, where nothing takes time.
        RuntimeError: a layer does not run on what the sample gives.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if any(each.is_meta for each in tensors):
        raise ValueError("to be timed, layers must not be on the meta device; balance by size, or materialise them")
    seconds: list[list[float]] = [[] for _ in module]

    def timed(n: int, forward: Callable[[], Result]) -> Result:
        begin = _now()
        values, skips = forward()
        took = _now() - begin
        leaves = pytree.tree_leaves((values, list(skips.values())))
        ends = [each for each in leaves if _is_tensor(each) and each.grad_fn is not None]
        gradients = [torch.ones_like(each) for each in ends]
        begin = _now()
        torch.autograd.backward(ends, gradients)  # not .grad(), which reentrant checkpointing refuses
        seconds[n].append(took + _now() - begin)
        return values, skips

    for _ in range(1 + n_times):
        _run_each_layer(module, sample, timed)
    return [statistics.median(each[1:]) for each in seconds]


def _run_each_layer(module: nn.Sequential, sample: Any, visit: Visit) -> None:
    """One after another, each by itself: what goes in hangs on no graph."""
    values: Any = pytree.tree_map(lambda each: each.tensor if isinstance(each, NoChunk) else each, sample)
    skips: dict[SkipKey, Tensor | None] = {}
    with _unchanged(module, values):
        for n, layer in enumerate(module):
            values = pytree.tree_map(lambda each, layer=layer: _separate(each, layer), values)
            skips = {key: _separate(each, layer) for key, each in skips.items()}

            def forward(layer: nn.Module = layer, values: Any = values, skips: Any = skips) -> Result:
                with carried(skips) as tracker:
                    returned = call(layer, values)
                return returned, tracker.stashed

            try:
                values, skips = visit(n, forward)
            except Exception as error:
                raise RuntimeError(
                    f"each layer must run on what sample= gives, but layer {n}, {type(layer).__name__}, does not: "
                    f"{type(error).__name__}: {error}; give the module's inputs, or balance by size without them"
                ) from error


def _separate(value: Any, layer: nn.Module) -> Any:
    """A tensor cut off from the graph that made it, where the layer is; anything else as it is."""
    if not _is_tensor(value):
        return value
    place = next((each.device for each in (*layer.parameters(), *layer.buffers())), value.device)
    return value.detach().to(place).requires_grad_(value.requires_grad)


@contextmanager
def _unchanged(module: nn.Module, values: Any) -> Iterator[None]:
    """Gradients are recorded within, but the module's ``.grad`` and buffers, and random numbers, are then as before."""
    tensors = [*module.parameters(), *module.buffers(), *filter(_is_tensor, pytree.tree_leaves(values))]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [
        (owner, name, buffer, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    accelerators = {each.device for each in tensors if each.device.type not in ("cpu", "meta")}
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for kind in {each.type for each in accelerators} or {"cuda"}:
            indices = [each.index for each in accelerators if each.type == kind]
            stack.enter_context(torch.random.fork_rng(indices, device_type=kind))  # the CPU's with it
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for owner, name, buffer, was in buffers:
                    owner._buffers[name] = buffer.copy_(was)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _memory(tensor: Tensor) -> int:
    """The same number for tensors that share their memory; of a tensor without a storage its own."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else tensor.values().nbytes


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter()
