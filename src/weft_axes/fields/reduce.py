"""Rules of reductions: over whole dims of every rank's part, over split ones merged over ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft._uploads import uploaded
from weft.comm.once_differentiable import once
from weft.kernels import accumulate_dtype
from weft.plan.order import each_position

from .dims import Dim, is_split_dim, split_axes, whole
from .exchange import gathered_chunks, summed
from .field import Field
from .place import FieldRegion
from .registry import Part, Recipe, both, composite, on_locals, pointwise, refused, rule
from .views import at


def over_dims(x: Part, dim: Any) -> tuple[int, ...]:
    """Dims that a reduction runs over, all of them by default."""
    if dim is None or dim == () or dim == []:
        return tuple(range(x.ndim))
    return tuple(at(d, x.ndim) for d in ((dim,) if isinstance(dim, int) else dim) if x.ndim)


def reduced_dims(dims: Sequence[Dim], over: Sequence[int], keepdim: bool) -> list[Dim]:
    """The dims that a reduction leaves."""
    kept = [whole(1) if d in over else dim for d, dim in enumerate(dims)]
    return kept if keepdim else [dim for d, dim in enumerate(dims) if d not in over]


def squeezed(y: Tensor, over: Sequence[int], keepdim: bool) -> Tensor:
    """A result that kept its dims, without them."""
    return y if keepdim else y.reshape([n for d, n in enumerate(y.shape) if d not in over])


def mixes_split(x: Part, over: Sequence[int]) -> bool:
    """True if a dim that a function runs over is split."""
    return any(x.is_split(d) for d in over)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return accumulate_dtype(dtype) if dtype.is_floating_point else dtype


def summed_over(
    t: Tensor, over: Sequence[int], dims: Sequence[Dim], region: FieldRegion, label: str = "sum"
) -> Tensor:
    """The sum over some dims of all ranks, dims kept, in the dtype in which parts are added."""
    y = t.sum(tuple(over), keepdim=True, dtype=_wide(t.dtype) if t.is_floating_point() else None)
    return summed(y, [dims[d] for d in over], region, label)


@rule(*both("sum"))
def sum(x: Part, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Recipe:
    return _sum(x, over_dims(x, dim), keepdim, dtype, torch.sum)


def _sum(x: Part, over: tuple[int, ...], keepdim: bool, dtype: Any, of: Any) -> Recipe:
    def run(t: list[Any]) -> Tensor:
        y = t[x.index]
        y = y if dtype is None else y.to(dtype)
        whole_numbers = not (y.is_floating_point() or y.is_complex())
        kind = torch.int64 if whole_numbers and dtype is None else y.dtype
        return squeezed(summed_over(y, over, x.dims, x.region), over, keepdim).to(kind)

    out = reduced_dims(x.dims, over, keepdim)
    if not mixes_split(x, over):
        options = {"dtype": dtype} if dtype is not None else {}
        return on_locals(of, (x, over, keepdim) if over else (x,), out, None, options)
    return Recipe(run, out)


@composite(*both("nansum"))
def nansum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    clean = torch.where(x.isnan(), 0, x) if x.is_floating_point() else x
    return clean.sum(() if dim is None else dim, keepdim)


@composite(*both("nanmean"))
def nanmean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    over = () if dim is None else dim
    x = x if dtype is None else x.to(dtype)
    return x.nansum(over, keepdim) / (~x.isnan()).sum(over, keepdim)


@composite(*both("count_nonzero"))
def count_nonzero(x: Tensor, dim: Any = None) -> Tensor:
    return (x != 0).sum(() if dim is None else dim)


@rule(*both("mean"))
def _mean(x: Part, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Recipe:
    return mean_over(x, over_dims(x, dim), keepdim, dtype)


def mean_over(x: Part, over: tuple[int, ...], keepdim: bool, dtype: Any = None) -> Recipe:
    """The mean over some dims of all ranks."""
    count = math.prod(x.shape[d] for d in over)
    out = reduced_dims(x.dims, over, keepdim)
    if not mixes_split(x, over):
        options = {"dtype": dtype} if dtype is not None else {}
        return on_locals(torch.mean, (x, over, keepdim) if over else (x,), out, None, options)

    def run(t: list[Any]) -> Tensor:
        y = t[x.index]
        y = y if dtype is None else y.to(dtype)
        total = summed_over(y, over, x.dims, x.region)
        return squeezed(total / count if count else total * float("nan"), over, keepdim).to(y.dtype)

    return Recipe(run, out)


# -- extremes: gradients are shared evenly by all positions that have one ------------------------


def _edge(dtype: torch.dtype, largest: bool) -> Any:
    """What is below, or above, all numbers of a dtype."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return float("-inf") if largest else float("inf")
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


