"""The ranks of several pipes side by side, and values over them.

Stages of one pipe have the same batch and log the same, so only the data replicas count in a mean or a sum.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.pipeline.grid import Grid
from lightning_distkit.core.pipeline.sizes import check_size, resolved_sizes

Size = int | Literal["auto"]


class RanksOfPipes(DDPStrategy):
    """A strategy whose ranks are pipes: as many as ``data_parallel_size``, of ``pipeline_parallel_size`` ranks each.

    Args:
        ddp_arguments: those of `DDPStrategy`.

    Raises:
        ValueError: a size is no number of ranks.
    """

    def __init__(self, data_parallel_size: Size, pipeline_parallel_size: Size, **ddp_arguments: Any) -> None:
        check_size("pipeline_parallel_size", pipeline_parallel_size)
        check_size("data_parallel_size", data_parallel_size)
        super().__init__(**ddp_arguments)
        self._sizes = (data_parallel_size, pipeline_parallel_size)
        self._grid: Grid | None = None  # and what is in it
        self._mesh: DeviceMesh | None = None
        self._world: dist.ProcessGroup | None = None  # that the groups below are parts of
        self._everyone: Group | None = None  # these two for messages on the CPU
        self._control: Group | None = None
        self._stages: Group | None = None

    @property
    def data_parallel_size(self) -> int:
        """The number of pipes, each of which has batches of its own."""
        return self._resolved_sizes()[0]

    @property
    def pipeline_parallel_size(self) -> int:
        """The number of ranks of a pipe."""
        return self._resolved_sizes()[1]

    def _resolved_sizes(self) -> tuple[int, int]:
        return resolved_sizes(*self._sizes, self.num_nodes * self.num_processes)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        data, pipeline = self._resolved_sizes()
        return {"num_replicas": data, "rank": self.global_rank // pipeline}

    def setup_environment(self) -> None:
        sizes = self._resolved_sizes()
        super().setup_environment()
        if self._world is dist.group.WORLD:  # a second fit
            return
        self._world = dist.group.WORLD
        self._grid = Grid.of(sizes, self.root_device, self._timeout)
        self._mesh, self._everyone = self._grid.mesh, self._grid.everyone
        self._stages, self._control = self._grid.stages, self._grid.control

    @property
    def _data_group(self) -> dist.ProcessGroup:
        assert self._mesh is not None
        group: dist.ProcessGroup = self._mesh.get_group("data")
        return group

    # Values over ranks

    def over_stages(self, value: Any) -> list[Any]:
        """What every rank of this pipe gave, in their order: the same on each. Collective."""
        assert self._control is not None
        return self._control.everyones(value, torch.device("cpu"))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if group is None and self._mesh is not None:
            if self.data_parallel_size == 1:
                return tensor
            group = self._data_group
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._mesh is None or group not in (None, dist.group.WORLD):  # which LightningModule names by default
            return super().all_gather(tensor, group, sync_grads)
        if sync_grads:
            return super().all_gather(tensor, self._data_group, sync_grads)
        gathered = [torch.empty_like(tensor) for _ in range(self.data_parallel_size)]
        dist.all_gather(gathered, tensor.detach().contiguous(), group=self._data_group)
        return torch.stack(gathered)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        if self._everyone is None:
            return decision
        total = torch.tensor(int(decision))
        self._everyone.all_reduce(total).wait()
        return bool(total == self._everyone.world_size) if all else bool(total)
