"""Rules of norms over split axes: counts, means and squares about the mean, merged over ranks.

P(moments) -> R: every rank has (n, mean, m2) of its own part, m2 = sum (x - mean)^2, and

    n = n1 + n2     mean = (n1 mean1 + n2 mean2) / n
    m2 = m2_1 + m2_2 + n1 (mean1 - mean)^2 + n2 (mean2 - mean)^2

(Chan, Golub and LeVeque, 1983), which loses no digits where the mean is large. The backward pass
sums the two means of the gradient likewise, and keeps the input and its moments alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.comm.once_differentiable import once
from weft.kernels import accumulate_dtype
from weft.runtime.autocast import autocast_is_on

from .dims import Dim, dim_size, whole
from .exchange import gathered_chunks, summed
from .place import FieldRegion
from .reduce import mixes_split
from .registry import Part, Recipe, on_locals, refused, rule


def merged_moments(
    t: Tensor, over: tuple[int, ...], dims: Sequence[Dim], region: FieldRegion
) -> tuple[Tensor, Tensor]:
    """Mean and variance over some dims of all ranks, in the dtype of accumulation."""
    t = t.to(accumulate_dtype(t.dtype))
    factors = [f for d in over for f in dims[d]]
    split = [f.chunks for f in factors if f.chunks is not None]
    local_counts = [c.counts[region.chunk(c.axis)] for c in split]
    fixed = math.prod(f.size for f in factors if f.chunks is None)
    mean: Any = t.mean(over, keepdim=True) if t.numel() else t.sum(over, keepdim=True)
    m2: Any = (t - mean).square().sum(over, keepdim=True)
    total = fixed * math.prod(local_counts)
    for i, chunks in enumerate(split):  # after each, all ranks that split it have one result
        every = gathered_chunks(torch.stack([mean, m2]), chunks.axis, region, "moments")
        done = math.prod(c.length for c in split[:i])
        each = fixed * done * math.prod(local_counts[i + 1 :])
        counts = [each * n for n in chunks.counts]
        total = sum(counts)
        if total:
            parts = [(n, *every[c]) for c, n in enumerate(counts) if n]
            mean = sum(n / total * part for n, part, _ in parts)
            m2 = sum(squares + n * (part - mean).square() for n, part, squares in parts)
    return mean, m2 / max(total, 1)


class _Normalize(torch.autograd.Function):
    """(x - mean) rstd weight + bias, where mean and rstd are those of all ranks' x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
        over: tuple[int, ...],
        dims: tuple[Dim, ...],
        region: FieldRegion,
    ) -> Tensor:
        ctx.over, ctx.dims, ctx.region = over, dims, region
        ctx.shapes = [None if t is None else t.shape for t in (weight, bias)]
        ctx.save_for_backward(x, weight, mean, rstd)
        y = _scaled(x, mean, rstd)
        y = y if weight is None else y * weight
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    @once("a norm of a weft.Field", linear=False)
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple:
        x, weight, mean, rstd = saved
        scaled, grad = _scaled(x, mean, rstd), grad.to(rstd.dtype)
        dweight, dbias = (
            None if shape is None else t.sum_to_size(shape).to(x.dtype)
            for shape, t in zip(ctx.shapes, (grad * scaled, grad))
        )
        grad = grad if weight is None else grad * weight
        sums = [(grad * scaled).sum(ctx.over, keepdim=True)]
        if mean is not None:
            sums.append(grad.sum(ctx.over, keepdim=True))
        of_dims = [ctx.dims[d] for d in ctx.over]
        count = math.prod(map(dim_size, of_dims))
        along, *constant = summed(torch.stack(sums), of_dims, ctx.region, "dmoments") / count
        inner = grad - scaled * along
        inner = inner - constant[0] if constant else inner
        return (inner * rstd).to(x.dtype), dweight, dbias, None, None, None, None, None