class _Extreme(torch.autograd.Function):
    """The largest or smallest value over some dims of all ranks, dims kept."""

    @staticmethod
    def forward(
        ctx: Any, t: Tensor, name: str, over: tuple, dims: tuple, region: Any, of_nan: bool
    ) -> Tensor:
        empty = any(t.shape[d] == 0 for d in over)
        shape = [1 if d in over else n for d, n in enumerate(t.shape)]
        edge = _edge(t.dtype, name == "amax")
        y = t.new_full(shape, edge) if empty else getattr(t, name)(over, keepdim=True)
        for axis in [a for d in over for a in split_axes(dims[d])]:
            y = getattr(gathered_chunks(y, axis, region, name), name)(0)
        ctx.save_for_backward(t, y)
        ctx.over, ctx.dims, ctx.region = over, [dims[d] for d in over], region
        ctx.of_nan = of_nan  # whether torch shares the gradient of a nan among all of them
        return y

    @staticmethod
    @once("an extreme of a weft.Field", linear=False)
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple:
        t, y = saved
        hits = (t == y) | (t.isnan() & y.isnan()) if ctx.of_nan else t == y
        n = summed(hits.sum(ctx.over, keepdim=True), ctx.dims, ctx.region, "ties")
        grad = summed(grad, ctx.dims, ctx.region, "dextreme")  # of a whole result ranks have shares
        return hits * (grad / n), None, None, None, None, None


def extreme(
    x: Part, name: str, over: tuple[int, ...], keepdim: bool, of_nan: bool = False
) -> Recipe:
    """`amax` or `amin` over some dims."""
    out = reduced_dims(x.dims, over, keepdim)
    if not mixes_split(x, over):
        return on_locals(getattr(torch, name), (x, over, keepdim), out)

    def run(t: list[Any]) -> Tensor:
        y = _Extreme.apply(t[x.index], name, over, x.dims, x.region, of_nan)
        return squeezed(y, over, keepdim)

    return Recipe(run, out)


def _extremes(name: str) -> None:
    @rule(*both(f"a{name}"))
    def of_all(x: Part, dim: Any = None, keepdim: bool = False, *, out: None = None) -> Recipe:
        return extreme(x, f"a{name}", over_dims(x, dim), keepdim)

    for func in both(name):
        rule(func)(_best(name, func))


def _best(name: str, func: Any) -> Callable:
    def best(
        x: Part, dim: Any = None, keepdim: bool = False, *, out: None = None, **named: Any
    ) -> Recipe:
        dim = named.get("other", dim)
        if dim is None:
            if not x.ndim or not mixes_split(x, over_dims(x, None)):
                return on_locals(func, (x,), [])
            return extreme(x, f"a{name}", over_dims(x, None), False, True)
        if isinstance(dim, Part):
            return pointwise(getattr(torch, f"{name}imum"), (x, dim), {})
        d = at(dim, x.ndim)
        dims = reduced_dims(x.dims, (d,) if x.ndim else (), keepdim)
        if not x.ndim or not x.is_split(d):
            return on_locals(func, (x, dim, keepdim), [dims, dims])
        kind = getattr(torch.return_types, name)
        values = _first_extreme(x, name, d, keepdim)

        def run(t: list[Any]) -> Any:
            y, places = values(t)
            return kind((y, places))

        return Recipe(run, [dims, dims])

    return best


for _name in ("max", "min"):
    _extremes(_name)


def _first_extreme(x: Part, name: str, d: int, keepdim: bool) -> Callable:
    """Values and positions of the first extreme along a split dim, whose value has the gradient."""
    chunks = x.one_factor(f"arg{name}", d).chunks
    assert chunks is not None
    own, region, n, largest = x.region.own(chunks), x.region, chunks.length, name == "max"
    shape = [-1 if k == d else 1 for k in range(x.ndim)]

    def same(values: Tensor, best: Tensor) -> Tensor:
        return (values == best) | (values.isnan() & best.isnan())

    def run(t: list[Any]) -> tuple[Tensor, Tensor]:
        y = t[x.index]
        of = getattr(torch, f"a{name}")
        positions = uploaded(tuple(each_position(own)), y.device).view(shape)
        if y.shape[d]:
            best = of(y.detach(), d, keepdim=True)
            where = torch.where(same(y.detach(), best), positions, n).amin(d, keepdim=True)
        else:
            sizes = [1 if k == d else m for k, m in enumerate(y.shape)]
            best = y.new_full(sizes, _edge(y.dtype, largest))
            where = positions.new_full(sizes, n)
        values = gathered_chunks(best, chunks.axis, region, name)
        places = gathered_chunks(where, chunks.axis, region, name)
        first = torch.where(same(values, of(values, 0, keepdim=True)), places, n).amin(0)
        picked = torch.where(first == positions, y, torch.zeros_like(y))
        value = summed(picked.sum(d, keepdim=True, dtype=y.dtype), [x.dims[d]], region, name)
        return squeezed(value.to(y.dtype), (d,), keepdim), squeezed(first, (d,), keepdim)

    return run


