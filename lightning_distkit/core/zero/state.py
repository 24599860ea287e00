"""An optimizer's state that is spread over ranks, as the plain optimizer would say it; and back.

Of each parameter's state, a tensor of the parameter's shape is cut as the parameter is; anything else (a step count) is
the same on every rank that has a piece of the parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_distkit.core.zero.boxes import views
from lightning_distkit.core.zero.bucket import Bucket, Piece, in_memory_order, in_shape_of
from lightning_distkit.core.zero.foreign_state import why_foreign
from lightning_distkit.core.zero.parts import OfThisRank, Part, whole_part
from lightning_distkit.core.zero.saved_tensor import SavedTensor

if TYPE_CHECKING:
    from lightning_distkit.core.zero.optimizer import ZeroOptimizer


@dataclass(frozen=True)
class _Part:
    """Stands in a message's header for a tensor that is in its payload."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_cut: bool  # as the parameter is


Header = list[dict[str, Any]]  # for each piece of a bucket its state, with a `_Part` in the place of each tensor


def gathered_state(optimizer: ZeroOptimizer) -> dict[str, Any]:
    """What ``ZeroOptimizer.state_dict`` promises."""
    group = optimizer.group
    group.meet("ZeroOptimizer.state_dict()")
    plain = _without_state(optimizer)
    headers = group.everyones([_header(bucket, optimizer.inner) for bucket in optimizer.buckets], optimizer.device)
    whole: dict[Tensor, dict[str, Any]] = {}
    for index, bucket in enumerate(optimizer.buckets):  # bucket by bucket, so little is held twice
        for rank in range(group.world_size):
            if group.rank in (0, rank):
                _gather(whole, bucket, rank, headers[rank][index], optimizer)
    params = [param for param_group in optimizer.param_groups for param in param_group["params"]]
    return {**plain, "state": {n: whole[param] for n, param in enumerate(params) if param in whole}}


def _without_state(optimizer: ZeroOptimizer) -> dict[str, Any]:
    """As torch's ``state_dict()``, which knows nothing of pieces, the keys of the state."""
    held, optimizer.state = optimizer.state, defaultdict(dict)
    try:
        return Optimizer.state_dict(optimizer)
    finally:
        optimizer.state = held


def sharded_state(optimizer: ZeroOptimizer) -> dict[str, Any]:
    """What ``ZeroOptimizer.sharded_state_dict`` promises."""
    ids = {param: n for n, param in enumerate(_of(optimizer.param_groups))}
    state: dict[int, dict[str, Any]] = {}
    for bucket in optimizer.buckets:
        for piece, (tensor, its) in zip(bucket.layout.of(bucket.rank), _tensors(bucket, optimizer.inner), strict=True):
            param = bucket.params[piece.index]
            mine: dict[str, Any] = {}
            for name, value in its.items():
                if isinstance(value, Tensor) and _is_cut(value, tensor):
                    mine[name] = Part.of_run(in_memory_order(value, tensor), piece.begin, param)
                elif piece.begin == 0:  # the same on every rank that has a piece
                    mine[name] = whole_part(value)
            if mine:
                state[ids[param]] = mine
    return {**_without_state(optimizer), "state": OfThisRank(sorted(state.items()))}


def _gather(
    whole: dict[Tensor, dict[str, Any]], bucket: Bucket, rank: int, header: Header, optimizer: ZeroOptimizer
) -> None:
    """Bring what ``rank`` has of a bucket's state to rank 0, into ``whole``; what travels is gone on return."""
    group = optimizer.group
    if rank == group.rank:
        payloads = _payloads(bucket, optimizer.inner, header)
    else:
        payloads = {
            dtype: group.receive(torch.empty(numel, dtype=dtype, device=bucket.flat.device), rank)
            for dtype, numel in _numels(header).items()
        }
    if group.rank == 0:
        _unpack(whole, bucket, bucket.layout.of(rank), header, payloads)
    else:
        for payload in payloads.values():
            group.send(payload, 0)


def load_whole_state(optimizer: ZeroOptimizer, state_dict: dict[str, Any]) -> None:
    """What ``ZeroOptimizer.load_state_dict`` promises."""
    refusal = why_foreign(optimizer.inner, optimizer.param_groups, optimizer.elementwise, state_dict)
    optimizer.group.refuse_together(refusal, optimizer.device)
    ids = [number for saved in state_dict["param_groups"] for number in saved["params"]]
    whole, mine, problem = state_dict["state"], dict[Tensor, dict[str, Any]](), None
    state = {param: whole[n] for n, param in zip(ids, _of(optimizer.param_groups), strict=True) if n in whole}
    try:
        mine = optimizer.parts_of(state)
    except (OSError, ValueError) as error:  # a file that this rank alone cannot read
        problem = f"the optimizer's state could not be read: {error}"
    optimizer.group.refuse_together(problem, optimizer.device)
    for ours, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        ours.update({name: value for name, value in saved.items() if name != "params"})
    optimizer.set_state(mine)


