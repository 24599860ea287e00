"""One parameter in layers of several stages: each of their ranks has a copy, and all copies get the same gradient.

What each rank adds to the gradient in one call is sent to the others, and not ``.grad`` as it stands, in which the sum
of an earlier backward may be already. Every rank sums in the same order, so the copies stay equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class TiedParameters:
    """Those of this rank that others have as well.

    Args:
        owners: of each parameter, in one order on every rank, the ranks that have it, ascending; this one among them.
    """

    def __init__(self, rank: int, owners: Sequence[tuple[nn.Parameter, tuple[int, ...]]]) -> None:
        self._rank = rank
        self._owners = list(owners)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter, _ in self._owners]

    @property
    def partners(self) -> list[int]:
        """The other ranks that have some of them."""
        return sorted({rank for _, owners in self._owners for rank in owners if rank != self._rank})

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this is the copy that stands for all, so that whatever is summed over the ranks has it once."""
        return all(each is not parameter or owners[0] == self._rank for each, owners in self._owners)

    def shared_with(self, rank: int) -> list[nn.Parameter]:
        return [parameter for parameter, owners in self._owners if rank in owners]

    def gradients(self, rank: int) -> list[Tensor | None]:
        """What this rank has for another."""
        return [parameter.grad for parameter in self.shared_with(rank)]

    def values(self, rank: int) -> list[Tensor]:
        return [parameter.detach() for parameter in self.shared_with(rank)]

    @torch.no_grad()
    def add(self, received: Mapping[int, Sequence[Tensor | None]]) -> None:
        """Make each gradient the sum over the ranks, in their order."""
        of = {rank: dict(zip(self.shared_with(rank), its, strict=True)) for rank, its in received.items()}
        for parameter, owners in self._owners:
            each = [parameter.grad if rank == self._rank else of[rank][parameter] for rank in owners]
            there = [grad for grad in each if grad is not None]
            if there:
                total = there[0].clone()  # what is being sent must not change
                for grad in there[1:]:
                    total += grad
                parameter.grad = total

    @torch.no_grad()
    def take(self, received: Mapping[int, Sequence[Tensor]]) -> None:
        """Take the values of the first rank that has each parameter."""
        for rank, values in received.items():
            for parameter, value in zip(self.shared_with(rank), values, strict=True):
                owners = next(owners for each, owners in self._owners if each is parameter)
                if rank == owners[0]:
                    parameter.copy_(value)