def _position_rule(name: str, func: Any) -> Callable:
    def position(x: Part, dim: int | None = None, keepdim: bool = False) -> Recipe:
        if x.dtype == torch.bool:
            raise NotImplementedError(f"arg{name} is not implemented for 'Bool'")
        if dim is None:
            if mixes_split(x, range(x.ndim)):
                raise refused(f"arg{name} over all dims", x, "; name a dim")
            return on_locals(func, (x,), [])
        d = at(dim, x.ndim)
        dims = reduced_dims(x.dims, (d,) if x.ndim else (), keepdim)
        if not x.ndim or not x.is_split(d):
            return on_locals(func, (x, dim, keepdim), dims)
        values = _first_extreme(x, name, d, keepdim)
        return Recipe(
            lambda t: values([v.detach() if isinstance(v, Tensor) else v for v in t])[1], dims
        )

    return position


for _name in ("max", "min"):
    for _func in both(f"arg{_name}"):
        rule(_func)(_position_rule(_name, _func))


@composite(*both("aminmax"))
def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    over = () if dim is None else dim
    return torch.return_types.aminmax((x.amin(over, keepdim), x.amax(over, keepdim)))


# -- truth ----------------------------------------------------------------------------------------


def _truth(of: Any, x: Part, dim: Any, keepdim: bool) -> Recipe:
    over = over_dims(x, dim)
    out = reduced_dims(x.dims, over, keepdim)
    if not mixes_split(x, over):
        return on_locals(of, (x, over, keepdim) if over else (x,), out)
    is_any = of is torch.any
    kind = torch.uint8 if x.dtype == torch.uint8 else torch.bool

    def run(t: list[Any]) -> Tensor:
        hits = t[x.index].bool()
        hits = (hits if is_any else ~hits).sum(over, keepdim=True)
        found = summed(hits, [x.dims[d] for d in over], x.region, "truth") > 0
        return squeezed(found if is_any else ~found, over, keepdim).to(kind)

    return Recipe(run, out)


@rule(*both("all"))
def every(x: Part, dim: Any = None, keepdim: bool = False) -> Recipe:
    return _truth(torch.all, x, dim, keepdim)


@rule(*both("any"))
def some(x: Part, dim: Any = None, keepdim: bool = False) -> Recipe:
    return _truth(torch.any, x, dim, keepdim)


@rule(*both("histc"))
def histc(x: Part, bins: int = 100, min: float = 0, max: float = 0) -> Recipe:
    over = range(x.ndim)
    if min == max and mixes_split(x, over):
        raise refused("a histogram from the least number to the largest", x, "; give min and max")

    def run(t: list[Any]) -> Tensor:
        counts = torch.histc(t[x.index], bins, min, max)
        return summed(counts, x.dims, x.region, "histogram")

    return Recipe(run, [whole(bins)])


# -- moments and norms: over whole dims torch's own, over split ones by sums ----------------------


def crosses_field(x: Any, dim: Any) -> bool:
    """True if a dim that a function of a field runs over is split."""
    dims = x._dims if isinstance(x, Field) else ()
    everything = dim is None or dim == () or dim == []
    over = range(len(dims)) if everything else (dim,) if isinstance(dim, int) else dim
    return any(is_split_dim(dims[at(d, len(dims))]) for d in over if dims)


def _local_moments(func: Any, results: int) -> Callable:
    def moments(x: Part, *args: Any, **kwargs: Any) -> Recipe:
        dim, keepdim = _spread_arguments(*args, **kwargs)[:2]
        out = reduced_dims(x.dims, over_dims(x, dim), keepdim)
        return on_locals(func, (x, *args), out if results == 1 else [out] * results, None, kwargs)

    return moments


def _spread_arguments(
    *args: Any,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    correction: Any = None,
    out: None = None,
) -> tuple[Any, bool, float]:
    """dim, keepdim and correction, of (dim, unbiased, keepdim) or (unbiased)."""
    if args and isinstance(args[0], bool):
        unbiased, args = args[0], args[1:]
    given = [*args, *[None] * (3 - len(args))]
    dim = given[0] if given[0] is not None else dim
    unbiased = given[1] if given[1] is not None else unbiased
    keepdim = given[2] if given[2] is not None else keepdim
    if correction is None:
        correction = 1 if unbiased is None or unbiased else 0
    return dim, keepdim, correction


