"""The score matrix as a picture: which rank computes which entries."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from weft.declare.strategy import Role
from weft.inspect import picture
from weft.plan.order import Spans, count, positions
from weft.plan.plan import Plan
from weft.plan.sides import Side

#: Positions drawn per side; a longer axis is sampled evenly.
RESOLUTION = 640
#: Chunk borders are drawn while there are no more than this many.
MAX_BORDERS = 40
#: Ticks are put at chunk borders where there is room for this many.
MAX_TICKS = 12
#: Groups of ranks that the legend names.
MAX_LEGEND = 24
#: Cells per side of the grid on which places for numbers are sought.
COARSE = 96


def colours(number: int) -> np.ndarray:
    """A colour per rank, (number, 3) in 0..1; the first 8 differ for colour-blind readers, too.

    Wong's palette, lightened with white so that black text stays readable, and again by steps for
    every 8 ranks.
    """
    rounds = math.ceil(number / len(picture.WONG))
    result = []
    for i in range(number):
        base = np.array(to_rgb(picture.WONG[i % len(picture.WONG)]))
        white = 0.30 + 0.5 * (i // len(picture.WONG)) / max(1, rounds)
        result.append(base * (1 - white) + white)
    return np.array(result).reshape(-1, 3)


def owners(plans: Sequence[Plan], backward: bool = False) -> tuple[np.ndarray, list[list[int]]]:
    """The group of ranks that computes each sampled (query, key), -1 where none does.

    Ranks that compute the same entries, of other heads or sequences, are one group.
    """
    p = plans[0].problem
    rows, columns = (sampled(total) for total in (p.n, p.m))
    groups = _groups(plans)
    drawn = np.full((len(rows), len(columns)), -1, dtype=np.int32)
    for number, ranks in enumerate(groups):
        plan = plans[ranks[0]]
        tile = plan.backward if backward else plan.forward
        for block in tile.program.blocks:
            planned = tile.block(block)
            q, k = _where(planned.q_spans, rows), _where(planned.kv_spans, columns)
            for call in planned.calls:
                r = _within(q, call.q0, call.q1)
                c = _within(k, call.k0, call.k1)
                drawn[np.ix_(r, c)] = number
    drawn[~_visible(plans[0], rows, columns)] = -1
    return drawn, groups


def draw_score_matrix(
    plans: Sequence[Plan], path: str | Path, title: str = "", backward: bool = False
) -> None:
    """Write the picture: coloured by rank, masked entries white, chunk borders as dashed lines."""
    picture.writable(path)
    drawn, groups = owners(plans, backward)
    palette = np.vstack([colours(len(groups)), [1.0, 1.0, 1.0]])
    p = plans[0].problem
    figure = Figure(figsize=(4.9, 3.7), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(
        palette[drawn],
        extent=(0, p.m, p.n, 0),
        interpolation="nearest",
        aspect="equal" if 0.5 <= p.n / max(1, p.m) <= 2 else "auto",
    )
    _borders(axes, plans)
    _numbers(axes, drawn, groups, palette)
    axes.set_xlabel("key position", fontsize=picture.NORMAL)
    axes.set_ylabel("query position", fontsize=picture.NORMAL)
    axes.set_title(title, fontsize=picture.NORMAL + 1)
    axes.tick_params(labelsize=picture.SMALL)
    _legend(axes, drawn, groups, palette)
    picture.save(figure, path)


def _legend(axes: Axes, drawn: np.ndarray, groups: list[list[int]], palette: np.ndarray) -> None:
    """Right of the matrix: the colour of every group of ranks and its share of the scores."""
    share = np.bincount(drawn[drawn >= 0], minlength=len(groups)) / max(1, (drawn >= 0).sum())
    handles = [
        Patch(facecolor=palette[i], label=f"{_name(ranks)}: {share[i]:.0%}")
        for i, ranks in enumerate(groups[:MAX_LEGEND])
    ]
    if len(groups) > MAX_LEGEND:
        handles.append(Patch(alpha=0, label=f"... {len(groups) - MAX_LEGEND} more"))
    if (drawn < 0).any():
        handles.append(Patch(facecolor="white", label="masked"))
    for handle in handles:
        handle.set(edgecolor="0.4", linewidth=0.5)
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.03, 1.0),
        borderaxespad=0.0,
        borderpad=0.0,
        title="scores computed by",
        alignment="left",
        frameon=False,
        fontsize=picture.SMALL,
        title_fontsize=picture.SMALL,
    )


def _groups(plans: Sequence[Plan]) -> list[list[int]]:
    splits = [d for d, rule in plans[0].rules.items() if rule.role in (Role.QUERY, Role.KEY)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, plan in enumerate(plans):
        groups.setdefault(tuple(plan.coords[d] for d in splits), []).append(rank)
    return list(groups.values())


def sampled(total: int) -> np.ndarray:
    """Positions that are drawn: all of them, or evenly spread ones."""
    if total <= RESOLUTION:
        return np.arange(total)
    return ((np.arange(RESOLUTION) + 0.5) * total / RESOLUTION).astype(np.int64)


def _where(spans: Spans, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Memory index and picture index of the sampled positions among some spans."""
    held = positions(spans).numpy()
    index = np.searchsorted(samples, held)
    index[index == len(samples)] = 0
    hit = np.flatnonzero(samples[index] == held) if len(samples) else np.empty(0, np.int64)
    return hit, index[hit]


