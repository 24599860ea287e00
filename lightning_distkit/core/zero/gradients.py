"""Whole gradients become this rank's shards of their means: at the step (stage 1), or while backward runs (stage 2).

Source: Rajbhandari et al., 2020, "ZeRO", https://arxiv.org/abs/1910.02054, sections 5.1 and 5.2.

One pass over all buckets, in one order, is a *round*; every rank makes the same rounds. A gradient that a rank does not
have counts as zero, and with each parameter's gradient travels a flag that says whether it was there, so a parameter
that no rank has used is left alone, as without ZeRO.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.zero.backwards import Backwards
from lightning_distkit.core.zero.bucket import Bucket
from lightning_distkit.core.zero.gone import Gone
from lightning_distkit.core.zero.reduction import Round
from lightning_distkit.core.zero.turn import Turn

if TYPE_CHECKING:
    from lightning_distkit.core.zero.optimizer import ZeroOptimizer


class _Version:
    """Which tensor a gradient was, and how often it had been written to."""

    def __init__(self, grad: Tensor | None) -> None:
        # Not the id: a new tensor may well get that of the one that it follows.
        self._grad = None if grad is None else weakref.ref(grad)
        self._version = 0 if grad is None else grad._version

    def is_of(self, grad: Tensor | None) -> bool:
        if self._grad is None or grad is None:
            return self._grad is None and grad is None
        return self._grad() is grad and self._version == grad._version


def _call_once(gradients: WholeGradients | ShardedGradients) -> None:
    at_first, gradients.at_first = gradients.at_first, None
    if at_first is not None:
        at_first()


class WholeGradients:
    """Stage 1: whole gradients stay where autograd puts them, and are reduced when the shards' are asked for.

    So accumulation is local and sends nothing, however many backwards a step has.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.buckets: list[Bucket] = []
        self._reduced: list[_Version] | None = None  # of each parameter, when it was last reduced
        self._edited = False
        self.at_first: Callable[[], None] | None = None
        self.turn = Turn(reduces_in_backward=False)  # as every rank reduces at its step, all are in the same

    def add(self, buckets: Sequence[Bucket]) -> None:
        self.buckets += buckets
        self._reduced = None

    def reduce(self) -> None:
        """Bring the gradients of the shards up to date; does nothing if no gradient has changed since."""
        _call_once(self)
        grads = [param.grad for bucket in self.buckets for param in bucket.params]
        if self._reduced is not None and all(map(_Version.is_of, self._reduced, grads)):
            return
        if self._edited and any(grad is not None for grad in grads):
            raise RuntimeError(
                "gradients have changed after they were clipped; in stage 1 the shards' gradients were, so reducing "
                "them anew would lose that: clip once, right before the step, and begin anew with zero_grad"
            )
        self.clear()
        whole = Round(self.group, self.turn)
        for bucket in self.buckets:
            whole.start(bucket, [param.grad for param in bucket.params])
        whole.finish()
        self._reduced = [_Version(grad) for grad in grads]

    def clear(self) -> None:
        self._reduced = None
        self._edited = False
        for bucket in self.buckets:
            bucket.clear_gradients()

    def edited(self) -> None:
        """Say that the shards' gradients are no longer the means of the whole ones."""
        self._edited = True

    def stepped(self) -> None:
        """What they were is of no interest any more."""
        self._edited = False

    def remove(self) -> None:
        """Leave the parameters as if this had never been."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing to do: nothing is sent before the step."""
        yield


