"""Rules of views, joins and repeats: positions are called otherwise, and what is split stays so."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.plan.held import Held
from weft.plan.order import Span

from .dims import (
    Dim,
    Factor,
    dim_size,
    flipped,
    is_split_dim,
    joined_chunks,
    rolled,
    sliced_chunks,
    split_axes,
    split_dim,
    whole,
)
from .exchange import at_spans
from .place import FieldRegion
from .registry import (
    Direct,
    Part,
    Recipe,
    attribute,
    both,
    broadcast,
    composite,
    on_locals,
    parts_in,
    refused,
    rule,
)


def sizes_of(given: tuple) -> list[int]:
    """Sizes given one by one, or together."""
    if found := next(parts_in(*given), None):
        raise refused("a view of sizes that are tensors", found)
    together = len(given) == 1 and not isinstance(given[0], int)
    return [int(n) for n in (given[0] if together else given)]


def at(d: int, n: int) -> int:
    """A dim from the front; of a number both 0 and -1 are its only one."""
    n = max(n, 1)
    if not -n <= d < n:
        raise IndexError(f"Dimension out of range (expected in [{-n}, {n - 1}], but got {d})")
    return d % n


# -- shapes ---------------------------------------------------------------------------------------


@rule(*both("reshape"), Tensor.view)
def reshape(x: Part, *given: Any, shape: Any = None, size: Any = None, dtype: Any = None) -> Recipe:
    kind = dtype if dtype is not None else given[0] if given else None
    if isinstance(kind, torch.dtype):
        if kind.itemsize != x.dtype.itemsize:
            raise refused("view as a dtype of another size", x)
        return on_locals(Tensor.view, (x, kind), x.dims)
    sizes = list(shape if shape is not None else size) if not given else sizes_of(given)
    if -1 in sizes:
        sizes[sizes.index(-1)] = math.prod(x.shape) // -math.prod(sizes)
    if not math.prod(sizes):
        return _no_numbers(x, sizes)
    goal, dims = _Regrouping(x).into(sizes)
    local_shape = [x.region.local_size(dim) for dim in dims]
    return Recipe(lambda t: t[x.index].reshape(local_shape), dims, {x.index: goal})


def _no_numbers(x: Part, sizes: Sequence[int]) -> Recipe:
    """A view of nothing: every rank has it whole."""
    goal = x.whole_along(range(x.ndim))
    return Recipe(
        lambda t: t[x.index].reshape(list(sizes)), [whole(n) for n in sizes], {x.index: goal}
    )


class _Regrouping:
    """The factors of a tensor's dims, taken in order and grouped into others.

    A factor that is divided must have chunks of whole parts; where they are not, positions move.
    """

    def __init__(self, x: Part) -> None:
        self.x = x
        #: of every dim its factors before: goals are the same factors in other chunks
        self.goal: list[list[Factor]] = [[f for f in dim if f != (1, None)] for dim in x.dims]
        #: the factors that are left: (factor, dim and place of the one that it is of)
        self.left = [(f, d, i) for d, dim in enumerate(self.goal) for i, f in enumerate(dim)]

    def into(self, sizes: Sequence[int]) -> tuple[list[Dim], list[Dim]]:
        """The dims before the view, and those after it."""
        dims = [self._next(n, sizes) for n in sizes]
        return [tuple(dim) or whole(1) for dim in self.goal], dims

    def _next(self, size: int, sizes: Sequence[int]) -> Dim:
        """The next factors, whose sizes multiply to one size."""
        taken_: list[Factor] = []
        held = 1
        while held < size:
            factor = self.left[0][0]
            wanted, rest = divmod(size, held)
            if rest or (wanted % factor.size and factor.size % wanted):
                cuts = ": it cuts a split axis elsewhere"
                raise refused(f"a view as {tuple(sizes)}", self.x, cuts)
            if wanted % factor.size:
                factor = self._divide(wanted)
            else:
                self.left.pop(0)
            taken_.append(factor)
            held *= factor.size
        return tuple(taken_) or whole(1)

    def _divide(self, size: int) -> Factor:
        """Divides the factor at hand into one of a size and the rest of it."""
        factor, d, i = self.left[0]
        unit, chunks = factor.size // size, factor.chunks
        units = None
        if chunks is not None:
            units = chunks.units(unit)
            if units is None:
                units = _near_units(chunks, unit, size, self.x.region)
                goal = self.goal[d][i]
                self.goal[d][i] = Factor(goal.size, units.times(goal.size // size))
        self.left[0] = Factor(unit), d, i
        return Factor(size, units)


def _near_units(chunks: Held, unit: int, size: int, region: FieldRegion) -> Held:
    """Chunks of whole units: those nearest to contiguous ones, others in the layout's order."""
    if chunks.starts is not None:
        return chunks.contiguous([round(p / unit) for p in chunks.starts])
    return region.chunks_like(chunks.axis, size)