def _within(where: tuple[np.ndarray, np.ndarray], low: int, high: int) -> np.ndarray:
    memory, picture = where
    return picture[(memory >= low) & (memory < high)]


def _visible(plan: Plan, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The sampled entries that the mask lets through, for the first sequence and head."""
    zero = torch.zeros((), dtype=torch.int64)
    q, k = torch.from_numpy(rows)[:, None], torch.from_numpy(columns)[None]
    seen = plan.problem.mask.allowed(zero, zero, q, k)
    return torch.broadcast_to(seen, (len(rows), len(columns))).numpy()


def _chunk_borders(plans: Sequence[Plan], side: Side) -> list[int]:
    """Positions where another rank's chunk begins at rest."""
    first: set[int] = set()
    for plan in plans:
        spans = plan.resharding[side].state(0, plan.coords).spans
        if any(span.step > 1 for span in spans):  # striped: every position is a border
            return []
        first |= {span.start for span in spans if count(spans)}
    return sorted(first - {0})


def _borders(axes: Axes, plans: Sequence[Plan]) -> None:
    """Dashed lines between chunks at rest; where they are few, the ticks are theirs."""
    p = plans[0].problem
    drawn = (axes.axhline, axes.yaxis, p.n), (axes.axvline, axes.xaxis, p.m)
    for side, (line, ruler, length) in zip(Side, drawn):
        borders = _chunk_borders(plans, side)
        for at in borders if len(borders) <= MAX_BORDERS else ():
            line(at, color="0.25", linewidth=0.6, linestyle=(0, (4, 3)))
        ticks = [0, *borders, length]
        if borders and min(b - a for a, b in itertools.pairwise(ticks)) >= length / MAX_TICKS:
            ruler.set_ticks(ticks)


def _numbers(axes: Axes, drawn: np.ndarray, groups: list[list[int]], palette: np.ndarray) -> None:
    """Each group's ranks written into its areas, where those are large enough."""
    m, n = axes.get_xlim()[1], axes.get_ylim()[0]
    rows, columns = (
        np.linspace(0, size - 1, min(size, COARSE)).astype(int) for size in drawn.shape
    )
    coarse = drawn[np.ix_(rows, columns)]
    for number, area in _areas(coarse):
        depth, row, column = _middle(area)
        if depth >= COARSE // 25:
            x, y = ((column + 0.5) * m / len(columns), (row + 0.5) * n / len(rows))
            label = axes.text(x, y, _short(groups[number]), ha="center", va="center")
            # In the area's own colour: the border lines stop short of the letters.
            around = withStroke(linewidth=3, foreground=palette[number])
            label.set(fontsize=picture.NORMAL, path_effects=[around])


def _areas(grid: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Connected cells of one number, as (number, mask)."""
    left = grid >= 0
    while left.any():
        start = np.argwhere(left)[0]
        number = grid[tuple(start)]
        area, grown = np.zeros_like(left), np.zeros_like(left)
        grown[tuple(start)] = True
        while (grown != area).any():
            area, grown = grown, _neighbours(grown, np.logical_or) & (grid == number)
        left &= ~area
        yield int(number), area


def _neighbours(mask: np.ndarray, combine: Callable) -> np.ndarray:
    """Each cell combined with its four neighbours; beyond the edge is False."""
    padded = np.pad(mask, 1)
    neighbours = (padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:])
    return functools.reduce(combine, neighbours, mask)


def _middle(area: np.ndarray) -> tuple[int, float, float]:
    """The number of times that an area can be eroded, and the middle of the last remainder."""
    depth = 0
    while (smaller := _neighbours(area, np.logical_and)).any():
        area, depth = smaller, depth + 1
    cells = np.argwhere(area)
    row, column = cells[np.abs(cells - cells.mean(0)).sum(1).argmin()]
    return depth, float(row), float(column)


def _short(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 2 else f"{ranks[0]}, ..."


def _name(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:4]))
    return f"ranks {shown}" + (", ..." if len(ranks) > 4 else "")
