"""A sharded module on the meta device, initialised as the plain one is: a layer at a time, by rank 0's random numbers.

Every rank draws what rank 0 would have drawn for the whole module and keeps its shard. So the values are those of the
module made on the CPU after the same ``torch.manual_seed``, for modules that draw in ``reset_parameters`` at the end of
their construction, as torch's do, and for those with transformers' ``_init_weights`` on top; of a tied parameter, those
of the module that is not said to follow (`tied`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.zero.tied import Place, places, tie
from lightning_distkit.core.zero.whole_tensors import cut_of, full, local


def check_initialisable(module: nn.Module) -> None:
    """Raise a ValueError if there is a parameter on meta that nothing initialises, or of which it cannot be known."""
    by_init_weights = callable(getattr(module, "_init_weights", None))
    above: dict[nn.Module, bool] = {}  # whether something above has a reset; torch's attention resets its children
    for each in module.modules():
        above[each] = above.get(each, False) or _reset_of(each) is not None
        for child in each.children():
            above[child] = above.get(child, False) or (above[each] and each is not module)
    for its in places(module):
        if not its[0].param.is_meta:
            continue
        by = [place for place in its if not place.follows and (by_init_weights or above[place.holder])]
        if not by:
            raise ValueError(
                f"a parameter on the meta device must be initialised by reset_parameters of its module, but "
                f"{type(its[0].holder).__name__} has none for {its[0].name}; define it, give state_dict=, or make "
                "the module on a real device"
            )
        if len(by) > 1:
            raise ValueError(
                f"a parameter on the meta device must be initialised by one module, but {' and '.join(_names(by))} are "
                "the same one, and which was made last cannot be seen. Name those that take the other's values in "
                f"_tied_weights_keys of the module, as transformers does (here [{by[-1].name!r}] if the first is to be "
                "kept), give state_dict=, or make the module on a real device"
            )


@torch.no_grad()
def initialise(module: nn.Module, device: torch.device, group: Group, loaded: Collection[str] | None) -> None:
    """Give memory to all that is on meta, and values as ``reset_parameters`` and ``_init_weights`` give them.

    Collective.

    Args:
        loaded: names of what is loaded afterwards and needs no values; None if nothing is.

    Raises:
        ValueError: on every rank, if something has no value afterwards.
    """
    names = {id(each): name for name, each in (*module.named_buffers(), *module.named_parameters()) if each.is_meta}
    wanted: list[nn.Module] = []
    for each in _children_first(module):
        own = [*each.parameters(recurse=False), *each.buffers(recurse=False)]
        if any(id(one) in names and (loaded is None or names[id(one)] not in loaded) for one in own):
            wanted.append(each)
    lost = set(names.values())
    of_params = places(module)
    module._apply(lambda one: _unset(one, device) if one.is_meta else one)
    tie(module, of_params)
    following = {(place.holder, place.attribute) for its in of_params for place in its if place.follows}
    with _random_numbers_of_rank_0(group, device):
        for each in wanted:
            if (reset := _reset_of(each)) is not None:
                with _whole(each, following):
                    reset()
        init_weights: Callable[[nn.Module], None] | None = getattr(module, "_init_weights", None)
        if callable(init_weights) and wanted:
            for each in _children_first(module):
                with _whole(each, following):
                    init_weights(each)
    without = [
        name
        for name, each in (*module.named_parameters(), *module.named_buffers())
        if name in lost and (loaded is None or name not in loaded) and _is_unset(each)
    ]
    missing = torch.tensor([name in without for name in sorted(lost)], dtype=torch.uint8, device=device)
    if missing.numel():
        group.all_reduce(missing, torch.distributed.ReduceOp.MAX).wait()
    if without := [name for name, flag in zip(sorted(lost), missing.tolist(), strict=True) if flag]:
        raise ValueError(
            f"all that was on the meta device must have values now, but {', '.join(without)} has none: "
            "reset_parameters of its module does not set it. Let it, or make the module on a real device"
        )


def _names(its: Sequence[Place]) -> list[str]:
    return [place.name for place in its]


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(reset := getattr(module, name, None)):
            return reset  # type: ignore[no-any-return]
    return None


def _children_first(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    """As constructors end: a module after all that it contains."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def _unset(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory full of NaN, or of the largest number where there is none, so that what is not initialised is seen."""
    empty = torch.empty_like(tensor, device=device)
    local(empty).fill_(_mark(tensor.dtype))
    return empty


def _mark(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _is_unset(tensor: Tensor) -> bool:
    mine = local(tensor)
    if mine.numel() == 0 or mine.dtype == torch.bool:
        return False
    if mine.dtype.is_floating_point or mine.dtype.is_complex:
        return bool(mine.isnan().any())
    return bool((mine == torch.iinfo(mine.dtype).max).all())


@contextmanager
def _random_numbers_of_rank_0(group: Group, device: torch.device) -> Iterator[None]:
    """Draw rank 0's; a rank that stood elsewhere goes on from there afterwards, as if nothing had been drawn."""
    own = torch.get_rng_state()
    sent = own.to(device, copy=True)
    group.broadcast_(sent).wait()
    torch.set_rng_state(rank_0s := sent.cpu())
    try:
        yield
    finally:
        if not torch.equal(own, rank_0s):
            torch.set_rng_state(own)


@contextmanager
def _whole(module: nn.Module, following: Collection[tuple[nn.Module, str]]) -> Iterator[None]:
    """Within this, the parameters of the module and of what is below it in its block are whole, plain, on the CPU.

    Args:
        following: where a parameter is that keeps the values it has elsewhere: what is given to it here is lost.
    """
    holders = [
        (each, name, param)
        for each in _in_block(module)
        for name, param in each._parameters.items()
        if param is not None
    ]
    whole: dict[int, nn.Parameter] = {}
    for each, name, param in holders:
        if id(param) not in whole:
            values = full(param) if isinstance(param, DTensor) else param.detach()
            whole[id(param)] = nn.Parameter(values.cpu(), requires_grad=param.requires_grad)
        own = whole[id(param)]
        each._parameters[name] = nn.Parameter(own.detach().clone()) if (each, name) in following else own
    try:
        yield
    finally:
        for each, name, param in holders:
            if (each, name) in following:
                each._parameters[name] = param
                continue
            values = whole[id(param)].detach()
            if isinstance(param, DTensor):
                cut = cut_of(param)
                local(param).copy_(cut.piece(values, cut.rank))
            else:
                param.detach().copy_(values)
            each._parameters[name] = param


def _in_block(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _in_block(child)
