"""Timelines: computation and transfers in flight, rank by rank, of a program or of a run.

A `Timeline` is drawn as a picture or written as a Chrome trace (chrome://tracing,
https://ui.perfetto.dev).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .._doors import opened
from ..declare.traffic import Traffic
from ..plan.order import count
from ..plan.plan import Pass, Plan
from ..plan.predict import forecast_of
from ..plan.program import Block, Transfer
from ..plan.sides import Side
from ..plan.tiles import entries
from ..runtime import marks as ranges
from .events import COMPUTE, Event, is_empty_event
from .picture import writing


@dataclass(frozen=True)
class Timeline:
    """Computations and transfers in flight, on all ranks.

    Attributes:
        events: of all ranks, each on a lane: "compute", or a mesh dim.
        unit: of their times: milliseconds ("ms"), or steps of the program ("step").

    >>> from weft import Layout
    >>> timeline = Layout.load("ring-2").plan("tokens", length=8, heads=1).timeline()
    >>> [(e.what, e.start, e.end) for e in timeline.events if e.rank == 0 and not e.backward]
    [('kv 1', 0, 1), ('q 0 x kv 0', 0.0, 1.0), ('q 0 x kv 1', 1.0, 2.0)]
    """

    events: tuple[Event, ...]
    unit: str = "ms"

    def draw(self, path: str | Path, title: str = "") -> None:
        """A picture (.png, .pdf or .svg): per rank what computes, and below what is in flight.

        Args:
            path: the file to write.
            title: above the picture.

        Raises:
            WeftError: a path of another ending, or in a folder that does not exist.
        """
        opened("draw_timeline")(self.events, self.unit, path, title)

    def chrome(self, path: str | Path) -> None:
        """A Chrome trace: a process per rank, a thread per lane; a step lasts a millisecond.

        Args:
            path: the file to write, JSON.
        """
        lanes = list(dict.fromkeys(e.lane for e in self.events))
        trace = [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
            for rank in sorted({e.rank for e in self.events})
        ]
        trace += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": i, "args": {"name": lane}}
            for rank in sorted({e.rank for e in self.events})
            for i, lane in enumerate(lanes)
        ]
        trace += [
            {
                "ph": "X",
                "name": e.what,
                "cat": "backward" if e.backward else "forward",
                "pid": e.rank,
                "tid": lanes.index(e.lane),
                "ts": e.start * 1e3,
                "dur": (e.end - e.start) * 1e3,
            }
            for e in self.events
        ]
        text = json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"})
        with writing(path) as partial:
            partial.write_text(text)


def from_plans(plans: Sequence[Plan]) -> Timeline:
    """The programs of all ranks, in order; every step, all-to-all and reduction takes 1.

    A transfer is in flight from the step that begins it to the end of the step that needs it, and
    gathered once, on the rank that computes with the chunk or has computed the partial result.
    """
    forecasts = [forecast_of(plan) for plan in plans]
    events: list[Event] = []
    for backward in (False, True):
        passes = [f.backward if backward else f.forward for f in forecasts]
        tiles = [plan.backward if backward else plan.forward for plan in plans]
        before, after = ([getattr(p, name) for p in passes] for name in ("before", "after"))
        start = _add_moves(events, tiles, before, 0)
        for rank, tile in enumerate(tiles):
            events += _steps(rank, tile, start)
        _add_moves(events, tiles, after, start + len(tiles[0].program.steps))
    return Timeline(tuple(events), unit="step")


def _add_moves(
    events: list[Event], tiles: Sequence[Pass], traffic: Sequence[Traffic], now: int
) -> int:
    """Append the all-to-alls and reductions (mesh dim, tensor); return the next step."""
    for mesh_dim, label in dict.fromkeys(key for t in traffic for key in t.received):
        for rank, tile in enumerate(tiles):
            events.append(Event(rank, tile.backward, mesh_dim, label, now, now + 1))
        now += 1
    return now


def _steps(rank: int, tile: Pass, first: int) -> Iterator[Event]:
    begun: dict[Transfer, int] = {}
    for i, step in enumerate(tile.program.steps, start=first):
        begun |= dict.fromkeys(step.begin, i)
        for t in step.end:
            label = ranges.name_of(tile, t).removesuffix(f" on {t.mesh_dim}")
            if not is_empty_event(label):
                yield Event(rank, tile.backward, t.mesh_dim, label, begun[t], i + 1)
        now, total = float(i), sum(len(b.q) * len(b.kv) for b in step.blocks)
        for block in step.blocks:
            end = now + len(block.q) * len(block.kv) / total
            label = ranges.name_of(tile, block)
            yield Event(rank, tile.backward, COMPUTE, label, now, end, _work(tile, block))
            now = end


def _work(tile: Pass, block: Block) -> float:
    """The share of a block's scores that is computed."""
    planned = tile.block(block)
    rows, columns = (
        sum(count(tile.spans(side, tile.plan.coords, n)) for n in block.sides[side])
        for side in Side
    )
    total, batch = rows * columns, tile.plan.compute.query.batch
    return entries(planned.calls, batch) / (batch * total) if batch * total else 0.0
