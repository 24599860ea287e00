"""Does one rank's steps: receives, computes forwards and backwards of micro-batches, and sends, as the plan says.

Each stage's forward of a micro-batch makes a small autograd graph of its own, whose leaves are what was received; its
backward is a plain `torch.autograd.backward` on that graph. So parameters' gradients accumulate as ever, hooks run, and
nothing is known here of what layers are.

An exception in a stage becomes a `Failure`. From then on the rank does the rest of its steps without computing: what it
is to receive it drops, and in place of what it is to send it sends the failure. The last word of a call comes from one
rank, and with it every rank raises the same error, with all channels clean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_distkit.core.ledger import Ledger
from lightning_distkit.core.pipeline.call import Call, Inputs, Kept
from lightning_distkit.core.pipeline.checkpoint import Surroundings, is_checkpointed
from lightning_distkit.core.pipeline.failure import Failure
from lightning_distkit.core.pipeline.frames import Parcel, pack
from lightning_distkit.core.pipeline.microbatch import require_tensor
from lightning_distkit.core.pipeline.plan import Direction, Kind, Layout, Message, Step, expected, plan
from lightning_distkit.core.pipeline.stage import Stage
from lightning_distkit.core.pipeline.tied import TiedParameters
from lightning_distkit.core.pipeline.transport import Transport
from lightning_distkit.core.pipeline.watch import Broken


@dataclass
class Event:
    """One step as it was done; seconds on this process's clock."""

    kind: str
    stage: int
    micro_batch: int
    begin: float
    end: float
    waited: float  # of these, for other ranks


