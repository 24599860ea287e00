"""What stage 2 leaves in ``param.grad`` of a whole gradient that was reduced: neither memory nor a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

WAY_OUT = (
    "but stage 2 had reduced it and kept this rank's shard only, so what was done is lost: clip and measure by the "
    "optimizer's clip_grad_norm_, clip_grad_value_ and grad_norm, and change gradients in hooks, or use stage 1"
)
_DROPPING = ("zero_", "_foreach_zero_", "requires_grad_", "detach_")  # zero_grad(set_to_none=False)


class ReducedGradient(Tensor):
    """One NaN, expanded, so of no size. Who looks at it sees that; who writes to it is told what to do instead."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and name not in _DROPPING:
            raise RuntimeError(f"a gradient is changed by {name}, {WAY_OUT}")
        with torch._C.DisableTorchFunctionSubclass():  # what comes out is an ordinary tensor
            return func(*args, **(kwargs or {}))


class Gone:
    """Which gradients have gone."""

    def __init__(self) -> None:
        self._where: dict[Tensor, tuple[Tensor, int]] = {}  # what was put there, and its version then

    def put(self, param: Tensor) -> None:
        param.grad = param.new_full((), torch.nan).expand(param.shape).as_subclass(ReducedGradient)
        self._where[param] = (param.grad, param.grad._version)

    def grad(self, param: Tensor) -> Tensor | None:
        """The real gradient in ``param.grad``."""
        return None if param in self._where else param.grad

    def was_dropped(self, param: Tensor) -> bool:
        """Whether somebody has taken away, or set to zero, what stands for the gradient.

        Raises:
            RuntimeError: somebody has done something else to it, which would be lost.
        """
        put, version = self._where[param]
        if param.grad is None or (param.grad is put and put._version == version):
            return param.grad is None
        if param.grad is put and not put.any():  # by module.zero_grad(set_to_none=False)
            return True
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(param.shape)} was changed or replaced, {WAY_OUT}"
        )

    def make_way(self, param: Tensor) -> None:
        """For a new gradient."""
        if self._where.pop(param, None) is not None:
            param.grad = None

    def dropped(self) -> list[Tensor]:
        return [param for param in self._where if self.was_dropped(param)]

    def clear(self) -> None:
        for param in self._where:
            param.grad = None
        self._where.clear()

    def __contains__(self, param: Tensor) -> bool:
        return param in self._where
