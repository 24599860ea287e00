"""What compression does to each gradient, measured in the steps in which someone asks for it.

To be sent is M, (n, m): this rank's gradient and what was left out before. What the message of this rank stands for is
C. Then ``|M - C| / |M|``, of Frobenius norms, is the relative error of compression: 0 for the plain mean, 1 if nothing
is sent. The mean over the ranks is off by no more than the root mean square of ``|M - C|``: what the ranks leave out
partly cancels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from lightning_distkit.core.collectives import Group


@dataclass
class LayerMeasurement:
    """Of one parameter; squares of Frobenius norms, so that they can be summed over layers and ranks."""

    nbytes_whole: int  # of its gradient
    nbytes_sent: int  # of what travels in its place
    wanted: float = 0.0  # |M|²
    left_out: float = 0.0  # |M - C|²
    error: float = 0.0  # |E|², of what is remembered for the next step

    @property
    def is_compressed(self) -> bool:
        return self.nbytes_sent < self.nbytes_whole

    @property
    def relative_error(self) -> float:
        return math.sqrt(self.left_out / self.wanted) if self.wanted != 0 else 0.0


class Measurement:
    """Of one step: all parameters that took part, in an order that is the same on every rank."""

    def __init__(self) -> None:
        self.layers: dict[Tensor, LayerMeasurement] = {}  # of this rank alone
        self.is_finite = True
        self._squares: list[tuple[Tensor, str, Tensor]] = []  # not looked at before the end: on CUDA that would wait
        self._scratch: Tensor | None = None

    def scratch(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory of that shape to compute in; always the same: new memory costs more than what is computed in it."""
        if self._scratch is None or self._scratch.numel() < like.numel() or self._scratch.dtype != dtype:
            self._scratch = torch.empty(like.numel(), dtype=dtype, device=like.device)
        return self._scratch[: like.numel()].view(like.shape)

    def add(self, parameters: Sequence[Tensor], nbytes_sent: int, wanted: Tensor) -> None:
        """What was to be sent of the gradients of some parameters, that lie one after the other.

        Args:
            nbytes_sent: of what travels in place of them.
        """
        numel = sum(parameter.numel() for parameter in parameters)
        for parameter in parameters:
            share = nbytes_sent * parameter.numel() // max(1, numel)
            self.layers[parameter] = LayerMeasurement(parameter.nbytes, share)
        self._add_squares(parameters, "wanted", wanted)

    def add_left_out(self, parameters: Sequence[Tensor], left_out: Tensor) -> None:
        """The part of it that the message does not stand for; by default nothing."""
        self._add_squares(parameters, "left_out", left_out)

    def add_error(self, parameters: Sequence[Tensor], error: Tensor) -> None:
        """What is remembered for the next step."""
        self._add_squares(parameters, "error", error)

    def _add_squares(self, parameters: Sequence[Tensor], name: str, tensor: Tensor) -> None:
        numels = [parameter.numel() for parameter in parameters]
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        for parameter, part in zip(parameters, tensor.flatten()[: sum(numels)].split(numels), strict=True):
            norm = torch.linalg.vector_norm(part, dtype=dtype).double()
            self._squares.append((parameter, name, norm.square()))

    def finish(self) -> None:
        """Fetch all numbers from the device at once."""
        if self._squares:
            values = torch.stack([square for _, _, square in self._squares]).tolist()
            for (parameter, name, _), value in zip(self._squares, values, strict=True):
                setattr(self.layers[parameter], name, value)
        self._squares, self._scratch = [], None

    def over_ranks(self, group: Group) -> dict[Tensor, LayerMeasurement]:
        """Squares summed over the ranks, the same on every rank; every rank must call it. One small message."""
        rows = [(layer.wanted, layer.left_out, layer.error) for layer in self.layers.values()]
        device = next(iter(self.layers)).device if self.layers else None
        sums = torch.tensor(rows, dtype=torch.float64, device=device)
        Group(group.process_group).all_reduce(sums).wait()  # in a ledger of its own: it is no gradient
        return {
            parameter: LayerMeasurement(layer.nbytes_whole, layer.nbytes_sent, *row)
            for (parameter, layer), row in zip(self.layers.items(), sums.tolist(), strict=True)
        }


def total(layers: Iterable[LayerMeasurement]) -> LayerMeasurement:
    """Of all these together."""
    rows = [astuple(layer) for layer in layers] or [astuple(LayerMeasurement(0, 0))]
    return LayerMeasurement(*map(sum, zip(*rows, strict=True)))