class Engine:
    """This rank's stages and its way to the others.

    Args:
        stages: those that live here.
        transport: None in a world of one.
        tied: parameters that other ranks have as well.
        global_rank: this rank's number in the world, for errors.
    """

    def __init__(
        self,
        layout: Layout,
        schedule: str,
        rank: int,
        stages: Sequence[Stage],
        transport: Transport | None,
        tied: TiedParameters,
        ledger: Ledger,
        global_rank: int,
    ) -> None:
        self.layout = layout
        self.schedule = schedule
        self.rank = rank
        self.stages = {stage.index: stage for stage in stages}
        self.transport = transport
        self.ledger = ledger
        self.global_rank = global_rank
        self.tied = tied
        self.record = False
        self.events: list[Event] = []
        self.computed = 0.0  # seconds in stages, since the beginning
        self.total = 0.0  # seconds in calls and backwards, since the beginning
        self.broken: Failure | None = None

    def run(self, call: Call, kind: Kind) -> None:
        """Do this rank's steps of a call.

        Raises:
            StageError: on every rank, if a stage failed on one.
        """
        if self.broken is not None:
            raise self.broken.error()
        begin = perf_counter()
        try:
            self._begin(call, kind)
            for step in plan(self.layout, self.schedule, kind)[self.rank]:
                self._do(call, step)
            if self.transport is not None:
                self.transport.finish()
        except Broken as broken:
            self._break(call, broken.failure)
        except BaseException as error:
            # Not a stage's error, but one between its steps: which frames have crossed is not known any more.
            self._break(call, Failure.of(error, "the engine", -1, self.global_rank, is_fatal=True))
            raise
        finally:
            self.total += perf_counter() - begin
        if call.failure is not None:
            self._raise(call)

    def exchange(self, number: int, give: Mapping[int, Any], take: Sequence[int]) -> dict[int, Any]:
        """Give some ranks a nest each, and take one from others, as all have agreed; by rank, what was taken.

        Raises:
            StageError: on every rank that was to get something from a rank that failed, or is lost.
        """
        call = Call(number, [], keeps=False, checkpoint="never")
        if self.broken is not None:
            raise self.broken.error()
        taken: dict[int, Any] = {}
        if self.transport is None:
            return taken
        message = {rank: Message(rank, self.rank, Direction.STATE, 0, 0) for rank in take}
        try:
            self.transport.watch.number = number
            self.transport.begin(number, 0, [[each] for each in message.values()])
            for rank, values in give.items():
                self._send(call, Message(self.rank, rank, Direction.STATE, 0, 0), lambda values=values: values)  # type: ignore[misc]
            taken = {rank: self._receive(call, each) for rank, each in message.items()}
            self.transport.finish()
        except Broken as broken:
            self._break(call, broken.failure)
        if call.failure is not None:
            self._raise(call)
        return {rank: _values(each) for rank, each in taken.items()}

    def _begin(self, call: Call, kind: Kind) -> None:
        if self.transport is None:
            return
        self.transport.watch.number = call.number
        self.transport.begin(call.number, kind.signature, expected(self.layout, self.schedule, kind, self.rank))

    def _break(self, call: Call, failure: Failure) -> None:
        if self.transport is not None:
            failure = self.transport.broken_by(failure)
        self.broken = call.failure = failure

    def _raise(self, call: Call) -> None:
        assert call.failure is not None
        failure, error = call.failure, call.error
        call.kept.clear()
        call.outputs.clear()
        call.here.clear()
        call.error = None
        if error is not None and not isinstance(error, Exception):
            raise error  # KeyboardInterrupt and the like are no stage's failure
        raise failure.error() from error

    # One step

    def _do(self, call: Call, step: Step) -> None:
        waited_before = self.transport.waited if self.transport is not None else 0.0
        begin = perf_counter()
        match step.kind:
            case "F":
                self._forward(call, step)
            case "B":
                self._backward(call, step)
            case "outputs":
                self._take_outputs(call, step)
            case "input gradients":
                for message in step.receives:
                    received = self._receive(call, message)
                    if isinstance(received, Parcel):
                        call.input_grads[message.micro_batch] = _values(received)
            case "tied out":
                for message in step.sends:
                    self._send(call, message, partial(self.tied.gradients, message.target))
            case "tied in":
                received_of = {message.source: self._receive(call, message) for message in step.receives}
                if call.failure is None:
                    self.tied.add({rank: _values(each) for rank, each in received_of.items()})
            case "end":
                for message in step.receives:
                    self._take_word(call, message)
                for message in step.sends:
                    self._send(call, message, list)
        if self.record:
            waited = self.transport.waited - waited_before if self.transport is not None else 0.0
            self.events.append(Event(step.kind, step.stage, step.micro_batch, begin, perf_counter(), waited))

    @contextmanager
    def _computing(self, call: Call, doing: str, stage: int) -> Iterator[None]:
        """An exception within this is this stage's failure, and no more."""
        begin = perf_counter()
        try:
            yield
        except BaseException as error:
            call.failure = Failure.of(error, doing, stage, self.global_rank)
            call.error = error
        finally:
            self.computed += perf_counter() - begin

    def _receive(self, call: Call, message: Message) -> Parcel | Failure:
        if message.source == self.rank:
            received = call.here.pop(message)
        else:
            assert self.transport is not None
            received = self.transport.receive(message)
        if isinstance(received, Failure) and call.failure is None:
            call.failure = received
        return received

    def _take_word(self, call: Call, message: Message) -> Parcel | Failure:
        """Receive what decides how the call went: the failure in it is the one that every rank raises."""
        received = self._receive(call, message)
        if isinstance(received, Failure) and received != call.failure:
            call.failure = received
            call.error = None
        return received

    def _send(self, call: Call, message: Message, values: Callable[[], Any]) -> None:
        """Send ``values()``, a parcel or what can be packed; or the call's failure."""
        what: Parcel | Failure
        if call.failure is None:
            made = values()
            what = made if isinstance(made, Parcel) else pack(made)
        else:
            what = call.failure
        if message.target == self.rank:
            call.here[message] = what
        else:
            assert self.transport is not None
            self.transport.send(message, what)

    # Forward

    def _forward(self, call: Call, step: Step) -> None:
        received = [self._receive(call, message) for message in step.receives]
        stage, i = self.stages[step.stage], step.micro_batch
        is_last = step.stage == self.layout.n_stages - 1
        parcels: list[Parcel] = []
        if call.failure is None:
            with self._computing(call, f"the forward of micro-batch {i}", step.stage):
                parcels = self._stage_forward(call, stage, i, [each for each in received if isinstance(each, Parcel)])
                if is_last:  # and if nobody wants it, it is not held
                    call.outputs[i] = parcels[0] if call.hands_out or call.loss is None else None
        del received
        for n, message in enumerate(step.sends):
            self._send(call, message, lambda n=n: self._word(call, i) if is_last else parcels[n])  # type: ignore[misc]

    def _word(self, call: Call, i: int) -> Any:
        """What every other rank gets of the last stage's output."""
        output = call.outputs[i]
        if call.loss is not None:
            return [call.losses, output]
        return output if call.hands_out else any(its for each in call.outputs.values() for its in each.wants_grad)

    def _stage_forward(self, call: Call, stage: Stage, i: int, received: list[Parcel]) -> list[Parcel]:
        """Run a stage: what it hands on, and what it stashes for each other stage."""
        inputs = self._inputs(call, stage, i, received)
        is_last = stage.index == self.layout.n_stages - 1
        again = call.keeps and is_checkpointed(call.checkpoint, i, len(call.micro_batches))
        # Where its backward comes right after its forward, there is nothing to be gained.
        again = again and not (is_last and call.loss is not None and self.schedule != "gpipe")
        kept = Kept(inputs, Surroundings(stage.device, stage.layers) if again else None)

        run = partial(_run, stage, inputs, partial(call.loss, i) if is_last and call.loss is not None else None)
        if again:
            kept.run = run
            with torch.no_grad():
                made, loss = stage.in_place.run(run, *inputs.tensors)
        elif call.keeps and stage.index == 0:
            # Micro-batches are views of one batch: autograd would take what is written to one for written to all.
            made, loss = stage.in_place.run(run, *kept.enter())
        elif call.keeps:
            made, loss = run(*kept.enter())
        else:
            made, loss = run(*inputs.tensors)
        parcels = [pack(each) for each in made]
        if again and self._can_train(stage, inputs):
            for parcel in parcels:
                parcel.wants_grad = [_differentiable(tensor) for tensor in parcel.tensors]
        if call.keeps:
            kept.wants_grad = [parcel.wants_grad for parcel in parcels]
            if not again:
                kept.outputs = [parcel.wanted(parcel.tensors) for parcel in parcels] if loss is None else [[loss]]
            call.kept[stage.index, i] = kept
        if loss is not None:
            call.losses.append(loss.detach())
        for parcel in parcels:
            # What is sent must not change on its way, and the next micro-batch may change a buffer.
            parcel.tensors = [
                tensor.detach().clone() if stage.is_buffer(tensor) else tensor.detach() for tensor in parcel.tensors
            ]
        return parcels

    def _inputs(self, call: Call, stage: Stage, i: int, received: list[Parcel]) -> Inputs:
        n_values = 0 if stage.index == 0 else 1
        skips = received[n_values:]
        sizes = [len(parcel.tensors) for parcel in received]
        if stage.index == 0:
            leaves, spec = pytree.tree_flatten(call.micro_batches[i])
            where = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            first = [leaves[n] for n in where]
            wants = [tensor.requires_grad and call.keeps for tensor in first]
            sizes.insert(0, len(first))
        else:
            first, wants = received[0].tensors, received[0].wants_grad
        parcel = None if stage.index == 0 else received[0]

        def build(tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any], list[list[Tensor | None]]]:
            if parcel is None:
                filled = list(leaves)
                for n, tensor in zip(where, tensors, strict=False):
                    filled[n] = tensor
                args, kwargs = pytree.tree_unflatten(filled, spec)
            else:
                values = parcel.with_tensors(tensors[: sizes[0]])
                args, kwargs = values if isinstance(values, tuple) else (values,), {}
            begin, each_skip = sizes[0], []
            for skip, size in zip(skips, sizes[1:], strict=True):
                each_skip.append(skip.with_tensors(tensors[begin : begin + size]))
                begin += size
            return args, kwargs, each_skip

        tensors = [*first, *(tensor for skip in skips for tensor in skip.tensors)]
        wants = [*wants, *(wanted for skip in skips for wanted in skip.wants_grad)]
        return Inputs(tensors, wants if call.keeps else [False] * len(tensors), sizes, build)

    def _can_train(self, stage: Stage, inputs: Inputs) -> bool:
        return any(inputs.wants_grad) or any(parameter.requires_grad for parameter in stage.layers.parameters())

    def _take_outputs(self, call: Call, step: Step) -> None:
        for message in step.receives:
            received = self._take_word(call, message)
            if not isinstance(received, Parcel):
                continue
            if call.loss is not None:
                call.losses, output = _values(received)
            else:
                output = received if call.hands_out else _values(received)
            call.outputs[message.micro_batch] = output

    # Backward

    def _backward(self, call: Call, step: Step) -> None:
        stage, i = self.stages[step.stage], step.micro_batch
        kept = call.kept.pop((step.stage, i), None)
        if call.failure is None:
            assert kept is not None
            with self._computing(call, f"the recomputation of micro-batch {i}", step.stage):
                # Before the gradients are waited for: what of the bubble is before this backward is used.
                if kept.surroundings is not None:
                    self._run_again(stage, kept)
        received = [self._receive(call, message) for message in step.receives]
        grads: list[list[Tensor | None]] = []
        if call.failure is None:
            assert kept is not None
            with self._computing(call, f"the backward of micro-batch {i}", step.stage):
                given = [_values(each) for each in received]
                if step.stage == self.layout.n_stages - 1:
                    given.insert(0, call.gradient_of_output(i))
                del received
                grads = self._stage_backward(kept, given)
                if step.stage == 0:
                    call.input_grads[i] = grads[0]
        del kept
        for n, message in enumerate(step.sends):
            self._send(call, message, lambda n=n: grads[n if step.stage > 0 else 0])  # type: ignore[misc]

    def _run_again(self, stage: Stage, kept: Kept) -> None:
        assert kept.surroundings is not None
        assert kept.run is not None
        with kept.surroundings.again():
            made, loss = stage.in_place.run_again(kept.run, *kept.enter())
        # As it was said in the first run, when it was not known which of them would depend on what wants gradients.
        outputs = []
        for values, wants_grad in zip(made, kept.wants_grad, strict=True):
            each = zip(pack(values).tensors, wants_grad, strict=True)
            outputs.append([tensor for tensor, wanted in each if wanted])
        kept.outputs = outputs if loss is None else [[loss]]

    def _stage_backward(self, kept: Kept, given: list[list[Tensor | None]]) -> list[list[Tensor | None]]:
        """The gradients of the stage's inputs, from those of its outputs."""
        tensors, grads = [], []
        for outputs, its in zip(kept.outputs, given, strict=True):
            for output, grad in zip(outputs, its, strict=True):
                if grad is not None and output.requires_grad:
                    tensors.append(output)
                    grads.append(grad)
        if tensors:
            torch.autograd.backward(tensors, grads)
        return [[leaf.grad for leaf in group] for group in kept.leaves]


def _run(
    stage: Stage, inputs: Inputs, loss_of: Callable[[Any], Tensor] | None, *tensors: Tensor
) -> tuple[list[Any], Tensor | None]:
    """What the stage returns and stashes, and the loss, if it is computed here."""
    output, stashed = stage(*inputs.build(list(tensors)))
    require_tensor(output, f"what stage {stage.index} of a pipe hands on")
    loss = loss_of(output) if loss_of is not None else None
    if loss_of is not None and not (isinstance(loss, Tensor) and loss.dim() == 0):
        raise TypeError(
            "the loss of a micro-batch must be a tensor without dimensions, the mean over its rows; got "
            f"{f'shape {tuple(loss.shape)}' if isinstance(loss, Tensor) else type(loss).__name__}"
        )
    return [output, *stashed], loss


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _values(received: Parcel | Failure) -> Any:
    assert isinstance(received, Parcel)
    return received.with_tensors(received.tensors)
