"""Functions that look positions up: indices, masks, gathers, and writes at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft._digest import number_of
from weft.plan.order import Span, Spans, join

from .dims import Dim, dim_size, is_split_dim, sliced_chunks, split_axes, split_dim, whole
from .exchange import at_spans, of_shares, placed_like, sharing_more, take_positions
from .field import Field, settled
from .place import FieldRegion
from .registry import (
    Direct,
    NoRule,
    Part,
    Recipe,
    both,
    broadcast,
    check_writable,
    composite,
    direct,
    on_locals,
    once_split,
    refused,
    region_of_fields,
    rule,
)
from .views import at, indexed


@rule(Tensor.__getitem__)
def getitem(x: Part, index: Any) -> Recipe | Direct:
    several = index if isinstance(index, tuple) else (index,)
    plain = (int, slice, type(None), type(Ellipsis))
    if all(isinstance(i, plain) and not isinstance(i, bool) for i in several):
        bounds = [b for i in several if isinstance(i, slice) for b in (i.start, i.stop, i.step)]
        if not any(isinstance(b, Part | Tensor) for b in bounds):
            return indexed(x, index)
    return Direct(by_index)


class FieldsAtHand:
    """Fields of one call: the region of all, their local tensors, and a trail of the call."""

    def __init__(self, name: str, *tensors: Any) -> None:
        fields = [t for t in tensors if isinstance(t, Field)]
        self.region: FieldRegion = region_of_fields(name, fields)
        for x in fields:
            x._checked()
        self.trail = hash((number_of(name), *(x._trail for x in fields)))
        self.region.trail = self.trail

    def local(self, x: Tensor) -> Tensor:
        """The local tensor of a field, or a plain one."""
        if not isinstance(x, Field):
            return x if x.grad_fn is None else of_shares(x, self.region)
        missing = [a for a in self.region.axes if a not in x._region.axes]
        return sharing_more(x._local, missing, self.region) if missing else x._local

    def placed(self, x: Tensor, goal: Sequence[Dim]) -> Tensor:
        """The local tensor of one of some dims, placed as others are."""
        return placed_like(self.local(x), dims_of(x), goal, self.region, "index")

    def field(self, t: Tensor, dims: Sequence[Dim]) -> Field:
        """The field of a result."""
        return settled(t, dims, self.region, self.trail)


def dims_of(x: Tensor) -> tuple[Dim, ...]:
    """The dims of a field; those of a plain tensor are whole."""
    return x._dims if isinstance(x, Field) else tuple(whole(n) for n in x.shape)


def _normal(x: Tensor, index: Any) -> list[Any]:
    """An index with an entry for each dim: numbers, slices, None and tensors of integers."""
    several = [_entry(i) for i in (index if isinstance(index, tuple) else (index,))]
    named = sum(map(_dims_named, several))
    if named > x.dim():
        raise IndexError(f"too many indices for a tensor of {x.dim()} dims")
    place = next((k for k, i in enumerate(several) if i is Ellipsis), len(several))
    several[place : place + 1] = [slice(None)] * (x.dim() - named)
    entries: list[Any] = []
    for i in several:
        if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8):
            if isinstance(i, Field) and is_whole(i):
                i = i._local
            if isinstance(i, Field):
                raise refused("indexing with a mask that is a field, and more,", i)
            _check_mask(x, i, len(entries) - entries.count(None))
            if not i.dim():
                if entries or named or any(e is None for e in several):
                    raise refused("indexing with a mask of no dims, and more,", x)
                return [slice(0, int(i.item())), *[slice(None)] * x.dim()]
            entries += i.nonzero(as_tuple=True)
            continue
        if isinstance(i, Tensor) and not isinstance(i, Field) and i.dim() == 0:
            i = int(i)
        entries.append(i)
    return entries


def _entry(i: Any) -> Any:
    """An entry of an index: numbers of Python, or a tensor."""
    if isinstance(i, slice):
        return slice(*(b.item() if isinstance(b, Tensor) else b for b in (i.start, i.stop, i.step)))
    if i is None or i is Ellipsis or (isinstance(i, Tensor | int) and not isinstance(i, bool)):
        return i
    i = torch.as_tensor(i)
    return i if i.numel() or i.dtype == torch.bool else i.long()


def _dims_named(i: Any) -> int:
    is_mask = isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)
    return i.dim() if is_mask else int(i is not None and i is not Ellipsis)


def is_whole(x: Tensor) -> bool:
    """True of a tensor of which nothing is split."""
    return not isinstance(x, Field) or not x._place.is_split


def _check_mask(x: Tensor, mask: Tensor, first: int) -> None:
    if tuple(mask.shape) != tuple(x.shape[first : first + mask.dim()]):
        raise IndexError(
            f"the shape of the mask {tuple(mask.shape)} does not match {tuple(x.shape)}"
        )


def by_index(x: Tensor, index: Any) -> Any:
    """Entries at indices of integers or at a mask; what they ask for comes to every rank."""
    masks = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
    if masks and index.dim() and (isinstance(index, Field) or not is_whole(x)):
        return _at_mask(x, index)
    entries = _normal(x, index)
    if len(entries) > x.dim() + entries.count(None):  # of a mask without dims
        return x[None][tuple(entries)].clone()
    if not any(isinstance(i, Tensor) for i in entries):
        return x[tuple(entries)]
    places = [k for k, i in enumerate(entries) if isinstance(i, Tensor | int)]
    y = x[tuple(slice(None) if k in places else i for k, i in enumerate(entries))]
    given = [torch.as_tensor(entries[k], device=x.device) for k in places]
    look = FieldsAtHand("indexing", y, *given)
    goal = broadcast([dims_of(i) for i in given])
    dims, t = list(dims_of(y)), look.local(y)
    axes = {axis for dim in goal for axis in split_axes(dim)}
    # torch takes numbers first; of what is left it asks whether indices stand side by side.
    numbers = [d for d, i in zip(places, given) if not i.dim()]
    at = [d - sum(n < d for n in numbers) for d in places if d not in numbers]
    first = at[0] if at and at == [*range(at[0], at[0] + len(at))] else 0
    parts = []
    for d, index_ in zip(places, given):
        i, n = look.placed(index_, goal[len(goal) - index_.dim() :]), dim_size(dims[d])
        if n and not y.numel():  # torch looks at the positions that it takes numbers of
            i = torch.zeros_like(i)
        if i.numel() and (int(i.max()) >= n or int(i.min()) < -n):
            raise IndexError(f"index out of range: dim {d} has {n} positions")
        i = torch.where(i < 0, i + n, i)
        if is_split_dim(dims[d]) and not axes and len(dims[d]) == 1:
            t, i = _asked(t, d, dims[d], i, look.region)
            dims[d] = whole(t.shape[d])
        parts.append(i)
    wanted = [
        whole(dim_size(q)) if d in places or axes & {*split_axes(q)} else q
        for d, q in enumerate(dims)
    ]
    t = placed_like(t, dims, wanted, look.region, "index")
    where: Any = tuple(
        parts[places.index(d)] if d in places else slice(None) for d in range(t.dim())
    )
    out = t[where]
    kept = [q for d, q in enumerate(wanted) if d not in places]
    return look.field(out, [*kept[:first], *goal, *kept[first:]])


def _asked(t: Tensor, d: int, dim: Dim, i: Tensor, region: FieldRegion) -> tuple[Tensor, Tensor]:
    """The positions that an index asks for, on every rank, and the index among them."""
    chunks = dim[0].chunks
    assert chunks is not None
    few = torch.arange(min(i.numel(), chunks.length)), i  # of no numbers: the first positions
    asked, inner = few if i.is_meta else i.unique(return_inverse=True)
    wanted: Spans = join(Span(p, 1) for p in asked.tolist())
    return take_positions(t, d, chunks, (wanted,) * len(chunks.spans), region, "index"), inner


def _at_mask(x: Tensor, mask: Tensor) -> Field:
    """Entries where a mask holds: each stays on its rank, and the new dim is split as they are."""
    _check_mask(x, mask, 0)
    look, k = FieldsAtHand("indexing with a mask", x, mask), mask.dim()
    dims = once_split([*broadcast([dims_of(x)[:k], dims_of(mask)]), *dims_of(x)[k:]])
    lead, rest = dims[:k], dims[k:]
    m, t = look.placed(mask.bool(), lead), look.placed(x, dims)
    split = [d for d, q in enumerate(lead) if is_split_dim(q)]
    if not split:
        return look.field(t[m], [whole(int(m.sum())), *rest])
    if len(split) > 1 or len(lead[split[0]]) > 1:
        raise refused("indexing with a mask over several split axes", mask)
    (d,), chunks = split, lead[split[0]][0].chunks
    assert chunks is not None
    every = placed_like(m, lead, [whole(dim_size(q)) for q in lead], look.region, "mask")
    number = (every.flatten().cumsum(0) - 1).view(every.shape)
    spans = [
        join(Span(p, 1) for p in at_spans(number, d, own)[at_spans(every, d, own)].tolist())
        for own in chunks.spans
    ]
    return look.field(t[m], [split_dim(chunks.having(spans)), *rest])


# -- writes ---------------------------------------------------------------------------------------


@direct(Tensor.__setitem__)
def setitem(x: Tensor, index: Any, value: Any) -> None:
    if not isinstance(x, Field):
        raise NoRule(
            "torch's __setitem__ writes a weft.Field into a plain tensor, or at an index that is a"
            " field, which every rank has whole; write into a field of the same layout"
        )
    x._checked()
    check_writable(x, "torch's __setitem__")
    if isinstance(index, Tensor) and index.dtype == torch.bool and index.dim():
        _write_at_mask(x, index, value)
        return
    entries = _normal(x, index)
    if any(isinstance(i, Tensor) for i in entries) or len(entries) > x.dim():
        raise refused("writing at an index of integers, with None or a mask of no dims,", x)
    where: list[Any] = []
    dims: list[Dim] = []
    nothing = False
    for d, i in enumerate(entries):
        n, dim = x.shape[d], x._dims[d]
        if isinstance(i, int) and not -n <= i < n:
            raise IndexError(f"index {i} is out of bounds for dim {d} with size {n}")
        if not is_split_dim(dim):
            where.append(i)
            if isinstance(i, slice):
                dims.append(whole(len(range(*i.indices(n)))))
            continue
        if len(dim) > 1:
            raise refused(f"writing along dim {d}, which views merged,", x)
        chunks = dim[0].chunks
        assert chunks is not None
        s = i if isinstance(i, slice) else slice(i % n, i % n + 1)
        new, kept = sliced_chunks(chunks, *s.indices(n))
        mine = kept[x._region.chunk(chunks.axis)]
        positions = [
            p
            for span in mine
            for p in range(span.start, span.start + span.count * span.step, span.step)
        ]
        nothing = nothing or not positions
        run = range(positions[0], positions[-1] + 1, mine[0].step) if len(mine) == 1 else None
        if isinstance(i, slice):
            dims.append(split_dim(new) if new.length != 1 else whole(1))
            where.append(
                slice(run.start, run.stop, run.step)
                if run is not None and run.step > 0
                else torch.tensor(positions, dtype=torch.long)
            )
        else:
            where.append(positions[0] if positions else slice(0, 0))
    look = FieldsAtHand("writing", x, value)
    _into(look, x, tuple(where), dims, value, nothing)


def _into(
    look: FieldsAtHand, x: Field, where: Any, dims: list[Dim], value: Any, nothing: bool
) -> None:
    if isinstance(value, Tensor) and value.dim():
        extra = value.dim() - len(dims)
        if extra > 0:
            value = value.reshape(value.shape[extra:])
        shapes = zip(reversed(value.shape), reversed([dim_size(q) for q in dims]))
        if any(a not in (1, b) for a, b in shapes):
            raise RuntimeError(
                f"shape mismatch: a value of shape {tuple(value.shape)} cannot be written to"
                f" {tuple(dim_size(q) for q in dims)}"
            )
        value = look.placed(value, dims[len(dims) - value.dim() :])
    elif isinstance(value, Field):
        value = look.local(value)
    if not nothing:
        x._local[where] = value
    elif isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        # Gradients pass on every rank, or others wait for this one in their backward pass.
        x._local.add_(value.reshape(-1)[:0].sum())
    else:
        x._local[:0] = 0  # counted as written on every rank
    x._trail = hash((x._trail, look.trail))


def _write_at_mask(x: Field, mask: Tensor, value: Any) -> None:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise refused("writing several values at a mask", x)
    _check_mask(x, mask, 0)
    look = FieldsAtHand("writing at a mask", x, mask, value)
    m = look.placed(mask, x._dims[: mask.dim()])
    x._local[m] = look.local(value) if isinstance(value, Tensor) else value
    x._trail = hash((x._trail, look.trail))


@direct(*both("masked_scatter"))
def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Field:
    """Numbers of a source in the order of a mask's positions: every rank has the source whole."""
    if isinstance(source, Field):
        goal = [whole(n) for n in source.shape]  # its gradient is a share, as of other whole ones
        source = placed_like(source._checked()._local, source._dims, goal, source._region, "gather")
    if mask.dtype != torch.bool:
        raise RuntimeError("masked_scatter: the mask must be of booleans")
    if not isinstance(x, Field) and not isinstance(mask, Field):
        raise NoRule("masked_scatter of a weft.Field into a plain tensor is not split")
    look = FieldsAtHand("masked_scatter", x, mask)
    goal = broadcast([dims_of(x), dims_of(mask)])
    whole_goal = [whole(dim_size(q)) for q in goal]
    shape = [dim_size(q) for q in goal]
    every = placed_like(
        look.local(mask), dims_of(mask), whole_goal[len(goal) - mask.dim() :], look.region
    )
    every = every.expand(shape)
    number = (every.flatten().cumsum(0) - 1).clamp_min(0).view(shape)
    if int(every.sum()) > source.numel():
        raise RuntimeError("masked_scatter: the source has fewer numbers than the mask has places")
    own = [placed_like(t, whole_goal, goal, look.region) for t in (number, every)]
    flat = source.reshape(-1).to(x.dtype)
    values = flat[own[0]] if flat.numel() else own[0].to(flat.dtype)
    return look.field(
        torch.where(own[1], values, look.placed(x, goal[len(goal) - x.dim() :])), goal
    )


