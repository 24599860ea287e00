"""Layers that hand tensors to layers further on, past those between.

Source: torchgpipe (Kim et al., 2020, https://arxiv.org/abs/2004.09910), section 3.3; the interface and the messages are
those of torch.distributed.pipeline.sync.skip.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from lightning_distkit.core.pipeline.skip.namespace import Namespace
from lightning_distkit.core.pipeline.skip.tracker import SkipKey, current

S = TypeVar("S", bound="Skippable")


class stash:  # noqa: N801  # torch's name
    """What a skippable layer yields to stash a tensor: ``yield stash("name", tensor)``.

    Raises:
        TypeError: it is neither a tensor nor None.
    """

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"a tensor or None can be stashed, got {type(tensor).__name__} as '{name}'")
        self.name = name
        self.tensor = tensor


class pop:  # noqa: N801
    """What a skippable layer yields to get one that another layer has stashed: ``tensor = yield pop("name")``."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Skippable(nn.Module):
    """The base of what `skippable` makes; not to be used by itself.

    ``module``, of ``module_cls``, is the layer as it was written.
    """

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def namespaced(self, name: str) -> SkipKey:
        """The key of a skip tensor of this layer."""
        return self.namespaces.get(name), name

    def stashable(self) -> Iterable[SkipKey]:
        """The keys of the skip tensors that this layer stashes, in one order on every rank."""
        return [self.namespaced(name) for name in sorted(self.stashable_names)]

    def poppable(self) -> Iterable[SkipKey]:
        """The keys of those that it pops."""
        return [self.namespaced(name) for name in sorted(self.poppable_names)]

    def isolate(self: S, ns: Namespace, *, only: Iterable[str] | None = None) -> S:
        """Put skip tensors of this layer into a namespace, as a name may be used once in each.

        Args:
            ns: where; the layer at the other end must be put there, too.
            only: the names; all by default.

        Returns:
            this layer.

        Raises:
            ValueError: the layer has no skip tensor of such a name.
        """
        names = self.stashable_names | self.poppable_names
        isolated = names if only is None else {only} if isinstance(only, str) else set(only)
        if isolated - names:
            raise ValueError(f"only= must name skip tensors of this layer, {_listed(names)}; got {_listed(isolated)}")
        self.namespaces.update(dict.fromkeys(isolated, ns))
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer and do what it yields.

        Raises:
            RuntimeError: it stashes or pops what it did not declare, or does not what it did; or what it wants to pop
                has not been stashed.
            TypeError: it yields something else.
        """
        tracker = current()
        popped = {key[1]: tracker.load(key) for key in self.poppable()}
        stashed: dict[str, Tensor | None] = {}

        def do(command: Any) -> Tensor | None:
            if isinstance(command, stash):
                if command.name not in self.stashable_names:
                    raise RuntimeError(f"'{command.name}' has not been declared as stashable")
                stashed[command.name] = command.tensor
                return None
            if isinstance(command, pop):
                if command.name not in self.poppable_names:
                    raise RuntimeError(f"'{command.name}' has not been declared as poppable")
                if command.name not in popped:
                    raise RuntimeError(f"'{command.name}' has been popped already")
                return popped.pop(command.name)
            raise TypeError(f"{command!r} is not a command from @skippable")

        output = self.module(*args, **kwargs)
        if isinstance(output, Generator):  # not so if there is no yield in it
            output = _driven(output, do)
        if missing := self.stashable_names - stashed.keys():
            raise RuntimeError(f"{_listed(missing)} must be stashed but have not")
        if popped:
            raise RuntimeError(f"{_listed(popped)} must be popped but have not")
        for key in self.stashable():
            tracker.save(key, stashed[key[1]])
        return output


def _driven(generator: Generator[Any, Tensor | None, Any], do: Callable[[Any], Tensor | None]) -> Any:
    """What the generator returns, after each of its commands was done."""
    answer = None
    while True:
        try:
            command = generator.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = do(command)


def isolate(layer: S, ns: Namespace, *, only: Iterable[str] | None = None) -> S:
    """`Skippable.isolate` as a function."""
    return layer.isolate(ns, only=only)


def skippable(
    stash: Iterable[str] = (),
    pop: Iterable[str] = (),
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Decorate a module whose ``forward`` yields `stash` and `pop` commands, each name of which is declared here.

    ::

        @skippable(stash=["1to3"])
        class Layer1(nn.Module):
            def forward(self, input):
                yield stash("1to3", input)
                return f1(input)

        @skippable(pop=["1to3"])
        class Layer3(nn.Module):
            def forward(self, input):
                skip = yield pop("1to3")
                return f3(input) + skip

    Each skip tensor has one layer that stashes and one, further on, that pops it. It works in a plain `nn.Sequential`
    as well; in a pipe the tensor goes from the stage of the one straight to the stage of the other.

    Args:
        stash: the names that it stashes.
        pop: the names that it pops.

    Returns:
        a decorator; of a module class it makes a `Skippable` one.
    """
    stashable, poppable = _names(stash), _names(pop)

    def decorated(module_cls: type[nn.Module]) -> type[Skippable]:
        # The name in the user's file will mean the outer class, so that is where pickle must find the inner one.
        where = {"__module__": module_cls.__module__, "__doc__": module_cls.__doc__}
        name, path = module_cls.__name__, module_cls.__qualname__
        inner = type(name, (module_cls,), {**where, "__qualname__": f"{path}.module_cls"})
        names = {"stashable_names": stashable, "poppable_names": poppable}
        return type(name, (Skippable,), {**where, **names, "__qualname__": path, "module_cls": inner})

    return decorated


def _names(names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"stash= and pop= must be lists of names, got the string {names!r}; write [{names!r}]")
    return frozenset(names)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names))
