"""Rules of reductions and of products over split axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..declare.strategy import Role
from ..kernels import accumulate_dtype
from .dims import Dim, dim_size, is_split_dim, whole
from .exchange import gathered_chunks, gathered_dim, summed
from .field import Field
from .registry import (
    aligned_part,
    both,
    cast_for_autocast,
    dims_of,
    local_of,
    pointwise,
    refused,
    region_of,
    rule,
)


def over_dims(x: Field, dim: Any) -> tuple[int, ...]:
    """Dims that a reduction runs over, all of them by default."""
    if dim is None or dim == () or dim == []:
        return tuple(range(x.dim()))
    return tuple(d % x.dim() for d in ((dim,) if isinstance(dim, int) else dim))


def reduced_dims(dims: Sequence[Dim], over: Sequence[int], keepdim: bool) -> list[Dim]:
    """The dims that a reduction leaves."""
    kept = [whole(1) if d in over else dim for d, dim in enumerate(dims)]
    return kept if keepdim else [dim for d, dim in enumerate(dims) if d not in over]


def _squeezed(y: Tensor, over: Sequence[int], keepdim: bool) -> Tensor:
    return y if keepdim else y.reshape([n for d, n in enumerate(y.shape) if d not in over])


def sum_over_dims(x: Field, over: tuple[int, ...], keepdim: bool, dtype: Any = None) -> Field:
    """The sum over some dims, in the dtype in which partial sums are added."""
    t = x._local if dtype is None else x._local.to(dtype)
    crosses = any(is_split_dim(x._dims[d]) for d in over)
    if crosses and t.is_floating_point():
        y = t.sum(over, keepdim=True, dtype=accumulate_dtype(t.dtype))
        y = summed(y, [x._dims[d] for d in over], x._region).to(t.dtype)
    else:
        y = t.sum(over, keepdim=True)
        y = summed(y, [x._dims[d] for d in over], x._region)
    return Field(_squeezed(y, over, keepdim), reduced_dims(x._dims, over, keepdim), x._region)


def mean_over(x: Field, over: tuple[int, ...], keepdim: bool, dtype: Any = None) -> Field:
    """The mean over some dims."""
    count = 1
    for d in over:
        count *= dim_size(x._dims[d])
    y = sum_over_dims(x, over, keepdim, dtype)
    return Field(y._local / count, y._dims, y._region)


@rule(*both("sum"))
def sum(x: Field, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Field:
    return sum_over_dims(x, over_dims(x, dim), keepdim, dtype)


@rule(*both("mean"))
def _mean(x: Field, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Field:
    return mean_over(x, over_dims(x, dim), keepdim, dtype)


def _extreme(name: str) -> Callable:
    def reduce(x: Field, dim: Any = None, keepdim: bool = False) -> Field:
        over = over_dims(x, dim)
        empty = any(x._local.shape[d] == 0 for d in over)
        if empty:
            edge = float("-inf") if name == "amax" else float("inf")
            sizes = [1 if d in over else n for d, n in enumerate(x._local.shape)]
            y = x._local.sum(over, keepdim=True) * 0 + x._local.new_full(sizes, edge)
        else:
            y = getattr(x._local, name)(over, keepdim=True)
        for d in over:
            for factor in x._dims[d]:
                if factor.chunks is not None:
                    y = getattr(gathered_chunks(y, factor.chunks.axis, x._region, name), name)(0)
        return Field(_squeezed(y, over, keepdim), reduced_dims(x._dims, over, keepdim), x._region)

    return reduce


def _best(name: str) -> Callable:
    of_all = _extreme(f"a{name}")

    def best(x: Field, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            return of_all(x)
        if isinstance(dim, Tensor):
            return pointwise(getattr(torch, f"{name}imum"), (x, dim), {})
        if is_split_dim(x._dims[dim]):
            raise refused(f"{name} with indices along a split dim", x, f"; use a{name}")
        result = getattr(x._local, name)(dim, keepdim)
        dims = reduced_dims(x._dims, (dim % x.dim(),), keepdim)
        return type(result)(Field(t, dims, x._region) for t in result)

    return best


for _name in ("max", "min"):
    rule(*both(f"a{_name}"))(_extreme(f"a{_name}"))
    rule(*both(_name))(_best(_name))


@rule(*both("all"))
def every(x: Field, dim: Any = None, keepdim: bool = False) -> Field:
    return _truth(x, dim, keepdim, torch.all)


@rule(*both("any"))
def some(x: Field, dim: Any = None, keepdim: bool = False) -> Field:
    return _truth(x, dim, keepdim, torch.any)


def _truth(x: Field, dim: Any, keepdim: bool, of: Callable) -> Field:
    over = over_dims(x, dim)
    hits = x._local.bool() if of is torch.any else ~x._local.bool()
    counted = sum_over_dims(Field(hits.long(), x._dims, x._region), over, keepdim)
    truth = counted._local > 0
    return Field(truth if of is torch.any else ~truth, counted._dims, x._region)


# -- products -------------------------------------------------------------------------------------


@rule(F.linear)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Field:
    if not isinstance(x, Field) or isinstance(weight, Field) or is_split_dim(x._dims[-1]):
        raise refused("a linear layer over a split axis", x)
    y = F.linear(x._local, weight, bias)
    return Field(y, (*x._dims[:-1], whole(y.shape[-1])), x._region)


@rule(*both("matmul", "bmm", "__matmul__", "mm"))
def matmul(a: Tensor, b: Tensor) -> Field:
    region, rows, columns = region_of(a, b), dims_of(a), dims_of(b)
    if len(rows) < 2 or len(columns) < 2:
        raise refused("a product with a vector", a if isinstance(a, Field) else b)
    if is_split_dim(rows[-2]) and isinstance(b, Field):  # attention that is written out
        if is_split_dim(columns[-1]):
            b = _keys(b, b.dim() - 1)
        elif is_split_dim(columns[-2]) and not is_split_dim(rows[-1]):
            b = _keys(b, b.dim() - 2)
        columns = dims_of(b)
    shares = is_split_dim(rows[-1]) or is_split_dim(columns[-2])
    if (is_split_dim(rows[-2]) and is_split_dim(columns[-1])) or (
        shares and (is_split_dim(rows[-2]) or is_split_dim(columns[-1]))
    ):
        raise refused(
            "a product of all positions with all",
            a if isinstance(a, Field) else b,
            ": attention that is written out; take it from torch's scaled_dot_product_attention"
            " (attn_implementation='sdpa')",
        )
    x, y = local_of(a), local_of(b)
    batch = _batch(rows[:-2], columns[:-2])
    if shares:  # sums over positions, as in linear attention
        inner = rows[-1] if is_split_dim(rows[-1]) else columns[-2]
        x = aligned_part(a, (*_tail(batch, rows[:-2]), rows[-2], inner), region)
        y = aligned_part(b, (*_tail(batch, columns[:-2]), inner, columns[-1]), region)
        x, y = cast_for_autocast(x, y)
        wide = accumulate_dtype(x.dtype)
        out = summed(torch.matmul(x.to(wide), y.to(wide)), [inner], region).to(x.dtype)
    else:
        x = aligned_part(a, (*_tail(batch, rows[:-2]), *rows[-2:]), region)
        y = aligned_part(b, (*_tail(batch, columns[:-2]), *columns[-2:]), region)
        out = torch.matmul(x, y)
    return Field(out, (*batch, rows[-2], columns[-1]), region)


def _keys(x: Field, d: int) -> Field:
    """Keys or values on every rank, where the layout has attention gather them."""
    axes = [f.chunks.axis for f in x._dims[d] if f.chunks is not None]
    for axis in axes:
        rules = x._region.layout.rules(axis) if axis in x._region.layout.attend else {}
        roles = [rules[m].role for m in x._region.layout.shard_dims(axis) if m in rules]
        if not roles or any(role is not Role.QUERY for role in roles):
            raise refused(
                f"a product of all positions with all along {axis}",
                x,
                ": attention that is written out needs keys that come to queries, such as"
                f" '{axis}: gather={x._region.layout.size(axis)}'; or take it from torch's"
                " scaled_dot_product_attention (attn_implementation='sdpa')",
            )
    t, dim = gathered_dim(x._local, d, x._dims[d], x._region, "keys")
    return Field(t, [dim if i == d else old for i, old in enumerate(x._dims)], x._region)


def _batch(one: Sequence[Dim], two: Sequence[Dim]) -> list[Dim]:
    """The dims of a broadcast of two groups of dims."""
    result: list[Dim] = []
    for i in range(max(len(one), len(two)), 0, -1):
        found = [dims[-i] for dims in (one, two) if len(dims) >= i]
        large = [dim for dim in found if dim_size(dim) != 1] or found
        result.append(next((dim for dim in large if is_split_dim(dim)), large[0]))
    return result


def _tail(batch: Sequence[Dim], local: Sequence[Dim]) -> Sequence[Dim]:
    return batch[len(batch) - len(local) :]
