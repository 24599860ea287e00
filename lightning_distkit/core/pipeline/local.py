"""Pipe: the layers of one process on several devices, and micro-batches that follow each other through them.

Source: Huang et al., 2019, "GPipe", https://arxiv.org/abs/1811.06965; Kim et al., 2020, "torchgpipe",
https://arxiv.org/abs/2004.09910. The interface is that of torch.distributed.pipeline.sync.Pipe, which torch removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_distkit.core.pipeline.batchnorm import convert, whole_batch
from lightning_distkit.core.pipeline.checkpoint import CHECKPOINT_MODES, InPlace, checkpointed, is_checkpointed
from lightning_distkit.core.pipeline.handle import referred
from lightning_distkit.core.pipeline.microbatch import merge, require_tensor, split, tensors_in, to_device
from lightning_distkit.core.pipeline.placement import partitioned, refuse_shared
from lightning_distkit.core.pipeline.sequential import call
from lightning_distkit.core.pipeline.skip import SkipKey, carried, skip_layout, verify_skippables

P = TypeVar("P", bound="Pipe")
Skips = dict[SkipKey, Tensor | None]


class Pipe(nn.Module):
    """Splits each batch into micro-batches and runs them through the layers of ``module``, each layer on its device.

    Consecutive layers on one accelerator are one partition, and partitions work on different micro-batches at the same
    time; on the CPU each layer is a partition. A layer is where its parameters, or else its buffers, are; one without
    either runs on the CPU unless it is wrapped in `WithDevice`. Its input is moved there. An `nn.Sequential` inside
    ``module`` is taken as its layers, unless it has hooks or a ``forward`` of its own.

    Args:
        module: each of its layers is on one device.
        chunks: number of micro-batches; a batch of fewer rows makes one of each row.
        checkpoint: which micro-batches keep no intermediate results in training, but compute them again in backward:
            "always", "except_last" or "never".
        deferred_batch_norm: whether the running statistics of BatchNorm are updated once, by those of the whole batch,
            instead of by each micro-batch.

    Attributes:
        partitions: an `nn.ModuleList`; layer ``j`` of partition ``i`` has keys ``partitions.i.j...``.
        devices: of each partition.

    Raises:
        TypeError: ``module`` is no `nn.Sequential`, or its skip connections do not match.
        ValueError: an argument is not as above, a layer is on several devices, occurs twice, or shares a parameter with
            one on another device.
    """

    def __init__(
        self, module: nn.Sequential, chunks: int = 1, checkpoint: str = "except_last", deferred_batch_norm: bool = False
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Sequential):
            raise TypeError(
                f"module must be nn.Sequential to be partitioned, got {type(module).__name__}; "
                "write its forward as a sequence of layers"
            )
        if len(list(module.children())) != len(module):
            raise ValueError("module with duplicate children is not supported; make each layer an object of its own")
        self.chunks = _positive(chunks)
        self.checkpoint = str(checkpoint)
        if self.checkpoint not in CHECKPOINT_MODES:
            raise ValueError(f"checkpoint is not one of 'always', 'except_last', or 'never', got {self.checkpoint!r}")
        verify_skippables(module)
        self._deferred = bool(deferred_batch_norm)
        self.partitions, self.devices = partitioned(convert(module) if self._deferred else module)
        refuse_shared(self.partitions, self.devices)
        self._layout = {key: way for key, way in skip_layout(self.partitions).items() if way[0] != way[1]}
        self._in_place = [InPlace(f"partition {j}") for j in range(len(self.partitions))]

    def __len__(self) -> int:
        """The number of layers."""
        return sum(len(partition) for partition in self._layers())

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self._layers():
            yield from partition

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def forward(self, *inputs: Any) -> Any:
        """Run one batch.

        Args:
            inputs: what the first layer takes, on its device: nests with at least one tensor in all. Tensors are split
                by rows, their first dimension; other values are the same for all micro-batches, and so is a tensor
                in `NoChunk`.

        Returns:
            a handle of the output, whose ``local_value()`` is on the last layer's device: an ``RRef`` if RPC is
            initialized, else a `LocalRef`. Tensors of all micro-batches are joined by rows, other values collected in
            lists.

        Raises:
            TypeError: the input, the output, or what one partition hands to the next has no tensor.
            ValueError: an input is on another device, or has another number of rows than the others.
            RuntimeError: it is wrapped in DistributedDataParallel, and checkpoint is not "never".
        """
        require_tensor(inputs, "the input of Pipe")
        if not self.devices:
            return referred(inputs[0] if len(inputs) == 1 else inputs)
        for tensor in tensors_in(inputs):
            if tensor.device != self.devices[0]:
                raise ValueError(
                    f"all inputs should be on the same device as the first partition, {self.devices[0]}, got a tensor "
                    f"on {tensor.device}; move it there"
                )
        recomputes = self.checkpoint != "never" and self.training and torch.is_grad_enabled()
        if recomputes:
            self._refuse_ddp()
        with whole_batch(self) if self._deferred and self.training else nullcontext():
            outputs = self._run(split(inputs, self.chunks), recomputes)
        return referred(merge(outputs))

    def _run(self, micro_batches: list[Any], recomputes: bool) -> list[Any]:
        """All micro-batches through all partitions; changes the list.

        Why one thread and the current streams will do. Forward: launches on CUDA are asynchronous, so this thread is
        ahead of the devices. Torch orders a copy from device to device behind all that is queued on both; so the later
        partitions come first in a cycle, and a copy is queued before the next micro-batch's work on the device that it
        comes from. Backward: autograd takes of the nodes that are ready on a device the one made last. This thread
        makes them all, cycle by cycle, so each device goes through the micro-batches in reverse and drains the pipe,
        without the dependencies between micro-batches that torchgpipe has to add because its nodes are made by several
        threads. Recomputation is part of that: it comes when a micro-batch's first node asks for what was dropped.
        """
        skips: list[Skips] = [{} for _ in micro_batches]  # under way between partitions
        for i, j in clock_cycles(len(micro_batches), len(self.devices)):
            mode = self.checkpoint if recomputes else "never"
            again = is_checkpointed(mode, i, len(micro_batches))
            micro_batches[i] = self._compute(j, to_device(micro_batches[i], self.devices[j]), skips[i], again)
            require_tensor(micro_batches[i], f"what partition {j} of {len(self.devices)} returns")
        return micro_batches

    def _compute(self, j: int, values: Any, skips: Skips, again: bool) -> Any:
        """What partition ``j`` makes of a micro-batch; skip tensors are taken from ``skips``, and put there."""
        incoming = {key: skips.pop(key) for key, (_, to) in self._layout.items() if to == j and key in skips}

        def compute(values: Any, incoming: Skips) -> tuple[Any, Skips]:
            with carried(incoming) as tracker:
                return call(self.partitions[j], values), tracker.stashed

        if again:
            values, stashed = checkpointed(
                compute,
                values,
                incoming,
                layers=self.partitions[j],
                device=self.devices[j],
                in_place=self._in_place[j],
            )
        elif j == 0:
            # Here not for a second run, but because micro-batches enter as views of one batch: who writes to one of
            # them has, for autograd, written to all.
            values, stashed = self._in_place[j].run(compute, values, incoming)
        else:
            values, stashed = compute(values, incoming)
        # At once, and straight to where they are popped: what is queued here later need not be waited for.
        skips.update({key: to_device(skip, self.devices[self._layout[key][1]]) for key, skip in stashed.items()})
        return values

    def _layers(self) -> Iterator[nn.Sequential]:
        return (partition for partition in self.partitions if isinstance(partition, nn.Sequential))

    def _refuse_ddp(self) -> None:
        """Raise if this is called by DDP and DDP reduces its gradients.

        Only DDP knows whether something is wrapped in it; and what it calls finds it as the active one.
        """
        ddp = DistributedDataParallel._get_active_ddp_module()
        if ddp is None:
            return
        reduced = {id(param) for param in ddp.parameters()}
        if any(id(param) in reduced for param in self.parameters()):
            raise RuntimeError(
                f'a Pipe inside DistributedDataParallel must have checkpoint="never", got "{self.checkpoint}"; pass '
                "that, or use DistributedPipe over a (data, pipeline) mesh, which reduces gradients itself"
            )

    # Where layers are is the pipe's business: it cannot be moved, neither by itself nor with a module that it is in.

    def cpu(self: P) -> P:
        raise _moving_denied()

    def cuda(self: P, device: Any = None) -> P:
        raise _moving_denied()

    def xpu(self: P, device: Any = None) -> P:
        raise _moving_denied()

    def mtia(self: P, device: Any = None) -> P:
        raise _moving_denied()

    def ipu(self: P, device: Any = None) -> P:
        raise _moving_denied()

    def to_empty(self: P, *, device: Any, recurse: bool = True) -> P:
        raise _moving_denied()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Cast, as in `nn.Module`; TypeError if a device is given."""
        if isinstance(args[0] if args else None, (torch.device, int, str, Tensor)):
            raise _moving_denied()
        if any(kwargs.get(name) is not None for name in ("device", "tensor", "other")):
            raise _moving_denied()
        return super().to(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for partition, device in zip(self.partitions, self.devices, strict=True):
            if any(param.device != device for param in partition.parameters()):
                raise _moving_denied()
        return result


def clock_cycles(n_micro_batches: int, n_partitions: int) -> Iterator[tuple[int, int]]:
    """(micro-batch, partition) in the order of the cycles; in each, micro-batch + partition is the cycle's number.

    With 3 micro-batches and 2 partitions: (0, 0); (0, 1), (1, 0); (1, 1), (2, 0); (2, 1).
    """
    for cycle in range(n_micro_batches + n_partitions - 1):
        for j in reversed(range(n_partitions)):
            if 0 <= cycle - j < n_micro_batches:
                yield cycle - j, j


def _positive(chunks: Any) -> int:
    try:
        number = int(chunks)
    except (TypeError, ValueError):
        number = 0
    if number <= 0 or number != float(chunks):
        raise ValueError(f"number of chunks must be positive integer, got {chunks!r}")
    return number


def _moving_denied() -> TypeError:
    return TypeError(
        "denied to move parameters and buffers, because Pipe should manage device placement; move the layers before "
        "they are wrapped in Pipe"
    )
