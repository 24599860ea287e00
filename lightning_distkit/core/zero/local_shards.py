"""What this rank holds of a sharded module, as plain parameters: for code that treats every element alike.

Averages of weights are such code: shard by shard they are what they would be over whole parameters, and nothing is
sent.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_distkit.core.zero.fsdp_state import reshard
from lightning_distkit.core.zero.module_state import gathered
from lightning_distkit.core.zero.sharding import sharding_of
from lightning_distkit.core.zero.whole_tensors import full, local, shard_like, take_shard

Module = TypeVar("Module", bound=nn.Module)


@contextmanager
def local_shards(module: nn.Module) -> Iterator[None]:
    """Within this, the parameters of ``module`` are plain: this rank's shards, the same memory. Not collective.

    In the order of ``parameters()``, tied ones still tied, some without elements. Forwards work as ever. On CUDA, what
    is done to them belongs on the current stream, for which the gathers of the next forward wait.
    """
    reshard(module)
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    replaced: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for each in module.modules():
        for name, param in each._parameters.items():
            if isinstance(param, DTensor):
                if param not in stand_ins:
                    stand_ins[param] = nn.Parameter(local(param), requires_grad=param.requires_grad)
                each._parameters[name] = stand_ins[param]
                replaced.append((each._parameters, name, param))
    try:
        yield
    finally:
        for parameters, name, param in replaced:
            if parameters.get(name) is stand_ins[param]:  # a forward has put back by itself what belongs there
                parameters[name] = param


def without_weights(module: Module) -> Module:
    """A deep copy of a plain module whose parameters have no elements, so no memory."""
    params = {
        param: nn.Parameter(param.new_empty(0, device="cpu"), param.requires_grad) for param in module.parameters()
    }
    return copy.deepcopy(module, {id(param): empty for param, empty in params.items()})


class ShardedCopy:
    """A copy of a sharded module that has this rank's shards as plain parameters, and speaks of whole ones.

    Its ``state_dict()`` is collective: whole on rank 0, on the CPU, and empty on the others. Its ``load_state_dict``
    takes a whole one, on every rank.

    Args:
        copied: a plain module of the structure of ``module``, which is changed in place.
        module: what `shard_parameters` has returned.
        takes_values: whether it begins with the values of ``module``, as one `without_weights`, or keeps its own.
    """

    @torch.no_grad()
    def __init__(self, copied: nn.Module, module: nn.Module, *, takes_values: bool) -> None:
        sharding = sharding_of(module)
        if sharding is None:
            raise ValueError("the module must be sharded, but is plain: copy it as it is")
        reshard(module)
        self.copied = copied
        self._group = sharding.group
        self._cut_as = {  # by all their names
            name: param for name, param in module.named_parameters(remove_duplicate=False) if isinstance(param, DTensor)
        }
        own = dict(copied.named_parameters(remove_duplicate=False))
        shards: dict[DTensor, nn.Parameter] = {}
        for name, like in self._cut_as.items():
            if like not in shards:
                shard = local(like).clone() if takes_values else local(take_shard(own[name].detach(), like))
                device = shard.device if takes_values else own[name].device
                shards[like] = nn.Parameter(shard.to(device), requires_grad=like.requires_grad)
            _put(copied, "_parameters", name, shards[like])
        if takes_values:
            for name, buffer in module.named_buffers(remove_duplicate=False):
                _put(copied, "_buffers", name, buffer.detach().clone())
        self._hooks = [
            copied.register_state_dict_post_hook(partial(self._gather)),  # torch marks it, and cannot mark a method
            copied.register_load_state_dict_pre_hook(self._cut),
        ]

    def _gather(self, _: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        own = {name: state.pop(name) for name in list(state) if name.startswith(prefix)}
        self._group.meet("the state_dict of a sharded copy")
        values: dict[str, Any] = {name.removeprefix(prefix): value for name, value in own.items()}
        whole = gathered(self._as_dtensors(values), self._group)
        state.update({prefix + name: value for name, value in whole.items()})

    def _as_dtensors(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """With the same object for tied parameters."""
        dtensors = {like: shard_like(values[name].to(like.device), like) for name, like in self._cut_as.items()}
        return {name: dtensors[self._cut_as[name]] if name in self._cut_as else each for name, each in values.items()}

    def _cut(self, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for name, like in self._cut_as.items():
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == like.shape:  # or else torch says what is wrong
                state[prefix + name] = local(take_shard(value, like))

    @torch.no_grad()
    def make_whole(self) -> None:
        """Have ``copied`` be plain again, with whole parameters on every rank. Collective."""
        self.forget()
        own = dict(self.copied.named_parameters(remove_duplicate=False))
        wholes: dict[DTensor, nn.Parameter] = {}
        for name, like in self._cut_as.items():
            if like not in wholes:
                whole = full(shard_like(own[name].detach().to(like.device), like)).to(own[name].device)
                wholes[like] = nn.Parameter(whole, requires_grad=own[name].requires_grad)
            _put(self.copied, "_parameters", name, wholes[like])

    def forget(self) -> None:
        """Have ``copied`` be plain again, with what parameters this rank has. Not collective."""
        for each in self._hooks:
            each.remove()


def _put(module: nn.Module, kind: str, name: str, value: Tensor) -> None:
    at, _, last = name.rpartition(".")
    getattr(module.get_submodule(at), kind)[last] = value
