"""The rule of attention: over split axes by the layout's own strategies, as `weft.attention`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from weft.attention import attention
from weft.bias_tiles import bias_tile
from weft.declare.strategy import Role
from weft.errors import DeclarationError, UnsupportedError
from weft.masks import FULL, Causal, Mask

from .dims import Dim, Factor, dim_size, is_split_dim, split_axes, split_dim, whole
from .exchange import placed_like
from .field import Field
from .registry import NoRule, Part, Recipe, broadcast, composite, refused, rule
from .stored import as_stored

#: Whether masks hide rows, as `hides_rows` says, while they live and nothing is written to them.
_HIDES = WeakIdKeyDictionary()


@rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Part,
    key: Part,
    value: Part,
    attn_mask: Part | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Recipe:
    if dropout_p:
        raise _dropped(query)
    if any(p.is_split(p.ndim - 1) or not p.shape[-1] for p in (query, key, value)):
        raise refused("attention over split features", query)
    if attn_mask is not None and is_causal:
        raise RuntimeError("attention: give attn_mask or is_causal, not both")
    m = key.ndim - 2
    if not key.is_split(m) and not value.is_split(m):
        return _to_whole_keys(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    return _over_split(query, key, value, attn_mask, is_causal, scale)


@composite(F.multi_head_attention_forward)
def _multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    if training and dropout_p:
        raise _dropped(query)
    unusual = (bias_k, bias_v, static_k, static_v)
    if need_weights or add_zero_attn or query.dim() != 3 or any(x is not None for x in unusual):
        return NotImplemented
    causal = is_causal and key_padding_mask is None
    if is_causal and attn_mask is None:
        return NotImplemented
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)  # (n b e) to (b h n d)
        for x, w, b in zip((query, key, value), weights, biases)
    )
    masks = []  # what is added to scores
    if key_padding_mask is not None:
        masks.append(_added(key_padding_mask, q)[:, None, None])
    if attn_mask is not None and not causal:
        masks.append(
            _added(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, q.shape[:2]), q)
        )
    seen = None if not masks else masks[0] + masks[1] if len(masks) == 2 else masks[0]
    out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=causal)
    return F.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias), None


def _dropped(query: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{refused('attention with dropout', query)}: ranks would drop others; set its probability"
        " to 0"
    )


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """What a mask of torch's adds to scores: nothing or minus infinity where it is boolean."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))


def _to_whole_keys(
    query: Part,
    key: Part,
    value: Part,
    attn_mask: Part | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Recipe:
    """Attention to keys that every rank has: each computes its own queries."""
    rows = query.dims[-2]
    if is_causal and is_split_dim(rows):
        raise refused("causal attention of split queries to whole keys", query)
    if enable_gqa and any(p.ndim < 3 or p.is_split(p.ndim - 3) for p in (query, key, value)):
        raise refused("attention over split heads of which several share keys", query)
    parts = (query, key, value)
    lead = broadcast([p.dims[:-2] for p in parts]) if not enable_gqa else list(query.dims[:-2])
    out = [*lead, rows, value.dims[-1]]
    goals: dict[int, Sequence[Dim]] = {}
    for p in parts:
        own = lead[len(lead) - (p.ndim - 2) :]
        if enable_gqa:
            own = [*own[:-1], p.dims[-3]]
        goals[p.index] = [*own, *p.dims[-2:]]
    if attn_mask is not None:
        scores = [*lead, rows, key.dims[-2]]
        goals[attn_mask.index] = scores[len(scores) - attn_mask.ndim :]
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}

    def run(t: list[Any]) -> Tensor:
        mask = None if attn_mask is None else t[attn_mask.index]
        q, k, v = (t[p.index] for p in parts)
        if not q.numel() or not k.numel():
            zero = sum(x.sum() for x in (q, k, v, mask) if x is not None) * 0  # on all graphs
            return zero + q.new_zeros([query.region.local_size(dim) for dim in out])
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    return Recipe(run, out, goals)


