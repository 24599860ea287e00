"""What is kept with a module of sharded parameters: who shares it, and which of its modules are blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.zero.holders import WithoutDDP
from lightning_distkit.core.zero.unused import Unused

ATTRIBUTE = "_zero_sharding"


@dataclass
class Sharding:
    """How a module is sharded."""

    group: Group
    blocks: dict[str, nn.Module]  # without the root; their order is that of the forward, as far as one can see
    unused: Unused | None  # None if all ranks use the same parameters
    without_ddp: WithoutDDP


def sharding_of(module: nn.Module) -> Sharding | None:
    """What `shard_parameters` has kept with ``module``; None if it has not sharded it."""
    sharding: Sharding | None = module.__dict__.get(ATTRIBUTE)
    return sharding
