"""Pictures of a pipe: when each stage works, and what memory each rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_distkit.core.pipeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"F": "tab:blue", "B": "tab:orange"}
_MOST_LABELS = 200  # that can be read


def timeline_figure(timeline: Timeline, bubble_on_paper: float) -> Figure:
    """A row a rank, a bar an action."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 1.5 + 0.6 * len(timeline.ranks)), layout="constrained")
    axes = figure.subplots()
    begin = min((slot.begin for rank in timeline.ranks for slot in rank), default=0.0)
    is_labelled = sum(len(rank) for rank in timeline.ranks) <= _MOST_LABELS
    for row, rank in enumerate(timeline.ranks):
        for slot in rank:
            left, width = 1e3 * (slot.begin - begin), 1e3 * (slot.end - slot.begin)
            axes.barh(row, width, left=left, color=_COLOURS[slot.action.kind], edgecolor="white", linewidth=0.5)
            if is_labelled:
                label = timeline.label(slot.action)
                axes.text(left + width / 2, row, label, ha="center", va="center", fontsize=6, clip_on=True)
    axes.set_yticks(range(len(timeline.ranks)), [f"rank {row}" for row in range(len(timeline.ranks))])
    axes.invert_yaxis()
    axes.set(
        xlabel="milliseconds",
        title=f"stages do nothing for {timeline.bubble:.0%} of the time; on paper {bubble_on_paper:.0%}",
    )
    handles = [Patch(color=_COLOURS["F"], label="forward"), Patch(color=_COLOURS["B"], label="backward")]
    axes.legend(handles=handles, loc="upper right", fontsize=8)
    return figure


def memory_figure(ranks: Sequence[Mapping[str, float]]) -> Figure:
    """A bar a rank, of bytes by what holds them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.5 + 0.5 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(ranks)
    for name in ranks[0]:
        widths = [each[name] / 2**20 for each in ranks]
        axes.barh(range(len(ranks)), widths, left=left, label=name.replace("_", " "))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(ranks)), [f"rank {row}" for row in range(len(ranks))])
    axes.invert_yaxis()
    axes.set(xlabel="MiB", title="what each rank holds at most in a step")
    axes.legend(loc="lower right", fontsize=8)
    return figure
