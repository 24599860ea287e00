"""An ordinary torch optimizer over the sharded parameters of stage 3: it steps plain tensors and speaks of whole ones.

During a step, each DTensor of the optimizer is replaced by a plain tensor: by this rank's shard, the same memory, if
the optimizer works element by element (no DTensor dispatch then, and foreach and fused kernels as on one device); by
the whole parameter, on the one rank that owns it, if it needs whole matrices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.total_norm import total_norm
from lightning_distkit.core.zero import norm
from lightning_distkit.core.zero.dtensor_state import as_dtensors, gathered_state, load_whole_state, sharded_state
from lightning_distkit.core.zero.fsdp_state import reshard
from lightning_distkit.core.zero.owners import Owners
from lightning_distkit.core.zero.shardable import ELEMENTWISE, chosen_for, refuse_kind
from lightning_distkit.core.zero.sharding import sharding_of
from lightning_distkit.core.zero.whole_tensors import cut_of, local

logger = logging.getLogger(__name__)


class DTensorOptimizer(Optimizer):
    """The interface of all ZeRO stages around an optimizer made with the parameters of a sharded module.

    ``param_groups`` is the very list of ``optimizer``, so a scheduler may be made for either. ``state`` has DTensors,
    which ``torch.distributed.checkpoint`` writes and reads as they are (not so where `elementwise` is false). Every
    method is collective, but `zero_grad`, `no_sync` and `sharded_state_dict`.

    Args:
        optimizer: any torch optimizer, made after ``shard_parameters(module)``.
        module: what `shard_parameters` has returned.
        elementwise: whether the optimizer may step shards; by default so for the classes in
            `shardable.ELEMENTWISE`. Of any other, each rank steps whole parameters.

    Raises:
        TypeError: an optimizer that cannot be sharded, or a class in place of an object.
        ValueError: a module that is not sharded, an optimizer made before it was, or one of another module.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module, *, elementwise: bool | None = None) -> None:
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, DTensorOptimizer):
            raise TypeError(f"optimizer must be a plain torch optimizer, got {optimizer!r}")
        refuse_kind(type(optimizer))
        sharding = sharding_of(module)
        self.group: Group = Group() if sharding is None else sharding.group
        self.module = module
        self.optimizer = optimizer
        self.elementwise = type(optimizer) in ELEMENTWISE if elementwise is None else elementwise
        self.chosen = None if elementwise is not None else chosen_for(optimizer)  # as of ZeroOptimizer
        if self.chosen is not None and self.group.rank == 0:
            logger.info(self.chosen)
        self._unused = None if sharding is None else sharding.unused
        self.owners = Owners()  # of no parameter where shards are stepped
        self._check(optimizer.param_groups)
        param_groups, state = optimizer.param_groups, optimizer.state
        super().__init__(param_groups, optimizer.defaults)  # which sets both anew
        self.param_groups, self.state = param_groups, state

    # Both are the optimizer's own, whoever sets them: its load_state_dict, or a callback that adds groups on resuming.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def _check(self, param_groups: Sequence[dict[str, Any]]) -> None:
        params = [param for param_group in param_groups for param in param_group["params"]]
        own = set(self.module.parameters())
        if foreign := [param for param in params if param not in own]:
            raise ValueError(
                f"an optimizer must be made with parameters of the module as shard_parameters has left it, but "
                f"{len(foreign)} of {len(params)} are others, as those of the plain module; make it afterwards"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, at any time and alike on every rank."""
        if hasattr(self, "state"):  # not while it is made
            given = param_group["params"]
            param_group = {**param_group, "params": [given] if isinstance(given, Tensor) else list(given)}
            self._check([param_group])
        super().add_param_group(param_group)

    @property
    def params(self) -> list[Tensor]:
        """All parameters, in the order of their ids."""
        return [param for param_group in self.param_groups for param in param_group["params"]]

    # -- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the shards.

        Args:
            closure: computes the gradients; it is called once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._drop_unused()
        if self.elementwise:
            self._step_shards()
        else:
            self._step_wholes()
        reshard(self.module)  # what a forward without a backward has left whole is out of date now
        nbytes = sum(param.numel() * param.element_size() for param in self.params)
        self.group.ledger.add(nbytes_whole=self.group.ring_nbytes(nbytes))
        self.group.ledger.step()
        for stepped in (self, self.optimizer):  # or else a scheduler made for it complains
            stepped._opt_called = True  # type: ignore[attr-defined]
        return loss

    # Schedulers wrap `step` to see whether it was called, unless they find this; `step` tells them itself.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this, no backward sends anything; whole gradients are kept until the next one outside reduces them.

        Without it, each backward reduces its own and only shards are kept.
        """
        if not isinstance(self.module, FSDPModule):
            yield
            return
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def _drop_unused(self) -> None:
        if self._unused is not None:
            self._unused.drop()

    def _step_shards(self) -> None:
        stand_ins: dict[Tensor, Tensor] = {}
        for param in self.params:
            if isinstance(param, DTensor) and param.grad is not None:
                shard = local(param).requires_grad_(param.requires_grad)
                shard.grad = local(param.grad)
                stand_ins[param] = shard
        kept = {param: self.state.pop(param) for param in stand_ins if param in self.state}
        for param, state in kept.items():
            self.state[stand_ins[param]] = {
                name: local(value) if isinstance(value, DTensor) else value for name, value in state.items()
            }
        try:
            with self.stepping(stand_ins):
                self.optimizer.step()
        finally:
            for param, shard in stand_ins.items():
                if shard in self.state:
                    self.state[param] = as_dtensors(self.state.pop(shard), param, kept.get(param, {}))

    def _step_wholes(self) -> None:
        with (
            self.owners.whole_parameters(self.params, self.group.ledger) as wholes,
            self.stepping(wholes),
            self.owners.state_in(self.state),
        ):
            self.optimizer.step()

    @contextmanager
    def stepping(self, stand_ins: Mapping[Tensor, Tensor | None]) -> Iterator[None]:
        """Within this, the optimizer has these in place of its parameters; those with None it has not."""
        kept = [param_group["params"] for param_group in self.param_groups]
        for param_group in self.param_groups:
            replaced = [stand_ins.get(param, param) for param in param_group["params"]]
            param_group["params"] = [each for each in replaced if each is not None]
        try:
            yield
        finally:
            for param_group, params in zip(self.param_groups, kept, strict=True):
                param_group["params"] = params

    # -- norms

    def pieces(self, params: Iterable[Tensor] | None = None) -> list[Tensor]:
        """This rank's shards with their gradients, those without elements left out.

        Args:
            params: of which of the parameters; of all by default.
        """
        self._drop_unused()
        shards = []
        for param in self.params if params is None else params:
            if param.grad is not None and (shard := local(param)).numel():
                shard.grad = local(param.grad)
                shards.append(shard)
        return shards

    @torch.no_grad()
    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients as one vector: a plain scalar, the same on every rank (pytorch#170862)."""
        grads = [shard.grad for shard in self.pieces() if shard.grad is not None]
        dtype = reduce(torch.promote_types, (param.dtype for param in self.params), torch.float32)
        return total_norm(grads, norm_type, self.group_of_shards(), self.device, dtype)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` on whole gradients; returns the norm before, the same on every rank."""
        total = self.grad_norm(norm_type)
        norm.clip_(self.pieces(), max_norm, total, error_if_nonfinite)
        return total

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """As ``torch.nn.utils.clip_grad_value_`` on whole gradients, which must be real: a ValueError on every rank."""
        norm.clip_values_(self.pieces(), clip_value, (param.dtype for param in self.params))

    def edited(self) -> None:
        """Nothing to do: what the shards' gradients are is what is stepped."""

    def group_of_shards(self) -> Group:
        """The ranks that have one shard each; of a mesh with replicas, those of this rank's replica."""
        for param in self.params:
            if isinstance(param, DTensor):
                return Group(cut_of(param).group)
        return Group()

    @property
    def device(self) -> torch.device:
        return next((local(param).device for param in self.params), torch.device("cpu"))

    # -- state

    def sharded_state_dict(self) -> dict[str, Any]:
        """As the plain optimizer's, for `ShardedCheckpointWriter`; nothing is copied.

        The state has DTensors, which ``torch.distributed.checkpoint`` writes and reads by itself, too; or, where whole
        parameters are stepped, what this rank has of them. `load_state_dict` takes what `read_sharded_checkpoint` makes
        of it.
        """
        return sharded_state(self)

    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state of DTensors, as ``torch.distributed.checkpoint`` has read it into `sharded_state_dict`."""
        if not self.elementwise and any(isinstance(param, DTensor) for param in self.params):
            raise RuntimeError(f"the state of {type(self.optimizer).__name__} has no DTensors; use load_state_dict")
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """On rank 0 what the plain optimizer's ``state_dict()`` would be, on the CPU; an empty dict on the others.

        Parameter by parameter: rank 0 has the whole state, no other rank more than its own and one tensor under way.

        Raises:
            RuntimeError: another rank did not call it.
        """
        return gathered_state(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part of what the plain optimizer, or `state_dict` at any world size, has said.

        Every rank has the whole dict, best from ``torch.load(mmap=True)``, of which it then reads its part.

        Raises:
            ValueError: on every rank, if on one of them it is another optimizer's; nothing is changed then.
        """
        load_whole_state(self, state_dict)
