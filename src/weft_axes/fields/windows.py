"""Rules of functions that see windows: convolutions, pools, resampling, padding, rolls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from weft._caching import cached
from weft._uploads import uploaded
from weft.comm.once_differentiable import once
from weft.move.windows import Windows, bordered
from weft.plan.held import Held

from .dims import Dim, dim_size, is_split_dim, joined_chunks, split_dim, whole
from .exchange import around
from .reduce import mean_over
from .registry import (
    Part,
    Recipe,
    cast_for_autocast,
    composite,
    on_locals,
    parts_in,
    refused,
    rule,
    tuple_of,
)


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


class SeenRange(NamedTuple):
    """A split dim of which every rank sees a range around its part."""

    dim: int
    chunks: Held
    ranges: tuple[tuple[int, int], ...]
    label: str = "halo"
    border: str = "constant"
    fill: float = 0.0


def strips_of(t: Tensor, x: Part, reach: Sequence[SeenRange]) -> list[Strips]:
    """The strips around this rank's part, dim by dim."""
    strips: list[Strips] = []
    for r in reach:
        seen = around(t, r.dim, r.chunks, r.ranges, x.region, r.label, r.border, r.fill)
        strips.append(Strips(r.dim, *seen))
        t = joined_box(t, strips[-1:])
    return strips


def in_neighbours(x: Part, over: Iterable[int]) -> list[Dim]:
    """Dims that windows run over in contiguous chunks: neighbours must be neighbours."""
    dims = list(x.dims)
    for d in over:
        if not is_split_dim(dims[d]):
            continue
        chunks = x.one_factor("a window", d).chunks
        assert chunks is not None
        if chunks.starts is None:
            dims[d] = split_dim(chunks.contiguous())
    return dims


def windowed(
    before: Sequence[Dim], windows: dict[int, Windows], fill: float = 0.0
) -> tuple[list[SeenRange], list[Dim]]:
    """What windows see of the split dims that they run over, and the dims of the outputs."""
    dims, reach = list(before), []
    for d, window in windows.items():
        chunks = dims[d][0].chunks
        if chunks is None:
            dims[d] = whole(window.outputs)
            continue
        assert chunks.starts is not None
        edges = window.edges(chunks.starts)
        reach.append(SeenRange(d, chunks, window.ranges(edges), "halo", fill=fill))
        dims[d] = split_dim(chunks.contiguous(edges))
    return reach, dims


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
    t: Tensor, weight: Tensor, bias: Tensor | None, strips: Sequence[Strips], options: tuple
) -> Tensor:
    """The convolution of this rank's box; of an empty one nothing, on the graph of its inputs."""
    t, weight, bias, *flat = cast_for_autocast(
        t, weight, bias, *(s for strip in strips for s in (strip.before, strip.after))
    )
    cuts = tuple((s.dim, s.low, s.high) for s in strips)
    if not strips:
        return torch.convolution(t, weight, bias, *options)
    return _Convolution.apply(t, weight, bias, cuts, options, *flat)


def _checked(convolution: Callable, nd: int) -> Callable:
    """A convolution that is refused by weights that are fields, and of nothing."""

    def run(x: Part, weight: Part, *args: Any, **kwargs: Any) -> Recipe:
        if weight.is_field or any(p.is_field for p in parts_in(args, kwargs)):
            raise refused("a convolution by weights that are a field", weight)
        if not x.is_field or x.ndim != nd + 2 or 0 in x.shape[-nd:] or x.dtype.is_complex:
            raise refused("a convolution of no positions, of other dims or complex numbers", x)
        return convolution(x, weight, *args, **kwargs)

    return run


