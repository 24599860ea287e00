"""A pipe over processes, one stage or several on each: any loss, on every rank, as if the model were whole.

`DistributedPipe` is called as the `nn.Sequential` would be, by every rank with the same inputs, and gives every rank the
whole output. Behind its output there is one autograd node, whose backward drains the pipe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.ledger import Ledger
from lightning_distkit.core.pipeline import batchnorm, parking, rng
from lightning_distkit.core.pipeline.checkpoint import CHECKPOINT_MODES
from lightning_distkit.core.pipeline.data_parallel import Averaging
from lightning_distkit.core.pipeline.engine import Call, Engine, Event, Stage
from lightning_distkit.core.pipeline.failure import StageError
from lightning_distkit.core.pipeline.frames import Parcel
from lightning_distkit.core.pipeline.materialise import check as check_meta
from lightning_distkit.core.pipeline.materialise import materialise
from lightning_distkit.core.pipeline.microbatch import merge, row_counts, split_call
from lightning_distkit.core.pipeline.partition import resolve_balance
from lightning_distkit.core.pipeline.plan import Direction, Kind, Layout
from lightning_distkit.core.pipeline.schedules import SCHEDULES
from lightning_distkit.core.pipeline.sequential import PipeSequential
from lightning_distkit.core.pipeline.skip import SkipKey, skip_layout, verify_skippables
from lightning_distkit.core.pipeline.tied import TiedParameters
from lightning_distkit.core.pipeline.transport import Ends, Transport

OUTPUTS = ("all", "last")


class DistributedPipe(nn.Module):
    """Layers in stages, each on a process of its own, through which a batch goes in micro-batches.

    It holds this rank's layers alone, under the names that they have in ``module``; so its parameters, its
    ``state_dict()``, and what ``train()`` and ``to()`` do are this rank's. Let go of ``module``, and the other layers are
    freed.

    Layers before and behind the pipe are the same on all ranks, and get the same gradients there.

    Args:
        module: the layers. May be on the meta device: then each rank makes its own.
        chunks: micro-batches that a batch is split into, along the first dimension; fewer where it has fewer rows.
        checkpoint: which micro-batches are computed again in backward instead of being kept: "always", "except_last",
            "never". In evaluation none.
        deferred_batch_norm: BatchNorm's running statistics follow the whole batch, not each micro-batch.
        balance: layers of each stage in order; or "auto", "size", "time".
        sample: inputs of a micro-batch, a tuple for several; for "auto" and "time".
        schedule: the order of work, a name in `SCHEDULES`. `__call__` runs all forwards first with any of them; the lower
            memory of "1f1b" and "interleaved_1f1b" needs `loss`.
        n_stages_per_rank: more than one with "interleaved_1f1b" or "gpipe"; stage s lives on rank s % n_ranks.
        outputs: "all": every rank gets the output. "last": only the rank of the last stage; the others get a number, zero,
            whose backward they must call as the last one calls its loss's.
        group: the processes; by default all. ``rank`` counts in it.
        mesh: instead, a mesh of two dimensions: data, then pipeline. Gradients are averaged over the first.
        device: where the layers are to be; by default where they are, the current device for those on meta.
        timeout: seconds, or a timedelta, that a rank waits for another; by default half an hour.

    Raises:
        TypeError: the module is no `nn.Sequential`, or its skips do not match.
        ValueError: an argument is wrong. Both on every rank, before anything is sent.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        *,
        balance: str | Sequence[int] = "auto",
        sample: Any = None,
        schedule: str = "gpipe",
        n_stages_per_rank: int = 1,
        outputs: str = "all",
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        super().__init__()
        pipeline, data = _groups(group, mesh)
        n_ranks, self.rank = pipeline.world_size, pipeline.rank
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else 1800.0 if timeout is None else timeout
        n_stages = n_ranks * n_stages_per_rank if isinstance(n_stages_per_rank, int) else 0

        def checked() -> list[int]:
            _check(module, chunks, checkpoint, schedule, n_stages_per_rank, outputs, seconds)
            check_meta(module)
            verify_skippables(module)
            return resolve_balance(balance, module, n_stages, sample)

        where = torch.device(device) if device is not None else _device_of(module)
        given = {"chunks": chunks, "checkpoint": checkpoint, "schedule": schedule, "outputs": outputs}
        given |= {"n_stages_per_rank": n_stages_per_rank, "deferred_batch_norm": deferred_batch_norm}
        self.balance = _agreed(checked, given, pipeline, data, where)

        self.chunks = chunks
        self.checkpoint = checkpoint
        self.deferred_batch_norm = deferred_batch_norm
        self.schedule = schedule
        self.outputs = outputs
        self.n_ranks = n_ranks
        self.n_stages = n_stages
        self.device = where
        self.ledger = Ledger()
        self.data_rank, self.data_size = data.rank, data.world_size
        self._number = 0  # of calls, the same on every rank
        self._anchor = torch.empty(0, requires_grad=True)  # not a parameter: nobody trains it

        names = list(module._modules)
        ends = [sum(self.balance[: n + 1]) for n in range(n_stages)]
        names_of = [names[end - count : end] for end, count in zip(ends, self.balance, strict=True)]
        own = [index for index in range(n_stages) if index % n_ranks == self.rank]
        self.whole_keys = list(module.state_dict())  # of the whole module, in its order
        self.parameter_names = [name for name, _ in module.named_parameters(remove_duplicate=False)]

        skips = skip_layout([PipeSequential(OrderedDict((n, module._modules[n]) for n in its)) for its in names_of])
        tied = _tied(module, names_of, n_ranks)
        if deferred_batch_norm:
            batchnorm.convert(module)
        mine = [name for index in own for name in names_of[index]]
        materialise(module, mine, where)
        for name in mine:
            layer = module._modules[name]
            self.add_module(name, layer.to(where) if layer is not None and device is not None else layer)
        self._names_of = {index: names_of[index] for index in own}
        self._stages = [
            Stage(
                index,
                PipeSequential(OrderedDict((name, self._modules[name]) for name in names_of[index])),
                where,
                _keys(skips, index, pops=True),
                _keys(skips, index, pops=False),
            )
            for index in own
        ]
        by_name = dict(self.named_parameters(remove_duplicate=False))
        layout = Layout(
            n_ranks,
            n_stages,
            tuple(dict.fromkeys((a, b) for a, b in skips.values() if a != b)),
            tuple(sorted({(a, b) for _, ranks in tied for a in ranks for b in ranks if a != b})),
        )
        transport = _transport(pipeline, where, seconds, layout, self.ledger) if n_ranks > 1 else None
        self._engine = Engine(
            layout, schedule, self.rank, self._stages, transport, self.ledger, dist.get_rank() if n_ranks > 1 else 0
        )
        here = [(names, ranks) for names, ranks in tied if self.rank in ranks]
        shared = TiedParameters(self.rank, [(by_name[next(n for n in its if n in by_name)], ranks) for its, ranks in here])
        self._engine.tied = shared
        if layout.tied:
            partners = sorted({rank for _, ranks in here for rank in ranks if rank != self.rank})
            give = {rank: shared.values(rank) for rank in partners}
            shared.take(self._engine.exchange(self._next(), give, partners))
        self._replicated: list[nn.Parameter] = []
        control = data if data.world_size == 1 or _is_gloo(data) else Group(_gloo_twin(data, seconds))
        self._averaging = Averaging(lambda: [*self.parameters(), *self._replicated], data, control)
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                data.broadcast_(tensor.detach()).wait()

    # What it is

    @property
    def n_layers(self) -> int:
        """Of the whole module."""
        return sum(self.balance)

    @property
    def stages(self) -> list[int]:
        """Those that live on this rank."""
        return list(self._names_of)

    @property
    def is_first(self) -> bool:
        """Whether the first stage is here."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether the last stage is here."""
        return self.rank == self._engine.layout.last_rank

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that have the same stages; None if there is but this one."""
        return self._averaging.group.process_group

    def extra_repr(self) -> str:
        return (
            f"stages {', '.join(map(str, self.stages))} of {self.n_stages}, chunks={self.chunks}, "
            f"schedule={self.schedule!r}, checkpoint={self.checkpoint!r}"
        )

    # Calls

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the whole module returns for the whole batch; the same on every rank.

        Collective: every rank calls it, with the same inputs. Tensors among the arguments are split along their first
        dimension, except in a `NoChunk`; all else is given to every micro-batch. The outputs' tensors are joined along
        it, and values that are no tensors collected in lists. Its backward is collective as well.

        Raises:
            TypeError: no tensor among the inputs, in the output, or between two stages.
            ValueError: the inputs' tensors have different first dimensions.
            StageError: on every rank: a stage raised on one of them (it is then of the original's type as well, if that
                is one of Python's own), or was lost or late; then the pipe is of no use any more.
        """
        number = self._next()
        with self._refusing(number):
            micro_batches = split_call(inputs, kwargs, self.chunks)
        call = self._call(number, micro_batches, hands_out=self.outputs == "all")
        wanted = call.inputs_that_want_grad()
        self._run(call, "F")
        parcels = [call.outputs.pop(i) for i in sorted(call.outputs)]
        if self.outputs == "last" and not self.is_last:
            drain = _Drain(self, call, wanted, [])
            zero = torch.zeros((), device=self.device)
            return drain.attach([zero], [parcels[-1]])[0] if call.keeps else zero
        tensors = [tensor for parcel in parcels for tensor in parcel.tensors]
        wants = [wants for parcel in parcels for wants in parcel.wants_grad]
        if call.keeps and any(wants):
            drain = _Drain(self, call, wanted, [sum(parcel.wants_grad) for parcel in parcels])
            tensors = drain.attach(tensors, wants)
        else:
            call.kept.clear()
        return merge(_rebuilt(parcels, tensors))

    def loss(
        self,
        *inputs: Any,
        loss: Callable[..., Tensor],
        targets: Any = (),
        weight: Callable[..., Any] | None = None,
        scale: float = 1.0,
        return_output: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The loss of a whole batch, with its forwards and backwards done by the schedule; the same on every rank.

        Collective, as a call is. Gradients are made within, and added to ``.grad`` when the loss's backward runs, times
        what comes to it: so accumulating, scaling and skipping losses is as ever. Without grad mode there is no backward.

        Args:
            inputs, kwargs: as for a call.
            loss: ``loss(output, *targets)`` of a micro-batch, called on the last stage: a mean over its rows, or over
                what ``weight`` counts. Parameters that it uses get their gradients on that rank alone: put layers into
                the module.
            targets: a tuple, or a tensor, split as inputs are.
            weight: ``weight(*targets)`` of a micro-batch, what its mean is over, e.g. the number of its tokens that
                count; by default its rows. So the mean over the whole batch is exact.
            scale: by which losses are multiplied for their backwards, and gradients divided in the end: for fp16.
            return_output: also give the output, without a graph.

        Returns:
            the loss; with ``return_output`` it and the output.

        Raises:
            ValueError: the weights of all micro-batches together are not positive.
            TypeError, ValueError, StageError: as for a call; a ``loss`` that raises is the last stage's failure.
        """
        number = self._next()
        with self._refusing(number):
            its = targets if isinstance(targets, tuple) else (targets,)
            split = split_call((inputs, its), kwargs, self.chunks)
            targets_of = [args[1] for args, _ in split]
            micro_batches = [(args[0], each) for args, each in split]
            if weight is None:
                n_rows = next(
                    leaf.shape[0]
                    for leaf in pytree.tree_leaves((inputs, its, kwargs))
                    if isinstance(leaf, Tensor) and leaf.dim() > 0
                )
                counts = [float(n) for n in row_counts(n_rows, self.chunks)]
            else:
                counts = [float(weight(*each)) for each in targets_of]
            total = sum(counts)
            if not total > 0 and counts != [0.0]:
                raise ValueError(
                    f"the weights of the micro-batches must be positive together, got {counts}; is there anything in "
                    "this batch that counts?"
                )
        shares = [count / total if total else 1.0 for count in counts]
        call = self._call(
            number,
            micro_batches,
            hands_out=return_output,
            loss=lambda i, output: loss(output, *targets_of[i]),
            weights=[share * scale for share in shares],
        )
        wanted = call.inputs_that_want_grad()
        with parking.set_aside(self.parameters()) as parked:
            self._run(call, "FB" if call.keeps else "F")
        each_loss = zip(shares, call.losses, strict=True)
        value = torch.stack([share * each for share, each in each_loss if share != 0]).sum().to(self.device)
        if call.keeps:
            value = _Parked.apply(self, self._anchor, value, _Due(parked, call, scale), *(x for its in wanted for x in its))
        if not return_output:
            return value
        parcels = [call.outputs.pop(i) for i in sorted(call.outputs)]
        return value, merge(_rebuilt(parcels, [tensor for parcel in parcels for tensor in parcel.tensors]))

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards within this accumulate, and leave the averaging over data replicas to the first one after it."""
        return self._averaging.off()

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Average gradients over data replicas by ``hook(state, bucket)``: any that DDP's method of this name takes.

        For example ``pipe.register_comm_hook(*HOOKS["powersgd"](pipe.data_group))``.

        Raises:
            TypeError: it cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"a hook must be callable as hook(state, bucket), got {hook!r}; the state comes first")
        if hasattr(hook, "checked_state"):  # one of core.compression: it names the layers and checks its arguments
            hook.checked_state(state).claim(self)
        self._averaging.use_hook(state, hook)

    def also_average(self, parameters: Iterator[nn.Parameter] | Sequence[nn.Parameter]) -> None:
        """Average these over data replicas as well: those of layers before and behind the pipe. A call replaces the last."""
        self._replicated = list(parameters)

    # Whole state dicts

    def whole_state_dict(self, all_ranks: bool = False) -> dict[str, Any] | None:
        """The whole module's state dict, its keys in their order; on rank 0, None on the others, or on all. Collective."""
        own = {key: _detached(value) for key, value in self.state_dict().items()}
        return self._joined(self.gather(own, all_ranks))

    def load_whole_state_dict(self, state_dict: Mapping[str, Any] | None, strict: bool = True) -> None:
        """Load the whole module's state dict, of which each rank takes its own part. Collective.

        Args:
            state_dict: on every rank; or on rank 0 alone, None on the others, which are sent their parts.

        Raises:
            RuntimeError: keys are missing or unexpected; on every rank.
        """
        has = [state_dict is not None] if self.n_ranks == 1 else self._everyones(state_dict is not None)
        if not has[0]:
            raise ValueError("rank 0 must have a state dict to load, got None; give it there, or on every rank")
        number = self._next()
        keys = list(state_dict) if state_dict is not None else []
        if not all(has):
            keys_of = self._everyones((list(self.state_dict()), keys))
            keys = keys_of[0][1]
            if self.rank == 0:
                assert state_dict is not None
                give = {
                    rank: {key: state_dict[key] for key in its if key in state_dict}
                    for rank, (its, _) in enumerate(keys_of)
                    if rank > 0 and not has[rank]
                }
                self._engine.exchange(number, give, [])
            elif state_dict is None:
                state_dict = self._engine.exchange(number, {}, [0])[0]
        assert state_dict is not None
        missing, unexpected = sorted(set(self.whole_keys) - set(keys)), sorted(set(keys) - set(self.whole_keys))
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"the state dict must have the keys of the whole module; missing: {', '.join(missing) or 'none'}; "
                f"unexpected: {', '.join(unexpected) or 'none'}"
            )
        own = self.state_dict()
        self.load_state_dict({key: state_dict[key] for key in own if key in state_dict}, strict=strict)

    def gather(self, values: Any, all_ranks: bool = False) -> list[Any] | None:
        """Every rank's nest of tensors and plain values, in the order of ranks; on rank 0, or on all. Collective."""
        others = [rank for rank in range(self.n_ranks) if rank != self.rank]
        if all_ranks:
            taken = self._engine.exchange(self._next(), dict.fromkeys(others, values), others)
        else:
            is_root = self.rank == 0
            taken = self._engine.exchange(self._next(), {} if is_root else {0: values}, others if is_root else [])
            if not is_root:
                return None
        return [values if rank == self.rank else taken[rank] for rank in range(self.n_ranks)]

    def _joined(self, parts: list[dict[str, Any]] | None) -> dict[str, Any] | None:
        if parts is None:
            return None
        whole = {key: value for part in reversed(parts) for key, value in part.items()}
        order = {key: n for n, key in enumerate(self.whole_keys)}
        return {key: whole[key] for key in sorted(whole, key=lambda key: order.get(key, len(order)))}

    # Measurements

    @property
    def events(self) -> list[Event]:
        """What this rank did since `record` was set: steps with their times."""
        return self._engine.events

    @property
    def record(self) -> bool:
        """Whether steps are recorded. Set it to begin anew."""
        return self._engine.record

    @record.setter
    def record(self, yes: bool) -> None:
        self._engine.record = yes
        self._engine.events = []

    @property
    def seconds(self) -> dict[str, float]:
        """Since the beginning, of this rank: in calls and backwards ("total"), of these in stages ("computed") and
        waiting for other ranks ("waited")."""
        engine = self._engine
        waited = engine.transport.waited if engine.transport is not None else 0.0
        return {"total": engine.total, "computed": engine.computed, "waited": waited}

    # What the calls above are made of

    def _next(self) -> int:
        self._number += 1
        if self._engine.transport is not None:
            self._engine.transport.watch(self._number)
        return self._number

    @contextmanager
    def _refusing(self, number: int) -> Iterator[None]:
        """An error within is one of the caller's. Other ranks raise it too, or else must not wait for this one."""
        try:
            yield
        except Exception as error:
            if self._engine.transport is not None:
                self._engine.transport.refuse(number, f"{type(error).__name__}: {error}")
            raise

    def _call(self, number: int, micro_batches: Any, **arguments: Any) -> Call:
        checkpoint = self.checkpoint if self.training else "never"
        for stage in self._stages:  # somebody may have put another layer in place of one
            for name in self._names_of[stage.index]:
                stage.layers._modules[name] = self._modules[name]
        return Call(number, micro_batches, keeps=torch.is_grad_enabled(), checkpoint=checkpoint, **arguments)

    def _run(self, call: Call, does: str) -> None:
        """Run forwards, backwards or both of a call, in this rank's own stream of random numbers."""
        input_gradients = "B" in does and any(map(bool, call.inputs_that_want_grad()))
        kind = Kind(does, len(call.micro_batches), call.hands_out, input_gradients)
        try:
            with ExitStack() as stack:
                if "F" in does:
                    drawn = rng.draw()
                    stack.enter_context(rng.own_stream(drawn, (self.data_rank, self.rank), self.device))
                    if self.deferred_batch_norm:
                        for stage in self._stages:
                            stack.enter_context(batchnorm.whole_batch(stage.layers))
                self._engine.run(call, kind)
        except StageError as error:
            if call.keeps:
                self._averaging.failed(error.failure)
            raise

    def _everyones(self, value: Any) -> list[Any]:
        parts = self.gather([value], all_ranks=True)
        assert parts is not None
        return [part[0] for part in parts]


