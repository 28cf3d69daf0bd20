"""Convolutions, norms, pools and resampling over named axes, whatever mesh dims split them.

    x (batch lat lon embed), over lat and lon      b = batch, c = embed, then the axes: b c h w
    a rank's part as a `weft.Field`                torch's functions, on global positions
    the result in the chunks of the layout         back to (batch lat lon embed)

Windows lie on global positions, and borders at the ends of an axis alone. A window of a stride is
centred on the positions that its output stands for: with `stride` and a reach of `extent =
dilation (kernel - 1) + 1`, output o of `ceil(length / stride)` sees `extent` positions from
`o stride - max(extent - stride, 0) // 2` on. So patches are `kernel = stride`, and an odd kernel of
stride 1 has its middle where its output is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._torch import outside_graphs
from .._uploads import uploaded
from ..errors import DeclarationError, ShapeError, did_you_mean
from ..fields import Field
from ..layout import Layout
from ..plan.lengths import check_axis_lengths, wrong_lengths
from ..plan.order import count
from .geometry import resolve_axes
from .parameters import local, replicate

#: What lies beyond the ends of an axis, as `torch.nn.functional.pad` names it.
BORDERS = {
    "zeros": "constant",
    "reflect": "reflect",
    "replicate": "replicate",
    "circular": "circular",
    "causal": "constant",
}
OF_RANKS = (
    "ranks compare their calls of a module over axes that a layout splits, and windows are fields"
    " there: compile without fullgraph=True"
)
Numbers = int | Sequence[int] | Mapping[str, int]


class OverAxes(nn.Module):
    """A module over one to three axes of a tensor; the others act as batch.

    Raises `DeclarationError` for axes that `axes` does not name, or more than three.
    """

    #: how many axes a kernel of torch runs over
    most: int | None = 3
    #: whether an axis may have no positions
    takes_empty = False

    def __init__(
        self, embed_dim: int, axis: str | Sequence[str], axes: Sequence[str], layout: Layout | None
    ) -> None:
        super().__init__()
        self.layout = Layout.single() if layout is None else layout
        self.axes, self.embed_dim = tuple(axes), embed_dim
        self.axis = resolve_axes(axis, self.axes)
        if self.most is not None and len(self.axis) > self.most:
            raise DeclarationError(
                f"axis={axis!r}: windows of torch run over one to {self.most} axes"
            )
        for name in self.axis:
            order = self.layout.order.get(name, "contiguous")
            if order != "contiguous" and self.layout.size(name) > 1:
                raise DeclarationError(
                    f"{self.layout.source}: axis {name!r} is in {order} order, and"
                    f" {type(self).__name__} takes contiguous chunks; drop its order"
                )

    def _per_axis(self, key: str, value: Any, least: int = 1) -> tuple[int, ...]:
        """One whole number per axis: from one, a list, or a table by axis; 1 where it has none."""
        if isinstance(value, Mapping):
            self._check_axes(key, value)
            value = [value.get(name, 1) for name in self.axis]
        several = isinstance(value, Sequence) and not isinstance(value, str)
        values = tuple(value) if several else (value,) * len(self.axis)
        whole = all(isinstance(v, int) and not isinstance(v, bool) for v in values)
        if len(values) != len(self.axis) or not whole or min(values) < least:
            raise DeclarationError(
                f"{key}={value!r:.80}: a whole number, {least} or more, or one for each of"
                f" {self.axis}"
            )
        return values

    def _check_axes(self, key: str, value: Iterable[str]) -> None:
        for name in value:
            if name not in self.axis:
                raise DeclarationError(f"{key}: {name!r}{did_you_mean(name, self.axis)}")

    def lengths_after(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """Global lengths of the axes of the result, from those of x.

        Args:
            lengths: of the axes.

        Raises:
            ShapeError: a name that is no axis of x, or an axis of the module left out.
        """
        self._check_given(lengths)
        return {name: lengths[name] for name in self.axis}

    def _check_given(self, lengths: Mapping[str, int]) -> None:
        check_axis_lengths("lengths", lengths, self.axes[:-1])
        if missing := [name for name in self.axis if name not in lengths]:
            raise ShapeError(f"lengths has no entry for axis {missing[0]!r}: {dict(lengths)}")

    def forward(self, x: Tensor, lengths: Mapping[str, int] | None = None) -> Tensor:
        """Runs along the axes.

        Args:
            x: local tensor with the dims `axes` names.
            lengths: global lengths of the axes, needed where the mesh does not divide them.

        Returns:
            This rank's chunk of the result, as the layout cuts it.

        Raises:
            ShapeError: on every rank, a tensor without these axes, or in other chunks; lengths of
                axes that x does not have; an axis too short for the border of a window.
        """
        return self._on_axes(x, lengths, {})

    def _on_axes(
        self, x: Tensor, lengths: Mapping[str, int] | None, options: Mapping[str, Any]
    ) -> Tensor:
        """`_run` on x as a field (b c axes), in and out as `axes` names its dims."""
        split = any(self.layout.size(name) > 1 for name in self.axis)
        run = self._on_ranks if split else self._turned
        return run(x, lengths, options)

    @functools.partial(outside_graphs, reason=OF_RANKS)
    def _on_ranks(
        self, x: Tensor, lengths: Mapping[str, int] | None, options: Mapping[str, Any]
    ) -> Tensor:
        return self._turned(x, lengths, options)

    def _turned(
        self, x: Tensor, lengths: Mapping[str, int] | None, options: Mapping[str, Any]
    ) -> Tensor:
        whole = self._whole(x, lengths, options)
        rest = [name for name in self.axes[:-1] if name not in self.axis]
        order = [self.axes.index(name) for name in (*rest, self.axes[-1], *self.axis)]
        turned = x.permute(order)
        kept = turned.shape[: len(rest)]
        y: Tensor = turned.reshape(math.prod(kept), *turned.shape[len(rest) :])
        dims = {name: 2 + i for i, name in enumerate(self.axis) if self.layout.size(name) > 1}
        if dims:
            y = Field.from_local(y, self.layout, dims, {name: whole[name] for name in dims})
        y = self._run(y, whole, **options)
        if isinstance(y, Field):
            y = y.rechunked(dims).to_local()
        y = y.reshape(*kept, *y.shape[1:])
        return y.permute([order.index(i) for i in range(len(order))])

    def _run(self, x: Tensor, lengths: Mapping[str, int]) -> Tensor:
        """The module on x (b c axes), a field where the layout splits an axis."""
        raise NotImplementedError

    def _refusal(self, lengths: Mapping[str, int] | None, options: Mapping[str, Any]) -> str:
        """Why the lengths and options of a call do not fit the module; "" where they do."""
        return wrong_lengths(lengths, self.axes[:-1])

    def _misfit(self, lengths: Mapping[str, int]) -> str:
        """Why axes of these lengths do not fit the module; "" where they do."""
        empty = [name for name, n in lengths.items() if n < 1 and not self.takes_empty]
        return f"axis {empty[0]!r} has no positions: it needs one or more" if empty else ""

    def _whole(
        self, x: Tensor, lengths: Mapping[str, int] | None, options: Mapping[str, Any]
    ) -> dict[str, int]:
        """Global lengths of the axes; refused on all ranks if one has other options or chunks."""
        layout = self.layout
        whole: dict[str, int] = {}
        wrong = self._refusal(lengths, options)
        if x.dim() != len(self.axes) or x.shape[-1] != self.embed_dim:
            wrong = wrong or (
                f"x must have the axes {self.axes} and {self.axes[-1]} = {self.embed_dim}, found"
                f" shape {tuple(x.shape)}"
            )
        else:
            for name in self.axis:
                here = x.shape[self.axes.index(name)]
                even = here * layout.size(name)
                whole[name] = even if wrong else int((lengths or {}).get(name, even))
                split = layout.size(name) > 1
                held = count(layout.spans(name, whole[name])) if split else whole[name]
                if here != held and not wrong:
                    wrong = (
                        f"this rank's chunk of axis {name!r} of length {whole[name]} holds {held}"
                        f" positions, found {here}; where the mesh does not divide an axis, pass"
                        f" lengths={{{name!r}: global length}}"
                    )
            wrong = wrong or self._misfit(whole)
        if any(layout.size(name) > 1 for name in self.axis):
            dims = tuple(d for name in self.axis for d in layout.shard_dims(name))
            subject = f"a call of {type(self).__name__} over {self.axis}"
            layout.bound.agree(subject, wrong or f"{whole} {dict(options) or ''}", dims)
        if wrong:
            raise ShapeError(wrong)
        return whole


def _pads_of(length: int, extent: int, stride: int, *, causal: bool = False) -> tuple[int, int]:
    """Positions that the windows of an axis see before its beginning and after its end.

    >>> _pads_of(7, 3, 1), _pads_of(7, 3, 2), _pads_of(7, 2, 2), _pads_of(7, 3, 1, causal=True)
    ((1, 1), (0, 2), (0, 1), (2, 0))
    """
    before = extent - 1 if causal else max(extent - stride, 0) // 2
    outputs = -(-length // stride)
    return before, max((outputs - 1) * stride + extent - before - length, 0)


class Windowed(OverAxes):
    """A module of windows with a stride: one result for every `stride` positions of each axis."""

    def __init__(
        self,
        embed_dim: int,
        axis: str | Sequence[str],
        axes: Sequence[str],
        layout: Layout | None,
        kernel: Numbers,
        stride: Numbers,
        dilation: Numbers,
    ) -> None:
        super().__init__(embed_dim, axis, axes, layout)
        self.kernel = self._per_axis("kernel", kernel)
        self.stride = self._per_axis("stride", stride)
        self.dilation = self._per_axis("dilation", dilation)
        self.extent = tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation))

    def lengths_after(self, lengths: Mapping[str, int]) -> dict[str, int]:
        self._check_given(lengths)
        return {name: -(-lengths[name] // s) for name, s in zip(self.axis, self.stride)}


def _padded(x: Tensor, pads: Sequence[tuple[int, int]], border: str, value: float = 0.0) -> Tensor:
    """The last dims of x, one per pair, with what is beyond their ends."""
    if not any(map(any, pads)):
        return x
    flat = [n for pair in reversed(pads) for n in pair]
    mode = BORDERS[border]
    return F.pad(x, flat, mode) if mode != "constant" else F.pad(x, flat, value=value)


class Convolution(Windowed):
    """A convolution over one to three axes of a tensor, whatever mesh dims split them.

    `y_o = b + sum_i W_i x_(o stride + i dilation - before)`, for windows that are centred on what
    their outputs stand for. The other axes act as batch. With a layout, input and output are the
    local chunks as they are at rest, and ranks receive the strips that their windows see.

    Args:
        embed_dim: size of the last axis of the input.
        axis: the axes that the windows run over: one to three names.
        axes: names of the input's dims, the embedding last.
        layout: how the axes are split over the mesh, bound. Default: one device.
        out_dim: size of the last axis of the output, default `embed_dim`.
        kernel: taps along each axis; one number, one per axis, or a table by axis.
        stride: positions per output, likewise; an axis of n has `ceil(n / stride)` after it.
        dilation: from one tap to the next, likewise.
        border: what is beyond the ends of an axis: "zeros", "reflect", "replicate", "circular", or
            "causal", where windows end at their outputs; one, or a table by axis.
        depthwise: every channel by itself.
        bias: whether a learned vector is added.
        generator: the source of the initial weights.
        device: of the parameters.
        dtype: of the parameters, default torch's.

    Raises:
        DeclarationError: an axis that `axes` does not name, or in zigzag or striped order; sizes
            that cannot be.

    >>> blur = weft.nn.Convolution(8, axis=("lat", "lon"), axes=("batch", "lat", "lon", "embed"),
    ...     kernel=3, border={"lon": "circular"})
    >>> blur(torch.randn(2, 5, 7, 8)).shape
    torch.Size([2, 5, 7, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        *,
        axis: str | Sequence[str],
        axes: Sequence[str] = ("batch", "tokens", "embed"),
        layout: Layout | None = None,
        out_dim: int | None = None,
        kernel: Numbers = 3,
        stride: Numbers = 1,
        dilation: Numbers = 1,
        border: str | Mapping[str, str] = "zeros",
        depthwise: bool = False,
        bias: bool = True,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, axis, axes, layout, kernel, stride, dilation)
        self.border = self._borders(border)
        out_dim = embed_dim if out_dim is None else out_dim
        if depthwise and out_dim % embed_dim:
            raise DeclarationError(
                f"depthwise: out_dim={out_dim} is not a multiple of embed_dim={embed_dim}"
            )
        self.groups = embed_dim if depthwise else 1
        fan = embed_dim // self.groups * math.prod(self.kernel)
        shape = (out_dim, embed_dim // self.groups, *self.kernel)
        whole = torch.empty(shape).uniform_(-(fan**-0.5), fan**-0.5, generator=generator)
        options: dict[str, Any] = {"device": device, "dtype": dtype or torch.get_default_dtype()}
        self.weight = nn.Parameter(whole.to(**options))
        self.bias = nn.Parameter(torch.zeros(out_dim, **options)) if bias else None
        replicate(self, self.layout)

    def _borders(self, border: str | Mapping[str, str]) -> tuple[str, ...]:
        given = dict.fromkeys(self.axis, border) if isinstance(border, str) else dict(border)
        self._check_axes("border", given)
        for found in given.values():
            if found not in BORDERS:
                raise DeclarationError(f"border {found!r:.80}{did_you_mean(str(found), BORDERS)}")
        return tuple(given.get(name, "zeros") for name in self.axis)

    def _pads(self, lengths: Mapping[str, int]) -> list[tuple[int, int]]:
        """Positions that windows see beyond the ends of each axis."""
        windows = zip(self.axis, self.extent, self.stride, self.border)
        return [_pads_of(lengths[a], n, s, causal=b == "causal") for a, n, s, b in windows]

    def _misfit(self, lengths: Mapping[str, int]) -> str:
        if wrong := super()._misfit(lengths):
            return wrong
        for name, border, pads in zip(self.axis, self.border, self._pads(lengths)):
            needed = max(pads) + (border == "reflect")
            if border in ("reflect", "circular") and needed > lengths[name]:
                return (
                    f"axis {name!r} has {lengths[name]} positions, and a {border} border of"
                    f" {max(pads)} needs {needed} or more: take a smaller kernel or dilation, a"
                    " longer axis, or border='zeros'"
                )
        return ""

    def _run(self, x: Tensor, lengths: Mapping[str, int]) -> Tensor:
        """The convolution of x (b c axes)."""
        pads = self._pads(lengths)
        for mode in dict.fromkeys(self.border):  # corners come with the later ones
            held = [p if b == mode else (0, 0) for p, b in zip(pads, self.border)]
            x = _padded(x, held, mode)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.axis) - 1]
        options = self.stride, 0, self.dilation, self.groups
        return convolve(x, local(self.weight), local(self.bias), *options)


