"""What is not sharded is a replica of rank 0's: all at the start, and buffers before each forward, as with DDP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_distkit.core.collectives import Group


@torch.no_grad()
def sync_module_states(module: nn.Module, group: Group) -> None:
    """Give every rank rank 0's parameters and buffers. Collective."""
    for tensor in (*module.parameters(), *module.buffers()):
        whole = tensor.contiguous()
        group.broadcast_(whole).wait()
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)


@torch.no_grad()
def sync_buffers(module: nn.Module, group: Group) -> None:
    """Give every rank rank 0's buffers; those of one dtype and device travel together.

    Collective. DDP does it before every forward; what the last one has changed stays each rank's own until the next.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in module.buffers():
        if buffer.numel():
            alike.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    if group.world_size == 1:
        return
    for buffers in alike.values():
        packed = torch.cat([buffer.reshape(-1) for buffer in buffers])
        group.broadcast_(packed).wait()
        if group.rank != 0:
            for buffer, values in zip(buffers, packed.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(values.view_as(buffer))