class _Drain:
    """The backward of one call."""

    def __init__(self, pipe: DistributedPipe, call: Call, inputs: list[list[Tensor]], n_wanted: list[int]) -> None:
        self._pipe = pipe
        self._call = call
        self._inputs = inputs
        self._n_wanted = n_wanted
        self.outputs: list[Tensor] = []
        self.wants: list[bool] = []

    def attach(self, outputs: list[Tensor], wants: list[bool]) -> list[Tensor]:
        """The same outputs, with this as their backward."""
        self.outputs, self.wants = outputs, wants
        inputs = [tensor for its in self._inputs for tensor in its]
        attached = _Drained.apply(self, self._pipe._anchor, *inputs)
        self.outputs, self._inputs = [], [its[:0] for its in self._inputs]
        return list(attached)

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """From the gradients of the outputs, on the last rank, to those of the inputs, on every rank."""
        call, pipe = self._call, self._pipe
        if call.is_drained:
            raise RuntimeError(
                "backward through a call of a pipe can be done once, as the stages have freed what they kept; call the "
                "pipe again"
            )
        call.is_drained = True
        pipe._averaging.queue()
        wanted = [grad for grad, wants in zip(grads, self.wants, strict=True) if wants]
        if pipe.is_last:
            for i, n in enumerate(self._n_wanted):
                call.output_grads[i], wanted = wanted[:n], wanted[n:]
        tied = pipe._engine.tied.parameters if pipe._engine.tied is not None else []
        with parking.set_aside(tied) as made:
            pipe._run(call, "B")
        parking.add(made)
        pipe.ledger.step()
        return _in_order(call)


