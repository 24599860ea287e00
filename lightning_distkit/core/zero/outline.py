"""A model as the shapes of its weights, in the order of the forward and by what is gathered together in stage 3."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_distkit.core.zero.policy import Policy, find_blocks
from lightning_distkit.core.zero.units import units_of

PRECISIONS: dict[str, torch.dtype | None] = {  # Lightning's words; what the parameters are cast to
    "32-true": None,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "bf16-mixed": None,
    "16-mixed": None,
}


@dataclass(frozen=True)
class Weight:
    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    trained: bool
    cast_nbytes: int  # of the copy that autocast makes

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Outline:
    """Weights in the order of the forward."""

    before: list[Weight]  # the root's, such as an embedding
    blocks: list[list[Weight]]
    after: list[Weight]  # the root's too, such as a head: their gradients are there before those of the blocks
    buffers: int

    @property
    def weights(self) -> list[Weight]:
        return [*self.before, *(weight for block in self.blocks for weight in block), *self.after]


def of_numel(numel: float, precision: str, n_blocks: int) -> Outline:
    if numel < 0 or numel != int(numel):
        raise ValueError(f"a number of parameters must be whole and at least 0, got {numel}")
    if n_blocks < 1:
        raise ValueError(f"n_blocks must be at least 1, got {n_blocks}")
    each, more = divmod(int(numel), n_blocks)
    sizes = [each + (n < more) for n in range(n_blocks)]
    dtype = PRECISIONS[precision] or torch.float32
    cast = 2 if precision.endswith("-mixed") else 0
    return Outline([], [[Weight((size,), size, dtype, True, cast * size)] for size in sizes], [], 0)


def of_module(module: nn.Module, precision: str, policy: Policy) -> Outline:
    """Its blocks are those that `shard_parameters` makes with this policy.

    Raises:
        ValueError: a parameter has no shape yet, or the policy matches nothing.
    """
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(f"parameters must have shapes, but {', '.join(lazy)} are lazy; call the module once before")
    root, *blocks = units_of(module, find_blocks(module, policy))
    block_of = {parameter: number for number, block in enumerate(blocks) for parameter in block.params}
    late: set[nn.Parameter] = set()  # the root's that (also) follow a block
    multiplied: set[nn.Parameter] = set()  # and not only looked up
    seen_block = False
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            seen_block |= parameter in block_of
            if seen_block and parameter in root.params:
                late.add(parameter)
            if not isinstance(owner, nn.Embedding | nn.EmbeddingBag):
                multiplied.add(parameter)
    outline = Outline(
        [],
        [[] for _ in blocks],
        [],
        sum(buffer.numel() * cast_to(buffer.dtype, precision).itemsize for buffer in module.buffers()),
    )
    for parameter in module.parameters():
        cast = precision.endswith("-mixed") and parameter.ndim > 1 and parameter in multiplied
        cast = cast and parameter.dtype == torch.float32
        weight = Weight(
            tuple(parameter.shape),
            parameter.numel(),
            cast_to(parameter.dtype, precision),
            parameter.requires_grad,
            2 * parameter.numel() if cast else 0,
        )
        if parameter in block_of:
            outline.blocks[block_of[parameter]].append(weight)
        else:
            (outline.after if parameter in late else outline.before).append(weight)
    return outline


def cast_to(dtype: torch.dtype, precision: str) -> torch.dtype:
    return (PRECISIONS[precision] or dtype) if dtype.is_floating_point else dtype


def share(nbytes: int, world_size: int) -> int:
    return -(-nbytes // world_size)


def nbytes_of(weights: Iterable[Weight]) -> int:
    return sum(weight.nbytes for weight in weights)


def trained_nbytes_of(weights: Iterable[Weight]) -> int:
    return nbytes_of(weight for weight in weights if weight.trained)
