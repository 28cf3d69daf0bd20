"""From one layout's placement of a tensor to another's, on the same ranks: the messages.

    tokens over 4 ranks            rows over r, columns over c        messages
    rank 0: 0 1                    rank 0: rows 0-1, columns 0-1      one for every pair whose
    rank 1: 2 3           ->       rank 1: rows 0-1, columns 2-3      boxes meet
    ...                            ...

A rank holds a box: the positions of its chunk of every axis. The overlap of two boxes is a box,
too. Where several ranks hold the same box, each receives from the one whose coordinates differ
least. Messages go along one mesh dim after the other, so no pair of ranks that share no mesh
dim needs a separate connection, and ranks along a dim send nothing where they need not.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .._caching import cached
from ..declare.layout import LayoutDeclaration
from ..declare.mesh import coordinates, index_at, rank_at
from ..declare.orders import TokenOrder
from ..declare.traffic import Traffic, add_messages
from ..plan.order import Spans, count, shard_spans

Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Placed:
    """A tensor's placement: a mesh, and per axis its mesh dims and token order."""

    mesh: Sizes
    splits: tuple[tuple[str, tuple[str, ...], str | TokenOrder], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.mesh)

    def coords(self, rank: int) -> dict[str, int]:
        """A rank's coordinate along every mesh dim; the last dim is innermost."""
        return coordinates(dict(self.mesh), rank)

    def chunk(self, axis: int, coords: Mapping[str, int]) -> int:
        """The index of the chunk of an axis at these coordinates."""
        return index_at(dict(self.mesh), self.splits[axis][1], coords)

    def chunks(self, axis: int, length: int) -> tuple[Spans, ...]:
        """Positions of every chunk of an axis, in memory order."""
        sizes = dict(self.mesh)
        _, dims, order = self.splits[axis]
        return shard_spans(length, tuple(sizes[d] for d in dims), order)

    def local_length(self, axis: int, length: int, rank: int) -> int:
        """The number of an axis's `length` tokens that a rank holds."""
        return count(self.chunks(axis, length)[self.chunk(axis, self.coords(rank))])


@dataclass(frozen=True)
class Overlap:
    """The box that `target` takes from `source`: per axis, local indices on both."""

    source: int
    target: int
    taken: tuple[tuple[int, ...], ...]
    put: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        """Entries of the axes that are placed."""
        return math.prod(len(t) for t in self.taken)

    @functools.cached_property
    def taken_slices(self) -> tuple[slice, ...] | None:
        """`taken` as slices, where every axis has equal steps."""
        return _slices(self.taken)

    @functools.cached_property
    def put_slices(self) -> tuple[slice, ...] | None:
        """`put` as slices, where every axis has equal steps."""
        return _slices(self.put)


def _slices(indices: tuple[tuple[int, ...], ...]) -> tuple[slice, ...] | None:
    """Indices as slices, None if some axis has other steps.

    >>> _slices(((0, 1, 2), (1, 3), ())), _slices(((0, 1, 4),))
    ((slice(0, 3, 1), slice(1, 4, 2), slice(0, 0, 1)), None)
    """
    slices = []
    for index in indices:
        step = index[1] - index[0] if len(index) > 1 else 1
        run = range(index[0], index[-1] + 1, step) if index and step > 0 else range(0)
        if tuple(run) != index:
            return None
        slices.append(slice(run.start, run.stop, run.step))
    return tuple(slices)


@dataclass(frozen=True)
class RedistributeStep:
    """One all-to-all along a mesh dim: the overlaps that go to and come from each coordinate."""

    mesh_dim: str
    sends: tuple[tuple[Overlap, ...], ...]
    receives: tuple[tuple[Overlap, ...], ...]


@dataclass(frozen=True)
class Redistribution:
    """One rank's steps: all-to-alls in order, then its own overlaps; and its new shape."""

    rank: int
    steps: tuple[RedistributeStep, ...]
    arrived: tuple[Overlap, ...]
    shape: tuple[int, ...]

    def traffic(self, sizes: Sizes, nbytes: int, label: str, adjoint: bool = False) -> Traffic:
        """Bytes and messages of this rank."""
        moved, at = Traffic(), coordinates(dict(sizes), self.rank)
        for step in self.steps:
            away, home = (
                nbytes
                * sum(
                    o.numel for i, part in enumerate(side) if i != at[step.mesh_dim] for o in part
                )
                for side in (step.sends, step.receives)
            )
            both = (home, away) if adjoint else (away, home)
            add_messages(moved, step.mesh_dim, label, *both, len(step.sends) - 1)
        return moved


