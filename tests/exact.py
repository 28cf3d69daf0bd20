"""One attention call on a layout against the reference: outputs, logsumexp and every gradient.

The reference, the shards and the measure of errors are those of `weft check`, in `weft.testing`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import reference
import strides
import torch
from torch import Tensor
from torch.distributed.tensor import Shard

import weft
from weft.comm import run_threads
from weft.declare import catalog
from weft.layout import Layout
from weft.plan.order import chunk_sizes
from weft.testing.cases import shard
from weft.testing.reference import relative_error

#: Gradients that nothing reaches are rounding errors only: the scale is 1e-3 at least.
error = functools.partial(relative_error, smallest=1e-3)
BIAS = weft.Bias(lambda *indices: reference.slope(*(i.double() for i in indices)))
TENSORS = ("out", "lse", "dq", "dk", "dv", "dsinks")


@dataclass(frozen=True)
class Case:
    """One call: global sizes, and the options of `weft.attention`.

    `lengths` has (queries, keys) per attended axis.
    """

    axes: tuple[str, ...] = ("tokens",)
    lengths: tuple[tuple[int, int], ...] = ((13, 13),)
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    dim: int = 4
    value_dim: int | None = None
    mask: weft.Mask = field(default_factory=weft.Full)
    scale: float | None = None
    softcap: float | None = None
    bias: bool = False
    sinks: bool = False
    lse_gradient: bool = False
    #: how q, k, v and the gradient of the output lie in memory; see `strides`
    strides: tuple[str, str, str, str] = ("contiguous",) * 4
    seed: int = 0

    def with_(self, **changes) -> Case:
        """The same call with some fields changed."""
        return replace(self, **changes)

    @property
    def n(self) -> int:
        return math.prod(n for n, _ in self.lengths)

    @property
    def m(self) -> int:
        return math.prod(m for _, m in self.lengths)


def one_per_combination() -> list[tuple[str, str]]:
    """(shipped layout, axis), one per combination of rules: that with the most ranks.

    Learned routing chooses what to see, and has tests of its own.
    """
    chosen: dict[tuple, tuple[str, str]] = {}
    ranks: dict[tuple, int] = {}
    for name in catalog.names("layouts"):
        layout = Layout.load(name)
        for axis in layout.attend:
            rules = layout.rules(axis)
            combination = tuple(rule for d, rule in rules.items() if layout.mesh[d] > 1)
            if any(rule.top_k for rule in combination):
                continue
            if layout.world_size > ranks.get(combination, 0):
                chosen[combination], ranks[combination] = (name, axis), layout.world_size
    return list(chosen.values())


@dataclass(frozen=True)
class Problem:
    """Full tensors of a case and what the reference makes of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor
    dout: Tensor
    dlse: Tensor
    wanted: dict[str, Tensor]


def tokens(n: int, m: int | None = None) -> tuple[tuple[int, int], ...]:
    """`lengths` of one axis."""
    return ((n, n if m is None else m),)


def problem(case: Case, dtype: torch.dtype = torch.float64) -> Problem:
    """Random tensors that `dtype` can hold, and the reference's results from them in fp64."""
    make = torch.Generator().manual_seed(case.seed)
    e = case.dim if case.value_dim is None else case.value_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=make).to(dtype).double()

    q = draw(case.batch, case.heads, case.n, case.dim)
    k = draw(case.batch, case.kv_heads, case.m, case.dim)
    v = draw(case.batch, case.kv_heads, case.m, e)
    sinks, dout, dlse = draw(case.heads), draw(*q.shape[:3], e), draw(*q.shape[:3])
    q, k, v, dout = map(strides.alike, (q, k, v, dout), case.strides)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    out, lse = reference.attention(
        *leaves[:3],
        case.mask,
        case.scale,
        case.softcap,
        leaves[3] if case.sinks else None,
        bias=reference.dense_slope(*q.shape[:3], case.m) if case.bias else None,
    )
    loss(out, dout, lse, dlse if case.lse_gradient else None).backward()
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
    wanted = dict(zip(TENSORS, (out.detach(), lse.detach(), *grads)))
    return Problem(q, k, v, sinks, dout, dlse, wanted)


def loss(out: Tensor, dout: Tensor, lse: Tensor | None, dlse: Tensor | None) -> Tensor:
    """A scalar whose gradient is `dout` and, where rows see anything, `dlse`."""
    total = (out * dout).sum()
    if lse is not None and dlse is not None:
        total = total + (lse.masked_fill(lse.isneginf(), 0.0) * dlse).sum()
    return total


