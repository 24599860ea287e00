"""A pipeline schedule drawn: when each rank does what, how long it waits, and how many activations it holds."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_distkit.core.pipeline.schedules import SCHEDULES, Action
from lightning_distkit.core.pipeline.timeline import Costs, Slot, Timeline, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.text import Text

STYLES = {"F": ("bold white on blue", "bold white on bright_blue"), "B": ("bold black on green", "bold black on cyan")}
COLORS = {"F": ("#4878cf", "#8fb0ea"), "B": ("#3f9b57", "#93cf9f")}  # of every other micro-batch the second
NAMES = {"F": "forward", "B": "backward"}
_WIDTH = 14.0  # of the picture, in inches, of which four fifths are bars
_LETTER = 0.065  # inches


@dataclass(frozen=True)
class Report:
    """What there is to say, however it is said."""

    about: str
    timeline: Timeline


def timeline(
    schedule: str = "1f1b",
    stages: int = 4,
    chunks: int = 8,
    stages_per_rank: int | None = None,
    forward: float | list[float] = 1,
    backward: float | list[float] = 2,
    message: float = 0,
    png: str | None = None,
    json_lines: bool = False,
) -> None:
    """Draw a pipeline schedule, with each rank's share of idle time and the activations that it holds at most.

    Nothing is run: it is what the schedule says if stages cost so much.

    Args:
        schedule: gpipe, 1f1b or interleaved_1f1b.
        stages: into how many the model is cut.
        chunks: the number of micro-batches.
        stages_per_rank: how many stages a rank has; by default 2 for interleaved_1f1b, else 1.
        forward: what the forward of a micro-batch costs, in every stage, or of each stage as [1,2,1,1]; in any unit.
        backward: what its backward costs; where activations are recomputed, that includes another forward.
        message: how long an activation or a gradient is on its way to another rank.
        png: where to write a picture, as "timeline.png".
        json_lines: print JSON instead of a drawing.
    """
    report = Report(*_simulated(schedule, stages, chunks, stages_per_rank, forward, backward, message))
    if png is not None:
        _save(report, png)
    say = _as_json if json_lines else _on_screen
    say(report)


def _simulated(
    schedule: str,
    stages: int,
    chunks: int,
    stages_per_rank: int | None,
    forward: Costs,
    backward: Costs,
    message: float,
) -> tuple[str, Timeline]:
    if schedule not in SCHEDULES:
        sys.exit(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if stages_per_rank is None:
        stages_per_rank = 2 if schedule == "interleaved_1f1b" else 1
    for name, value in (("stages", stages), ("chunks", chunks), ("stages_per_rank", stages_per_rank)):
        if value < 1:
            sys.exit(f"{name} must be at least 1, got {value}")
    if stages % stages_per_rank:
        sys.exit(
            f"stages must be a multiple of stages_per_rank, as each rank has as many, got {stages} and "
            f"{stages_per_rank}; {stages // stages_per_rank * stages_per_rank + stages_per_rank} would do"
        )
    n_ranks = stages // stages_per_rank
    try:
        simulated = simulate(SCHEDULES[schedule](n_ranks, chunks, stages_per_rank), forward, backward, message)
    except ValueError as error:
        sys.exit(str(error))
    if simulated.duration == 0:
        sys.exit(f"forward and backward must not both cost nothing, got {forward} and {backward}")
    about = f"{schedule}: {_n(stages, 'stage')} on {_n(n_ranks, 'rank')}, {_n(chunks, 'micro-batch', 'micro-batches')}"
    return about, simulated


def _n(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _as_json(report: Report) -> None:
    timeline = report.timeline
    first: dict[str, Any] = {"about": report.about, "duration": timeline.duration, "bubble": timeline.bubble}
    lines = [
        {
            "rank": rank,
            "bubble": bubble,
            "live_activations": n_alive,
            "actions": [[str(slot.action), slot.begin, slot.end] for slot in slots],
        }
        for rank, (slots, bubble, n_alive) in enumerate(
            zip(timeline.ranks, timeline.bubbles, timeline.live_activations, strict=True)
        )
    ]
    for line in (first, *lines):
        sys.stdout.write(json.dumps(line) + "\n")


def _on_screen(report: Report) -> None:
    try:
        from rich.console import Console
        from rich.text import Text
    except ModuleNotFoundError:
        sys.exit("the drawing needs rich: pip install 'lightning-distkit[cli]', or ask for --json_lines=true")
    console = Console(highlight=False)
    timeline = report.timeline
    example = (
        "F3.2 is the forward of micro-batch 2 in stage 3"
        if timeline.several_stages_a_rank
        else ("F2 is the forward of micro-batch 2")
    )
    console.print(Text(f"{report.about}. A row is a rank; {example}, B its backward."))
    names = [f"rank {rank} " for rank in range(len(timeline.ranks))]
    margin = max(map(len, names))
    for n, lines in enumerate(systems(timeline, max(10, console.width - margin))):
        if n:
            console.print()
        for name, line in zip(names, lines, strict=True):
            console.print(Text.assemble(name.ljust(margin), line), no_wrap=True)
    console.print()
    for name, bubble, n_alive in zip(names, timeline.bubbles, timeline.live_activations, strict=True):
        held = _n(n_alive, "micro-batch", "micro-batches") + (" in one stage" if timeline.several_stages_a_rank else "")
        console.print(Text(f"{name.ljust(margin)}idle {bubble:5.1%}, holds the activations of at most {held}"))
    faster = len(names) * (1 - timeline.bubble)
    console.print(Text(f"Bubble: {timeline.bubble:.1%} of all ranks' time. The step takes {timeline.duration:g}."))
    console.print(Text(f"With {_n(len(names), 'rank')} it is at best {faster:.2f} times as fast as with one."))


def systems(timeline: Timeline, width: int) -> list[list[Text]]:
    """The drawing, a line a rank, broken as music is where it is longer than ``width``.

    The shortest action gets room for its label and a gap, if that is no more than four pieces; else, so that it is one
    piece, for less, and at last for F or B alone.
    """
    from rich.text import Text

    slots = [slot for rank in timeline.ranks for slot in rank if slot.begin < slot.end]
    shortest = min(slot.end - slot.begin for slot in slots)
    length = timeline.duration / shortest  # in shortest actions
    roomy = 1 + max(len(timeline.label(slot.action)) for slot in slots)
    n_letters = roomy if length * roomy <= 4 * width else max(1, min(roomy, int(width / length)))

    def at(time: float) -> int:
        return round(time * n_letters / shortest)

    lines = []
    for rank in timeline.ranks:
        line = Text()
        for slot in rank:
            line.append("." * (at(slot.begin) - len(line)))
            room = at(slot.end) - at(slot.begin)
            gap = 1 if room > 1 and n_letters == roomy else 0
            line.append(_fitting(timeline.label(slot.action), room - gap), _style(slot.action))
            line.append(" " * gap)
        line.append("." * (at(timeline.duration) - len(line)))
        lines.append(line)
    width = max(1, width // n_letters) * n_letters
    return [[line[begin : begin + width] for line in lines] for begin in range(0, len(lines[0]), width)]


def _fitting(label: str, length: int) -> str:
    return (label if len(label) <= length else label[:1]).ljust(length, "-")[:length]


def _style(action: Action) -> str:
    return STYLES[action.kind][action.micro_batch % 2]


def timeline_figure(timeline: Timeline, title: str) -> Figure:
    """The picture: a row a rank, with its idle time and what it holds behind it."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    n_ranks = len(timeline.ranks)
    figure = Figure(figsize=(_WIDTH, 1.6 + 0.45 * n_ranks), layout="constrained")
    axes = figure.subplots()
    for rank, slots in enumerate(timeline.ranks):
        bars = [(slot.begin, slot.end - slot.begin) for slot in slots]
        colors = [COLORS[slot.action.kind][slot.action.micro_batch % 2] for slot in slots]
        axes.broken_barh(bars, (rank - 0.4, 0.8), facecolors=colors, edgecolor="white", linewidth=0.5)
        for slot in slots:
            label = timeline.label(slot.action)
            if len(label) * _LETTER < 0.8 * _WIDTH * (slot.end - slot.begin) / timeline.duration:
                _write(axes, slot, rank, label)
    axes.set_yticks(range(n_ranks), [f"rank {rank}" for rank in range(n_ranks)])
    behind = axes.secondary_yaxis("right")
    notes = [
        f"idle {bubble:.1%}, holds {n_alive}"
        for bubble, n_alive in zip(timeline.bubbles, timeline.live_activations, strict=True)
    ]
    behind.set_yticks(range(n_ranks), notes)
    axes.invert_yaxis()
    axes.margins(x=0)
    axes.set(title=f"{title}; bubble {timeline.bubble:.1%}", xlabel="time")
    axes.legend(
        handles=[Patch(color=COLORS[kind][0], label=NAMES[kind]) for kind in NAMES],
        loc="lower left",
        ncols=2,
        bbox_to_anchor=(0, 1),
    )
    return figure


def _write(axes: Any, slot: Slot, rank: int, label: str) -> None:
    color = "white" if slot.action.micro_batch % 2 == 0 else "black"
    middle = (slot.begin + slot.end) / 2
    axes.text(middle, rank, label, ha="center", va="center", color=color, fontsize=7, clip_on=True)


def _save(report: Report, path: str) -> None:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        sys.exit("--png needs matplotlib: pip install 'lightning-distkit[plot]', or leave it out")
    try:
        timeline_figure(report.timeline, report.about).savefig(path)
    except (OSError, ValueError) as error:
        sys.exit(f"--png must be where a picture can be written, as timeline.png: {error}")
