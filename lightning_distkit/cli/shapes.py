"""What `distkit estimate` may be asked about, as a number or as a module that nothing makes."""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lightning_distkit.cli.checkpoint import checkpoint, module_like, safetensors
from lightning_distkit.cli.subject import _found

_POWERS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Shapes:
    """A module on the meta device, or a number of parameters; and what of a file that is, if not all."""

    subject: nn.Module | int
    taken: str = ""


def load(model: str) -> Shapes:
    """As `lightning_distkit.cli.estimate.estimate` explains; an error ends the program."""
    number = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d+)?)([kKmMbBtT]?)", model)
    if number:
        return Shapes(round(float(number[1]) * _POWERS[number[2].lower()]))
    path = Path(model)
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".json") and not path.is_file():
        sys.exit(f"{model} must be a file, and there is none; give a number, a callable, a checkpoint or config.json")
    if path.suffix == ".safetensors":
        return Shapes(module_like(safetensors(path)))
    if path.suffix == ".json":
        return Shapes(_of_json(path))
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin"):
        weights, taken = checkpoint(path)
        return Shapes(module_like(weights), taken)
    return Shapes(_made(model))


def _made(model: str) -> nn.Module:
    found = _found(model)
    try:
        with torch.device("meta"):
            made = found()
            if hasattr(made, "configure_model"):  # where a LightningModule may make its layers
                made.configure_model()
    except Exception as error:  # whatever the user's code has raised
        sys.exit(f"{model} must be callable without arguments, under torch.device('meta'): {error!r:.300}")
    module = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(module, nn.Module):
        sys.exit(f"{model} must return an nn.Module, or a tuple that begins with one, got {made!r:.200}")
    return module


def _of_json(path: Path) -> nn.Module:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        sys.exit(f"{path} must be JSON, Hugging Face's config.json or an index of .safetensors: {error}")
    if "weight_map" in content:  # an index of several .safetensors
        files = sorted(set(content["weight_map"].values()))
        return module_like({name: each for file in files for name, each in safetensors(path.parent / file).items()})
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError:
        sys.exit(f"{path} needs transformers: pip install transformers, or give a checkpoint or a number of parameters")
    config = transformers.AutoConfig.from_pretrained(str(path))
    # The class with its head where the config names it: AutoModel is without one.
    cls = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    with torch.device("meta"):
        module = cls(config) if cls is not None else transformers.AutoModel.from_config(config)
    assert isinstance(module, nn.Module)
    return module
