"""Losses: each position's by torch's own function, then sums and means over all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.errors import UnsupportedError
from weft.layout import Layout
from weft.move.collectives import scale_backward

from ..losses import cross_entropy as cross_entropy_in_chunks
from .dims import split_axes, whole
from .field import Field, cut, own_chunk
from .reduce import crosses_field
from .registry import (
    Part,
    Recipe,
    broadcast,
    composite,
    direct,
    function_name,
    on_locals,
    refused,
    rule,
    tail_goals,
)


def reduced_by(each: Tensor, reduction: str, batch: int | None = None) -> Tensor:
    """The mean or the sum of every position's loss, or these themselves."""
    if reduction == "none":
        return each
    if reduction == "batchmean":
        return each.sum() / (batch or 1)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return each.mean() if reduction == "mean" else each.sum()


def _refuse_old(func: Any, x: Any, *old: Any) -> None:
    if old != (None, None):
        raise refused(
            f"{function_name(func)} with size_average= or reduce=", x, "; write reduction="
        )


def _of_positions(func: Any) -> None:
    """A loss of single positions: `reduction="none"` is a rule, the others are written in it."""

    @rule(func)
    def each(*args: Any, **kwargs: Any) -> Recipe:
        parts = [p for p in (*args, *kwargs.values()) if isinstance(p, Part)]
        dims = broadcast([p.dims for p in parts])
        return on_locals(func, args, dims, tail_goals(parts, dims), kwargs)

    @composite(func)
    def loss(*args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
        _refuse_old(func, args[0], kwargs.pop("size_average", None), kwargs.pop("reduce", None))
        if reduction == "none":
            return NotImplemented
        each_ = func(*args, **kwargs, reduction="none")
        return reduced_by(each_, reduction, args[0].shape[0] if args[0].dim() else 1)


for _name in (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "poisson_nll_loss",
    "soft_margin_loss",
    "hinge_embedding_loss",
    "margin_ranking_loss",
):
    _of_positions(getattr(F, _name))


def _of_classes(func: Any) -> None:
    """A loss of whole classes: of every position the classes' dim goes."""

    @rule(func)
    def each(x: Part, target: Part, weight: Any = None, *args: Any, **kwargs: Any) -> Recipe:
        d = 1 if x.ndim > 1 else 0
        if x.is_split(d):
            raise refused(f"{function_name(func)} over split classes", x)
        rest = [q for k, q in enumerate(x.dims) if k != d]
        of_shares = target.ndim == x.ndim
        own = [q for k, q in enumerate(target.dims) if not of_shares or k != d]
        dims = broadcast([rest, own]) if rest else []
        goals = {
            x.index: [*dims[:d], x.dims[d], *dims[d:]],
            target.index: [*dims[:d], whole(target.shape[d]), *dims[d:]] if of_shares else dims,
        }
        if isinstance(weight, Part):
            goals[weight.index] = [whole(n) for n in weight.shape]
        return on_locals(func, (x, target, weight, *args), dims, goals, kwargs)


_of_classes(F.cross_entropy)
_of_classes(F.nll_loss)


@composite(F.cross_entropy)
def _cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    _refuse_old(F.cross_entropy, x, size_average, reduce)
    d = 1 if x.dim() > 1 else 0
    if isinstance(target, Tensor) and crosses_field(x, d):
        if weight is not None or label_smoothing or target.is_floating_point():
            raise refused("cross_entropy over split classes with weights, smoothing or shares", x)
        each = torch.where(target != ignore_index, _of_split_classes(x, target, d, ignore_index), 0)
        return _mean_of_targets(each, target, None, ignore_index, reduction)
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if target.is_floating_point():
        if reduction == "none":
            return NotImplemented
        each = F.cross_entropy(x, target, weight, reduction="none", label_smoothing=label_smoothing)
        n = x.numel() // x.shape[d]
        return each.sum() / n if reduction == "mean" else reduced_by(each, reduction)
    if reduction == "none":
        return NotImplemented
    each = F.cross_entropy(x, target, weight, reduction="none", **options)
    return _mean_of_targets(each, target, weight, ignore_index, reduction)


def _mean_of_targets(
    each: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str
) -> Tensor:
    if reduction != "mean":
        return reduced_by(each, reduction)
    keep = target != ignore_index
    if weight is None:
        return each.sum() / keep.sum()
    shares = weight[torch.where(keep, target, 0)] * keep
    return each.sum() / shares.sum()


def _of_split_classes(x: Tensor, target: Tensor, d: int, ignore_index: int) -> Tensor:
    """The loss of every position where classes are split, as positions of a sequence are."""
    n = x.shape[d]
    if bool(((target != ignore_index) & ((target < 0) | (target >= n))).any()):
        raise IndexError(f"cross_entropy: a target is out of bounds, of {n} classes")
    shape = [1] * x.dim()
    shape[d] = n
    classes = torch.arange(n, device=x.device).view(shape)
    picked = torch.where(classes == target.unsqueeze(d), x, 0.0).sum(d)
    return x.logsumexp(d) - picked


@direct(cross_entropy_in_chunks)
def loss_in_chunks(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, layout: Layout, **named: Any
) -> Tensor:
    """weft's own loss, of this rank's hidden states and labels; gradients as of the region."""
    if not isinstance(hidden, Field) or hidden._region.layout is not layout:
        raise UnsupportedError("cross_entropy: hidden states of another layout than the loss's")
    dim = hidden.dim() - 2
    (axis, *others) = split_axes(hidden._dims[dim]) or ("",)
    if others or not axis:
        raise refused("cross_entropy of hidden states whose tokens are not split", hidden)
    if not isinstance(labels, Field):
        labels = cut(labels, layout, {axis: dim})
    x, y = own_chunk(hidden, axis, dim), own_chunk(labels, axis, dim)
    made = cross_entropy_in_chunks(x, head_weight, y, layout, **named)
    return scale_backward(made, float(hidden._region.times))


@composite(F.nll_loss)
def nll_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    _refuse_old(F.nll_loss, x, size_average, reduce)
    if reduction == "none":
        return NotImplemented
    each = F.nll_loss(x, target, weight, ignore_index=ignore_index, reduction="none")
    return _mean_of_targets(each, target, weight, ignore_index, reduction)
