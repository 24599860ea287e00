"""The user's model, found by a path, as something that makes a step."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


@dataclass(frozen=True)
class Subject:
    """A module whose call, without arguments, is the loss of a step."""

    module: nn.Module

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self._trained())

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._trained())

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]


class Step(nn.Module):
    """A module and how to get a loss from it."""

    loss: Callable[[nn.Module], Tensor]

    def __init__(self, module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.loss = loss

    def forward(self) -> Tensor:
        return self.loss(self.module)


def load_subject(model: str, batch: str | None, device: torch.device) -> Subject:
    """What is at these paths, as `lightning_distkit.cli.advise.advise` explains; an error ends the program."""
    torch.manual_seed(0)  # the same weights on every rank
    try:
        made: Any = _found(model)()
    except TypeError as error:
        sys.exit(f"{model} must be callable without arguments: {error}")
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(1 + rank)  # another batch on each
    inputs = _found(batch)() if batch else None
    loss: Callable[[Any], Tensor]
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
        module, loss = made
    elif isinstance(made, nn.Module) and hasattr(made, "training_step"):
        module = made
        inputs = _on(device, inputs if batch else _batch_of(made, rank))
        loss = lambda module: _loss(module.training_step(inputs, 0))  # noqa: E731
    elif isinstance(made, nn.Module) and batch:
        module = made
        arguments = _on(device, inputs if isinstance(inputs, tuple | list) else (inputs,))
        loss = lambda module: _mean_square(module(*arguments))  # noqa: E731
    else:
        sys.exit(
            f"{model} must return a LightningModule with train_dataloader(), an nn.Module (then --batch must say where "
            f"its inputs come from), or a tuple of an nn.Module and a function that returns its loss; got {made!r:.200}"
        )
    subject = Subject(Step(module.to(device), loss))
    if subject.numel == 0:
        sys.exit(f"{model} must have parameters to be trained, but all are frozen, or there are none")
    return subject


def _batch_of(module: Any, rank: int) -> Any:
    """Another one for each rank, as far as they go."""
    try:
        batches = list(islice(iter(module.train_dataloader()), rank + 1))
    except Exception as error:  # Lightning's for a missing hook is of a class of its own
        sys.exit(f"the model needs a train_dataloader(), or --batch must say where a batch comes from: {error!r:.300}")
    return batches[-1]


def _on(device: torch.device, batch: Any) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def _found(path: str) -> Any:
    """The callable at "package.module:name" or "file.py:name"."""
    where, colon, name = path.rpartition(":")
    if not colon:
        where, _, name = path.rpartition(".")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, str(Path.cwd()))
            module = importlib.import_module(where)
        found = getattr(module, name)
    except (ImportError, AttributeError, FileNotFoundError, ValueError) as error:
        sys.exit(f'{path!r} must be "package.module:name" or "file.py:name" of a callable: {error}')
    if not callable(found):
        sys.exit(f"{path!r} must be a callable without arguments, got {found!r:.200}")
    return found


def _loss(output: Any) -> Tensor:
    loss = output["loss"] if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        sys.exit(f"training_step must return the loss, got {output!r:.200}")
    return loss


def _mean_square(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.float().square().mean()
    values = output.values() if isinstance(output, dict) else output
    return torch.stack([_mean_square(value) for value in values if isinstance(value, Tensor)]).sum()