class Pool(Windowed):
    """The largest or the mean of the positions in windows over one to three axes.

    Positions beyond the ends of an axis do not count.

    Args:
        embed_dim: size of the last axis.
        kind: "max" or "mean".
        axis: the axes that the windows run over.
        axes: names of the input's dims, the embedding last.
        layout: how the axes are split over the mesh, bound. Default: one device.
        kernel: positions of a window along each axis; one number, one per axis, or a table by axis.
        stride: positions per output, likewise; default the kernel.

    Raises:
        DeclarationError: as for `Convolution`; another kind.

    >>> half = weft.nn.Pool(8, "mean", axis=("lat", "lon"), axes=("lat", "lon", "embed"), kernel=2)
    >>> half(torch.ones(5, 6, 8)).unique()
    tensor([1.])
    """

    def __init__(
        self,
        embed_dim: int,
        kind: Literal["max", "mean"],
        *,
        axis: str | Sequence[str],
        axes: Sequence[str] = ("batch", "tokens", "embed"),
        layout: Layout | None = None,
        kernel: Numbers = 2,
        stride: Numbers | None = None,
    ) -> None:
        stride = kernel if stride is None else stride
        super().__init__(embed_dim, axis, axes, layout, kernel, stride, 1)
        if kind not in ("max", "mean"):
            raise DeclarationError(f"kind={kind!r:.80}{did_you_mean(str(kind), ('max', 'mean'))}")
        self.kind = kind

    def _run(self, x: Tensor, lengths: Mapping[str, int]) -> Tensor:
        """The pool of x (b c axes)."""
        sizes = zip(self.axis, self.extent, self.stride)
        pads = [_pads_of(lengths[name], extent, stride) for name, extent, stride in sizes]
        at = len(self.axis) - 1
        if self.kind == "max":
            pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[at]
            return pool(_padded(x, pads, "zeros", -math.inf), self.kernel, self.stride)
        mean = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[at]
        y = mean(_padded(x, pads, "zeros"), self.kernel, self.stride)
        if not any(map(any, pads)):
            return y
        share = torch.ones((), dtype=torch.float64, device=y.device)
        for i, name in enumerate(self.axis):
            inside = _inside(lengths[name], self.extent[i], self.stride[i], pads[i][0])
            along = uploaded(inside, y.device, torch.float64)
            share = share * along.view(-1, *[1] * (at - i))
        return y / share.to(y.dtype)


