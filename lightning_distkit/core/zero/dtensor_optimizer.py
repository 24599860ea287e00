"""An ordinary torch optimizer over the sharded parameters of stage 3: it steps plain tensors and speaks of whole ones.

During a step, each DTensor of the optimizer is replaced by a plain tensor: by this rank's shard, the same memory, if
the optimizer works element by element (no DTensor dispatch then, and foreach and fused kernels as on one device); by
the whole parameter, on the one rank that owns it, if it needs whole matrices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.zero import norm
from lightning_distkit.core.zero.optimizer import ELEMENTWISE, REFUSED
from lightning_distkit.core.zero.sharding import sharding_of
from lightning_distkit.core.zero.whole_tensors import cut_of, detached, gather, local, scatter_, shard_like, take_shard

logger = logging.getLogger(__name__)


class DTensorOptimizer(Optimizer):
    """The interface of all ZeRO stages around an optimizer made with the parameters of a sharded module.

    ``param_groups`` is the very list of ``optimizer``, so a scheduler may be made for either. ``state`` has DTensors,
    which ``torch.distributed.checkpoint`` writes and reads as they are (not so where `elementwise` is false: there
    `state_dict` is the way). Every method but `zero_grad` and `no_sync` is collective.

    Args:
        optimizer: any torch optimizer, made after ``shard_parameters(module)``.
        module: what `shard_parameters` has returned.
        elementwise: whether the optimizer may step shards; by default so for the classes in
            `lightning_distkit.core.zero.optimizer.ELEMENTWISE`. Of any other, each rank steps whole parameters.

    Raises:
        TypeError: an optimizer that cannot be sharded, or a class in place of an object.
        ValueError: a module that is not sharded, an optimizer made before it was, or one of another module.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module, *, elementwise: bool | None = None) -> None:
        for refused, why in REFUSED.items():
            if isinstance(optimizer, refused):
                raise TypeError(f"ZeRO cannot shard {refused.__name__}: {why}; use another optimizer, or plain DDP")
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, DTensorOptimizer):
            raise TypeError(f"optimizer must be a plain torch optimizer, got {optimizer!r}")
        sharding = sharding_of(module)
        self.group: Group = Group() if sharding is None else sharding.group
        self.module = module
        self.optimizer = optimizer
        self.elementwise = type(optimizer) in ELEMENTWISE if elementwise is None else elementwise
        if not self.elementwise and elementwise is None:
            logger.info("%s may need whole matrices: each rank steps whole parameters", type(optimizer).__name__)
        self._unused = None if sharding is None else sharding.unused
        self._owners: dict[Tensor, int] = {}  # rank that steps it, the same on every rank
        self._loads: list[int] = []  # numel that each rank owns
        self._wholes: dict[Tensor, nn.Parameter] = {}  # what is stepped in its place; without elements between steps
        self._whole_state: dict[Tensor, dict[str, Any]] = {}  # of those that this rank owns
        self._check(optimizer.param_groups)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state

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
        for each in self.module.modules():
            if isinstance(each, FSDPModule):
                each.reshard()  # what a forward without a backward has left whole is out of date now
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
            with self._stepping(stand_ins):
                self.optimizer.step()
        finally:
            for param, shard in stand_ins.items():
                if shard in self.state:
                    self.state[param] = _as_dtensors(self.state.pop(shard), param, kept.get(param, {}))

    def _step_wholes(self) -> None:
        """Gradient and parameter to the owner, and the parameter back: ``1 / W`` of what the rest of a step sends."""
        stepped = [param for param in self.params if param.grad is not None]
        cut = [param for param in stepped if isinstance(param, DTensor)]
        owners = {param: self._owner(param) for param in cut}
        ledger = self.group.ledger
        grads = gather([(cast(DTensor, param.grad), owners[param]) for param in cut], ledger)
        values = gather([(detached(param), owners[param]) for param in cut], ledger)
        for param, grad, value in zip(cut, grads, values, strict=True):
            if value is not None:
                whole = self._whole(param)
                whole.data, whole.grad = value, grad
        with self._stepping({param: self._wholes.get(param) for param in cut}), self._with_whole_state():
            self.optimizer.step()
        mine = [self._wholes[param].detach() if param in self._wholes else None for param in cut]
        scatter_([(detached(param), owners[param], whole) for param, whole in zip(cut, mine, strict=True)], ledger)
        for whole in self._wholes.values():
            whole.data, whole.grad = whole.data.new_empty(0), None

    def _owner(self, param: DTensor) -> int:
        """The rank, in the group of its shards, that steps ``param``: the one with least so far."""
        if param not in self._owners:
            self._loads = self._loads or [0] * cut_of(param).world_size
            new = [each for each in self.params if each not in self._owners and isinstance(each, DTensor)]
            for each in sorted(new, key=Tensor.numel, reverse=True):
                self._owners[each] = self._loads.index(min(self._loads))
                self._loads[self._owners[each]] += each.numel()
        return self._owners[param]

    def _whole(self, param: DTensor) -> nn.Parameter:
        if param not in self._wholes:
            self._wholes[param] = nn.Parameter(local(param).new_empty(0), requires_grad=param.requires_grad)
        return self._wholes[param]

    @contextmanager
    def _stepping(self, stand_ins: Mapping[Tensor, Tensor | None]) -> Iterator[None]:
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

    @contextmanager
    def _with_whole_state(self) -> Iterator[None]:
        """Within this, the optimizer's state is that of the whole parameters, by these."""
        for param, state in self._whole_state.items():
            self.state[self._wholes[param]] = state
        try:
            yield
        finally:
            for param, whole in self._wholes.items():
                if whole in self.state:
                    self._whole_state[param] = self.state.pop(whole)

    # -- norms

    def _shards(self) -> list[Tensor]:
        """This rank's shards with their gradients, those without elements left out."""
        self._drop_unused()
        shards = []
        for param in self.params:
            if param.grad is not None and (shard := local(param)).numel():
                shard.grad = local(param.grad)
                shards.append(shard)
        return shards

    @torch.no_grad()
    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients as one vector: a plain scalar, the same on every rank (pytorch#170862)."""
        grads = [shard.grad for shard in self._shards() if shard.grad is not None]
        dtype = reduce(torch.promote_types, (param.dtype for param in self.params), torch.float32)
        return norm.total(grads, norm_type, self._group_of_shards(), self._device, dtype)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` on whole gradients; returns the norm before, the same on every rank."""
        total = self.grad_norm(norm_type)
        norm.clip_(self._shards(), max_norm, total, error_if_nonfinite)
        return total

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """As ``torch.nn.utils.clip_grad_value_`` on whole gradients."""
        nn.utils.clip_grad_value_(self._shards(), clip_value)

    def _group_of_shards(self) -> Group:
        """The ranks that have one shard each; of a mesh with replicas, those of this rank's replica."""
        for param in self.params:
            if isinstance(param, DTensor):
                return Group(cut_of(param).group)
        return Group()

    @property
    def _device(self) -> torch.device:
        return next((local(param).device for param in self.params), torch.device("cpu"))

    # -- state

    def sharded_state_dict(self) -> dict[str, Any]:
        """As the plain optimizer's, with DTensors in the state: for ``torch.distributed.checkpoint``.

        Raises:
            RuntimeError: where whole parameters are stepped, whose state is no DTensor.
        """
        if not self.elementwise and self._owners:
            raise RuntimeError(
                f"the state of {type(self.optimizer).__name__} is that of whole parameters, each on one rank, and has "
                "no sharded form; use state_dict"
            )
        return self.optimizer.state_dict()

    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse of `sharded_state_dict`."""
        if not self.elementwise and any(isinstance(param, DTensor) for param in self.params):
            raise RuntimeError(f"the state of {type(self.optimizer).__name__} has no sharded form; use load_state_dict")
        self.optimizer.load_state_dict(state_dict)
        self._rejoin()

    def _rejoin(self) -> None:
        """torch's load_state_dict makes new objects of what this shares with the optimizer."""
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """On rank 0 what the plain optimizer's ``state_dict()`` would be, on the CPU; an empty dict on the others.

        Parameter by parameter: rank 0 has the whole state, no other rank more than its own and one tensor under way.

        Raises:
            RuntimeError: another rank did not call it.
        """
        self.group.meet("state_dict")
        packed = self._packed()
        state: dict[int, dict[str, Any]] = {}
        for number, param in enumerate(self.params):
            if isinstance(param, DTensor) and not self.elementwise:
                its = self._from_owner(param)
            else:
                its = {name: self._on_rank_0(value) for name, value in self.state.get(param, {}).items()}
            if its:
                state[number] = its
        return {"state": state, **packed} if self.group.rank == 0 else {}

    def _packed(self) -> dict[str, Any]:
        """The plain state dict without the state."""
        held, self.optimizer.state = self.optimizer.state, type(self.optimizer.state)(dict)
        try:
            packed = self.optimizer.state_dict()
        finally:
            self.optimizer.state = held
        return {name: value for name, value in packed.items() if name != "state"}

    def _on_rank_0(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            (whole,) = gather([(value, 0)])
            return whole.cpu() if whole is not None else None
        return value.to("cpu", copy=True) if isinstance(value, Tensor) else value

    def _from_owner(self, param: DTensor) -> dict[str, Any]:
        """The state of a parameter that one rank has whole, on rank 0; on the others nothing of use."""
        cut, owner = cut_of(param), self._owner(param)
        group = Group(cut.group)
        mine = self._whole_state.get(param, {}) if cut.rank == owner else {}
        if owner == 0:
            return {name: self._on_rank_0(value) for name, value in mine.items()}
        header = group.everyones(
            {name: (value.shape, value.dtype) if isinstance(value, Tensor) else value for name, value in mine.items()},
            local(param).device,
        )[owner]
        its: dict[str, Any] = {}
        for name, value in header.items():
            if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype)):
                its[name] = value
            elif cut.rank == owner:
                group.send(mine[name].contiguous().to(local(param).device), 0)
            elif cut.rank == 0:
                received = torch.empty(value[0], dtype=value[1], device=local(param).device)
                its[name] = group.receive(received, owner).cpu()
        return its

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part of what the plain optimizer, or `state_dict` at any world size, has said.

        Every rank has the whole dict, best from ``torch.load(mmap=True)``, of which it then reads its part.

        Raises:
            ValueError: on every rank, if on one of them it is another optimizer's; nothing is changed then.
        """
        self.group.refuse_together(self._refusal(state_dict), self._device)
        params, ids = self.params, [number for saved in state_dict["param_groups"] for number in saved["params"]]
        whole = dict(zip(ids, params, strict=True))
        stand_ins: dict[Tensor, Tensor] = {}
        state: dict[int, dict[str, Any]] = {}
        for number, param in whole.items():
            its = state_dict["state"].get(number)
            if isinstance(param, DTensor) and not self.elementwise:
                stand_ins[param] = self._whole(param)
                if self._owner(param) != cut_of(param).rank:
                    its = None
            if its is not None:
                state[number] = {name: self._own_part(value, param) for name, value in its.items()}
        with self._stepping(stand_ins):
            self._whole_state.clear()
            self.optimizer.load_state_dict({**state_dict, "state": state})
            self._rejoin()
            for param in stand_ins:
                if (stood := self._wholes[param]) in self.state:
                    self._whole_state[param] = self.state.pop(stood)
                if self._owner(cast(DTensor, param)) != cut_of(cast(DTensor, param)).rank:
                    del self._wholes[param]

    def _own_part(self, value: Any, param: Tensor) -> Any:
        """A copy: torch's optimizers keep what they are given, and may not write to the caller's, or to a file."""
        if not isinstance(value, Tensor):
            return value
        if self.elementwise and isinstance(param, DTensor) and value.shape == param.shape:
            return take_shard(value, param)
        return value.clone()

    def _refusal(self, state_dict: Any) -> str | None:
        """Why this is no state of the optimizer, or None."""
        try:
            ours = [len(each["params"]) for each in self.param_groups]
            theirs = [len(each["params"]) for each in state_dict["param_groups"]]
            if ours != theirs:
                return (
                    f"the state dict must be of an optimizer with the same param groups, of {ours} parameters, got one "
                    f"of {theirs}; make the optimizer as the one that was saved"
                )
            ids = [number for saved in state_dict["param_groups"] for number in saved["params"]]
            for number, param in zip(ids, self.params, strict=True):
                for name, value in state_dict["state"].get(number, {}).items():
                    if isinstance(value, Tensor) and not self._fits(value, param):
                        return (
                            f"{name!r} of parameter {number} must fit the parameter's shape {tuple(param.shape)}, got "
                            f"{tuple(value.shape)}: the state dict is of another model"
                        )
        except (AttributeError, IndexError, KeyError, TypeError) as error:  # others would wait for this rank
            what = "an optimizer's state dict must have 'state' and 'param_groups' as torch makes them; this has not"
            return f"{what}: {error!r}"
        return None

    def _fits(self, value: Tensor, param: Tensor) -> bool:
        if value.numel() == 1 or value.shape == param.shape:
            return True
        if self.elementwise:
            return False
        # Adafactor's rows and columns; what the optimizers of others keep of a whole matrix, nobody can know.
        factor = value.ndim == param.ndim and all(n in (1, m) for n, m in zip(value.shape, param.shape, strict=True))
        return factor or not type(self.optimizer).__module__.startswith("torch.optim.")


def _as_dtensors(state: dict[str, Any], param: Tensor, before: dict[str, Any]) -> dict[str, Any]:
    """The state of a shard as that of the DTensor; the DTensors that there were stay the same objects."""
    shape = local(param).shape
    whole: dict[str, Any] = {}
    for name, value in state.items():
        old = before.get(name)
        if isinstance(old, DTensor) and old.to_local().data_ptr() == value.data_ptr() and old.to_local().numel():
            whole[name] = old
        elif isinstance(value, Tensor) and value.shape == shape:
            whole[name] = shard_like(value, cast(DTensor, param))
        else:
            whole[name] = value
    return whole
