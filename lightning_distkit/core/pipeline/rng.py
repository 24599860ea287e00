"""Each stage draws random numbers of its own, and all ranks' global generators stay alike.

A call draws one number from the CPU's global generator, or from `DistributedPipe.numbers` where that is set, as every
rank does; the rank's own stream begins from that and from which rank it is. So two stages never draw the same dropout
masks, what is replicated outside the pipe goes on alike on all ranks, and whoever saves and restores that generator has
the stages' numbers again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_distkit.core.pipeline.checkpoint import RngState


def draw(generator: torch.Generator | None = None) -> int:
    """One number; by default from the global generator of the CPU."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


@contextmanager
def own_stream(number: int, who: tuple[int, ...], device: torch.device) -> Iterator[None]:
    """Within this, random numbers of the CPU and ``device`` are those of ``who``; afterwards as if none were drawn."""
    before = RngState(device)
    seed = random.Random(repr((number, who))).getrandbits(63)
    torch.default_generator.manual_seed(seed)
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).manual_seed(seed)
    try:
        yield
    finally:
        before.restore()
