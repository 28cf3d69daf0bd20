"""Keys by halo: of other ranks' keys those come that some query of a rank's tile sees.

    queries 4-7 see 2 keys before their own     rank 1 holds keys 4 5 6 7, and receives 2 3
    gradients                                   those of 2 and 3 go back to rank 0, and are added

The keys that come lie beside the rank's own in the order of their positions, and the tile program
takes all of them for one chunk: no other step knows that some have another owner. They are kept for
the backward pass, in which their gradients alone travel.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..declare.layout import LayoutDeclaration
from ..declare.mesh import index_at, places
from ..declare.strategy import Rule
from ..errors import UnsupportedError
from ..masks import Intervals, Mask, merge_intervals
from ..move.plan import Redistribution
from ..move.windows import Wanted
from .held import Held
from .intervals import hull
from .order import Span, Spans, ascending, count, join, positions
from .problem import LocalProblem
from .resharding import Resharding
from .sides import TRAVELS, Sides

Coords = Mapping[str, int]
#: Of a chunk with more spans than these the mask is asked about all positions between its ends.
MOST_SPANS = 4096


class Stretch(NamedTuple):
    """Rows [low, high) of a rank's own keys, or of those that came: `received`."""

    received: bool
    low: int
    high: int


@dataclass
class SeenKeys:
    """The keys that ranks receive from each other along the mesh dims of a rule with `+ seen`."""

    dims: tuple[str, ...]
    #: the other mesh dims along which queries or keys travel: chunks of queries of all ranks along
    #: them meet the keys of each
    travelling: tuple[str, ...]
    sizes: Mapping[str, int]
    mask: Mask
    queries: Resharding  # the way of queries to the tile program
    keys: Resharding  # that of keys, without what comes
    _wanted: dict[tuple, Wanted] = field(default_factory=dict)
    _seen: dict[tuple, Intervals] = field(default_factory=dict)
    _pieces: dict[tuple, tuple[Stretch, ...]] = field(default_factory=dict)

    def spans(self, coords: Coords) -> Spans:
        """Positions of others' keys that come to the rank at `coords`, ascending."""
        return self.wanted(coords).wanted[self.chunk(coords)]

    def chunk(self, coords: Coords) -> int:
        """The number of a rank's keys among those of the ranks along `dims`."""
        return index_at(self.sizes, self.dims, coords)

    def take(self, coords: Coords) -> Redistribution:
        """The messages of the rank at `coords`."""
        return self.wanted(coords).take(self.chunk(coords))

    def wanted(self, coords: Coords) -> Wanted:
        """The keys that each of the ranks along `dims` holds, and that it receives."""
        key = self._key(coords, self.dims)
        if key not in self._wanted:
            group = places(self.sizes, self.dims, coords)
            held = tuple(self.keys.base(place).spans for place in group)
            seen = [self._intervals(place) for place in group]
            mesh = tuple((d, self.sizes[d]) for d in self.dims)
            wanted = tuple(_join(parts.values()) for parts in _foreign(held, seen))
            self._wanted[key] = Wanted(Held("keys", mesh, held), wanted)
        return self._wanted[key]

    def _intervals(self, coords: Coords) -> Intervals:
        """Positions that queries of the ranks at `coords` and along `travelling` may see."""
        key = self._key(coords, self.travelling)
        if key not in self._seen:
            mask = self.mask
            if mask.per_sample:
                batch = self.queries.entry(coords).batch_spans
                mask = mask.of_sequences(tuple(positions(batch, "cpu").tolist()))
            self._seen[key] = self._seen_under(mask, coords)
        return self._seen[key]

    def _seen_under(self, mask: Mask, coords: Coords) -> Intervals:
        asked = {
            hull(span)
            for place in places(self.sizes, self.travelling, coords)
            for span in _few(self.queries.entry(place).spans)
        }
        return merge_intervals(seen for q in asked for seen in mask.key_intervals(q))

    def _key(self, coords: Coords, along: Sequence[str]) -> tuple[int, ...]:
        return tuple(c for d, c in coords.items() if d not in along)

    def pieces(self, coords: Coords) -> tuple[Stretch, ...]:
        """A rank's own keys and those that came, cut so that the pieces' positions ascend."""
        key = tuple(coords.values())
        if key not in self._pieces:
            self._pieces[key] = _interleaved(self.keys.base(coords).spans, self.spans(coords))
        return self._pieces[key]

    def pays(self) -> bool:
        """True if less moves so than in chunks, and no rank keeps more of others than two chunks.

        A key that is seen travels once, and is kept until the backward pass; in chunks it travels
        in both passes, as do the keys between, and a ring has two chunks of others at a time.
        """
        fewer, largest, most = False, 0, 0
        for first in places(self.sizes, self.travelling, dict.fromkeys(self.sizes, 0)):
            group = places(self.sizes, self.dims, first)
            held = tuple(self.keys.base(place).spans for place in group)
            largest = max(largest, *map(count, held))
            for parts in _foreign(held, [self._seen_under(self.mask, place) for place in group]):
                came = sum(map(count, parts.values()))
                most = max(most, came)
                fewer = fewer or came < sum(count(held[owner]) for owner in parts)
        return fewer and most <= 2 * largest


