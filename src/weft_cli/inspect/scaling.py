"""A picture of time against devices, a line per strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from weft.inspect import picture
from weft.inspect.picture import NORMAL, SMALL, WONG

#: Inches.
SIZE = (3.5, 2.8)


def draw_scaling(
    curves: Mapping[str, Sequence[tuple[int, float]]], path: str | Path, title: str = ""
) -> None:
    """Draw (devices, seconds) of every strategy on logarithmic axes, and the ideal line.

    >>> draw_scaling({"ring": [(2, 1.0), (4, 0.6)]}, "/tmp/scaling.png")
    """
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    for number, (name, points) in enumerate(curves.items()):
        devices, seconds = zip(*points)
        colour = WONG[number % len(WONG)]
        axes.plot(devices, seconds, "o-", color=colour, label=name, linewidth=1.2, markersize=3)
    first, slowest = min(min(points) for points in curves.values())
    counts = sorted({count for points in curves.values() for count, _ in points})
    ideal = [slowest * first / count for count in counts]
    axes.plot(counts, ideal, ":", color="0.5", label="ideal", linewidth=1.0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.set_xlabel("devices", fontsize=NORMAL)
    axes.set_ylabel("seconds, predicted", fontsize=NORMAL)
    axes.set_title(title, fontsize=NORMAL)
    axes.tick_params(labelsize=SMALL)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=SMALL)
    picture.save(figure, path)
