"""One training step as one step for each micro-batch, so that backwards begin before all forwards are done.

The user's ``training_step`` runs on the last stage, once for each micro-batch, when the pipe's output for it is there.
On the first stage it runs up to where it calls the pipe, and is left there. The other stages do not run it. All
gradients are made within, set aside, and added to ``.grad`` when the Trainer calls the loss's backward: by then it has
zeroed the old ones. What was logged is averaged over the micro-batches by their weights, and logged once on every rank.
"""

from __future__ import annotations

import inspect
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.pipeline import parking
from lightning_distkit.core.pipeline.microbatch import merge, split
from lightning_distkit.core.pipeline.shared_batch import random_state, set_random_state
from lightning_distkit.core.pipeline.told import told
from lightning_distkit.core.pipeline.within import PipeWithin

_CPU = torch.device("cpu")


class MicroSteps:
    """Runs the training steps of ``module``.

    Args:
        stages: the pipe's ranks.
        control: the same, for messages on the CPU.
        device: this rank's.
    """

    def __init__(
        self, module: LightningModule, part: PipeWithin, stages: Group, control: Group, device: torch.device
    ) -> None:
        self._module = module
        self._part = part
        self._stages = stages
        self._control = control
        self._device = device

    def run(self, args: Sequence[Any], scale: float) -> Any:
        """What the whole batch's ``training_step`` returns: the loss, or a mapping with it; the same on every rank.

        Args:
            args: of the ``training_step``; the first one is the batch.
            scale: by which gradients are multiplied on their way: for fp16.

        Raises:
            ValueError: a step that does not call the pipe once, or does not return a loss.
            StageError: on every rank, what was raised on one of them.
        """
        pipe, outside = self._part.pipe, self._part.outside()
        batches = [each[0] for each in split((args[0],), pipe.chunks)]
        weights = [self._weight(each) for each in batches]
        streams = Streams(len(batches), self._device)
        steps = Steps(self._module, self._part, [(each, *args[1:]) for each in batches], streams)
        inputs = self._inputs(steps)
        own = [*pipe.parameters(), *outside]
        with parking.set_aside(own) as made, pipe.no_sync():
            loss = pipe.micro_batch_loss(inputs, loss=steps.finish, weights=weights, scale=scale)
            if loss.requires_grad:
                loss.backward(torch.full_like(loss, scale))  # so all of them stay scaled until they are due
        self._sum_over_stages(made, outside)
        streams.end()
        word = self._told(steps, weights)
        self._take(word, steps)
        anchor = torch.empty(0, requires_grad=True)
        due: Tensor = Due.apply(loss.detach(), anchor, self._part, made, scale)  # type: ignore[no-untyped-call]
        if word["extra"] is None:
            return due
        return {**pytree.tree_map_only(Tensor, lambda each: each.to(self._device), word["extra"]), "loss": due}

    def _take(self, word: dict[str, Any], steps: Steps) -> None:
        """Have metrics and logged values as the last stage has them."""
        steps.take_metrics(word["metrics"], self._device)
        for name, value, arguments in word["logs"]:
            self._module.log(name, steps.loggable(value, self._device), **arguments)

    def _told(self, steps: Steps, weights: Sequence[float], error: Exception | None = None) -> dict[str, Any]:
        """What the last stage tells all.

        Args:
            error: what was raised there, if anything was; it is raised on all.
        """
        word: Any = f"{type(error).__name__} on the last stage: {error}" if error is not None else None
        if self._part.pipe.is_last and error is None:
            try:
                word = steps.told(weights)
                pickle.dumps(word)
            except Exception as raised:
                error, word = raised, f"{type(raised).__name__} in what the last stage logged or returned: {raised}"
        word = told(word, self._control, source=self._stages.world_size - 1)
        if isinstance(word, str):
            raise error or RuntimeError(word)
        of_last: dict[str, Any] = word
        return of_last

    def _weight(self, batch: Any) -> float:
        """What a micro-batch counts in the mean: its rows, or what the module says."""
        if callable(weigh := getattr(self._module, "micro_batch_weight", None)):
            return float(weigh(batch))
        return float(
            next(leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
        )

    def _inputs(self, steps: Steps) -> list[Any]:
        """Of each micro-batch what the pipe is called with; elsewhere than on the first stage what stands for it."""
        pipe = self._part.pipe
        found: list[Any] = []
        word: Any = None
        error: Exception | None = None
        if pipe.is_first:
            try:
                found = [steps.begin(i) for i in range(len(steps))]
                word = [
                    [(leaf.shape, leaf.dtype) for leaf in pytree.tree_leaves(each) if _wants_grad(leaf)]
                    for each in found
                ]
            except Exception as raised:
                error, word = raised, f"{type(raised).__name__} on the first stage: {raised}"
        word = told(word, self._control, source=0)
        if isinstance(word, str):
            raise error or RuntimeError(word)
        if pipe.is_first:
            return found
        return [
            (tuple(_stand_in(shape, dtype, self._device) for shape, dtype in its) or (torch.zeros(1),), {})  # ignored
            for its in word
        ]

    def _sum_over_stages(self, made: dict[Any, Tensor], outside: Sequence[Any]) -> None:
        """Each stage has made a part of the gradients around the pipe: the first before it, the last behind it."""
        if self._stages.world_size == 1 or not outside:
            return
        used = self._control.everyones([parameter in made for parameter in outside], _CPU)
        for n, parameter in enumerate(outside):
            if any(each[n] for each in used):
                grad = made.get(parameter)
                made[parameter] = torch.zeros_like(parameter) if grad is None else grad.contiguous()
                self._stages.all_reduce(made[parameter]).wait()


class Due(torch.autograd.Function):
    """The loss; its backward adds the gradients that are due, times what comes to it."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, anchor: Tensor, part: PipeWithin, made: dict[Any, Tensor], scale: float
    ) -> Tensor:
        ctx.part, ctx.made, ctx.scale = part, made, scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        made, ctx.made = ctx.made, {}
        factor = float(grad) / ctx.scale
        if factor != 1:
            for each in made.values():
                each.mul_(factor)
        parking.add(made)
        ctx.part.average_when_done()
        return None, None, None, None, None


class _AtThePipe(BaseException):  # no `except Exception` of a step is to stop it
    def __init__(self, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.inputs = (args, kwargs)


class Steps:
    """The steps of one batch's micro-batches.

    Args:
        args: of each step.
    """

    AtThePipe = _AtThePipe

    def __init__(self, module: LightningModule, part: PipeWithin, args: Sequence[Any], streams: Streams) -> None:
        self._module = module
        self._part = part
        self._args = args
        self._streams = streams
        self._logs: list[list[tuple[str, Any, dict[str, Any]]]] = []  # of each micro-batch
        self._extras: list[Any] = []
        self._metrics = {
            path: each for path, each in module.named_modules() if isinstance(each, (Metric, MetricCollection))
        }
        self._counts = {path: _count(each) for path, each in self._metrics.items() if isinstance(each, Metric)}

    def __len__(self) -> int:
        return len(self._args)

    def begin(self, i: int) -> Any:
        """Run a step up to the pipe, on the first stage: with what it is called."""

        def leave(*args: Any, **kwargs: Any) -> Any:
            raise _AtThePipe(args, kwargs)

        with self._streams.of(i), self._instead_of_the_pipe(leave), self._logging_to([]):
            try:
                self._module.training_step(*self._args[i])
            except _AtThePipe as reached:
                return reached.inputs
        raise ValueError(
            'with schedule="1f1b" every training_step must call the nn.Sequential once, but one returned without; use '
            'schedule="gpipe"'
        )

    def finish(self, i: int, output: Any) -> Tensor:
        """Run a step with the pipe's output, on the last stage: its loss."""
        n_calls = 0

        def answer(*args: Any, **kwargs: Any) -> Any:
            nonlocal n_calls
            n_calls += 1
            if n_calls > 1:
                raise ValueError(
                    'with schedule="1f1b" every training_step must call the nn.Sequential once, but one called it '
                    'again; use schedule="gpipe"'
                )
            return output

        return self._run_to_its_end(i, answer)

    def _run_to_its_end(self, i: int, answer: Callable[..., Any]) -> Tensor:
        """The loss of a step, in which ``answer`` is called in the place of the pipe."""
        logs: list[Any] = []
        with self._streams.of(i), self._instead_of_the_pipe(answer), self._logging_to(logs):
            returned = self._module.training_step(*self._args[i])
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"every training_step must return its loss, or a mapping with it, got {type(returned).__name__}"
            )
        self._logs.append(logs)
        self._extras.append(
            {key: value for key, value in returned.items() if key != "loss"} if isinstance(returned, Mapping) else None
        )
        return loss

    @contextmanager
    def _instead_of_the_pipe(self, answer: Callable[..., Any]) -> Iterator[None]:
        self._part.entrance.instead = answer
        try:
            yield
        finally:
            self._part.entrance.instead = None

    @contextmanager
    def _logging_to(self, logs: list[Any]) -> Iterator[None]:
        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            logs.append((name, value, {**dict(zip(_LOG_ARGUMENTS, args, strict=False)), **kwargs}))

        vars(self._module)["log"] = log
        try:
            yield
        finally:
            del vars(self._module)["log"]

    # What the last stage tells the others

    def told(self, weights: Sequence[float]) -> dict[str, Any]:
        """What was logged, by all micro-batches together; the metrics that were updated; what else was returned."""
        names = {id(each): path for path, each in self._metrics.items()}
        by_name: dict[str, list[tuple[float, Any, dict[str, Any]]]] = {}
        for weight, logs in zip(weights, self._logs, strict=True):
            for name, value, arguments in logs:
                by_name.setdefault(name, []).append((weight, value, arguments))
        logs = []
        for name, its in by_name.items():
            value, arguments = its[-1][1], dict(its[-1][2])
            if id(value) in names:
                logs.append((name, _OfMetric(names[id(value)]), arguments))
                continue
            if arguments.get("batch_size") is not None:
                arguments["batch_size"] = sum(each[2]["batch_size"] for each in its)
            logs.append((name, _together(its, arguments.get("reduce_fx", "mean")), arguments))
        has_extra = self._extras[0] is not None
        return {
            "logs": logs,
            "metrics": {
                path: _state(each)
                for path, each in self._metrics.items()
                if isinstance(each, Metric) and _count(each) != self._counts[path]
            },
            "extra": pytree.tree_map_only(Tensor, lambda each: each.detach().cpu(), merge(self._extras))
            if has_extra
            else None,
        }

    def take_metrics(self, states: dict[str, dict[str, Any]], device: torch.device) -> None:
        """Put metrics where the last stage's are."""
        if self._part.pipe.is_last:
            return
        for path, state in states.items():
            metric: Any = self._metrics[path]
            for key, value in state.items():
                object.__setattr__(metric, key, pytree.tree_map_only(Tensor, lambda each: each.to(device), value))

    def loggable(self, value: Any, device: torch.device) -> Any:
        if isinstance(value, _OfMetric):
            return self._metrics[value.path]
        return pytree.tree_map_only(Tensor, lambda each: each.to(device), value)


