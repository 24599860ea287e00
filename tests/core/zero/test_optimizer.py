"""Stages 1 and 2 compute what plain DDP computes."""

from __future__ import annotations

import pytest

from tests.core.zero.training import OPTIMIZERS, train
from tests.ranks import run_ranks


def how_far(name: str, accumulate: int, clip: float | None) -> list[float]:
    """At stages 1 and 2, the largest relative distance of a tensor from DDP's after 20 steps."""
    wanted = train(name, 0, accumulate=accumulate, clip=clip)
    distances = []
    for stage in (1, 2):
        got = train(name, stage, accumulate=accumulate, clip=clip, bucket_cap_mb=1e-3)
        distances.append(max(float((got[key] - wanted[key]).norm() / wanted[key].norm()) for key in wanted))
    return distances


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_equal_ddps(name: str, world_size: int) -> None:
    for first, second in run_ranks(world_size, how_far, name, 1, None):
        assert first < 1e-6
        assert second < 1e-6


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_accumulation_and_clipping_equal_ddps(name: str) -> None:
    for first, second in run_ranks(3, how_far, name, 3, 0.05):
        assert first < 1e-6
        assert second < 1e-6