def _over_split(
    query: Part,
    key: Part,
    value: Part,
    attn_mask: Part | None,
    is_causal: bool,
    scale: float | None,
) -> Recipe:
    """Attention whose keys are split, on the layout; queries that are whole are split for it."""
    region, parts = query.region, (query, key, value)
    m = key.ndim - 2
    keys = key.dims[m] if key.is_split(m) else value.dims[m]  # the whole one of two is cut alike
    rows = query.dims[-2]
    if not is_split_dim(rows) and len(keys) == 1:
        rows = split_dim(region.chunks_like(split_axes(keys)[0], dim_size(rows)))
    sides = [rows, keys, keys]
    axes = tuple(_name(f, i) for i, f in enumerate(rows))
    if any(axes != tuple(_name(f, i) for i, f in enumerate(side)) for side in sides[1:]):
        raise refused("attention of queries to keys that other axes split", query)
    causal = is_causal and dim_size(rows) != dim_size(keys)
    if causal and len(axes) > 1:
        raise refused("causal attention over several axes to another number of keys", query)
    _check_attended(query, axes, rows)
    lead = broadcast([p.dims[:-2] for p in parts])
    if {*split_axes(rows)} & {axis for q in lead for axis in split_axes(q)}:
        raise refused("attention whose batch and tokens one axis splits", query)
    _check_mask(attn_mask, query, axes, lead)
    of_keys = attn_mask is None or _is_of_keys(attn_mask, query, dim_size(keys))
    stored = as_stored(sides[:2], region) if of_keys and not is_causal else None
    if stored is None:
        made = (
            [split_dim(region.chunks(f.chunks.axis, f.size))[0] if f.chunks else f for f in side]
            for side in sides
        )
        sides = [*map(tuple, made)]
    goals: dict[int, Sequence[Dim]] = {}
    for p, side in zip(parts, sides):
        heads = p.dims[:-2]
        own = lead[len(lead) - len(heads) :]
        fit = [o if dim_size(o) == dim_size(h) else h for o, h in zip(own, heads)]
        goals[p.index] = [*fit, side, p.dims[-1]]
    out = [*goals[query.index][:-1], value.dims[-1]]
    if attn_mask is not None:
        goals[attn_mask.index] = [whole(n) for n in attn_mask.shape]
    mask: Mask = Causal(offset=0) if causal else Causal() if is_causal else FULL
    lengths = {a: (q.size, k.size) for a, q, k in zip(axes, *sides[:2])}

    def run(t: list[Any]) -> Tensor:
        q, k, v = (t[p.index] for p in parts)
        before, n = q.shape[:-2], q.shape[-2]
        seen, length, bias = mask, lengths, None
        given: Any = None if attn_mask is None else t[attn_mask.index]
        if given is not None and given.is_floating_point() and hides_rows(given, q.dtype):
            assert attn_mask is not None
            every = [[*goals[p.index][:-2], whole(p.shape[-2]), p.dims[-1]] for p in (key, value)]
            pairs = zip((k, v), (key, value), every)
            k, v = (placed_like(x, goals[p.index], to, region) for x, p, to in pairs)
            goal = [whole(n) for n in attn_mask.shape]
            if attn_mask.ndim > 1 and attn_mask.shape[-2] != 1:
                goal[-2] = sides[0]
            own = placed_like(given, goals[attn_mask.index], goal, region)
            y = F.scaled_dot_product_attention(q, k, v, own, scale=scale)
            return placed_like(y, out, settled, region)
        if stored is not None:
            length, seen = stored.lengths, stored.mask(given)
            q, k, v = map(stored.filled, (q, k, v), stored.room)
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
        q, k, v = (_four_dims(x, batch) for x in (q, k, v))
        if given is not None and stored is None:
            bias = _bias(given, q, query, axes, lengths, batch)
        y = attention(q, k, v, region.layout, axes, seen, scale, length, bias=bias)
        return placed_like(y[..., :n, :].reshape(*before, n, y.shape[-1]), out, settled, region)

    # Queries that are whole have outputs that are.
    settled = out if query.is_split(query.ndim - 2) else [*out[:-2], query.dims[-2], out[-1]]
    return Recipe(run, settled, goals)


