"""One picture of what compression did: rate and error over time, and each layer by what it costs and saves."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LAYERS = 30  # that fit into the picture


@dataclass(frozen=True)
class Layer:
    """One parameter of the model, in one step."""

    name: str
    nbytes_whole: int
    nbytes_sent: int
    relative_error: float

    @property
    def nbytes_saved(self) -> int:
        return self.nbytes_whole - self.nbytes_sent


def need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "figure=True needs matplotlib: pip install 'lightning-distkit[plot]', or give figure=False"
        )


def compression_figure(history: Sequence[Mapping[str, float]], layers: Sequence[Layer]) -> Figure:
    """Draw it.

    Args:
        history: "step", "rate" and "relative_error" of each logged step.
        layers: all of the last logged step; those that save most are drawn.
    """
    from matplotlib.figure import Figure

    drawn = sorted(layers, key=lambda layer: layer.nbytes_saved)[-_MOST_LAYERS:]
    figure = Figure(figsize=(12, 4 + 0.2 * len(drawn)), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for axes, key, title in (
        (left, "rate", "times fewer bytes than a plain all-reduce"),
        (middle, "relative_error", "part of the gradients that was left out"),
    ):
        points = [(each["step"], each[key]) for each in history if math.isfinite(each.get(key, math.nan))]
        axes.plot([step for step, _ in points], [value for _, value in points], marker="." if len(points) < 50 else "")
        axes.set(title=title, xlabel="step", ylim=(0, None))
        axes.grid(alpha=0.3)
    places = range(len(drawn))
    right.barh(places, [layer.nbytes_whole / 1e3 for layer in drawn], color="lightgray", label="whole")
    right.barh(places, [layer.nbytes_sent / 1e3 for layer in drawn], color="tab:blue", label="sent")
    for place, layer in zip(places, drawn, strict=True):
        text = f" {layer.relative_error:.0%} left out" if layer.nbytes_saved else " whole"
        right.text(layer.nbytes_whole / 1e3, place, text, va="center", fontsize=7)
    right.set_yticks(places, [layer.name for layer in drawn], fontsize=7)
    right.set(title="kB a step, layer by layer", xlabel="kB")
    right.margins(x=0.3)
    right.legend(loc="lower right")
    return figure
