"""One call of a pipe on one rank: what goes in, what comes out, and what each stage keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_distkit.core.pipeline.checkpoint import Surroundings
from lightning_distkit.core.pipeline.failure import Failure
from lightning_distkit.core.pipeline.frames import Parcel
from lightning_distkit.core.pipeline.plan import Message

Groups = list[list[Tensor]]
"""Tensors that want gradients: those of the values between stages, then those of the skips of each other stage."""


@dataclass
class Inputs:
    """What a stage gets for one micro-batch, its tensors apart."""

    tensors: list[Tensor]
    wants_grad: list[bool]
    sizes: list[int]  # how many tensors the values have, and the skips from each stage
    build: Callable[[list[Tensor]], tuple[tuple[Any, ...], dict[str, Any], list[list[Tensor | None]]]]

    def groups(self, tensors: Sequence[Tensor]) -> Groups:
        """Of as many tensors those that want gradients."""
        result, begin = [], 0
        for size in self.sizes:
            each = zip(tensors[begin : begin + size], self.wants_grad[begin : begin + size], strict=True)
            result.append([tensor for tensor, wanted in each if wanted])
            begin += size
        return result


@dataclass
class Kept:
    """What a stage keeps of a micro-batch for its backward."""

    inputs: Inputs
    surroundings: Surroundings | None  # set if it is to be run again, and then
    run: Callable[..., Any] | None = None  # what is
    leaves: Groups = field(default_factory=list)
    wants_grad: list[list[bool]] = field(default_factory=list)  # of each output and stashed tensor
    outputs: Groups = field(default_factory=list)  # those that want it; the loss, if that is computed here

    def enter(self) -> list[Tensor]:
        """The inputs as the stage's graph begins with them."""
        both = list(zip(self.inputs.tensors, self.inputs.wants_grad, strict=True))
        leaves = [tensor.detach().requires_grad_() if wanted else tensor for tensor, wanted in both]
        self.leaves = self.inputs.groups(leaves)
        return [_enter(leaf) if leaf.requires_grad else leaf for leaf in leaves]


class Call:
    """One call of a pipe, and its backward: inputs, outputs, and what is kept between the two.

    Args:
        number: which one; the same on every rank.
        micro_batches: the arguments of each.
        keeps: a backward will follow.
        checkpoint: which micro-batches are run again in it.
        hands_out: every rank gets the outputs.
        loss: of a micro-batch number and its output, what is to be minimised, on the last stage; None if whoever called
            computes it.
        weights: of each micro-batch in the sum of losses.
    """

    def __init__(
        self,
        number: int,
        micro_batches: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        *,
        keeps: bool,
        checkpoint: str,
        hands_out: bool = True,
        loss: Callable[[int, Any], Tensor] | None = None,
        weights: Sequence[float] = (),
    ) -> None:
        self.number = number
        self.micro_batches = list(micro_batches)
        self.keeps = keeps
        self.checkpoint = checkpoint
        self.hands_out = hands_out
        self.loss = loss
        self.weights = weights
        self.failure: Failure | None = None
        self.error: BaseException | None = None  # the failure's, if it was raised here
        self.kept: dict[tuple[int, int], Kept] = {}
        self.here: dict[Message, Parcel | Failure] = {}  # from one stage of this rank to another
        self.outputs: dict[int, Any] = {}  # of the last stage, a parcel by micro-batch; or the one word on them
        self.losses: list[Tensor] = []
        self.output_grads: dict[int, list[Tensor | None]] = {}  # by micro-batch, of those that want them
        self.input_grads: dict[int, list[Tensor | None]] = {}

    def gradient_of_output(self, i: int) -> list[Tensor | None]:
        """Of what the last stage gave for a micro-batch."""
        if self.loss is None:
            return self.output_grads.pop(i)
        # A mean over nothing is NaN, and so would be its gradient.
        return [torch.full_like(self.losses[i], self.weights[i]) if self.weights[i] != 0 else None]

    def inputs_that_want_grad(self) -> list[list[Tensor]]:
        """Of each micro-batch, the same on every rank."""
        if not self.keeps:
            return [[] for _ in self.micro_batches]
        return [
            [leaf for leaf in pytree.tree_leaves(each) if isinstance(leaf, Tensor) and leaf.requires_grad]
            for each in self.micro_batches
        ]


class _Enter(torch.autograd.Function):
    """The same values, which layers may write to in place: they must not with a leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _enter(leaf: Tensor) -> Tensor:
    entered: Tensor = _Enter.apply(leaf)  # type: ignore[no-untyped-call]
    return entered