def cut(layout: Layout, case: Case, x: Tensor, side: str, coords: Mapping[str, int]) -> Tensor:
    """What the rank at `coords` holds of a whole (b, heads, tokens, ...) tensor at rest."""
    return shard(layout, case.axes, case.lengths, x, side, coords)


def attend(
    layout: Layout, case: Case, whole: Problem, dtype: torch.dtype = torch.float64
) -> dict[str, tuple[Tensor, Tensor]]:
    """Run the case on this rank's share: name -> (found, wanted).

    Also checks that the inputs are left as they were.
    """
    coords = layout.coords
    mine = [
        cut(layout, case, t, side, coords).to(dtype)
        for t, side in ((whole.q, "query"), (whole.k, "key"), (whole.v, "key"))
    ]
    sinks = _cut_heads(layout, case, whole.sinks, coords).clone().requires_grad_()
    laid = [strides.lay(t, name) for t, name in zip(mine, case.strides)]
    leaves = [t.detach().requires_grad_() for t in laid]
    want_lse = case.lse_gradient or case.seed % 2 == 0
    found = weft.attention(
        *leaves,
        layout,
        case.axes,
        case.mask,
        case.scale,
        dict(zip(case.axes, case.lengths)),
        want_lse,
        softcap=case.softcap,
        bias=BIAS if case.bias else None,
        sinks=sinks if case.sinks else None,
    )
    out, lse = found if want_lse else (found, None)
    dout = cut(layout, case, whole.dout, "query", coords).to(dtype)
    dout = strides.lay(dout, case.strides[3])
    dlse = cut(layout, case, whole.dlse, "query", coords) if case.lse_gradient else None
    given, grads = (out,), (dout,)
    if dlse is not None:
        given, grads = (out, lse), (dout, dlse.masked_fill(lse.isneginf(), 0.0).to(lse.dtype))
    torch.autograd.backward(given, grads)
    for name, leaf, before in zip("qkv", leaves, mine):
        assert torch.equal(leaf, before), f"{name} was modified"
    results = {"out": out, "lse": lse, "dq": leaves[0].grad, "dk": leaves[1].grad}
    results |= {"dv": leaves[2].grad}
    pairs = {}
    for name, value in results.items():
        if value is not None:
            side = "query" if name in ("out", "lse", "dq") else "key"
            pairs[name] = (value.detach(), cut(layout, case, whole.wanted[name], side, coords))
    if case.sinks:
        local = cut(layout, case, _sink_gradients(case, whole), "query", coords).sum((0, 2))
        pairs["dsinks"] = (sinks.grad, local)
    return pairs


def _cut_heads(layout: Layout, case: Case, sinks: Tensor, coords: Mapping[str, int]) -> Tensor:
    rules = layout.rules(case.axes)
    for mesh_dim, size in layout.mesh.items():
        if rules[mesh_dim].query.rest == Shard(1):
            sinks = sinks.split(chunk_sizes(len(sinks), size))[coords[mesh_dim]]
    return sinks


def _sink_gradients(case: Case, whole: Problem) -> Tensor:
    """d loss / d sink by row: (b h n). dlse p_sink - p_sink (dout . out), p_sink = exp(s - lse)."""
    share = torch.exp(whole.sinks[:, None] - whole.wanted["lse"])
    delta = (whole.dout * whole.wanted["out"]).sum(-1)
    return share * ((whole.dlse if case.lse_gradient else 0.0) - delta)


def errors(layout: Layout, case: Case, dtype: torch.dtype = torch.float64) -> dict[str, float]:
    """Largest relative error of every tensor over all ranks, the ranks being threads."""
    whole = problem(case)

    def rank(transport) -> dict[str, float]:
        pairs = attend(layout.on(transport), case, whole, dtype)
        return {name: error(*pair, whole.wanted[name]) for name, pair in pairs.items()}

    ranks = run_threads(layout.mesh, rank, timeout=20.0)
    return {name: max(r[name] for r in ranks) for name in ranks[0]}


def assert_exact(layout: Layout, case: Case, limit: float = 1e-11) -> None:
    """Every error at most `limit`."""
    found = errors(layout, case)
    wrong = {name: f"{value:.1e}" for name, value in found.items() if not value <= limit}
    assert not wrong, f"{layout.name} {dict(layout.mesh)} {case}: {wrong}"
