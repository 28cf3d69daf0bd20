"""The exactness check behind `weft check`: a layout against dense softmax attention in fp64.

    out = softmax(scale q k^T + mask) v      lse = logsumexp(scale q k^T + mask)

Every rank draws the same tensors, takes its shards, and compares its results with its shards of the
reference: output, logsumexp, and the gradients of query, key and value for a random gradient of
the output.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import reduce
from torch import Tensor

from weft.attention import attention
from weft.choice import ChosenKeys
from weft.declare.strategy import Role
from weft.kernels import accumulate_dtype
from weft.kernels.base import finite_lse
from weft.layout import Layout

from .cases import SIDES, Case, shard
from .reference import reference, relative_error, visible_pairs

#: Largest relative error allowed in fp64, where only the order of additions differs.
EXACT = 1e-11


@dataclass(frozen=True)
class Comparison:
    """The largest relative error of one tensor over all ranks, and the error allowed."""

    tensor: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # False for NaN


def check_rank(layout: Layout, case: Case, device: str = "cpu") -> list[Comparison]:
    """Check one bound layout; every rank calls this and gets the same comparisons.

    fp64 allows `EXACT`; other dtypes twice the error of one device, a rounding of the largest
    entry, and one in fp32 for each part that is merged: of the largest logsumexp L, where that is
    above 1, as parts are weighted by their logsumexps, which are right to eps L.
    """
    full = case.draw()
    expected = case.wanted(full)
    full = {name: t.to(device) for name, t in full.items()}
    actual = results_of(layout, case, full)
    errors = [
        relative_error(actual[name], local_part(layout, case, t, name).to(device), t)
        for name, t in expected.items()
    ]
    allowed = _allowed(layout, case, full, expected)
    return [Comparison(*row) for row in zip(expected, largest_over_ranks(layout, errors), allowed)]


def attend_once(layout: Layout, case: Case, device: str = "cpu") -> None:
    """The checked call, forward and backward, without a comparison: for recordings."""
    full = {name: t.to(device) for name, t in case.draw().items()}
    q, k, v = (local_part(layout, case, full[name], name).requires_grad_() for name in "qkv")
    options: dict[str, Any] = {"mask": case.mask, "length": case.length}
    out = attention(q, k, v, layout, case.axes, **options, choice=_choice(layout, case, q.device))
    if case.backward:
        out.backward(local_part(layout, case, full["dout"], "dout"))


def results_of(layout: Layout, case: Case, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The results of this rank, by the names of `Case.wanted`."""
    q, k, v = (local_part(layout, case, full[name], name) for name in "qkv")
    options: dict[str, Any] = {"mask": case.mask, "length": case.length}
    options["choice"] = _choice(layout, case, full["q"].device)
    leaves = [t.clone().requires_grad_(case.backward) for t in (q, k, v)]
    out = attention(leaves[0], leaves[1], leaves[2], layout, case.axes, **options)
    # A separate call: one that returns the logsumexp also takes a gradient through it.
    _, lse = attention(q, k, v, layout, case.axes, **options, return_lse=True)
    results = {"out": out.detach(), "lse": lse}
    if case.backward:
        grads = torch.autograd.grad(out, leaves, local_part(layout, case, full["dout"], "dout"))
        results |= dict(zip(("dq", "dk", "dv"), grads))
    return results


def _choice(layout: Layout, case: Case, device: torch.device) -> ChosenKeys | None:
    """This rank's rows of the choice of a case."""
    numbers = case.chosen()
    if numbers is None:
        return None
    rows = numbers.expand(-1, case.heads, -1, -1)  # heads are split as queries' are
    return ChosenKeys(local_part(layout, case, rows, "q")[:, :1].contiguous().to(device))


def local_part(layout: Layout, case: Case, full: Tensor, name: str) -> Tensor:
    """This rank's part of a full tensor, sharded like the tensors of its name.

    >>> case = Case("", n=8)
    >>> local_part(Layout.single(), case, torch.empty(case.shapes["k"], device="meta"), "k").shape
    torch.Size([2, 8, 8, 4])
    """
    return shard(layout, case.axes, case.lengths, full, SIDES[name])


def largest_over_ranks(layout: Layout, errors: Sequence[float]) -> list[float]:
    """The largest error of each tensor over all ranks."""
    rows = [json.loads(t) for t in layout.bound.share("errors", json.dumps([*errors])).values()]
    return [max(column) for column in zip(*rows)]


def _allowed(
    layout: Layout, case: Case, full: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> list[float]:
    rules = layout.rules(case.axes).items()
    merged = math.prod(layout.mesh[d] for d, rule in rules if rule.role in (Role.QUERY, Role.KEY))
    finite = expected["lse"][expected["lse"].isfinite()].abs()
    accumulated = torch.finfo(accumulate_dtype(case.dtype)).eps
    merging = merged * accumulated * max(1.0, finite.max().item() if finite.numel() else 0.0)
    cancelled = {
        name: bound / (expected[name].abs().max().item() or 1.0)
        for name, bound in (gradient_rounding(case, full) if case.backward else {}).items()
        if expected[name].numel()
    }
    if case.dtype == torch.float64:
        return [max(EXACT, merging) + cancelled.get(name, 0.0) for name in expected]
    one_device = results_of(Layout.single(), case, full)
    allowed = []
    for name, t in expected.items():
        rounding = accumulated if name == "lse" else torch.finfo(case.dtype).eps
        error = relative_error(one_device[name], t.to(one_device[name].device), t)
        allowed.append(2 * error + rounding + merging + cancelled.get(name, 0.0))
    return allowed


def gradient_rounding(case: Case, full: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest rounding of dq and dk where a row's gradient is a difference of equal numbers.

        ds = p (dout v^T - delta)
        |error of ds| <= eps p (|dout| |v|^T + |dout| . |out| + |dout v^T - delta| |score|)

    Where a row puts all its weight on one key, dout v^T and delta are equal but for their rounding,
    on one device, too, unless it adds both in one order; |score| = scale |q| |k|^T bounds what its
    own rounding does to p, and the error of ds reaches dq times |k| and dk times |q|.
    """
    q, k, v, dout = (full[name].double().cpu() for name in ("q", "k", "v", "dout"))
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    out, lse = reference(q, k, v, case.seen)
    scale = q.shape[-1] ** -0.5
    batch, heads, n, _ = q.shape
    visible = visible_pairs(case.seen, batch, heads, n, k.shape[2])
    scores = ((q @ k.mT) * scale).masked_fill(~visible, float("-inf"))
    p = torch.exp(scores - finite_lse(lse).unsqueeze(-1))  # rounded, as a bound may be
    difference = (dout @ v.mT - (dout * out).sum(-1, keepdim=True)).abs()
    terms = dout.abs() @ v.abs().mT + (dout * out).abs().sum(-1, keepdim=True)
    terms = terms + difference * (q.abs() @ k.abs().mT) * scale
    ds = torch.finfo(accumulate_dtype(case.dtype)).eps * scale * p * terms
    dk = reduce(ds.mT @ q.abs(), "b (g h) m d -> b g m d", "sum", h=groups)
    bounds = {"dq": ds @ k.abs(), "dk": dk}
    return {name: t.max().item() if t.numel() else 0.0 for name, t in bounds.items()}
