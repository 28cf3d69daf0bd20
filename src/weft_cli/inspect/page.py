"""Layouts of a call side by side, as a page that plays them in a browser; it needs no network.

Everything that it shows is the planner's: events of its clock, bytes of its plans. Of many ranks it
draws one node, which stands for its images; messages to them are drawn within it, as others across
nodes are.
"""

from __future__ import annotations

import functools
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.declare.hardware import Hardware
from weft.errors import DeclarationError
from weft.inspect.picture import writing
from weft.layout import Layout
from weft.plan.memory import memory_bound
from weft.plan.order import Spans, positions
from weft.plan.plan import Plan
from weft.plan.predict import forecast_of
from weft.plan.problem import Problem
from weft_planner.flow import replayed
from weft_planner.played import play

from .score_matrix import colours, owners, sampled

#: Cells per side of the score matrix, and ranks that are played one by one.
SIDE, MOST = 64, 64
_TEMPLATE = Path(__file__).with_name("page.html")


def write_page(
    layouts: Sequence[Layout], problem: Problem, hardware: Hardware, title: str, path: Path
) -> None:
    """Write the page."""
    if path.suffix != ".html":
        raise DeclarationError(f"--html {str(path)!r}: a page ends in .html")
    if not layouts:
        raise DeclarationError("--html: no layout of several ranks, so there is nothing to play")
    data = [layout_data(layout, problem, hardware) for layout in layouts]
    text = _TEMPLATE.read_text().replace("TITLE", html.escape(title))
    # "<" ends no script of the page, whatever a layout is called.
    numbers = json.dumps({"layouts": data}, separators=(",", ":")).replace("<", "\\u003c")
    with writing(path) as partial:
        partial.write_text(text.replace("/*DATA*/", numbers))


def layout_data(layout: Layout, problem: Problem, hardware: Hardware) -> dict[str, Any]:
    """Data of a layout for the page, as plain values."""
    plans = list(replayed(layout, problem, hardware, MOST).plans)
    played = play(plans, hardware)
    drawn, groups = owners(plans)
    rows, columns = (np.linspace(0, size - 1, min(SIDE, size)).astype(int) for size in drawn.shape)
    cells = drawn[np.ix_(rows, columns)]
    lists: dict[tuple[int, ...], int] = {}
    where = _Cells(problem, rows, columns)
    blocks = []
    for b in played.blocks:
        plan = plans[b.rank]
        found = (plan.backward if b.backward else plan.forward).block(b.block)
        sides = [
            lists.setdefault(where.of(spans, queries), len(lists))
            for spans, queries in ((found.q_spans, True), (found.kv_spans, False))
        ]
        blocks.append((b.rank, int(b.backward), b.step, *sides, _short(b.begin), _short(b.end)))
    forecasts = [forecast_of(plan) for plan in plans]
    return {
        "name": layout.name,
        "mesh": dict(layout.mesh),
        "ranks": layout.world_size,
        "node": hardware.level[0].ranks if hardware.level[0].ranks > 0 else layout.world_size,
        "levels": [level.name for level in hardware.level],
        "coords": [dict(plan.coords) for plan in plans],
        "cells": cells.tolist(),
        "groups": groups,
        "lists": [list(each) for each in lists],
        "blocks": blocks,
        "messages": [
            (m.source, m.target, m.mesh_dim, m.nbytes, m.level, _short(m.begin), _short(m.end))
            for m in played.messages
            if m.nbytes
        ],
        "forward": played.timing.forward,
        "total": played.timing.total,
        "rest": [forecast.rest_bytes for forecast in forecasts],
        "held": [_held(plan) for plan in plans],
        "work": [forecast.forward.entries + forecast.backward.entries for forecast in forecasts],
        "colours": [
            "#" + "".join(f"{round(255 * x):02x}" for x in colour) for colour in colours(len(plans))
        ],
    }


def _short(seconds: float) -> float:
    return float(f"{seconds:.7g}")


def _held(plan: Plan) -> int:
    return max(memory_bound(plan.forward).nbytes, memory_bound(plan.backward).nbytes)


class _Cells:
    """Rows or columns of the drawn matrix that hold some positions."""

    def __init__(self, problem: Problem, rows: np.ndarray, columns: np.ndarray) -> None:
        self.samples = [
            sampled(total)[at] for total, at in zip((problem.n, problem.m), (rows, columns))
        ]
        self.of = functools.cache(self._of)

    def _of(self, spans: Spans, queries: bool) -> tuple[int, ...]:
        inside = np.isin(self.samples[not queries], positions(spans, "cpu").numpy())
        return tuple(np.flatnonzero(inside).tolist())