class _OfMetric:
    """Stands for a metric that was logged as such."""

    def __init__(self, path: str) -> None:
        self.path = path


_LOG_ARGUMENTS = list(inspect.signature(LightningModule.log).parameters)[3:]  # behind self, name and value


def _together(its: Sequence[tuple[float, Any, dict[str, Any]]], reduce_fx: Any) -> Any:
    """Of values that several micro-batches logged under one name, that of the batch."""
    if isinstance(its[0][1], Mapping):
        return {key: _together([(w, v[key], a) for w, v, a in its], reduce_fx) for key in its[0][1]}
    values = torch.stack([torch.as_tensor(value).detach().cpu().to(torch.float64) for _, value, _ in its])
    how = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    if how in ("min", "amin"):
        total = values.amin(0)
    elif how in ("max", "amax"):
        total = values.amax(0)
    elif how == "sum":
        total = values.sum(0)
    else:
        weights = torch.tensor([weight for weight, _, _ in its], dtype=torch.float64)
        counted = weights > 0 if bool((weights > 0).any()) else torch.ones_like(weights, dtype=torch.bool)
        weights, values = weights[counted], values[counted]  # a mean over nothing is NaN
        total = (values * weights.view(-1, *[1] * (values.dim() - 1))).sum(0) / weights.sum()
    return total.to(torch.get_default_dtype())


