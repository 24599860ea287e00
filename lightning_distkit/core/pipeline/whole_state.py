"""The whole module's state dict: gathered from the ranks that have its parts, and loaded by each in part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_distkit.core.pipeline.engine import Engine


class Exchanges:
    """Nests of tensors and plain values given from rank to rank. Collective, all of it.

    Args:
        begin: the number of the exchange, the same on every rank.
    """

    def __init__(self, engine: Engine, begin: Any) -> None:
        self._engine = engine
        self._begin = begin
        self.rank = engine.rank
        self.n_ranks = engine.layout.n_ranks

    def gather(self, values: Any, all_ranks: bool = False) -> list[Any] | None:
        """Every rank's nest, in the order of ranks; on rank 0, or on all."""
        others = [rank for rank in range(self.n_ranks) if rank != self.rank]
        gets = all_ranks or self.rank == 0
        give = dict.fromkeys(others if all_ranks else [0] if self.rank else [], values)
        taken = self._engine.exchange(self._begin(), give, others if gets else [])
        return [values if rank == self.rank else taken[rank] for rank in range(self.n_ranks)] if gets else None

    def everyones(self, value: Any) -> list[Any]:
        """The same on every rank."""
        return self.gather(value, all_ranks=True) or []

    def scatter(self, give: Mapping[int, Any], gets: bool) -> Any:
        """What rank 0 has for this one, if it is one that gets something."""
        taken = self._engine.exchange(self._begin(), give, [0] if gets else [])
        return taken[0] if gets else None


def join(parts: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    """One state dict of those of all ranks, in the order of ``keys``; a tied one from the first rank that has it."""
    whole = {key: value for part in reversed(parts) for key, value in part.items()}
    order = {key: n for n, key in enumerate(keys)}
    return {key: whole[key] for key in sorted(whole, key=lambda key: order.get(key, len(order)))}


def detached(module: nn.Module) -> dict[str, Any]:
    return {key: value.detach() if isinstance(value, Tensor) else value for key, value in module.state_dict().items()}


def load(
    module: nn.Module, whole_keys: Sequence[str], state: Mapping[str, Any] | None, strict: bool, exchanges: Exchanges
) -> None:
    """Load this rank's part of a state dict that every rank has, or rank 0 alone.

    Raises:
        ValueError: rank 0 has none.
        RuntimeError: keys are missing or unexpected. Both on every rank.
    """
    told = exchanges.everyones((list(state) if state is not None else None, list(module.state_dict())))
    keys = told[0][0]
    if keys is None:
        raise ValueError("rank 0 must have a state dict to load, got None; give it there, or on every rank")
    missing, unexpected = sorted(set(whole_keys) - set(keys)), sorted(set(keys) - set(whole_keys))
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"the state dict must have the keys of the whole module; missing: {', '.join(missing) or 'none'}; "
            f"unexpected: {', '.join(unexpected) or 'none'}"
        )
    if any(its is None for its, _ in told):
        give = {}
        if exchanges.rank == 0:
            assert state is not None
            lacking = [rank for rank, (its, _) in enumerate(told) if its is None]
            give = {rank: {key: state[key] for key in told[rank][1] if key in state} for rank in lacking}
        given = exchanges.scatter(give, gets=state is None)
        state = given if state is None else state
    assert state is not None
    own = told[exchanges.rank][1]
    module.load_state_dict({key: state[key] for key in own if key in state}, strict=strict)