@rule(Tensor.view_as, Tensor.reshape_as)
def view_as(x: Part, other: Part) -> Recipe:
    return reshape(x, list(other.shape))


@rule(*both("flatten", "ravel"))
def _flatten(x: Part, start_dim: int = 0, end_dim: int = -1) -> Recipe:
    shape, n = list(x.shape), x.ndim
    first, last = at(start_dim, n), at(end_dim, n)
    return reshape(x, [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]])


@rule(*both("unflatten"))
def unflatten(x: Part, dim: int, sizes: Sequence[int]) -> Recipe:
    shape, dim = list(x.shape), at(dim, x.ndim)
    sizes = [int(n) for n in sizes]
    if -1 in sizes:
        rest = -math.prod(sizes)
        sizes[sizes.index(-1)] = shape[dim] // rest if rest else 0
    return reshape(x, [*shape[:dim], *sizes, *shape[dim + 1 :]])


@rule(*both("permute"))
def permute(x: Part, *given: Any, dims: Any = None) -> Recipe:
    order = [at(d, x.ndim) for d in (dims if dims is not None else sizes_of(given))]
    return on_locals(torch.permute, (x, order), [x.dims[d] for d in order])


@rule(*both("transpose", "swapaxes", "swapdims"))
def transpose(x: Part, *given: Any, **named: Any) -> Recipe:
    one, two = [*given, *named.values()]
    order = list(range(x.ndim))
    if order:
        one, two = at(one, x.ndim), at(two, x.ndim)
        order[one], order[two] = order[two], order[one]
    return permute(x, order)


@rule(attribute("mT"), attribute("mH"), Tensor.adjoint, torch.adjoint)
def matrix_transpose(x: Part) -> Recipe:
    if x.dtype.is_complex:
        raise refused("a conjugate transpose", x)
    return transpose(x, -2, -1)


@rule(*both("t"), attribute("T"), attribute("H"))
def plain_transpose(x: Part) -> Recipe:
    if x.dtype.is_complex:
        raise refused("a conjugate transpose", x)
    return permute(x, list(range(x.ndim))[::-1])


@rule(*both("movedim", "moveaxis"))
def movedim(x: Part, source: Any, destination: Any) -> Recipe:
    n = x.ndim
    a, b = ([at(q, n) for q in ((v,) if isinstance(v, int) else v)] for v in (source, destination))
    rest = iter([d for d in range(n) if d not in a])
    return permute(x, [a[b.index(d)] if d in b else next(rest) for d in range(n)])


@rule(*both("unsqueeze"))
def unsqueeze(x: Part, dim: int) -> Recipe:
    place = at(dim, x.ndim + 1)
    return on_locals(torch.unsqueeze, (x, place), [*x.dims[:place], whole(1), *x.dims[place:]])


@rule(*both("squeeze"))
def squeeze(x: Part, dim: Any = None) -> Recipe:
    asked = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = tuple(at(d, x.ndim) for d in asked if x.ndim and x.shape[d] == 1)
    return on_locals(torch.squeeze, (x, gone), [q for d, q in enumerate(x.dims) if d not in gone])


@rule(*both("expand"), torch.broadcast_to, Tensor.broadcast_to)
def expand(x: Part, *given: Any, size: Any = None, implicit: bool = False) -> Recipe:
    sizes = list(size) if size is not None else sizes_of(given)
    dims = [*(whole(1) for _ in range(len(sizes) - x.ndim)), *x.dims]
    placed = [dim if n in (-1, dim_size(dim)) else whole(n) for n, dim in zip(sizes, dims)]
    shape = [x.region.local_size(dim) for dim in placed]
    return on_locals(Tensor.expand, (x, shape), placed)


