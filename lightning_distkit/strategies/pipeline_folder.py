"""A checkpoint as a folder: each rank writes and reads its own part, by torch.distributed.checkpoint.

Tensors of the module and of optimizers' states stand there under the names and numbers of the whole module, so any
number of stages reads it; all else is in ``meta.pt``.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.pipeline.merged_state import merged

_CPU = torch.device("cpu")
_META = "meta.pt"


def is_folder(path: Any) -> bool:
    """Whether a checkpoint is in parts there."""
    return Path(path, _META).is_file()


def save_folder(checkpoint: dict[str, Any], path: Path, group: Group) -> None:
    """Write it. Collective over the ranks of the pipe.

    Args:
        checkpoint: as the Trainer makes it, with what is here; other stages' tensors are on meta.
        group: for messages on the CPU.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, value in _flat(checkpoint).items():
        if isinstance(value, Tensor) and not value.is_meta:
            tensors[name] = value.detach()
        elif not isinstance(value, Tensor):
            values[name] = value
    # What several ranks have, the first of them writes.
    names_of = group.everyones(list(tensors), _CPU)
    before = {name for names in names_of[: group.rank] for name in names}
    values = {name: value for its in reversed(group.everyones(values, _CPU)) for name, value in its.items()}
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    rest = merged(rest, group, adds_keys=False)
    if group.rank == 0:
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
    group.everyones(None, _CPU)
    dcp.save(
        {name: tensor for name, tensor in tensors.items() if name not in before},
        storage_writer=dcp.FileSystemWriter(path),
        process_group=group.process_group,
    )
    if group.rank == 0:
        rest["state_dict"] = list(checkpoint["state_dict"])
        rest["optimizer_states"] = [
            {key: value for key, value in each.items() if key != "state"}
            for each in checkpoint.get("optimizer_states", [])
        ]
        torch.save({"checkpoint": rest, "values": values}, path / _META)


def load_folder(path: Path, weights_only: bool, wants: Callable[[str], bool]) -> dict[str, Any]:
    """Read it: an ordinary checkpoint, with tensors on meta in the place of what is not wanted.

    Args:
        wants: of "model.<key>" or "optimizer.<number>.<number of parameter>.<key>", whether it is needed here.
    """
    saved = torch.load(path / _META, map_location="cpu", weights_only=weights_only)
    reader = dcp.FileSystemReader(path)
    known: dict[str, Any] = reader.read_metadata().state_dict_metadata
    flat: dict[str, Any] = {
        name: torch.empty(each.size, dtype=each.properties.dtype, device="cpu" if wants(name) else "meta")
        for name, each in known.items()
    }
    here = {name: tensor for name, tensor in flat.items() if not tensor.is_meta}
    with warnings.catch_warnings():  # each rank reads by itself, as is meant
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(here, storage_reader=reader, no_dist=True)
    flat |= saved["values"]
    checkpoint: dict[str, Any] = saved["checkpoint"]
    checkpoint["state_dict"] = {key: flat[f"model.{key}"] for key in checkpoint["state_dict"]}
    states: list[dict[str, Any]] = checkpoint.pop("optimizer_states")
    for n, each in enumerate(states):
        state: dict[int, dict[str, Any]] = {}
        for name, value in flat.items():
            kind, *where = name.split(".", 3)
            if kind == "optimizer" and int(where[0]) == n:
                state.setdefault(int(where[1]), {})[where[2]] = value
        each["state"] = dict(sorted(state.items()))
    if states:
        checkpoint["optimizer_states"] = states
    return checkpoint


def _flat(checkpoint: dict[str, Any]) -> dict[str, Any]:
    flat = {f"model.{key}": value for key, value in checkpoint["state_dict"].items()}
    for n, each in enumerate(checkpoint.get("optimizer_states", [])):
        for number, state in each["state"].items():
            flat |= {f"optimizer.{n}.{number}.{key}": value for key, value in state.items()}
    return flat