def placement(layout: LayoutDeclaration, axes: Iterable[str]) -> Placed:
    """Placement of a tensor of some axes on a layout; refuses one with unequal shares."""
    layout.refuse_shares("moving tensors between layouts")
    splits = ((a, layout.shard_dims(a), layout.order.get(a, "contiguous")) for a in axes)
    return Placed(tuple(layout.mesh.items()), tuple(splits))


@dataclass(frozen=True)
class RedistributionPass:
    """A pass that takes a tensor to another placement, and its gradient back, as planned."""

    there: Redistribution  # of the forward pass
    back: Redistribution  # of the backward pass
    sizes: Sizes  # of the mesh whose dims the messages travel along
    nbytes: int  # of one entry of the placed axes, over all that is not placed
    label: str = "redistribute"

    def traffic(self, backward: bool) -> Traffic:
        """Bytes and messages of this rank."""
        return (self.back if backward else self.there).traffic(self.sizes, self.nbytes, self.label)


@cached(256)
def plan_redistribution(
    before: Placed, after: Placed, lengths: tuple[int, ...], rank: int, road: Sizes | None = None
) -> Redistribution:
    """The steps by which `rank` takes tensors from one placement to another.

    >>> one = Placed((("r", 2),), (("rows", ("r",), "contiguous"), ("columns", (), "contiguous")))
    >>> two = Placed((("c", 2),), (("rows", (), "contiguous"), ("columns", ("c",), "contiguous")))
    >>> plan = plan_redistribution(one, two, (4, 6), 0)
    >>> plan.shape, [overlap.numel for overlap in plan.arrived]
    ((4, 3), [6, 6])
    """
    overlaps = _overlaps(before, after, lengths)
    steps = route(overlaps, before if road is None else Placed(road, before.splits), rank)
    arrived = tuple(overlap for overlap in overlaps if overlap.target == rank)
    shape = tuple(after.local_length(a, n, rank) for a, n in enumerate(lengths))
    return Redistribution(rank, steps, arrived, shape)


def route(overlaps: tuple[Overlap, ...], road: Placed, rank: int) -> tuple[RedistributeStep, ...]:
    """`rank`'s part of every all-to-all that takes overlaps from their sources to their targets."""
    return Paths(overlaps, road.mesh).of(rank)


