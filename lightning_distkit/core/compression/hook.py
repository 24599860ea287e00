"""How DDP's ``register_comm_hook`` meets our algorithms.

An algorithm is a generator, ``steps(state, bucket)``: it yields what is to be summed over the ranks and returns the
bucket's new value. `comm_hook` makes of it the function ``hook(state, bucket) -> Future[Tensor]`` that DDP calls, and
`attach` hands such a hook, or any other that keeps DDP's contract, to a DDP model with all that can go wrong checked.

DDP calls the hook in the same order of buckets on every rank, and waits for the futures only after the last call. So
each bucket's first message is sent at once and travels while backward goes on; the rest is done in the last call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_distkit.core.collectives import Group, Rounds, Steps
from lightning_distkit.core.compression.measurement import Measurement, total
from lightning_distkit.core.ledger import Ledger

Hook = Callable[[Any, GradBucket], Future[Tensor]]


class CommState:
    """What every hook needs: the group, its ledger, and the buckets under way.

    Args:
        process_group: the processes whose gradients are averaged; None for all.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group
        self.ledger = Ledger()
        self._rounds: Rounds | None = None
        self._futures: list[Future[Tensor]] = []
        self._held: list[Callable[[], Steps]] = []  # buckets that are here but not started
        self._parameters: set[Tensor] = set()  # of the buckets under way
        self._is_agreed = False
        self._is_to_measure = False
        self.measurement: Measurement | None = None  # of the step under way, if it is measured
        self.last_measurement: Measurement | None = None

    def measure(self) -> None:
        """Have the next step measured: see `last_measurement`.

        If PowerSGD or ACP-SGD finds that it is not finite, the first one that is; other hooks do not look, and the
        measurement then has NaN or inf in it.
        """
        self._is_to_measure = True

    @property
    def group(self) -> Group:
        return self._rounds_of_group().group

    def _rounds_of_group(self) -> Rounds:
        process_group = self.process_group if self.process_group is not None else dist.group.WORLD
        if self._rounds is None or self._rounds.group.process_group is not process_group:
            self._rounds = Rounds(Group(process_group, self.ledger))
        return self._rounds

    def observe(self, bucket: GradBucket) -> bool:
        """See a bucket go by. False means: start nothing before the last bucket is here."""
        return True

    def agreement(self) -> dict[str, Any]:
        """What must be the same on every rank; compared before the first step."""
        return {}

    def claim(self, module: nn.Module) -> None:
        """Be registered with a model."""

    def feed(self, bucket: GradBucket, make_steps: Callable[[], Steps]) -> Future[Tensor]:
        """Take a bucket from DDP and give it the future that will hold the bucket's new value."""
        if bucket.buffer().is_sparse:
            raise TypeError("sparse gradients cannot be sent by a hook; use nn.Embedding(..., sparse=False)")
        rounds = self._rounds_of_group()
        parameters = bucket.parameters()
        if not self._parameters.isdisjoint(parameters):
            # A parameter comes again before the last bucket came: a backward raised half-way. Its sums are of no use.
            self._forget()
        if not self._is_agreed:
            rounds.group.agree(type(self).__name__, self.agreement(), bucket.buffer().device)
            self._is_agreed = True
        if not self._parameters and self._is_to_measure:
            self.measurement = Measurement()
        self._parameters.update(parameters)
        self.ledger.add(nbytes_whole=rounds.group.ring_nbytes(sum(parameter.nbytes for parameter in parameters)))
        self._held.append(make_steps)
        future = _future_for(bucket.buffer())
        self._futures.append(future)
        if self.observe(bucket) or bucket.is_last():
            for make in self._held:
                rounds.start(make())
            self._held.clear()
        if bucket.is_last():
            futures, measurement = self._futures, self.measurement
            try:
                results = rounds.finish()
            finally:
                self._forget()
            # An error above is raised here, in DDP's own call, and so by backward(); DDP does not look at an
            # exception that only sits in a Python future.
            for each, result in zip(futures, results, strict=True):
                each.set_result(result)
            if measurement is not None and measurement.is_finite:
                measurement.finish()
                overall = total(measurement.layers.values())
                if isfinite(overall.wanted):
                    self.ledger.add(wanted=overall.wanted, left_out=overall.left_out)
                self.last_measurement, self._is_to_measure = measurement, False
            self.ledger.step()
        return future

    def _forget(self) -> None:
        if self._rounds is not None:
            self._rounds.abandon()
        self._futures, self._held, self._parameters = [], [], set()
        self.measurement = None


_states: dict[dist.ProcessGroup, CommState] = {}  # of hooks that are registered with a process group or None


def comm_state(state: object) -> CommState:
    """The `CommState` behind what a hook is registered with; a process group, or None for all, has one of its own."""
    if isinstance(state, CommState):
        return state
    process_group = state if state is not None else dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"a hook's state must be a process group or None, got {type(state).__name__}")
    return _states.setdefault(process_group, CommState(process_group))