@rule(Tensor.expand_as)
def expand_as(x: Part, other: Part) -> Recipe:
    """Placed as the other tensor is, where it becomes as long."""
    lead = other.ndim - x.ndim
    dims = [*other.dims[:lead], *x.dims]
    placed = [o if dim_size(q) == 1 else q for q, o in zip(dims, other.dims)]
    placed = broadcast([placed])
    shape = [x.region.local_size(dim) for dim in placed]
    return on_locals(Tensor.expand, (x, shape), placed, {x.index: placed[lead:]})


@rule(torch.broadcast_tensors)
def broadcast_tensors(*tensors: Any) -> Recipe:
    parts = list(parts_in(tensors))
    dims = broadcast([p.dims for p in parts])
    shape = [parts[0].region.local_size(dim) for dim in dims]
    goals = {p.index: dims[len(dims) - p.ndim :] for p in parts if p.ndim}
    return Recipe(lambda t: [t[p.index].expand(shape) for p in parts], [dims] * len(parts), goals)


@rule(Tensor.repeat, torch.tile, Tensor.tile)
def repeat(x: Part, *given: Any, dims: Any = None, repeats: Any = None) -> Recipe:
    sizes = list(dims or repeats or ()) if not given else sizes_of(given)
    sizes = [1] * (x.ndim - len(sizes)) + sizes
    old = [*(whole(1) for _ in range(len(sizes) - x.ndim)), *x.dims]
    placed: list[Dim] = []
    for n, dim in zip(sizes, old):
        if is_split_dim(dim):
            placed.append((Factor(n), *dim) if n > 1 else dim if n else whole(0))
        else:
            placed.append(whole(dim_size(dim) * n))
    return on_locals(Tensor.repeat, (x, *sizes), placed)


@rule(*both("repeat_interleave"))
def repeat_interleave(
    x: Part, repeats: Any, dim: int | None = None, *, output_size: Any = None
) -> Recipe:
    if dim is None or not isinstance(repeats, int):
        raise refused("repeat_interleave without a dim, or by a tensor,", x)
    d, dims = at(dim, x.ndim), list(x.dims)
    dims[d] = (*dims[d], Factor(repeats)) if repeats else whole(0)
    return on_locals(torch.repeat_interleave, (x, repeats, d), dims)


