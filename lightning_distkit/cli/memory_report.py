"""What `distkit estimate` has to say: on the screen, as JSON, as a picture, and what fits."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

from lightning_distkit.core.zero.estimate import WORLD_SIZES, MemoryEstimate

NAMES = {0: "DDP", 1: "stage 1", 2: "stage 2", 3: "stage 3"}  # ZeRO's
KINDS = {field.name: field.name.replace("_", " ") for field in fields(MemoryEstimate)}
COLORS = ("blue", "bright_black", "green", "magenta", "red", "cyan", "yellow", "bright_blue", "bright_magenta")
UNITS: dict[str, float] = {
    "B": 1,
    **{f"{prefix}B": 1000**n for n, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**n for n, prefix in enumerate("KMGT", 1)},
}


@dataclass(frozen=True)
class Report:
    """What there is to say, however it is said."""

    about: str
    world_size: int
    estimates: dict[int, MemoryEstimate]  # by stage
    limit: float | None  # bytes a rank
    world_sizes: dict[int, int | None]  # by stage, the smallest that fits


def _unit(largest: float) -> tuple[str, float]:
    return next(((unit, UNITS[unit]) for unit in ("GB", "MB", "kB") if largest >= UNITS[unit]), ("B", 1.0))


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


def as_json(report: Report) -> None:
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


def on_screen(report: Report) -> None:
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


def draw(report: Report, path: str) -> None:
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