def ledger_of(state: object) -> Ledger:
    """Where a hook that is registered with ``state`` counts what it sends."""
    return comm_state(state).ledger


def comm_hook(steps: Callable[[Any, GradBucket], Steps], state_class: type[CommState] = CommState) -> Hook:
    """Make of ``steps(state, bucket)``, a generator, the hook that DDP calls.

    The bucket is not divided beforehand: whoever wants a mean divides.

    Args:
        state_class: what the hook must be registered with; a plain `CommState` also stands for a process group or None.
    """

    @wraps(steps)
    def hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
        its = checked_state(state)
        return its.feed(bucket, lambda: steps(its, bucket))

    def checked_state(state: object) -> CommState:
        its = comm_state(state) if state_class is CommState else state
        if not isinstance(its, state_class):
            name = f"{type(state).__module__}.{type(state).__qualname__}"
            raise TypeError(f"{steps.__qualname__} must be registered with a {state_class.__name__}, got {name}")
        return its

    hook.checked_state = checked_state  # type: ignore[attr-defined]  # tells `attach` that the hook is ours
    return _as_ddp_wants_it(hook)


def _as_ddp_wants_it(hook: Hook) -> Hook:
    """DDP reads a hook's signature and refuses annotations that it does not know, postponed ones among them."""
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("state", "bucket")]
    hook.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return hook


def _future_for(tensor: Tensor) -> Future[Tensor]:
    # A future that is to hold a tensor of a device must be told so: it then records the device's stream at
    # set_result() and makes the stream that waits follow it.
    return Future() if tensor.device.type == "cpu" else Future(devices=[tensor.device])


def attach(model: DistributedDataParallel, state: object, hook: Hook) -> None:
    """Register ``hook`` with a DDP model: `register_comm_hook`, with each breach of its contract said clearly.

    Args:
        model: the wrapped model, before its first backward.
        state: what the hook gets as its first argument.
        hook: ``hook(state, bucket) -> Future[Tensor]``, one of ours or any other. It gets the bucket undivided, and
            its future must hold one tensor of the bucket's shape.

    Raises:
        TypeError: the model is not a DDP model, or the hook cannot be called so.
        RuntimeError: the model has a hook already, or has run backward. Later, from ``backward()``: the hook returned
            no future, or its future holds something other than one tensor of the bucket's shape.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"a hook is attached to a DistributedDataParallel model, got {type(model).__name__}; wrap it")
    name = check_hook(hook)
    if hasattr(hook, "checked_state"):
        hook.checked_state(state).claim(model.module)
    logged = model._get_ddp_logging_data()
    if "comm_hook" in logged:
        raise RuntimeError(
            f"this model has the hook {logged['comm_hook']} already, and DDP takes one; to change it to {name}, wrap "
            "the module anew"
        )
    # DDP logs an iteration at the next forward; the times of its gradients tell of the first backward at once.
    if any(model.reducer.get_backward_stats()) or logged.get("iteration", 0):
        raise RuntimeError(f"the hook {name} must be attached before the first backward; wrap the module anew")
    model.register_comm_hook(state, checked_hook(hook))


def check_hook(hook: object) -> str:
    """The hook's name; a TypeError if it cannot be called as ``hook(state, bucket)``."""
    if not callable(hook):
        swapped = "; the state comes before the hook" if isinstance(hook, CommState) else ""
        raise TypeError(f"a hook must be callable as hook(state, bucket), got {hook!r}{swapped}")
    name = str(getattr(hook, "__qualname__", type(hook).__qualname__))
    try:
        inspect.signature(hook).bind(None, None)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the hook {name} must take (state, bucket): {error}") from None
    return name


def checked_hook(hook: Hook) -> Hook:
    """The hook, with what it returns checked; ours need no check."""
    name = check_hook(hook)
    if hasattr(hook, "checked_state"):
        return hook

    def checked(state: Any, bucket: GradBucket) -> Future[Tensor]:
        shape = bucket.buffer().shape
        future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):  # what both the Python class and collectives are made of
            raise RuntimeError(
                f"the hook {name} must return a torch.futures.Future, also where it sends nothing; got "
                f"{type(future).__name__}"
            )

        def check(done: Future[Tensor]) -> Tensor:
            value = done.value()
            if not isinstance(value, Tensor) or value.shape != shape:
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise RuntimeError(
                    f"the future of the hook {name} must hold one tensor of the bucket's shape {tuple(shape)}, got "
                    f"{got}" + (" (the future of a collective holds a list: take [0])" if got == "list" else "")
                )
            return value

        return future.then(check)

    # Only the qualified name, which DDP logs: by the plain name "bf16_compress_hook" DDP refuses one off CUDA, where
    # gloo sums bfloat16 as well.
    checked.__qualname__ = name
    return _as_ddp_wants_it(checked)
