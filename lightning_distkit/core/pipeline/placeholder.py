"""What stands on a rank for a parameter or a buffer that only another rank has: its shape and dtype, and no memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Absent(Tensor):
    """A tensor that another rank has: shape and dtype on the meta device. Moving it does nothing."""

    owner: str  # for errors
    never_here: bool  # it was on meta before, too

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.equal:  # how Lightning finds out whether an optimizer has a parameter
            return args[0] is args[1]
        with torch._C.DisableTorchFunctionSubclass():
            if func in (Tensor.to, Tensor.cpu, Tensor.cuda) and isinstance(args[0], Absent):
                dtype = torch._C._nn._parse_to(*args[1:], **(kwargs or {}))[1] if func is Tensor.to else None
                return args[0] if dtype in (None, args[0].dtype) else torch.empty_like(args[0], dtype=dtype)
            try:
                return func(*args, **(kwargs or {}))
            except RuntimeError as error:  # torch's own about meta tensors says neither whose it is nor what to do
                which = next((each.owner for each in args if isinstance(each, Absent)), None)
                if which is None or "meta" not in str(error).lower():
                    raise
                raise RuntimeError(
                    f"a tensor of a layer must be used on the rank that has it, but this one belongs to {which}; call "
                    f"the whole nn.Sequential that is the pipe, not its layers: {error}"
                ) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = type(self).of(self, self.owner)
        return memo[id(self)]

    @classmethod
    def of(cls, tensor: Tensor, owner: str) -> Any:
        """What stands for ``tensor``, with what others may have marked it with."""
        with torch._C.DisableTorchFunctionSubclass():
            made = Tensor._make_subclass(cls, torch.empty_like(tensor, device="meta"), tensor.requires_grad)
        made.__dict__.update(vars(tensor))
        made.owner = owner
        made.never_here = getattr(tensor, "never_here", tensor.is_meta)
        return made


class Placeholder(Absent, nn.Parameter):
    """A parameter that another rank has: no memory, and never a gradient."""