class Paths:
    """The all-to-alls that take overlaps from their sources to their targets, of all ranks."""

    def __init__(self, overlaps: Iterable[Overlap], mesh: Sizes) -> None:
        self.mesh = mesh
        #: (mesh dim, rank) -> coordinate that it sends to, or receives from -> overlaps
        self.sends: dict[tuple[str, int], dict[int, list[Overlap]]] = {}
        self.receives: dict[tuple[str, int], dict[int, list[Overlap]]] = {}
        #: (mesh dim, first rank of a line along it): something moves there, so all take part
        self.moving: set[tuple[str, int]] = set()
        sizes = [size for _, size in mesh]
        inner = {name: math.prod(sizes[i + 1 :]) for i, (name, _) in enumerate(mesh)}
        for overlap in overlaps:
            at = overlap.source
            for name, size in mesh:
                step = inner[name]
                here, goes = at // step % size, overlap.target // step % size
                if here == goes:
                    continue
                there = at + (goes - here) * step
                self.sends.setdefault((name, at), {}).setdefault(goes, []).append(overlap)
                self.receives.setdefault((name, there), {}).setdefault(here, []).append(overlap)
                self.moving.add((name, at - here * step))
                at = there
        self.inner = inner

    def of(self, rank: int) -> tuple[RedistributeStep, ...]:
        """A rank's part of every all-to-all."""
        steps = []
        for name, size in self.mesh:
            step = self.inner[name]
            if (name, rank - rank // step % size * step) in self.moving:
                sides = (side.get((name, rank), {}) for side in (self.sends, self.receives))
                parts = (tuple(tuple(side.get(i, ())) for i in range(size)) for side in sides)
                steps.append(RedistributeStep(name, *parts))
        return tuple(steps)


@cached(64)
def _overlaps(before: Placed, after: Placed, lengths: tuple[int, ...]) -> tuple[Overlap, ...]:
    """Every message between all ranks, also those that a rank keeps."""
    shared = [_shared_tokens(before, after, a, n) for a, n in enumerate(lengths)]
    result = []
    for target in range(after.ranks):
        coords = after.coords(target)
        positions = [shared[a][after.chunk(a, coords)] for a in range(len(lengths))]
        for boxes in itertools.product(*positions):
            source = _nearest(before, target, [chunk for chunk, _, _ in boxes])
            taken = tuple(t for _, t, _ in boxes)
            result.append(Overlap(source, target, taken, tuple(p for _, _, p in boxes)))
    return tuple(result)


def _shared_tokens(before: Placed, after: Placed, axis: int, length: int) -> list[list[tuple]]:
    """Per chunk afterwards: (chunk before, indices in it, indices afterwards) that share tokens."""
    wanted = after.chunks(axis, length)
    result: list[list[tuple]] = [[] for _ in wanted]
    for (chunk, target), taken, put in shared_entries(before.chunks(axis, length), wanted):
        result[target].append((chunk, taken, put))
    return result


def shared_entries(
    held: Sequence[Spans], wanted: Sequence[Spans]
) -> Iterator[tuple[tuple[int, int], tuple[int, ...], tuple[int, ...]]]:
    """(chunk that holds, chunk that wants) in order, and indices in both of what they share."""
    at_hand = sorted(
        (low, high, chunk, offset)
        for chunk, spans in enumerate(held)
        for low, high, offset in _with_offsets(spans)
    )
    taken: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for target, spans in enumerate(wanted):
        put = 0
        for low, high, forward in _stretches(spans):
            at = low
            while at < high:
                start, end, source, offset = at_hand[bisect.bisect_right(at_hand, (at + 1,)) - 1]
                end = min(end, high)
                give, places = taken.setdefault((source, target), ([], []))
                give += range(offset + at - start, offset + end - start)
                # Of a span that runs down, a later position comes to an earlier place.
                places += (
                    range(put + at - low, put + end - low)
                    if forward
                    else range(put + high - 1 - at, put + high - 1 - end, -1)
                )
                at = end
            put += high - low if low >= 0 else -low
    for pair, (give, places) in sorted(taken.items()):
        yield pair, tuple(give), tuple(places)


def _stretches(spans: Spans) -> Iterator[tuple[int, int, bool]]:
    """(first, last + 1, whether upward) of runs of positions; (-n, -n, ...) of n of nothing."""
    for s in spans:
        if s.start < 0:
            yield -s.count, -s.count, True
        elif s.step == 1:
            yield s.start, s.start + s.count, True
        elif s.step == -1:
            yield s.last, s.start + 1, False
        else:
            for i in range(s.count):
                yield s.start + i * s.step, s.start + i * s.step + 1, True


def runs(spans: Spans) -> list[tuple[int, int]]:
    """(start, end) of the runs of consecutive positions in spans."""
    result: list[tuple[int, int]] = []
    for s in spans:
        if s.step == 1 or s.count == 1:
            result.append((s.start, s.start + s.count))
        else:
            result += ((s.start + i * s.step, s.start + i * s.step + 1) for i in range(s.count))
    return result


def _with_offsets(spans: Spans) -> Iterator[tuple[int, int, int]]:
    """Runs of positions, and where in memory they begin."""
    offset = 0
    for low, high in runs(spans):
        yield low, high, offset
        offset += high - low


def _nearest(before: Placed, target: int, chunks: list[int]) -> int:
    """The holder of these chunks that has the target's coordinates wherever it may."""
    sizes, coords = dict(before.mesh), before.coords(target)
    for (_, dims, _), chunk in zip(before.splits, chunks):
        for name in reversed(dims):
            chunk, coords[name] = divmod(chunk, sizes[name])
    return rank_at(sizes, coords)