def _count(metric: Metric) -> int:
    return int(metric._update_count)


def _state(metric: Metric) -> dict[str, Any]:
    state = {name: getattr(metric, name) for name in metric._defaults}
    state |= {"_update_count": metric._update_count, "_computed": None, "_forward_cache": metric._forward_cache}
    return pytree.tree_map_only(Tensor, lambda each: each.detach().cpu(), state)  # type: ignore[no-any-return]


def _wants_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _stand_in(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Takes a gradient of that shape, and no memory."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()


class Streams:
    """Random numbers of each micro-batch's step: the same on every stage, whatever else a stage runs of it."""

    def __init__(self, n: int, device: torch.device) -> None:
        self._device = device
        self._seeds = torch.empty(n, dtype=torch.int64).random_(2**31).tolist()
        self._after = random_state(device)
        self._generators = [torch.default_generator]
        if device.type not in ("cpu", "meta"):
            self._generators.append(torch.get_device_module(device).default_generators[device.index or 0])

    @contextmanager
    def of(self, i: int) -> Iterator[None]:
        before = random_state(self._device)
        # Not torch.manual_seed: that notes down, for every type of device, from where it was called; each time.
        for generator in self._generators:
            generator.manual_seed(self._seeds[i])
        random.seed(self._seeds[i])
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(self._seeds[i])
        try:
            yield
        finally:
            set_random_state(before, self._device)

    def end(self) -> None:
        """All stages go on alike."""
        set_random_state(self._after, self._device)
