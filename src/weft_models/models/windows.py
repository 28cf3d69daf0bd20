"""Blocks of convolutions, norms, pools and resampling: torch's own, on fields.

    x (batch lat lon embed), over lat and lon      b = batch, c = embed, then the axes: b c h w
    a rank's part as a `weft.Field`                torch's functions, on global positions
    the result in the chunks of the layout         back to (batch lat lon embed)

A window of a stride is centred on the positions that its output stands for: with `stride` and
`extent = dilation (kernel - 1) + 1`, output o of `ceil(length / stride)` sees `extent` positions
from `o stride - max(extent - stride, 0) // 2` on. So patches are `kernel = stride`, and an odd
kernel of stride 1 has its middle where its output is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from weft._torch import outside_graphs
from weft.errors import ShapeError
from weft.layout import Layout
from weft_axes.fields import Field
from weft_axes.nn.parameters import local
from weft_axes.nn.sequences import check_held

from ..declare.model_blocks import ConvBlock, NormBlock, numbers_of
from ..declare.model_file import ModelSpec
from .blocks import BlockInputs, norm

OF_RANKS = (
    "ranks compare their calls of a block over axes that a layout splits, and windows are fields"
    " there: compile without fullgraph=True"
)


class OnAxes(nn.Module):
    """A block over some axes, one position of which changes others; the other axes act as batch."""

    def __init__(
        self, spec: ModelSpec, block: Any, layout: Layout, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.block, self.layout, self.axes = block, layout, spec.axes
        self.axis: tuple[str, ...] = block.over_axes or spec.axes[:-1]

    def lengths_after(self, given: BlockInputs) -> dict[str, int]:
        """Global lengths of the block's axes after it."""
        raise NotImplementedError

    def forward(self, x: Tensor, given: BlockInputs) -> Tensor:
        """x, local, as the layout shards it."""
        split = any(self.layout.size(name) > 1 for name in self.axis)
        return self._on_ranks(x, given) if split else self._turned(x, given)

    @functools.partial(outside_graphs, reason=OF_RANKS)
    def _on_ranks(self, x: Tensor, given: BlockInputs) -> Tensor:
        return self._turned(x, given)

    def _turned(self, x: Tensor, given: BlockInputs) -> Tensor:
        """`_run` on x as (b c axes), a field where the layout splits an axis."""
        rest = [name for name in self.axes[:-1] if name not in self.axis]
        order = [self.axes.index(name) for name in (*rest, self.axes[-1], *self.axis)]
        turned = x.permute(order)
        kept = turned.shape[: len(rest)]
        y: Tensor = turned.reshape(math.prod(kept), *turned.shape[len(rest) :])
        dims = {name: 2 + i for i, name in enumerate(self.axis) if self.layout.size(name) > 1}
        if dims:
            y = Field.from_local(y, self.layout, dims, self._whole(x, [*dims], given.lengths))
        y = self._run(y, given)
        if isinstance(y, Field):
            y = y.rechunked(dims).to_local()
        y = y.reshape(*kept, *y.shape[1:])
        return y.permute([order.index(i) for i in range(len(order))])

    def _run(self, x: Tensor, given: BlockInputs) -> Tensor:
        raise NotImplementedError

    def _whole(self, x: Tensor, split: list[str], lengths: Mapping[str, int]) -> dict[str, int]:
        """Global lengths of split axes; refused on all ranks if one holds other chunks."""
        layout, wrong = self.layout, ""
        here = {name: x.shape[self.axes.index(name)] for name in split}
        whole = {name: lengths.get(name, n * layout.size(name)) for name, n in here.items()}
        try:
            check_held(layout, layout.coords, tuple(whole.items()), here)
        except ShapeError as error:
            wrong = str(error)
        dims = tuple(d for name in split for d in layout.shard_dims(name))
        layout.bound.agree(f"a {type(self).__name__} over {self.axis}", wrong or str(whole), dims)
        if wrong:
            raise ShapeError(wrong)
        return whole


