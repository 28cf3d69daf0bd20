"""Products of two pair tensors over a mesh, as placements: the block of each that a rank holds.

A pair tensor has two axes over the same objects. `out_ij = sum_k left_ik right_jk` is a box
i x j x k of work, and a mesh dim cuts one side of it while computing:

    cut    left    right   out
    i      S(i)    R       S(i)      the right factor comes to it
    j      R       S(j)    S(j)      the left factor comes to it
    k      S(k)    S(k)    P(sum)    a contraction that is split gives partial sums

At rest all three have one placement: some mesh dims split the first axis, others the second. Each
mesh dim then moves one of the three, the one it does not hold as the computation wants it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft._caching import cached
from weft.declare.layout import LayoutDeclaration
from weft.declare.mesh import rank_at
from weft.declare.orders import TokenOrder
from weft.errors import DeclarationError
from weft.move.plan import Placed, Redistribution, Sizes, plan_redistribution
from weft.plan.order import Spans, count

_EQUATION = re.compile(r"([a-z])([a-z]),([a-z])([a-z])->([a-z])([a-z])")


@dataclass(frozen=True)
class ProductRule:
    """The role in a product of a mesh dim that splits one axis of pair tensors at rest.

    Where both factors have the same letter on that axis, it cuts this letter; otherwise the letter
    that the product has there, so that the product stays where it is.

    >>> for axis in (0, 1):
    ...     print(ProductRule("ik,jk->ij", axis).describe())
    left S(i), right S(j) -> R, out S(i)
    left S(k), right S(k), out P(sum) -> S(j)
    """

    equation: str
    axis: int

    @property
    def cut(self) -> str:
        """The letter that it cuts while computing."""
        left, right, out = (pair[self.axis] for pair in factors(self.equation))
        return left if left == right else out

    def describe(self) -> str:
        """The rule in the grammar's words, on one line."""
        *both, out = factors(self.equation)
        left, right = (_arrow(pair, pair[self.axis], self.cut) for pair in both)
        last = f"S({out[self.axis]})"
        last = last if self.cut in out else f"P(sum) -> {last}"
        return f"left {left}, right {right}, out {last}"


def _arrow(pair: str, rest: str, cut: str) -> str:
    if rest == cut:
        return f"S({rest})"
    return f"S({rest}) -> " + (f"S({cut})" if cut in pair else "R")


def factors(equation: str) -> tuple[str, str, str]:
    """The letters of both factors and of the product.

    >>> factors("ki,kj->ij")
    ('ki', 'kj', 'ij')
    """
    match = _EQUATION.fullmatch(equation.replace(" ", ""))
    pairs = equation.replace(" ", "").replace("->", ",").split(",")
    if match is None or not _is_product(*pairs):
        raise DeclarationError(
            f"equation {equation!r} is no product of two pair tensors: write one such as "
            "'ik,jk->ij', in which the factors share the letter that the product lacks"
        )
    return pairs[0], pairs[1], pairs[2]


def _is_product(left: str, right: str, out: str) -> bool:
    summed = set(left) & set(right)
    return len({*left, *right}) == 3 and len(summed) == 1 and set(out) == {*left, *right} - summed


@dataclass(frozen=True)
class ProductPlan:
    """The resharding of one rank's factors to where it computes, and of its product back.

    Attributes:
        left, right: from rest to compute.
        out: from rest to compute too; the product goes this way backwards, and its gradient
            forwards. None: it is there already.
    """

    rules: tuple[tuple[str, ProductRule], ...]
    left: Redistribution | None
    right: Redistribution | None
    out: Redistribution | None
    shape: tuple[int, int]
    ranks: int


def pair_mesh(layout: LayoutDeclaration, axes: Sequence[str]) -> Sizes:
    """The mesh dims that split either axis of a pair tensor, in mesh order."""
    dims = {d for axis in axes for d in layout.shard_dims(axis)}
    return tuple((d, size) for d, size in layout.mesh.items() if d in dims)


def pair_at_rest(layout: LayoutDeclaration, axes: Sequence[str]) -> Placed:
    """The placement of a pair tensor on these mesh dims."""
    splits = tuple((a, layout.shard_dims(a), _order(layout, a)) for a in axes)
    return Placed(pair_mesh(layout, axes), splits)


def _order(layout: LayoutDeclaration, axis: str) -> str | TokenOrder:
    return layout.order.get(axis, "contiguous") if layout.shard_dims(axis) else "contiguous"


@cached(64)
def plan_product(
    layout: LayoutDeclaration, axes: tuple[str, str], equation: str, length: int, place: tuple
) -> ProductPlan:
    """One rank's part of a product of pair tensors over `length` objects."""
    rest, names = pair_at_rest(layout, axes), factors(equation)
    by_axis = [(ProductRule(equation, i), layout.shard_dims(a)) for i, a in enumerate(axes)]
    rules = tuple((d, rule) for rule, dims in by_axis for d in dims)
    held: dict[str, list[str]] = {letter: [] for letter in "".join(names)}
    for name, _ in rest.mesh:
        held[dict(rules)[name].cut].append(name)
    order = {dims: order for _, dims, order in rest.splits}
    sizes, coords = dict(rest.mesh), dict(place)
    rank = rank_at(sizes, {d: coords[d] for d in sizes})

    def move(letters: str) -> Redistribution | None:
        by_axis = ((a, tuple(held[x])) for a, x in zip(axes, letters))
        splits = tuple((a, dims, order.get(dims, "contiguous")) for a, dims in by_axis)
        target = Placed(rest.mesh, splits)
        if target == rest:
            return None
        return plan_redistribution(rest, target, (length, length), rank)

    left, right, out = map(move, names)
    rows, columns = (count(rest.chunks(i, length)[rest.chunk(i, coords)]) for i in (0, 1))
    return ProductPlan(rules, left, right, out, (rows, columns), rest.ranks)


@dataclass(frozen=True)
class PlacedBoxes(Placed):
    """A placement that is no split: per rank of a mesh, its positions of every axis."""

    boxes: tuple[tuple[Spans, ...], ...] = ()

    def chunk(self, axis: int, coords: Mapping[str, int]) -> int:
        """The index, among `chunks`, of the one at these coordinates: each rank has its own."""
        return rank_at(dict(self.mesh), coords)

    def chunks(self, axis: int, length: int) -> tuple[Spans, ...]:
        """Positions of an axis by rank, in memory order."""
        return tuple(box[axis] for box in self.boxes)


def plan_boxes(
    layout: LayoutDeclaration, axes: Sequence[str], length: int, place: tuple, boxes: tuple
) -> Redistribution:
    """From a pair tensor at rest to a box per rank of `pair_mesh`, which may overlap."""
    rest = pair_at_rest(layout, axes)
    sizes, coords = dict(rest.mesh), dict(place)
    rank = rank_at(sizes, {d: coords[d] for d in sizes})
    target = PlacedBoxes(rest.mesh, (), boxes)
    return plan_redistribution(rest, target, (length, length), rank)
