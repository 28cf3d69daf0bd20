"""The rule of attention: over split axes by the layout's own strategies, as `weft.attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention import attention
from ..bias_tiles import bias_tile
from ..errors import DeclarationError, UnsupportedError
from ..masks import Causal
from ..plan.order import count, shard_spans
from .dims import Chunks, Dim, Factor, dim_size, is_split_dim, whole
from .exchange import rechunked
from .field import Field
from .region import FieldRegion
from .registry import aligned_part, dims_of, local_of, refused, region_of, rule


@rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Field:
    region, q_dims, k_dims = region_of(query, key, value), dims_of(query), dims_of(key)
    if dropout_p:
        raise refused("attention with dropout", query, "; set its probability to 0")
    if is_split_dim(q_dims[-1]) or is_split_dim(k_dims[-1]) or is_split_dim(dims_of(value)[-1]):
        raise refused("attention over split features", query)
    batch = _batch(q_dims[:-2], k_dims[:-2])
    if not is_split_dim(k_dims[-2]):
        if is_causal and is_split_dim(q_dims[-2]):
            raise refused("causal attention of split queries to whole keys", query)
        goal = [*batch, q_dims[-2], k_dims[-2]]
        mask = (
            None if attn_mask is None else aligned_part(attn_mask, goal[-attn_mask.dim() :], region)
        )
        q, k, v = (aligned_part(t, [*batch, *dims_of(t)[-2:]], region) for t in (query, key, value))
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
        y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=enable_gqa, **options)
        return Field(y, (*batch, q_dims[-2], whole(y.shape[-1])), region)
    if not is_split_dim(q_dims[-2]):
        raise refused("attention of whole queries to split keys", key)
    return _over_split(query, key, value, attn_mask, is_causal, scale, region)


def _over_split(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    region: FieldRegion,
) -> Field:
    """Attention whose queries and keys are split, on the layout."""
    sides = [dims_of(t)[-2] for t in (query, key)]
    axes = tuple(_name(f, i) for i, f in enumerate(sides[0]))
    if axes != tuple(_name(f, i) for i, f in enumerate(sides[1])):
        raise refused("attention of queries to keys that other axes split", query)
    try:
        region.layout.rules(axes)
    except DeclarationError as error:
        names = [f.chunks.axis for f in sides[0] if f.chunks is not None]
        line = "; ".join(f"{a}: gather={region.layout.size(a)}" for a in names)
        raise UnsupportedError(
            f"attention of a weft.Field over {'+'.join(names)}: {error}; declare how, as in"
            f" {line!r}, or '{'+'.join(names)}' under [attend]"
        ) from None
    tensors, before = [], []
    for t in (query, key, value):
        part, dim = _in_chunks_of_layout(local_of(t), dims_of(t)[-2], region)
        before.append(dim)
        tensors.append(part.flatten(0, -4) if part.dim() > 3 else part[:, None])
    lengths = {a: (q.size, k.size) for a, q, k in zip(axes, *sides)}
    mask, bias = Causal() if is_causal else None, None
    if attn_mask is not None:
        bias = _bias(attn_mask, tensors[0], region, axes, lengths)
    q, k, v = tensors
    out = attention(q, k, v, region.layout, axes, mask, scale, lengths, bias=bias)
    lead = local_of(query).shape[:-2]
    out = out.reshape(*lead, *out.shape[-2:])
    back, _ = _rechunked(out, before[0], [f.chunks for f in sides[0]], region)
    return Field(back, (*dims_of(query)[:-1], whole(out.shape[-1])), region)


def _name(factor: Factor, place: int) -> str:
    return factor.chunks.axis if factor.chunks is not None else f"whole_{place}"


def _in_chunks_of_layout(x: Tensor, dim: Dim, region: FieldRegion) -> tuple[Tensor, Dim]:
    """Tokens in dim -2 in the chunks that the layout makes of their axes."""
    goals: list[Chunks | None] = []
    for size, chunks in dim:
        if chunks is None:
            goals.append(None)
            continue
        starts = [0]
        parts = tuple(n for _, n in region.mesh(chunks.axis))
        for spans in shard_spans(size, parts):
            starts.append(starts[-1] + count(spans))
        goals.append(Chunks(chunks.axis, tuple(starts)))
    return _rechunked(x, dim, goals, region)


def _rechunked(
    x: Tensor, dim: Dim, goals: Sequence[Chunks | None], region: FieldRegion
) -> tuple[Tensor, Dim]:
    at = x.dim() - 2
    x = x.unflatten(at, [region.local_size((f,)) for f in dim])
    for i, (factor, goal) in enumerate(zip(dim, goals)):
        if factor.chunks is not None and goal is not None:
            x, _ = rechunked(x, at + i, factor.chunks, goal.starts, region)
    result = tuple(Factor(f.size, goal) for f, goal in zip(dim, goals))
    return x.flatten(at, at + len(dim) - 1), result


def _bias(
    attn_mask: Tensor, query: Tensor, region: FieldRegion, axes: tuple[str, ...], lengths: dict
) -> Tensor:
    """The scores' bias that a mask of torch is, for this rank's tile."""
    if isinstance(attn_mask, Field):
        raise refused("attention with a mask that is a field", attn_mask)
    mask = attn_mask
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    n, m = (_product(pair[i] for pair in lengths.values()) for i in (0, 1))
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.shape[0] > 1:
        raise refused("attention with a mask per sample", attn_mask)
    return bias_tile(mask.expand(-1, -1, n, m), region.layout, axes, lengths)


def _product(numbers: Any) -> int:
    total = 1
    for n in numbers:
        total *= n
    return total


def _batch(one: Sequence[Dim], two: Sequence[Dim]) -> list[Dim]:
    result: list[Dim] = []
    for a, b in zip(one, two):
        large = [dim for dim in (a, b) if dim_size(dim) != 1] or [a]
        result.append(next((dim for dim in large if is_split_dim(dim)), large[0]))
    return result
