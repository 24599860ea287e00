"""How much memory a rank needs under DDP and each ZeRO stage, of a model that nothing makes."""

from __future__ import annotations

import importlib
import json
import re
import struct
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_distkit.cli.subject import _found
from lightning_distkit.core.zero.estimate import STAGES, WORLD_SIZES, MemoryEstimate, estimate_memory, what_fits

NAMES = {0: "DDP", 1: "stage 1", 2: "stage 2", 3: "stage 3"}  # ZeRO's
KINDS = {field.name: field.name.replace("_", " ") for field in fields(MemoryEstimate)}
COLORS = ("blue", "bright_black", "green", "magenta", "red", "cyan", "yellow", "bright_blue", "bright_magenta")
_POWERS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_UNITS: dict[str, float] = {
    "B": 1,
    **{f"{prefix}B": 1000**n for n, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**n for n, prefix in enumerate("KMGT", 1)},
}
_DTYPES = {  # https://github.com/huggingface/safetensors#format
    name: getattr(torch, dtype)
    for names, dtypes in (
        ("F64 F32 F16 BF16 F8_E4M3 F8_E5M2", "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2"),
        ("I64 I32 I16 I8 U8 BOOL", "int64 int32 int16 int8 uint8 bool"),
    )
    for name, dtype in zip(names.split(), dtypes.split(), strict=True)
}
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # a checkpoint does not say what is none


@dataclass(frozen=True)
class Report:
    """What there is to say, however it is said."""

    about: str
    world_size: int
    estimates: dict[int, MemoryEstimate]  # by stage
    limit: float | None  # bytes a rank
    world_sizes: dict[int, int | None]  # by stage, the smallest that fits


