"""A group of processes, the few collectives that we use, and the one order in which they are issued.

An algorithm that needs sums over the ranks is written from top to bottom as a generator (`Steps`): it yields a tensor
where it waits for its sum, and is resumed when the tensor holds it. How to wait is the caller's business: `run` one to
its end, or keep several under way with `Rounds`.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distkit.core import point_to_point
from lightning_distkit.core.ledger import Ledger
from lightning_distkit.core.reuse import Buffers

# torch 2.13 has new names for these, and warns about the old ones.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class PeerError(RuntimeError):
    """A collective failed: a peer died, or was later than the process group's timeout allows."""


def what_happened(error: Exception, rank: int, world_size: int) -> str:
    """What a backend's "connection closed" means, and what to do."""
    return (
        f"rank {rank} of {world_size} could not finish a collective: another rank died, or was later than the process "
        f"group's timeout. Its own log says why; restart all ranks from the last checkpoint. The backend says: {error}"
    )


def says_that_a_peer_is_lost(error: BaseException) -> bool:
    """Whether an error that some collective, not only one of ours, raised means that."""
    words = r"[Cc]onnection (closed|reset)|Broken pipe|[Tt]imed out|timeout caused pair closure|remote process"
    lost = re.search(words, str(error))
    return isinstance(error, RuntimeError) and not isinstance(error, PeerError) and lost is not None