def hides_rows(mask: Tensor, dtype: torch.dtype) -> bool:
    """True if some row of a mask is finite and so low that scores vanish in it: a mean of all keys.

    The logsumexp of such a row does not tell how many keys there were: parts cannot be merged.
    """
    own = mask._local if isinstance(mask, Field) else mask
    state = dtype, None if own.is_inference() else own._version
    known = _HIDES.get(mask, ())
    if not known or known[0] != state or state[1] is None:
        low = -1e-3 / torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        top = mask.detach().amax(-1) if mask.shape[-1] else mask.new_zeros(())
        known = _HIDES[mask] = state, bool(((top < low) & top.isfinite()).any())
    return known[1]


def _is_of_keys(mask: Part, query: Part, m: int) -> bool:
    """True of a boolean mask of m keys alone: (b or 1, 1, 1, m), or fewer dims."""
    sizes = mask.shape[-3:-1].numel(), mask.shape[-1]
    return mask.dtype == torch.bool and mask.ndim <= query.ndim == 4 and sizes == (1, m)


def _check_mask(mask: Part | None, query: Part, axes: tuple[str, ...], lead: Sequence[Dim]) -> None:
    """Raise for a mask per sample where samples are split, or another rank computes them."""
    if mask is None:
        return
    region = query.region
    per_sample = mask.ndim > 3 and math.prod(mask.shape[:-3]) > 1
    several = mask.ndim > 2 and mask.shape[-3] > 1
    rules = region.layout.rules(axes)
    over = [m for a in split_axes(query.dims[-2]) for m in region.layout.shard_dims(a)]
    moved = any(rules[m].role is Role.BATCH for m in over)
    if (per_sample and moved) or (any(map(is_split_dim, lead)) and (per_sample or several)):
        raise refused("attention with a mask per sample over split samples", mask)


def _four_dims(x: Tensor, batch: Sequence[int]) -> Tensor:
    """(b, h, n, d) of any number of dims before tokens and features."""
    if x.dim() < 4:
        x = x[None] if x.dim() == 3 else x[None, None]
    return x.expand(*(batch or (1,)), *x.shape[-3:]).flatten(0, -4)


def _check_attended(query: Part, axes: tuple[str, ...], side: Dim) -> None:
    """Raise unless the layout says how these axes are attended."""
    layout = query.region.layout
    try:
        layout.rules(axes)
    except DeclarationError as error:
        names = split_axes(side)
        line = "; ".join(f"{a}: gather={layout.size(a)}" for a in names)
        raise NoRule(
            f"attention of a weft.Field over {'+'.join(names)}: {error}; declare how, as in"
            f" {line!r}, or '{'+'.join(names)}' under [attend]"
        ) from None


def _name(factor: Factor, place: int) -> str:
    return factor.chunks.axis if factor.chunks is not None else f"whole_{place}"


def _bias(
    attn_mask: Tensor,
    query: Tensor,
    x: Part,
    axes: tuple[str, ...],
    lengths: dict[str, tuple[int, int]],
    batch: Sequence[int],
) -> Tensor:
    """The scores' bias that a whole mask of torch is, for this rank's tile."""
    mask = attn_mask
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    n, m = (math.prod(pair[i] for pair in lengths.values()) for i in (0, 1))
    if mask.dim() > 4:
        mask = mask.expand(*batch, *mask.shape[-3:]).flatten(0, -4)
    mask = mask[(None,) * (4 - mask.dim())]
    tiles = (
        bias_tile(sample.expand(-1, -1, n, m), x.region.layout, axes, lengths)
        for sample in mask.split(1)
    )
    return torch.cat(list(tiles))
