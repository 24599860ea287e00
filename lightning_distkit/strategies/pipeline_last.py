"""One training step whose loss only the last stage takes, so that the pipe's output is sent to nobody.

All stages run ``training_step`` up to where it calls the pipe, and the last one to its end. It tells the others the
loss and what was logged, and after the backward gives them the gradients of the layers around the pipe: it alone has
all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_distkit.core.collectives import naming_the_cause
from lightning_distkit.core.pipeline.failure import StageError
from lightning_distkit.core.pipeline.told import told
from lightning_distkit.strategies.pipeline_steps import MicroSteps, Steps, Streams


class LastStageSteps(MicroSteps):
    """Runs the training steps of a module, each for a whole batch."""

    def run(self, args: Sequence[Any], scale: float) -> Any:
        """What ``training_step`` returns; on other ranks than the last a loss of the same value, whose backward is the
        pipe's.

        Args:
            args: of the ``training_step``.
            scale: of no account: the loss itself is scaled.

        Raises:
            ValueError, StageError: as `MicroSteps.run`.
        """
        pipe = self._part.pipe
        streams = Streams(1, self._device)
        steps = _WholeStep(self._module, self._part, [tuple(args)], streams)
        before, pipe.outputs = pipe.outputs, "last"
        error: Exception | None = None
        loss = torch.zeros((), device=self._device)
        try:
            loss = steps.to_its_end() if pipe.is_last else steps.to_the_pipe()
        except Exception as raised:
            if not steps.is_behind or isinstance(raised, StageError):
                raise  # as it is on all ranks
            error = raised  # the others wait to be told
        finally:
            pipe.outputs = before
        streams.end()
        word = self._told(steps, [1.0], error)
        self._take(word, steps)
        if not pipe.is_last:
            anchor = torch.zeros((), device=self._device, requires_grad=True)  # the pipe may have nothing to train
            loss = word["loss"].to(self._device) + loss.to(word["loss"].dtype) + anchor
        extra = word["extra"]
        if extra is None:
            return loss
        return {**pytree.tree_map_only(Tensor, lambda each: each.to(self._device), extra), "loss": loss}

    def share_gradients(self) -> None:
        """Of the layers around the pipe, those of the last stage on all. Collective."""
        outside = self._part.outside()
        last = self._stages.world_size - 1
        if not outside or last == 0:
            return
        is_last = self._part.pipe.is_last
        has_grad = told([each.grad is not None for each in outside], self._control, source=last)
        assert self._stages.process_group is not None
        for parameter, wanted in zip(outside, has_grad, strict=True):
            if not wanted:
                parameter.grad = None
                continue
            if parameter.grad is None or not parameter.grad.is_contiguous():
                made = parameter.grad
                parameter.grad = torch.empty_like(parameter, memory_format=torch.contiguous_format)
                if is_last and made is not None:
                    parameter.grad.copy_(made)
            with naming_the_cause(self._stages.process_group):
                dist.broadcast(parameter.grad, group=self._stages.process_group, group_src=last)


class _WholeStep(Steps):
    """The step of a whole batch."""

    is_behind = False  # the pipe, that has given its output here

    def to_the_pipe(self) -> Tensor:
        """On other ranks than the last: what the pipe gives there."""

        def leave(*args: Any, **kwargs: Any) -> Any:
            self.number: Tensor = self._part.pipe(*args, **kwargs)
            raise self.AtThePipe(args, kwargs)

        with self._streams.of(0), self._instead_of_the_pipe(leave), self._logging_to([]):
            try:
                self._module.training_step(*self._args[0])
            except self.AtThePipe:
                return self.number
        raise ValueError(_ONCE.format("returned without"))

    def to_its_end(self) -> Tensor:
        """On the last rank: the loss."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_behind:
                raise ValueError(_ONCE.format("called it again"))
            output = self._part.pipe(*args, **kwargs)
            self.is_behind = True
            return output

        loss = self._run_to_its_end(0, call)
        if not self.is_behind:
            raise ValueError(_ONCE.format("returned without"))
        self.loss = loss
        return loss

    def told(self, weights: Sequence[float]) -> dict[str, Any]:
        extra = pytree.tree_map_only(Tensor, lambda each: each.detach().cpu(), self._extras[0])
        return {**super().told(weights), "extra": extra, "loss": self.loss.detach().cpu()}


_ONCE = (
    'with outputs="last" every training_step must call the nn.Sequential once, but one {}; use outputs="all", the '
    "default"
)
