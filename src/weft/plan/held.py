"""Who holds which positions of an axis: the value that orders, fields, halos and caches share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .._caching import cached
from ..declare.layout import LayoutDeclaration
from .order import Span, Spans, count, join, product, shard_spans


@dataclass(frozen=True, eq=False)
class Held:
    """The positions that each rank holds, one chunk per rank that splits an axis.

        tokens(zigzag): ring=2      chunk 0: 0 1 6 7      chunk 1: 2 3 4 5

    >>> held = Held.of(weft.Layout.parse("tokens(zigzag): ring=2"), "tokens", 8)
    >>> held.mesh, held.spans[1], held.counts
    ((('ring', 2),), (Span(start=2, count=4, step=1),), (4, 4))
    """

    axis: str  # as the layout names it
    mesh: tuple[tuple[str, int], ...]  # the mesh dims that split it, outermost first, and sizes
    spans: tuple[Spans, ...]  # per chunk, in the order of memory

    @classmethod
    def of(
        cls,
        layout: LayoutDeclaration,
        axis: str,
        length: int,
        dims: Sequence[str] | None = None,
        contiguous: bool = False,
    ) -> Held:
        """An axis of a length, as a layout or some of its mesh dims split it; in its order."""
        dims = layout.shard_dims(axis) if dims is None else dims
        order = "contiguous" if contiguous else layout.order.get(axis, "contiguous")
        spans = shard_spans(length, layout.parts(dims), order)
        return cls(axis, tuple((d, layout.mesh[d]) for d in dims), spans)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Held) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    @property
    def _key(self) -> tuple:
        return self.axis, self.mesh, self.spans

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._key)

    @functools.cached_property
    def length(self) -> int:
        """The number of positions."""
        return sum(self.counts)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of positions of every chunk."""
        return tuple(map(count, self.spans))

    @functools.cached_property
    def starts(self) -> tuple[int, ...] | None:
        """The first position of every chunk, and the length; None unless chunks are contiguous."""
        starts = [0]
        for spans, n in zip(self.spans, self.counts):
            steps = all(s.step == 1 or s.count == 1 for s in spans)
            if len(spans) > 1 or not steps or (spans and spans[0].start != starts[-1]):
                return None
            starts.append(starts[-1] + n)
        return tuple(starts)

    def having(self, spans: Sequence[Spans]) -> Held:
        """Other positions on the same ranks."""
        return replace(self, spans=tuple(spans))

    def contiguous(self, starts: Sequence[int] | None = None) -> Held:
        """Contiguous chunks on the same ranks, by the first position of each, and the length.

        By default of the sizes that they have.

        >>> Held("height", (("r", 2),), ((), ())).contiguous((0, 2, 5)).spans
        ((Span(start=0, count=2, step=1),), (Span(start=2, count=3, step=1),))
        """
        if starts is None:
            starts = [*itertools.accumulate(self.counts, initial=0)]
        return _contiguous(self.axis, self.mesh, tuple(starts))

    def alone(self, owner: int, n: int) -> Held:
        """n positions that one of the ranks holds."""
        return self.having([(Span(0, n),) if c == owner and n else () for c in range(len(self))])

    def __len__(self) -> int:
        return len(self.spans)

    def times(self, n: int) -> Held:
        """Runs of n positions in place of one."""
        inner = (Span(0, n),)
        return self.having([join(product(s, inner, n)) for s in self.spans])

    def units(self, n: int) -> Held | None:
        """Units of n positions as one, where no unit is cut and each is in its order."""
        divided = []
        for spans in self.spans:
            if any(s.start % n or s.count % n or (s.step != 1 and n > 1) for s in spans):
                return None
            divided.append(join(Span(s.start // n, s.count // n) for s in spans))
        return self.having(divided) if n > 1 else self


@cached(4096)
def _contiguous(axis: str, mesh: tuple[tuple[str, int], ...], starts: tuple[int, ...]) -> Held:
    pairs = itertools.pairwise(starts)
    return Held(axis, mesh, tuple((Span(a, b - a),) if b > a else () for a, b in pairs))


__all__ = ["Held"]