class _Drained(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, drain: _Drain, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.drain = drain
        ctx.set_materialize_grads(False)
        outputs = drain.outputs
        ctx.mark_non_differentiable(*(out for out, wants in zip(outputs, drain.wants, strict=True) if not wants))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, *ctx.drain.backward(grads))


class _Due:
    """Gradients that a call of `DistributedPipe.loss` has made."""

    def __init__(self, parked: dict[nn.Parameter, Tensor], call: Call, scale: float) -> None:
        self.parked = parked
        self.inputs = _in_order(call)
        self.scale = scale
        self.is_paid = False


class _Parked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pipe: DistributedPipe, anchor: Tensor, value: Tensor, due: _Due, *inputs: Tensor
    ) -> Tensor:
        ctx.pipe, ctx.due = pipe, due
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        due: _Due = ctx.due
        if due.is_paid:
            raise RuntimeError("the backward of a pipe's loss can be done once; compute the loss again")
        due.is_paid = True
        factor = grad / due.scale
        parked, due.parked = due.parked, {}
        inputs, due.inputs = due.inputs, []
        if factor.device.type != "cpu" or factor.item() != 1:  # not to ask another device what it has
            for each in (*parked.values(), *(tensor for tensor in inputs if tensor is not None)):
                each.mul_(factor)
        parking.add(parked)
        ctx.pipe._averaging.queue()
        ctx.pipe.ledger.step()
        return (None, None, None, None, *inputs)