def _of_one(convolution: Callable, nd: int) -> Callable:
    """A convolution of a tensor without a batch, which torch takes, too."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.dim() != nd + 1 or not x.shape[0]:
            return NotImplemented
        return convolution(x[None], *args, **kwargs)[0]

    return run


def _convolution(nd: int) -> Callable:
    def convolution(
        x: Part,
        weight: Part,
        bias: Part | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Recipe:
        if x.is_split(1):
            raise refused("a convolution over split channels", x)
        if weight.shape[0] % groups:  # torch looks at it where it computes
            raise RuntimeError(f"{groups} groups do not divide {weight.shape[0]} output channels")
        stride, dilation = tuple_of(stride, nd), tuple_of(dilation, nd)
        kernel = weight.shape[2:]
        extents = [d * (k - 1) for d, k in zip(dilation, kernel)]
        if isinstance(padding, str):
            pads = [(e // 2, e - e // 2) if padding == "same" else (0, 0) for e in extents]
        else:
            pads = [(p, p) for p in tuple_of(padding, nd)]
        if min(dilation) < 1 or any(min(pair) < 0 for pair in pads):
            raise RuntimeError(f"dilation {dilation} is 1 at least, and padding {padding!r} is 0")
        goal = in_neighbours(x, range(2, nd + 2))
        windows, left, before = {}, [], [0, 0] * nd
        for i, (a, b) in enumerate(pads):
            is_whole = not is_split_dim(goal[2 + i])
            windows[2 + i] = Windows.over(x.shape[2 + i], kernel[i], stride[i], (a, b), dilation[i])
            left.append(a if is_whole else 0)
            if is_whole:  # "same" with an even kernel
                before[2 * (nd - 1 - i) + 1] = b - a
        reach, dims = windowed(goal, windows)
        dims[1] = whole(weight.shape[0])
        shape = [x.region.local_size(dim) for dim in dims]
        options = (list(stride), left, list(dilation), False, [0] * nd, groups)

        def run(t: list[Any]) -> Tensor:
            y, w, c = t[x.index], t[weight.index], None if bias is None else t[bias.index]
            y = F.pad(y, before) if any(before) else y
            strips = strips_of(y, x, reach)
            if not math.prod(shape[2:]):
                return _none(y, [w, c], strips, shape)
            return _convolve(y, w, c, strips, options)

        return Recipe(run, dims, {x.index: goal})

    return convolution


def _transposed(nd: int) -> Callable:
    def transposed(
        x: Part,
        weight: Part,
        bias: Part | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Recipe:
        if x.is_split(1) or x.shape[1] != weight.shape[0]:
            raise refused("a convolution over split channels, or other channels than weights", x)
        goal = in_neighbours(x, range(2, nd + 2))
        dims, region = list(goal), x.region
        stride, dilation = tuple_of(stride, nd), tuple_of(dilation, nd)
        pads, extra = list(tuple_of(padding, nd)), list(tuple_of(output_padding, nd))
        reach, crops = [], []
        for i in range(nd):
            d, extent = 2 + i, dilation[i] * (weight.shape[2 + i] - 1) + 1
            length = dim_size(dims[d])
            outputs = (length - 1) * stride[i] - 2 * pads[i] + extent + extra[i]
            if outputs < 1:
                raise refused(f"a transposed convolution of {outputs} outputs along dim {d}", x)
            chunks = dims[d][0].chunks
            if chunks is None:
                dims[d] = whole(outputs)
                continue
            assert chunks.starts is not None
            edges = _spread(chunks.starts, stride[i], (extent - stride[i]) // 2 - pads[i], outputs)
            ranges = []
            for low, high in itertools.pairwise(edges):
                a = max(-(-(low + pads[i] - extent + 1) // stride[i]), 0)
                b = min((high - 1 + pads[i]) // stride[i] + 1, length)
                ranges.append((a, max(a, b)) if high > low else (0, 0))
            reach.append(SeenRange(d, chunks, tuple(ranges)))
            here = region.chunk(chunks.axis)
            low, high = edges[here], edges[here + 1]
            crops.append((d, low - ranges[here][0] * stride[i] + pads[i], high - low))
            dims[d], pads[i], extra[i] = split_dim(chunks.contiguous(edges)), 0, 0
        dims[1] = whole(weight.shape[1] * groups)
        shape = [region.local_size(dim) for dim in dims]
        options = (list(stride), pads, list(dilation), True, extra, groups)

        def run(t: list[Any]) -> Tensor:
            y, w, c = t[x.index], t[weight.index], None if bias is None else t[bias.index]
            strips = strips_of(y, x, reach)
            if not math.prod(shape[2:]) or not math.prod(joined_box(y, strips).shape[2:]):
                made = _none(y, [w, c], strips, shape)
            else:
                made = _cropped(_convolve(y, w, None, strips, options), crops)
            return made if c is None else made + c.to(made.dtype).view(-1, *[1] * nd)

        return Recipe(run, dims, {x.index: goal})

    return transposed


def _cropped(y: Tensor, crops: Sequence[tuple[int, int, int]]) -> Tensor:
    """Outputs without those that other ranks compute, and with those that no input reaches."""
    for d, at, n in crops:
        before, after = max(-at, 0), max(at + n - y.shape[d], 0)
        if before or after:
            y = F.pad(y, [0, 0] * (y.dim() - 1 - d) + [before, after])
        y = y.narrow(d, at + before, n)
    return y


def _spread(starts: Sequence[int], stride: int, shift: int, outputs: int) -> tuple[int, ...]:
    """The first output of every chunk of a transposed convolution."""
    inner = [min(max(p * stride + shift, 0), outputs) for p in starts[1:-1]]
    return (0, *inner, outputs)


def _none(
    t: Tensor, weights: Sequence[Tensor | None], strips: Sequence[Strips], shape: Sequence[int]
) -> Tensor:
    """No outputs, whose backward pass goes on to all inputs, as that of other ranks does."""
    given = [w for w in weights if w is not None]
    tensors = [t, *(s for strip in strips for s in (strip.before, strip.after)), *given]
    t, *tensors = cast_for_autocast(t, *tensors) if given else (t, *tensors)
    nothing = sum((v.sum() * 0 for v in (t, *tensors)), t.new_zeros(()))
    return nothing + t.new_zeros(shape)


# -- pools ----------------------------------------------------------------------------------------


def _pool(nd: int, kind: str) -> Callable:
    run = getattr(F, f"{kind}_pool{nd}d")
    names: tuple[str, ...] = ("dilation", "ceil_mode", "return_indices")
    if kind == "avg":
        names = ("ceil_mode", "count_include_pad", "divisor_override")

    def pool(
        x: Part, kernel_size: Any, stride: Any = None, padding: Any = 0, *given: Any, **named: Any
    ) -> Recipe:
        options = {**dict(zip(names, given)), **named}
        if options.get("return_indices") or options.get("divisor_override"):
            raise refused(f"{kind}_pool with indices or a divisor", x)
        kernel, padding = tuple_of(kernel_size, nd), tuple_of(padding, nd)
        stride = kernel if stride is None or stride == [] else tuple_of(stride, nd)
        dilation, ceil = tuple_of(options.get("dilation", 1), nd), options.get("ceil_mode", False)
        first, fill = x.ndim - nd, float("-inf") if kind == "max" else 0.0
        if ceil and dilation == (1,) * nd:  # a window wider than all there is sees all there is
            room = (n + 2 * p for n, p in zip(x.shape[first:], padding))
            kernel = tuple(map(min, kernel, room))
        if not x.dtype.is_floating_point or not math.prod(x.shape):
            raise refused(f"{kind}_pool of integers, or of nothing", x)
        goal = in_neighbours(x, range(first, x.ndim))
        windows: dict[int, Windows] = {}
        pads: list[int] = []
        for i in range(nd):
            d, length = first + i, x.shape[first + i]
            both = (padding[i], padding[i])
            windows[d] = Windows.over(length, kernel[i], stride[i], both, dilation[i], ceil=ceil)
            _, last = windows[d].seen(0, windows[d].outputs)
            pads[:0] = [0, 0] if is_split_dim(goal[d]) else [padding[i], max(last - length, 0)]
        reach, dims = windowed(goal, windows, fill)
        shape = [x.region.local_size(dim) for dim in dims]
        given_dilation = {"dilation": dilation} if kind == "max" else {}
        counts = None
        if kind == "avg":
            include = options.get("count_include_pad", True)
            counts = _counts(x, windows, dims, kernel, padding, include)

        def pooled(t: list[Any]) -> Tensor:
            y = t[x.index]
            strips = strips_of(y, x, reach)
            if not math.prod(shape):
                return _none(y, [], strips, shape)
            box = F.pad(joined_box(y, strips), pads, value=fill)
            y = run(box, kernel, stride, 0, **given_dilation)
            y = y[tuple(slice(n) for n in shape)]
            if counts is None:
                return y
            of_dims = (uploaded(c, y.device).view(-1, *[1] * (y.dim() - 1 - d)) for d, c in counts)
            total = math.prod(of_dims, start=torch.ones((), device=y.device, dtype=torch.float64))
            share = math.prod(kernel) / total
            return y if (share == 1).all() else y * share.to(y.dtype)

        return Recipe(pooled, dims, {x.index: goal})

    return pool


def _counts(
    x: Part,
    windows: dict[int, Windows],
    dims: Sequence[Dim],
    kernel: Sequence[int],
    padding: Sequence[int],
    include: bool,
) -> list[tuple[int, tuple[int, ...]]]:
    """Numbers of positions that the windows of this rank's outputs average, per dim."""
    result = []
    for (d, window), k, p in zip(windows.items(), kernel, padding):
        length, chunks = x.shape[d], dims[d][0].chunks
        low, high = 0, window.outputs
        if chunks is not None:
            assert chunks.starts is not None
            here = x.region.chunk(chunks.axis)
            low, high = chunks.starts[here], chunks.starts[here + 1]
        last = length + p if include else length
        begins = [window.first + i * window.stride for i in range(low, high)]
        counts = (min(a + k, last) - (a if include else max(a, 0)) for a in begins)
        result.append((d, tuple(counts)))
    return result