def _inside(length: int, extent: int, stride: int, before: int) -> tuple[float, ...]:
    """For each window of an axis, the share of its positions that are between the ends.

    >>> _inside(5, 4, 2, 1)
    (0.75, 1.0, 0.5)
    """
    firsts = range(-before, length - before, stride)
    return tuple((min(a + extent, length) - max(a, 0)) / extent for a in firsts)


class Resample(OverAxes):
    """More or fewer positions of one to three axes, by the nearest ones or in between.

    Args:
        embed_dim: size of the last axis.
        axis: the axes.
        axes: names of the input's dims, the embedding last.
        layout: how the axes are split over the mesh, bound. Default: one device.
        factor: how many times as many positions there are after it; one number, one per axis, or a
            table by axis. `forward` may be given lengths instead.
        mode: "nearest", or "linear" between the middles of positions, as
            `torch.nn.functional.interpolate` has them with `align_corners=False`.

    Raises:
        DeclarationError: as for `Convolution`; another mode.

    >>> twice = weft.nn.Resample(8, axis="tokens", factor=2)
    >>> twice(torch.randn(1, 5, 8)).shape, twice(torch.randn(1, 5, 8), to={"tokens": 9}).shape
    (torch.Size([1, 10, 8]), torch.Size([1, 9, 8]))
    """

    def __init__(
        self,
        embed_dim: int,
        *,
        axis: str | Sequence[str],
        axes: Sequence[str] = ("batch", "tokens", "embed"),
        layout: Layout | None = None,
        factor: Numbers = 1,
        mode: Literal["nearest", "linear"] = "nearest",
    ) -> None:
        super().__init__(embed_dim, axis, axes, layout)
        self.factor = self._per_axis("factor", factor)
        if mode not in ("nearest", "linear"):
            raise DeclarationError(
                f"mode={mode!r:.80}{did_you_mean(str(mode), ('nearest', 'linear'))}"
            )
        self.mode = mode

    def lengths_after(self, lengths: Mapping[str, int]) -> dict[str, int]:
        self._check_given(lengths)
        return {name: lengths[name] * f for name, f in zip(self.axis, self.factor)}

    def forward(
        self,
        x: Tensor,
        lengths: Mapping[str, int] | None = None,
        to: Mapping[str, int] | None = None,
    ) -> Tensor:
        """Resamples the axes.

        Args:
            x: local tensor with the dims `axes` names.
            lengths: global lengths of the axes, needed where the mesh does not divide them.
            to: global lengths after it, instead of a multiple of those of x.

        Returns:
            This rank's chunk of the result, as the layout cuts it.

        Raises:
            ShapeError: on every rank, a tensor without these axes, or in other chunks; `to` of
                another axis, or of no positions.
        """
        return self._on_axes(x, lengths, {} if to is None else {"to": dict(to)})

    def _refusal(self, lengths: Mapping[str, int] | None, options: Mapping[str, Any]) -> str:
        for name, length in options.get("to", {}).items():
            if name not in self.axis:
                return f"to: no axis {name!r}{did_you_mean(name, self.axis)}"
            if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                return f"to[{name!r}] = {length!r}: a length is a whole number above 0"
        return super()._refusal(lengths, options)

    def _run(
        self, x: Tensor, lengths: Mapping[str, int], to: Mapping[str, int] | None = None
    ) -> Tensor:
        """The result of x (b c axes)."""
        after = {**self.lengths_after(lengths), **(to or {})}
        mode: str = self.mode
        if mode == "linear":
            mode = ("linear", "bilinear", "trilinear")[len(self.axis) - 1]
        return F.interpolate(x, [after[name] for name in self.axis], mode=mode)


