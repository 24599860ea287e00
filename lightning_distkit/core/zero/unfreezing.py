"""Parameters of a sharded block may be frozen and unfrozen between steps, which FSDP2 by itself takes in by halves.

It looks once, at the first forward, at which parameters of a block are trained and of which dtype their gradients are.
A block of which none was trained then would give gradients of the dtype it computes in to parameters of another. And a
block that is whole still, as the root after an evaluation, would go on as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def follow(param_group: Any) -> None:
    """Have an FSDPParamGroup look again before each forward that follows a change of ``requires_grad``.

    Such a forward raises a ValueError on every rank, if the parameters that the block trains now have several dtypes.
    """
    # Attributes of the object, which hide the methods: FSDP2 looks them up there, in torch 2.11 to 2.13.
    param_group._init_mp_dtypes = _checking(param_group, param_group._init_mp_dtypes)
    param_group.pre_forward = _following(param_group, param_group.pre_forward)


def _following(param_group: Any, pre_forward: Callable[..., Any]) -> Callable[..., Any]:
    seen: list[bool] = []

    @wraps(pre_forward)
    def following(*args: Any) -> Any:
        now = [each.sharded_param.requires_grad for each in param_group.fsdp_params]
        if now != seen:
            seen[:] = now
            param_group._init_mp_dtypes()
            for each in param_group.fsdp_params:
                if hasattr(each, "_unsharded_param"):
                    each._unsharded_param.requires_grad_(each.sharded_param.requires_grad)
        return pre_forward(*args)

    return following


def _checking(param_group: Any, init_mp_dtypes: Callable[[], None]) -> Callable[[], None]:
    @wraps(init_mp_dtypes)
    def checking() -> None:
        trained = [each.sharded_param for each in param_group.fsdp_params if each.sharded_param.requires_grad]
        dtypes = sorted({str(param.dtype) for param in trained})
        if len(dtypes) > 1:
            raise ValueError(
                f"the trained parameters of one block must have one dtype, but now those of "
                f"{param_group._module_fqn or 'the root'!r} are {' and '.join(dtypes)}; convert what was frozen before "
                "it is sharded, or let the policy make blocks of what differs"
            )
        init_mp_dtypes()

    return checking
