"""The exactness check behind `weft check`: a layout against plain softmax attention in fp64.

    out = softmax(scale q k^T + mask) v      lse = logsumexp(scale q k^T + mask)

Every rank draws the same whole tensors, keeps its shard, and compares what it gets with its shard
of the reference: output, logsumexp, and the gradients of query, key and value for a random
gradient of the output.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import attention
from ..comm import index_at
from ..declare.layout_file import HEADS
from ..declare.strategy import Role
from ..errors import ShapeError, did_you_mean
from ..kernels import accumulate_dtype
from ..layout import Layout
from ..masks import Causal, Context, Documents, Full, KeyPadding, Mask, Window, prefix_lm
from ..plan.order import positions, shard_spans
from ..plan.problem import Problem

TENSORS = ("out", "lse", "dq", "dk", "dv")

#: Largest relative error allowed in fp64, where only the order of additions differs.
EXACT = 1e-11

MASKS = {
    "full": "every query sees every key",
    "causal": "a query sees itself and what comes before; causal:D: query 0 is at key D",
    "window:W": "causal, only the last W keys",
    "window:L:R": "keys from L before to R after; window:L:R:D: query 0 is at key D",
    "context:N": "only the first N positions are keys (default half)",
    "documents": "packed sequences of uneven lengths; documents:A:B:... gives the lengths",
    "causal-documents": "the same, causal within each",
    "prefix:N": "the first N positions see each other both ways, the rest is causal; prefix:N:D",
    "padding": "sequences of different lengths in a batch; padding:A:B:... gives the lengths",
}


@dataclass(frozen=True)
class Case:
    """A case of the check: an axis, global sizes, and a dtype.

    `length` has one global length per attended axis (`axis = "rows+features"` attends two
    jointly); `keys` is the number of keys where it is not that of the queries.
    """

    axis: str
    length: tuple[int, ...] = (37,)
    keys: int | None = None
    batch: int = 2
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 16
    mask: str = "full"
    dtype: str = "float64"
    backward: bool = True
    seed: int = 0
    spread: float = 1.0  # standard deviation of queries and keys

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.axis.split("+"))

    @property
    def n(self) -> int:
        """Queries in all."""
        return math.prod(self.length)

    @property
    def m(self) -> int:
        """Keys in all."""
        return self.n if self.keys is None else self.keys

    @property
    def lengths(self) -> dict[str, tuple[int, int]]:
        """Axis -> (queries, keys), as `weft.attention` takes it."""
        if self.keys is not None:
            return {self.axis: (self.n, self.keys)}
        return {a: (n, n) for a, n in zip(self.axes, self.length)}

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_named(self.dtype)

    @property
    def problem(self) -> Problem:
        """The same as the engine's `Problem`, with batch and heads of all ranks together."""
        return Problem(
            axes=self.axes,
            lengths=tuple(self.lengths.values()),
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            dtype=self.torch_dtype,
            device="cpu",
            mask=mask_named(self.mask, self.n, self.m, self.batch),
        )


@dataclass(frozen=True)
class Finding:
    """The largest relative error of one tensor over all ranks, and what is allowed."""

    tensor: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # False for NaN


def dtype_named(name: str) -> torch.dtype:
    """A floating dtype by torch's name or a short one (fp64, fp32, bf16, fp16).

    >>> dtype_named("bf16")
    torch.bfloat16
    """
    short = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    known = sorted({*short, *short.values()})
    if name not in known:
        raise ShapeError(f"dtype {name!r}{did_you_mean(name, known)}")
    return getattr(torch, short.get(name, name))


def mask_named(name: str, n: int, m: int, batch: int) -> Mask:
    """A mask by its name on a command line; see `MASKS`.

    >>> mask_named("causal:5", 3, 8, 1)
    Causal(window=None, offset=5)
    """
    kind, *texts = name.split(":")
    try:
        numbers = tuple(int(text) for text in texts)
    except ValueError:
        raise ShapeError(f"mask {name!r}: what follows a colon are numbers") from None
    makers = {
        "full": lambda: Full(),
        "causal": lambda offset=None: Causal(offset=offset),
        "window": lambda w, right=None, offset=None: (
            Causal(window=w) if right is None else Window(w, right, offset=offset)
        ),
        "context": lambda c=m // 2: Context(c),
        "documents": lambda *d: Documents(d or _parts(n)),
        "causal-documents": lambda *d: Causal() & Documents(d or _parts(n)),
        "prefix": lambda p=m // 4, offset=None: prefix_lm(p, offset=offset),
        "padding": lambda *p: KeyPadding(p or _shorter(m, batch)),
    }
    if kind not in makers:
        raise ShapeError(f"mask {name!r}{did_you_mean(kind, [x.split(':')[0] for x in MASKS])}")
    try:
        mask = makers[kind](*numbers)
    except (TypeError, IndexError):
        known = ", ".join(MASKS)
        raise ShapeError(f"mask {name!r} has not the right numbers; known: {known}") from None
    mask.check(n, m, batch)
    return mask


