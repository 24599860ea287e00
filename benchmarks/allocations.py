"""Bytes of tensors alive on the CPU, counted by the allocator itself: all of them, on whatever thread.

    allocations = Allocations()
    model = make_model()
    with allocations.section("step"):
        model(inputs).sum().backward()
    allocations["step"].peak

torch's CPU allocator keeps a table of what is alive, on every thread, while ``caffe2_report_cpu_memory_usage`` is set;
and the profiler writes down, at each allocation and deallocation, the sum of that table. So this counts what a kernel
needs for a moment, what DDP's reducer makes in C++, and what gloo's threads free. The others do not: a dispatch mode
(as torch's MemTracker) sees the results of operators only, and the profiler alone misses deallocations on threads of
gloo: it believes that FSDP2 holds more with every step. What lies in a mapped file is not allocated, nor counted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Section:
    """Bytes alive in the course of a section, of all that was allocated since the counting began."""

    before: int
    peak: int
    after: int


class Allocations:
    """Counts from when it is made; of what is in a `section`, the most that was alive at once.

    To be made in a fresh process, before there is anything: what was there already is not counted, but its end would
    be, and garbage in cycles ends at any time. The allocator's table is kept until the process ends.
    """

    def __init__(self) -> None:
        library = Path(torch.__file__).parent / "lib" / "libc10.so"
        ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage").value = True
        self._sections: dict[str, Section] = {}
        self._at_first = 0
        self._at_first = self.alive()

    def __getitem__(self, name: str) -> Section:
        return self._sections[name]

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count what is done within, under this name."""
        sums: list[int] = []
        with self._profile(sums):
            yield
        before, *during, after = (each - self._at_first for each in sums)
        self._sections[name] = Section(before, max(before, *during, after), after)

    def alive(self) -> int:
        """Bytes alive now."""
        sums: list[int] = []
        with self._profile(sums):
            pass
        return sums[0] - self._at_first

    @contextmanager
    def _profile(self, sums: list[int]) -> Iterator[None]:
        """Into ``sums``: what is alive at first, after each allocation and deallocation within, and in the end."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as events:
            torch.empty(1)  # two events, the second of them with the sum at first
            yield
            torch.empty(1)
        tree = events.profiler.kineto_results.experimental_event_tree()
        found = [(each.start_time_ns, each.extra_fields) for each in _walk(tree) if each.tag.name == "Allocation"]
        found.sort(key=lambda event: event[0])
        sums += [fields.total_allocated for _, fields in found if fields.device.type == "cpu"]
        del sums[0], sums[-2]  # those with the probes alive


def _walk(events: Iterable[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children


def held_nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind ``tensors``, each piece of memory once; of a DTensor, this rank's."""
    storages = {}
    for tensor in tensors:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
