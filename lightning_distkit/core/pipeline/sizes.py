"""How many pipes, and how many ranks each has."""

from __future__ import annotations

from typing import Any


def check_size(name: str, size: object) -> None:
    """Raise a ValueError if it is no number of ranks, nor "auto"."""
    if size != "auto" and not (isinstance(size, int) and not isinstance(size, bool) and size > 0):
        raise ValueError(f'{name} must be a whole number of at least 1, or "auto", got {size!r}')


def resolved_sizes(data: Any, pipeline: Any, world_size: int) -> tuple[int, int]:
    """The number of pipes, and of ranks of each. By default one pipe of all ranks.

    Raises:
        ValueError: there are not as many ranks as that.
    """
    given = (data, pipeline)
    if pipeline == "auto":
        pipeline = world_size // data if data != "auto" else world_size
    if data == "auto":
        data = world_size // pipeline
    if data * pipeline != world_size:
        raise ValueError(
            f"data_parallel_size times pipeline_parallel_size must be the number of processes, {world_size}, got "
            f"{given[0]} and {given[1]}"
        )
    return data, pipeline
