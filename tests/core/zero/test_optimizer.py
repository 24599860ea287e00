"""Stages 1 and 2 compute what plain DDP computes."""

from __future__ import annotations

import pytest

from tests.core.zero.training import OPTIMIZERS, train
from tests.ranks import run_ranks


def how_far(name: str, stage: int, accumulate: int, clip: float | None) -> float:
    """The largest relative distance of a tensor from DDP's after 20 steps."""
    wanted = train(name, 0, accumulate=accumulate, clip=clip)
    got = train(name, stage, accumulate=accumulate, clip=clip, bucket_cap_mb=1e-3)
    return max(float((got[key] - wanted[key]).norm() / wanted[key].norm()) for key in wanted)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_equal_ddps(name: str, stage: int, world_size: int) -> None:
    assert max(run_ranks(world_size, how_far, name, stage, 1, None)) < 1e-6


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_accumulation_and_clipping_equal_ddps(name: str, stage: int) -> None:
    assert max(run_ranks(3, how_far, name, stage, 3, 0.05)) < 1e-6