class Windowed(OnAxes):
    """A block of windows with a stride: one result for every `stride` positions of each axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    def __init__(
        self, spec: ModelSpec, block: Any, layout: Layout, generator: torch.Generator
    ) -> None:
        super().__init__(spec, block, layout, generator)
        per_axis = {"kernel": block.kernel, "stride": block.stride or block.kernel}
        per_axis["dilation"] = getattr(block, "dilation", 1)
        for key, value in per_axis.items():
            numbers = numbers_of(value)
            setattr(self, key, numbers * len(self.axis) if len(numbers) == 1 else numbers)
        borders = getattr(block, "border", "zeros")
        given = borders if isinstance(borders, dict) else dict.fromkeys(self.axis, borders)
        self.borders = tuple(given.get(name, "zeros") for name in self.axis)

    def lengths_after(self, given: BlockInputs) -> dict[str, int]:
        return {name: -(-given.lengths[name] // s) for name, s in zip(self.axis, self.stride)}

    def _padded(self, x: Tensor, value: float = 0.0) -> Tensor:
        """x (b c axes) with what its windows see beyond the ends of the axes."""
        sizes = zip(x.shape[2:], self.kernel, self.stride, self.dilation, self.borders)
        pads = [pads_of(n, d * (k - 1) + 1, s, causal=b == "causal") for n, k, s, d, b in sizes]
        for border in dict.fromkeys(self.borders):  # corners come with the later ones
            held = [p if b == border else (0, 0) for p, b in zip(pads, self.borders)]
            if any(map(any, held)):
                flat = [n for pair in reversed(held) for n in pair]
                constant = border in ("zeros", "causal")
                x = F.pad(x, flat, value=value) if constant else F.pad(x, flat, border)
        return x


def pads_of(length: int, extent: int, stride: int, *, causal: bool = False) -> tuple[int, int]:
    """Positions that the windows of an axis see before its beginning and after its end.

    >>> pads_of(7, 3, 1), pads_of(7, 3, 2), pads_of(7, 2, 2), pads_of(7, 3, 1, causal=True)
    ((1, 1), (0, 2), (0, 1), (2, 0))
    """
    before = extent - 1 if causal else max(extent - stride, 0) // 2
    outputs = -(-length // stride)
    return before, max((outputs - 1) * stride + extent - before - length, 0)


def _called(module: nn.Module, x: Tensor) -> Tensor:
    """A module of torch whose parameters may be replicated DTensors."""
    weights = {name: local(p) for name, p in module.named_parameters()}
    return functional_call(module, weights, (x,))


class Convolve(Windowed):
    """`x + convolution(norm(x))`; with a stride, which leaves fewer positions, without `x +`."""

    def __init__(
        self, spec: ModelSpec, block: ConvBlock, layout: Layout, generator: torch.Generator
    ) -> None:
        super().__init__(spec, block, layout, generator)
        self.norm, embed = norm(spec), spec.sizes.embed
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(self.axis) - 1]
        options: dict[str, Any] = {"stride": self.stride, "dilation": self.dilation}
        options |= {"groups": embed if block.depthwise else 1, "device": torch.get_default_device()}
        self.run = nn.utils.skip_init(kind, embed, embed, self.kernel, **options)
        within = (embed // self.run.groups * math.prod(self.kernel)) ** -0.5
        with torch.no_grad():
            self.run.weight.uniform_(-within, within, generator=generator)
            self.run.bias.zero_()

    def forward(self, x: Tensor, given: BlockInputs) -> Tensor:
        """x, local, as the layout shards it."""
        y = super().forward(self.norm(x), given)
        return x + y if self.block.keeps_lengths else y

    def _run(self, x: Tensor, given: BlockInputs) -> Tensor:
        return _called(self.run, self._padded(x))


class BatchNorm(nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` over any number of axes."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


class Normalize(OnAxes):
    """`norm(x)` over positions of several axes; with `"batch"` in training the statistics run."""

    def __init__(
        self, spec: ModelSpec, block: NormBlock, layout: Layout, generator: torch.Generator
    ) -> None:
        super().__init__(spec, block, layout, generator)
        batch, embed = block.norm == "batch", spec.sizes.embed
        self.run = BatchNorm(embed) if batch else nn.GroupNorm(block.groups or 1, embed)

    def _run(self, x: Tensor, given: BlockInputs) -> Tensor:
        return _called(self.run, x)


class PoolWindows(Windowed):
    """The largest or the mean position of windows; those beyond the ends of axes do not count."""

    def _run(self, x: Tensor, given: BlockInputs) -> Tensor:
        at, windows = len(self.axis) - 1, (self.kernel, self.stride)
        if self.block.pool == "max":
            most = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[at]
            return most(self._padded(x, -math.inf), *windows)
        mean = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[at]
        inside = self._padded(torch.ones(1, 1, *x.shape[2:], dtype=x.dtype, device=x.device))
        return mean(self._padded(x), *windows) / mean(inside, *windows)


class ResampleAxes(OnAxes):
    """More positions of some axes, or as many as the model was given."""

    def lengths_after(self, given: BlockInputs) -> dict[str, int]:
        return self._after(given.lengths, given)

    def _after(self, lengths: Mapping[str, int], given: BlockInputs) -> dict[str, int]:
        return {
            name: given.first[name] if factor == "input" else lengths[name] * factor
            for name, factor in self.block.resample.items()
        }

    def _run(self, x: Tensor, given: BlockInputs) -> Tensor:
        linear = ("linear", "bilinear", "trilinear")[len(self.axis) - 1]
        after = self._after(dict(zip(self.axis, x.shape[2:])), given)
        mode = linear if self.block.mode == "linear" else "nearest"
        return F.interpolate(x, [*after.values()], mode=mode)
