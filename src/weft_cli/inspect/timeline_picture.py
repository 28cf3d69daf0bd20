"""A timeline as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from weft.inspect import picture
from weft.inspect.events import COMPUTE, Event
from weft.inspect.picture import NORMAL, SMALL

#: Ranks drawn; more would be too small to read.
MAX_RANKS = 16
#: Inches: the width of a page's text, more where steps are many; what surrounds the panels; the
#: height of a lane; the least width of a step; the width of a letter of the small size.
WIDTH, WIDEST, MARGIN, LANE, STEP, LETTER = 7.2, 14.0, 1.1, 0.17, 0.42, 0.062
#: How much paler a block is of which next to nothing is visible.
PALE = 0.65

BLUE, ORANGE, GREEN, PINK, _, RED, _, _ = picture.WONG


def lighter(colour: str, white: float) -> str:
    """A colour mixed with a share of white, so that black text stays readable on it."""
    red, green, blue = (part * (1 - white) + white for part in to_rgb(colour))
    return to_hex((red, green, blue))


COLOURS = {
    COMPUTE: lighter(BLUE, 0.55),
    "q": lighter(GREEN, 0.5),
    "kv": lighter(ORANGE, 0.45),
    "out": lighter(PINK, 0.4),
    "dq": lighter(PINK, 0.4),
    "dkv": lighter(RED, 0.4),
}
OTHER = "#D9D9D9"
NAMES = {
    COMPUTE: "computes query × key chunks",
    "partly": "computes, partly masked",
    "masked": "all masked: nothing to compute",
    "q": "queries arrive (backward: with dO, lse, delta)",
    "kv": "keys and values arrive",
    "out": "partial outputs leave (backward: dq)",
    "dkv": "dk and dv leave",
    "": "reshard: all-to-all, all-reduce",
}
EDGE = {"edgecolor": "0.35", "linewidth": 0.5}


@dataclass(frozen=True)
class _Grid:
    """Positions of bars: per rank a row of lanes, as high as they have simultaneous events."""

    ranks: tuple[int, ...]
    lanes: dict[str, int]

    @property
    def height(self) -> float:
        """Height of a rank's row, in lanes of one event."""
        return sum(self.lanes.values()) + 0.5

    def y(self, rank: int, lane: str, slot: float = 0.0) -> float:
        """The middle of an event's place."""
        above = list(self.lanes.values())[: list(self.lanes).index(lane)]
        return self.ranks.index(rank) * self.height + sum(above) + slot


def draw_timeline(every: Sequence[Event], unit: str, path: str | Path, title: str = "") -> None:
    """Forward on the left, backward on the right; a row per rank with a lane per mesh dim.

    Both panels have the same scale: a step, or a millisecond, is as wide in one as in the other.
    """
    picture.writable(path)
    ranks = sorted({e.rank for e in every})
    shown = tuple(ranks[:MAX_RANKS])
    events = [e for e in _joined(every) if e.rank in shown]
    passes = [[e for e in events if e.backward == backward] for backward in (False, True)]
    passes = [events for events in passes if events] or [[]]
    grid = _Grid(shown, _lanes(passes))
    figure, panels, scale = _panels(passes, grid, unit)
    for axes, first in zip(panels, passes):
        _panel(axes, first, grid, scale)
        name = "backward" if first and first[0].backward else "forward"
        axes.set_title(name, fontsize=NORMAL)
        axes.set_xlabel(unit, fontsize=SMALL)
        if unit == "step":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _labels(panels[0], grid)
    left_out = f" (ranks 0 to {shown[-1]} of {len(ranks)})" if len(ranks) > len(shown) else ""
    figure.suptitle(title + left_out, fontsize=NORMAL + 1)
    _legend(figure, events)
    picture.save(figure, path)


def _joined(events: Sequence[Event]) -> list[Event]:
    """Chunks that travel together as one event: kv 1, kv 2 and kv 3 are kv 1,2,3."""
    together: dict[tuple, Event] = {}
    for e in events:
        key = (e.rank, e.backward, e.lane, _kind(e), e.start, e.end)
        if e.lane != COMPUTE and key in together:
            first = together[key]
            together[key] = replace(first, what=f"{first.what},{e.what.partition(' ')[2]}")
        else:
            together[key] = e
    return list(together.values())


def _lanes(passes: Sequence[Sequence[Event]]) -> dict[str, int]:
    """Each lane, computation first, with the most events that it has at the same time."""
    lanes = {COMPUTE: 1}
    for events in passes:
        for e, slot in _slots(events):
            lanes[e.lane] = max(lanes.get(e.lane, 1), slot + 1)
    return {COMPUTE: lanes.pop(COMPUTE), **dict(sorted(lanes.items()))}