class ShardedGradients:
    """Stage 2: as soon as backward has filled a bucket it is reduced, and its whole gradients are freed.

    Each backward that reaches a parameter makes whole rounds, as many as it takes until no whole gradient is left: one,
    unless a parameter gets its gradient in parts (reentrant checkpointing). Buckets leave in one order on every rank,
    that in which they were ready on rank 0 in the first backward; those that this rank has no gradients for, too.

    What is left in ``param.grad`` is a `Gone`: so whoever drops it (``module.zero_grad()``) drops the shard's gradient,
    as he expects, and whoever looks at it sees NaN and not a gradient.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[Tensor, Bucket] = {}
        self._hooks: list[Any] = []
        self._nodes: list[Any] = []
        self._sync = True
        self.at_first: Callable[[], None] | None = None
        self.turn = Turn(reduces_in_backward=True)
        self._round = Round(group, self.turn)
        self._n_started = 0  # buckets of the round under way
        self._missing: dict[Bucket, set[Tensor]] = {}  # parameters whose gradients the round under way waits for
        self._ready: list[Bucket] = []  # in the order in which they were
        self._in_order = False
        self._gone = Gone()
        self._backwards = Backwards.of(group)
        self._backwards.reducers.append(self)

    def add(self, buckets: Sequence[Bucket]) -> None:
        self.buckets += buckets
        self._bucket_of.update({param: bucket for bucket in buckets for param in bucket.params})
        for param in (param for bucket in buckets for param in bucket.params):
            # Not param.register_hook: that is called for torch.autograd.grad, too, which leaves param.grad alone.
            node = get_gradient_edge(param).node
            self._nodes.append(node)  # nobody else keeps it
            self._hooks.append(node.register_prehook(partial(self._comes, param)))
            self._hooks.append(param.register_post_accumulate_grad_hook(self._came))
        self._begin()
        self._in_order = False
        self.turn.n_rounds = 0  # they may have gradients already, on some rank

    def reduce(self) -> None:
        """Bring the gradients of the shards up to date: backward has, unless it reached nothing on this rank."""
        self._backwards.none_runs()
        self._forget(self._gone.dropped())
        if self.buckets and (self.turn.n_rounds == 0 or self._n_started or self._any_left()):
            self._finish_round()

    def clear(self) -> None:
        self._round.finish()
        if (
            self.turn.n_rounds or self._n_started
        ):  # else there is nothing to drop, and it may be called on one rank alone
            self.turn.end()
        self._begin()
        self._backwards.none_runs()
        self._gone.clear()
        for bucket in self.buckets:
            bucket.clear_gradients()

    def edited(self) -> None:
        """Nothing to do: what further backwards bring is added to what the shard then is."""

    def stepped(self) -> None:
        """What the next step needs has still to come, on some rank."""
        self.turn.end()

    def remove(self) -> None:
        self._gone.clear()
        if self in self._backwards.reducers:
            self._backwards.reducers.remove(self)
        for hook in self._hooks:
            hook.remove()
        self._nodes.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this, whole gradients are accumulated, and nothing is sent until the first backward after it."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _begin(self) -> None:
        self._n_started = 0
        self._missing = {bucket: {param for param in bucket.params if param.requires_grad} for bucket in self.buckets}
        self._ready = []

    def _comes(self, param: Tensor, grads: Any) -> None:
        """Before autograd adds to what is in ``param.grad``."""
        if param in self._gone:
            if self._gone.was_dropped(param):
                self._forget([param])
            self._gone.make_way(param)

    def _forget(self, dropped: Sequence[Tensor]) -> None:
        """What their gradients had been before, as somebody has dropped them."""
        if dropped:
            self._round.finish()  # of a backward that an error has ended
        for param in dropped:
            self._bucket_of[param].forget_gradient(param)
            self._gone.make_way(param)

    def _came(self, param: Tensor) -> None:
        if not self._sync:
            return
        at_once = self._backwards.came_to(self)
        bucket = self._bucket_of[param]
        missing = self._missing[bucket]
        if param in missing:
            missing.remove(param)
            if not missing:
                self._ready.append(bucket)
        while at_once and self._n_started < len(self.buckets) and not self._missing[self.buckets[self._n_started]]:
            self._start_next()

    def _start_next(self) -> None:
        _call_once(self)
        bucket = self.buckets[self._n_started]
        self._n_started += 1
        self._round.start(bucket, [self._gone.grad(param) for param in bucket.params])
        for param in bucket.params:
            self._gone.put(param)

    def end_of_backward(self) -> None:
        self._finish_round()
        while self._any_left():
            self._finish_round()

    def _any_left(self) -> bool:
        return any(self._gone.grad(param) is not None for param in self._bucket_of)

    def _finish_round(self) -> None:
        ready = self._ready
        while self._n_started < len(self.buckets):
            self._start_next()
        self._round.finish()
        self._begin()
        self.turn.n_rounds += 1
        if not self._in_order:
            self._agree_on_order(ready)

    def _agree_on_order(self, ready: list[Bucket]) -> None:
        """From now on buckets leave in the order in which rank 0 had them ready."""
        self._in_order = True
        order = ready + [bucket for bucket in self.buckets if bucket not in ready]
        device = self.buckets[0].flat.device
        indices = torch.tensor([self.buckets.index(bucket) for bucket in order], device=device)
        self.group.broadcast_(indices).wait()
        self.buckets[:] = [self.buckets[index] for index in indices.tolist()]


def shard_gradients(optimizer: ZeroOptimizer) -> ZeroOptimizer:
    """Stage 2: from now on the gradients of ``optimizer``'s parameters are reduced while backward runs, and freed.

    What is left after a backward is this rank's shard, in which further backwards accumulate. ``param.grad`` then has
    no memory and is all NaN; norms and clipping are the optimizer's.

    Args:
        optimizer: made alike on every rank; it is changed in place.

    Returns:
        the same optimizer.
    """
    optimizer.use_gradients(ShardedGradients(optimizer.group))
    return optimizer