def _in_order(call: Call) -> list[Tensor | None]:
    """The inputs' gradients, as `Call.inputs_that_want_grad` has the inputs."""
    return [grad for i in sorted(call.input_grads) for grad in call.input_grads[i]]


def _rebuilt(parcels: Sequence[Parcel], tensors: Sequence[Tensor]) -> list[Any]:
    nests, begin = [], 0
    for parcel in parcels:
        end = begin + len(parcel.tensors)
        nests.append(parcel.with_tensors(tensors[begin:end]))
        begin = end
    return nests


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


# What the constructor is made of


def _groups(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> tuple[Group, Group]:
    """Those of the pipeline and of the data replicas."""
    if mesh is None:
        return Group.of(group), Group()
    if group is not None:
        raise ValueError("group and mesh both say which processes are meant; give one of them")
    if mesh.ndim != 2:
        raise ValueError(f"mesh must have two dimensions, data and pipeline, got {mesh.ndim}")
    data, pipeline = mesh.get_group(0), mesh.get_group(1)
    return Group.of(pipeline), Group(data) if dist.get_world_size(data) > 1 else Group()


def _check(
    module: object, chunks: object, checkpoint: object, schedule: object, n_stages_per_rank: object, outputs: object,
    timeout: float,
) -> None:
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"the module of a pipe must be an nn.Sequential, got {type(module).__name__}")
    for name, number in (("chunks", chunks), ("n_stages_per_rank", n_stages_per_rank)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name} must be a positive integer, got {number!r}")
    for name, value, known in (
        ("checkpoint", checkpoint, CHECKPOINT_MODES),
        ("schedule", schedule, tuple(SCHEDULES)),
        ("outputs", outputs, OUTPUTS),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    assert isinstance(n_stages_per_rank, int)
    SCHEDULES[str(schedule)](1, 1, n_stages_per_rank)
    if not timeout > 0:
        raise ValueError(f"timeout must be positive, got {timeout:g} seconds")
    taken = [name for name in module._modules if hasattr(DistributedPipe, name) or name in _ATTRIBUTES]
    if taken:
        raise ValueError(f"a layer must not have the name of something that a pipe has, got {', '.join(taken)}; rename it")


_ATTRIBUTES = ("balance", "chunks", "checkpoint", "schedule", "outputs", "device", "ledger", "rank")


def _agreed(
    checked: Callable[[], list[int]], given: dict[str, Any], pipeline: Group, data: Group, device: torch.device
) -> list[int]:
    """The balance that rank 0 has found; every rank raises if one of them refuses an argument, or has another one."""
    where = torch.device("cpu") if _is_gloo(pipeline) else device
    result: tuple[list[int] | None, str, str]
    error: Exception | None = None
    try:
        result = (checked(), "", "")
    except Exception as refusal:
        error = refusal
        result = (None, type(refusal).__name__, str(refusal))
    for group in (pipeline, data):
        for rank, (_, kind, text) in enumerate(group.everyones(result, where)):
            if kind:
                raise error or (TypeError if kind == "TypeError" else ValueError)(f"{text} (rank {rank})")
        group.agree("DistributedPipe", given, where)
    balance = pipeline.everyones(result[0], where)[0]
    balance = data.everyones(balance, where)[0]
    assert isinstance(balance, list)
    return balance


def _is_gloo(group: Group) -> bool:
    return group.process_group is None or dist.get_backend(group.process_group) == "gloo"


def _device_of(module: object) -> torch.device:
    if isinstance(module, nn.Module):
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                return tensor.device
    return torch.get_default_device()


def _keys(skips: Mapping[SkipKey, tuple[int, int]], stage: int, pops: bool) -> dict[int, list[SkipKey]]:
    """For each other stage, the keys of what goes from it to ``stage``, or back."""
    result: dict[int, list[SkipKey]] = {}
    for key, (stashes_at, pops_at) in skips.items():
        here, there = (pops_at, stashes_at) if pops else (stashes_at, pops_at)
        if here == stage and there != stage:
            result.setdefault(there, []).append(key)
    return result


def _tied(
    module: nn.Module, names_of: Sequence[Sequence[str]], n_ranks: int
) -> list[tuple[list[str], tuple[int, ...]]]:
    """Of each parameter that several ranks have, its names and the ranks."""
    rank_of = {name: stage % n_ranks for stage, names in enumerate(names_of) for name in names}
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    ranks = [(its, tuple(sorted({rank_of[name.split(".")[0]] for name in its}))) for its in names.values()]
    return [(its, each) for its, each in ranks if len(each) > 1]


def _transport(pipeline: Group, device: torch.device, timeout: float, layout: Layout, ledger: Ledger) -> Transport:
    assert pipeline.process_group is not None
    ranks = dist.get_process_group_ranks(pipeline.process_group)
    limit = timedelta(seconds=timeout)
    control = _gloo_twin(pipeline, timeout)
    payload = {}
    if device.type != "cpu":
        backend = dist.get_backend(pipeline.process_group)
        for direction in Direction:
            for upwards in (False, True):
                payload[direction, upwards] = dist.new_group(
                    ranks, backend=backend, timeout=limit, use_local_synchronization=True
                )
    return Transport(Ends(control, payload, device, ranks, timeout), ledger)


def _gloo_twin(group: Group, timeout: float) -> dist.ProcessGroup:
    """The same processes in a gloo group that nobody else knows."""
    assert group.process_group is not None
    ranks = dist.get_process_group_ranks(group.process_group)
    return dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout), use_local_synchronization=True)
