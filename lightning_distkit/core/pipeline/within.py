"""A pipe inside a larger module, which keeps its shape on every rank.

The `nn.Sequential` stays where it is, under its names; what its ``forward`` does is done by a `DistributedPipe`. The
parameters of other stages become placeholders on the meta device, which take no memory: so names, their order, and the
numbers of parameters in an optimizer are those of the whole module on every rank, and whoever makes an optimizer, a
summary or a copy need not know of the pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.pipeline.batchnorm import revert
from lightning_distkit.core.pipeline.dist import DistributedPipe
from lightning_distkit.core.pipeline.placeholder import Absent, Placeholder


def find_sequential(module: nn.Module, given: str | nn.Module | None = None) -> tuple[str, nn.Sequential]:
    """The part of ``module`` that can be cut into stages, and its path.

    Args:
        given: the path, or the part itself; by default the one `nn.Sequential` that is in no other.

    Raises:
        ValueError: there is none, or there are several; or what is given is none.
    """
    candidates = _outermost(module)
    listed = ", ".join(repr(path) for path in candidates) or "none"
    what = f"the layers of {type(module).__name__} that become stages must be an nn.Sequential"
    if given is None:
        if len(candidates) != 1:
            raise ValueError(f'{what}, and one alone if it is not named, found {listed}; name it: module="path.to.it"')
        return next(iter(candidates.items()))
    if isinstance(given, nn.Module):
        paths = [path for path, each in module.named_modules() if each is given]
        if not paths:
            raise ValueError(f"{what} that is in it, got a {type(given).__name__} that is not; found {listed}")
        path, found = paths[0], given
    else:
        try:
            path, found = given, module.get_submodule(given)
        except AttributeError:
            raise ValueError(f"{what}, and nothing is at {given!r}; found {listed}") from None
    if not is_plain_sequential(found):
        own = "with a forward of its own, " if isinstance(found, nn.Sequential) else ""
        raise ValueError(
            f"{what}, {own}got {type(found).__name__} at {path!r}; write its forward as a sequence of layers"
        )
    assert isinstance(found, nn.Sequential)
    return path, found


def _outermost(module: nn.Module) -> dict[str, nn.Sequential]:
    found: dict[str, nn.Sequential] = {}
    for path, each in module.named_modules():
        inside = any(not other or path.startswith(f"{other}.") for other in found)
        if isinstance(each, nn.Sequential) and is_plain_sequential(each) and not inside:
            found[path] = each
    return found


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether it is an `nn.Sequential` that calls its layers one after another, and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


class _Entrance:
    """What the `nn.Sequential` does in the place of its ``forward``."""

    def __init__(self, pipe: DistributedPipe, sequential: nn.Sequential) -> None:
        self.pipe = pipe
        self.sequential = sequential
        self.instead: Callable[..., Any] | None = None  # of calling the pipe

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.pipe.training = self.sequential.training
        return (self.instead or self.pipe)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Entrance:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a module with a pipe inside cannot be pickled; save its state dict")


class PipeWithin:
    """Puts a pipe into ``module`` in the place of one of its `nn.Sequential`\\ s, until `restore` or `abandon`.

    Args:
        module: in the same form and with the same values on every rank, on the CPU; other stages' layers are let go.
        path: that of the `nn.Sequential`.
        make: makes the pipe of it.

    Raises:
        ValueError: on every rank, if a parameter is in the `nn.Sequential` and outside of it.
    """

    def __init__(self, module: nn.Module, path: str, make: Callable[[nn.Sequential], DistributedPipe]) -> None:
        self.module = module
        self.path = path
        found = module.get_submodule(path)
        assert isinstance(found, nn.Sequential)
        self.sequential = found
        self._refuse_shared()
        names = list(found._modules)
        self.pipe = make(found)
        stage_of = [stage for stage, count in enumerate(self.pipe.balance) for _ in range(count)]
        self._stage_of = dict(zip(names, stage_of, strict=True))
        for name in self.pipe._modules:  # it may have put others in their places
            setattr(found, name, self.pipe._modules[name])
        self._inside = self._counted_at()
        self._originals: dict[Placeholder, nn.Parameter] = {}
        self._handles: list[RemovableHandle] = []
        self._let_go()
        self.entrance = _Entrance(self.pipe, found)
        found.forward = self.entrance  # type: ignore[method-assign]

    # What is where

    def rank_of(self, layer: str) -> int:
        """The pipeline rank that has a layer of the `nn.Sequential`."""
        return self._stage_of[layer] % self.pipe.n_ranks

    def owner(self, key: str) -> int | None:
        """The pipeline rank that has what is under ``key`` in the whole module's state dict; None if all have it."""
        prefix = f"{self.path}." if self.path else ""
        if not key.startswith(prefix):
            return None
        layer = key[len(prefix) :].split(".", maxsplit=1)[0]
        return self.rank_of(layer) if layer in self._stage_of else None

    def outside(self) -> list[nn.Parameter]:
        """The parameters that every rank has, in order."""
        return [each for each in self.module.parameters() if each not in self._inside]

    def sync_outside(self, stages: Group, syncs: bool | None) -> None:
        """Make the gradients of the parameters that every rank has the first stage's on all. Collective.

        Args:
            stages: the pipe's ranks.
            syncs: whether to; by default where kernels may add in any order: on CUDA, unless torch uses deterministic
                algorithms.
        """
        if syncs is None:
            syncs = self.pipe.device.type != "cpu" and not torch.are_deterministic_algorithms_enabled()
        for parameter in self.outside() if syncs else ():
            if parameter.grad is not None:
                stages.broadcast_(parameter.grad).wait()

    def counts(self, parameter: Tensor) -> bool:
        """Whether this is the rank on which the parameter counts in a sum over all stages; each has one."""
        return self._inside.get(parameter, 0) == self.pipe.rank

    def average_when_done(self) -> None:
        """Called within a backward: average gradients over the data replicas at its end."""
        self.pipe._averaging.queue()

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """As the pipe's own, but parameters have the names of the whole module, on every rank alike."""
        if hasattr(hook, "checked_state"):
            hook.checked_state(state).claim(self.module)
        self.pipe._averaging.use_hook(state, hook)

    def _counted_at(self) -> dict[Tensor, int]:
        """Of each parameter of the pipe the rank on which it counts: the first that has it."""
        counted: dict[Tensor, int] = {}
        for name, layer in self.sequential._modules.items():
            for parameter in layer.parameters() if layer is not None else ():
                counted[parameter] = min(counted.get(parameter, self.pipe.n_ranks), self.rank_of(name))
        return counted

    def _refuse_shared(self) -> None:
        inside = set(self.sequential.modules())
        names = {parameter: name for name, parameter in self.sequential.named_parameters(self.path)}
        for path, each in self.module.named_modules():
            for key, parameter in each._parameters.items() if each not in inside else ():
                if parameter in names:
                    raise ValueError(
                        f"a parameter must be either in the pipe or outside of it, but {names[parameter]} is "
                        f"{f'{path}.{key}'.lstrip('.')} as well; put both layers into the nn.Sequential"
                    )

    # Other stages' layers

    def _foreign(self) -> Iterator[tuple[str, nn.Module]]:
        for name, layer in self.sequential._modules.items():
            if layer is not None and self.rank_of(name) != self.pipe.rank:
                yield name, layer

    def _let_go(self) -> None:
        own = set(self.pipe.parameters())
        made: dict[nn.Parameter, Placeholder] = {}
        for name, layer in self._foreign():
            owner = f"stage {self._stage_of[name]} (rank {self.rank_of(name)} of the pipe)"
            for each in layer.modules():
                for key, parameter in each._parameters.items():
                    if parameter is None or parameter in own:
                        continue
                    if parameter not in made:
                        made[parameter] = Placeholder.of(parameter, owner)
                    each._parameters[key] = made[parameter]
                _let_go_of_buffers(each, owner)
                self._handles.append(each.register_load_state_dict_pre_hook(_load_nothing))
        for parameter, placeholder in made.items():
            self._inside[placeholder] = self._inside.pop(parameter)
            if not parameter.is_meta:
                # The object comes back with the values; until then it has no memory, whoever else holds it.
                parameter.data, parameter.grad = parameter.data.new_empty(0), None
                self._originals[placeholder] = parameter

    def empty_copy(self, copied: nn.Module) -> None:
        """Let go of other stages' layers in a copy of the module that was made before, or of a part of it."""
        part = copied.get_submodule(self.path)
        own = {each for name, layer in part.named_children() for each in layer.parameters() if self._is_own(name)}
        made: dict[nn.Parameter, Placeholder] = {}
        for name, layer in part.named_children():
            owner = f"stage {self._stage_of[name]}"
            for each in layer.modules() if not self._is_own(name) else ():
                for key, parameter in each._parameters.items():
                    if parameter is not None and parameter not in own:
                        if parameter not in made:
                            made[parameter] = Placeholder.of(parameter, owner)
                        each._parameters[key] = made[parameter]
                _let_go_of_buffers(each, owner)
                each.register_load_state_dict_pre_hook(_load_nothing)

    def _is_own(self, layer: str) -> bool:
        return self.rank_of(layer) == self.pipe.rank

    # The end

    def abandon(self) -> None:
        """Take the pipe out and leave other stages' layers as they are: not collective."""
        vars(self.sequential).pop("forward", None)
        self.pipe.also_average(())
        for handle in self._handles:
            handle.remove()
        revert(self.sequential)

    @torch.no_grad()
    def restore(self, group: Group, ranks: Sequence[int]) -> None:
        """Take the pipe out, and make the module whole again on these ranks of the pipe. Collective.

        Args:
            group: the pipe's ranks, for messages on the CPU.
        """
        self.abandon()
        own = {name: _contents(layer) for name, layer in self.sequential.named_children() if self._is_own(name)}
        headers = group.everyones({name: its[0] for name, its in own.items()}, torch.device("cpu"))
        restored: dict[Tensor, nn.Parameter] = {}
        for name, layer in self.sequential.named_children():
            source = self.rank_of(name)
            tensors = own[name][1] if self._is_own(name) else []
            for n, (where, key, is_parameter, shape, dtype) in enumerate(headers[source][name]):
                wanted = [rank for rank in ranks if rank != source]
                if group.rank == source:
                    for rank in wanted:
                        group.send(tensors[n].detach().to("cpu").contiguous(), rank)
                elif group.rank in wanted:
                    value = group.receive(torch.empty(shape, dtype=dtype), source)
                    self._put(layer.get_submodule(where), key, is_parameter, value, restored)

    def _put(
        self, module: nn.Module, key: str, is_parameter: bool, value: Tensor, restored: dict[Tensor, nn.Parameter]
    ) -> None:
        if not is_parameter:
            module._buffers[key] = value
            return
        before = module._parameters.get(key)
        if before is not None and not before.is_meta:
            return  # tied to one that is here
        if before is None or before not in restored:
            original = self._originals.get(before) if isinstance(before, Placeholder) else None
            parameter = original if original is not None else nn.Parameter(value)
            parameter.data = value
            if before is not None:
                parameter.requires_grad_(before.requires_grad)
                restored[before] = parameter
        module._parameters[key] = parameter if before is None else restored[before]


def _let_go_of_buffers(module: nn.Module, owner: str) -> None:
    for key, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[key] = Absent.of(buffer, owner)


def _load_nothing(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """What is loaded into a placeholder need only have its shape."""
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        given = state_dict.get(prefix + key)
        if isinstance(tensor, Absent) and isinstance(given, Tensor):
            state_dict[prefix + key] = given.to("meta")


_Header = list[tuple[str, str, bool, torch.Size, torch.dtype]]


def _contents(layer: nn.Module) -> tuple[_Header, list[Tensor]]:
    """Where in a layer its tensors are, and they."""
    header: _Header = []
    tensors: list[Tensor] = []
    for path, each in layer.named_modules():
        for slots, are_parameters in ((each._parameters, True), (each._buffers, False)):
            for key, tensor in slots.items():
                if tensor is not None:
                    header.append((path, key, are_parameters, tensor.shape, tensor.dtype))
                    tensors.append(tensor)
    return header, tensors