# -- gathers and scatters -------------------------------------------------------------------------


def _beside(x: Part, d: int, *others: Part) -> tuple[list[Dim], dict[int, list[Dim]]]:
    """Dims that several tensors have in common but for one, which is whole, and their goals."""
    parts = (x, *others)
    found: list[Dim] = []
    for k in range(x.ndim):
        sizes = {p.shape[k] for p in parts}
        split = [p.dims[k] for p in parts if p.is_split(k)]
        if k != d and len(sizes) > 1 and split:
            raise refused(
                "a gather or scatter of fewer positions than there are along a split dim", x
            )
        found.append(split[0] if split and k != d else whole(x.shape[k]))
    found = once_split(found)
    goals = {
        p.index: [
            q if k != d and is_split_dim(q) else whole(p.shape[k]) for k, q in enumerate(found)
        ]
        for p in parts
    }
    return found, goals


@rule(*both("gather"))
def gather(x: Part, dim: int, index: Part, *, sparse_grad: bool = False) -> Recipe:
    d = at(dim, x.ndim)
    if not x.ndim or not index.ndim:
        raise refused("a gather without dims", x)
    found, goals = _beside(x, d, index)
    out = [
        whole(index.shape[k]) if not is_split_dim(q) or k == d else q for k, q in enumerate(found)
    ]
    taken_axes = {axis for q in out for axis in split_axes(q)}
    if index.is_split(d) and not taken_axes & {*split_axes(index.dims[d])}:
        out[d] = index.dims[d]  # each rank looks its own positions up
        goals[index.index] = [*goals[index.index][:d], index.dims[d], *goals[index.index][d + 1 :]]
    return on_locals(torch.gather, (x, d, index), out, goals)


