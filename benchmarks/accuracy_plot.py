"""The picture of `benchmarks.accuracy`: AUC per table, mean ranks, ours less the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.accuracy_report import NAMES, means, ranks, split, table_interval

_HUES = ("#d62728", "#1f77b4", "#6baed6", "#8c6d31", "#2ca02c", "#7b4fa3", "#c5a3e0")
COLOURS = dict(zip(NAMES, _HUES, strict=True))


def plot(results: dict, file: Path) -> None:
    """Draw the tables that every side has measured: those only reported, where there are any.

    Args:
        results: of `benchmarks.accuracy`.
        file: a .png.
    """
    reported = split(results, reported_only=True)
    sides, tables, auc = means(reported if reported["tables"] else results, "auc")
    if not tables:
        return
    figure = Figure(figsize=(12, 4 + 0.16 * len(tables)), layout="constrained")
    panels = [["tables", "ranks"], ["tables", "differences"]]
    if "weft" not in sides:
        panels = [["tables", "ranks"]]
    axes = figure.subplot_mosaic(panels, width_ratios=(3, 2))
    _tables(axes["tables"], sides, tables, auc)
    _ranks(axes["ranks"], sides, ranks(auc, "auc"))
    if "weft" in sides:
        _differences(axes["differences"], sides, auc)
    for each in axes.values():
        each.spines[["top", "right"]].set_visible(False)
        each.grid(axis="x", color="#eeeeee")
        each.set_axisbelow(True)
    figure.savefig(file, dpi=110)


def _tables(axes: Axes, sides: list[str], tables: list[str], auc: np.ndarray) -> None:
    order = np.argsort(auc[:, sides.index("weft")] if "weft" in sides else auc.mean(axis=1))
    rows = np.arange(len(tables))
    axes.hlines(rows, auc[order].min(axis=1), auc[order].max(axis=1), color="#dddddd", zorder=1)
    for i, side in enumerate(sides):
        ours = {"s": 46, "marker": "D", "zorder": 3} if side == "weft" else {"s": 20, "zorder": 2}
        axes.scatter(auc[order, i], rows, color=COLOURS[side], label=NAMES[side], **ours)
    axes.set_yticks(rows, [tables[i] for i in order], fontsize=8)
    axes.set(xlabel="AUC, mean over 5 folds", ylim=(-0.7, len(tables) - 0.3))
    axes.set_title(f"{len(tables)} real tables", loc="left")
    axes.legend(loc="upper left", fontsize=8)


def _ranks(axes: Axes, sides: list[str], ranked: np.ndarray) -> None:
    for at, i in enumerate(np.argsort(-ranked.mean(axis=0))):
        _interval(axes, at, ranked[:, i], sides[i], f"{ranked[:, i].mean():.2f}")
    axes.set(yticks=[], ylim=(-0.6, len(sides) - 0.3), xlabel="mean rank; 1 is best")
    axes.set_title("Mean rank by AUC, with 95 % intervals", loc="left")
    axes.margins(x=0.25)
    axes.invert_xaxis()


def _differences(axes: Axes, sides: list[str], auc: np.ndarray) -> None:
    ahead = auc[:, [sides.index("weft")]] - auc
    others = [i for i, side in enumerate(sides) if side != "weft"]
    for at, i in enumerate(sorted(others, key=lambda i: -ahead[:, i].mean())):
        spread = np.random.default_rng(0).uniform(-0.13, 0.13, len(ahead))
        axes.scatter(ahead[:, i], at + spread, s=10, color=COLOURS[sides[i]], alpha=0.4)
        _interval(axes, at, ahead[:, i], sides[i], f"{ahead[:, i].mean():+.3f}")
    axes.axvline(0, color="#888888", lw=1, zorder=1)
    axes.set(yticks=[], ylim=(-0.6, len(others) - 0.3))
    axes.set_xlabel("AUC of weft less that of the other; a dot is a table")
    axes.set_title("weft against the others: ahead to the right", loc="left")


def _interval(axes: Axes, at: int, values: np.ndarray, side: str, text: str) -> None:
    low, high = table_interval(values)
    axes.plot((low, high), (at, at), color=COLOURS[side], lw=3, solid_capstyle="round")
    axes.plot(values.mean(), at, "D", color=COLOURS[side], ms=8)
    place = {"textcoords": "offset points", "ha": "center", "fontsize": 9}
    axes.annotate(f"{NAMES[side]}: {text}", (values.mean(), at), (0, 11), **place)
