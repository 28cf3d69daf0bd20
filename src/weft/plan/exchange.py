"""An all-to-all of several tensors as views of flat buffers, worked out once per shape.

Each tensor is cut along one dim, a part per rank, and what comes is joined along another. In a
message the joined dim comes first, and at each of its places stand the numbers of all tensors:

    q, k and v of token 0, of token 1, ...

So the messages of all ranks, one after another, are the joined tensors themselves, by token:
nothing is copied when they have arrived, and kernels read them with the stride of a token.
Tensors that are joined in other sizes (keys of another length than queries) are a group of their
own in every message, and the parts of each group are put one after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .._caching import cached
from .resharding import AllToAll

if TYPE_CHECKING:
    from torch import Tensor

#: Sizes, strides and the first number of a view.
View = tuple[tuple[int, ...], tuple[int, ...], int]


class SentPart(NamedTuple):
    """Numbers of a tensor that are sent, the joined dim first."""

    joined: int
    cut: int | None  # the dim that is cut; None: all is sent
    low: int  # the first of the rows of it that are sent
    size: int  # how many of them are sent
    #: to how many ranks, each its own rows: the first dim of the view; None: to one
    ranks: int | None

    def view_of(self, t: Tensor) -> View:
        """The numbers as a view of the tensor: [rank,] joined dim, then the other dims."""
        shape, strides, first = list(t.shape), list(t.stride()), int(t.storage_offset())
        of_rank = 0
        if self.cut is not None:
            shape[self.cut] = self.size
            first += self.low * strides[self.cut]
            of_rank = self.size * strides[self.cut]
        shape.insert(0, shape.pop(self.joined))
        strides.insert(0, strides.pop(self.joined))
        if self.ranks is not None:
            shape.insert(0, self.ranks)
            strides.insert(0, of_rank)
        return tuple(shape), tuple(strides), first


class Arrived(NamedTuple):
    """A joined tensor as a view of its group's numbers."""

    group: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int


class FlatExchange(NamedTuple):
    """The flat buffers of an exchange on one rank, in numbers of them."""

    sends: tuple[int, ...]  # to each rank
    receives: tuple[int, ...]  # from each rank
    even: bool  # all messages of all ranks are of one size
    even_cuts: bool  # every tensor is cut evenly, and `parts` has one entry for each
    #: (tensor, its place in the outgoing buffer, its numbers that go there)
    parts: tuple[tuple[int, View, SentPart], ...]
    #: of each group, where its parts lie in the incoming buffer
    groups: tuple[tuple[tuple[int, int], ...], ...]
    arrived: tuple[Arrived, ...]  # each tensor, joined


class _Item(NamedTuple):
    """A tensor of an exchange: its shape, the dim that is cut, and the dim that is joined."""

    shape: tuple[int, ...]
    cut: int | None
    cut_sizes: tuple[int, ...]
    joined: int
    joined_sizes: tuple[int, ...]

    def rest(self, size: int | None) -> tuple[int, ...]:
        """Sizes of the dims that are not joined, with a part of the one that is cut."""
        shape = [*self.shape]
        if self.cut is not None and size is not None:
            shape[self.cut] = size
        del shape[self.joined]
        return tuple(shape)

    def part(self, rank: int) -> tuple[int, ...]:
        """`rest` of the part for a rank."""
        return self.rest(self.cut_sizes[rank] if self.cut is not None else None)


@cached(512)
def exchange_of(
    shapes: tuple[tuple[int, ...], ...],
    steps: tuple[AllToAll, ...],
    here: int,
    size: int,
    reverse: bool,
) -> FlatExchange:
    """The exchange of tensors of some shapes along a mesh dim, on the rank `here` of `size`."""
    items = [_item(shape, step, reverse) for shape, step in zip(shapes, steps)]
    groups: dict[tuple, list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault((item.joined, item.joined_sizes), []).append(i)
    members = list(groups.values())
    widths = [
        [sum(math.prod(items[i].part(rank)) for i in group) for group in members]
        for rank in range(size)
    ]
    lengths = [items[group[0]].joined_sizes for group in members]
    of_own = [items[group[0]].shape[items[group[0]].joined] for group in members]
    sends = [[w * n for w, n in zip(widths[rank], of_own)] for rank in range(size)]
    receives = [[w * n[rank] for w, n in zip(widths[here], lengths)] for rank in range(size)]
    even_cuts = all(len({*item.cut_sizes}) <= 1 for item in items)
    parts = _parts(items, members, widths, sends, even_cuts)
    return FlatExchange(
        tuple(map(sum, sends)),
        tuple(map(sum, receives)),
        all(step.even for step in steps),
        even_cuts,
        tuple(parts),
        tuple(_groups(receives)),
        tuple(_arrived(items, members, widths[here], here)),
    )


def _item(shape: tuple[int, ...], step: AllToAll, reverse: bool) -> _Item:
    split, cat = (step.split_dim, step.split_sizes), (step.cat_dim, step.cat_sizes)
    if reverse:
        return _Item(shape, *cat, *split)
    assert step.cat_dim is not None  # a slice, which joins nothing, is no all-to-all
    return _Item(shape, *split, step.cat_dim, step.cat_sizes)


def _parts(
    items: Sequence[_Item],
    members: Sequence[list[int]],
    widths: Sequence[Sequence[int]],
    sends: Sequence[Sequence[int]],
    even_cuts: bool,
) -> list[tuple[int, View, SentPart]]:
    """Where the parts of tensors go; of even ones the first rank's place stands for all."""
    parts = []
    ranks = len(sends)
    for rank in range(1 if even_cuts else ranks):
        at = sum(map(sum, sends[:rank]))
        for group, width, count in zip(members, widths[rank], sends[rank]):
            before = 0
            for i in group:
                item = items[i]
                rest = item.part(rank)
                shape = item.shape[item.joined], *rest
                strides = width, *_contiguous(rest)
                low = sum(item.cut_sizes[:rank])
                size = item.cut_sizes[rank] if item.cut is not None else 0
                if even_cuts:
                    shape, strides = (ranks, *shape), (sum(sends[0]), *strides)
                part = SentPart(item.joined, item.cut, low, size, ranks if even_cuts else None)
                parts.append((i, (shape, strides, at + before), part))
                before += math.prod(rest)
            at += count
    return parts


def _groups(receives: Sequence[Sequence[int]]) -> list[tuple[tuple[int, int], ...]]:
    """Where the parts of each group lie: in one range if they follow one another."""
    found = []
    for g in range(len(receives[0])):
        ranges, at = [], 0
        for counts in receives:
            low = at + sum(counts[:g])
            ranges.append((low, low + counts[g]))
            at += sum(counts)
        found.append(((0, at),) if len(receives[0]) == 1 else tuple(ranges))
    return found


def _arrived(
    items: Sequence[_Item], members: Sequence[list[int]], widths: Sequence[int], here: int
) -> list[Arrived]:
    arrived: dict[int, Arrived] = {}
    for g, (group, width) in enumerate(zip(members, widths)):
        first = 0
        for i in group:
            item = items[i]
            rest = item.part(here)
            shape, strides = [*rest], [*_contiguous(rest)]
            shape.insert(item.joined, sum(item.joined_sizes))
            strides.insert(item.joined, width)
            arrived[i] = Arrived(g, tuple(shape), tuple(strides), first)
            first += math.prod(rest)
    return [arrived[i] for i in range(len(items))]


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
