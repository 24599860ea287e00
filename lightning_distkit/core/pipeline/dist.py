"""A pipe over processes, one stage or several on each: any loss, on every rank, as if the model were whole.

`DistributedPipe` is called as the `nn.Sequential` would be, by every rank with the same inputs, and gives every rank
the whole output. Behind its output there is one autograd node, whose backward drains the pipe.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils import _pytree as pytree

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.ledger import Ledger
from lightning_distkit.core.pipeline import assembly, batchnorm, materialise, parking, rng, whole_state
from lightning_distkit.core.pipeline.call import Call
from lightning_distkit.core.pipeline.data_parallel import Averaging
from lightning_distkit.core.pipeline.drain import Drain, Due, input_gradients
from lightning_distkit.core.pipeline.engine import Engine, Event
from lightning_distkit.core.pipeline.failure import StageError
from lightning_distkit.core.pipeline.frames import Parcel
from lightning_distkit.core.pipeline.microbatch import merge, row_counts, split_call
from lightning_distkit.core.pipeline.partition import resolve_balance
from lightning_distkit.core.pipeline.plan import Kind, Layout
from lightning_distkit.core.pipeline.sequential import PipeSequential
from lightning_distkit.core.pipeline.skip import skip_layout, verify_skippables
from lightning_distkit.core.pipeline.stage import Stage
from lightning_distkit.core.pipeline.tied import TiedParameters
from lightning_distkit.core.pipeline.transport import Transport

HALF_AN_HOUR = 1800.0  # seconds, what process groups have by default
MicroBatch = tuple[tuple[Any, ...], dict[str, Any]]  # arguments and keyword arguments


class DistributedPipe(nn.Module):
    """Layers in stages, each on a process of its own, through which a batch goes in micro-batches.

    It holds this rank's layers alone, under the names that they have in ``module``; so its parameters, its
    ``state_dict()``, and what ``train()`` and ``to()`` do are this rank's. Let go of ``module``, and the other layers
    are freed.

    Layers before and behind the pipe are the same on all ranks, and get the same gradients there.

    Args:
        module: the layers. May be on the meta device: then each rank makes its own.
        chunks: micro-batches that a batch is split into, along the first dimension; fewer where it has fewer rows.
        checkpoint: which micro-batches are computed again in backward instead of being kept: "always", "except_last",
            "never". In evaluation none.
        deferred_batch_norm: BatchNorm's running statistics follow the whole batch, not each micro-batch.
        balance: layers of each stage in order; or "auto", "size", "time".
        sample: inputs of a micro-batch, a tuple for several; for "auto" and "time".
        schedule: the order of work, a name in `SCHEDULES`. A call does all forwards first with any of them; for the
            smaller memory of "1f1b" and "interleaved_1f1b" use `loss`.
        n_stages_per_rank: more than one with "interleaved_1f1b" or "gpipe"; stage s lives on rank s % n_ranks.
        outputs: "all": every rank gets the output. "last": only the rank of the last stage; the others get a number,
            zero, whose backward they must call as the last one calls its loss's.
        group: the processes; by default all. ``rank`` counts in it.
        mesh: instead, a mesh of two dimensions: data, then pipeline. Gradients are averaged over the first.
        device: where the layers are to be; by default where they are, the default device for those on meta.
        timeout: seconds, or a timedelta, that a rank waits for another; by default half an hour.

    Raises:
        TypeError: the module is no `nn.Sequential`, or its skips do not match.
        ValueError: an argument is wrong. Both on every rank, before anything is sent.
    """

    # What calls draw a number from in place of the CPU's global generator; alike on every rank, and saved by its owner.
    numbers: torch.Generator | None = None

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
        pipeline, data = assembly.groups_of(group, mesh)
        seconds = HALF_AN_HOUR if timeout is None else timeout
        seconds = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        where = torch.device(device) if device is not None else assembly.device_of(module)

        def find_balance() -> list[int]:
            assembly.check(module, chunks, checkpoint, schedule, n_stages_per_rank, outputs, seconds)
            _check_names(self, module)
            materialise.check(module)
            verify_skippables(module)
            return resolve_balance(balance, module, pipeline.world_size * n_stages_per_rank, sample)

        self.chunks = chunks
        self.checkpoint = checkpoint
        self.deferred_batch_norm = deferred_batch_norm
        self.schedule = schedule
        self.outputs = outputs
        self.device = where
        self.ledger = Ledger()
        self.balance: list[int] = []
        self.rank, self.n_ranks, self.n_stages = pipeline.rank, pipeline.world_size, 0
        self.data_rank, self.data_size = data.rank, data.world_size
        self.whole_keys: list[str] = []  # of the whole module's state dict
        self.parameter_names: list[str] = []  # of the whole module
        given = {"chunks": chunks, "checkpoint": checkpoint, "schedule": schedule, "outputs": outputs}
        given |= {"n_stages_per_rank": n_stages_per_rank, "deferred_batch_norm": deferred_batch_norm}
        given |= {"balance": list(balance) if isinstance(balance, (list, tuple)) else str(balance)}
        given |= {"the list of layers": list(getattr(module, "_modules", ()))}
        self.balance = assembly.agreed(find_balance, given, pipeline, data, where)
        self.n_stages = len(self.balance)
        self.whole_keys = list(module.state_dict())
        self.parameter_names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        self._number = 0  # of calls so far, the same on every rank
        self._anchor = torch.empty(0, requires_grad=True)  # no parameter: nobody trains it

        names_of = _cut(list(module._modules), self.balance)
        self._names_of = {stage: names_of[stage] for stage in range(self.rank, self.n_stages, self.n_ranks)}
        skips = skip_layout([PipeSequential(_named(module, names)) for names in names_of])
        tied = assembly.tied_parameters(module, names_of, self.n_ranks)
        self._take_layers(module, move=device is not None)
        layout = Layout(
            self.n_ranks,
            self.n_stages,
            tuple(dict.fromkeys((a, b) for a, b in skips.values() if a != b)),
            tuple(sorted({(a, b) for _, ranks in tied for a in ranks for b in ranks if a != b})),
        )
        stages = [
            Stage(
                stage,
                PipeSequential(_named(self, names)),
                where,
                assembly.skip_keys(skips, stage, pops=True),
                assembly.skip_keys(skips, stage, pops=False),
            )
            for stage, names in self._names_of.items()
        ]
        transport, global_rank = None, 0
        if self.n_ranks > 1:
            transport = Transport(assembly.ends_of(pipeline, where, seconds, self.n_stages), self.ledger)
            global_rank = dist.get_rank()
            weakref.finalize(self, transport.close).atexit = False
        own = dict(self.named_parameters(remove_duplicate=False))
        shared = [(next(name for name in names if name in own), ranks) for names, ranks in tied if self.rank in ranks]
        self._tied = TiedParameters(self.rank, [(own[name], ranks) for name, ranks in shared])
        self._engine = Engine(layout, schedule, self.rank, stages, transport, self._tied, self.ledger, global_rank)
        self._exchanges = whole_state.Exchanges(self._engine, self._next)
        # A group of its own, whose ledger nobody reads: what the replicas tell each other is no gradient.
        control = Group(data.process_group if assembly.is_gloo(data) else assembly.gloo_twin(data, seconds))
        self._averaging = Averaging(self.parameters, data, control)
        self._make_copies_equal(data)

    def _take_layers(self, module: nn.Sequential, move: bool) -> None:
        """Keep this rank's layers of the whole module."""
        if self.deferred_batch_norm:
            batchnorm.convert(module)
        mine = [name for names in self._names_of.values() for name in names]
        materialise.materialise(module, mine, self.device)
        for name in mine:
            layer = module.get_submodule(name)
            self.add_module(name, layer.to(self.device) if move else layer)

    def _make_copies_equal(self, data: Group) -> None:
        """Those of tied parameters, then those of the data replicas."""
        if self._engine.layout.tied:
            give = {rank: self._tied.values(rank) for rank in self._tied.partners}
            self._tied.take(self._engine.exchange(self._next(), give, self._tied.partners))
        for tensor in (*self.parameters(), *self.buffers()):
            whole = tensor.detach().contiguous()
            data.broadcast_(whole).wait()
            if whole.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(whole)

    # What it is

    @property
    def stages(self) -> list[int]:
        """Those that live on this rank."""
        return list(self._names_of)

    @property
    def is_first(self) -> bool:
        """Whether the first stage is here."""
        return self.rank == self._engine.layout.first_rank

    @property
    def is_last(self) -> bool:
        """Whether the last stage is here."""
        return self.rank == self._engine.layout.last_rank

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that have the same stages; None if there is but this one."""
        return self._averaging.group.process_group

    @property
    def data_ledger(self) -> Ledger:
        """What was sent to average gradients over data replicas; a hook counts in its own."""
        return self._averaging.group.ledger

    def extra_repr(self) -> str:
        return (
            f"stages {', '.join(map(str, self.stages))} of {self.n_stages}, chunks={self.chunks}, "
            f"schedule={self.schedule!r}, checkpoint={self.checkpoint!r}"
        )

    # Calls

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the whole module returns for the whole batch; the same on every rank.

        Collective: every rank calls it, with the same inputs, and runs its backward, if one does. Tensors among the
        arguments are split along their first dimension, except in a `NoChunk`; all else is given to every micro-batch.
        The outputs' tensors are joined along it, and values that are no tensors collected in lists.

        A backward through it adds to ``.grad`` of the layers, also if `torch.autograd.grad` has asked for others.

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
        wanted = [tensor for its in call.inputs_that_want_grad() for tensor in its]
        self._run(call, "F")
        if self.outputs == "last" and not self.is_last:
            zero = torch.zeros((), device=self.device)
            (wants,) = call.outputs.values()
            return Drain(call, self._drain, []).attach([zero], [wants], self._anchor, wanted)[0] if wants else zero
        parcels = _in_order(call)
        tensors = [tensor for parcel in parcels for tensor in parcel.tensors]
        wants = [wants for parcel in parcels for wants in parcel.wants_grad]
        if any(wants):
            drain = Drain(call, self._drain, [sum(parcel.wants_grad) for parcel in parcels] if self.is_last else [])
            tensors = drain.attach(tensors, wants, self._anchor, wanted)
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
        what comes to it: so accumulating, scaling and skipping losses is as ever. Without grad mode there is no
        backward.

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
            if weight is None:
                weights = [float(n) for n in row_counts(_n_rows((inputs, its, kwargs)), self.chunks)]
            else:
                weights = [float(weight(*each)) for each in targets_of]
            shares = _shares(weights)
        return self._loss(
            number,
            [(args[0], rest) for args, rest in split],
            lambda i, output: loss(output, *targets_of[i]),
            shares,
            scale,
            return_output,
        )

    def micro_batch_loss(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        loss: Callable[[int, Any], Tensor],
        weights: Sequence[float],
        scale: float = 1.0,
        return_output: bool = False,
    ) -> Any:
        """`loss` for a batch that is in micro-batches already.

        Args:
            micro_batches: for each the arguments and the keyword arguments; as many on every rank.
            loss: ``loss(i, output)`` of micro-batch ``i``, called on the last stage.
            weights: of each in the mean.
        """
        number = self._next()
        with self._refusing(number):
            if not micro_batches or len(weights) != len(micro_batches):
                raise ValueError(
                    f"there must be a micro-batch, and a weight for each, got {len(micro_batches)} micro-batches and "
                    f"{len(weights)} weights"
                )
            shares = _shares([float(each) for each in weights])
        return self._loss(number, micro_batches, loss, shares, scale, return_output)

    def _loss(
        self,
        number: int,
        micro_batches: Sequence[MicroBatch],
        loss: Callable[[int, Any], Tensor],
        shares: Sequence[float],
        scale: float,
        return_output: bool,
    ) -> Any:
        weights = [share * scale for share in shares]
        call = self._call(number, micro_batches, hands_out=return_output, loss=loss, weights=weights)
        wanted = [tensor for its in call.inputs_that_want_grad() for tensor in its]
        with parking.set_aside(self.parameters()) as parked:
            self._run(call, "FB" if call.keeps else "F")
        each_loss = zip(shares, call.losses, strict=True)
        value = torch.stack([share * each.to(self.device) for share, each in each_loss if share != 0]).sum()
        if call.keeps:
            value = Due(parked, input_gradients(call), scale, self._backward_is_done).attach(
                value, self._anchor, wanted
            )
        if not return_output:
            return value
        parcels = _in_order(call)
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

    def also_average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average these over data replicas as well: those of layers before and behind the pipe.

        Also in a backward that does not go through the pipe. A call takes the place of the last one.
        """
        self._averaging.also(parameters)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` of the whole module. Collective.

        Returns:
            the norm before, the same on every rank.
        """
        parameters = list(self.parameters())
        grads = [each.grad for each in parameters if each.grad is not None and self._tied.counts(each)]
        norms = self._exchanges.everyones(get_total_norm(grads, norm_type).to("cpu", torch.float64))
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        clip_grads_with_norm_(parameters, max_norm, total)
        return total

    # Whole state dicts

    def whole_state_dict(self, all_ranks: bool = False) -> dict[str, Any] | None:
        """The whole module's state dict with its keys in their order; on rank 0, or on all, else None. Collective."""
        parts = self.gather(whole_state.detached(self), all_ranks)
        return whole_state.join(parts, self.whole_keys) if parts is not None else None

    def load_whole_state_dict(self, state_dict: Mapping[str, Any] | None, strict: bool = True) -> None:
        """Load the whole module's state dict, of which each rank takes its own part. Collective.

        Args:
            state_dict: on every rank; or on rank 0 alone, None on the others, which are sent their parts.

        Raises:
            ValueError: rank 0 has none.
            RuntimeError: keys are missing or unexpected. Both on every rank.
        """
        whole_state.load(self, self.whole_keys, state_dict, strict, self._exchanges)

    def gather(self, values: Any, all_ranks: bool = False) -> list[Any] | None:
        """Every rank's nest of tensors and plain values, in the order of ranks; on rank 0, or on all. Collective."""
        return self._exchanges.gather(values, all_ranks)

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
        """Since the beginning, on this rank, of calls and backwards: in all ("total"), in stages ("computed"), and
        waiting for other ranks ("waited")."""
        engine = self._engine
        waited = engine.transport.waited if engine.transport is not None else 0.0
        return {"total": engine.total, "computed": engine.computed, "waited": waited}

    # What calls are made of

    def _next(self) -> int:
        self._number += 1
        return self._number

    @contextmanager
    def _refusing(self, number: int) -> Iterator[None]:
        """An error within is the caller's. Other ranks raise it too, or else must not wait for this one."""
        try:
            yield
        except Exception as error:
            if self._engine.transport is not None:
                self._engine.transport.watch.refuse(number, f"{type(error).__name__}: {error}")
            raise

    def _call(self, number: int, micro_batches: Sequence[MicroBatch], **arguments: Any) -> Call:
        checkpoint = self.checkpoint if self.training else "never"
        for stage in self._engine.stages.values():
            stage.refresh(_named(self, self._names_of[stage.index]))
        return Call(number, micro_batches, keeps=torch.is_grad_enabled(), checkpoint=checkpoint, **arguments)

    def _run(self, call: Call, does: str) -> None:
        """Run forwards, backwards or both of a call."""
        gives = "B" in does and any(map(bool, call.inputs_that_want_grad()))
        kind = Kind(does, len(call.micro_batches), call.hands_out, gives)
        try:
            with ExitStack() as stack:
                # A loss function may use parameters that are averaged, but its backward is not the outermost.
                stack.enter_context(self._averaging.off())
                if "F" in does:
                    stream = (self.data_rank, self.rank)
                    stack.enter_context(rng.own_stream(rng.draw(self.numbers), stream, self.device))
                    if self.deferred_batch_norm:
                        for stage in self._engine.stages.values():
                            stack.enter_context(batchnorm.whole_batch(stage.layers))
                self._engine.run(call, kind)
        except StageError as error:
            if call.keeps:
                self._averaging.failed(error.failure)
            raise

    def _drain(self, call: Call) -> None:
        """The backward of a call."""
        self._averaging.queue()
        with parking.set_aside(self._tied.parameters) as made:
            self._run(call, "B")
        parking.add(made)
        self.ledger.step()

    def _backward_is_done(self) -> None:
        self._averaging.queue()
        self.ledger.step()


def _check_names(pipe: nn.Module, module: nn.Sequential) -> None:
    taken = [name for name in module._modules if hasattr(pipe, name) or name.startswith("_")]
    if taken:
        raise ValueError(
            "a layer must not have the name of something that a pipe has, nor begin with an underscore, got "
            f"{', '.join(taken)}; rename it"
        )


def _cut(names: Sequence[str], counts: Sequence[int]) -> list[list[str]]:
    ends = [sum(counts[: n + 1]) for n in range(len(counts))]
    return [list(names[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def _named(module: nn.Module, names: Iterable[str]) -> OrderedDict[str, nn.Module]:
    return OrderedDict((name, module.get_submodule(name)) for name in names)


def _n_rows(values: Any) -> int:
    leaves = pytree.tree_leaves(values)
    return next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0)


def _shares(weights: Sequence[float]) -> list[float]:
    """Of each micro-batch in the mean."""
    total = sum(weights)
    if not total > 0:
        raise ValueError(
            f"the weights of the micro-batches must be positive together, got {list(weights)}; is there anything in "
            "this batch that counts?"
        )
    return [weight / total for weight in weights]


def _in_order(call: Call) -> list[Parcel]:
    """The outputs of all micro-batches, which the call then holds no longer."""
    return [call.outputs.pop(i) for i in sorted(call.outputs)]


def _rebuilt(parcels: Sequence[Parcel], tensors: Sequence[Tensor]) -> list[Any]:
    """The nests of the parcels, with other tensors."""
    nests, begin = [], 0
    for parcel in parcels:
        end = begin + len(parcel.tensors)
        nests.append(parcel.with_tensors(tensors[begin:end]))
        begin = end
    return nests
