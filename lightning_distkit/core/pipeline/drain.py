"""The autograd nodes behind what a pipe returns: their backwards drain the pipe, or pay out what was made before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_distkit.core.pipeline import parking
from lightning_distkit.core.pipeline.call import Call


def input_gradients(call: Call) -> list[Tensor | None]:
    """In the order of `Call.inputs_that_want_grad`."""
    return [grad for i in sorted(call.input_grads) for grad in call.input_grads[i]]


class Drain:
    """The backward of one call.

    Args:
        run: does the backwards of all micro-batches.
        n_wanted: of each micro-batch, how many output tensors want gradients; empty where gradients of what this rank
            has returned are of no use: on all ranks but the last.
    """

    def __init__(self, call: Call, run: Callable[[Call], None], n_wanted: Sequence[int]) -> None:
        self._call = call
        self._run = run
        self._n_wanted = n_wanted
        self._is_done = False
        self.wants: Sequence[bool] = ()
        self.outputs: Sequence[Tensor] = ()

    def attach(
        self, outputs: Sequence[Tensor], wants: Sequence[bool], anchor: Tensor, inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """The same outputs, with this behind them.

        Args:
            wants: which of them want gradients.
            anchor: requires a gradient, so that there is a backward whatever ``inputs`` do.
        """
        self.outputs, self.wants = outputs, wants
        attached = _Drained.apply(self, anchor, *inputs)  # type: ignore[no-untyped-call]
        self.outputs = ()
        return list(attached)

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """From the gradients of the outputs, those of the last rank, to those of the inputs, on every rank."""
        if self._is_done:
            raise RuntimeError(
                "backward through a call of a pipe can be done once, as the stages have freed what they had kept; call "
                "the pipe again"
            )
        self._is_done = True
        wanted = [grad for grad, wants in zip(grads, self.wants, strict=True) if wants]
        for i, n in enumerate(self._n_wanted):
            self._call.output_grads[i], wanted = wanted[:n], wanted[n:]
        self._run(self._call)
        return input_gradients(self._call)


class _Drained(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, drain: Drain, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.drain = drain
        ctx.set_materialize_grads(False)
        each = zip(drain.outputs, drain.wants, strict=True)
        ctx.mark_non_differentiable(*(output for output, wants in each if not wants))
        return tuple(drain.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, *ctx.drain.backward(grads))


class Due:
    """Gradients that were made with a loss, to be added to ``.grad`` when its backward runs.

    Args:
        parked: of parameters; changed in place.
        inputs: of the inputs.
        scale: by which all of them are too large.
        then: is called within the backward.
    """

    def __init__(
        self,
        parked: dict[nn.Parameter, Tensor],
        inputs: list[Tensor | None],
        scale: float,
        then: Callable[[], None],
    ) -> None:
        self._parked = parked
        self._inputs = inputs
        self._scale = scale
        self._then = then
        self._is_paid = False

    def attach(self, loss: Tensor, anchor: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """The same loss, with this behind it."""
        attached: Tensor = _Paid.apply(self, loss, anchor, *inputs)  # type: ignore[no-untyped-call]
        return attached

    def backward(self, grad: Tensor) -> list[Tensor | None]:
        """Pay out, times the gradient that comes to the loss; the inputs' gradients."""
        if self._is_paid:
            raise RuntimeError("the backward of a pipe's loss can be done once; compute the loss again")
        self._is_paid = True
        (parked, inputs), self._parked, self._inputs = (self._parked, self._inputs), {}, []
        factor = grad / self._scale
        if factor.device.type != "cpu" or factor.item() != 1:  # the CPU is asked, as that costs nothing there
            for made in (*parked.values(), *(each for each in inputs if each is not None)):
                made.mul_(factor)
        parking.add(parked)
        self._then()
        return inputs


class _Paid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, due: Due, loss: Tensor, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.due = due
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (None, None, None, *ctx.due.backward(grad))