def sequences_named(mask: str) -> int | None:
    """How many sequences the name of a mask is for, where it says so.

    >>> [sequences_named(name) for name in ("padding:37:20", "padding", "causal")]
    [2, None, None]
    """
    kind, *lengths = mask.split(":")
    return len(lengths) or None if kind == "padding" else None


def _parts(n: int) -> tuple[int, ...]:
    """Uneven documents that fill `n` tokens: about 1/8, 1/2 and the rest."""
    first, second = max(1, n // 8), n // 2
    return tuple(size for size in (first, second, n - first - second) if size)


def _shorter(m: int, batch: int) -> tuple[int, ...]:
    """A length for each sequence of a batch, the first whole, each next one shorter."""
    return tuple(m - m * b // (batch + 1) for b in range(batch))


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Plain softmax attention of whole tensors: (b h n e), (b h n).

    A fully masked row gives 0 and -inf.
    """
    b, h, n, d = q.shape
    k, v = (t.repeat_interleave(h // t.shape[1], dim=1) for t in (k, v))
    index = [torch.arange(size, device=q.device) for size in (b, h, n, k.shape[2])]
    seen = mask.allowed(
        index[0][:, None, None, None], index[1][:, None, None], index[2][:, None], index[3]
    )
    scores = (q @ k.mT * d**-0.5).masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1))
    return weights @ v, lse


def check_rank(layout: Layout, case: Case, device: str = "cpu") -> list[Finding]:
    """Check one bound layout; every rank calls this and gets the same findings.

    fp64 allows `EXACT`; other dtypes twice the error that one device makes on the whole tensors,
    plus one rounding of the largest entry, plus one in fp32 for each part that is merged. Where the
    largest logsumexp L is above 1, that last is a rounding of L: parts are weighed by
    exp(lse - total), and fp32 (fp64 for fp64) knows a logsumexp to eps L.
    """
    whole, grad = _draw(case)
    mask = mask_named(case.mask, case.n, case.m, case.batch)
    want = _reference_results(whole, grad, mask, case.backward)
    whole, grad = [t.to(device) for t in whole], grad.to(device)
    got = _on_layout(layout, case, mask, whole, grad)
    own = [_local(layout, case, t, name) for name, t in want.items()]
    errors = [_error(a, b.to(device), w) for a, b, w in zip(got, own, want.values())]
    worst = _worst(layout, errors)
    allowed = _allowed(layout, case, mask, whole, grad, want)
    return [Finding(*found) for found in zip(want, worst, allowed)]


def attend_once(layout: Layout, case: Case, device: str = "cpu") -> None:
    """The checked call by itself, forward and backward: what a recording is made of."""
    whole, grad = _draw(case)
    mask = mask_named(case.mask, case.n, case.m, case.batch)
    names = zip(("out", "dk", "dv"), whole)
    q, k, v = (_local(layout, case, t.to(device), name).requires_grad_() for name, t in names)
    out = attention(q, k, v, layout, case.axes, mask, length=case.lengths)
    if case.backward:
        out.backward(_local(layout, case, grad.to(device), "out"))


def local_shapes(layout: Layout, case: Case) -> list[tuple[int, ...]]:
    """Shapes of q, k and v of the checked call, as they rest on this rank of a bound layout.

    >>> local_shapes(Layout.single(), Case("tokens", (8,)))
    [(2, 8, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)]
    """
    sides = (case.heads, case.n), (case.kv_heads, case.m), (case.kv_heads, case.m)
    whole = (torch.empty(case.batch, h, n, case.head_dim, device="meta") for h, n in sides)
    parts = (_local(layout, case, t, name) for name, t in zip(("out", "dk", "dv"), whole))
    return [tuple(part.shape) for part in parts]


def _draw(case: Case) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(case.seed)
    shapes = [(case.heads, case.n), (case.kv_heads, case.m), (case.kv_heads, case.m)]
    q, k, v, grad = (
        torch.randn(case.batch, h, n, case.head_dim, dtype=torch.float64, generator=generator)
        for h, n in [*shapes, shapes[0]]
    )
    q, k = q * case.spread, k * case.spread
    return [t.to(case.torch_dtype) for t in (q, k, v)], grad.to(case.torch_dtype)


def _reference_results(whole, grad, mask: Mask, backward: bool) -> dict[str, Tensor]:
    leaves = [t.double().clone().requires_grad_() for t in whole]
    out, lse = reference(*leaves, mask)
    results = {"out": out.detach(), "lse": lse.detach()}
    if backward:
        grads = torch.autograd.grad(out, leaves, grad.double())
        results |= dict(zip(("dq", "dk", "dv"), grads))
    return results


def _on_layout(layout: Layout, case: Case, mask: Mask, whole, grad: Tensor) -> list[Tensor]:
    """What the layout computes on this rank, in the order of `TENSORS`."""
    q, k, v = (_local(layout, case, t, name) for name, t in zip(("out", "dk", "dv"), whole))
    options = {"layout": layout, "axis": case.axes, "mask": mask, "length": case.lengths}
    leaves = [t.clone().requires_grad_(case.backward) for t in (q, k, v)]
    out = attention(*leaves, **options)
    # Asked for by itself: a call that returns the logsumexp also takes a gradient through it.
    _, lse = attention(q, k, v, **options, return_lse=True)
    results = [out.detach(), lse]
    if case.backward:
        results += torch.autograd.grad(out, leaves, _local(layout, case, grad, "out"))
    return results


def _local(layout: Layout, case: Case, whole: Tensor, name: str) -> Tensor:
    """This rank's part of a whole tensor (b h n ...): of the keys' side for dk and dv."""
    keys = name in ("dk", "dv")
    for mesh_dim in layout.batch_dims(case.axes):
        whole = _chunk(layout, whole, 0, mesh_dim)
    for mesh_dim in layout.shard_dims(HEADS):
        whole = _chunk(layout, whole, 1, mesh_dim)
    lengths = (case.m,) if keys and len(case.axes) == 1 else case.length
    whole = whole.unflatten(2, lengths)
    for i, (axis, length) in enumerate(zip(case.axes, lengths)):
        split = layout.key_dims(axis, case.axes) if keys else layout.shard_dims(axis)
        if split:
            index = index_at(layout.mesh, split, layout.coords)
            parts = tuple(layout.mesh[d] for d in split)
            spans = shard_spans(length, parts, layout.order.get(axis, "contiguous"))[index]
            whole = whole.index_select(2 + i, positions(spans, whole.device))
    return whole.flatten(2, 1 + len(lengths))


def _chunk(layout: Layout, whole: Tensor, dim: int, mesh_dim: str) -> Tensor:
    spans = shard_spans(whole.shape[dim], (layout.mesh[mesh_dim],))[layout.coords[mesh_dim]]
    return whole.index_select(dim, positions(spans, whole.device))


def _error(got: Tensor, want: Tensor, whole: Tensor) -> float:
    """Largest difference over the largest finite entry of the whole tensor; inf where kinds differ.

    Kinds: a logsumexp of -inf must be -inf, nothing else may be infinite or NaN.
    """
    if got.shape != want.shape:
        raise ShapeError(f"expected a local tensor of {tuple(want.shape)}, got {tuple(got.shape)}")
    got, want = got.double(), want.double()
    if not torch.equal(got.isneginf(), want.isneginf()) or got.isnan().any():
        return float("inf")
    finite = whole[whole.isfinite()].abs()
    scale = finite.max().item() if finite.numel() else 1.0
    difference = (got - want).masked_fill(want.isneginf(), 0.0).abs()
    return difference.max().item() / (scale or 1.0) if difference.numel() else 0.0


def _worst(layout: Layout, errors: Sequence[float]) -> list[float]:
    rows = [json.loads(t) for t in layout.bound.all_gather_text(json.dumps([*errors])).values()]
    return [max(column) for column in zip(*rows)]


def _allowed(layout: Layout, case: Case, mask: Mask, whole, grad, want) -> list[float]:
    rules = layout.rules(case.axes).items()
    merged = math.prod(layout.mesh[d] for d, rule in rules if rule.role in (Role.QUERY, Role.KEY))
    largest = want["lse"][want["lse"].isfinite()].abs()
    wide = torch.finfo(accumulate_dtype(case.torch_dtype)).eps
    merging = merged * wide * max(1.0, largest.max().item() if largest.numel() else 0.0)
    if case.torch_dtype == torch.float64:
        return [max(EXACT, merging)] * len(want)
    one = _on_layout(Layout.single(), case, mask, whole, grad)
    allowed = []
    for (name, whole_want), got in zip(want.items(), one):
        rounding = wide if name == "lse" else torch.finfo(case.torch_dtype).eps
        error = _error(got, whole_want.to(got.device), whole_want)
        allowed.append(2 * error + rounding + merging)
    return allowed
