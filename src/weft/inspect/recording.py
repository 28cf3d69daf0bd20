"""Records the passes of every rank as a timeline, from the profiler ranges of `runtime.marks`."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from .._torch import every_thread
from ..layout import Layout
from ..runtime import marks as ranges
from .events import COMPUTE, Event, is_empty_event
from .timeline import Timeline

_CLOCK = "weft/clock"
#: The variable by which Kineto, under torch.profiler, is told how much to say.
LEVEL = "KINETO_LOG_LEVEL"


@dataclass
class Recording:
    """The result of `record`: the timeline of all ranks, the same on each of them."""

    timeline: Timeline = field(default_factory=lambda: Timeline(()))

    def draw(self, path: str | Path, title: str = "") -> None:
        """See `Timeline.draw`."""
        self.timeline.draw(path, title)

    def chrome(self, path: str | Path) -> None:
        """See `Timeline.chrome`."""
        self.timeline.chrome(path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Kineto's notices about itself (CUPTI, USDT) off stderr, unless a level is asked for."""
    if LEVEL in os.environ:
        yield
        return
    os.environ[LEVEL] = "99"
    try:
        yield
    finally:
        os.environ.pop(LEVEL, None)


@contextlib.contextmanager
def record(layout: Layout | None = None) -> Iterator[Recording]:
    """Record what ranks do inside the `with` block, from profiler ranges named after steps.

    Times are those of the host. On GPUs that is when work is queued. For the device's own times use
    torch.profiler itself, whose trace holds the same ranges.

    Args:
        layout: a bound layout. Its ranks must all record; they share their events at the end.
            Ranks on several machines are as far apart as their clocks. Default: the events of this
            process, which are all events where ranks are threads (`weft.on_threads`).

    Returns:
        A context manager; it yields the recording, which is filled when the block ends.

    >>> import torch
    >>> from weft import Layout, attention
    >>> q = torch.randn(1, 2, 8, 4)
    >>> with record() as run:
    ...     _ = attention(q, q, q, Layout.single(), "tokens")
    >>> [event.what for event in run.timeline.events]
    ['q 0 x kv 0']
    """
    recording = Recording()
    kinds = [ProfilerActivity.CPU]
    with _quiet(), profile(activities=kinds, experimental_config=every_thread()) as profiler:
        with record_function(_CLOCK):
            clock = time.time_ns() / 1e3
        yield recording
    recorded = [(e.name, e.time_range.start, e.time_range.end) for e in profiler.events()]
    # A profiler counts from its own zero: one range at a known time tells which.
    offset = clock - next(start for name, start, _ in recorded if name == _CLOCK)
    events = _recorded([(name, a + offset, b + offset) for name, a, b in recorded])
    if layout is not None and layout.world_size > 1:
        gathered = layout.bound.share(
            "a recording", json.dumps([asdict(e) for e in events])
        ).values()
        events = [Event(**e) for text in gathered for e in json.loads(text)]
    zero = min((e.start for e in events), default=0.0)
    events = [replace(e, start=e.start - zero, end=e.end - zero) for e in events]
    recording.timeline = Timeline(tuple(events))


def _recorded(named: Sequence[tuple[str, float, float]]) -> list[Event]:
    """Events from ranges (name, start, end in microseconds); a begin and its wait are one."""
    events, begun = [], {}
    for name, start, end in sorted(named, key=lambda entry: entry[1]):
        r = ranges.read_range(name)
        if r is None:
            continue
        start, end = start * 1e-3, end * 1e-3
        label, _, lane = r.what.partition(" on ")
        if r.kind == "begin":
            begun[r.backward, r.rank, r.what] = start
        elif r.kind == "wait":
            start = begun.pop((r.backward, r.rank, r.what), start)
        if r.kind != "begin" and not is_empty_event(label):
            events.append(Event(r.rank, r.backward, lane or COMPUTE, label, start, end))
    return events