def estimate(
    model: str,
    world_size: int = 8,
    optimizer: str = "adam",
    precision: str = "32-true",
    stage: Literal[0, 1, 2, 3] | None = None,
    bucket_cap_mb: float = 25.0,
    master_weights: bool = False,
    n_blocks: int = 32,
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
        fits: what a rank has, as "24GB" (1e9 bytes each) or "24GiB" (2**30): answers which stage and how many ranks.
        figure: where to write the bar chart, as "memory.png".
        json_lines: print JSON instead of a table.
    """
    limit = _size(fits) if fits is not None else None
    subject = load(model)
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
            )
    except ValueError as error:
        sys.exit(str(error))
    about = f"{model}: {_count(subject)} parameters, {optimizer}, {precision}"
    if master_weights:
        about += ", master weights"
    if not isinstance(subject, nn.Module):
        about += f", taken for {n_blocks} equal blocks"
    report = Report(about, world_size, estimates, limit, {each: world_sizes[each] for each in estimates if world_sizes})
    if figure is not None:
        _draw(report, figure)
    say = _as_json if json_lines else _on_screen
    say(report)


def load(model: str) -> nn.Module | int:
    """What `estimate` may be asked about, as a module on the meta device or a number; an error ends the program."""
    number = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d+)?)([kKmMbBtT]?)", model)
    if number:
        return round(float(number[1]) * _POWERS[number[2].lower()])
    path = Path(model)
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".json") and not path.is_file():
        sys.exit(f"{model} must be a file, and there is none; give a number, a callable, a checkpoint or config.json")
    if path.suffix == ".safetensors":
        return module_like(_safetensors(path))
    if path.suffix == ".json":
        return _of_json(path)
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin"):
        return module_like(_checkpoint(path))
    return _made(model)


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


def _checkpoint(path: Path) -> dict[str, Tensor]:
    try:  # mapped, so that only the shapes are read
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        sys.exit(f"{path} must be a file of torch.save that weights_only=True can read: {error!s:.300}")
    weights = _weights(loaded)
    if not weights:
        sys.exit(
            f"{path} must hold a dict of tensors, or one under 'state_dict', and does not; save module.state_dict()"
        )
    return weights


def _weights(loaded: Any) -> dict[str, Tensor]:
    """The module's state dict, in a checkpoint of Lightning or of whoever has put it one level down."""
    if not isinstance(loaded, Mapping):
        return {}
    if isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    weights = {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}
    if weights:
        return weights
    inside = [_weights(value) for value in loaded.values() if isinstance(value, Mapping)]
    return max(inside, key=lambda each: sum(tensor.numel() for tensor in each.values()), default={})


def _safetensors(path: Path) -> dict[str, Tensor]:
    """By its header alone: its length in 8 bytes, then JSON."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError(f"its header would be {length} bytes long")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {
            name: torch.empty(each["shape"], dtype=_DTYPES[each["dtype"]], device="meta")
            for name, each in header.items()
        }
    except (struct.error, ValueError, TypeError, AttributeError, KeyError) as error:
        sys.exit(f"{path} must be a safetensors file, with a header as its format says: {error!r:.300}")


def _of_json(path: Path) -> nn.Module:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        sys.exit(f"{path} must be JSON, Hugging Face's config.json or an index of .safetensors: {error}")
    if "weight_map" in content:  # an index of several .safetensors
        files = sorted(set(content["weight_map"].values()))
        return module_like({name: each for file in files for name, each in _safetensors(path.parent / file).items()})
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


def _size(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)", text.strip())
    unit = next((each for each in _UNITS if match and each.lower() == match[2].lower()), None)
    if match is None or unit is None or float(match[1]) == 0:
        sys.exit(f'fits must be a size above 0 as "24GB" or "24GiB", with one of {", ".join(_UNITS)}, got {text!r}')
    return float(match[1]) * _UNITS[unit]


def _count(subject: nn.Module | int) -> str:
    numel = sum(p.numel() for p in subject.parameters()) if isinstance(subject, nn.Module) else subject
    for name, size in (("billion", 1e9), ("million", 1e6)):
        if numel >= size:
            return f"{numel / size:.2f} {name}"
    return str(numel)


def _unit(largest: float) -> tuple[str, float]:
    return next(((unit, _UNITS[unit]) for unit in ("GB", "MB", "kB") if largest >= _UNITS[unit]), ("B", 1.0))


def _amount(nbytes: float) -> str:
    unit, size = _unit(nbytes)
    return f"{nbytes / size:,.2f} {unit}"


def _ranks(n: int) -> str:
    return "1 rank" if n == 1 else f"{n} ranks"


def verdict(report: Report) -> list[str]:
    """Which stage and how many ranks fit."""
    if report.limit is None:
        return []
    lines = [f"With {_amount(report.limit)} a rank, before activations:"]
    for stage, world_size in report.world_sizes.items():
        if world_size is None:
            lines.append(f"  {NAMES[stage]} fits on no number of ranks up to {WORLD_SIZES[-1]}.")
        else:
            lines.append(f"  {NAMES[stage]} fits on {_ranks(world_size)}.")
    here = [stage for stage, each in report.estimates.items() if each.total <= report.limit]
    somewhere = [(world_size, stage) for stage, world_size in report.world_sizes.items() if world_size is not None]
    if here:
        lines.append(f"Take {NAMES[here[0]]} on {_ranks(report.world_size)}: of those that fit it sends least.")
    elif somewhere:
        world_size, stage = min(somewhere)
        lines.append(f"On {_ranks(report.world_size)} nothing fits. Take {NAMES[stage]} on {_ranks(world_size)}.")
    else:
        lines.append("Nothing fits. Take lower precision, an optimizer with less state, or smaller blocks.")
    return lines


def _as_json(report: Report) -> None:
    lines: list[dict[str, Any]] = [{"about": report.about, "world_size": report.world_size}]
    for stage, each in report.estimates.items():
        lines.append({"stage": stage, **asdict(each), "model_state": each.model_state, "total": each.total})
    if report.limit is not None:
        lines.append({"fits": report.limit, "world_sizes": report.world_sizes, "verdict": verdict(report)})
    for line in lines:
        sys.stdout.write(json.dumps(line) + "\n")


def _largest(report: Report) -> int:
    return max(1, *(each.total for each in report.estimates.values()))


def _shown_limit(report: Report) -> float:
    """What marks the limit in a chart; 0 for none, if there is none, or if the bars would be too small beside it."""
    return report.limit if report.limit is not None and report.limit < 1.5 * _largest(report) else 0.0


def _kinds(report: Report) -> list[str]:
    """Those that are there at all."""
    return [kind for kind in KINDS if any(getattr(each, kind) for each in report.estimates.values())]


def _on_screen(report: Report) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        sys.exit("the table needs rich: pip install 'lightning-distkit[cli]', or ask for --json_lines=true")
    console = Console(highlight=False)
    unit, size = _unit(_largest(report))
    kinds = _kinds(report)
    console.print(Text(f"{report.about}. {unit} on each of {_ranks(report.world_size)}, before activations:"))
    # A letter for each kind, so that the bars can be read without colours.
    styles = {kind: f"bold white on {color}" for kind, color in zip(KINDS, COLORS, strict=True)}
    table = Table("", *(NAMES[stage] for stage in report.estimates))
    for column in table.columns[1:]:
        column.justify = "right"
    for kind in kinds:
        values = (getattr(each, kind) for each in report.estimates.values())
        label = Text.assemble((kind[0].upper(), styles[kind]), f" {KINDS[kind]}")
        table.add_row(label, *(f"{value / size:,.2f}" for value in values))
    table.add_section()
    table.add_row("model state", *(f"{each.model_state / size:,.2f}" for each in report.estimates.values()))
    table.add_row("total", *(f"{each.total / size:,.2f}" for each in report.estimates.values()), style="bold")
    console.print(table)
    limit = _shown_limit(report)
    largest, width = max(_largest(report), limit), max(10, console.width - 24)
    for stage, each in report.estimates.items():
        bar, sofar, end = Text(), 0, 0
        for kind in kinds:
            sofar += getattr(each, kind)
            begin, end = end, round(sofar / largest * width)
            bar.append(kind[0].upper() * (end - begin), styles[kind])
        bar.append(" " * (width - end))
        if limit:
            at = min(width - 1, round(limit / largest * width))
            bar = Text.assemble(bar[:at], ("|", "bold"), bar[at + 1 :])
        console.print(Text.assemble(f"{NAMES[stage]:8}", bar, f" {each.total / size:,.2f} {unit}"), no_wrap=True)
    if limit:
        console.print(f"{'':8}| is {_amount(limit)}")
    for line in verdict(report):
        console.print(Text(line))


def _draw(report: Report, path: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        sys.exit("--figure needs matplotlib: pip install 'lightning-distkit[plot]', or leave it out")
    unit, size = _unit(_largest(report))
    chart = Figure(figsize=(9, 1.5 + 0.6 * len(report.estimates)), layout="constrained")
    axes = chart.subplots()
    names = [NAMES[stage] for stage in report.estimates]
    left = [0.0] * len(names)
    for kind in _kinds(report):
        values = [getattr(each, kind) / size for each in report.estimates.values()]
        axes.barh(names, values, left=left, label=KINDS[kind], color=f"C{list(KINDS).index(kind)}")
        left = [begin + value for begin, value in zip(left, values, strict=True)]
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:,.2f}", va="center")
    limit = _shown_limit(report)
    if limit:
        axes.axvline(limit / size, color="black", linestyle="--", label=_amount(limit))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(*left, limit / size))
    axes.set(title=report.about, xlabel=f"{unit} on each of {_ranks(report.world_size)}, before activations")
    chart.legend(loc="outside lower center", ncols=4)
    try:
        chart.savefig(path)
    except (OSError, ValueError) as error:
        sys.exit(f"--figure must be where a picture can be written, as memory.png: {error}")