@contextmanager
def naming_the_cause(process_group: dist.ProcessGroup) -> Iterator[None]:
    """Turn the backend's "connection closed" into a PeerError that says what happened and what to do."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(what_happened(error, process_group.rank(), process_group.size())) from error


class Group:
    """Some processes as seen from one of them. ``Group()`` is a world of one: the same code, and nothing is sent.

    Args:
        process_group: the processes; None for a world of one.
        ledger: where to count; a new one by default.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, ledger: Ledger | None = None) -> None:
        self.process_group = process_group
        self.ledger = ledger if ledger is not None else Ledger()
        self.buffers = Buffers()  # for messages
        self.rank = dist.get_rank(process_group) if process_group is not None else 0
        self.world_size = dist.get_world_size(process_group) if process_group is not None else 1

    @classmethod
    def of(cls, group: dist.ProcessGroup | Group | None) -> Group:
        """The group that a user means: None is the default one, or a world of one where there is none."""
        if isinstance(group, Group):
            return group
        if group is None and dist.is_available() and dist.is_initialized():
            return cls(dist.group.WORLD)
        return cls(group)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """Start to sum ``tensor`` over the ranks, in place, or to reduce it by another operation.

        Counted as `ring_nbytes`.
        """
        if self.world_size == 1 or tensor.numel() == 0:
            return Pending(self, None)
        self.ledger.add(nbytes=self.ring_nbytes(tensor.nbytes), n_messages=1)
        return Pending(self, dist.all_reduce(tensor, op, group=self.process_group, async_op=True))

    def reduce_scatter_(self, shards: Sequence[Tensor]) -> Pending:
        """Start to sum each rank's shard over the ranks, in place: of the result this rank has ``shards[rank]``.

        What is in the other shards afterwards means nothing.

        Args:
            shards: one for each rank, the pieces of one contiguous tensor in order; some may be longer than others, and
                some empty, but alike on every rank.
        """
        if self.world_size == 1 or not any(shard.numel() for shard in shards):
            return Pending(self, None)
        self._count([shard for rank, shard in enumerate(shards) if rank != self.rank])
        if shards[0].device.type == "cpu":
            return Pending(self, point_to_point.reduce_scatter_(shards, self.rank, self._processes, self.buffers))
        if len({shard.numel() for shard in shards}) > 1:  # one reduction for each rank, launched as one kernel
            work = dist.reduce_scatter(shards[self.rank], list(shards), group=self._processes, async_op=True)
        else:
            # NCCL sums in place where the output is the rank's own part of the input.
            work = _reduce_scatter(shards[self.rank], _whole(shards), group=self._processes, async_op=True)
        return Pending(self, work)

    def all_gather_(self, shards: Sequence[Tensor]) -> Pending:
        """Start to fill ``shards`` on every rank with the shards of their owners, in place.

        Args:
            shards: as for `reduce_scatter_`.
        """
        if self.world_size == 1 or not any(shard.numel() for shard in shards):
            return Pending(self, None)
        self._count([shards[self.rank]] * (self.world_size - 1))
        if shards[0].device.type == "cpu":
            return Pending(self, point_to_point.all_gather_(shards, self.rank, self._processes))
        if len({shard.numel() for shard in shards}) > 1:
            work = dist.all_gather(list(shards), shards[self.rank], group=self._processes, async_op=True)
        else:
            work = _all_gather(_whole(shards), shards[self.rank], group=self._processes, async_op=True)
        return Pending(self, work)

    def _count(self, sent: Sequence[Tensor]) -> None:
        self.ledger.add(nbytes=sum(shard.nbytes for shard in sent), n_messages=1)

    @property
    def _processes(self) -> dist.ProcessGroup:
        assert self.process_group is not None
        return self.process_group

    def ring_nbytes(self, nbytes: int) -> int:
        """What each rank sends in a ring all-reduce of so many bytes: ``2 (W - 1) / W`` of them, W the world size.

        gloo and, for large tensors, NCCL do just that.
        """
        return 2 * (self.world_size - 1) * nbytes // self.world_size

    def broadcast_(self, tensor: Tensor) -> Pending:
        """Start to give every rank rank 0's ``tensor``, in place. Not counted: it belongs to no step."""
        if self.world_size == 1 or tensor.numel() == 0:
            return Pending(self, None)
        return Pending(self, dist.broadcast(tensor, group=self.process_group, group_src=0, async_op=True))

    def meet(self, what: str, timeout: timedelta = timedelta(minutes=5)) -> None:
        """Wait until every rank has called ``what``, and raise a RuntimeError that names the missing ones if not.

        Before a collective that users call themselves: the messages of one that a single rank has called would be
        taken for those of whatever the others do next. With a backend other than gloo nothing is asked, and the
        collective itself ends in an error after the group's timeout.
        """
        if self.world_size == 1 or dist.get_backend(self.process_group) != "gloo":
            return
        try:
            dist.monitored_barrier(self.process_group, timeout=timeout, wait_all_ranks=self.rank == 0)
        except RuntimeError as error:
            raise RuntimeError(
                f"{what} must be called on every rank, as each has a part of what it returns; rank {self.rank} called "
                f"it, and others did not within {timeout.total_seconds():g} s: {error}"
            ) from error

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        """Every rank's ``tensor`` (one shape for all), in the order of ranks, on rank 0; None on the others.

        Not counted: it belongs to no step.
        """
        if self.world_size == 1:
            return [tensor.clone()]
        tensor = tensor.contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)] if self.rank == 0 else None
        with naming_the_cause(self._processes):
            dist.gather(tensor, gathered, group=self.process_group, group_dst=0)
        return gathered

    def agree(self, what: str, values: dict[str, Any], device: torch.device) -> None:
        """Raise a ValueError on every rank, if these are not the same on all.

        Not counted: it belongs to no step.
        """
        of_ranks = self.everyones(values, device) if values else []
        for rank, others in enumerate(of_ranks):
            for name in values:
                if others[name] != of_ranks[0][name]:
                    raise ValueError(
                        f"{what} must be made alike on every rank, but {name} is {of_ranks[0][name]!r} on rank 0 and "
                        f"{others[name]!r} on rank {rank}"
                    )

    def refuse_together(self, refusal: str | None, device: torch.device) -> None:
        """Raise a ValueError on every rank, if one of them refuses something: before anything was changed on any."""
        refusals = [f"{each} (rank {rank})" for rank, each in enumerate(self.everyones(refusal, device)) if each]
        if refusals:
            raise ValueError(refusal or refusals[0])

    def everyones(self, value: Any, device: torch.device) -> list[Any]:
        """What every rank gave, in the order of ranks, the same on all; not counted.

        The messages are tensors on ``device``, and not objects, whose gathering takes the current CUDA device: with
        NCCL that is the same one for all ranks, unless somebody has set it.
        """
        if self.world_size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        longest = torch.tensor([mine.numel()], device=device)
        with naming_the_cause(self._processes):
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.process_group)
            padded = torch.zeros(int(longest), dtype=torch.uint8, device=device)
            padded[: mine.numel()] = mine.to(device)
            gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
            dist.all_gather(gathered, padded, group=self.process_group)
        return [pickle.loads(bytes(each.tolist())) for each in gathered]  # a pickle tells where it ends

    def send(self, tensor: Tensor, to: int) -> None:
        """Give rank ``to`` a tensor that it will `receive`; blocks. Not counted: it belongs to no step."""
        with naming_the_cause(self._processes):
            dist.send(tensor, group=self.process_group, group_dst=to)

    def receive(self, tensor: Tensor, sender: int) -> Tensor:
        """Fill ``tensor`` with what rank ``sender`` sends; blocks."""
        with naming_the_cause(self._processes):
            dist.recv(tensor, group=self.process_group, group_src=sender)
        return tensor


def _whole(shards: Sequence[Tensor]) -> Tensor:
    """The contiguous tensor whose pieces ``shards`` are."""
    return shards[0].as_strided((sum(shard.numel() for shard in shards),), (1,))


