"""Routed attention on a mesh against the dense reference: outputs, choices and every gradient."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import exact
import torch
from torch import Tensor

import weft
from weft.comm import run_threads
from weft.declare.routing import Routing
from weft.layout import Layout
from weft_models.routing.attention import routed_attention
from weft_models.routing.check import block_positions
from weft_models.routing.reference import routed_reference
from weft_models.routing.router import Router

#: A trained router: its weights are far from uniform.
STD = 0.5


def layout_of(mesh: dict[str, int], routes: dict[str, str], **rest) -> Layout:
    """`routes`: mesh dim -> strategy, for the mesh dims that split the tokens."""
    shard = {"tokens": list(routes), **rest.pop("shard", {})}
    attend = {"tokens": [{"strategy": s, "on": d} for d, s in routes.items()]}
    return Layout.from_dict({"mesh": mesh, "shard": shard, "attend": attend, **rest})


@dataclass(frozen=True)
class Case:
    """One call. `std` scales the key projection, 0 is an untrained router."""

    n: int = 16
    m: int | None = None
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    dim: int = 4
    value_dim: int | None = None
    mask: weft.Mask = field(default_factory=weft.Full)
    routing: Routing = field(default_factory=lambda: Routing(top_k=1))
    std: float = STD
    scale: float | None = None
    seed: int = 0

    def with_(self, **changes) -> Case:
        """The same with some fields changed; unknown names change the routing."""
        own = {k: v for k, v in changes.items() if k in self.__dataclass_fields__}
        rest = {k: v for k, v in changes.items() if k not in own}
        if rest:
            own["routing"] = self.routing.model_copy(update=rest)
        return replace(self, **own)

    @property
    def exact_case(self) -> exact.Case:
        m = self.n if self.m is None else self.m
        return exact.Case(
            lengths=((self.n, m),), batch=self.batch, heads=self.heads, kv_heads=self.kv_heads
        )


NAMES = ("out", "dq", "dk", "dv", "query weight", "key weight")


@dataclass(frozen=True)
class Whole:
    """Full tensors of a case."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    query_weight: Tensor
    key_weight: Tensor

    @classmethod
    def draw(cls, case: Case) -> Whole:
        make = torch.Generator().manual_seed(case.seed)
        e = case.dim if case.value_dim is None else case.value_dim
        m = case.n if case.m is None else case.m
        s = case.routing.summary_dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=make)

        return cls(
            normal(case.batch, case.heads, case.n, case.dim),
            normal(case.batch, case.kv_heads, m, case.dim),
            normal(case.batch, case.kv_heads, m, e),
            normal(case.batch, case.heads, case.n, e),
            normal(case.heads, s, 4 * case.dim),
            case.std * normal(case.kv_heads, s, 4 * case.dim),
        )


def reference(layout: Layout, case: Case, whole: Whole, blocks: int):
    """What one device makes of the case: tensors by name, and the choices."""
    tensors = (whole.q, whole.k, whole.v, whole.query_weight, whole.key_weight)
    leaves = [t.clone().requires_grad_() for t in tensors]
    m = case.n if case.m is None else case.m
    out, weights, chosen = routed_reference(
        *leaves,
        block_positions(layout, "tokens", case.n, blocks),
        block_positions(layout, "tokens", m, blocks),
        top_k=case.routing.top_k,
        mask=case.mask,
        per_head=case.routing.per_head,
        temperature=case.routing.temperature,
        strict=case.routing.strict,
        fan_out_cap=case.routing.fan_out_cap,
        scale=case.scale,
    )
    (out * whole.dout).sum().backward()
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
    return dict(zip(NAMES, (out.detach(), *grads))), weights.detach(), chosen


def make_router(layout: Layout, case: Case, whole: Whole, dtype=torch.float64) -> Router:
    """The case's router as the layout holds it."""
    s = case.routing.summary_dim
    made = Router(case.dim, case.heads, case.kv_heads, s, layout, dtype=dtype)
    with torch.no_grad():
        for weight, full in ((made.query, whole.query_weight), (made.key, whole.key_weight)):
            weight.weight.copy_(layout.shard(full, {"heads": 0}).flatten(0, 1))
    return made


def attend(layout: Layout, case: Case, whole: Whole, dtype=torch.float64, **options):
    """The case on this rank: found tensors by name, and how it was routed."""
    coords, plain = layout.coords, case.exact_case
    sides = ((whole.q, "query"), (whole.k, "key"), (whole.v, "key"))
    leaves = [
        exact.cut(layout, plain, t, side, coords).to(dtype).clone().requires_grad_()
        for t, side in sides
    ]
    router = make_router(layout, case, whole, dtype)
    m = case.n if case.m is None else case.m
    out, how = routed_attention(
        *leaves,
        router,
        layout,
        "tokens",
        case.routing,
        case.mask,
        case.scale,
        (case.n, m),
        **options,
    )
    dout = exact.cut(layout, plain, whole.dout, "query", coords).to(dtype)
    (out * dout).sum().backward()
    layout.sync_gradients(router)
    found = (
        out.detach(),
        *(t.grad for t in leaves),
        router.query.weight.grad,
        router.key.weight.grad,
    )
    return dict(zip(NAMES, found)), how


def errors(layout: Layout, case: Case, dtype=torch.float64) -> dict[str, float]:
    """Largest relative error of every tensor over all ranks; infinite if a choice differs."""
    whole = Whole.draw(case)
    ranks = 1
    for d, rule in layout.rules("tokens").items():
        ranks *= layout.mesh[d] if rule.top_k else 1
    blocks = case.routing.chunks // ranks if case.routing.chunks else case.routing.blocks
    wanted, weights, chosen = reference(layout, case, whole, blocks)

    def rank(transport) -> dict[str, float]:
        mine = layout.on(transport)
        found, how = attend(mine, case, whole, dtype)
        return compare(mine, case, found, how, wanted, weights, chosen)

    ranks = run_threads(layout.mesh, rank, timeout=20.0)
    return {name: max(r[name] for r in ranks) for name in ranks[0]}


def compare(layout: Layout, case: Case, found, how, wanted, weights, chosen) -> dict[str, float]:
    """Relative errors of this rank's tensors."""
    plain, coords = case.exact_case, layout.coords
    result = {}
    for name, value in found.items():
        full = wanted[name]
        if name.endswith("weight"):
            part = layout.shard(full, {"heads": 0}).flatten(0, 1)
        else:
            side = "query" if name in ("out", "dq") else "key"
            part = exact.cut(layout, plain, full, side, coords)
        result[name] = exact.error(value, part, full)
    if how.chosen.shape == chosen.shape:  # else this rank has some of the samples or heads
        result["weights"] = exact.error(how.weights, weights, weights)
        result["choices"] = 0.0 if torch.equal(how.chosen, chosen) else float("inf")
    return result
