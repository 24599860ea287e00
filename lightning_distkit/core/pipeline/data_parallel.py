"""Several pipes side by side: gradients are averaged over their like stages at the end of a backward, as DDP does.

That is the end of the outermost backward, when layers outside of the pipe have their gradients as well. First the
replicas tell each other which parameters have gradients, and whether one of them has failed: then all of them raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.pipeline.failure import Failure

BUCKET_NBYTES = 25 * 2**20  # DDP's


class Bucket:
    """Gradients that travel together; what a communication hook sees of DDP's `GradBucket`."""

    def __init__(self, parameters: Sequence[nn.Parameter], index: int, is_last: bool) -> None:
        self._parameters = list(parameters)
        self._index = index
        self._is_last = is_last
        rows = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        self._buffer = torch.cat([row.reshape(-1) for row in rows])

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        """All gradients in one row, of this replica alone, not divided."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, shaped as the parameters."""
        pieces = self._buffer.split([each.numel() for each in self._parameters])
        return [piece.view_as(each) for piece, each in zip(pieces, self._parameters, strict=True)]

    def parameters(self) -> list[Tensor]:
        return list(self._parameters)

    def is_last(self) -> bool:
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def write_back(self) -> None:
        """Give the parameters what is in the buffer now."""
        for parameter, gradient in zip(self._parameters, self.gradients(), strict=True):
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.copy_(gradient)


class Averaging:
    """Of the gradients of this rank's parameters, over the ranks that have the same stages.

    Args:
        parameters: gives this rank's, in one order on every rank of the group.
        group: these ranks; one alone has nothing to average.
        control: where they tell each other how it went: a gloo group.
    """

    def __init__(self, parameters: Callable[[], Iterable[nn.Parameter]], group: Group, control: Group) -> None:
        self.group = group
        self._control = control
        self._parameters = parameters
        self._hook: tuple[Any, Callable[[Any, Any], Any]] | None = None
        self._is_on = True
        self._queued_in = -1
        self._others: list[nn.Parameter] = []
        self._handles: list[Any] = []

    def also(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average these as well, also after a backward that reaches no others. They replace those of the last call."""
        for handle in self._handles:
            handle.remove()
        self._others = list(parameters)
        self._handles = [self._queue_after(each) for each in self._others if self.group.world_size > 1]

    def _queue_after(self, parameter: nn.Parameter) -> Any:
        trains = parameter.requires_grad
        parameter.requires_grad_()  # torch takes a hook only then, and one that is frozen may be trained later
        handle = parameter.register_post_accumulate_grad_hook(lambda _: self.queue())
        parameter.requires_grad_(trains)
        return handle

    def _trained(self) -> list[nn.Parameter]:
        return [each for each in (*self._parameters(), *self._others) if each.requires_grad]

    def use_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """From now on ``hook(state, bucket)``, as for DDP's ``register_comm_hook``, makes the means."""
        self._hook = (state, hook)

    @contextmanager
    def off(self) -> Iterator[None]:
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    def queue(self) -> None:
        """Average when the backward that now runs has ended; called within it, any number of times."""
        backward = torch._C._current_graph_task_id()
        if self.group.world_size > 1 and self._is_on and self._queued_in != backward:
            self._queued_in = backward
            Variable._execution_engine.queue_callback(self.average)

    @torch.no_grad()
    def average(self) -> None:
        """
        Raises:
            StageError: another replica has failed.
        """
        parameters = self._trained()
        used = self._everyones_use([each.grad is not None for each in parameters], None)
        chosen = [each for each, is_used in zip(parameters, used, strict=True) if is_used]
        buckets = list(_buckets(chosen))
        if self._hook is None:
            pending = []
            for bucket in buckets:
                pending.append(self.group.all_reduce(bucket.buffer().div_(self.group.world_size)))
            for each in pending:
                each.wait()
        else:
            state, hook = self._hook
            futures = [hook(state, bucket) for bucket in buckets]
            for bucket, future in zip(buckets, futures, strict=True):
                bucket.set_buffer(future.wait().view(-1))
        for bucket in buckets:
            bucket.write_back()

    def failed(self, failure: Failure) -> None:
        """Meet the other replicas where they average, as they will in this step, and have them raise this failure."""
        if self.group.world_size > 1 and self._is_on:
            try:
                self._everyones_use([False] * len(self._trained()), failure)
            except RuntimeError:  # they have a failure of their own, or are gone: this rank raises its own
                return

    def _everyones_use(self, used: list[bool], failure: Failure | None) -> list[bool]:
        """Which parameters have a gradient on some replica."""
        flags = torch.tensor([failure is not None, *used], dtype=torch.uint8)
        self._control.all_reduce(flags, dist.ReduceOp.MAX).wait()
        has_failed, *on_some = flags.tolist()
        if has_failed:
            others = [each for each in self._control.everyones(failure, torch.device("cpu")) if each is not None]
            raise others[0].error()
        return [bool(each) for each in on_some]


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[Bucket]:
    """Parameters of one dtype and device together, up to `BUCKET_NBYTES`; from the last to the first, as DDP does."""
    alike: list[list[nn.Parameter]] = []
    for parameter in reversed(parameters):
        last = alike[-1] if alike else None
        fits = last is not None and (last[0].dtype, last[0].device) == (parameter.dtype, parameter.device)
        if last is not None and fits and sum(each.nbytes for each in last) + parameter.nbytes <= BUCKET_NBYTES:
            last.append(parameter)
        else:
            alike.append([parameter])
    for index, its in enumerate(alike):
        yield Bucket(its, index, is_last=index == len(alike) - 1)