class GroupNorm(OverAxes):
    """`(x - mean) / sqrt(var + eps) g + b` over some axes and the channels of a group.

    Mean and variance are those of all ranks that split the axes: counts, means and squares about
    the mean are merged. One group is a layer norm over these axes and all channels. (Wu and He,
    arXiv:1803.08494.) The other axes act as batch.

    Args:
        groups: of channels, which divide `embed_dim`.
        embed_dim: size of the last axis.
        axis: the axes whose positions are normalised together.
        axes: names of the input's dims, the embedding last.
        layout: how the axes are split over the mesh, bound. Default: one device.
        eps: added to the variance.
        device: of the parameters.
        dtype: of the parameters, default torch's.

    Raises:
        DeclarationError: as for `Convolution`; groups that do not divide.

    >>> norm = weft.nn.GroupNorm(2, 8, axis=("lat", "lon"), axes=("batch", "lat", "lon", "embed"))
    >>> round(norm(torch.randn(1, 4, 5, 8) + 3).mean().abs().item(), 5)
    0.0
    """

    most, takes_empty = None, True

    def __init__(
        self,
        groups: int,
        embed_dim: int,
        *,
        axis: str | Sequence[str],
        axes: Sequence[str] = ("batch", "tokens", "embed"),
        layout: Layout | None = None,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, axis, axes, layout)
        if groups < 1 or embed_dim % groups:
            raise DeclarationError(f"groups={groups} do not divide embed_dim={embed_dim}")
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(embed_dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(embed_dim, device=device, dtype=dtype))
        replicate(self, self.layout)

    def _run(self, x: Tensor, lengths: Mapping[str, int]) -> Tensor:
        """The norm of x (b c axes)."""
        return F.group_norm(x, self.groups, local(self.weight), local(self.bias), self.eps)


