"""What computes and what is in flight, rank by rank: of a program, or of a run that was recorded.

Both give a `Timeline`, which is drawn as a picture or written as a Chrome trace (chrome://tracing,
https://ui.perfetto.dev).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from ..layout import Layout
from ..plan.chunks import Pass
from ..plan.order import count
from ..plan.plan import Plan
from ..plan.predict import predict
from ..plan.program import Block, Transfer
from ..private import every_thread
from ..run import marks as ranges

COMPUTE = "compute"
_CLOCK = "weft/clock"


@dataclass(frozen=True)
class Event:
    """Something a rank does from `start` to `end`, in the timeline's unit since its zero.

    lane: "compute", or the mesh dim (or dims) along which something moves. work: share of the
    block's scores that is computed, 0 for a block that the mask hides.
    """

    rank: int
    backward: bool
    lane: str
    what: str
    start: float
    end: float
    work: float = 1.0


@dataclass(frozen=True)
class Timeline:
    """Events of all ranks, in milliseconds ("ms") or in steps of their program ("step")."""

    events: tuple[Event, ...]
    unit: str = "ms"

    def draw(self, path: str | Path, title: str = "") -> None:
        """A picture (.png, .pdf or .svg): per rank what computes, and below what is in flight.

        Raises `WeftError` for a path of another ending, or in a folder that does not exist.
        """
        from .timeline_picture import draw

        draw(self, path, title)

    def chrome(self, path: str | Path) -> None:
        """A Chrome trace: a process per rank, a thread per lane; a step lasts a millisecond."""
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
        Path(path).write_text(text)


# -- of programs ----------------------------------------------------------------------------------


def from_plans(plans: Sequence[Plan]) -> Timeline:
    """The programs of all ranks; every step, all-to-all and reduction takes 1.

    A transfer is in flight from the step that begins it to the end of the step that needs it. It
    is gathered once, on the rank that computes with the chunk or has computed the partial result.

    plans: one per rank, in rank order (`weft.plan.predict.plan_for`).
    """
    forecasts = [predict(plan) for plan in plans]
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


def _add_moves(events: list[Event], tiles: Sequence[Pass], traffic, now: int) -> int:
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
            what = ranges.name_of(tile, t).removesuffix(f" on {t.mesh_dim}")
            if not _empty(what):
                yield Event(rank, tile.backward, t.mesh_dim, what, begun[t], i + 1)
        now, whole = float(i), sum(len(b.q) * len(b.kv) for b in step.blocks)
        for block in step.blocks:
            end = now + len(block.q) * len(block.kv) / whole
            what = ranges.name_of(tile, block)
            yield Event(rank, tile.backward, COMPUTE, what, now, end, _work(tile, block))
            now = end


def _empty(what: str) -> bool:
    """Whether masks leave nothing of a transfer's chunk on this rank."""
    return what.startswith("(")


def _work(tile: Pass, block: Block) -> float:
    """The share of a block's scores that is computed."""
    planned = tile.block(block)
    sizes = (tile.spans(True, tile.plan.coords, n) for n in block.q)
    others = [tile.spans(False, tile.plan.coords, n) for n in block.kv]
    whole = sum(count(spans) for spans in sizes) * sum(count(spans) for spans in others)
    return sum(call.entries for call in planned.calls) / whole if whole else 0.0


# -- of runs --------------------------------------------------------------------------------------


@dataclass
class Recording:
    """What `record` fills: the timeline of all ranks, the same on each of them."""

    timeline: Timeline = field(default_factory=lambda: Timeline(()))

    def draw(self, path: str | Path, title: str = "") -> None:
        """See `Timeline.draw`."""
        self.timeline.draw(path, title)

    def chrome(self, path: str | Path) -> None:
        """See `Timeline.chrome`."""
        self.timeline.chrome(path)


@contextlib.contextmanager
def record(layout: Layout | None = None) -> Iterator[Recording]:
    """Record what ranks do inside the `with` block, from profiler ranges named after steps.

    layout: a built layout; its ranks, which must all record, share their events at the end. None:
    the events of this process, which are all of them where ranks are threads
    (`weft.on_threads`, `run_threads`). Ranks on several machines are as far apart as their clocks.

    Times are those of the host. On GPUs that is when work is queued: use torch.profiler itself,
    whose trace holds the same ranges, for the device's own times.

    >>> import torch
    >>> from weft import Layout, attention
    >>> q = torch.randn(1, 2, 8, 4)
    >>> with record() as run:
    ...     _ = attention(q, q, q, Layout.single(), "tokens")
    >>> [event.what for event in run.timeline.events]
    ['q 0 x kv 0']
    """
    recording = Recording()
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread()) as profiler:
        with record_function(_CLOCK):
            clock = time.time_ns() / 1e3
        yield recording
    recorded = [(e.name, e.time_range.start, e.time_range.end) for e in profiler.events()]
    # A profiler counts from its own zero: one range at a known time tells which.
    offset = clock - next(start for name, start, _ in recorded if name == _CLOCK)
    events = _recorded([(name, a + offset, b + offset) for name, a, b in recorded])
    if layout is not None and layout.world_size > 1:
        gathered = layout.bound.all_gather_text(json.dumps([asdict(e) for e in events])).values()
        events = [Event(**e) for text in gathered for e in json.loads(text)]
    zero = min((e.start for e in events), default=0.0)
    events = [replace(e, start=e.start - zero, end=e.end - zero) for e in events]
    recording.timeline = Timeline(tuple(events))


def _recorded(named: Sequence[tuple[str, float, float]]) -> list[Event]:
    """Events from ranges (name, start, end in microseconds); a begin and its wait are one."""
    read = [(ranges.read(name), start, end) for name, start, end in named]
    read = sorted((x for x in read if x[0]), key=lambda x: x[1])
    events, begun = [], {}
    for r, start, end in read:
        start, end = start * 1e-3, end * 1e-3
        what, _, lane = r.what.partition(" on ")
        if r.kind == "begin":
            begun[r.backward, r.rank, r.what] = start
        elif r.kind == "wait":
            start = begun.pop((r.backward, r.rank, r.what), start)
        if r.kind != "begin" and not _empty(what):
            events.append(Event(r.rank, r.backward, lane or COMPUTE, what, start, end))
    return events


__all__ = ["COMPUTE", "Event", "Recording", "Timeline", "from_plans", "record"]
