"""The factors that the next step starts from: what was learned so far, or random numbers; the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_distkit.core.compression.low_rank import LowRank, Side, factor_dtype
from lightning_distkit.core.compression.mersenne import SeedSequence
from lightning_distkit.core.compression.orthogonalize import orthonormalized


@dataclass(frozen=True)
class Draw:
    """Factors of one shape that are drawn together."""

    side: Side
    parameters: Sequence[Tensor]
    r: int
    length: int
    dtype: torch.dtype


@dataclass
class FactorMemory:
    """One or both factors of each parameter, and the random numbers for those that there are not yet.

    Args:
        seeds: of the random factors, one for each step that draws some.
        warm_start: start from what was learned; otherwise new ones are drawn in every step.
        same_shape: draw those of one shape together, as torch does where it multiplies them together.
        epsilon: `orthogonalization_epsilon`.
    """

    seeds: SeedSequence
    warm_start: bool
    same_shape: bool
    epsilon: float
    p: dict[Tensor, Tensor] = field(default_factory=dict)  # (r, n) each
    q: dict[Tensor, Tensor] = field(default_factory=dict)  # (r, m) each
    draws: list[Draw] = field(default_factory=list)  # of a step without warm start, in order
    turn: Side = "p"  # the factor that is to be learned next, where they take turns
    _seed: int | None = None  # of this step
    _generator: torch.Generator | None = None  # of this step
    _learned: bool = False  # in this step

    def orthonormal(self, side: Side, items: Sequence[LowRank]) -> dict[LowRank, Tensor]:
        """The factors to start from: for each item (r, n) or (r, m), its rows orthonormal."""
        known = self.p if side == "p" else self.q
        if self._generator is None:
            # Not bucket by bucket but in the order of the first time, so that the numbers do not depend on buckets.
            for draw in self.draws:
                if draw.side == side:
                    self._draw(draw)
        missing: dict[object, list[LowRank]] = {}
        for item in items:
            if item.parameter not in known:
                together = (item.matrix.shape, item.r) if self.same_shape else item.parameter
                missing.setdefault(together, []).append(item)
            elif known[item.parameter].shape != item.factor_shape(side):
                self._redraw(side, item)
        for alike in missing.values():
            first = alike[0]
            dtype = factor_dtype(first.matrix.dtype)
            draw = Draw(side, [item.parameter for item in alike], *first.factor_shape(side), dtype)
            self._draw(draw)
            if not self.warm_start:
                self.draws.append(draw)
        # What is remembered stays as it is: made orthonormal twice, after a step that was skipped, it would not be the
        # same to the last bit.
        factors = orthonormalized([known[item.parameter] for item in items], self.epsilon)
        return dict(zip(items, factors, strict=True))

    def remember(self, side: Side, factors: Mapping[LowRank, Tensor]) -> None:
        """Keep these for the next step, if it is to start from them; but where a factor is all zeros, what was known.

        From zeros nothing would ever grow again: a gradient of zeros teaches nothing.
        """
        self._learned = True
        if self.warm_start:
            known = self.p if side == "p" else self.q
            for item, factor in factors.items():
                before = known.get(item.parameter)
                if before is None or before.shape != factor.shape:
                    known[item.parameter] = factor
                else:
                    known[item.parameter] = torch.where(torch.linalg.vector_norm(factor) > 0, factor, before)

    def end_of_step(self) -> None:
        self._seed = self._generator = None
        if self._learned:  # a step that was skipped is no turn
            self.turn = "q" if self.turn == "p" else "p"
            self._learned = False
        if not self.warm_start:
            self.p.clear()
            self.q.clear()

    def _draw(self, draw: Draw) -> None:
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self._seed_of_step())
        known = self.p if draw.side == "p" else self.q
        # On the CPU: every rank draws the same numbers, whatever its device.
        shape = (len(draw.parameters), draw.length, draw.r)
        batch = torch.randn(shape, generator=self._generator, dtype=draw.dtype)
        for parameter, drawn in zip(draw.parameters, batch, strict=True):
            known[parameter] = drawn.mT.contiguous().to(parameter.device)

    def _redraw(self, side: Side, item: LowRank) -> None:
        """Another r, or another shape, than before: keep what was learned, and draw the rows that are missing."""
        known = self.p if side == "p" else self.q
        before = known[item.parameter]
        # By a generator of the parameter's own: buckets may come in another order than in a run that is resumed.
        generator = torch.Generator().manual_seed(self._seed_of_step() + (1 + item.position) * SeedSequence.END)
        factor = torch.randn(item.factor_shape(side), generator=generator, dtype=before.dtype).to(before.device)
        if before.shape[1] == factor.shape[1]:
            keep = min(len(before), len(factor))
            factor[:keep] = before[:keep]
        known[item.parameter] = factor
        for i, draw in enumerate(self.draws):
            if draw.side == side and item.parameter in set(draw.parameters):
                self.draws[i] = replace(draw, r=factor.shape[0], length=factor.shape[1])

    def _seed_of_step(self) -> int:
        if self._seed is None:
            self._seed = self.seeds.draw()
        return self._seed

    def state_dict(self, key: Mapping[Tensor, Any]) -> dict[str, Any]:
        """What `load_state_dict` takes, each parameter under its key; the tensors are not copies."""
        return {
            "n_drawn": self.seeds.n_drawn,
            "turn": self.turn,
            "p": {key[parameter]: factor for parameter, factor in self.p.items()},
            "q": {key[parameter]: factor for parameter, factor in self.q.items()},
            "draws": [(d.side, [key[p] for p in d.parameters], d.r, d.length, d.dtype) for d in self.draws],
        }

    def load_state_dict(self, state: Mapping[str, Any], parameters: Mapping[Any, Tensor]) -> None:
        self.seeds = SeedSequence(self.seeds.seed, state["n_drawn"])
        self.turn = state["turn"]
        for known, saved in ((self.p, state["p"]), (self.q, state["q"])):
            known.clear()
            known.update((parameters[key], f.to(parameters[key].device, copy=True)) for key, f in saved.items())
        self.draws = [
            Draw(side, [parameters[key] for key in keys], r, length, dtype)
            for side, keys, r, length, dtype in state["draws"]
        ]
