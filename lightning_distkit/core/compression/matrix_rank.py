"""``matrix_approximation_rank``: one number, or one for each step, or for each parameter one of these.

4                                    everywhere, always
{0: 1, 2000: 2, 8000: 4}             1 from the first iteration on, 2 from iteration 2000 on, ...
{"*embed*": 0, "*": 4}               by the parameters' names, first match; 0: travels whole
{"head.*": {0: 2, 500: 8}, "*": 1}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import cast

Schedule = int | Mapping[int, int]
MatrixRank = Schedule | Mapping[str, Schedule]

_ADVICE = "start with 1 and double it"


def check(rank: object, names: Iterable[str] = ()) -> None:
    """Raise a ValueError that says what is wrong, if anything is.

    Args:
        names: of the parameters about which it must say something.
    """
    if not isinstance(rank, Mapping):
        _check_number(rank, 1)
    elif not rank:
        raise ValueError(f"matrix_approximation_rank must not be empty, got {rank!r}; {_ADVICE}")
    elif is_by_name(rank):
        for name, schedule in rank.items():
            if not isinstance(name, str):
                raise ValueError(
                    f"matrix_approximation_rank must have names or iterations as keys, not both, got {rank!r}"
                )
            if isinstance(schedule, Mapping):
                _check_schedule(schedule)
            else:
                _check_number(schedule, 0)
        known = list(names)
        for pattern in rank if known else ():
            if not any(fnmatchcase(name, pattern) for name in known):
                raise ValueError(f"matrix_approximation_rank has the pattern {pattern!r}, which matches no parameter")
        for name in known:
            matrix_rank(cast(MatrixRank, rank), name, 0)
    else:
        _check_schedule(rank)


def is_by_name(rank: object) -> bool:
    """Whether it depends on the parameters' names."""
    return isinstance(rank, Mapping) and any(isinstance(key, str) for key in rank)


def matrix_rank(rank: MatrixRank, name: str | None, iteration: int) -> int:
    """That of the parameter with this name in this iteration; 0 if its gradient is to travel whole.

    Raises:
        ValueError: it depends on names, and there is none, or no pattern matches it.
    """
    if isinstance(rank, int):
        return rank
    if not is_by_name(rank):
        schedule = cast(Mapping[int, int], rank)
        return schedule[max(begin for begin in schedule if begin <= iteration)]
    if name is None:
        raise ValueError(
            f"matrix_approximation_rank={rank!r} needs the parameters' names: attach the hook with "
            "lightning_distkit.core.compression.attach, not with register_comm_hook"
        )
    for pattern, of_pattern in cast(Mapping[str, Schedule], rank).items():
        if fnmatchcase(name, pattern):
            return matrix_rank(of_pattern, name, iteration)
    raise ValueError(
        f"matrix_approximation_rank must say something about every parameter, but no pattern of {list(rank)} matches "
        f'{name!r}; end with "*"'
    )


def _check_schedule(schedule: Mapping[object, object]) -> None:
    for begin, number in schedule.items():
        if not isinstance(begin, int) or isinstance(begin, bool) or begin < 0:
            raise ValueError(
                f"matrix_approximation_rank must have iterations as keys, from 0 on, got {begin!r} in {schedule!r}"
            )
        _check_number(number, 0)
    if 0 not in schedule:
        raise ValueError(f"matrix_approximation_rank must say what holds from iteration 0 on, got {schedule!r}")


def _check_number(number: object, least: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise ValueError(
            f"matrix_approximation_rank must be a whole number of at least {least}, got {number!r}; {_ADVICE}"
        )
