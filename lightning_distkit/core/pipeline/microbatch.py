"""A batch becomes micro-batches, and what they gave becomes one output again.

Source: torchgpipe (Kim et al., 2020, https://arxiv.org/abs/2004.09910) and torch.distributed.pipeline.sync.

Values are *nests*: tensors and anything else in tuples, lists, dicts, named tuples and whatever torch's pytree knows.
Tensors are split and joined along their first dimension. What holds no tensor is a plain value, a container of plain
values too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class NoChunk:
    """A tensor that every micro-batch gets whole, as it would a number.

    Raises:
        TypeError: it is no tensor.
    """

    def __init__(self, inp: Tensor) -> None:
        if not isinstance(inp, Tensor):
            raise TypeError(f"NoChunk wraps a tensor, got {type(inp).__name__}; pass other values as they are")
        self._tensor = inp

    @property
    def tensor(self) -> Tensor:
        """The tensor itself."""
        return self._tensor


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors of a nest, in its order; those in a `NoChunk` as well."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, (Tensor, NoChunk)):
            yield leaf.tensor if isinstance(leaf, NoChunk) else leaf


def require_tensor(values: Any, what: str) -> None:
    """See to it that there is a tensor in what enters the pipe, leaves it, or goes from one of its stages to the next.

    Raises:
        TypeError: there is none.
    """
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(values)):
        raise TypeError(
            f"{what} must contain at least one tensor, got {_described(values)}; what is computed from plain values "
            "alone belongs outside the pipe"
        )


def row_counts(n_rows: int, chunks: int) -> list[int]:
    """How many rows each micro-batch has: as equal as can be, the longer ones first; never more of them than rows.

    A batch without rows is one micro-batch.
    """
    n_micro_batches = max(1, min(chunks, n_rows))
    rows, longer = divmod(n_rows, n_micro_batches)
    return [rows + (n < longer) for n in range(n_micro_batches)]


def split(inputs: tuple[Any, ...], chunks: int) -> list[tuple[Any, ...]]:
    """The inputs of each micro-batch; see `split_call`."""
    return [args for args, _ in split_call(inputs, {}, chunks)]


def split_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], chunks: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each micro-batch: at most ``chunks`` of them, and at most as many as there are rows.

    Tensors (n_rows, ...) become pieces (its `row_counts`, ...). A plain value, a `NoChunk`'s tensor and a tensor
    without dimensions are the same for all.

    Raises:
        TypeError: there is no tensor.
        ValueError: no tensor has rows, or some have more than others.
    """
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    require_tensor(leaves, "the input of a pipe")
    counts = row_counts(_n_rows(leaves), chunks)
    columns = [_pieces(leaf, counts) for leaf in leaves]
    return [pytree.tree_unflatten(row, spec) for row in zip(*columns, strict=True)]


def merge(outputs: Sequence[Any]) -> Any:
    """One output of those of all micro-batches, the same nest.

    Tensors are joined along their first dimension; tensors without dimensions are stacked, as rows (n_micro_batches,);
    plain values are collected in a list.

    Raises:
        TypeError: the micro-batches gave different nests.
        ValueError: they gave tensors that do not fit together.
    """
    flat, specs = zip(*(pytree.tree_flatten(output, is_leaf=_is_plain) for output in outputs), strict=True)
    for n, spec in enumerate(specs):
        if spec != specs[0]:
            raise TypeError(
                f"every micro-batch must give the same nest, got {_described(outputs[0])} from the first and "
                f"{_described(outputs[n])} from number {n + 1} of {len(outputs)}"
            )
    return pytree.tree_unflatten([_joined(column) for column in zip(*flat, strict=True)], specs[0])


def to_device(values: Any, device: torch.device) -> Any:
    """The same nest with its tensors on ``device``; those that are there already are not copied."""
    # To the CPU it must block: torch would return at once a tensor that the device has yet to write to.
    return pytree.tree_map_only(Tensor, lambda each: each.to(device, non_blocking=device.type != "cpu"), values)


def _is_plain(values: Any) -> bool:
    return not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(values))


def _n_rows(leaves: Sequence[Any]) -> int:
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if len({shape[0] for shape in shapes}) != 1:
        raise ValueError(
            "tensors that enter a pipe must have the same number of rows, their first dimension; got shapes "
            f"{', '.join(map(str, shapes)) or '()'}: wrap in NoChunk what belongs whole to every micro-batch"
        )
    return int(shapes[0][0])


def _pieces(leaf: Any, counts: Sequence[int]) -> Sequence[Any]:
    if isinstance(leaf, NoChunk):
        return [leaf.tensor] * len(counts)
    if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(counts) == 1:
        return [leaf] * len(counts)
    if leaf.requires_grad and torch.is_grad_enabled():
        # Split at once, so that backward joins the pieces' gradients at once: with n slices it would add up n gradients
        # of the whole. But such pieces may not be written to in place, as a first layer may want to: so copies of them.
        return [piece.clone() for piece in leaf.split(list(counts))]
    starts = [sum(counts[:n]) for n in range(len(counts))]
    # Detached from each other: else a layer that multiplies one by a parameter in place would have all need gradients.
    return [leaf.narrow(0, start, count).detach() for start, count in zip(starts, counts, strict=True)]


def _joined(column: Sequence[Any]) -> Any:
    n_tensors = sum(isinstance(value, Tensor) for value in column)
    if n_tensors == 0:
        return list(column)
    if n_tensors < len(column):
        raise TypeError(
            "every micro-batch must give the same nest, got a tensor from some where others gave something else: "
            f"{_described(list(column))}"
        )
    if column[0].dim() == 0:
        return torch.stack(list(column))
    if len(column) == 1:
        return column[0]
    try:
        return torch.cat(list(column))
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in column)
        raise ValueError(
            "the outputs of all micro-batches must fit together along their first dimension, got shapes "
            f"{shapes}: pad them alike"
        ) from error


def _described(values: Any) -> str:
    return str(pytree.tree_map(lambda leaf: type(leaf).__name__, values)).replace("'", "")
