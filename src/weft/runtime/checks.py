"""Checks of tensors and functions of a call, before other ranks wait for it."""

from __future__ import annotations

import torch
from torch import Tensor

from .._pointwise import value_of
from ..declare.mesh import coordinates
from ..declare.placements import SEQ
from ..errors import ShapeError, UnsupportedError
from ..plan.call import Call, Expanded
from ..plan.plan import Plan


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v fit together; quick where they do, as every call passes here."""
    if q.dim() == k.dim() == v.dim() == 4 and q.dtype == k.dtype == v.dtype:
        (b, h, _, d), (kb, g, m, kd), (vb, vg, vm, e) = q.shape, k.shape, v.shape
        same = b == kb == vb and g == vg and m == vm and d == kd and h and g and d and e
        if same and h % g == 0 and q.device == k.device == v.device and _is_computed(q, k, v):
            return
    _refuse_tensors(q, k, v)


def check_latents(q: Tensor, k: Tensor, v: Tensor, expanded: Expanded) -> None:
    """Raise unless q, two tensors of latents, and the keys and values made of them fit together."""
    if not q.dim() == k.dim() == v.dim() == 4:
        _refuse_tensors(q, k, v)
    (b, h, _, d), (kb, g, m, _), (vb, vg, vm, _) = q.shape, k.shape, v.shape
    shapes = f"q {tuple(q.shape)}, latents {tuple(k.shape)} and {tuple(v.shape)}"
    if not (b == kb == vb and g == vg == 1 and m == vm and h):
        raise ShapeError(
            "latents are two tensors (b, 1, m, dim) of as many tokens, in one head; of several"
            f" make one, t.transpose(1, 2).flatten(2)[:, None]: {shapes}"
        )
    if h % expanded.heads or d != expanded.head_dim:
        raise ShapeError(
            f"the expansion makes {expanded.heads} heads of keys of {expanded.head_dim}, which do"
            f" not fit {shapes}"
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ShapeError(
            f"q and latents need one dtype and one device, found {q.dtype}, {k.dtype}, {v.dtype} on"
            f" {q.device}, {k.device}, {v.device}"
        )
    if not _is_computed(q, k, v):
        _refuse_tensors(q, q, q)
        raise ShapeError(f"latents are dense tensors of a floating dtype: {shapes}")


def _is_computed(q: Tensor, k: Tensor, v: Tensor) -> bool:
    strided = q.layout is k.layout is v.layout is torch.strided
    return strided and q.dtype.is_floating_point and q.dtype.itemsize > 1


def _refuse_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise ShapeError(f"{name} must be (batch, heads, tokens, dim), found {tuple(t.shape)}")
        if t.layout != torch.strided:
            raise ShapeError(f"{name} must be a dense tensor, found layout {t.layout}")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ShapeError(f"q, k, v need one floating dtype, found {q.dtype}, {k.dtype}, {v.dtype}")
    if q.dtype.itemsize == 1:
        raise UnsupportedError(f"no kernel computes in {q.dtype}; use bf16, fp16, fp32 or fp64")
    if not q.device == k.device == v.device:
        raise ShapeError(f"q, k, v need one device, found {q.device}, {k.device}, {v.device}")
    if k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3] or q.shape[0] != k.shape[0]:
        raise ShapeError(f"q (b h n d), k (b g m d), v (b g m e) do not fit together: {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(f"query heads must be a multiple of key/value heads: {shapes}")
    if 0 in (q.shape[1], q.shape[3], v.shape[3]):
        raise ShapeError(f"heads and head dims are 1 or more: {shapes}")


def check_lengths(plan: Plan, n: int, m: int) -> None:
    totals = plan.problem.n, plan.problem.m
    for name, local, resharding, total in zip(("queries", "keys"), (n, m), plan.resharding, totals):
        expected = resharding.state(0, plan.coords).size(SEQ)
        if local != expected:
            raise ShapeError(
                f"the rank at {plan.coords} has {local} local {name} of axis "
                f"{'+'.join(plan.problem.axes)}, but its chunk of a length of {total} holds "
                f"{expected}; shard with layout.shard, and pass length= where chunks are uneven"
            )


def check_place(label: str, t: Tensor | None, q: Tensor) -> None:
    """Refuses a tensor that is on another device than the queries."""
    if t is not None and t.device != q.device:
        raise ShapeError(f"{label} is on {t.device}, and q on {q.device}")


def check_bias(plan: Plan, bias: Tensor, batch: int | None) -> None:
    """Refuses a bias that is not this rank's tile; without `batch`, one of any samples fits."""
    if not bias.is_floating_point():
        raise ShapeError(
            f"a bias is added to the scores and has a floating dtype, found {bias.dtype}; to"
            " hide keys use a mask: weft.MaskMod(lambda b, h, q, k: visible[q, k])"
        )
    rows, columns = plan.tile_shape()
    heads = plan.compute.query.heads
    fits = bias.dim() == 4 and tuple(bias.shape[2:]) == (rows, columns)
    samples = "samples" if batch is None else batch
    if not (
        fits and (batch is None or bias.shape[0] in (1, batch)) and bias.shape[1] in (1, heads)
    ):
        raise ShapeError(
            f"the bias must be ({samples} or 1, {heads} or 1, {rows}, {columns}), the "
            f"tile of scores that the rank at {plan.coords} computes, found {tuple(bias.shape)}; "
            "cut it with weft.bias_tile"
        )


def check_choice(plan: Plan, numbers: Tensor, q: Tensor, groups: int) -> None:
    """Refuses a choice that is not of this rank's queries, or of keys that there are not."""
    b, h, n = q.shape[:3]
    if numbers.shape[0] != b or numbers.shape[2] != n or numbers.shape[1] not in (1, groups, h):
        heads = " or ".join(map(str, dict.fromkeys((1, groups, h))))
        raise ShapeError(
            f"the choice must be ({b}, {heads}, {n}, K), a row per query of this rank, found"
            f" {tuple(numbers.shape)}; whole ones are cut as queries are:"
            " layout.shard(numbers, {axis: 2})"
        )
    check_place("the choice", numbers, q)
    kind = plan.problem.choice
    if kind is None or not kind.check or not numbers.numel() or numbers.is_meta:
        return
    low, high = (int(x) for x in numbers.aminmax())
    blocks = -(-plan.problem.m // kind.block)
    if low < -1 or high >= blocks:
        label = "positions" if kind.block == 1 else f"blocks of {kind.block} keys"
        raise ShapeError(
            f"the choice has number {low if low < -1 else high}, and there are {blocks} {label}"
            f" of {plan.problem.m} keys; numbers are 0 to {blocks - 1}, and -1 is none"
        )


def check_samples(plan: Plan, samples: tuple[int, ...]) -> None:
    """Refuses, on every rank, a bias of other samples than its rank computes with."""
    if set(samples) == {1}:  # or no bias at all
        return
    places = (coordinates(plan.sizes, rank) for rank in range(len(samples)))
    expected = [plan.resharding.query.entry(place).batch for place in places]
    if any(n not in (1, batch) for n, batch in zip(samples, expected)):
        raise ShapeError(
            f"the bias must be of {expected} samples by rank, those that each computes with, or of"
            f" 1, found {list(samples)}; cut it with weft.bias_tile"
        )


def probe_functions(call: Call, device: torch.device) -> None:
    """Raise `ShapeError` if a function in the mask or bias fails, before others wait for it."""
    on_meta = device.type == "meta"
    if call.bias is not None:
        call.bias.check("cpu" if on_meta else device)
    if not on_meta and call.has_functions:
        value_of("the mask", call.mask.allowed, device)