def part_of_state(
    bucket: Bucket, param: Tensor, state: dict[str, Any], param_groups: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Of a parameter's whole state what this rank keeps: copies, on the parameter's device."""
    kept: dict[str, Any] = {}
    piece = bucket.pieces[param]
    [number] = [n for n, each in enumerate(_of(param_groups)) if each is piece]
    packed, begin = [], 0
    for param_group in param_groups:
        end = begin + len(param_group["params"])
        packed.append({**param_group, "params": list(range(begin, end))})
        begin = end
    for name, value in state.items():
        if not isinstance(value, Tensor):
            kept[name] = value
            continue
        if isinstance(value, SavedTensor):
            part = _read(bucket, param, value)
        else:
            part = bucket.part_of(param, value) if _is_cut(value, param) else value
        # torch's rule for dtype and device: the parameter's, but for step counts.
        policy = Optimizer._process_value_according_to_param_policy
        placed = policy(piece, part, number, packed, name)
        shared = not isinstance(value, SavedTensor) and _shares_memory(placed, value)
        kept[name] = placed.clone() if shared else placed
    return kept


def _read(bucket: Bucket, param: Tensor, saved: SavedTensor) -> Tensor:
    """Of a tensor in a file what this rank's piece of ``param`` needs, in the piece's shape: nothing else is read."""
    if not _is_cut(saved, param):
        return saved.read()
    [piece] = [each for each in bucket.layout.of(bucket.rank) if bucket.params[each.index] is param]
    flat = torch.empty(piece.end - piece.begin, dtype=saved.dtype)
    for offsets, view in views(flat, piece.begin, param):
        view.copy_(saved.read_box(offsets, view.shape))
    return in_shape_of(flat, param) if flat.numel() == param.numel() else flat


def _of(param_groups: Sequence[dict[str, Any]]) -> Iterator[Tensor]:
    return (param for param_group in param_groups for param in param_group["params"])


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _is_cut(value: Tensor, param: Tensor) -> bool:
    return value.shape == param.shape and param.dim() > 0


# -- a bucket's state as a message to rank 0


def _tensors(bucket: Bucket, inner: Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """For each of this rank's pieces, in the order of the layout, itself and its state."""
    for piece in bucket.layout.of(bucket.rank):
        tensor = bucket.pieces[bucket.params[piece.index]]
        yield tensor, inner.state.get(tensor, {})


def _header(bucket: Bucket, inner: Optimizer) -> Header:
    return [
        {
            name: _Part(tuple(value.shape), value.dtype, _is_cut(value, piece)) if isinstance(value, Tensor) else value
            for name, value in state.items()
        }
        for piece, state in _tensors(bucket, inner)
    ]


def _parts(header: Header) -> Iterator[tuple[int, str, _Part]]:
    """The tensors of the payload, in its order: of which piece, which name, what."""
    for n, state in enumerate(header):
        for name, value in state.items():
            if isinstance(value, _Part):
                yield n, name, value


def _numels(header: Header) -> dict[torch.dtype, int]:
    numels: dict[torch.dtype, int] = {}
    for _, _, part in _parts(header):
        numels[part.dtype] = numels.get(part.dtype, 0) + torch.Size(part.shape).numel()
    return numels


def _payloads(bucket: Bucket, inner: Optimizer, header: Header) -> dict[torch.dtype, Tensor]:
    """For each dtype its tensors, one after the other."""
    states = [state for _, state in _tensors(bucket, inner)]
    pieces = [piece for piece, _ in _tensors(bucket, inner)]
    flat: dict[torch.dtype, list[Tensor]] = {}
    for n, name, part in _parts(header):
        value = states[n][name].to(bucket.flat.device)
        flat.setdefault(part.dtype, []).append(in_memory_order(value, pieces[n]) if part.is_cut else value.reshape(-1))
    return {dtype: torch.cat(tensors) for dtype, tensors in flat.items()}


def _unpack(
    whole: dict[Tensor, dict[str, Any]],
    bucket: Bucket,
    pieces: Sequence[Piece],
    header: Header,
    payloads: dict[torch.dtype, Tensor],
) -> None:
    """Put one rank's part of a bucket's state where it belongs in the whole."""
    ends = dict.fromkeys(payloads, 0)
    for piece, its in zip(pieces, header, strict=True):
        if not its:
            continue
        param = bucket.params[piece.index]
        state = whole.setdefault(param, {})
        for name, value in its.items():
            if not isinstance(value, _Part):
                state.setdefault(name, value)
                continue
            begin = ends[value.dtype]
            ends[value.dtype] += torch.Size(value.shape).numel()
            tensor = payloads[value.dtype][begin : ends[value.dtype]]
            if not value.is_cut:
                state.setdefault(name, tensor.cpu().reshape(value.shape).clone())
                continue
            if name not in state:
                state[name] = in_shape_of(torch.empty(param.numel(), dtype=value.dtype), param)
            in_memory_order(state[name], param)[piece.begin : piece.end] = tensor
