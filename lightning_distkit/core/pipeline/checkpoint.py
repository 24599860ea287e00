"""Layers are run again in backward instead of keeping what they computed; the second run is the first one's twin.

Source: Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174.

A twin draws the same random numbers and sees the same autocast and grad mode, and leaves all of these as it found them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

CHECKPOINT_MODES = ("always", "except_last", "never")


def is_checkpointed(mode: str, index: int, n_micro_batches: int) -> bool:
    """Whether micro-batch ``index`` is run again: of those that there are, not of the ``chunks`` that there may be."""
    return mode == "always" or (mode == "except_last" and index < n_micro_batches - 1)


def is_recomputing() -> bool:
    """Whether the layers that now run in this thread run for the second time."""
    return getattr(_this_thread, "recomputing", False)


class _ThisThread(threading.local):
    recomputing: bool = False


_this_thread = _ThisThread()

# Autograd has a thread for each device, so two recomputations may come at once; but the CPU's generator, which both
# of them wind back, is one for all. Reentrant, for a checkpoint within a checkpoint.
_one_at_a_time = threading.RLock()


class Surroundings:
    """What layers see besides their inputs, as it is when this is made: right before their first call.

    Args:
        device: the one on which the layers run; the CPU's random numbers are always remembered.
        layers: those whose running statistics (of BatchNorm and its kin) the second run is not to update once more.
    """

    def __init__(self, device: torch.device | str = "cpu", layers: nn.Module | None = None) -> None:
        self._device = torch.device(device)
        self._layers = layers
        self._rng = RngState(self._device)
        self._grad = torch.is_grad_enabled()
        kinds = [kind for kind in {"cpu", self._device.type} if torch.amp.is_autocast_available(kind)]
        self._autocast = [(kind, _autocast(kind)) for kind in kinds]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within this all of it is as it was then, and `is_recomputing`; afterwards as it was before."""
        with _one_at_a_time, ExitStack() as stack:
            stack.callback(RngState(self._device).restore)
            stack.callback(setattr, _this_thread, "recomputing", is_recomputing())
            for kind, then in self._autocast:
                if then != _autocast(kind):
                    stack.enter_context(torch.autocast(kind, *then))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            if self._layers is not None:
                stack.enter_context(_statistics_left_alone(self._layers))
            _this_thread.recomputing = True
            self._rng.restore()
            yield


def _autocast(kind: str) -> tuple[torch.dtype, bool, bool]:
    return torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()


@contextmanager
def _statistics_left_alone(layers: nn.Module) -> Iterator[None]:
    norms = [each for each in layers.modules() if isinstance(each, _NormBase) and each.training]
    buffers = [dict(each._buffers) for each in norms]
    try:
        for each in norms:
            # Copies, and not none: what is saved for backward must be as much as in the first run.
            each._buffers.update({name: its.clone() for name, its in each._buffers.items() if its is not None})
        yield
    finally:
        for each, its_own in zip(norms, buffers, strict=True):
            each._buffers.update(its_own)


class RngState:
    """Where the random numbers of the CPU and of a device stand."""

    def __init__(self, device: torch.device) -> None:
        self._cpu = torch.get_rng_state()
        self._device = device
        self._other = None if device.type in ("cpu", "meta") else _generators(device).get_rng_state(*_which(device))

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._other is not None:
            _generators(self._device).set_rng_state(self._other, *_which(self._device))


def _generators(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _which(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # there is only one


class InPlace:
    """Whether some layers write to their inputs in place (as ``nn.ReLU(inplace=True)`` does), for they will run twice.

    One object for the same layers, for all micro-batches: it learns from the first one. If they do, each run gets
    copies; if not, the tensors themselves.

    Args:
        what: names the layers, in an error.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._known: bool | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """The first run.

        Raises:
            RuntimeError: the layers wrote to their inputs, which they had not done before, so they cannot run again.
        """
        given = _handed_out(args, copied=self._known is not False)
        before = versions(given)
        outputs = function(*given)
        written_to = versions(given) != before
        if written_to and self._known is False:
            raise RuntimeError(
                f"{self._what} changed its input in place this time, which it had not done before, so it cannot be "
                'run again in backward; have it never do so, or pass checkpoint="never"'
            )
        self._known = written_to
        return outputs

    def run_again(self, function: Callable[..., Any], *args: Any) -> Any:
        """The second run."""
        return function(*_handed_out(args, copied=self._known is True))


def versions(values: Any) -> list[int]:
    """How often each tensor of a nest has been written to."""
    return [leaf._version for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _handed_out(values: tuple[Any, ...], copied: bool) -> Any:
    """New containers in any case: layers may take something out of a dict."""
    return pytree.tree_map(lambda leaf: leaf.clone() if copied and isinstance(leaf, Tensor) else leaf, values)


def checkpointed(
    function: Callable[..., Any],
    *args: Any,
    layers: nn.Module | None = None,
    device: torch.device | str = "cpu",
    in_place: InPlace | None = None,
) -> Any:
    """``function(*args)``, whose intermediate results are dropped and computed again in backward.

    It may be called within another that is checkpointed, hold one, and be differentiated by ``torch.autograd.grad``.

    Args:
        function: from nests to a nest.
        layers: those that it calls; see `Surroundings`.
        device: where they are.
        in_place: what is known of how they treat their inputs.

    Raises:
        RuntimeError: in backward, if somebody has written to an argument in between.
    """
    watch = in_place if in_place is not None else InPlace("a checkpointed function")
    surroundings = Surroundings(device, layers)
    first: list[list[int]] = []  # the arguments' versions after the first run, once it has been

    def run(*args: Any) -> Any:
        if not first:
            outputs = watch.run(function, *args)
            first.append(versions(args))
            return outputs
        if versions(args) != first[0]:
            raise RuntimeError(
                "an input of layers that are to run again in backward was written to after their first run; do so "
                'after backward, or pass checkpoint="never"'
            )
        with surroundings.again():
            return watch.run_again(function, *args)

    # Surroundings instead of checkpoint's own: one mechanism here and in the pipe over processes; it also looks at the
    # layers' device and not at the arguments', and lets only one thread at a time wind the generators back.
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
