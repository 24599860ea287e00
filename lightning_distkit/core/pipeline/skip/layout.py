"""Which layers stash and which pop, as far as it can be told before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import nn

from lightning_distkit.core.pipeline.skip.skippable import Skippable
from lightning_distkit.core.pipeline.skip.tracker import SkipKey


def skippables(module: nn.Module) -> Iterator[Skippable]:
    """The skippable layers in ``module``, in order; also those inside others."""
    return (each for each in module.modules() if isinstance(each, Skippable))


def verify_skippables(module: nn.Sequential) -> None:
    """See to it that each skip tensor is stashed by one layer and popped by one further on.

    Raises:
        TypeError: some are not; it names all of them.
    """
    stashed: set[SkipKey] = set()
    popped: set[SkipKey] = set()
    faults: list[str] = []
    for layers in _layers(module):
        for name, layer in layers:
            for both in sorted(layer.stashable_names & layer.poppable_names):
                faults.append(f"'{name}' declared '{both}' both as stashable and as poppable")
        for name, key in _keys(layers, Skippable.stashable):
            if key in stashed:
                faults.append(f"'{name}' redeclared '{key[1]}' as stashable but not isolated by namespace")
            stashed.add(key)
        for name, key in _keys(layers, Skippable.poppable):
            if key in popped:
                faults.append(f"'{name}' redeclared '{key[1]}' as poppable but not isolated by namespace")
            elif key not in stashed:
                faults.append(f"'{name}' declared '{key[1]}' as poppable but it was not stashed")
            else:
                popped.add(key)
    for unused in sorted(key[1] for key in stashed - popped):
        faults.append(f"no module declared '{unused}' as poppable but stashed")
    if faults:
        raise TypeError(
            "one or more pairs of stash and pop do not match:\n\n" + "\n".join(f"* {fault}" for fault in faults)
        )


def skip_layout(partitions: Iterable[nn.Module]) -> dict[SkipKey, tuple[int, int]]:
    """The partition that stashes each skip tensor, and the one that pops it; in the same order on every rank.

    The pairs must have been verified.
    """
    stashes: dict[SkipKey, int] = {}
    pops: dict[SkipKey, int] = {}
    for n, partition in enumerate(partitions):
        for layer in skippables(partition):
            stashes.update(dict.fromkeys(layer.stashable(), n))
            pops.update(dict.fromkeys(layer.poppable(), n))
    return {key: (n, pops[key]) for key, n in stashes.items()}


Named = tuple[str, Skippable]


def _layers(module: nn.Sequential, prefix: str = "") -> Iterator[list[Named]]:
    """The skippable layers in each layer, with their names: mostly one, and of several no order is known."""
    for name, layer in module._modules.items():
        if isinstance(layer, nn.Sequential):
            yield from _layers(layer, f"{prefix}{name}.")
        elif layer is not None:
            named = layer.named_modules(prefix=prefix + name, remove_duplicate=False)
            yield [(path, each) for path, each in named if isinstance(each, Skippable)]


def _keys(layers: Iterable[Named], of: Callable[[Skippable], Iterable[SkipKey]]) -> Iterator[tuple[str, SkipKey]]:
    for name, layer in layers:
        both = layer.stashable_names & layer.poppable_names
        yield from ((name, key) for key in of(layer) if key[1] not in both)
