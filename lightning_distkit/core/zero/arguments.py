"""What belongs to which stage: one check for all that take a stage, so that they say the same."""

from __future__ import annotations

from typing import Any


def check_stage(
    stage: object,
    *,
    bucket_cap_mb: object,
    policy: object,
    mixed_precision: object,
    reshard_after_forward: object,
    without: str,
) -> None:
    """Raise a ValueError, if a stage is none, or an argument of another one is given.

    Args:
        bucket_cap_mb: of stages 1 and 2; None for the default.
        policy, mixed_precision, reshard_after_forward: of stage 3; "auto", None and None for the defaults.
        without: what to write to have no stage at all.
    """
    if not isinstance(stage, int) or isinstance(stage, bool) or stage not in (1, 2, 3):
        raise ValueError(f"stage must be 1, 2 or 3, got {stage!r}; plain data parallelism is {without}")
    is_number = isinstance(bucket_cap_mb, int | float) and not isinstance(bucket_cap_mb, bool)
    if bucket_cap_mb is not None and not (is_number and bucket_cap_mb > 0):  # type: ignore[operator]
        raise ValueError(f"bucket_cap_mb must be above 0, got {bucket_cap_mb!r}")
    of_stage_3: dict[str, Any] = {
        "mixed_precision": mixed_precision,
        "reshard_after_forward": reshard_after_forward,
        "policy": None if policy == "auto" else policy,
    }
    for name, value in of_stage_3.items() if stage < 3 else {"bucket_cap_mb": bucket_cap_mb}.items():
        if value is not None:
            raise ValueError(f"{name} says nothing in stage {stage}; leave it out")
