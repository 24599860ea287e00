"""All the ranks that a launcher started, for as long as a command needs them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.nn.functional


@contextmanager
def world(device: torch.device) -> Iterator[None]:
    """The default process group from torchrun's environment: nccl for CUDA, else gloo.

    At its end the group is not only forgotten but destroyed, its threads joined. A gloo thread lets go of a
    collective's tensor after the rank that waited has gone on; if that has meanwhile come to the interpreter's end,
    the process is aborted ("terminate called without an active exception").
    """
    # torch.distributed.nn.functional, which the first DistributedDataParallel imports, has the world of the time of
    # its import as the default of arguments, and so would keep this one alive for ever.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        gc.collect()  # a wrapped module is part of a cycle, and holds the group
        dist.destroy_process_group()
