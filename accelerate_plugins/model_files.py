"""A model's state in the files that Accelerate writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME
from safetensors.torch import load_file
from torch import nn


def read_model(folder: Path, number: int) -> dict[str, Any]:
    """A model's state as Accelerate has written it; mapped, so that each rank reads its part."""
    ending = f"_{number}" if number else ""
    if (path := folder / f"{SAFE_MODEL_NAME}{ending}.safetensors").exists():
        return load_file(path)
    path = folder / f"{MODEL_NAME}{ending}.bin"
    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return state


def with_tied(state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """With every name of a parameter that has several; safetensors has one of them."""
    for alike in names_of_tied(module):
        known = next((name for name in alike if name in state), None)
        if known is not None:
            state = {**dict.fromkeys(alike, state[known]), **state}
    return state


def names_of_tied(module: nn.Module) -> list[list[str]]:
    """All names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [each for each in names.values() if len(each) > 1]