def _panels(
    passes: Sequence[Sequence[Event]], grid: _Grid, unit: str
) -> tuple[Figure, Sequence, float]:
    """A figure, its empty panels, each as wide as its pass is long, and the inches of a unit."""
    spans = [max((e.end for e in events), default=1.0) - _start(events) for events in passes]
    total = sum(spans)
    widths = [max(span, 0.15 * total) for span in spans]
    preferred = MARGIN + STEP * sum(widths) if unit == "step" else WIDTH
    width = min(max(WIDTH, preferred), WIDEST)
    height = MARGIN + LANE * max(6, grid.height * len(grid.ranks))
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(1, len(passes), sharey=True, squeeze=False, width_ratios=widths)[0]
    for axes, span in zip(panels, widths):
        axes.set_xlim(0, span)
    return figure, panels, (width - MARGIN) / sum(widths)


def _start(events: Sequence[Event]) -> float:
    return min((e.start for e in events), default=0.0)


def _panel(axes: Axes, events: Sequence[Event], grid: _Grid, scale: float) -> None:
    axes.set_ylim(len(grid.ranks) * grid.height - 0.75, -0.75)
    first = _start(events)
    for e, slot in _slots(events):
        _bar(axes, e, e.start - first, grid.y(e.rank, e.lane, slot), scale)
    for i in range(1, len(grid.ranks)):
        axes.axhline(i * grid.height - 0.75, color="0.85", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL)
    axes.tick_params(axis="y", length=0)


def _bar(axes: Axes, e: Event, start: float, y: float, scale: float) -> None:
    """Draw an event; label it if the label fits."""
    width, style = e.end - e.start, _style(_kind(e) if e.work else "masked")
    if 0 < e.work < 1:
        style |= _style("partly")
        style["facecolor"] = lighter(COLOURS[COMPUTE], PALE * (1 - e.work))
    axes.barh(y, width, left=start, height=0.84, clip_on=False, **style)
    text = _text(e)
    if (len(text) + 1) * LETTER <= width * scale:
        colour = "black" if e.work else "0.45"
        axes.text(
            start + width / 2,
            y,
            text,
            fontsize=SMALL,
            color=colour,
            ha="center",
            va="center_baseline",
        )


def _style(kind: str) -> dict:
    """Fill and edge of bars of a kind, and of its patch in the legend."""
    if kind == "masked":
        return {"facecolor": "white", "edgecolor": "0.7", "linewidth": 0.5, "linestyle": ":"}
    if kind == "partly":
        return {"facecolor": lighter(COLOURS[COMPUTE], PALE / 2), **EDGE, "hatch": "////"}
    return {"facecolor": COLOURS.get(kind, OTHER), **EDGE}


def _slots(events: Sequence[Event]) -> Iterator[tuple[Event, int]]:
    """Every event with its place among those at the same time on its lane."""
    ends: dict[tuple[int, str], list[float]] = {}
    for e in sorted(events, key=lambda e: e.start):
        row = ends.setdefault((e.rank, e.lane), [])
        slot = next((i for i, end in enumerate(row) if end <= e.start + 1e-9), len(row))
        row[slot : slot + 1] = [e.end]
        yield e, slot


def _kind(e: Event) -> str:
    """Chunks in flight by their payload; all-to-alls of full tensors name no chunk."""
    if e.lane == COMPUTE:
        return COMPUTE
    payload, _, chunk = e.what.partition(" ")
    return payload if chunk else ""


def _text(e: Event) -> str:
    if e.lane == COMPUTE:
        text = e.what.replace("q ", "").replace("kv ", "").replace(" x ", "×")
        return text if e.work else "masked"
    return e.what


def _labels(axes: Axes, grid: _Grid) -> None:
    places = [(rank, lane) for rank in grid.ranks for lane in grid.lanes]
    at = [grid.y(rank, lane, (grid.lanes[lane] - 1) / 2) for rank, lane in places]
    text = [f"rank {rank}" if lane == COMPUTE else lane for rank, lane in places]
    axes.set_yticks(at, text, fontsize=SMALL)
    for label, (_, lane) in zip(axes.get_yticklabels(), places):
        label.set_fontweight("bold" if lane == COMPUTE else "normal")


def _legend(figure: Figure, events: Sequence[Event]) -> None:
    kinds = {{"dq": "out"}.get(kind, kind) for kind in map(_kind, events)}
    kinds |= {"masked" for e in events if not e.work}
    kinds |= {"partly" for e in events if 0 < e.work < 1}
    handles = [Patch(label=name, **_style(kind)) for kind, name in NAMES.items() if kind in kinds]
    columns = {4: 2}.get(len(handles), min(3, len(handles)))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=max(1, columns),
        frameon=False,
        fontsize=SMALL,
    )
