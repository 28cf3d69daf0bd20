"""Rules of functions that mix the positions of one dim: softmax, scans, sorts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.plan.held import Held

from .dims import Dim, split_dim, whole
from .exchange import gathered_chunks
from .reduce import crosses_field, reduced_dims
from .registry import Part, Recipe, both, composite, function_name, on_locals, refused, rule
from .views import at


def _along(func: Any, position: int, default: Any, results: int, drops: str = "") -> None:
    """A function that mixes the positions of one dim, which it needs whole.

    `position` is that of its dim among the arguments after the tensor; `drops` says whether the dim
    goes: not at all, or but for `keepdim`.
    """

    @rule(func)
    def along(x: Part, *args: Any, **kwargs: Any) -> Recipe:
        dim = kwargs.get("dim", args[position] if len(args) > position else default)
        if not isinstance(dim, int):
            raise refused(f"{function_name(func)} along dim {dim}", x)
        d = at(dim, x.ndim)
        if x.ndim and x.is_split(d):
            raise refused(f"{function_name(func)} along dim {dim}", x)
        dims = list(x.dims)
        if drops:
            keep = kwargs.get("keepdim", args[position + 1] if len(args) > position + 1 else False)
            dims = reduced_dims(x.dims, (d,) if x.ndim else (), keep)
        elif x.ndim:
            dims[d] = whole(_length(func, x, d, args, kwargs))
        return on_locals(func, (x, *args), dims if results == 1 else [dims] * results, None, kwargs)


def _length(func: Any, x: Part, d: int, args: tuple, kwargs: dict) -> int:
    """The length that a function leaves of a dim."""
    if func.__name__ == "topk":
        return int(kwargs.get("k", args[0] if args else 0))
    return x.shape[d] // 2 if func.__name__ == "glu" else x.shape[d]


for _name, _position, _default, _results, _drops in (
    ("softmax", 0, None, 1, ""),
    ("log_softmax", 0, None, 1, ""),
    ("softmin", 0, None, 1, ""),
    ("cumsum", 0, None, 1, ""),
    ("cumprod", 0, None, 1, ""),
    ("logcumsumexp", 0, None, 1, ""),
    ("cummax", 0, None, 2, ""),
    ("cummin", 0, None, 2, ""),
    ("glu", 0, -1, 1, ""),
    ("sort", 0, -1, 2, ""),
    ("msort", 9, 0, 1, ""),
    ("argsort", 0, -1, 1, ""),
    ("topk", 1, -1, 2, ""),
    ("kthvalue", 1, -1, 2, "keepdim"),
    ("mode", 0, -1, 2, "keepdim"),
    ("median", 0, None, 2, "keepdim"),
    ("nanmedian", 0, None, 2, "keepdim"),
):
    for _func in both(_name):
        _along(_func, _position, _default, _results, _drops)


# -- softmax over a split dim: the largest and the sum of all ranks -------------------------------


def _softmax(name: str) -> None:
    def over(x: Any, dim: Any = None, *args: Any, dtype: Any = None, **named: Any) -> Any:
        if not isinstance(dim, int) or not crosses_field(x, dim) or not x.numel():
            return NotImplemented
        dtype = next((a for a in args if isinstance(a, torch.dtype)), dtype)
        x = -x if name == "softmin" else x
        one = x._local.new_empty(1)
        kept = torch.softmax(one, 0, dtype=dtype).dtype
        x = x.to(torch.promote_types(kept, torch.float32))  # in which torch's kernels compute
        top = x.detach().amax(dim, keepdim=True)
        e = (x - top).exp()
        total = e.sum(dim, keepdim=True)
        return (x - top - total.log() if name == "log_softmax" else e / total).to(kept)

    composite(*both(name))(over)


for _name in ("softmax", "log_softmax", "softmin"):
    _softmax(_name)


@composite(*both("logsumexp"))
def logsumexp(x: Any, dim: Any, keepdim: bool = False, *, out: None = None) -> Any:
    if not crosses_field(x, dim) or not x.numel():
        return NotImplemented
    one = x._local.new_empty(1)
    kept = torch.logsumexp(one, 0).dtype
    x = x.to(torch.promote_types(kept, torch.float32))
    top = x.detach().amax(dim, keepdim=True)
    top = torch.where(top.isinf(), 0, top)
    y = (x - top).exp().sum(dim, keepdim=True).log() + top
    over = sorted({at(d, x.dim()) for d in ((dim,) if isinstance(dim, int) else dim)})
    return (y if keepdim else y.squeeze(tuple(over))).to(kept)


@rule(*both("logsumexp"))
def logsumexp_of_whole(x: Part, dim: Any, keepdim: bool = False) -> Recipe:
    over = tuple(at(d, x.ndim) for d in ((dim,) if isinstance(dim, int) else dim) if x.ndim)
    return on_locals(torch.logsumexp, (x, dim, keepdim), reduced_dims(x.dims, over, keepdim))


# -- sums of all positions before: spans of every rank exchange their totals ----------------------


def _cumsum(func: Any) -> None:
    of_whole = _RULE_OF[func]

    @rule(func)
    def cumsum(x: Part, dim: int, *args: Any, **kwargs: Any) -> Recipe:
        d = at(dim, x.ndim)
        if not x.ndim or not x.is_split(d):
            return of_whole(x, dim, *args, **kwargs)
        chunks = x.one_factor("cumsum", d).chunks
        assert chunks is not None
        runs = _runs(chunks)
        goal: list[Dim] = [split_dim(runs) if k == d else q for k, q in enumerate(x.dims)]
        return Recipe(_cumsum_of_runs(x, d, runs, kwargs.get("dtype")), goal, {x.index: goal})


def _runs(chunks: Held) -> Held:
    """Chunks whose spans are runs of positions that go up: those there are, or contiguous ones."""
    if all(s.step == 1 or s.count == 1 for spans in chunks.spans for s in spans):
        return chunks
    return chunks.contiguous()


def _cumsum_of_runs(x: Part, d: int, chunks: Held, dtype: Any) -> Callable:
    region, own = x.region, x.region.own(chunks)
    most = max(1, *map(len, chunks.spans))
    before: list[list[tuple[int, int]]] = [
        [
            (c, j)
            for c, spans in enumerate(chunks.spans)
            for j, o in enumerate(spans)
            if o.start < s.start
        ]
        for s in own
    ]

    def run(t: list[Any]) -> Tensor:
        y = t[x.index]
        parts = (
            [part.cumsum(d, dtype=dtype) for part in y.split([s.count for s in own], d)]
            if own
            else []
        )
        kind = y.narrow(d, 0, 0).cumsum(d, dtype=dtype).dtype
        zero = y.sum(d, keepdim=True, dtype=kind) * 0
        totals = [part.narrow(d, part.shape[d] - 1, 1) for part in parts]
        totals += [zero] * (most - len(totals))
        every = gathered_chunks(torch.stack(totals), chunks.axis, region, "cumsum")
        nothing = 0 * every.sum((0, 1), dtype=kind)
        made = [
            part + sum((every[c, j] for c, j in places), nothing)
            for part, places in zip(parts, before)
        ]
        return torch.cat(made, d) if made else y.cumsum(d, dtype=dtype) + nothing

    return run


from .registry import RULES as _RULE_OF  # noqa: E402

for _func in both("cumsum"):
    _cumsum(_func)


@composite(*both("diff"))
def diff(
    x: Tensor,
    n: int = 1,
    dim: int = -1,
    prepend: Any = None,
    append: Any = None,
    *,
    out: None = None,
) -> Tensor:
    if not n:
        return x.clone()
    parts = [t for t in (prepend, x, append) if t is not None]
    x = torch.cat(parts, dim) if len(parts) > 1 else x
    for _ in range(n):
        length = x.shape[dim]
        if not length:
            return x.clone()
        high, low = x.narrow(dim, 1, length - 1), x.narrow(dim, 0, length - 1)
        x = high ^ low if x.dtype == torch.bool else high - low
    return x


@composite(F.normalize)
def normalize(
    x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None
) -> Tensor:
    return x / x.norm(p, dim, keepdim=True).clamp_min(eps).expand_as(x)


@composite(*both("cosine_similarity"))
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    shape = torch.broadcast_shapes(tuple(x1.shape), tuple(x2.shape))
    x1, x2 = x1.expand(shape), x2.expand(shape)
    norms = [t.norm(2, dim, keepdim=True).clamp_min(eps) for t in (x1, x2)]
    return ((x1 / norms[0]) * (x2 / norms[1])).sum(dim)


@composite(F.pairwise_distance)
def pairwise_distance(
    x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    return (x1 - x2 + eps).norm(p, -1, keepdim=keepdim)
