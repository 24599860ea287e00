"""Optimizers that need whole matrices: each parameter is stepped whole by one rank, its owner; balanced by size."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_distkit.core.ledger import Ledger
from lightning_distkit.core.zero.whole_tensors import cut_of, detached, gather, local, scatter_


class Owners:
    """Who owns which parameter, and what this rank has of those that it owns."""

    def __init__(self) -> None:
        self._owners: dict[Tensor, int] = {}  # in the group of its shards, the same on every rank
        self._loads: list[int] = []  # numel that each rank owns
        self.wholes: dict[Tensor, nn.Parameter] = {}  # what is stepped in its place; without elements between steps
        self.state: dict[Tensor, dict[str, Any]] = {}  # the optimizer's, of those that this rank owns

    def __bool__(self) -> bool:
        return bool(self._owners)

    def of(self, param: DTensor, params: Sequence[Tensor]) -> int:
        """The rank, in the group of its shards, that steps ``param``: the one with least so far.

        Args:
            params: all of the optimizer, which are shared out at once.
        """
        if param not in self._owners:
            self._loads = self._loads or [0] * cut_of(param).world_size
            new = [each for each in params if each not in self._owners and isinstance(each, DTensor)]
            for each in sorted(new, key=Tensor.numel, reverse=True):
                self._owners[each] = self._loads.index(min(self._loads))
                self._loads[self._owners[each]] += each.numel()
        return self._owners[param]

    def whole(self, param: DTensor) -> nn.Parameter:
        """What is stepped in the place of ``param``."""
        if param not in self.wholes:
            self.wholes[param] = nn.Parameter(local(param).new_empty(0), requires_grad=param.requires_grad)
        return self.wholes[param]

    @contextmanager
    def whole_parameters(self, params: Sequence[Tensor], ledger: Ledger) -> Iterator[dict[Tensor, Tensor | None]]:
        """Within this, each parameter that has a gradient is whole on its owner, with it: by ``param``, or None.

        Gradient and parameter go to the owner, and the parameter comes back: ``1 / W`` of what the rest of a step
        sends. Collective over the group of the shards.
        """
        cut = [param for param in params if param.grad is not None and isinstance(param, DTensor)]
        owners = {param: self.of(param, params) for param in cut}
        grads = gather([(cast(DTensor, param.grad), owners[param]) for param in cut], ledger)
        values = gather([(detached(param), owners[param]) for param in cut], ledger)
        for param, grad, value in zip(cut, grads, values, strict=True):
            if value is not None:
                whole = self.whole(param)
                whole.data, whole.grad = value, grad
        yield {param: self.wholes.get(param) for param in cut}
        mine = [self.wholes[param].detach() if param in self.wholes else None for param in cut]
        scatter_([(detached(param), owners[param], whole) for param, whole in zip(cut, mine, strict=True)], ledger)
        for whole in self.wholes.values():
            whole.data, whole.grad = whole.data.new_empty(0), None

    @contextmanager
    def state_in(self, state: MutableMapping[Tensor, dict[str, Any]]) -> Iterator[None]:
        """Within this, ``state`` has that of the whole parameters, by these."""
        for param, its in self.state.items():
            state[self.wholes[param]] = its
        try:
            yield
        finally:
            for param, whole in self.wholes.items():
                if whole in state:
                    self.state[param] = state.pop(whole)
