"""The ranks as pipes side by side, the groups in which they talk, and a module that is given to them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.pipeline.dist import DistributedPipe
from lightning_distkit.core.pipeline.partition import resolve_balance
from lightning_distkit.core.pipeline.starting_values import even_out, is_whole
from lightning_distkit.core.pipeline.within import PipeWithin


@dataclass
class Grid:
    """Ranks in rows: each row is a pipe, and ranks one above the other have the same stages."""

    mesh: DeviceMesh | None  # None in a world of one that has no process group
    everyone: Group  # all ranks, for messages on the CPU
    stages: Group  # this rank's pipe
    control: Group  # the same, for messages on the CPU
    data: Group  # the ranks with this one's stages

    @classmethod
    def of(cls, sizes: tuple[int, int], device: torch.device, timeout: timedelta | None = None) -> Grid:
        """Make it of all ranks. Collective.

        Args:
            sizes: the number of pipes, and of ranks of each.
        """
        if not dist.is_initialized():
            return cls(None, Group(), Group(), Group(), Group())
        # Not by init_device_mesh: its groups have torch's timeout, whatever is asked for here.
        timeout = timeout or default_pg_timeout
        numbers = torch.arange(dist.get_world_size()).view(sizes)
        pipeline, _ = dist.new_subgroups_by_enumeration(numbers.tolist(), timeout)
        above, _ = dist.new_subgroups_by_enumeration(numbers.T.tolist(), timeout)
        mesh = DeviceMesh.from_group([above, pipeline], device.type, numbers, mesh_dim_names=("data", "pipeline"))
        stages, data = Group(pipeline), Group(above)
        if dist.get_backend() == "gloo":
            return cls(mesh, Group(dist.group.WORLD), stages, stages, data)
        everyone = Group(dist.new_group(backend="gloo", timeout=timeout))
        ranks = dist.get_process_group_ranks(pipeline)
        twin = dist.new_group(ranks, backend="gloo", timeout=timeout, use_local_synchronization=True)
        return cls(mesh, everyone, stages, Group(twin), data)

    def put_pipe_into(
        self, module: nn.Module, path: str, balance: Any, device: torch.device, **arguments: Any
    ) -> PipeWithin:
        """Make the `nn.Sequential` at ``path`` a pipe, and the values of ``module`` the same on all ranks. Collective.

        Args:
            module: of the same form on every rank, on the CPU or on meta.
            balance, device, arguments: of the `DistributedPipe`.

        Raises:
            ValueError, TypeError: as `DistributedPipe`, `even_out` and `PipeWithin` do.
        """
        sequential = module.get_submodule(path)
        assert isinstance(sequential, nn.Sequential)
        n_ranks = self.stages.world_size
        own: list[str] = []
        if not is_whole(module):  # then layers go to where they will be
            n_stages = n_ranks * int(arguments.get("n_stages_per_rank", 1))
            balance = resolve_balance("size" if isinstance(balance, str) else balance, sequential, n_stages)
            stage_of = [stage for stage, count in enumerate(balance) for _ in range(count)]
            names = zip(sequential._modules, stage_of, strict=True)
            own = [name for name, stage in names if stage % n_ranks == self.stages.rank]
        even_out(module, sequential, own, self.everyone)
        part = PipeWithin(
            module,
            path,
            lambda found: DistributedPipe(found, balance=balance, mesh=self.mesh, device=device, **arguments),
        )
        part.pipe.also_average(part.outside())
        return part
