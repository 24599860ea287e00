"""Which optimizers can be sharded, whether they step slices or whole parameters, and that all ranks have one alike."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_distkit.core.collectives import Group, default_device
from lightning_distkit.core.zero.holders import refusal

# Each element's step depends on that element's gradient and state alone, so any slice may be stepped on its own.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD),
)
REFUSED = {
    torch.optim.LBFGS: "its step evaluates the loss again and again, with inner products over all parameters",
    torch.optim.SparseAdam: "it is for sparse gradients",
}


def refuse_kind(cls: type[Optimizer]) -> None:
    """Raise a TypeError if no such optimizer can be sharded."""
    for refused, why in REFUSED.items():
        if issubclass(cls, refused):
            raise TypeError(f"ZeRO cannot shard {cls.__name__}: {why}; use another optimizer, or plain DDP")
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(f"ZeRO cannot shard {cls.__name__}: its step needs a closure; use another optimizer")


def chosen_for(optimizer: Optimizer) -> str | None:
    """How an optimizer steps where the user has not said it, and it is not as the user may think; None if it is."""
    if type(optimizer) in ELEMENTWISE:
        return None
    return (
        f"{type(optimizer).__name__} may need whole matrices, so each rank steps whole parameters, those that it owns; "
        "elementwise=True says that it may step slices"
    )


def made(optimizer: Optimizer | type[Optimizer], params: Iterable[Any] | None, arguments: dict[str, Any]) -> Optimizer:
    """The optimizer, or one of the class; a TypeError if it cannot be sharded, or the arguments do not go together."""
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    refuse_kind(cls)
    if isinstance(optimizer, type):
        if params is None:
            raise TypeError(f"params must be given with a class of optimizer, here {cls.__name__}")
        return optimizer(params, **arguments)
    if params is not None or arguments:
        raise TypeError(f"{cls.__name__} is made already, so neither params nor its arguments can be given")
    return optimizer


def check(
    optimizer: Optimizer, group: Group, living: Sequence[nn.Module], *, elementwise: bool, bucket_cap: float
) -> None:
    """Raise a ValueError on every rank, if the parameters cannot be sharded, or any of this differs between ranks.

    Args:
        living: all modules of this process.
    """
    params = [param for param_group in optimizer.param_groups for param in param_group["params"]]
    if not optimizer.param_groups:
        raise ValueError(
            f"an optimizer must have a param group, which may be empty, but {type(optimizer).__name__} has none: "
            "give it the parameters to be trained"
        )
    devices = {str(param.device.type) for param in params}
    if len(devices) > 1 or "meta" in devices:
        raise ValueError(
            f"the parameters must be on one type of device, and not on meta, got {', '.join(sorted(devices))}; "
            "move or materialise the module before the optimizer is made"
        )
    process_group = group.process_group
    if process_group is not None and devices == {"cpu"} and dist.get_backend(process_group) == "nccl":
        raise ValueError(
            "the parameters are on the CPU, and the process group's backend is nccl, which needs CUDA: move the "
            'module before the optimizer is made, or initialize with backend="gloo"'
        )
    of_ranks = {
        "the class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "elementwise": elementwise,
        "bucket_cap": bucket_cap,
        "the number of parameters": [len(param_group["params"]) for param_group in optimizer.param_groups],
        **{
            f"parameter {n}": f"{tuple(p.shape)}, strides {p.stride()}, {p.dtype}, requires_grad={p.requires_grad}"
            for n, p in enumerate(params)
        },
    }
    device = params[0].device if params else default_device(process_group)  # should another rank have some
    group.refuse_together(refusal(params, living), device)
    group.agree("a ZeroOptimizer", of_ranks, device)
