"""How much memory a rank needs under DDP and each ZeRO stage, of a model that nothing makes."""

from __future__ import annotations

import re
import sys
from typing import Literal

from torch import nn

from lightning_distkit.cli.memory_report import UNITS, Report, as_json, draw, on_screen
from lightning_distkit.cli.shapes import load
from lightning_distkit.core.zero.estimate import STAGES, estimate_memory, what_fits


def estimate(
    model: str,
    world_size: int = 8,
    optimizer: str = "adam",
    precision: str = "32-true",
    stage: Literal[0, 1, 2, 3] | None = None,
    bucket_cap_mb: float = 25.0,
    master_weights: bool = False,
    n_blocks: int = 32,
    policy: int | str = "auto",
    fits: str | None = None,
    figure: str | None = None,
    json_lines: bool = False,
) -> None:
    """Say how much memory each rank needs, by ZeRO stage; activations, which depend on the batch, come on top.

    Nothing of the model's size is allocated.

    Args:
        model: a number of parameters ("7B", "350M", "7e9"); or where a callable without arguments is that returns the
            module, "package.module:name" or "file.py:name"; or a checkpoint, ".pt", ".pth", ".ckpt", ".bin",
            ".safetensors" or ".safetensors.index.json"; or Hugging Face's "config.json".
        world_size: the number of ranks.
        optimizer: adam, adamw, sgd, sgd_momentum, adagrad, rmsprop, lion, adafactor, muon or another that is known.
        precision: 32-true, bf16-true, 16-true, 64-true, bf16-mixed or 16-mixed, as in Lightning.
        stage: only this one; 0 is DDP.
        bucket_cap_mb: what travels together, in MiB.
        master_weights: the optimizer keeps float32 copies of half-precision parameters.
        n_blocks: into how many equal blocks stage 3 divides a number of parameters.
        policy: which modules are stage 3's blocks: auto, the path of a class, or a number of elements.
        fits: what a rank has, as "24GB" (1e9 bytes each) or "24GiB" (2**30): answers which stage and how many ranks.
        figure: where to write the bar chart, as "memory.png".
        json_lines: print JSON instead of a table.
    """
    limit = _size(fits) if fits is not None else None
    loaded = load(model)
    subject = loaded.subject
    try:
        estimates = {
            each: estimate_memory(
                subject,
                each,
                world_size,
                optimizer,
                precision,
                master_weights=master_weights,
                bucket_cap_mb=bucket_cap_mb,
                n_blocks=n_blocks,
                policy=policy,
            )
            for each in (STAGES if stage is None else (stage,))
        }
        world_sizes: dict[int, int | None] = {}
        if limit is not None:
            world_sizes = what_fits(
                limit,
                subject,
                optimizer,
                precision,
                master_weights=master_weights,
                bucket_cap_mb=bucket_cap_mb,
                n_blocks=n_blocks,
                policy=policy,
            )
    except (ValueError, TypeError, ImportError, AttributeError) as error:  # the last ones of a policy's path
        sys.exit(str(error))
    taken = f" ({loaded.taken})" if loaded.taken else ""
    about = f"{model}{taken}: {_count(subject)} parameters, {optimizer}, {precision}"
    if master_weights:
        about += ", master weights"
    if not isinstance(subject, nn.Module):
        about += f", taken for {n_blocks} equal blocks"
    report = Report(about, world_size, estimates, limit, {each: world_sizes[each] for each in estimates if world_sizes})
    if figure is not None:
        draw(report, figure)
    say = as_json if json_lines else on_screen
    say(report)


def _size(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)", text.strip())
    unit = next((each for each in UNITS if match and each.lower() == match[2].lower()), None)
    if match is None or unit is None or float(match[1]) == 0:
        sys.exit(f'fits must be a size above 0 as "24GB" or "24GiB", with one of {", ".join(UNITS)}, got {text!r}')
    return float(match[1]) * UNITS[unit]


def _count(subject: nn.Module | int) -> str:
    numel = sum(p.numel() for p in subject.parameters()) if isinstance(subject, nn.Module) else subject
    for name, size in (("billion", 1e9), ("million", 1e6)):
        if numel >= size:
            return f"{numel / size:.2f} {name}"
    return str(numel)
