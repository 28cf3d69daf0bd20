"""Token order and positions: which global positions each chunk of an axis holds.

A chunk is a tuple of `Span`s, arithmetic progressions of global positions in the order in which
the tokens have in memory. Contiguous chunks are one span, zigzag chunks two, striped chunks one
with a step. Everything that must know where a token is (masks, rotary embeddings, loss masks)
asks here, so no order of mesh dims leads to a wrong position.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .._caching import cached
from .._uploads import upload
from ..declare.orders import TokenOrder, check_order, shortened
from ..errors import ShapeError


class Span(NamedTuple):
    """`count` global positions start, start + step, ...

    >>> Span(4, 3, 2).last
    8
    """

    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    step: int = 1

    @property
    def last(self) -> int:
        return self.start + (self.count - 1) * self.step

    def cut(self, low: int, high: int) -> Span:
        """The sub-span of indices [low, high)."""
        return Span(self.start + low * self.step, high - low, self.step)


Spans = tuple[Span, ...]


#: Into how many parts mesh dims cut an axis, outermost first; or a tuple of shares.
Parts = tuple[int | tuple[float, ...], ...]


def chunk_sizes(length: int, parts: int | tuple[float, ...]) -> list[int]:
    """DTensor's chunk sizes: ceil(length / parts) each until nothing is left; or by shares.

    >>> chunk_sizes(10, 4), chunk_sizes(10, (1, 1, 2))
    ([3, 3, 3, 1], [3, 2, 5])
    """
    if isinstance(parts, tuple):
        return apportion(length, parts)
    size = math.ceil(length / parts) if length else 0
    return [max(0, min(size, length - i * size)) for i in range(parts)]


def apportion(length: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of shares: the largest remainders are rounded up."""
    exact = [length * share / math.fsum(shares) for share in shares]
    sizes = [math.floor(size) for size in exact]
    for i in sorted(range(len(sizes)), key=lambda i: sizes[i] - exact[i])[: length - sum(sizes)]:
        sizes[i] += 1
    return sizes


@cached(4096)
def shard_sizes(length: int, parts: Parts) -> tuple[int, ...]:
    """Sizes of nested chunks, outermost mesh dim first, as DTensor splits.

    >>> shard_sizes(9, (2, 2))
    (3, 2, 2, 2)
    """
    sizes = [length]
    for count in parts:
        sizes = [small for size in sizes for small in chunk_sizes(size, count)]
    return tuple(sizes)


def _contiguous(sizes: Sequence[int]) -> list[Spans]:
    starts = _starts(sizes)
    return [(Span(start, size),) for start, size in zip(starts, sizes)]


def _zigzag(sizes: Sequence[int]) -> list[Spans]:
    """Chunk i of 2P sub-chunks holds numbers i and 2P-1-i, so that causal work is equal."""
    front = [math.ceil(size / 2) for size in sizes]
    back = [size - half for size, half in zip(sizes, front)]
    back_starts = _starts(back[::-1])[::-1]
    total = sum(front)
    return [
        (Span(start, f), Span(total + b_start, b))
        for start, f, b_start, b in zip(_starts(front), front, back_starts, back)
    ]


def _striped(sizes: Sequence[int]) -> list[Spans]:
    """Token t is in chunk t mod P, as far as the chunk sizes allow."""
    chunks: list[list[Span]] = [[] for _ in sizes]
    taken = rounds = 0
    for level in sorted(set(sizes) - {0}):
        active = [i for i, size in enumerate(sizes) if size >= level]
        for rank, i in enumerate(active):
            chunks[i].append(Span(taken + rank, level - rounds, len(active)))
        taken += len(active) * (level - rounds)
        rounds = level
    return [tuple(spans) for spans in chunks]


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += size
    return starts


ORDERS = {"contiguous": _contiguous, "zigzag": _zigzag, "striped": _striped}


@cached(4096)
def shard_spans(
    length: int, parts: Parts, order: str | TokenOrder = "contiguous"
) -> tuple[Spans, ...]:
    """The spans of every shard of an axis split over mesh dims of sizes `parts`.

    >>> shard_spans(8, (2,), "zigzag")[0]
    (Span(start=0, count=2, step=1), Span(start=6, count=2, step=1))
    """
    sizes = shard_sizes(length, parts)
    if isinstance(order, TokenOrder):
        if len(sizes) == 1:
            return (join([Span(0, length)]),)
        if sizes != order.sizes:
            raise ShapeError(
                f"the tokens' order is of {order.length} tokens in chunks of "
                f"{shortened(order.sizes)}, but an axis of {length} is split into "
                f"{shortened(sizes)}; pack these documents again for this layout"
            )
        return tuple(join(Span(*run) for run in chunk) for chunk in order.chunks)
    return tuple(join(spans) for spans in ORDERS[check_order(order)](sizes))