@composite(*both("take_along_dim"))
def take_along_dim(
    x: Tensor, indices: Tensor, dim: int | None = None, *, out: None = None
) -> Tensor:
    if dim is None:
        return x.reshape(-1).gather(0, indices.reshape(-1))
    d = at(dim, x.dim())
    indices = indices.remainder(max(x.shape[d], 1))
    sizes = zip(x.shape, indices.shape)
    shape = [max(a, b) if k != d else None for k, (a, b) in enumerate(sizes)]
    one, two = ([n if n is not None else t.shape[d] for n in shape] for t in (x, indices))
    return x.expand(one).gather(d, indices.expand(two))


def _scatter_rule(func: Any) -> Any:
    def scatter(
        x: Part, dim: int, index: Part, src: Any = None, *args: Any, **kwargs: Any
    ) -> Recipe:
        src = kwargs.pop("value", src) if src is None else src
        if not isinstance(index, Part) or not x.ndim:
            raise refused("a scatter at no tensor", x)
        d = at(dim, x.ndim)
        others = (index, src) if isinstance(src, Part) and src.ndim else (index,)
        found, goals = _beside(x, d, *others)
        return on_locals(func, (x, d, index, src, *args), found, goals, kwargs)

    return scatter


for _func in both("scatter", "scatter_add", "scatter_reduce"):
    rule(_func)(_scatter_rule(_func))


