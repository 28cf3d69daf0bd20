"""Proves from the plans, without tensors, that every rank receives the positions that it wants."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ..declare.mesh import coordinates, index_at
from ..errors import ShapeError
from ..layout import Layout
from ..plan.order import Spans, count, shard_spans
from ..proof.symbolic import Claim
from .windows import BORDERS, Wanted, Windows, plan_ranges

#: Windows that models have, as (kernel, stride, (before, after), dilation), and one that is wider
#: than some ranks' chunks.
WINDOWS = (
    (3, 1, (1, 1), 1),
    (3, 2, (0, 1), 1),
    (7, 4, (3, 3), 1),
    (2, 2, (0, 0), 1),
    (3, 1, (9, 9), 9),
)
#: Up to so many chunks all are looked at; of more, some that stand for the others.
ALL_CHUNKS = 64


def prove_windows(layout: Layout, axis: str, length: int) -> list[Claim]:
    """Claims about windows along an axis: convolutions, pools and their like; none where whole.

    Args:
        layout: need not be bound.
        axis: the axis, in contiguous order.
        length: of it, over all ranks.

    >>> all(claim.ok for claim in prove_windows(Layout.parse("height: gather=3"), "height", 37))
    True
    """
    if layout.size(axis) == 1 or layout.order.get(axis, "contiguous") != "contiguous":
        return []
    defects: list[str] = []
    for kernel, stride, padding, dilation in WINDOWS:
        for border in BORDERS:
            try:
                window = Windows.over(length, kernel, stride, padding, dilation, border)
                defects += window_defects(layout, axis, length, window)
            except ShapeError:  # a border that needs a longer axis is refused before it is planned
                continue
    what = "windows: every output once; every entry of its position; borders at the ends alone"
    how = f"{len(WINDOWS)} windows, {len(BORDERS)} borders, {layout.size(axis)} chunks of {axis}"
    return [Claim(what, how, tuple(defects[:3]))]


def window_defects(layout: Layout, axis: str, length: int, window: Windows) -> Iterator[str]:
    """Defects of windows over an axis."""
    mesh = tuple((d, layout.mesh[d]) for d in layout.shard_dims(axis))
    sizes = [count(spans) for spans in shard_spans(length, tuple(n for _, n in mesh))]
    starts = tuple(itertools.accumulate(sizes, initial=0))
    edges = window.edges(starts)
    plan, steps = plan_ranges(mesh, starts, window.ranges(edges), window.border), pairwise(edges)
    if [*edges] != sorted(edges) or (edges[0], edges[-1]) != (0, window.outputs):
        yield f"{window}: chunks compute outputs {edges} of {window.outputs}"
    for chunk, ((first, last), part) in enumerate(zip(steps, plan.parts)):
        if first == last:
            continue
        own = [*range(starts[chunk] + part.low, starts[chunk] + part.high)]
        wanted = _positions(plan.wanted.wanted[chunk])
        found = [*wanted[: part.before], *own, *wanted[part.before :]]
        begin = window.first + first * window.stride
        end = window.first + (last - 1) * window.stride + window.extent
        if found != [_bordered(p, length, window.border) for p in range(begin, end)]:
            yield f"{window}: chunk {chunk} has positions {found} for outputs {first} to {last}"
    yield from take_defects(plan.wanted)


def _bordered(position: int, length: int, border: str) -> int:
    """The position that stands at another, which may be beyond the ends; -1 for none."""
    if 0 <= position < length:
        return position
    if border == "zeros":
        return -1
    if border == "circular":
        return position % length
    last = length - 1
    nearest = min(max(position, 0), last)
    return nearest if border == "replicate" else 2 * nearest - position


def take_defects(plan: Wanted) -> Iterator[str]:
    """Entries of other positions than are wanted, and messages that are not expected."""
    held, sizes = [_positions(spans) for spans in plan.held], dict(plan.mesh)
    for chunk in _looked_at(plan):
        move, wanted = plan.take(chunk), _positions(plan.wanted[chunk])
        found = {
            put: held[overlap.source][taken]
            for overlap in move.arrived
            for taken, put in zip(overlap.taken[0], overlap.put[0], strict=True)
        }
        if sum(o.numel for o in move.arrived) != len(found) or found != {
            put: p for put, p in enumerate(wanted) if p >= 0
        }:
            yield f"chunk {chunk}: receives positions {found}, not {wanted}"
        received = 0
        for step in move.steps:
            at = coordinates(sizes, chunk)
            for coordinate, overlaps in enumerate(step.sends):
                if len(plan.held) > ALL_CHUNKS and not overlaps:
                    continue  # of a peer that sends what is not expected it is found there
                peer = index_at(sizes, sizes, {**at, step.mesh_dim: coordinate})
                same = [s for s in plan.take(peer).steps if s.mesh_dim == step.mesh_dim]
                if not same or same[0].receives[at[step.mesh_dim]] != overlaps:
                    yield f"chunk {chunk}: sends positions that {peer} does not expect"
            received += sum(o.numel for part in step.receives for o in part if o.target == chunk)
        own = {*held[chunk]}
        if received < (lacking := sum(p >= 0 and p not in own for p in wanted)):
            yield f"chunk {chunk}: receives {received} entries, and lacks {lacking}"


def _looked_at(plan: Wanted) -> Sequence[int]:
    """All chunks, or those at the ends, in the middle and where chunks change their size."""
    chunks = len(plan.held)
    if chunks <= ALL_CHUNKS:
        return range(chunks)
    sizes = [count(spans) for spans in plan.held]
    changes = [c for c in range(1, chunks) if sizes[c] != sizes[c - 1]]
    near = [0, chunks // 2, chunks - 1, *changes]
    return sorted({c + d for c in near for d in (-1, 0, 1) if 0 <= c + d < chunks})


def _positions(spans: Spans) -> list[int]:
    return [s.start + i * s.step for s in spans for i in range(s.count)]
