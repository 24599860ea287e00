"""Which backward is running, and whose parameters it has come to: for optimizers that share one."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch.autograd import Variable

from lightning_distkit.core.collectives import Group


class Reducer(Protocol):
    """What wants to know when a backward that came to its parameters has ended."""

    def end_of_backward(self) -> None: ...


class Backwards:
    """The backwards of this process, as the reducers of one process group see them.

    Several optimizers may share a backward. In which order it comes to their parameters may differ from rank to rank,
    so only the first of them reduces while it runs; the others do so at its end, in the order in which they were made.
    """

    _of_group: ClassVar[weakref.WeakKeyDictionary[Any, Backwards]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.reducers: list[Reducer] = []
        self._touched: set[Reducer] = set()
        self._running: set[int] = set()

    @classmethod
    def of(cls, group: Group) -> Backwards:
        if group.process_group is None:
            return cls()
        return cls._of_group.setdefault(group.process_group, cls())

    def came_to(self, reducer: Reducer) -> bool:
        """Say that the one that is running has; returns whether ``reducer`` may reduce at once."""
        backward = torch._C._current_graph_task_id()
        if backward not in self._running:
            self._running.add(backward)
            Variable._execution_engine.queue_callback(partial(self._end, backward))
        self._touched.add(reducer)
        return reducer is self.reducers[0]

    def none_runs(self) -> None:
        """Forget those that an error has ended."""
        self._running.clear()
        self._touched.clear()

    def _end(self, backward: int) -> None:
        self._running.discard(backward)
        if self._running:  # this one ran inside another: reentrant checkpointing
            return
        touched = [reducer for reducer in self.reducers if reducer in self._touched]
        self._touched.clear()
        for reducer in touched:
            reducer.end_of_backward()
