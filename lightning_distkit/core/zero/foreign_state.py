"""Whether a state dict is one of this optimizer, asked before anything of it is taken: one answer for all stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def why_foreign(
    optimizer: Optimizer, param_groups: Sequence[dict[str, Any]], elementwise: bool, state_dict: Any
) -> str | None:
    """Why ``state_dict``, which may be anything, is no state of ``optimizer``; None if it is one.

    Args:
        optimizer: the plain one, whose class says what else than tensors of a parameter's shape it may keep.
        param_groups: with whole shapes.
        elementwise: whether each rank keeps slices of the state, which then must have the parameters' shapes.
    """
    try:
        ours = [len(each["params"]) for each in param_groups]
        theirs = [len(each["params"]) for each in state_dict["param_groups"]]
        if ours != theirs:
            return (
                f"the state dict must be of an optimizer with the same param groups, of {ours} parameters, got one of "
                f"{theirs}; make the optimizer as the one that was saved"
            )
        for number, param in zip(_of(state_dict["param_groups"]), _of(param_groups), strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and not _fits(value, param, optimizer, elementwise):
                    return (
                        f"{name!r} of parameter {number} must fit the parameter's shape {tuple(param.shape)}, got "
                        f"{tuple(value.shape)}: the state dict is of another model"
                    )
    except (AttributeError, IndexError, KeyError, TypeError) as error:  # others would wait for this rank
        what = "an optimizer's state dict must have 'state' and 'param_groups' as torch makes them; this has not"
        return f"{what}: {error!r}"
    return None


def _of(param_groups: Sequence[dict[str, Any]]) -> Iterator[Any]:
    return (param for param_group in param_groups for param in param_group["params"])


def _fits(value: Tensor, param: Tensor, optimizer: Optimizer, elementwise: bool) -> bool:
    if value.numel() == 1 or value.shape == param.shape:
        return True
    if elementwise:
        return False
    # Adafactor's rows and columns; what the optimizers of others keep of a whole matrix, nobody can know.
    factor = value.ndim == param.ndim and all(n in (1, m) for n, m in zip(value.shape, param.shape, strict=True))
    return factor or not type(optimizer).__module__.startswith("torch.optim.")