def _scaled(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    x = x.to(rstd.dtype)
    return (x if mean is None else x - mean) * rstd


def normalized(
    t: Tensor,
    dims: Sequence[Dim],
    region: FieldRegion,
    over: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    moments: tuple[Tensor, Tensor] | None = None,
    centred: bool = True,
) -> Tensor:
    """A local tensor less its mean and over its deviation; weight and bias broadcast."""
    with torch.no_grad():
        if centred:
            mean, variance = moments or merged_moments(t, over, dims, region)
        else:
            mean, squares = None, t.to(accumulate_dtype(t.dtype)).square().sum(over, keepdim=True)
            count = math.prod(dim_size(dims[d]) for d in over)
            variance = summed(squares, [dims[d] for d in over], region, "moments") / count
        rstd = (variance + eps).rsqrt()
    return _Normalize.apply(t, weight, bias, mean, rstd, over, dims, region)


def _wide(norm: Callable, *tensors: Tensor | None) -> list[Any]:
    """Tensors in the dtype that autocast has for a norm on their device."""
    first = tensors[0]
    assert first is not None
    if not autocast_is_on(first.device.type):
        return list(tensors)
    dtype = norm(first.new_zeros(1, 1, 2)).dtype
    return [None if t is None else t.to(dtype) for t in tensors]


def wholes(*parts: Part | None) -> dict[int, list[Dim]]:
    """Goals of tensors that every rank needs whole, such as weights."""
    return {p.index: [whole(n) for n in p.shape] for p in parts if p is not None}


def _given(t: list[Any], *parts: Part | None) -> list[Any]:
    """The local tensors of parts, None for none."""
    return [None if p is None else t[p.index] for p in parts]


def _per_channel(t: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    return None if t is None else t.view(shape)


def _check_several(x: Part, label: str, group: str, values: int) -> None:
    """Raise where a variance would be of one value, or of none."""
    if values < 2:
        raise refused(f"{label} of {values} values per {group} over all ranks", x)


@rule(F.group_norm, torch.group_norm)
def group_norm(
    x: Part,
    num_groups: int,
    weight: Part | None = None,
    bias: Part | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Recipe:
    if x.ndim < 2 or x.is_split(1):
        raise refused("group_norm over split channels", x)
    if not mixes_split(x, range(2, x.ndim)):
        args = (x, num_groups, weight, bias, eps)
        return on_locals(F.group_norm, args, x.dims, wholes(weight, bias))
    n = x.shape[1] // num_groups
    _check_several(x, "group_norm", "group", n * math.prod((x.shape[0], *x.shape[2:])))
    dims: list[Dim] = [x.dims[0], whole(num_groups), whole(n), *x.dims[2:]]
    shape = (num_groups, n, *[1] * (x.ndim - 2))

    def run(t: list[Any]) -> Tensor:
        y, w, b = _wide(lambda z: F.group_norm(z, 1), *_given(t, x, weight, bias))
        groups = y.unflatten(1, (num_groups, n))
        w, b = _per_channel(w, shape), _per_channel(b, shape)
        over = tuple(range(2, groups.dim()))
        return normalized(groups, dims, x.region, over, w, b, eps).flatten(1, 2)

    return Recipe(run, x.dims, wholes(weight, bias))


@rule(F.instance_norm, torch.instance_norm)
def instance_norm(
    x: Part,
    running_mean: Part | None = None,
    running_var: Part | None = None,
    weight: Part | None = None,
    bias: Part | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Recipe:
    if running_mean is not None:
        raise refused("instance_norm with running statistics", x)
    if x.ndim < 3:
        raise refused("instance_norm of no positions", x)
    if use_input_stats:
        _check_several(x, "instance_norm", "channel", math.prod(x.shape[2:]))
    return group_norm(x, x.shape[1], weight, bias, eps)


def _by_known_moments(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Any, bias: Any, *options: Any
) -> Tensor:
    """Batch norm in evaluation, whose CPU kernel mixes up strides of one row's gradients."""
    shape = (1, -1, *[1] * (x.dim() - 2))
    scale = (variance + options[-1]).rsqrt()
    scale = scale if weight is None else scale * weight
    y = (x - mean.view(shape)) * scale.view(shape)
    return (y if bias is None else y + bias.view(shape)).to(x.dtype)


@rule(F.batch_norm, torch.batch_norm)
def batch_norm(
    x: Part,
    running_mean: Part | None,
    running_var: Part | None,
    weight: Part | None = None,
    bias: Part | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Recipe:
    if x.ndim < 2 or x.is_split(1):
        raise refused("batch_norm over split channels", x)
    if any(p is not None and p.is_split(0) for p in (running_mean, running_var)):
        raise refused("batch_norm with split running statistics", x)
    if not training or not mixes_split(x, range(x.ndim)):
        args = (x, running_mean, running_var, weight, bias, training, momentum, eps)
        known = x.kind == "cpu" and not training and running_mean is not None
        stock: Any = _by_known_moments if known else F.batch_norm
        return on_locals(stock, args, x.dims, wholes(weight, bias))
    over = (0, *range(2, x.ndim))
    n = math.prod(x.shape[d] for d in over)
    _check_several(x, "batch_norm", "channel", n)
    shape = (1, -1, *[1] * (x.ndim - 2))

    def run(t: list[Any]) -> Tensor:
        y, w, b = _given(t, x, weight, bias)
        with torch.no_grad():
            mean, variance = merged_moments(y, over, x.dims, x.region)
            found = mean, variance * (n / (n - 1))
            for running, new in zip(_given(t, running_mean, running_var), found):
                if running is not None:
                    by = 0.0 if momentum is None else momentum
                    running.mul_(1 - by).add_(new.flatten().to(running.dtype), alpha=by)
        w, b = _per_channel(w, shape), _per_channel(b, shape)
        return normalized(y, x.dims, x.region, over, w, b, eps, (mean, variance))

    return Recipe(run, x.dims, wholes(weight, bias))


def _over_last(x: Part, normalized_shape: Any) -> tuple[int, ...]:
    if x.dtype.is_complex:
        raise refused("a norm of complex numbers", x)
    n = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    return tuple(range(x.ndim - n, x.ndim))


@rule(F.layer_norm, torch.layer_norm)
def layer_norm(
    x: Part,
    normalized_shape: Sequence[int],
    weight: Part | None = None,
    bias: Part | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Recipe:
    over = _over_last(x, normalized_shape)
    if not mixes_split(x, over):
        args = (x, list(normalized_shape), weight, bias, eps)
        return on_locals(F.layer_norm, args, x.dims, wholes(weight, bias))
    goals = {p.index: [x.dims[d] for d in over] for p in (weight, bias) if p is not None}

    def run(t: list[Any]) -> Tensor:
        y, w, b = _wide(lambda z: F.layer_norm(z, (2,)), *_given(t, x, weight, bias))
        return normalized(y, x.dims, x.region, over, w, b, eps)

    return Recipe(run, x.dims, goals)


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    x: Part, normalized_shape: Sequence[int], weight: Part | None = None, eps: float | None = None
) -> Recipe:
    over = _over_last(x, normalized_shape)
    if not mixes_split(x, over):
        args = (x, list(normalized_shape), weight, eps)
        return on_locals(F.rms_norm, args, x.dims, wholes(weight))
    goals = {} if weight is None else {weight.index: [x.dims[d] for d in over]}
    small = torch.finfo(x.dtype).eps if eps is None else eps

    def run(t: list[Any]) -> Tensor:
        y, w = _wide(lambda z: F.rms_norm(z, (2,)), *_given(t, x, weight))
        return normalized(y, x.dims, x.region, over, w, None, small, centred=False)

    return Recipe(run, x.dims, goals)


@rule(F.local_response_norm)
def local_response_norm(
    x: Part, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Recipe:
    if x.ndim < 3 or x.is_split(1) or not x.dtype.is_floating_point:
        raise refused("local_response_norm over split channels, or of integers,", x)
    return on_locals(F.local_response_norm, (x, size, alpha, beta, k), x.dims)
