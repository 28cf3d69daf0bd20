"""A timeline as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from .timeline import Event, Timeline

COMPUTE = "compute"
#: Ranks drawn; more would be too small to read.
MAX_RANKS = 16

# Wong's colour-blind safe palette, lightened so that black text stays readable.
COLOURS = {
    COMPUTE: "#9CC3E6",
    "q": "#8FD3B6",
    "kv": "#F5CB7F",
    "out": "#E3B6D3",
    "dq": "#E3B6D3",
    "dkv": "#EFA07A",
}
NAMES = {
    COMPUTE: "computes (q x kv chunks)",
    "q": "queries in flight (backward: q, dO, lse, delta)",
    "kv": "keys and values in flight",
    "out": "partial outputs or dq in flight",
    "dkv": "dk and dv in flight",
    "": "all-to-all, all-reduce",
}
OTHER = "#D9D9D9"


def draw(timeline: Timeline, path: str | Path, title: str = "") -> None:
    """Forward on the left, backward on the right; a row per rank with a lane per mesh dim."""
    ranks = sorted({e.rank for e in timeline.events})
    shown = ranks[:MAX_RANKS]
    lanes = [COMPUTE, *dict.fromkeys(e.lane for e in timeline.events if e.lane != COMPUTE)]
    passes = [b for b in (False, True) if any(e.backward == b for e in timeline.events)] or [False]
    height = max(3.0, 1.3 + 0.26 * len(lanes) * len(shown))
    figure = Figure(figsize=(6.0 * len(passes), height), layout="constrained")
    panels = figure.subplots(1, len(passes), sharey=True, squeeze=False)[0]
    for backward, axes in zip(passes, panels):
        events = [e for e in timeline.events if e.backward == backward and e.rank in shown]
        _panel(axes, events, shown, lanes)
        axes.set_title("backward" if backward else "forward", fontsize=10)
        axes.set_xlabel(timeline.unit, fontsize=8)
        if timeline.unit == "step":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _labels(panels[0], shown, lanes)
    left_out = f" (ranks 0 to {shown[-1]} of {len(ranks)})" if len(ranks) > len(shown) else ""
    figure.suptitle(title + left_out, fontsize=11)
    _legend(figure, timeline.events)
    figure.savefig(path, dpi=110, format="png")


def _panel(axes, events: Sequence[Event], ranks: Sequence[int], lanes: Sequence[str]) -> None:
    first = min((e.start for e in events), default=0.0)
    span = max((e.end for e in events), default=1.0) - first
    room = len(lanes) + 0.5
    for e, slot, slots in _slots(events):
        height = 0.84 / slots
        y = ranks.index(e.rank) * room + lanes.index(e.lane) - 0.42 + height * (slot + 0.5)
        start, width = e.start - first, e.end - e.start
        axes.barh(
            y,
            width,
            left=start,
            height=height,
            color=_colour(e) if e.work else "white",
            alpha=0.35 + 0.65 * e.work if e.work else 1.0,
            edgecolor="0.3",
            linewidth=0.5,
        )
        said, letters = _said(e), 60 * width / max(span, 1e-12)  # about how many fit into the bar
        if len(said) <= letters and slots <= 3:
            size = 7 if slots == 1 else 5
            axes.text(start + width / 2, y, said, ha="center", va="center", fontsize=size)
    for i in range(1, len(ranks)):
        axes.axhline(i * room - 0.75, color="0.85", linewidth=0.8)
    axes.set_ylim(len(ranks) * room - 0.75, -0.75)
    axes.set_xlim(0, span)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _slots(events: Sequence[Event]) -> Iterator[tuple[Event, int, int]]:
    """Every event with its place among those at the same time on its lane, and how many places."""
    rows: dict[tuple[int, str], list[Event]] = {}
    for e in events:
        rows.setdefault((e.rank, e.lane), []).append(e)
    for row in rows.values():
        ends: list[float] = []
        placed = []
        for e in sorted(row, key=lambda e: e.start):
            slot = next((i for i, end in enumerate(ends) if end <= e.start + 1e-9), len(ends))
            ends[slot : slot + 1] = [e.end]
            placed.append((e, slot))
        yield from ((e, slot, len(ends)) for e, slot in placed)


def _colour(e: Event) -> str:
    return COLOURS.get(_kind(e), OTHER)


def _kind(e: Event) -> str:
    """Chunks in flight by their cargo; exchanges of whole tensors name no chunk."""
    if e.lane == COMPUTE:
        return COMPUTE
    cargo, _, chunk = e.what.partition(" ")
    return cargo if chunk else ""


def _said(e: Event) -> str:
    if e.lane == COMPUTE:
        said = e.what.replace("q ", "").replace("kv ", "").replace(" x ", "×")
        return said if e.work else "masked"
    return e.what


def _labels(axes, ranks: Sequence[int], lanes: Sequence[str]) -> None:
    room = len(lanes) + 0.5
    at, said = [], []
    for i, rank in enumerate(ranks):
        for j, lane in enumerate(lanes):
            at.append(i * room + j)
            said.append(f"rank {rank}" if lane == COMPUTE else lane)
    axes.set_yticks(at, said, fontsize=8)
    for label in axes.get_yticklabels():
        if label.get_text().startswith("rank "):
            label.set_fontweight("bold")


def _legend(figure: Figure, events: Sequence[Event]) -> None:
    kinds = {{"dq": "out"}.get(kind, kind) for kind in map(_kind, events)}
    handles = [
        Patch(facecolor=COLOURS.get(kind, OTHER), edgecolor="0.3", linewidth=0.5, label=name)
        for kind, name in NAMES.items()
        if kind in kinds
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
