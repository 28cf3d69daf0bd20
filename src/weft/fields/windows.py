"""Rules of functions that see windows: convolutions, pools, resampling, padding, rolls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .._caching import cached
from .._uploads import uploaded
from ..comm.once_differentiable import once
from ..plan.order import Span, Spans
from ..relayout.windows import Windows, bordered
from .dims import Chunks, Dim, dim_size, is_split_dim, split_dim, whole
from .exchange import around, take_positions
from .field import Field
from .reduce import mean_over
from .registry import cast_for_autocast, one_factor, refused, rule, tuple_of

BORDERS = {"constant": "zeros", "reflect": "reflect", "replicate": "replicate"}
BORDERS["circular"] = "circular"


class Strips(NamedTuple):
    """Strips around this rank's part of a dim, for the windows of its outputs.

    Attributes:
        dim: the dim.
        before: what windows see before the part.
        low, high: the part, as indices in the chunk.
        after: what they see after it.
    """

    dim: int
    before: Tensor
    low: int
    high: int
    after: Tensor


def joined_box(x: Tensor, strips: Sequence[Strips]) -> Tensor:
    """A tensor with what is around it, dim by dim: corners come with the second."""
    for dim, before, low, high, after in strips:
        x = torch.cat([before, x.narrow(dim, low, high - low), after], dim)
    return x


def windowed(
    x: Field, windows: dict[int, Windows], fill: float = 0.0
) -> tuple[list[Strips], list[Dim]]:
    """The strips of the split dims that windows run over, and the dims of the outputs."""
    t, dims, strips = x._local, list(x._dims), []
    for d, window in windows.items():
        if window.outputs < 1:
            fix = (
                f": it is too wide for the {dim_size(dims[d])} positions and the padding; pad more,"
                " or take a smaller kernel or dilation"
            )
            raise refused(f"a window of {window.extent} along dim {d}", x, fix)
        if not is_split_dim(dims[d]):
            dims[d] = whole(window.outputs)
            continue
        chunks = one_factor("a window", x, d).chunks
        assert chunks is not None
        edges = window.edges(chunks.starts)
        ranges = window.ranges(edges)
        seen = around(t, d, chunks, ranges, x._region, "halo", window.border, fill)
        strips.append(Strips(d, *seen))
        t = joined_box(t, strips[-1:])
        dims[d] = split_dim(Chunks(chunks.axis, edges))
    return strips, dims


# -- convolutions ---------------------------------------------------------------------------------


class _Convolution(torch.autograd.Function):
    """A convolution of a box with what is around it; the box and the strips are kept, no copy."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cuts: tuple[tuple[int, int, int], ...],
        options: tuple,
        *strips: Tensor,
    ) -> Tensor:
        ctx.cuts, ctx.options, ctx.biased = cuts, options, bias is not None
        ctx.save_for_backward(x, weight, *strips)
        return torch.convolution(_joined(x, cuts, strips), weight, bias, *options)

    @staticmethod
    @once("a convolution of a weft.Field", linear=False)
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple:
        x, weight, *strips = saved
        box = _joined(x, ctx.cuts, strips)
        stride, padding, dilation, transposed, output_padding, groups = ctx.options
        sizes = [weight.shape[1] * groups if transposed else weight.shape[0]]
        wanted = [True, ctx.needs_input_grad[1], ctx.biased and ctx.needs_input_grad[2]]
        options = stride, padding, dilation, transposed, output_padding, groups, wanted
        dbox, dweight, dbias = torch.ops.aten.convolution_backward(
            grad.contiguous(), box, weight, sizes, *options
        )
        above: list[Tensor] = []
        for (dim, low, high), before in zip(reversed(ctx.cuts), reversed(strips[::2])):
            n = before.shape[dim]
            above += [dbox.narrow(dim, n + high - low, dbox.shape[dim] - n - high + low)]
            above += [dbox.narrow(dim, 0, n)]
            inner = dbox.narrow(dim, n, high - low)
            pads = [0, 0] * (inner.dim() - 1 - dim) + [low, x.shape[dim] - high]
            dbox = F.pad(inner, pads)
        return dbox, dweight, dbias, None, None, *reversed(above)