def default_device(process_group: dist.ProcessGroup | None) -> torch.device:
    """Where a group's messages are, if nothing else says it."""
    if process_group is not None and "nccl" in dist.get_backend(process_group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Pending:
    """A collective under way."""

    def __init__(self, group: Group, work: dist.Work | point_to_point.Exchange | None) -> None:
        self._group = group
        self._work = work

    def wait(self) -> None:
        """Return when what follows on this thread (on CUDA: on the current stream) sees the result.

        Raises:
            PeerError: a rank is lost.
        """
        if self._work is None:
            return
        begin = perf_counter()
        with naming_the_cause(self._group._processes):
            self._work.wait()
        self._group.ledger.add(waited_s=perf_counter() - begin)


class Round:
    """The sums that one round of messages brought: the same on every rank."""

    def __init__(self, sums: Sequence[Tensor]) -> None:
        self._sums = sums

    @cached_property
    def finite(self) -> bool:
        """Whether no sum of this round has an inf or a NaN; every rank gets the same answer without asking another.

        On CUDA the first look waits for the device.
        """
        # The largest magnitude keeps inf and NaN and, unlike a plain sum, cannot overflow by itself.
        finite = [torch.linalg.vector_norm(x, torch.inf).isfinite() for x in self._sums if x.numel()]
        return not finite or bool(torch.stack(finite).all())


Result = TypeVar("Result")
Messages = Generator[Tensor | tuple[Tensor, ...], Round, Result]
"""An algorithm that yields one or more tensors to be summed in place over the ranks."""

Steps = Messages[Tensor]
"""One that returns its result."""


def run(steps: Steps, group: Group) -> Tensor:
    """Bring ``steps`` to its end and return its result."""
    rounds = Rounds(group)
    rounds.start(steps)
    return rounds.finish()[0]


class _Task:
    """One algorithm under way: the messages that it waits for, or its result."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.messages: tuple[Tensor, ...] = ()
        self.result: Tensor | None = None

    def advance(self, last: Round | None) -> None:
        try:
            yielded = next(self._steps) if last is None else self._steps.send(last)
            self.messages = (yielded,) if isinstance(yielded, Tensor) else yielded
        except StopIteration as stop:
            self.messages, self.result = (), stop.value
            if not isinstance(self.result, Tensor):
                raise TypeError(f"an algorithm must return its result, a tensor, got {self.result!r}") from None


class Envelope:
    """Messages of one dtype and device that travel as one collective."""

    def __init__(self, group: Group, messages: Sequence[Tensor]) -> None:
        self._messages = messages
        alone = len(messages) == 1 and messages[0].is_contiguous()
        self.packed = messages[0] if alone else torch.cat([message.flatten() for message in messages])
        self._pending = group.all_reduce(self.packed)

    def receive(self) -> None:
        """Wait; from then on each message holds its sum."""
        self._pending.wait()
        if self.packed is not self._messages[0]:
            parts = self.packed.split([message.numel() for message in self._messages])
            for message, part in zip(self._messages, parts, strict=True):
                message.copy_(part.view_as(message))


class Rounds:
    """Several algorithms under way at once on one group, in lockstep.

    The order of the collectives is that of the program, never of the network's timing, so it is the same on every rank
    and on every backend: each algorithm's first message is sent when it is started; the second messages of all follow
    together, as one collective, once all the first have arrived; and so on.

    On CUDA nothing here blocks the host. `Pending.wait` makes the current stream wait for the collective, which itself
    had waited for all that was queued before it on the stream that started it. So what an algorithm computes after a
    ``yield`` is ordered behind both what it computed before and the sum, even if the two halves run on different
    streams; and a message's memory is not written again before its sum was waited for.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._tasks: list[_Task] = []
        self._sent: list[Envelope] = []  # one for each collective, in the order of issue

    def start(self, steps: Steps) -> None:
        """Run ``steps`` up to its first message and send that; do not wait."""
        task = _Task(steps)
        self._advance([task], None)
        self._tasks.append(task)
        self._sent += self._send([task])

    def finish(self) -> list[Tensor]:
        """Bring all that was started to its end; the results in the order of the starts."""
        tasks, sent = self._tasks, self._sent
        self.abandon()
        waiting = [task for task in tasks if task.result is None]
        while waiting:
            for envelope in sent:
                envelope.receive()
            self._advance(waiting, Round([envelope.packed for envelope in sent]))
            waiting = [task for task in waiting if task.result is None]
            sent = self._send(waiting)
        return [task.result for task in tasks if task.result is not None]

    def abandon(self) -> None:
        """Forget all that is under way."""
        self._tasks, self._sent = [], []

    def _advance(self, tasks: Sequence[_Task], last: Round | None) -> None:
        begin = perf_counter()
        for task in tasks:
            task.advance(last)
        self.group.ledger.add(computed_s=perf_counter() - begin)

    def _send(self, tasks: Sequence[_Task]) -> list[Envelope]:
        """Send the messages of ``tasks``: one collective for each dtype and device that is among them."""
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for task in tasks:
            for message in task.messages:
                alike.setdefault((message.dtype, message.device), []).append(message)
        return [Envelope(self.group, messages) for messages in alike.values()]