def count(spans: Iterable[Span]) -> int:
    """The number of tokens in spans."""
    return sum(span.count for span in spans)


def each_position(spans: Iterable[Span]) -> list[int]:
    """The positions of spans, in memory order.

    >>> each_position((Span(3, 2, -1), Span(6, 1)))
    [3, 2, 6]
    """
    return [s.start + i * s.step for s in spans for i in range(s.count)]


def is_ascending(spans: Spans) -> bool:
    """True if every position comes after those before it."""
    return all(a.last < b.start for a, b in itertools.pairwise(spans))


def join(spans: Iterable[Span]) -> Spans:
    """The same positions in the same memory order, in as few spans as possible."""
    joined: list[Span] = []
    for span in spans:
        if span.count == 0:
            continue
        if joined and (merged := _extend(joined[-1], span)) is not None:
            joined[-1] = merged
        else:
            joined.append(span)
    return tuple(joined)


def ascending(spans: Spans) -> Spans:
    """The same positions in few spans: in ascending order, or one by one where these are fewer.

    >>> ascending((Span(0, 3, 2), Span(1, 3, 2)))
    (Span(start=0, count=6, step=1),)
    """
    ordered, runs = join(sorted(spans)), interleaved(spans)
    return runs if len(runs) < len(ordered) else ordered


def interleaved(spans: Spans) -> Spans:
    """The same positions in ascending order, however many spans that takes.

    >>> interleaved((Span(0, 3, 3), Span(1, 1)))
    (Span(start=0, count=2, step=1), Span(start=3, count=2, step=3))
    """
    ordered = join(sorted(spans))
    if all(a.last < b.start for a, b in itertools.pairwise(ordered)):
        return ordered
    values = positions(ordered, "cpu").sort().values
    steps, counts = torch.unique_consecutive(values.diff(), return_counts=True)
    runs, taken, begin = [], 0, 0  # values[:taken] are in spans; a run starts at values[begin]
    for step, gaps in zip(steps.tolist(), counts.tolist()):
        end = begin + gaps
        if end - taken >= 1:
            runs.append(Span(int(values[taken]), end - taken + 1, step))
            taken = end + 1
        begin = end
    if taken < len(values):
        runs.append(Span(int(values[taken]), 1))
    return tuple(runs)


def _extend(first: Span, second: Span) -> Span | None:
    step = first.step if first.count > 1 else second.step if second.count > 1 else 1
    steps_fit = (first.count == 1 or first.step == step) and (
        second.count == 1 or second.step == step
    )
    if steps_fit and second.start == first.last + step:
        return Span(first.start, first.count + second.count, step)
    return None


def cut_spans(spans: Spans, low: int, high: int) -> Spans:
    """The spans of the tokens with memory index in [low, high)."""
    out, offset = [], 0
    for span in spans:
        a, b = max(low - offset, 0), min(high - offset, span.count)
        if a < b:
            out.append(span.cut(a, b))
        offset += span.count
    return join(out)


def product(outer: Spans, inner: Spans, inner_length: int) -> Spans:
    """Positions of two axes attended jointly: outer * inner_length + inner, outer axis major."""
    if count(inner) == inner_length and len(inner) == 1 and inner[0].step == 1:
        return join(
            Span(s.start * inner_length, s.count * inner_length)
            if s.step == 1
            else Span((s.start + i * s.step) * inner_length, inner_length)
            for s in outer
            for i in range(1 if s.step == 1 else s.count)
        )
    rows = (s.start + i * s.step for s in outer for i in range(s.count))
    return join(Span(row * inner_length + t.start, t.count, t.step) for row in rows for t in inner)


def bounds(spans: Spans) -> tuple[int, int]:
    """Smallest and largest position."""
    return min(s.start for s in spans), max(s.last for s in spans)


def positions(spans: Spans, device: torch.device | str | None = None) -> torch.Tensor:
    """Global positions of the tokens, in memory order: (n,) int64.

    >>> positions((Span(0, 2), Span(6, 2)))
    tensor([0, 1, 6, 7])
    """
    parts = [torch.arange(s.start, s.last + 1, s.step, device=device) for s in spans if s.count]
    if not parts:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat(parts)


@cached(1024)
def gather_order(
    length: int,
    parts: Parts,
    order: str | TokenOrder,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Index that puts the concatenated shards back in global order: (length,) int64."""
    stored = torch.cat([positions(s, "cpu") for s in shard_spans(length, parts, order)])
    return upload(torch.argsort(stored), device)
