"""Named axes to attention's canonical (batch, heads, sequence, dim), and back.

    x (batch rows features embed), attended rows           b = batch*features, n = rows
    context with fewer axes, (batch rows embed)            features become heads sharing k and v
    context with another axis, (batch notes embed)   b = batch, n = rows*features, m = notes

Shapes: b batch, l the axes of x that a context lacks, h query heads, g key/value heads, n queries,
m keys, d head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from einops import rearrange, repeat
from torch import Tensor

from weft._compile import flattened
from weft._uploads import uploaded
from weft.bias import Bias
from weft.declare.layout_file import HEADS
from weft.errors import DeclarationError, ShapeError
from weft.layout import Layout
from weft.masks import Mask
from weft.plan.call import Call
from weft.plan.lengths import check_axis_lengths
from weft.runtime.calls import BoundCall

from . import rotary, sequences

Axis = str | int | Sequence[str | int]

NO_LENGTHS = (
    "no lengths were given, so the chunks of {} count as equal; where the mesh does not divide"
    " them, pass lengths={{axis: global length}}"
)


def resolve_axes(axis: Axis, axes: Sequence[str]) -> tuple[str, ...]:
    """Names of the attended axes, from names or indices.

    >>> resolve_axes(-2, ("batch", "rows", "features", "embed"))
    ('features',)
    """
    wanted = [axis] if isinstance(axis, str | int) else list(axis)
    names: list[str] = []
    for item in wanted:
        if isinstance(item, int) and -len(axes) <= item < len(axes):
            item = axes[item]
        if not isinstance(item, str) or item not in axes[:-1] or item in names:
            raise DeclarationError(
                f"axis={axis!r}: {item!r} cannot be attended; give different axes out of"
                f" {tuple(axes[:-1])} or their indices ({axes[-1]!r} is the embedding)"
            )
        names.append(item)
    if not names:
        raise DeclarationError(f"axis={axis!r} names no axis; choose from {tuple(axes[:-1])}")
    return tuple(names)


class Geometry:
    """The axes of `x` and of a context that are batch, queries and keys, on a layout.

    `own`: `x` lacks the attended axes, so that all its tokens are queries. `shared`: axes of `x`
    that the context has too, not attended. `missing`: axes of `x` that the context lacks and that
    are no queries; `foldable` ones may become query heads. `placed` is the layout of x, `layout`
    the one that attention runs on (one device, or split heads alone, where nothing travels),
    `names` the attended axes in it. `whole`: attended axes whose keys are replicated although the
    layout splits them; `split`: axes whose keys are split although the queries are replicated.
    """

    def __init__(
        self, axis: Axis, axes: Sequence[str], context_axes: Sequence[str] | None, layout: Layout
    ) -> None:
        self.axes = tuple(axes)
        self.context_axes = self.axes if context_axes is None else tuple(context_axes)
        self.attended = resolve_axes(axis, self.context_axes)
        self.own = all(a not in self.axes for a in self.attended)
        self._check_axes(layout)
        grid = self.axes[:-1]
        shared = [a for a in grid if a in self.context_axes and a not in self.attended]
        self.shared = tuple(shared)
        lacking = [a for a in grid if a not in self.context_axes]
        self.missing = () if self.own else tuple(lacking)
        # Ranks must have as many heads, and a split axis may have uneven chunks.
        self.foldable = all(layout.size(name) == 1 for name in self.missing)
        self.queries = tuple(lacking) if self.own else self.attended
        self.placed, self.layout = layout, _of_heads(layout) if self.own else layout
        self.names = ("tokens",) if self.own else self.attended
        self._dims = {a: layout.shard_dims(a) for a in (*self.queries, *self.attended)}
        self._parts = {a: layout.size(a) for a in self._dims}
        keys = {a: () if self.own else layout.key_dims(a, self.attended) for a in self.attended}
        self._key_dims = keys
        self._key_parts = {a: math.prod(layout.mesh[d] for d in keys[a]) for a in self.attended}
        held = {a: set(self._dims[a]).difference(keys[a]) for a in self.attended}
        self.holders = math.prod(layout.mesh[d] for dims in held.values() for d in dims)
        self.whole = tuple(a for a in self.attended if held[a] and not self.own)
        self.split = tuple(a for a in self.attended if set(keys[a]).difference(self._dims[a]))
        symbols = {name: f"a{i}" for i, name in enumerate(grid)}
        for i, name in enumerate(self.context_axes[:-1]):
            symbols.setdefault(name, f"c{i}")

        def join(names: Sequence[str]) -> str:
            return " ".join(symbols[name] for name in names)

        b, wide, n = join(shared), join(self.missing), join(self.queries)
        heads = f"({b}) ({wide}) h ({n}) d" if self.missing else f"({b}) h ({n}) d"
        self._query = f"{join(grid)} (h d) -> {heads}"
        # The context names its dims in its own order.
        self._key = f"{join(self.context_axes[:-1])} (h d) -> ({b}) h ({join(self.attended)}) d"
        self._fold, self._expand = f"({b}) (h {wide}) ({n}) d", f"({b} {wide}) h ({n}) d"
        self._grid = f"{join(grid)} (h d)"
        self._symbols = {name: symbols[name] for name in grid}
        #: the axes that number sequences, and the same as a rank's sequences are flattened
        self.sequences = tuple(a for a in grid if a not in self.queries)
        self._flat = (*self.shared, *self.missing)
        given = (layout.unbound, self.attended, self.sequences, self._flat)
        self.in_order = self.own or sequences.in_order(*given)

    def _check_axes(self, layout: Layout) -> None:
        extra = [a for a in self.context_axes[:-1] if a not in (*self.axes, *self.attended)]
        mixed = not self.own and [a for a in self.attended if a not in self.axes]
        if extra or mixed:
            raise DeclarationError(
                f"a context with the axes {self.context_axes}, attended over {self.attended}: its"
                f" other axes must be axes of x, {self.axes[:-1]}, and the attended ones all of x"
                " or none"
            )
        split = [a for a in self.attended if self.own and layout.size(a) > 1]
        if split:
            raise DeclarationError(
                f"layout {layout.name!r} splits axis {split[0]!r}, which only a context has: give"
                " it whole to every rank, or let x have that axis"
            )

    # -- lengths -------------------------------------------------------------------------------

    def check_lengths(self, **given: Mapping[str, int] | None) -> None:
        """Raise `ShapeError` on all ranks that attend if an argument names other axes."""
        axes = {"lengths": self.axes[:-1], "context_lengths": self.context_axes[:-1]}
        try:
            for key, numbers in given.items():
                check_axis_lengths(key, numbers, axes.get(key, self.attended))
        except ShapeError as error:
            BoundCall(self.layout, Call(self.names)).refuse(error)
            raise

    def query_lengths(
        self, shape: Sequence[int], given: Mapping[str, int] | None
    ) -> dict[str, int]:
        """Global lengths of the query axes: as given, or equal chunks; local ones for `own`."""
        return self._lengths(self.queries, self.axes, shape, given, self._parts)

    def key_lengths(self, shape: Sequence[int], given: Mapping[str, int] | None) -> dict[str, int]:
        """The same for the attended axes of the context."""
        return self._lengths(self.attended, self.context_axes, shape, given, self._key_parts)

    def _lengths(
        self,
        names: Sequence[str],
        axes: Sequence[str],
        shape: Sequence[int],
        given: Mapping[str, int] | None,
        parts: Mapping[str, int],
    ) -> dict[str, int]:
        found = {}
        for name in names:
            here = shape[axes.index(name)]
            even = here if self.own else here * parts[name]
            found[name] = even if given is None or self.own else int(given.get(name, even))
        return found

    def pairs(self, n: Mapping[str, int], m: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """Lengths (queries, keys) per attended axis, as `weft.attention` takes them."""
        if self.own:
            return {self.names[0]: (math.prod([*n.values()]), math.prod([*m.values()]))}
        return {name: (n[name], m[name]) for name in self.attended}

    def renumbered(
        self, given: Mask | Bias | Tensor, x: Sequence[int], lengths: Mapping[str, int] | None
    ) -> Mask | Bias | Tensor:
        """A mask or bias of sequences as the axes number them, as `weft.attention` counts these.

        A learned bias is (batch or 1, heads or 1, queries, keys). `x` is the local shape; raises
        `ShapeError` where an axis of it contradicts `lengths`, the global ones.
        """
        alike = len(given) == 1 if isinstance(given, Tensor) else not given.per_sample
        if self.in_order or alike:
            return given
        known = self.sequence_lengths(x, lengths, _count(given))
        order = sequences.order_of(flattened(self.placed), self.attended, known, self._flat)
        if isinstance(given, Tensor):
            return given.index_select(0, uploaded(order, given.device))
        return sequences.renumbered(given, order, len(order))

    def sequence_lengths(
        self, x: Sequence[int], lengths: Mapping[str, int] | None, wanted: int | None = None
    ) -> sequences.Lengths:
        """Global lengths of the axes that number sequences, those of x checked by them.

        `x` is the local shape. `wanted`, the number of sequences that a learned bias has, gives the
        length of the outermost axis where no other is split.
        """
        here = {name: x[self.axes.index(name)] for name in self.sequences}
        whole = {name: n * self.placed.size(name) for name, n in here.items()} | {
            name: int(n) for name, n in (lengths or {}).items() if name in here
        }
        rest = sequences.other_dims(self.placed, self.attended, self.sequences)
        copies = math.prod(self.placed.mesh[d] for d in rest)
        first = next(iter(here), None)
        if wanted and self.in_order and first is not None and first not in (lengths or {}):
            inner = copies * math.prod(n for name, n in whole.items() if name != first)
            whole[first] = wanted // inner if inner and not wanted % inner else whole[first]
        known = tuple(whole.items())
        sequences.check_held(self.placed, self.placed.coords, known, here)
        count = copies * math.prod([*whole.values()])
        if wanted not in (None, count):
            raise ShapeError(
                f"a bias of {wanted} sequences, where {whole} make {count}: give it one or"
                f" {count}, and lengths= where the mesh does not divide these axes"
            )
        return known

    def whole_lengths(
        self, names: Sequence[str], x: Sequence[int], lengths: Mapping[str, int] | None
    ) -> dict[str, int]:
        """Global lengths of axes of x, for `own`: from `lengths`, or equal chunks on all ranks.

        Attention exchanges nothing there that would show chunks to be unequal. So where an axis is
        split and `lengths` lacks it, the ranks that split the axes compare theirs. Of an axis that
        numbers sequences they say how many they hold, which may be any number.
        """
        return {name: whole for name, (whole, _) in self._places(names, x, lengths).items()}

    def _places(
        self, names: Sequence[str], x: Sequence[int], lengths: Mapping[str, int] | None
    ) -> dict[str, tuple[int, Tensor]]:
        """Global lengths as `whole_lengths` has them, and the positions of this rank."""
        known, layout, wrong = lengths or {}, self.placed, ""
        here = {name: x[self.axes.index(name)] for name in names}
        split = [name for name in names if layout.size(name) > 1]
        unknown = [name for name in split if name not in known]
        asked = [name for name in unknown if name in self.sequences]
        whole = {
            name: int(known.get(name, here[name] * layout.size(name)))
            for name in names
            if name not in asked
        }
        try:
            sequences.check_held(layout, layout.coords, tuple(whole.items()), here)
        except ShapeError as error:
            wrong = str(error)
        ranks: Mapping[int, Sequence[int]] = {}
        if unknown:
            count = {name: "any" if name in asked else here[name] for name in unknown}
            chunks = ", ".join(f"{count[name]} of {name!r}" for name in unknown)
            dims = [d for name in split for d in layout.shard_dims(name)]
            numbers = [here[name] for name in asked]
            try:
                ranks = layout.bound.collect("the chunks of x", wrong or chunks, numbers, dims)
            except ShapeError as error:
                even = tuple(name for name in unknown if name not in asked)
                if not even:
                    raise
                raise ShapeError(f"{error}\n{NO_LENGTHS.format(even)}") from None
        if wrong:
            raise ShapeError(wrong)
        found = {name: (n, layout.positions(name, n)) for name, n in whole.items()}
        for i, name in enumerate(asked):
            counts = {rank: row[i] for rank, row in ranks.items()}
            found[name] = sequences.places_of(layout, name, counts)
        return found

    def of_part(
        self,
        mask: Mask,
        bias: Bias | Tensor | None,
        x: Sequence[int],
        lengths: Mapping[str, int] | None,
    ) -> tuple[Mask, Bias | Tensor | None]:
        """A mask and a bias of full tensors as this rank's part of x sees them, for `own`.

        A learned bias is (batch or 1, heads or 1, queries, keys).
        """
        axes = dict.fromkeys((*self._counted(mask), *self._counted(bias)))
        places = self._places(tuple(axes), x, lengths)
        mask_here = self._part(mask, x, places)
        assert isinstance(mask_here, Mask)
        if bias is None:
            return mask_here, None
        bias_here = self._part(bias, x, places)
        assert not isinstance(bias_here, Mask)
        return mask_here, bias_here

    def _counted(self, given: Mask | Bias | Tensor | None) -> tuple[str, ...]:
        """The axes of x whose positions a mask or bias looks at."""
        if given is None:
            return ()
        alike = given.shape[:1] == (1,) if isinstance(given, Tensor) else not given.per_sample
        uniform = isinstance(given, Mask) and given.uniform
        return (*(() if alike else self.sequences), *(() if uniform else self.queries))

    def _part(
        self, given: Mask | Bias | Tensor, x: Sequence[int], known: Mapping[str, tuple[int, Tensor]]
    ) -> Mask | Bias | Tensor:
        counted = self._counted(given)
        if all(self.placed.size(name) == 1 for name in counted):
            return given

        def joined(names: Sequence[str]) -> tuple[tuple[int, ...], int]:
            """The numbers of this rank's entries, and the number of all."""
            if not set(names).issubset(counted):  # nobody asks for them
                count = math.prod(x[self.axes.index(name)] for name in names)
                return tuple(range(count)), count
            index = torch.zeros(1, dtype=torch.int64)
            for name in names:
                whole, places = known[name]
                index = (index[:, None] * whole + places).flatten()
            return tuple(index.tolist()), math.prod(known[name][0] for name in names)

        (batch, batches), (rows, length) = joined(self.sequences), joined(self.queries)
        return sequences.of_part(given, batch, rows, batches, length)

    def check_shared(self, x: Sequence[int], context: Sequence[int]) -> None:
        """Raises `ShapeError` if an axis that is batch has another length in the context."""
        for name in self.context_axes[:-1]:
            if name in self.axes and name not in self.attended:
                a, b = x[self.axes.index(name)], context[self.context_axes.index(name)]
                if a != b:
                    raise ShapeError(
                        f"axis {name!r} is {a} long in x and {b} in the context; it is not"
                        f" attended, so both must have the same"
                    )

    # -- tensors -------------------------------------------------------------------------------

    def to_heads(self, t: Tensor, head_dim: int, *, keys: bool) -> Tensor:
        """Dims as the axes name them, heads last -> (b h n d); queries (b l h n d) if l is."""
        return rearrange(t, self._key if keys else self._query, d=head_dim)

    def broadcast(
        self, q: Tensor, k: Tensor, v: Tensor, *, plain: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Lets the axes that the context lacks share its keys and values.

        They become query heads, so that keys and values are neither copied nor sent more than
        once. Where they are split, or batch and head numbers mean something (not `plain`), they
        become batch.
        """
        if not self.missing:
            return q, k, v
        if plain:
            return rearrange(q, "b l h n d -> b (h l) n d"), k, v
        k = repeat(k, "b g m d -> (b l) g m d", l=q.shape[1])
        v = repeat(v, "b g m d -> (b l) g m d", l=q.shape[1])
        return rearrange(q, "b l h n d -> (b l) h n d"), k, v

    def back(self, out: Tensor, shape: Sequence[int], heads: int, *, plain: bool) -> Tensor:
        """Attention's output as the dims of x, heads last."""
        pattern = self._fold if plain else self._expand
        sizes = {self._symbols[name]: size for name, size in zip(self.axes, shape[:-1])}
        return rearrange(out, f"{pattern} -> {self._grid}", h=heads, **sizes)

    def angles(
        self,
        rope: Sequence[str],
        lengths: Mapping[str, int],
        head_dim: int,
        *,
        keys: bool,
        device: torch.device,
        first: Mapping[str, int] | None = None,
    ) -> Tensor:
        """Rotary angles of the local queries or keys, (n, d/2), made on the device.

        `first` has the position of the first one, over all ranks, along axes where it is not 0.
        """
        layout, places = self.layout, []
        for name in self.attended:
            dims = self._key_dims[name] if keys else self._dims[name]
            given = layout, name, lengths[name], layout.coords, dims, device
            here = sequences.positions_at(*given)
            places.append((here + (first or {}).get(name, 0), name in rope))
        return rotary.angles(places, head_dim)


def _of_heads(layout: Layout) -> Layout:
    """A layout of calls that exchange nothing: it splits the heads as this one does, and no more.

    Masks and biases of single heads know them by their numbers over all ranks.
    """
    split = layout.shard_dims(HEADS)
    if layout.size(HEADS) == 1:
        return Layout.single()
    rest = tuple(d for d in layout.mesh if d not in split)
    return replace(layout, sharding={HEADS: split}, replicate=rest, order={}, attend={})


def _count(given: Mask | Bias | Tensor) -> int | None:
    return len(given) if isinstance(given, Tensor) else None