def seen_keys(
    layout: LayoutDeclaration,
    problem: LocalProblem,
    rules: Mapping[str, Rule],
    resharding: Sides[Resharding],
) -> SeenKeys | None:
    """Keys by halo: along mesh dims that ask for it, and where it moves less along others."""
    sizes = dict(layout.mesh)
    dims = [d for d, rule in rules.items() if rule.key.seen and sizes[d] > 1]
    asked = [d for d in dims if rules[d].transport == "halo"]

    def along(chosen: Sequence[str]) -> SeenKeys:
        others = (d for d in rules if d not in chosen and sizes[d] > 1)
        travelling = tuple(d for d in others if rules[d].role in TRAVELS)
        return SeenKeys(tuple(chosen), travelling, sizes, problem.mask, *resharding)

    if problem.bias_tensor and asked:
        raise UnsupportedError(
            f"{layout.source}: keys of mesh dim {asked[0]!r} come by halo, and that is not for a"
            " bias tensor, which is the tile of scores of a rank's own chunks; use transport"
            " 'auto' there, or the strategy 'ring'"
        )
    if not problem.bias_tensor and dims != asked and (every := along(dims)).pays():
        return every
    return along(asked) if asked else None


def _few(spans: Spans) -> Spans:
    if len(spans) <= MOST_SPANS:
        return spans
    low, high = min(s.start for s in spans), max(s.last for s in spans)
    return (Span(low, high - low + 1),)


def _foreign(held: Sequence[Spans], seen: Sequence[Intervals]) -> list[dict[int, Spans]]:
    """For every chunk, owner -> the owner's positions that are in the chunk's intervals."""
    runs = sorted(
        (s.start, s.last, owner, s)
        for owner, spans in enumerate(held)
        for s in spans
        if s.count and s.step == 1
    )
    firsts, lasts = [r[0] for r in runs], [r[1] for r in runs]
    stepped = [
        (owner, s) for owner, spans in enumerate(held) for s in spans if s.count and s.step != 1
    ]
    found = []
    for chunk, intervals in enumerate(seen):
        parts: dict[int, list[Span]] = {}
        for low, high in intervals:
            for start, last, owner, _ in runs[bisect_left(lasts, low) : bisect_right(firsts, high)]:
                if owner != chunk:
                    a, b = max(low, start), min(high, last)
                    parts.setdefault(owner, []).append(Span(a, b - a + 1))
            for owner, s in stepped:
                a = max(0, -((s.start - low) // s.step))
                b = min(s.count, (high - s.start) // s.step + 1)
                if owner != chunk and a < b:
                    parts.setdefault(owner, []).append(s.cut(a, b))
        found.append({owner: join(sorted(spans)) for owner, spans in sorted(parts.items())})
    return found


def _join(parts: Iterable[Spans]) -> Spans:
    return ascending(join(s for spans in parts for s in spans))


def _interleaved(local: Spans, received: Spans) -> tuple[Stretch, ...]:
    """The pieces of two lists of positions, whose positions in that order ascend.

    >>> _interleaved((Span(4, 4),), (Span(2, 2), Span(8, 1)))[0]
    Stretch(received=True, low=0, high=2)
    """
    places = np.concatenate([positions(local, "cpu").numpy(), positions(received, "cpu").numpy()])
    order = np.argsort(places, kind="stable")
    border = count(local)
    starts = np.flatnonzero(np.diff(order, prepend=-2) != 1)
    into = np.flatnonzero(order == border)
    edges = np.unique(np.concatenate([starts, into, [len(order)]]))
    pieces = []
    for a, b in zip(edges[:-1].tolist(), edges[1:].tolist()):
        low, came = int(order[a]), int(order[a]) >= border
        offset = border if came else 0
        pieces.append(Stretch(came, low - offset, low - offset + b - a))
    return tuple(pieces)
