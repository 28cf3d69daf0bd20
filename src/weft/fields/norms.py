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

from ..comm.once_differentiable import once
from ..errors import ShapeError
from ..kernels import accumulate_dtype
from ..runtime.autocast import autocast_is_on
from .dims import Dim, Factor, dim_size, is_split_dim, whole
from .exchange import gathered_chunks, summed
from .field import Field
from .region import FieldRegion
from .registry import aligned_part, dims_of, local_of, refused, rule


def merged_moments(
    t: Tensor, over: tuple[int, ...], dims: Sequence[Dim], region: FieldRegion
) -> tuple[Tensor, Tensor]:
    """Mean and variance over some dims of all ranks, in the dtype of accumulation."""
    t = t.to(accumulate_dtype(t.dtype))
    factors = [f for d in over for f in dims[d]]
    split = [f.chunks for f in factors if f.chunks is not None]
    local_counts = [high - low for low, high in map(region.own, split)]
    fixed = math.prod(f.size for f in factors if f.chunks is None)
    mean: Any = t.mean(over, keepdim=True) if t.numel() else t.sum(over, keepdim=True)
    m2: Any = (t - mean).square().sum(over, keepdim=True)
    total = fixed * math.prod(local_counts)
    for i, chunks in enumerate(split):  # after each, all ranks that split it have one result
        every = gathered_chunks(torch.stack([mean, m2]), chunks.axis, region, "moments")
        done = math.prod(c.length for c in split[:i])
        each = fixed * done * math.prod(local_counts[i + 1 :])
        counts = [each * (b - a) for a, b in zip(chunks.starts, chunks.starts[1:])]
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
    x: Field,
    over: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    moments: tuple[Tensor, Tensor] | None = None,
    centred: bool = True,
) -> Field:
    """A field less its mean and over its deviation; weight and bias are local, and broadcast."""
    t, dims, region = x._local, x._dims, x._region
    with torch.no_grad():
        if centred:
            mean, variance = moments or merged_moments(t, over, dims, region)
        else:
            mean, squares = None, t.to(accumulate_dtype(t.dtype)).square().sum(over, keepdim=True)
            count = math.prod(dim_size(dims[d]) for d in over)
            variance = summed(squares, [dims[d] for d in over], region, "moments") / count
        rstd = (variance + eps).rsqrt()
    y = _Normalize.apply(t, weight, bias, mean, rstd, over, dims, region)
    return Field(y, dims, region)


def _wide(norm: Callable, x: Field, *rest: Tensor | None) -> tuple[Field, list[Tensor | None]]:
    """Tensors in the dtype that autocast has for a norm on their device."""
    t = x._local
    if not autocast_is_on(t.device.type):
        return x, list(rest)
    dtype = norm(t.new_zeros(1, 1, 2)).dtype
    cast = [None if other is None else other.to(dtype) for other in rest]
    return Field(t.to(dtype), x._dims, x._region), cast


def _per_channel(t: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    return None if t is None else t.view(shape)


def _check_several(label: str, group: str, values: int) -> None:
    """Raise where a variance would be of one value: torch does, and every rank knows the number."""
    if values < 2:
        raise ShapeError(
            f"{label}: {values} value per {group} over all ranks, and a variance needs more than 1"
        )


@rule(F.group_norm, torch.group_norm)
def group_norm(
    x: Field,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Field:
    if is_split_dim(x._dims[1]):
        raise refused("group_norm over split channels", x)
    if not any(map(is_split_dim, x._dims[2:])):
        y = F.group_norm(x._local, num_groups, weight, bias, eps)
        return Field(y, x._dims, x._region)
    n = dim_size(x._dims[1]) // num_groups
    values = n * math.prod(map(dim_size, (x._dims[0], *x._dims[2:])))
    _check_several("group_norm", "group", values)
    x, (weight, bias) = _wide(lambda t: F.group_norm(t, 1), x, weight, bias)
    dims: list[Sequence[Factor]] = [x._dims[0], whole(num_groups), whole(n), *x._dims[2:]]
    groups = Field(x._local.unflatten(1, (num_groups, n)), dims, x._region)
    shape = (num_groups, n, *[1] * (x.dim() - 2))
    weight, bias = (_per_channel(t, shape) for t in (weight, bias))
    y = normalized(groups, tuple(range(2, groups.dim())), weight, bias, eps)
    return Field(y._local.flatten(1, 2), x._dims, x._region)


@rule(F.instance_norm, torch.instance_norm)
def instance_norm(
    x: Field,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Field:
    if running_mean is not None:
        raise refused("instance_norm with running statistics", x)
    if use_input_stats:
        _check_several("instance_norm", "channel", math.prod(map(dim_size, x._dims[2:])))
    return group_norm(x, dim_size(x._dims[1]), weight, bias, eps)


@rule(F.batch_norm, torch.batch_norm)
def batch_norm(
    x: Field,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Field:
    if is_split_dim(x._dims[1]):
        raise refused("batch_norm over split channels", x)
    if not training or not any(map(is_split_dim, x._dims)):
        stats = running_mean, running_var
        y = F.batch_norm(x._local, *stats, weight, bias, training, momentum, eps)
        return Field(y, x._dims, x._region)
    over = (0, *range(2, x.dim()))
    n = math.prod(dim_size(x._dims[d]) for d in over)
    _check_several("batch_norm", "channel", n)
    with torch.no_grad():
        mean, variance = merged_moments(x._local, over, x._dims, x._region)
        for running, found in ((running_mean, mean), (running_var, variance * (n / (n - 1)))):
            if running is not None:
                running.mul_(1 - momentum).add_(found.flatten().to(running.dtype), alpha=momentum)
    shape = (1, -1, *[1] * (x.dim() - 2))
    weight, bias = (_per_channel(t, shape) for t in (weight, bias))
    return normalized(x, over, weight, bias, eps, (mean, variance))


@rule(F.layer_norm, torch.layer_norm)
def layer_norm(
    x: Field,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Field:
    over = tuple(range(x.dim() - len(normalized_shape), x.dim()))
    if not any(is_split_dim(x._dims[d]) for d in over):
        y = F.layer_norm(local_of(x), x._local.shape[over[0] :], weight, bias, eps)
        return Field(y, x._dims, x._region)
    x, (weight, bias) = _wide(lambda t: F.layer_norm(t, (2,)), x, weight, bias)
    weight, bias = (t if t is None else aligned_part(t, x._dims, x._region) for t in (weight, bias))
    return normalized(x, over, weight, bias, eps)


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    x: Field,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Field:
    over = tuple(range(x.dim() - len(normalized_shape), x.dim()))
    if not any(is_split_dim(x._dims[d]) for d in over):
        y = F.rms_norm(x._local, x._local.shape[over[0] :], weight, eps)
        return Field(y, x._dims, x._region)
    x, (weight,) = _wide(lambda t: F.rms_norm(t, (2,)), x, weight)
    part = None if weight is None else aligned_part(weight, x._dims, x._region)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return normalized(x, over, part, None, eps, centred=False)


@rule(F.normalize)
def normalize(
    x: Field, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None
) -> Field:
    if is_split_dim(dims_of(x)[dim]):
        raise refused("normalize along a split dim", x)
    return Field(F.normalize(x._local, p, dim, eps), x._dims, x._region)
