"""Which modules of a model are sharded as one block each: gathered before their forward, freed after it."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from torch import nn

AUTO_NUMEL = 100_000  # elements from which "auto" takes a child, where nothing repeats

Policy = str | int | type[nn.Module] | Iterable[type[nn.Module]] | Callable[[str, nn.Module], bool] | None
"""How to find the blocks; see `find_blocks`."""

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def find_blocks(module: nn.Module, policy: Policy = "auto") -> dict[str, nn.Module]:
    """The blocks and their names, in the order of ``module.named_modules()``; the root is none of them.

    Args:
        policy: one of

            - ``"auto"``: the elements of each ModuleList or Sequential whose class occurs there more than once, as the
              layers of a transformer do, and none within them; where there are none, the children with at least
              100,000 elements; where there are none either, no block.
            - ``"children"``: those of ``"auto"``, and each child (of a ModuleList or ModuleDict each element), so that
              the root keeps only parameters of its own: for several backwards in one forward of the root.
            - a module class, its import path, or several classes: all modules of them, nested ones, too.
            - a number of elements: from the leaves upwards, each module that holds so many outside of blocks below it.
            - ``f(name, module) -> bool``.
            - None: no block, all in one.

    Raises:
        ValueError: the policy matches nothing, or a module without a forward of its own.
        TypeError: it is none of these.
    """
    if policy is None:
        return {}
    if policy == "children":
        chosen = {*find_blocks(module, "auto").values(), *_children(module)}
        return {name: each for name, each in module.named_modules() if each in chosen}
    if policy == "auto":
        return _repeated(module) or {
            name: child
            for name, child in module.named_children()
            if _numel(child) >= AUTO_NUMEL and not isinstance(child, _WITHOUT_FORWARD)
        }
    if isinstance(policy, str) and "." in policy:  # as LightningCLI gives a class
        module_name, _, name = policy.rpartition(".")
        policy = getattr(importlib.import_module(module_name), name)
    if isinstance(policy, int) and not isinstance(policy, bool):
        if policy < 1:
            raise ValueError(f"the elements of a block must be at least 1, got {policy}")
        blocks = _by_numel(module, policy)
    else:
        wanted = _predicate(policy)
        blocks = {name: each for name, each in module.named_modules() if each is not module and wanted(name, each)}
    if not blocks:
        classes = sorted({type(each).__name__ for each in module.modules() if each is not module})
        raise ValueError(
            f"the policy must match at least one module below the root, but {policy!r} matches none of "
            f"{type(module).__name__}; its modules are {', '.join(classes) or 'none'}. policy=None shards it as one"
        )
    for name, each in blocks.items():
        if isinstance(each, _WITHOUT_FORWARD):
            raise ValueError(
                f"a block must have a forward, but the policy matches {name!r}, a {type(each).__name__}; let it match "
                "the elements"
            )
    return blocks


def _predicate(policy: object) -> Callable[[str, nn.Module], bool]:
    if isinstance(policy, type) and issubclass(policy, nn.Module):
        policy = (policy,)
    if isinstance(policy, Iterable) and not isinstance(policy, str):
        classes = tuple(policy)
        if all(isinstance(each, type) and issubclass(each, nn.Module) for each in classes):
            return lambda _, each: isinstance(each, classes)
    elif callable(policy) and not isinstance(policy, type):
        return lambda name, each: bool(policy(name, each))
    raise TypeError(
        "policy must be 'auto', 'children', a module class or several, a number of elements, f(name, module) -> bool "
        f"or None, got {policy!r}"
    )


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Those with parameters, and a forward in which to gather them."""
    for child in module.children():
        if isinstance(child, _WITHOUT_FORWARD):
            yield from _children(child)
        elif _numel(child):
            yield child


def _repeated(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Outermost repeated elements; what is below one is not looked at."""
    blocks: dict[str, nn.Module] = {}
    children = {name: child for name, child in module.named_children() if _numel(child)}
    n_of_class = Counter(type(child) for child in children.values())
    for name, child in children.items():
        repeated = isinstance(module, nn.ModuleList | nn.Sequential) and n_of_class[type(child)] > 1
        if repeated and not isinstance(child, _WITHOUT_FORWARD):
            blocks[prefix + name] = child
        else:
            blocks.update(_repeated(child, f"{prefix}{name}."))
    seen: dict[int, str] = {}
    return {name: each for name, each in blocks.items() if seen.setdefault(id(each), name) == name}


def _by_numel(module: nn.Module, least: int) -> dict[str, nn.Module]:
    chosen: set[nn.Module] = set()
    taken: set[int] = set()  # ids of parameters

    def visit(each: nn.Module) -> None:
        for child in each.children():
            visit(child)
        free = {id(parameter): parameter.numel() for parameter in each.parameters() if id(parameter) not in taken}
        if each is not module and not isinstance(each, _WITHOUT_FORWARD) and sum(free.values()) >= least:
            chosen.add(each)
            taken.update(free)

    visit(module)
    return {name: each for name, each in module.named_modules() if each in chosen}