def _split_moments(name: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    dim, keepdim, correction = _spread_arguments(*args, **kwargs)
    if not crosses_field(x, dim):
        return NotImplemented
    if not x.is_floating_point():
        raise refused(f"{name} of numbers that are not real,", x)
    over = tuple(range(x.dim())) if dim is None or dim in ((), []) else dim
    n = math.prod(x.shape[d] for d in ((over,) if isinstance(over, int) else over))
    if n <= correction:
        raise refused(f"{name} of no more numbers than its correction", x)
    mean = x.mean(over, keepdim=True)
    y = (x - mean).square().sum(over, keepdim=keepdim) / (n - correction)
    y = _root(y) if name.startswith("std") else y
    if not name.endswith("_mean"):
        return y
    mean = mean if keepdim else mean.reshape(y.shape)
    return y, mean


for _name, _results in (("var", 1), ("std", 1), ("var_mean", 2), ("std_mean", 2)):
    composite(*both(_name))(functools.partial(_split_moments, _name))
    for _func in both(_name):
        rule(_func)(_local_moments(_func, _results))


def _local_norm(func: Any) -> Callable:
    def norm(x: Part, *args: Any, **kwargs: Any) -> Recipe:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        keepdim = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
        out = reduced_dims(x.dims, over_dims(x, dim), keepdim)
        return on_locals(func, (x, *args), out, None, kwargs)

    return norm


def _split_norm(
    x: Any,
    p: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    out: None = None,
    dtype: Any = None,
    **named: Any,
) -> Any:
    """The norm of positions over all ranks, (sum |x|^p)^(1/p)."""
    p = named.get("ord", p)
    p = 2 if p is None or p == "fro" else p
    if not crosses_field(x, dim):
        return NotImplemented
    if not isinstance(p, int | float) or not x.is_floating_point():
        raise refused(f"a norm of order {p!r}", x)
    over = () if dim is None else dim
    one = x._local.new_zeros(1)
    kept = torch.linalg.vector_norm(one, dtype=dtype).dtype
    x = x.to(torch.promote_types(kept, torch.float32)).abs()  # in which torch's kernels compute
    return _norm(x, p, over, keepdim).to(kept)


def _norm(x: Tensor, p: float, over: Any, keepdim: bool) -> Tensor:
    if any(x.shape[d] == 0 for d in range(x.dim())):
        raise refused("a norm of no positions", x)
    if p in (float("inf"), float("-inf")):
        extreme_of = torch.amax if p > 0 else torch.amin
        # Torch's gradient of a norm that is nan is 0, and that of an extreme is nan.
        lost = extreme_of(x.detach(), over, True).isnan()
        return extreme_of(torch.where(lost, x.detach(), x), over, keepdim)
    if p == 0:
        return (x != 0).sum(over, keepdim)
    if p == 1:
        return x.sum(over, keepdim)
    if p == 2:
        return _root(x.square().sum(over, keepdim))
    if p < 1:
        raise refused(f"a norm of order {p!r}", x)
    return _root(x.pow(p).sum(over, keepdim), 1.0 / p)


def _root(x: Tensor, power: float = 0.5) -> Tensor:
    """A root whose gradient is 0 where it is 0, as that of a norm."""
    nothing = x == 0
    return torch.where(nothing, x, torch.where(nothing, 1, x).pow(power))


for _func in (*both("norm"), torch.linalg.vector_norm):
    rule(_func)(_local_norm(_func))
    composite(_func)(_split_norm)
rule(torch.linalg.norm)(_local_norm(torch.linalg.norm))


@composite(torch.linalg.norm)
def _norm_of_vectors(
    x: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, **options: Any
) -> Any:
    over = x.dim() if dim is None else 1 if isinstance(dim, int) else len(dim)
    if ord is not None and over > 1 and crosses_field(x, dim):
        raise refused("a norm of matrices", x)
    return _split_norm(x, ord, dim, keepdim, **options)


@composite(*both("dist"))
def dist(x: Tensor, other: Tensor, p: float = 2) -> Tensor:
    return torch.linalg.vector_norm(x - other, p)


@rule(*both("prod"))
def prod(x: Part, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Recipe:
    over = over_dims(x, dim)
    if mixes_split(x, over):
        raise refused("a product over a split dim", x)
    options = {"dtype": dtype} if dtype is not None else {}
    args = (x,) if dim is None else (x, dim, keepdim)
    return on_locals(torch.prod, args, reduced_dims(x.dims, over, keepdim), None, options)


__all__ = ["mean_over", "mixes_split", "over_dims", "reduced_dims", "squeezed", "summed_over"]