class BatchNorm(OverAxes):
    """`(x - mean) / sqrt(var + eps) g + b` of every channel, over all positions of all axes.

    In training mean and variance are those of all ranks (Ioffe and Szegedy, arXiv:1502.03167), and
    change the running ones, which are used in evaluation.

    Args:
        embed_dim: size of the last axis.
        axes: names of the input's dims, the embedding last.
        layout: how the axes are split over the mesh, bound. Default: one device.
        momentum: share of a batch in the running statistics.
        eps: added to the variance.
        device: of the parameters.
        dtype: of the parameters, default torch's.

    Raises:
        DeclarationError: as for `Convolution`.

    >>> norm = weft.nn.BatchNorm(8, axes=("batch", "tokens", "embed"))
    >>> norm(torch.randn(4, 5, 8)).shape
    torch.Size([4, 5, 8])
    """

    most, takes_empty = None, True
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        embed_dim: int,
        *,
        axes: Sequence[str] = ("batch", "tokens", "embed"),
        layout: Layout | None = None,
        momentum: float = 0.1,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, axes[:-1], axes, layout)
        self.momentum, self.eps = momentum, eps
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.ones(embed_dim, **options))
        self.bias = nn.Parameter(torch.zeros(embed_dim, **options))
        self.register_buffer("running_mean", torch.zeros(embed_dim, **options))
        self.register_buffer("running_var", torch.ones(embed_dim, **options))
        replicate(self, self.layout)

    def _run(self, x: Tensor, lengths: Mapping[str, int]) -> Tensor:
        """The norm of x (b c axes)."""
        stats = self.running_mean, self.running_var
        weights = local(self.weight), local(self.bias)
        return F.batch_norm(x, *stats, *weights, self.training, self.momentum, self.eps)


__all__ = ["BatchNorm", "Convolution", "GroupNorm", "Pool", "Resample"]