@rule(Tensor.unfold)
def unfold(x: Part, dimension: int, size: int, step: int) -> Recipe:
    d, dims = at(dimension, x.ndim), [*x.dims, whole(size)]
    if not x.ndim or x.is_split(d):
        raise refused(f"unfold along dim {dimension}", x)
    dims[d] = whole((x.shape[d] - size) // max(step, 1) + 1)
    return on_locals(Tensor.unfold, (x, d, size, step), dims)


@composite(*both("pixel_shuffle"))
def pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    r, (*b, c, h, w) = upscale_factor, x.shape
    if not x.numel():
        raise refused("pixel_shuffle of nothing", x)
    n = len(b)
    x = x.reshape([*b, c // r**2, r, r, h, w])
    y = x.permute([*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return y.reshape([*b, c // r**2, h * r, w * r]).clone()


@composite(*both("pixel_unshuffle"))
def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    r, (*b, c, h, w) = downscale_factor, x.shape
    if not x.numel():
        raise refused("pixel_unshuffle of nothing", x)
    n = len(b)
    x = x.reshape([*b, c, h // r, r, w // r, r])
    y = x.permute([*range(n), n, n + 2, n + 4, n + 1, n + 3])
    return y.reshape([*b, c * r * r, h // r, w // r]).clone()


@composite(*both("channel_shuffle"))
def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(1, (groups, x.shape[1] // groups)).transpose(1, 2).flatten(1, 2).clone()


# -- slices ---------------------------------------------------------------------------------------


def indexed(x: Part, index: Any) -> Recipe:
    """Slices, numbers, None and ... of a tensor: numbers come to every rank."""
    index = index if isinstance(index, tuple) else (index,)
    named = sum(i is not None and i is not Ellipsis for i in index)
    place = next((k for k, i in enumerate(index) if i is Ellipsis), len(index))
    free = (slice(None),) * (x.ndim - named)
    index = (*index[:place], *free, *index[place + 1 :])
    goal: list[Any] = list(x.dims)
    out: list[Dim] = []
    steps: list[Any] = []
    cuts: list[tuple[int, tuple]] = []
    d, copies = 0, False
    for i in index:
        if i is None:
            steps.append(None)
            out.append(whole(1))
            continue
        dim, n = x.dims[d], x.shape[d]
        taken_ = range(*i.indices(n)) if isinstance(i, slice) else None
        if taken_ is None:
            if is_split_dim(dim):
                copies = True
                goal[d] = _Only(dim, int(i) % n, x, d)
            steps.append(0 if is_split_dim(dim) else int(i))
        elif i == slice(None) or taken_ == range(n) or not is_split_dim(dim):
            steps.append(i)
            out.append(dim if is_split_dim(dim) else whole(len(taken_)))
        else:
            chunks = x.as_one("a slice", d)
            new, kept = sliced_chunks(chunks, taken_.start, taken_.stop, taken_.step)
            copies = copies or any(
                len(spans) > 1 or any(s.step < 1 for s in spans) for spans in kept
            )
            cuts.append((d, kept[x.region.chunk(chunks.axis)]))
            steps.append(slice(None))
            out.append(split_dim(new))
        d += 1
    return _cut(x, goal, cuts, tuple(steps), out, copies)


def _cut(x: Part, goal: list, cuts: list, steps: tuple, out: list[Dim], copies: bool) -> Recipe:
    singles = [g for g in goal if isinstance(g, _Only)]
    if not singles and not cuts:
        return Recipe(lambda t: t[x.index][steps], out)

    def run(t: list[Any]) -> Tensor:
        y = t[x.index]
        for single in singles:
            y = single.taken(y)
        for d, spans in cuts:
            y = at_spans(y, d, spans)
        return y[steps]

    return Recipe(run, out, copies=copies)


class _Only:
    """One position of a split dim, which comes to every rank."""

    def __init__(self, dim: Dim, position: int, x: Part, d: int) -> None:
        self.x, self.d = x, d
        self.chunks = x.one_factor("one position", d).chunks
        self.wanted = ((Span(position, 1),),) * x.region.layout.size(split_axes(dim)[0])

    def taken(self, t: Tensor) -> Tensor:
        from .exchange import take_positions

        assert self.chunks is not None
        return take_positions(t, self.d, self.chunks, self.wanted, self.x.region, "position")


@rule(*both("narrow"))
def _narrow(x: Part, dim: int, start: Any, length: int) -> Recipe | Direct:
    if isinstance(start, Part):
        if start.dtype.is_floating_point or start.dtype == torch.bool or start.ndim:
            raise RuntimeError("narrow: start must be a tensor of one integer")
        return Direct(lambda y, d, s, n: y.narrow(d, int(s), n))
    return narrow(x, dim, start, length)


def narrow(x: Part, dim: int, start: int, length: int) -> Recipe:
    """A slice of a dim."""
    d = at(dim, x.ndim)
    start = start + x.shape[d] if start < 0 else start
    return indexed(x, (*[slice(None)] * d, slice(start, start + length)))


@rule(*both("select"))
def select(x: Part, dim: int, index: int) -> Recipe:
    return indexed(x, (*[slice(None)] * at(dim, x.ndim), index))


def _by_sizes(x: Part, dim: int, sizes: Sequence[int]) -> Recipe:
    """The parts of a dim, of some sizes."""
    d, edges = at(dim, x.ndim), list(itertools.accumulate(sizes, initial=0))
    return _several([narrow(x, d, a, b - a) for a, b in itertools.pairwise(edges)])


def _several(parts: list[Recipe]) -> Recipe:
    """The results of several recipes."""

    def run(t: list[Any]) -> tuple:
        return tuple(part.run(t) for part in parts)

    return Recipe(run, [p.out for p in parts], copies=any(p.copies for p in parts))


@rule(*both("chunk"))
def chunk(x: Part, chunks: int, dim: int = 0) -> Recipe:
    n = x.shape[at(dim, x.ndim)]
    size = max(-(-n // chunks), 1)
    return _by_sizes(x, dim, [min(size, n - a) for a in range(0, n, size)] or [0] * chunks)


@rule(*both("split", "split_with_sizes"))
def split_by(x: Part, split_size_or_sections: Any = None, dim: int = 0, **named: Any) -> Recipe:
    sizes = named.get("split_size", named.get("split_sizes", split_size_or_sections))
    n = x.shape[at(dim, x.ndim)]
    if isinstance(sizes, int):
        sizes = [min(sizes, n - a) for a in range(0, n, max(sizes, 1))] or [0]
    return _by_sizes(x, dim, [int(size) for size in sizes])


@rule(*both("tensor_split"))
def tensor_split(x: Part, indices_or_sections: Any = None, dim: int = 0, **named: Any) -> Recipe:
    given = next(iter(named.values()), indices_or_sections)
    if isinstance(given, Part):
        raise refused("tensor_split by a tensor", x)
    n = x.shape[at(dim, x.ndim)]
    if isinstance(given, int):
        return _by_sizes(x, dim, [n // given + (i < n % given) for i in range(given)])
    edges = [0, *(slice(0, int(e)).indices(n)[1] for e in given), n]
    return _by_sizes(x, dim, [max(b - a, 0) for a, b in itertools.pairwise(edges)])


@rule(*both("unbind"))
def unbind(x: Part, dim: int = 0) -> Recipe | Direct:
    d = at(dim, x.ndim)
    if not x.shape[d]:
        return Direct(lambda *_, **__: ())
    return _several([select(x, d, i) for i in range(x.shape[d])])


@rule(*both("flip"))
def flip(x: Part, *given: Any, dims: Any = None) -> Recipe:
    over = [at(d, x.ndim) for d in (dims if dims is not None else sizes_of(given))]
    placed, local_ = list(x.dims), []
    for d in over:
        if not x.is_split(d):
            local_.append(d)
            continue
        chunks = x.one_factor("flip", d).chunks
        assert chunks is not None
        placed[d] = split_dim(flipped(chunks))
    return on_locals(torch.flip, (x, local_), placed)


@composite(*both("fliplr"))
def fliplr(x: Tensor) -> Tensor:
    return x.flip(1)


@composite(*both("flipud"))
def flipud(x: Tensor) -> Tensor:
    return x.flip(0)


@composite(*both("rot90"))
def rot90(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    one, two = dims
    turned = (
        x,
        x.flip(two).transpose(one, two),
        x.flip((one, two)),
        x.transpose(one, two).flip(two),
    )
    return turned[k % 4] if k % 4 else x.clone()


@rule(*both("roll"))
def roll(x: Part, shifts: Any, dims: Any = ()) -> Recipe:
    by = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    over = () if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
    if not over:
        raise refused("roll without dims", x)
    placed: list[Dim] = list(x.dims)
    local_: list[tuple[int, int]] = []
    for shift, d in zip(by, (at(d, x.ndim) for d in over)):
        if not is_split_dim(placed[d]):
            local_.append((shift, d))
            continue
        chunks = x.one_factor("roll", d).chunks
        assert chunks is not None
        now = placed[d][0].chunks
        assert now is not None
        placed[d] = split_dim(rolled(now, shift))
    return (
        on_locals(torch.roll, (x, [s for s, _ in local_], [d for _, d in local_]), placed)
        if local_
        else Recipe(lambda t: t[x.index].clone(), placed)
    )


# -- joining --------------------------------------------------------------------------------------


@rule(*both("cat", "concat", "concatenate"))
def cat(tensors: Sequence[Part], dim: int = 0, *, out: None = None) -> Recipe:
    parts = [t for t in tensors if not (t.ndim == 1 and t.shape[0] == 0)] or list(tensors)[:1]
    d = at(dim, parts[0].ndim)
    axes = {axis for t in parts for axis in split_axes(t.dims[d])}
    goal = broadcast([[whole(1) if k == d else q for k, q in enumerate(t.dims)] for t in parts])
    if len(axes) > 1:
        raise refused("concatenating axes that differ", parts[0])
    if not axes:
        goal[d] = whole(sum(t.shape[d] for t in parts))
        goals = {t.index: [q if k != d else t.dims[d] for k, q in enumerate(goal)] for t in parts}
        return _joining(parts, d, goal, goals)
    (axis,) = axes
    goal = [whole(dim_size(q)) if axis in split_axes(q) else q for q in goal]
    pieces, goals = [], {}
    split = [t.as_one("concatenating", d) for t in parts if t.is_split(d)]
    for i, t in enumerate(parts):
        n, held = t.shape[d], t.dims[d]
        if t.is_split(d):
            piece: Any = t.as_one("concatenating", d)
        else:
            if n < len(split[0]):
                piece = split[0].alone(_owner(parts, i, d), n)
            else:
                piece = t.region.chunks_beside(split, t.region.chunks_like(axis, n))
            held = split_dim(piece)
        pieces.append(piece)
        goals[t.index] = [q if k != d else held for k, q in enumerate(goal)]
    goal[d] = split_dim(joined_chunks(tuple(pieces)))
    return _joining(parts, d, goal, goals)


def _joining(parts: Sequence[Part], d: int, dims: list[Dim], goals: dict) -> Recipe:
    return Recipe(lambda t: torch.cat([t[p.index] for p in parts], d), dims, goals)


def _owner(parts: Sequence[Part], i: int, d: int) -> int:
    """The chunk that has the position before a whole tensor, or else the one behind it."""
    for t in reversed(parts[:i]):
        if t.is_split(d) and t.shape[d]:
            return _holder(t, d, t.shape[d] - 1)
    for t in parts[i + 1 :]:
        if t.is_split(d) and t.shape[d]:
            return _holder(t, d, 0)
    return 0


def _holder(t: Part, d: int, position: int) -> int:
    return next(
        c
        for c, spans in enumerate(t.as_one("concatenating", d).spans)
        if any(position in range(s.start, s.start + s.count * s.step, s.step) for s in spans)
    )


@composite(*both("stack"))
def stack(tensors: Sequence[Tensor], dim: int = 0, *, out: None = None) -> Tensor:
    first = next(iter(tensors))
    d = at(dim, first.dim() + 1)
    return torch.cat([t.unsqueeze(d) for t in tensors], d)


@composite(torch.hstack)
def hstack(tensors: Sequence[Tensor], *, out: None = None) -> Tensor:
    tensors = torch.atleast_1d(*tensors) if len(tensors) > 1 else [torch.atleast_1d(tensors[0])]
    return torch.cat(list(tensors), 0 if tensors[0].dim() == 1 else 1)


@composite(torch.vstack, torch.row_stack)
def vstack(tensors: Sequence[Tensor], *, out: None = None) -> Tensor:
    return torch.cat([torch.atleast_2d(t) for t in tensors], 0)


@composite(torch.dstack)
def dstack(tensors: Sequence[Tensor], *, out: None = None) -> Tensor:
    return torch.cat([torch.atleast_3d(t) for t in tensors], 2)


@composite(torch.column_stack)
def column_stack(tensors: Sequence[Tensor], *, out: None = None) -> Tensor:
    return torch.cat([t.reshape(-1, 1) if t.dim() < 2 else t for t in tensors], 1)


def _atleast(n: int) -> None:
    @composite(getattr(torch, f"atleast_{n}d"))
    def atleast(*tensors: Any) -> Any:
        several = tensors if isinstance(tensors[0], Tensor) else tensors[0]
        made = tuple(_with_dims(t, n) for t in several)
        return made[0] if len(made) == 1 and several is tensors else made


def _with_dims(t: Tensor, n: int) -> Tensor:
    if t.dim() >= n:
        return t
    if n == 3:
        return t.unsqueeze(-1) if t.dim() == 2 else t.reshape(1, -1, 1)
    return t.reshape(1, -1) if n == 2 else t.reshape(1)


for _n in (1, 2, 3):
    _atleast(_n)


@rule(*both("diagonal"))
def _diagonal(x: Part, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Recipe:
    one, two = at(dim1, x.ndim), at(dim2, x.ndim)
    if x.is_split(one) or x.is_split(two):
        raise refused("a diagonal of split dims", x)
    rows, columns = x.shape[one], x.shape[two]
    n = max(min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns), 0)
    kept = [q for d, q in enumerate(x.dims) if d not in (one, two)]
    return on_locals(torch.diagonal, (x, offset, one, two), [*kept, whole(n)])


def _triangle_rule(func: Any) -> Any:
    def triangle(x: Part, diagonal: int = 0) -> Recipe:
        if x.is_split(x.ndim - 1) or x.is_split(x.ndim - 2):
            raise refused("a triangle of split dims", x)
        return on_locals(func, (x, diagonal), x.dims)

    return triangle


for _func in both("tril", "triu"):
    rule(_func)(_triangle_rule(_func))