def _adaptive(nd: int) -> Callable:
    def pool(x: Part, output_size: Any) -> Recipe:
        several = output_size if isinstance(output_size, tuple | list) else (output_size,) * nd
        dims = range(x.ndim - nd, x.ndim)
        sizes = [x.shape[d] if n is None else n for n, d in zip(several, dims)]
        if any(n not in (1, x.shape[d]) for n, d in zip(sizes, dims)) or not x.shape.numel():
            raise refused(f"adaptive_avg_pool{nd}d to {sizes}", x, "; only to 1, or to its size")
        over = tuple(d for n, d in zip(sizes, dims) if n == 1)
        return mean_over(x, over, True) if over else on_locals(torch.clone, (x,), x.dims)

    return pool


# -- resampling -----------------------------------------------------------------------------------

LINEAR = ("linear", "bilinear", "trilinear")


@rule(F.interpolate)
def interpolate(
    x: Part,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Recipe:
    if antialias or mode not in ("nearest", "nearest-exact", *LINEAR):
        raise refused(f"interpolate with mode {mode!r}{' and antialias' * antialias}", x)
    if not x.dtype.is_floating_point or not math.prod(x.shape):
        raise refused("interpolate of nothing, or of numbers that are not real", x)
    goal = in_neighbours(x, range(2, x.ndim))
    dims, nd, steps = list(goal), x.ndim - 2, []
    for i in range(nd):
        d, length = 2 + i, x.shape[2 + i]
        factor = scale_factor
        if isinstance(factor, tuple | list):
            factor = factor[i] if len(factor) > 1 else factor[0]
        n = math.floor(length * factor) if size is None else tuple_of(size, nd)[i]
        exact = factor is not None and not recompute_scale_factor
        if nd == 3 and mode == "nearest" and n == length and exact and factor != 1:
            raise refused("interpolate by a factor that leaves a size, backward otherwise,", x)
        ratio = 1 / factor if exact and n != length else length / n
        first, second, share = _sources(
            mode, nd, length, n, ratio, align_corners, factor if exact else None
        )
        chunks, reach = dims[d][0].chunks, None
        low, high, base = 0, n, 0
        if chunks is None:
            dims[d] = whole(n)
        else:
            assert chunks.starts is not None
            cuts = [sum(s < p for s in first) for p in chunks.starts[1:-1]]
            edges = (0, *cuts, n)
            ranges = tuple(
                (first[a], second[b - 1] + 1) if b > a else (0, 0)
                for a, b in itertools.pairwise(edges)
            )
            reach = SeenRange(d, chunks, ranges)
            here = x.region.chunk(chunks.axis)
            low, high, base = edges[here], edges[here + 1], ranges[here][0]
            dims[d] = split_dim(chunks.contiguous(edges))
        below = tuple(s - base for s in first[low:high])
        above = None if share is None else tuple(s - base for s in second[low:high])
        steps.append((d, reach, below, above, None if share is None else share[low:high]))

    def run(t: list[Any]) -> Tensor:
        y = t[x.index]
        for d, reach, below, above, share in steps:
            if reach is not None:
                y = joined_box(y, strips_of(y, x, [reach]))
            lower = y.index_select(d, uploaded(below, y.device))
            if above is not None:
                w = uploaded(share, y.device, y.dtype).view(-1, *[1] * (y.dim() - 1 - d))
                upper = y.index_select(d, uploaded(above, y.device))
                lower = lower * (1 - w) + upper * w
            y = lower
        return y

    return Recipe(run, dims, {x.index: goal})


@cached(256)
def _sources(
    mode: str,
    nd: int,
    length: int,
    n: int,
    ratio: float,
    corners: bool | None,
    factor: float | None,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...] | None]:
    """The positions that n outputs are made of, and the share of the second."""
    if n == length and mode == "nearest" and nd == 2:  # torch leaves such a dim as it is
        return tuple(range(n)), tuple(range(n)), None
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
def pad(x: Part, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Recipe:
    fill, steps = value or 0.0, []
    cuts = [i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]]
    moves = [x.ndim - 1 - i for i in cuts if mode != "constant" or min(pad[2 * i : 2 * i + 2]) < 0]
    goal = in_neighbours(x, moves)
    dims = list(goal)
    for i in cuts:
        d, (before, after) = x.ndim - 1 - i, pad[2 * i : 2 * i + 2]
        length = dim_size(dims[d])
        wider = length + before + after
        chunks = dims[d][0].chunks
        if not is_split_dim(dims[d]):
            steps.append(_whole_pad(d, i, before, after, length, mode, fill))
            dims[d] = whole(wider)
        elif mode == "constant" and before >= 0 and after >= 0:
            made, dims[d] = _pad_of_ends(x, d, i, before, after, fill)
            steps.append(made)
        else:
            assert chunks is not None
            assert chunks.starts is not None
            inner = (min(max(p + before, 0), wider) for p in chunks.starts[1:-1])
            edges = (0, *inner, wider)
            ranges = tuple((a - before, b - before) for a, b in itertools.pairwise(edges))
            reach = SeenRange(d, chunks, ranges, "pad", mode, fill)
            steps.append(_joined_reach(x, reach))
            dims[d] = split_dim(chunks.contiguous(edges))

    def run(t: list[Any]) -> Tensor:
        y = t[x.index]
        for step in steps:
            y = step(y)
        return y

    return Recipe(run, dims, {x.index: goal})


