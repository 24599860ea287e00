"""The shapes in a checkpoint file: those of the model in it, without the optimizer's, and no tensor is read."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {  # https://github.com/huggingface/safetensors#format
    name: getattr(torch, dtype)
    for names, dtypes in (
        ("F64 F32 F16 BF16 F8_E4M3 F8_E5M2", "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2"),
        ("I64 I32 I16 I8 U8 BOOL", "int64 int32 int16 int8 uint8 bool"),
    )
    for name, dtype in zip(names.split(), dtypes.split(), strict=True)
}
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # a checkpoint does not say what is none
_MODELS = ("state_dict", "model", "model_state_dict", "module", "model_state", "net", "network", "weights")
_OPTIMIZER = re.compile(r"(^|_)optim(izers?)?(_|\d|$)")  # "optimizer_states", "optim", "adam_optimizer"; not "optimal"
_STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")  # of one that lies flat in it


def checkpoint(path: Path) -> tuple[dict[str, Tensor], str]:
    """The model's tensors, mapped, in a file of ``torch.save``; and where they were, or an empty string."""
    try:  # mapped, so that only the shapes are read
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        sys.exit(f"{path} must be a file of torch.save that weights_only=True can read: {error!s:.300}")
    weights, taken, left = _model_in(loaded)
    if not weights:
        sys.exit(
            f"{path} must hold a dict of tensors, or one under 'state_dict', and does not; save module.state_dict()"
        )
    where = f"of it {taken!r}" if taken else ""
    return weights, ", ".join([where] * bool(where) + [f"without {', '.join(map(repr, left))}"] * bool(left))


def _model_in(loaded: Any, is_said: bool = False) -> tuple[dict[str, Tensor], str, list[str]]:
    """The module's state dict in a checkpoint, under which key it was, and what with tensors in it was left out.

    Where no key says "model", it is all but the optimizers': the state dicts of several modules, or a nested one.
    """
    if not isinstance(loaded, Mapping):
        return {}, "", []
    for name in _MODELS:
        if isinstance(loaded.get(name), Mapping) and _has_tensors(loaded[name]):
            weights, inner, left = _model_in(loaded[name], is_said=True)
            others = [str(other) for other, value in loaded.items() if other != name and _has_tensors(value)]
            return weights, f"{name}.{inner}".rstrip("."), left + others
    weights, left = dict[str, Tensor](), list[str]()
    _flatten(loaded, "", weights, None if is_said else left)
    return weights, "", left


def _flatten(loaded: Mapping[Any, Any], prefix: str, weights: dict[str, Tensor], left: list[str] | None) -> None:
    """Put all tensors of a nested dict into ``weights``; leave out those of optimizers, if there is a list of them."""
    for name, value in loaded.items():
        path = f"{prefix}{name}"
        if left is not None and _is_optimizers(str(name), value):
            parts = path.split(".")
            what = parts[0] if _OPTIMIZER.search(parts[0].lower()) else parts[-1]
            if _has_tensors(value) and what not in left:
                left.append(what)
        elif isinstance(value, Tensor):
            weights[path] = value
        elif isinstance(value, Mapping):
            _flatten(value, f"{path}.", weights, left)


def _is_optimizers(name: str, value: Any) -> bool:
    parts = name.split(".")
    if parts[-1] in _STATES or any(_OPTIMIZER.search(part.lower()) for part in parts):
        return True
    return isinstance(value, Mapping) and "param_groups" in value


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    return isinstance(value, Tensor)


def safetensors(path: Path) -> dict[str, Tensor]:
    """By its header alone: its length in 8 bytes, then JSON."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError(f"its header would be {length} bytes long")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {
            name: torch.empty(each["shape"], dtype=DTYPES[each["dtype"]], device="meta")
            for name, each in header.items()
        }
    except (struct.error, ValueError, TypeError, AttributeError, KeyError) as error:
        sys.exit(f"{path} must be a safetensors file, with a header as its format says: {error!r:.300}")


def module_like(weights: Mapping[str, Tensor]) -> nn.Module:
    """A module on the meta device with these parameters and buffers, and no forward.

    Tensors that share their memory are one parameter; children that are named by numbers are a ModuleList.
    """
    root, known = nn.Module(), dict[tuple[Any, ...], nn.Parameter]()
    lists = {name.rsplit(".", depth)[0] for name in weights for depth in range(1, name.count(".") + 1)}
    numbered = {name.rpartition(".")[0] for name in lists if name.rpartition(".")[2].isdigit()}
    if all(name.partition(".")[0].isdigit() for name in weights):
        root = nn.ModuleList()
    for name, tensor in weights.items():
        *path, last = name.split(".")
        at = root
        for depth, part in enumerate(path, 1):
            kind = nn.ModuleList if ".".join(path[:depth]) in numbered else nn.Module
            # Not add_module(), as a child may be called as a method of nn.Module is.
            child = at._modules.setdefault(part, kind())
            assert child is not None
            at = child
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if last in _BUFFERS or not tensor.is_floating_point():
            at._buffers[last] = meta
            continue
        memory = tensor.untyped_storage().data_ptr()
        key = (memory, tensor.storage_offset(), tensor.shape) if memory else (name,)
        at._parameters[last] = known.setdefault(key, nn.Parameter(meta))
    return root
