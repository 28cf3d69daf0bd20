"""Sequence numbers from the axes that are not attended, on whichever mesh dims split these.

A mask or bias that looks at single sequences knows them by their place on these axes, the first
axis outermost. `weft.attention` counts those of one rank after another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft._caching import cached
from weft._compile import restored
from weft._torch import constant_in_graphs
from weft._uploads import uploaded
from weft.bias import Bias
from weft.declare.layout import LayoutDeclaration
from weft.declare.mesh import coordinates, index_at, places
from weft.errors import ShapeError
from weft.layout import Layout
from weft.masks import Indexed, Mask, prepared
from weft.masks.part import OfPart, Renumbered
from weft.plan.held import Held
from weft.plan.order import positions

Lengths = tuple[tuple[str, int], ...]


def in_order(
    layout: LayoutDeclaration, attended: Sequence[str], axes: Sequence[str], local: Sequence[str]
) -> bool:
    """True if `weft.attention` counts sequences as the axes number them, at any lengths.

    `axes` are those not attended, as they number sequences; `local` the same, as a rank's sequences
    are flattened.

    >>> layout = LayoutDeclaration.parse("features: ring=2; rows: local")
    >>> in_order(layout, ["rows"], ["batch", "features"], ["batch", "features"])
    False
    >>> in_order(layout, ["rows"], ["features", "batch"], ["features", "batch"])
    True
    """
    split = [name for name in axes if layout.size(name) > 1]
    if tuple(axes) != tuple(local) or split[1:]:
        return False
    if not split:
        return True
    (name,) = split
    along = layout.shard_dims(name)
    last = layout.batch_dims(tuple(attended))[-len(along) :]  # others number sequences outside it
    contiguous = layout.order.get(name, "contiguous") == "contiguous"
    return name == axes[0] and contiguous and last == along


@cached(256)
def sequence_order(
    layout: LayoutDeclaration,
    attended: tuple[str, ...],
    lengths: Lengths,
    local: tuple[str, ...],
    sample: int | None = None,
) -> tuple[int, ...]:
    """The number of every sequence, in the order in which `weft.attention` counts them.

    `lengths` are global, of the axes not attended, in the order in which they number sequences;
    `local` are these axes as a rank's sequences are flattened. With `sample`, of the outermost axis
    only that one place of each rank takes part; `ShapeError` if a rank has none.

    >>> layout = LayoutDeclaration.parse("features: ring=2; rows: local")
    >>> axes = ("batch", "features")
    >>> sequence_order(layout, ("rows",), (("batch", 2), ("features", 4)), axes)
    (0, 1, 4, 5, 2, 3, 6, 7)
    """
    known, found = dict(lengths), []
    rest = other_dims(layout, attended, tuple(known))
    for place in places(layout.mesh, layout.batch_dims(attended), dict.fromkeys(layout.mesh, 0)):
        first = index_at(layout.mesh, rest, place) * math.prod([*known.values()])
        index, steps = torch.tensor([first]), _steps(known)
        for name in local:
            held = positions_at(layout, name, known[name], place)
            if sample is not None and name == lengths[0][0]:
                held = held[sample : sample + 1]
                if not len(held):
                    raise ShapeError(
                        f"a mask that looks at single samples needs as many on every rank: axis"
                        f" {name!r} is {known[name]} long, over {layout.size(name)} ranks"
                    )
            index = (index[:, None] + steps[name] * held).flatten()
        found += index.tolist()
    return tuple(found)


def other_dims(
    layout: LayoutDeclaration, attended: Sequence[str], axes: Sequence[str]
) -> tuple[str, ...]:
    """Mesh dims that split the batch, but none of these axes."""
    split = {d for name in axes for d in layout.shard_dims(name)}
    return tuple(d for d in layout.batch_dims(tuple(attended)) if d not in split)


def _steps(lengths: Mapping[str, int]) -> dict[str, int]:
    """By how much a step along each axis changes the number of a sequence."""
    steps, inner = {}, 1
    for name, length in reversed([*lengths.items()]):
        steps[name], inner = inner, inner * length
    return steps


def local_batches(layout: LayoutDeclaration, lengths: Lengths) -> tuple[int, ...]:
    """Number of sequences of every rank, in the order of ranks."""
    ranks = [coordinates(layout.mesh, rank) for rank in range(layout.world_size)]
    return tuple(
        math.prod(len(positions_at(layout, name, length, place)) for name, length in lengths)
        for place in ranks
    )


@constant_in_graphs
def order_of(layout: tuple, *known: tuple) -> tuple[int, ...]:
    """`sequence_order` for a layout as it enters a graph."""
    return sequence_order(restored(layout).unbound, *known)


def positions_at(
    layout: LayoutDeclaration,
    axis: str,
    length: int,
    place: Mapping[str, int],
    dims: Sequence[str] | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Positions of the part of an axis that the rank at some coordinates holds.

    `length` is global; `dims` split the axis, default those that do so at rest.
    """
    dims = layout.shard_dims(axis) if dims is None else dims
    held = Held.of(layout, axis, length, dims)
    return positions(held.spans[index_at(layout.mesh, dims, place)], device)


def check_held(
    layout: LayoutDeclaration, place: Mapping[str, int], lengths: Lengths, here: Mapping[str, int]
) -> None:
    """Raise `ShapeError` if an axis is not as long on a rank as its global length makes it."""
    for name, length in lengths:
        held = len(positions_at(layout, name, length, place))
        if held != here[name]:
            raise ShapeError(
                f"axis {name!r} is {here[name]} long here and not {held}; where the mesh does not"
                f" divide it, pass lengths={{{name!r}: ...}}"
            )


