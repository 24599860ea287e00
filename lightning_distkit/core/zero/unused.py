"""Parameters of a sharded block that got no gradient on some ranks: reduced as zeros there, so that all ranks agree.

FSDP2 reduces the gradients that a rank has, in one message. If a rank lacks one that another has, the messages differ
in length: gloo ends the process. So those missing are filled with zeros before; and as a parameter that no rank has
used must have no gradient at all (weight decay and momentum would move it), `drop` asks the others once a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from lightning_distkit.core.collectives import naming_the_cause


class Unused:
    """Which parameters of a module have a gradient that is, or has in it, one of this rank's own."""

    def __init__(self) -> None:
        self._params: list[Any] = []  # FSDPParam, in the same order on every rank
        self._used: set[Any] = set()  # of them, since `drop`; of this rank alone
        self._kept: dict[Any, Any] = {}  # the gradients that some rank had used when `drop` asked: weak references
        self._asked = False

    def attach(self, param_group: Any) -> None:
        """Fill, from now on, what is missing of an FSDPParamGroup before it is reduced."""
        self._params += param_group.fsdp_params
        # An attribute of the object, which hides the method: both callers look it up there, in torch 2.11 to 2.13.
        param_group.post_backward = self._filling(param_group, param_group.post_backward)

    def _filling(self, param_group: Any, post_backward: Callable[..., None]) -> Callable[..., None]:
        @wraps(post_backward)
        def filled(*unused: Any) -> None:
            self._asked = False
            # IDLE: no backward came through this block, on any rank; its gradients stay None.
            took_part = param_group._training_state != TrainingState.IDLE
            for each in param_group.fsdp_params:
                param = getattr(each, "_unsharded_param", None)
                if param is None or not param.requires_grad:
                    continue
                if each.sharded_param.grad is None:
                    self._used.discard(each)  # somebody has dropped what there was
                if param.grad is not None or each.unsharded_accumulated_grad is not None:
                    self._used.add(each)
                elif took_part and param_group.reduce_grads:
                    param.grad = torch.zeros_like(param)
            post_backward(*unused)

        return filled

    @torch.no_grad()
    def drop(self) -> None:
        """Take away the gradients that are zeros from every rank.

        A collective of one byte a parameter, not counted. A rank that has used all does not wait for its result.
        """
        reduced = [each for each in self._params if each.sharded_param.grad is not None]
        if self._asked or not reduced:
            return
        self._asked = True
        first = reduced[0].sharded_param
        used = [each in self._used or self._is_kept(each) for each in reduced]
        flags = torch.tensor(used, dtype=torch.uint8, device=first.to_local().device)
        for axis in range(first.device_mesh.ndim):
            group = first.device_mesh.get_group(axis)
            with naming_the_cause(group):
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        self._used.clear()
        somewhere = used if all(used) else flags.tolist()
        for each, flag in zip(reduced, somewhere, strict=True):
            if flag:
                self._kept[each] = weakref.ref(each.sharded_param.grad)
            else:
                each.sharded_param.grad = None

    def _is_kept(self, each: Any) -> bool:
        kept = self._kept.get(each)
        return kept is not None and kept() is each.sharded_param.grad