def _index_rule(func: Any) -> Any:
    def run(x: Part, dim: int, index: Part, *rest: Any, **kwargs: Any) -> Recipe:
        d = at(dim, x.ndim)
        rest = (*rest, *(kwargs.pop(k) for k in ("source", "tensor", "value") if k in kwargs))
        dims = x.whole_along([d])
        goals: dict[int, Sequence[Dim]] = {
            x.index: dims,
            index.index: [whole(n) for n in index.shape],
        }
        for other in rest:
            if isinstance(other, Part) and other.ndim:
                goals[other.index] = [
                    whole(other.shape[k]) if k == d else q for k, q in enumerate(dims)
                ]
        return on_locals(func, (x, d, index, *rest), dims, goals, kwargs)

    return run


for _func in both("index_add", "index_copy", "index_fill"):
    rule(_func)(_index_rule(_func))


@rule(torch.isin)
def isin(
    elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> Recipe:
    if not isinstance(elements, Part):
        raise refused("isin of a number", test_elements)
    goals = {}
    if isinstance(test_elements, Part):
        goals = {test_elements.index: [whole(n) for n in test_elements.shape]}
    options = {"assume_unique": assume_unique, "invert": invert}
    return on_locals(torch.isin, (elements, test_elements), elements.dims, goals, options)


@composite(*both("index_select"))
def index_select(x: Tensor, dim: int, index: Tensor, *, out: None = None) -> Tensor:
    if not x.dim():
        return x.reshape(1)[index.reshape(-1)].reshape(())
    d = at(dim, x.dim())
    if not isinstance(x, Field) and not isinstance(index, Field):
        return torch.index_select(x, d, index)
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < x.shape[d]:
        raise IndexError(f"index out of range: dim {d} has {x.shape[d]} positions")
    where: Any = (*[slice(None)] * d, index.reshape(-1))
    return x[where]


@composite(*both("masked_select"))
def masked_select(x: Tensor, mask: Tensor, *, out: None = None) -> Tensor:
    shape = torch.broadcast_shapes(tuple(x.shape), tuple(mask.shape))
    return x.expand(shape)[mask.expand(shape)] if shape else x.reshape(1)[mask.reshape(1)]


@composite(*both("take"))
def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.reshape(-1)[index.reshape(-1)].reshape(index.shape)
