"""Rules of views, slices and concatenations: what is split stays split."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..plan.order import Span
from .dims import Chunks, Dim, Factor, dim_size, is_split_dim, split_dim, whole
from .exchange import rechunked, take_positions
from .field import Field
from .registry import aligned_part, attribute, both, dims_of, one_factor, refused, region_of, rule


def sizes_of(given: tuple) -> list[int]:
    """Sizes given one by one, or together."""
    together = len(given) == 1 and not isinstance(given[0], int)
    return [int(n) for n in (given[0] if together else given)]


def made(x: Field, t: Tensor, dims: Sequence[Sequence[Factor]]) -> Field:
    """A field of the same region."""
    return Field(t, dims, x._region)


# -- shapes ---------------------------------------------------------------------------------------


@rule(*both("reshape"), Tensor.view)
def reshape(x: Field, *given: Any, shape: Any = None) -> Field:
    if given and isinstance(given[0], torch.dtype):
        raise refused("view as another dtype", x)
    sizes = list(shape) if shape is not None else sizes_of(given)
    total = math.prod(x.shape)
    if -1 in sizes:
        at = sizes.index(-1)
        rest = math.prod(n for i, n in enumerate(sizes) if i != at)
        sizes[at] = total // rest if rest else 0
    if math.prod(sizes) != total:
        raise RuntimeError(f"shape {sizes} is invalid for input of size {total}")
    view = _Regrouping(x)
    dims = [view.next(n, sizes) for n in sizes]
    view.finish(sizes)
    return made(x, view.t.reshape([x._region.local_size(dim) for dim in dims]), dims)


class _Regrouping:
    """The factors of a field's dims, taken in order and grouped into others.

    A factor that is divided must have chunks of whole parts; where they are not, positions move.
    """

    def __init__(self, x: Field) -> None:
        self.x, self.t = x, x._local
        self.dims = [[f for f in dim if f != (1, None)] for dim in x._dims]
        self.d = self.place = 0

    def next(self, size: int, sizes: Sequence[int]) -> Dim:
        """The next factors, whose sizes multiply to one size."""
        taken: list[Factor] = []
        held = 1
        while held < size:
            self._skip()
            factor = self.dims[self.d][self.place]
            wanted, rest = divmod(size, held)
            if rest or (wanted % factor.size and factor.size % wanted):
                raise self._refused(sizes)
            if wanted % factor.size:
                factor = self._divide(factor, wanted)
            taken.append(factor)
            held *= factor.size
            self.place += 1
        return tuple(taken) or whole(1)

    def finish(self, sizes: Sequence[int]) -> None:
        """Check that all factors are taken."""
        self._skip()
        if self.d < len(self.dims):
            raise self._refused(sizes)

    def _skip(self) -> None:
        while self.d < len(self.dims) and self.place >= len(self.dims[self.d]):
            self.d, self.place = self.d + 1, 0

    def _divide(self, factor: Factor, size: int) -> Factor:
        """Divides the factor at hand into one of a size and the rest of it."""
        unit, chunks, dim, d = factor.size // size, factor.chunks, self.dims[self.d], self.d
        if chunks is not None:
            nearest = [round(p / unit) * unit for p in chunks.starts]
            region = self.x._region
            t = self.t.unflatten(d, [region.local_size((f,)) for f in dim])
            t, chunks = rechunked(t, d + self.place, chunks, nearest, region)
            self.t = t.flatten(d, d + len(dim) - 1)
            chunks = Chunks(chunks.axis, tuple(p // unit for p in chunks.starts))
        first = Factor(size, chunks)
        dim[self.place : self.place + 1] = [first, Factor(unit)]
        return first

    def _refused(self, sizes: Sequence[int]) -> Exception:
        return refused(f"a view as {tuple(sizes)}", self.x, ": it cuts a split axis elsewhere")


@rule(Tensor.view_as, Tensor.reshape_as)
def view_as(x: Field, other: Tensor) -> Field:
    return reshape(x, list(other.shape))


@rule(*both("flatten"))
def _flatten(x: Field, start_dim: int = 0, end_dim: int = -1) -> Field:
    shape, n = list(x.shape), max(x.dim(), 1)
    first, last = start_dim % n, end_dim % n
    joined = [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]]
    return reshape(x, joined)


@rule(*both("unflatten"))
def unflatten(x: Field, dim: int, sizes: Sequence[int]) -> Field:
    shape, dim = list(x.shape), dim % x.dim()
    sizes = list(sizes)
    if -1 in sizes:
        rest = -math.prod(sizes)
        sizes[sizes.index(-1)] = shape[dim] // rest
    return reshape(x, [*shape[:dim], *sizes, *shape[dim + 1 :]])


@rule(*both("permute"))
def permute(x: Field, *given: Any, dims: Any = None) -> Field:
    order = [d % x.dim() for d in (dims if dims is not None else sizes_of(given))]
    return made(x, x._local.permute(order), [x._dims[d] for d in order])


@rule(*both("transpose", "swapaxes", "swapdims"))
def transpose(x: Field, dim0: int, dim1: int) -> Field:
    order = list(range(x.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(x, order)


@rule(attribute("mT"))
def matrix_transpose(x: Field) -> Field:
    return transpose(x, -2, -1)


@rule(*both("t"), attribute("T"))
def plain_transpose(x: Field) -> Field:
    return permute(x, list(range(x.dim()))[::-1])


@rule(*both("movedim", "moveaxis"))
def movedim(x: Field, source: Any, destination: Any) -> Field:
    n = x.dim()
    a, b = ([q % n for q in ((v,) if isinstance(v, int) else v)] for v in (source, destination))
    rest = iter([d for d in range(n) if d not in a])
    return permute(x, [a[b.index(d)] if d in b else next(rest) for d in range(n)])


@rule(*both("unsqueeze"))
def unsqueeze(x: Field, dim: int) -> Field:
    dims = list(x._dims)
    at = dim % (len(dims) + 1)
    return made(x, x._local.unsqueeze(at), [*dims[:at], whole(1), *dims[at:]])


@rule(*both("squeeze"))
def squeeze(x: Field, dim: Any = None) -> Field:
    n = x.dim()
    asked = range(n) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = [d % n for d in asked if x.shape[d] == 1]
    if any(is_split_dim(x._dims[d]) for d in gone):
        raise refused("squeeze of a split axis", x)
    dims = [dim for d, dim in enumerate(x._dims) if d not in gone]
    return made(x, x._local.squeeze(tuple(gone)), dims)


@rule(*both("expand"), torch.broadcast_to)
def expand(x: Field, *given: Any) -> Field:
    sizes = sizes_of(given)
    dims = [*(whole(1) for _ in range(len(sizes) - x.dim())), *x._dims]
    placed: list[Dim] = []
    for n, dim in zip(sizes, dims):
        placed.append(dim if n in (-1, dim_size(dim)) else whole(n))
    shape = [x._region.local_size(dim) for dim in placed]
    return made(x, x._local.expand(shape), placed)


@rule(Tensor.expand_as)
def expand_as(x: Field, other: Tensor) -> Field:
    return expand(x, list(other.shape))


@rule(Tensor.repeat, torch.tile, Tensor.tile)
def repeat(x: Field, *given: Any) -> Field:
    sizes = sizes_of(given)
    sizes = [1] * (x.dim() - len(sizes)) + sizes
    dims = [*(whole(1) for _ in range(len(sizes) - x.dim())), *x._dims]
    if any(n != 1 and is_split_dim(dim) for n, dim in zip(sizes, dims)):
        raise refused("repeating a split axis", x)
    placed = [dim if n == 1 else whole(dim_size(dim) * n) for n, dim in zip(sizes, dims)]
    return made(x, x._local.repeat(*sizes), placed)


@rule(*both("repeat_interleave"))
def repeat_interleave(
    x: Field, repeats: Any, dim: int | None = None, *, output_size: Any = None
) -> Field:
    if dim is None or not isinstance(repeats, int):
        raise refused("repeat_interleave without a dim, or by a tensor,", x)
    dim %= x.dim()
    t, dims = x._local.repeat_interleave(repeats, dim), list(x._dims)
    if is_split_dim(dims[dim]):
        chunks = one_factor("repeat_interleave", x, dim).chunks
        dims[dim] = split_dim(chunks.times(repeats)) if chunks else dims[dim]
    else:
        dims[dim] = whole(dim_size(dims[dim]) * repeats)
    return made(x, t, dims)


@rule(*both("pixel_shuffle"))
def pixel_shuffle(x: Field, upscale_factor: int) -> Field:
    r, (b, c, h, w) = upscale_factor, x.shape
    x = permute(reshape(x, [b, c // r**2, r, r, h, w]), [0, 1, 4, 2, 5, 3])
    return reshape(x, [b, c // r**2, h * r, w * r])


@rule(*both("pixel_unshuffle"))
def pixel_unshuffle(x: Field, downscale_factor: int) -> Field:
    r, (b, c, h, w) = downscale_factor, x.shape
    x = permute(reshape(x, [b, c, h // r, r, w // r, r]), [0, 1, 3, 5, 2, 4])
    return reshape(x, [b, c * r * r, h // r, w // r])


# -- slices ---------------------------------------------------------------------------------------


@rule(Tensor.__getitem__)
def getitem(x: Field, index: Any) -> Field:
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, Tensor | list | bool) for i in index):
        raise refused("indexing with a tensor or a list", x)
    named = sum(i is not None and i is not Ellipsis for i in index)
    free = (slice(None),) * (x.dim() - named)
    at = next((k for k, i in enumerate(index) if i is Ellipsis), len(index))
    index = (*index[:at], *free, *index[at + 1 :])
    t, dims, d = x._local, [], 0
    steps: list[Any] = []
    for i in index:
        if i is None:
            steps.append(None)
            dims.append(whole(1))
            continue
        dim, place = x._dims[d], d
        d += 1
        if not is_split_dim(dim):
            steps.append(i)
            if isinstance(i, slice):
                dims.append(whole(len(range(*i.indices(dim_size(dim))))))
        elif isinstance(i, slice):
            if i == slice(None):
                steps.append(i)
                dims.append(dim)
                continue
            chunks = one_factor("a slice", x, place).chunks
            assert chunks is not None
            taken = range(*i.indices(chunks.length))
            low, high = x._region.own(chunks)
            local = [p - low for p in taken if low <= p < high]
            steps.append(slice(local[0], local[-1] + 1, taken.step) if local else slice(0, 0))
            kept = tuple(sum(p < start for p in taken) for start in chunks.starts)
            dims.append(split_dim(Chunks(chunks.axis, kept)))
        else:  # one position, on every rank
            chunks = one_factor("one position", x, place).chunks
            assert chunks is not None
            p = i % chunks.length
            ranks = x._region.layout.size(chunks.axis)
            t = take_positions(t, place, chunks, [(Span(p, 1),)] * ranks, x._region, "position")
            steps.append(0)
    return made(x, t[tuple(steps)], dims)


@rule(*both("narrow"))
def narrow(x: Field, dim: int, start: int, length: int) -> Field:
    start = start % x.shape[dim] if start < 0 else start
    return getitem(x, (*[slice(None)] * (dim % x.dim()), slice(start, start + length)))


@rule(*both("select"))
def select(x: Field, dim: int, index: int) -> Field:
    return getitem(x, (*[slice(None)] * (dim % x.dim()), index))


def _apart(x: Field, dim: int, parts: Sequence[Tensor]) -> tuple[Field, ...]:
    return tuple(
        made(x, t, [whole(t.shape[dim]) if d == dim else old for d, old in enumerate(x._dims)])
        for t in parts
    )


def _by_sizes(x: Field, dim: int, sizes: Sequence[int]) -> tuple[Field, ...]:
    edges = list(itertools.accumulate(sizes, initial=0))
    return tuple(narrow(x, dim, a, b - a) for a, b in itertools.pairwise(edges))


@rule(*both("chunk"))
def chunk(x: Field, chunks: int, dim: int = 0) -> tuple[Field, ...]:
    size = -(-x.shape[dim] // chunks)
    return split_by(x, max(size, 1), dim)


@rule(*both("split", "split_with_sizes"))
def split_by(x: Field, split_size_or_sections: Any = None, dim: int = 0, **kw: Any) -> tuple:
    sizes = kw.get("split_size", kw.get("split_sizes", split_size_or_sections))
    dim %= x.dim()
    if isinstance(sizes, int):
        n = x.shape[dim]
        sizes = [min(sizes, n - at) for at in range(0, n, sizes)] or [0]
    if is_split_dim(x._dims[dim]):
        return _by_sizes(x, dim, sizes)
    return _apart(x, dim, x._local.split(list(sizes), dim))


@rule(*both("unbind"))
def unbind(x: Field, dim: int = 0) -> tuple[Field, ...]:
    dim %= x.dim()
    if is_split_dim(x._dims[dim]):
        return tuple(select(x, dim, i) for i in range(x.shape[dim]))
    dims = [old for d, old in enumerate(x._dims) if d != dim]
    return tuple(made(x, t, dims) for t in x._local.unbind(dim))


@rule(*both("flip"))
def flip(x: Field, *given: Any, dims: Any = None) -> Field:
    over = [d % x.dim() for d in (dims if dims is not None else sizes_of(given))]
    if any(is_split_dim(x._dims[d]) for d in over):
        raise refused("flip of a split axis", x)
    return made(x, x._local.flip(over), x._dims)


# -- joining --------------------------------------------------------------------------------------


@rule(*both("cat", "concat", "concatenate"))
def cat(tensors: Sequence[Tensor], dim: int = 0, *, out: None = None) -> Field:
    region = region_of(*tensors)
    tensors = [t for t in tensors if not (t.dim() == 1 and t.shape[0] == 0)]
    first = next(t for t in tensors if isinstance(t, Field))
    at = dim % first.dim()
    if any(is_split_dim(dims_of(t)[at]) for t in tensors):
        raise refused("concatenating along a split axis", first)
    parts, goal = [], list(first._dims)
    for t in tensors:
        goal[at] = dims_of(t)[at]
        parts.append(aligned_part(t, goal, region))
    goal[at] = whole(sum(t.shape[at] for t in tensors))
    return Field(torch.cat(parts, at), goal, region)


@rule(*both("stack"))
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Field:
    n = max(t.dim() for t in tensors) + 1
    widened = [unsqueeze(t, dim) if isinstance(t, Field) else t.unsqueeze(dim) for t in tensors]
    return cat(widened, dim % n)