def _joined(x: Tensor, cuts: Sequence[tuple[int, int, int]], strips: Sequence[Tensor]) -> Tensor:
    pairs = zip(cuts, strips[::2], strips[1::2])
    return joined_box(x, [Strips(d, a, low, high, b) for (d, low, high), a, b in pairs])


def _convolve(
    x: Field, weight: Tensor, bias: Tensor | None, strips: Sequence[Strips], options: tuple
) -> Tensor:
    """The convolution of this rank's box; of an empty one nothing, on the graph of its inputs."""
    t, weight, bias, *flat = cast_for_autocast(
        x._local, weight, bias, *(s for strip in strips for s in (strip.before, strip.after))
    )
    cuts = tuple((s.dim, s.low, s.high) for s in strips)
    if not strips:
        return torch.convolution(t, weight, bias, *options)
    return _Convolution.apply(t, weight, bias, cuts, options, *flat)


def _convolution(nd: int) -> Callable:
    def convolution(
        given: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Field:
        x = _checked(given, weight, nd)
        stride, dilation = tuple_of(stride, nd), tuple_of(dilation, nd)
        first, kernel = x.dim() - nd, weight.shape[2:]
        extents = [d * (k - 1) for d, k in zip(dilation, kernel)]
        if isinstance(padding, str):
            pads = [(e // 2, e - e // 2) if padding == "same" else (0, 0) for e in extents]
        else:
            pads = [(p, p) for p in tuple_of(padding, nd)]
        windows, left = {}, []
        for i, (a, b) in enumerate(pads):
            d = first + i
            is_whole = not is_split_dim(x._dims[d])
            if is_whole and a != b:  # "same" with an even kernel
                x, b = pad(x, [0, 0] * (nd - 1 - i) + [0, b - a]), a
            length = dim_size(x._dims[d])
            windows[d] = Windows.over(length, kernel[i], stride[i], (a, b), dilation[i])
            left.append(a if is_whole else 0)
        strips, dims = windowed(x, windows)
        dims[first - 1] = whole(weight.shape[0])
        shape = [x._region.local_size(dim) for dim in dims]
        if not math.prod(shape[first:]):
            return Field(_none(x, [weight, bias], strips, shape), dims, x._region)
        options = (list(stride), left, list(dilation), False, [0] * nd, groups)
        return Field(_convolve(x, weight, bias, strips, options), dims, x._region)

    return convolution


def _transposed(nd: int) -> Callable:
    def transposed(
        given: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Field:
        x = _checked(given, weight, nd)
        region, dims, first = x._region, list(x._dims), x.dim() - nd
        stride, dilation = tuple_of(stride, nd), tuple_of(dilation, nd)
        pads, extra = list(tuple_of(padding, nd)), list(tuple_of(output_padding, nd))
        t, strips, crops = x._local, [], []
        for i in range(nd):
            d, extent = first + i, dilation[i] * (weight.shape[2 + i] - 1) + 1
            length = dim_size(dims[d])
            outputs = (length - 1) * stride[i] - 2 * pads[i] + extent + extra[i]
            if not is_split_dim(dims[d]):
                dims[d] = whole(outputs)
                continue
            chunks = one_factor("a transposed convolution", x, d).chunks
            assert chunks is not None
            edges = _spread(chunks.starts, stride[i], (extent - stride[i]) // 2 - pads[i], outputs)
            ranges = []
            for low, high in itertools.pairwise(edges):
                a = max(-(-(low + pads[i] - extent + 1) // stride[i]), 0)
                b = min((high - 1 + pads[i]) // stride[i] + 1, length)
                ranges.append((a, max(a, b)) if high > low else (0, 0))
            strips.append(Strips(d, *around(t, d, chunks, tuple(ranges), region, "halo")))
            t = joined_box(t, strips[-1:])
            local = region.layout.chunk(chunks.axis)
            low, high = edges[local], edges[local + 1]
            crops.append((d, low - ranges[local][0] * stride[i] + pads[i], high - low))
            dims[d], pads[i], extra[i] = split_dim(Chunks(chunks.axis, edges)), 0, 0
        dims[first - 1] = whole(weight.shape[1] * groups)
        shape = [region.local_size(dim) for dim in dims]
        if not math.prod(shape[first:]) or not math.prod(t.shape[first:]):
            y = _none(x, [weight, bias], strips, shape)
            if bias is not None:
                y = y + bias.view(-1, *[1] * nd)
            return Field(y, dims, region)
        options = (list(stride), pads, list(dilation), True, extra, groups)
        y = _convolve(x, weight, None, strips, options)
        for d, at, n in crops:  # outputs that other ranks compute, and those that no input reaches
            before, after = max(-at, 0), max(at + n - y.shape[d], 0)
            if before or after:
                y = F.pad(y, [0, 0] * (y.dim() - 1 - d) + [before, after])
            y = y.narrow(d, at + before, n)
        if bias is not None:
            y = y + bias.to(y.dtype).view(-1, *[1] * nd)
        return Field(y, dims, region)

    return transposed


def _spread(starts: Sequence[int], stride: int, shift: int, outputs: int) -> tuple[int, ...]:
    """The first output of every chunk of a transposed convolution."""
    inner = [min(max(p * stride + shift, 0), outputs) for p in starts[1:-1]]
    return (0, *inner, outputs)


def _checked(x: Tensor, weight: Tensor, nd: int) -> Field:
    if not isinstance(x, Field) or isinstance(weight, Field):
        raise refused("a convolution by weights that are a field", weight)
    if x.dim() != nd + 2 or is_split_dim(x._dims[1]):
        raise refused("a convolution over split channels, or without a batch,", x)
    return x


def _none(
    x: Field, weights: Sequence[Tensor | None], strips: Sequence[Strips], shape: Sequence[int]
) -> Tensor:
    """No outputs, whose backward pass goes on to all inputs, as that of other ranks does."""
    tensors = [x._local, *(s for strip in strips for s in (strip.before, strip.after))]
    tensors += [w for w in weights if w is not None]
    nothing = sum((t.sum() * 0 for t in tensors), x._local.new_zeros(()))
    return nothing + x._local.new_zeros(shape)


# -- pools ----------------------------------------------------------------------------------------


def _pool(nd: int, kind: str) -> Callable:
    run = getattr(F, f"{kind}_pool{nd}d")
    names: tuple[str, ...] = ("dilation", "ceil_mode", "return_indices")
    if kind == "avg":
        names = ("ceil_mode", "count_include_pad", "divisor_override")

    def pool(
        x: Field, kernel_size: Any, stride: Any = None, padding: Any = 0, *given: Any, **named: Any
    ) -> Field:
        options = {**dict(zip(names, given)), **named}
        if options.get("return_indices") or options.get("divisor_override"):
            raise refused(f"{kind}_pool with indices or a divisor", x)
        kernel, padding = tuple_of(kernel_size, nd), tuple_of(padding, nd)
        stride = kernel if stride is None or stride == [] else tuple_of(stride, nd)
        dilation, ceil = tuple_of(options.get("dilation", 1), nd), options.get("ceil_mode", False)
        first, fill = x.dim() - nd, float("-inf") if kind == "max" else 0.0
        windows: dict[int, Windows] = {}
        pads: list[int] = []
        for i in range(nd):
            d, length = first + i, dim_size(x._dims[first + i])
            both = (padding[i], padding[i])
            windows[d] = Windows.over(length, kernel[i], stride[i], both, dilation[i], ceil=ceil)
            _, last = windows[d].seen(0, windows[d].outputs)
            pads[:0] = [0, 0] if is_split_dim(x._dims[d]) else [padding[i], max(last - length, 0)]
        strips, dims = windowed(x, windows, fill)
        shape = [x._region.local_size(dim) for dim in dims]
        if not math.prod(shape[first:]):
            return Field(_none(x, [], strips, shape), dims, x._region)
        box = F.pad(joined_box(x._local, strips), pads, value=fill)
        given_dilation = {"dilation": dilation} if kind == "max" else {}
        y = run(box, kernel, stride, 0, **given_dilation)
        y = y[tuple(slice(n) for n in shape)]
        if kind == "avg":
            include = options.get("count_include_pad", True)
            share = math.prod(kernel) / _counts(x, windows, dims, kernel, padding, include)
            y = y if (share == 1).all() else y * share.to(y.dtype)
        return Field(y, dims, x._region)

    return pool


def _counts(
    x: Field,
    windows: dict[int, Windows],
    dims: Sequence[Dim],
    kernel: Sequence[int],
    padding: Sequence[int],
    include: bool,
) -> Tensor:
    """Number of positions that the windows of this rank's outputs average."""
    total = torch.ones((), device=x.device, dtype=torch.float64)
    for (d, window), k, p in zip(windows.items(), kernel, padding):
        length, chunks = dim_size(x._dims[d]), dims[d][0].chunks
        low, high = x._region.own(chunks) if chunks else (0, window.outputs)
        last = length + p if include else length
        begins = [window.first + i * window.stride for i in range(low, high)]
        counts = [min(a + k, last) - (a if include else max(a, 0)) for a in begins]
        counted = uploaded(tuple(counts), x.device)
        total = total * counted.view(-1, *[1] * (x.dim() - 1 - d))
    return total


def _adaptive_average(nd: int) -> Callable:
    def pool(x: Field, output_size: Any) -> Field:
        sizes = tuple_of(1 if output_size is None else output_size, nd)
        dims = range(x.dim() - nd, x.dim())
        if any(n not in (1, dim_size(x._dims[d])) for n, d in zip(sizes, dims)):
            raise refused(f"adaptive_avg_pool{nd}d to {sizes}", x, "; only to 1, or to its size")
        over = tuple(d for n, d in zip(sizes, dims) if n == 1)
        return mean_over(x, over, True)

    return pool


# -- resampling -----------------------------------------------------------------------------------

LINEAR = ("linear", "bilinear", "trilinear")


@rule(F.interpolate)
def interpolate(
    x: Field,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Field:
    if antialias or mode not in ("nearest", "nearest-exact", *LINEAR):
        raise refused(f"interpolate with mode {mode!r}{' and antialias' * antialias}", x)
    t, dims, nd = x._local, list(x._dims), x.dim() - 2
    for i in range(nd):
        d, length = 2 + i, dim_size(dims[2 + i])
        factor = scale_factor
        if isinstance(factor, tuple | list):
            factor = factor[i] if len(factor) > 1 else factor[0]
        n = math.floor(length * factor) if size is None else tuple_of(size, nd)[i]
        exact = factor is not None and not recompute_scale_factor
        ratio = 1 / factor if exact else length / n
        first, second, share = _sources(
            mode, length, n, ratio, align_corners, factor if exact else None
        )
        chunks = None
        if is_split_dim(dims[d]):
            chunks = one_factor("interpolate", x, d).chunks
        if chunks is None:
            low, high, base = 0, n, 0
            dims[d] = whole(n)
        else:
            cuts = [sum(s < p for s in first) for p in chunks.starts[1:-1]]
            edges = (0, *cuts, n)
            ranges = tuple(
                (first[a], second[b - 1] + 1) if b > a else (0, 0)
                for a, b in itertools.pairwise(edges)
            )
            seen = around(t, d, chunks, ranges, x._region, "halo")
            t = joined_box(t, [Strips(d, *seen)])
            local = x._region.layout.chunk(chunks.axis)
            low, high, base = edges[local], edges[local + 1], ranges[local][0]
            dims[d] = split_dim(Chunks(chunks.axis, edges))
        places = uploaded(tuple(s - base for s in first[low:high]), t.device)
        below = t.index_select(d, places)
        if share is not None:
            places = uploaded(tuple(s - base for s in second[low:high]), t.device)
            w = uploaded(share[low:high], t.device, t.dtype)
            w = w.view(-1, *[1] * (t.dim() - 1 - d))
            below = below * (1 - w) + t.index_select(d, places) * w
        t = below
    return Field(t, dims, x._region)


@cached(256)
def _sources(
    mode: str, length: int, n: int, ratio: float, corners: bool | None, factor: float | None
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...] | None]:
    """The positions that n outputs are made of, and the share of the second."""
    if mode not in LINEAR:  # rounded as torch rounds it
        line = torch.arange(length, dtype=torch.float32).view(1, 1, -1)
        options = {"size": n} if factor is None else {"scale_factor": factor}
        found = tuple(F.interpolate(line, mode=mode, **options).flatten().long().tolist())
        return found, found, None
    if corners:
        source = [o * (length - 1) / max(n - 1, 1) for o in range(n)]
    else:
        source = [max((o + 0.5) * ratio - 0.5, 0.0) for o in range(n)]
    below = tuple(min(int(s), length - 1) for s in source)
    above = tuple(min(b + 1, length - 1) for b in below)
    return below, above, tuple(s - b for s, b in zip(source, below))


# -- padding and rolls ----------------------------------------------------------------------------


@rule(F.pad)
def pad(x: Field, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Field:
    t, dims, fill = x._local, list(x._dims), value or 0.0
    for i in range(len(pad) // 2):
        d, (before, after) = x.dim() - 1 - i, pad[2 * i : 2 * i + 2]
        if not before and not after:
            continue
        length = dim_size(dims[d])
        wider = length + before + after
        if not is_split_dim(dims[d]):
            if mode == "constant":
                t = F.pad(t, [0, 0] * i + [before, after], value=fill)
            else:
                spans = bordered(-before, length + after, length, BORDERS[mode])
                places = [s.start + k * s.step for s in spans for k in range(s.count)]
                t = t.index_select(d, uploaded(tuple(places), t.device))
            dims[d] = whole(wider)
            continue
        chunks = one_factor("pad", x, d).chunks
        assert chunks is not None
        edges = (0, *(min(max(p + before, 0), wider) for p in chunks.starts[1:-1]), wider)
        ranges = tuple((a - before, b - before) for a, b in itertools.pairwise(edges))
        seen = around(t, d, chunks, ranges, x._region, "pad", BORDERS[mode], fill)
        t = joined_box(t, [Strips(d, *seen)])
        dims[d] = split_dim(Chunks(chunks.axis, edges))
    return Field(t, dims, x._region)


@rule(torch.roll, Tensor.roll)
def roll(x: Field, shifts: Any, dims: Any = None) -> Field:
    if dims is None:
        raise refused("roll without dims", x)
    t = x._local
    shifts, over = ((shifts,), (dims,)) if isinstance(shifts, int) else (shifts, dims)
    for shift, d in zip(shifts, (over,) if isinstance(over, int) else over):
        d %= t.dim()
        if not is_split_dim(x._dims[d]):
            t = t.roll(shift, d)
            continue
        chunks = one_factor("roll", x, d).chunks
        assert chunks is not None
        n = chunks.length
        wanted = [_rolled(a, b, shift, n) for a, b in itertools.pairwise(chunks.starts)]
        t = take_positions(t, d, chunks, wanted, x._region, "roll")
    return Field(t, x._dims, x._region)


def _rolled(low: int, high: int, shift: int, n: int) -> Spans:
    """The positions that come to [low, high) of n when all are shifted."""
    if high == low:
        return ()
    start = (low - shift) % n
    first = min(high - low, n - start)
    spans = Span(start, first), Span(0, high - low - first)
    return tuple(s for s in spans if s.count)


for _nd in (1, 2, 3):
    _names = f"conv{_nd}d", f"conv_transpose{_nd}d"
    for _name, _make in zip(_names, (_convolution, _transposed)):
        rule(getattr(torch, _name), getattr(F, _name))(_make(_nd))
    rule(getattr(F, f"avg_pool{_nd}d"))(_pool(_nd, "avg"))
    rule(getattr(F, f"max_pool{_nd}d"), getattr(torch, f"max_pool{_nd}d"))(_pool(_nd, "max"))
    rule(getattr(F, f"adaptive_avg_pool{_nd}d"))(_adaptive_average(_nd))