def gathered_lengths(
    layout: Layout, here: Mapping[str, int], known: Mapping[str, int]
) -> dict[str, int]:
    """Global lengths of axes: those in `known`, else the sums of the chunks of all ranks.

    Ranks that split an axis of unknown length all call this, with equal `known`.
    """
    whole = {axis: int(known.get(axis, n)) for axis, n in here.items()}
    asked = [axis for axis in here if axis not in known and layout.size(axis) > 1]
    if not asked:
        return whole
    dims = [d for d in layout.mesh if any(d in layout.shard_dims(axis) for axis in asked)]
    numbers = [here[axis] for axis in asked]
    text = ", ".join(f"{axis} {'unknown' if axis in asked else n}" for axis, n in whole.items())
    ranks = layout.bound.collect("the lengths of the ranks' chunks", text, numbers, dims)
    for number, axis in enumerate(asked):
        counts = {rank: row[number] for rank, row in ranks.items()}
        whole[axis] = sum(_by_part(layout, axis, counts).values())
        _check_chunks(layout, axis, whole[axis], counts)
    return whole


def places_of(layout: Layout, axis: str, counts: Mapping[int, int]) -> tuple[int, Tensor]:
    """The global length of an axis, and the positions of this rank.

    `counts` has, by rank, how many positions it holds; all parts are among them. Contiguous chunks
    may have any lengths, as batches of `weft.attention` may.
    """
    parts, dims = _by_part(layout, axis, counts), layout.shard_dims(axis)
    if any(parts[_part(layout, dims, rank)] != count for rank, count in counts.items()):
        raise ShapeError(
            f"ranks that hold the same part of axis {axis!r} must hold equally many of it: ranks"
            f" {', '.join(map(str, counts))} hold {[*counts.values()]}, split over {dims}"
        )
    whole = sum(parts.values())
    if layout.order.get(axis, "contiguous") != "contiguous":
        _check_chunks(layout, axis, whole, counts)
        return whole, layout.positions(axis, whole)
    here = index_at(layout.mesh, dims, layout.coords)
    first = sum(parts[i] for i in range(here))
    return whole, torch.arange(first, first + parts[here])


def _part(layout: Layout, dims: Sequence[str], rank: int) -> int:
    return index_at(layout.mesh, dims, coordinates(layout.mesh, rank))


def _by_part(layout: Layout, axis: str, counts: Mapping[int, int]) -> dict[int, int]:
    """The number of positions in each part of an axis."""
    dims = layout.shard_dims(axis)
    return {_part(layout, dims, rank): count for rank, count in counts.items()}


def _check_chunks(layout: Layout, axis: str, whole: int, counts: Mapping[int, int]) -> None:
    """Raise `ShapeError` if ranks do not hold DTensor's chunks of an axis."""
    wanted = [
        len(positions_at(layout, axis, whole, coordinates(layout.mesh, rank))) for rank in counts
    ]
    if wanted != [*counts.values()]:
        raise ShapeError(
            f"axis {axis!r} is {whole} long, of which ranks {', '.join(map(str, counts))} hold"
            f" {[*counts.values()]}; layout.shard gives them {wanted}"
        )


@dataclass(frozen=True)
class FunctionOfPart:
    """A bias function of full tensors, for a call that numbers sequences or queries otherwise.

    `sequences` and `queries_here` have the numbers by which `fn` knows the call's; None: the same.
    """

    fn: Indexed
    sequences: tuple[int, ...]
    queries_here: tuple[int, ...] | None = None

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.prepared(q.device)(b, h, q, k)

    def prepared(self, device: torch.device) -> Indexed:
        """The same with its tables on a device; see `Mask.prepared`."""
        fn, sequences = prepared(self.fn, device), uploaded(self.sequences or (0,), device)
        if self.queries_here is None:
            return lambda b, h, q, k: fn(sequences[b], h, q, k)
        queries = uploaded(self.queries_here or (0,), device)
        return lambda b, h, q, k: fn(sequences[b], h, queries[q], k)


def of_part(
    given: Mask | Bias | Tensor,
    sequences: tuple[int, ...],
    queries_here: tuple[int, ...],
    batch: int,
    length: int,
) -> Mask | Bias | Tensor:
    """A mask or bias of the whole for a call on a part of it; see `OfPart`."""
    if isinstance(given, Mask):
        return OfPart(given, sequences, queries_here, batch, length)
    if isinstance(given, Bias):
        return Bias(FunctionOfPart(given.fn, sequences, queries_here), given.per_sample)
    if given.dim() != 4 or given.shape[2] != length or len(given) not in (1, batch):
        many = 1 if given.shape[:1] == (1,) else f"{batch} or 1"
        raise ShapeError(
            f"a learned bias over a context is whole on every rank: it must be ({many}, heads or 1,"
            f" {length}, keys), found {tuple(given.shape)}"
        )
    part = given.index_select(2, uploaded(queries_here, given.device))
    if len(given) == 1:
        return part
    return part.index_select(0, uploaded(sequences, given.device))


def renumbered(given: Mask | Bias, order: tuple[int, ...], batch: int) -> Mask | Bias:
    """A mask or bias of the whole, for a call that counts sequences in this order."""
    if isinstance(given, Mask):
        return Renumbered(given, order, batch)
    return Bias(FunctionOfPart(given.fn, order))