@composite(F.pad)
def _circular_pad(x: Any, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    """Of a circular pad with a negative end the cut comes first: what wraps is what is left."""
    if mode != "circular" or min(pad, default=0) >= 0:
        return NotImplemented
    for i in range(len(pad) // 2):
        d, (before, after) = x.dim() - 1 - i, (min(p, 0) for p in pad[2 * i : 2 * i + 2])
        if before or after:
            x = x.narrow(d, -before, x.shape[d] + before + after)
    if not x.numel():  # of which torch gives numbers that nobody wrote
        raise refused("a circular pad of nothing", x)
    return F.pad(x, [max(p, 0) for p in pad], mode)


def _joined_reach(x: Part, reach: SeenRange) -> Callable[[Tensor], Tensor]:
    return lambda y: joined_box(y, strips_of(y, x, [reach]))


def _whole_pad(
    d: int, i: int, before: int, after: int, length: int, mode: str, fill: float
) -> Callable[[Tensor], Tensor]:
    if mode == "constant":
        return lambda y: F.pad(y, [0, 0] * i + [before, after], value=fill)
    spans = bordered(-before, length + after, length, mode)
    places = [s.start + k * s.step for s in spans for k in range(s.count)]
    return lambda y: y.index_select(d, uploaded(tuple(places), y.device))


def _pad_of_ends(
    x: Part, d: int, i: int, before: int, after: int, fill: float
) -> tuple[Callable[[Tensor], Tensor], Dim]:
    """A constant before the first position and behind the last, on the ranks that hold these."""
    chunks = x.one_factor("pad", d).chunks
    assert chunks is not None
    ranks, here = len(chunks), x.region.chunk(chunks.axis)
    held = [[p for s in spans for p in (s.start, s.last)] for spans in chunks.spans]
    first = min(range(ranks), key=lambda c: min(held[c], default=chunks.length))
    last = max(range(ranks), key=lambda c: max(held[c], default=-1))
    front, back = chunks.alone(first, before), chunks.alone(last, after)
    sizes = [front.counts[here], back.counts[here]]
    dim = split_dim(joined_chunks((front, chunks, back)))
    return lambda y: F.pad(y, [0, 0] * i + sizes, value=fill), dim


for _nd in (1, 2, 3):
    _names = f"conv{_nd}d", f"conv_transpose{_nd}d"
    for _name, _make in zip(_names, (_convolution, _transposed)):
        rule(getattr(torch, _name), getattr(F, _name))(_checked(_make(_nd), _nd))
        composite(getattr(torch, _name), getattr(F, _name))(_of_one(getattr(F, _name), _nd))
    rule(getattr(F, f"avg_pool{_nd}d"))(_pool(_nd, "avg"))
    rule(getattr(F, f"max_pool{_nd}d"), getattr(torch, f"max_pool{_nd}d"))(_pool(_nd, "max"))
    rule(getattr(F, f"adaptive_avg_pool{_nd}d"))(_adaptive(_nd))
