"""What of FSDP2 has no public name: a module's state, its groups of parameters, and the way back to shards."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def state_of(module: nn.Module) -> Any:
    """FSDP2's FSDPState of a module that is sharded."""
    return cast(Any, fully_shard).state(module)


def param_groups_of(module: nn.Module, recurse: bool = True) -> list[Any]:
    """FSDP2's FSDPParamGroups, in the order of modules: at most one a module in torch 2.11, several possible since.

    Args:
        recurse: whether to look below ``module`` as well.
    """
    groups: list[Any] = []
    for each in module.modules() if recurse else [module]:
        if isinstance(each, FSDPModule):
            state = state_of(each)
            groups += getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [each for each in groups if each is not None]


def reshard(module: nn.Module) -> None:
    """Have all parameters be this rank's shards, as they are between the steps. Not collective.

    A forward without a backward leaves the root whole, and what it has prefetched and not used is under way still: a
    later forward would take it up, out of date.
    """
    for each in param_groups_of(module):
        if each._all_gather_result is not None:
            each.wait_for_unshard()
        each.reshard()


def interrupt(module: nn.Module) -> None:
    """`reshard` after an error, wherever it came. Not collective."""
    for each in param_groups_of(module):
        # In the midst of a forward, a block that is to stay whole until its backward would not be resharded.
        each._training_state = TrainingState.IDLE
    reshard(module)
