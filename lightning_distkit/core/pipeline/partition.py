"""Which layers make which stage: consecutive ones, so that the stage that costs most costs as little as it can."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from lightning_distkit.core.pipeline.layer_costs import PARAMETER_COPIES, layer_nbytes, layer_seconds

BALANCES = ("auto", "size", "time")


def resolve_balance(
    balance: str | Sequence[int], module: nn.Sequential, n_stages: int, sample: Any = None
) -> list[int]:
    """The number of layers of each stage.

    The same on every rank that gives the same arguments, except by time: that is measured, and one rank must tell the
    others.

    Args:
        balance: the numbers themselves; "size" and "time", see `balance_by_size` and `balance_by_time`; or "auto": by
            time if there is a sample and the module is not on the meta device, else by size.
        sample: the inputs of a micro-batch, a tuple for several.

    Raises:
        TypeError: a module that is no `nn.Sequential`.
        ValueError: fewer layers than stages, or a balance that is none.
    """
    _check(module, n_stages)
    if not isinstance(balance, str):
        return _as_given(balance, len(module), n_stages)
    if balance not in BALANCES:
        names = ", ".join(map(repr, BALANCES))
        raise ValueError(f"balance must be {names} or a list of numbers of layers, got {balance!r}")
    on_meta = any(each.is_meta for each in (*module.parameters(), *module.buffers()))
    if balance == "time" or (balance == "auto" and sample is not None and not on_meta):
        return balance_by_time(module, n_stages, sample)
    return balance_by_size(module, n_stages, sample)


def balance_by_size(
    module: nn.Sequential, n_stages: int, sample: Any = None, parameter_copies: float = PARAMETER_COPIES
) -> list[int]:
    """The number of layers of each stage, so that the most bytes of a stage are the fewest: see `layer_nbytes`.

    Without a sample those of parameters and buffers alone.

    Raises:
        TypeError: a module that is no `nn.Sequential`.
        ValueError: fewer layers than stages.
        RuntimeError: a layer does not run on what the sample gives.
    """
    _check(module, n_stages)
    return cut(layer_nbytes(module, sample, parameter_copies), n_stages)


def balance_by_time(module: nn.Sequential, n_stages: int, sample: Any, n_times: int = 5) -> list[int]:
    """The number of layers of each stage, so that the slowest stage is the fastest: see `layer_seconds`.

    Raises:
        TypeError: a module that is no `nn.Sequential`.
        ValueError: fewer layers than stages, no sample, or a module on the meta device.
        RuntimeError: a layer does not run on what the sample gives.
    """
    _check(module, n_stages)
    if sample is None:
        raise ValueError(
            "to balance by time, sample= must be the inputs of a micro-batch, got None; or balance by size"
        )
    return cut(layer_seconds(module, sample, n_times), n_stages)


def cut(costs: Sequence[float], n_stages: int) -> list[int]:
    """How many neighbours to put together for each stage, at least one.

    The largest sum is the smallest that there can be; then the sums are as even as they can be, by their squares; then
    the numbers of layers; then front stages have more. So there is one answer.

    Args:
        costs: of each layer, not below 0.
        n_stages: at most as many as layers.
    """
    n = len(costs)
    until = [0, *accumulate(costs)]
    most = _least_largest(until, n_stages)
    # best[end] = what the stages so far cost that have the first `end` layers, and where the last of them begins
    Cost = tuple[float, int]
    best: dict[int, tuple[Cost, int]] = {0: ((0.0, 0), 0)}
    begins: list[dict[int, int]] = []
    for stage in range(n_stages):
        after: dict[int, tuple[Cost, int]] = {}
        for begin, ((squares, squared_counts), _) in best.items():
            for end in range(begin + 1, n - (n_stages - stage - 1) + 1):
                cost = until[end] - until[begin]
                if cost > most:
                    break
                total = (squares + cost * cost, squared_counts + (end - begin) ** 2)
                if end not in after or total <= after[end][0]:  # of equals the one with the later begin
                    after[end] = (total, begin)
        best = after
        begins.append({end: begin for end, (_, begin) in after.items()})
    counts, end = [], n
    for of_stage in reversed(begins):
        counts.append(end - of_stage[end])
        end = of_stage[end]
    return counts[::-1]


def _least_largest(until: Sequence[float], n_stages: int) -> float:
    """The least that the largest of the sums can be; ``until[n]`` is the sum of the first n costs."""
    n = len(until) - 1
    least: list[float] = [*until]  # for the first `end` layers in one stage
    for stage in range(1, n_stages):
        before, least = least, [float("inf")] * (n + 1)
        begin = stage
        for end in range(stage + 1, n + 1):
            # With a later begin the last stage costs less and those before it more: where the two cross, or one before,
            # is the best. A later end moves that only to the right.
            while begin < end - 1 and before[begin] < until[end] - until[begin]:
                begin += 1
            for each in {begin, max(stage, begin - 1)}:
                least[end] = min(least[end], max(before[each], until[end] - until[each]))
    return least[n]


def _check(module: nn.Sequential, n_stages: int) -> None:
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module must be an nn.Sequential, to be cut between its layers, got {type(module).__name__}")
    if n_stages < 1:
        raise ValueError(f"the number of stages must be at least 1, got {n_stages}")
    if len(module) < n_stages:
        raise ValueError(
            f"{n_stages} stages need at least {n_stages} layers, got {len(module)}; {_advice(module, n_stages)}"
        )


def _advice(module: nn.Sequential, n_stages: int) -> str:
    inside = [
        repr(name) for name, layer in module.named_children() if isinstance(layer, nn.Sequential) and len(layer) > 1
    ]
    n_unfolded = sum(len(layer) if isinstance(layer, nn.Sequential) else 1 for layer in module)
    if n_unfolded >= n_stages:
        return f"put the layers of {' and '.join(inside)} into the outer nn.Sequential, which then has {n_unfolded}"
    if len(module) == 0:
        return "put layers into the nn.Sequential"
    return f"use at most {len(module)} stages, or cut the layers into smaller ones"


def _as_given(balance: Sequence[int], n_layers: int, n_stages: int) -> list[int]:
    counts = list(balance)
    if len(counts) != n_stages or any(not isinstance(each, int) or each < 1 for each in counts):
        raise ValueError(f"balance must be {n_stages} numbers of layers, one a stage, each at least 1, got {counts}")
    if sum(counts) != n_layers:
        raise ValueError(f"balance must share out all {n_layers} layers, got {counts}, which are {sum(counts)}")
    return counts
