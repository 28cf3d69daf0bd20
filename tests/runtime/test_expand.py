"""Latents that travel in the place of keys: `weft.attention(..., expand=...)`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import weft
from weft import Expansion, Layout
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.plan.call import Expanded
from weft.plan.predict import forecast_of, plans_for
from weft.plan.problem import Problem


def error_of(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float(((found - wanted).abs().max() / wanted.abs().max()).detach())


class Sizes(NamedTuple):
    """Heads of queries, of expanded keys and of latents, and all head dims."""

    h: int = 4
    g: int = 4
    latents: int = 1
    d: int = 7
    e: int = 5
    c: int = 9
    r: int = 3
    b: int = 2


class Weights(nn.Module):
    """A projection of latents to keys and values, with a key part that all heads share."""

    def __init__(self, s: Sizes, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.s = s
        self.up = nn.Linear(s.latents * s.c, s.g * (s.d - s.r + s.e), dtype=dtype)
        self.unused = nn.Linear(2, 2, dtype=dtype)

    def forward(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        s = self.s
        both = self.up(c.transpose(1, 2).flatten(2)).unflatten(-1, (s.g, -1)).transpose(1, 2)
        k, v = both.split([s.d - s.r, s.e], -1)
        return torch.cat([k, r[:, :1].expand(-1, s.g, -1, -1)], -1), v


def weights(s: Sizes, dtype: torch.dtype = torch.float64) -> Weights:
    """The same numbers on every rank, drawn apart from other threads."""
    module, draw = Weights(s, dtype), torch.Generator().manual_seed(3)
    for p in module.parameters():
        p.data.copy_(torch.randn(p.shape, generator=draw, dtype=torch.float64))
    return module


def inputs(s: Sizes, n: int) -> list[Tensor]:
    """q, c, r, and the gradients of output and logsumexp."""
    draw = torch.Generator().manual_seed(n)
    shapes = [(s.h, s.d), (s.latents, s.c), (s.latents, s.r), (s.h, s.e)]
    made = [torch.randn(s.b, a, n, x, generator=draw, dtype=torch.float64) for a, x in shapes]
    return [*made, torch.randn(s.b, s.h, n, generator=draw, dtype=torch.float64)]


def results(layout, line_options, full, travel="latents", s=None, dtype=torch.float64):
    """Output, gradients at rest, gradients of the weights, and traffic of one rank."""
    module, mask = weights(s, dtype), line_options.get("mask")
    n = full[0].shape[2]

    def cut(t: Tensor) -> Tensor:
        places = {"tokens": 2, "heads": 1} if t.shape[1] == s.h else {"tokens": 2}
        return layout.shard(t.to(dtype), places).detach().requires_grad_()

    q, c, r, dout, dlse = map(cut, full)
    options = {k: v for k, v in line_options.items() if k != "mask"}
    expand = Expansion(module, travel=travel)
    with weft.traffic() as moved:
        out, lse = weft.attention(
            *(q, c, r, layout, "tokens", mask), length=n, return_lse=True, expand=expand, **options
        )
        seen = torch.isfinite(lse)
        loss = (out * dout).sum() + (torch.where(seen, lse, 0.0) * dlse).sum()
        loss.backward()
    of_weights = [module.up.weight.grad, module.up.bias.grad]
    assert module.unused.weight.grad is None
    return [out.detach(), q.grad, c.grad, r.grad], of_weights, moved


def compared(line, n, s=Sizes(), travel="latents", **options):  # noqa: B008 (a tuple)
    """The largest relative error of a layout against one device, and each rank's traffic."""
    full = inputs(s, n)
    wanted, of_weights, _ = results(Layout.single(), options, full, s=s)

    def rank(layout):
        found, own, moved = results(layout, options, full, travel, s)
        whole = []
        for t in found:
            places = {"tokens": 2, "heads": 1} if t.shape[1] != s.latents else {"tokens": 2}
            whole.append(layout.gather(t, places))
        return whole, own, moved

    ranks = weft.on_threads(Layout.parse(line), rank, timeout=60)
    errors = [error_of(a, b) for whole, _, _ in ranks for a, b in zip(whole, wanted)]
    sums = [sum(own[i] for _, own, _ in ranks) for i in range(2)]
    errors += [error_of(a, b) for a, b in zip(sums, of_weights)]
    return max(errors), [moved for *_, moved in ranks]


def problem(n, s, mask):
    """The sizes that a plan needs."""
    sizes = Expanded(s.g, s.d, s.e, (s.c, s.r), 1)
    made = Problem.of(
        *("tokens", n),
        heads=s.h,
        kv_heads=s.latents,
        head_dim=s.d,
        batch=s.b,
        dtype=torch.float64,
        mask=mask or weft.Full(),
        expanded=sizes,
    )
    return replace(made, return_lse=True)


#: Covering: every strategy, uneven lengths, an empty rank, grouped heads, odd head dims.
CASES = {
    "ring": ("tokens: ring=2", 29, Sizes(), weft.Causal()),
    "zigzag": ("tokens(zigzag): ring=4", 29, Sizes(h=6, g=2), weft.Causal(5)),
    "striped": ("tokens(striped): ring=2", 13, Sizes(c=1), weft.Causal()),
    "gather": ("tokens: gather=3", 13, Sizes(h=4, g=1), None),
    "empty-rank": ("tokens: ring=4", 3, Sizes(), weft.Causal()),
    "tile": ("tokens: tile=2x2", 29, Sizes(d=4), weft.Documents((11, 18))),
    "ulysses": ("tokens: ulysses=2", 13, Sizes(h=6, g=3), weft.Causal()),
    "ulysses-uneven-heads": ("tokens: ulysses=4", 14, Sizes(h=6, g=3), None),
    "ulysses-x-ring": ("tokens: ulysses=2 x ring=2", 29, Sizes(), weft.Causal()),
    "pass-q": ("tokens: pass_q=4", 29, Sizes(), weft.Causal()),
    "burst": ("tokens: burst=4", 29, Sizes(), weft.Causal()),
    "adaptive": ("tokens: adaptive=2", 13, Sizes(), weft.KeyPadding((13, 6))),
    "seen": ("tokens: seen=4", 29, Sizes(), weft.Causal(5)),
    "seen-x-ulysses": ("tokens: ulysses=2 x seen=2", 29, Sizes(), weft.Causal(5)),
    "hierarchical": ("tokens: hierarchical=2x2", 32, Sizes(), weft.Causal()),
}


@pytest.mark.parametrize("case", CASES)
def test_latents_are_exact_and_their_bytes_predicted(case):
    line, n, s, mask = CASES[case]
    error, moved = compared(line, n, s, mask=mask)
    assert error < 1e-11
    layout = Layout.parse(line)
    plans = plans_for(layout, problem(n, s, mask), range(layout.world_size))
    for plan, counted in zip(plans, moved, strict=True):
        both = forecast_of(plan)
        assert counted.bytes == both.forward.traffic.bytes + both.backward.traffic.bytes


def test_keys_travel_where_asked_or_cheaper():
    s = Sizes()
    _, latents = compared("tokens: ring=2", 16, s)
    error, keys = compared("tokens: ring=2", 16, s, "keys")
    assert error < 1e-11
    ratio = (s.c + s.r) / (s.g * (s.d + s.e))
    assert latents[0].bytes == pytest.approx(keys[0].bytes * ratio, rel=1e-9)
    wide = Sizes(c=200)  # more than the keys of all heads
    error, auto = compared("tokens: ring=2", 16, wide, "auto")
    assert error < 1e-11
    assert auto[0].bytes == keys[0].bytes


def test_options_of_a_call_hold_for_latents():
    s = Sizes()
    sinks = torch.linspace(-1, 1, s.h, dtype=torch.float64)
    options = {"softcap": 3.0, "scale": 0.4, "sinks": sinks, "bias": weft.alibi(s.h)}
    assert compared("tokens: tile=2x2", 13, s, mask=weft.Causal(), **options)[0] < 1e-11


def test_heads_at_rest_expand_their_own():
    """Tensor parallel: each rank has a part of the projection and the whole latents."""
    s, n = Sizes(h=4, g=4), 13
    full = inputs(s, n)
    full[4].zero_()  # of the logsumexp
    wanted, (up, _), _ = results(Layout.single(), {}, full, s=s)

    def rank(layout):
        first = 2 * layout.coords["tp"]
        module = weights(s)
        rows = module.up.weight.unflatten(0, (s.g, -1))[first : first + 2].flatten(0, 1)
        lower = module.up.bias.unflatten(0, (s.g, -1))[first : first + 2].flatten()
        own = Weights(s._replace(g=2, h=2))
        own.up.weight.data.copy_(rows)
        own.up.bias.data.copy_(lower)
        q, dout = (layout.shard(full[i], {"tokens": 2, "heads": 1}) for i in (0, 3))
        c, r = (layout.shard(full[i], {"tokens": 2}).requires_grad_() for i in (1, 2))
        expand = Expansion(own, travel="latents")
        out = weft.attention(q, c, r, layout, "tokens", length=n, expand=expand)
        (out * dout).sum().backward()
        whole = layout.gather(out.detach(), {"tokens": 2, "heads": 1})
        return whole, layout.coords["tp"], own.up.weight.grad

    layout = Layout.parse("heads: tp=2; tokens: ring=2")
    ranks = weft.on_threads(layout, rank, timeout=60)
    assert error_of(ranks[0][0], wanted[0]) < 1e-11
    parts = [sum(grad for _, tp, grad in ranks if tp == part) for part in range(2)]
    assert error_of(torch.cat(parts), up) < 1e-11


def test_a_rank_without_tokens_has_zero_gradients():
    full, s = inputs(Sizes(), 3), Sizes()
    ranks = weft.on_threads(
        Layout.parse("tokens: ring=4"),
        lambda layout: results(layout, {"mask": weft.Causal()}, full, s=s)[1][0],
        timeout=60,
    )
    assert not ranks[3].any()
    assert ranks[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_one_device(dtype):
    s, n = Sizes(h=4, g=4, d=16, e=16, c=24, r=8), 64
    full = [t.to(dtype).double() for t in inputs(s, n)]
    exact = weights(s)
    for p in exact.parameters():
        p.data.copy_(p.data.to(dtype))

    def errors(found, wanted):
        return [error_of(a.double(), b) for a, b in zip(found, wanted)]

    def run(layout, kind):
        module = weights(s, kind)
        module.load_state_dict(exact.state_dict())
        q, c, r, dout, _ = (
            layout.shard(t.to(kind), {"tokens": 2}).detach().requires_grad_() for t in full
        )
        expand = Expansion(module, travel="latents")
        out = weft.attention(q, c, r, layout, "tokens", weft.Causal(), length=n, expand=expand)
        (out * dout.detach()).sum().backward()
        whole = [layout.gather(t, {"tokens": 2}) for t in (out.detach(), q.grad, c.grad, r.grad)]
        return whole, module.up.weight.grad

    wanted, up = run(Layout.single(), torch.float64)
    alone, of_alone = run(Layout.single(), dtype)
    ranks = weft.on_threads(Layout.parse("tokens: ring=2"), run, dtype, timeout=60)
    total = sum(part.double() for _, part in ranks)
    found = errors([*ranks[0][0], total], [*wanted, up])
    one = errors([*alone, of_alone], [*wanted, up])
    assert all(a <= 2 * b + torch.finfo(dtype).eps for a, b in zip(found, one)), (found, one)


def test_autocast_is_that_of_the_forward_pass():
    s, n = Sizes(), 16
    full = inputs(s, n)

    def run(layout, travel):
        module = weights(s, torch.float32)
        q, c, r, dout, _ = (layout.shard(t.float(), {"tokens": 2}) for t in full)
        with torch.autocast("cpu", torch.bfloat16):
            expand = Expansion(module, travel=travel)
            out = weft.attention(q, c, r, layout, "tokens", length=n, expand=expand)
        (out * dout).sum().backward()
        return out, module.up.weight.grad

    both = {}
    for travel in ("latents", "keys"):
        ranks = weft.on_threads(Layout.parse("tokens: ring=2"), run, travel, timeout=60)
        both[travel] = torch.cat([out for out, _ in ranks], 2), sum(g for _, g in ranks)
    assert both["latents"][0].dtype == torch.bfloat16
    for a, b in zip(both["latents"], both["keys"]):
        assert error_of(a, b) < 0.05


def test_a_checkpoint_expands_again_with_the_same_gradients():
    s, n = Sizes(), 16
    full = inputs(s, n)

    def run(layout, checkpointed):
        module = weights(s)
        q, c, r, dout, _ = (layout.shard(t, {"tokens": 2}) for t in full)
        expand = Expansion(module, travel="latents")  # which tries a token, the first time

        def layer(q, c, r):
            return weft.attention(2 * q, c, r, layout, "tokens", length=n, expand=expand)

        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(layer, q, c, r, use_reentrant=False)
        else:
            out = layer(q, c, r)
        (out * dout).sum().backward()
        return module.up.weight.grad

    layout = Layout.parse("tokens: ring=2")
    one, other = (weft.on_threads(layout, run, kept, timeout=60) for kept in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(one, other))


def _call(expand, s=Sizes()):  # noqa: B008 (a tuple)
    """A call of eight tokens on two ranks."""
    full = inputs(s, 8)

    def rank(layout):
        q, c, r, *_ = (layout.shard(t, {"tokens": 2}) for t in full)
        weft.attention(q, c, r, layout, "tokens", expand=expand)

    weft.on_threads(Layout.parse("tokens: ring=2"), rank, timeout=30)


def test_what_cannot_be_expanded_again_is_refused():
    s = Sizes()
    module = weights(s)

    def dropped(c, r):
        return module(nn.functional.dropout(c, 0.5), r)

    with pytest.raises(UnsupportedError, match="draws random numbers"):
        _call(Expansion(dropped, module, travel="latents"))
    with pytest.raises(UnsupportedError, match="was not given; name them"):
        _call(Expansion(lambda c, r: module(c, r), travel="latents"))
    with pytest.raises(UnsupportedError, match="parameters have changed"):
        _changed(s)
    with pytest.raises(ShapeError, match="makes keys"):
        _call(Expansion(lambda c, r: c, travel="latents"))
    with pytest.raises(ShapeError, match="in one head"):
        _call(Expansion(weights(Sizes(latents=2)), travel="latents"), Sizes(latents=2))
    with pytest.raises(ShapeError, match="do not fit"):
        _call(Expansion(weights(Sizes(g=3)), travel="latents"))
    with pytest.raises(DeclarationError, match="known are 'auto'"):
        Expansion(module, travel="both")
    with pytest.raises(DeclarationError, match="function of two tensors"):
        Expansion(3)
    with pytest.raises(DeclarationError, match="parameters are tensors"):
        Expansion(module.forward, ["weight"])


def _changed(s):
    """A weight that is stepped between the two passes."""
    full = inputs(s, 8)

    def rank(layout):
        module = weights(s)
        q, c, r, *_ = (layout.shard(t, {"tokens": 2}) for t in full)
        expand = Expansion(module, travel="latents")
        out = weft.attention(q, c, r, layout, "tokens", expand=expand)
        with torch.no_grad():
            module.up.weight.mul_(2)
        out.sum().backward()

    weft.on_threads(Layout.parse("tokens: ring=2"), rank, timeout=30)


def test_latents_without_tokens_keep_their_heads():
    k, v = Expansion(weights(Sizes()))(torch.zeros(2, 1, 0, 9).double(), torch.zeros(2, 1, 0, 3))
    assert (k.shape, v.shape) == ((2, 4, 0, 7), (2, 4, 0, 5))


def test_a_frozen_projection_gets_no_gradient():
    s, full = Sizes(), inputs(Sizes(), 8)

    def rank(layout):
        module = weights(s).requires_grad_(False)
        q, c, r, *_ = (layout.shard(t, {"tokens": 2}) for t in full)
        c.requires_grad_()
        expand = Expansion(module, travel="latents")
        weft.attention(q, c, r, layout, "tokens", expand=expand).sum().backward()
        return module.up.weight.grad, c.grad

    for grad, dc in weft.on_threads(Layout.parse("tokens: ring=2"), rank, timeout=30):
        assert grad is None
        assert dc.any()


@pytest.mark.parametrize("travel", ["keys", "latents", "auto"])
def test_an_empty_rank_wants_the_gradients_of_others(travel) -> None:
    """Where latents alone have any."""
    weight = torch.randn(8, 4, dtype=torch.float64)

    def expand(c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (c @ weight.T).split([4, 4], -1)
        return k + r, v

    def rank(layout: Layout) -> Tensor:
        q, c, r = (torch.ones(1, 1, 1 - layout.rank, 4, dtype=torch.float64) for _ in range(3))
        c.requires_grad_()
        expansion = Expansion(expand, (), travel)
        out = weft.attention(q, c, r, layout, "tokens", length=1, expand=expansion)
        out.sum().backward()
        return c.grad

    first, empty = weft.on_threads(Layout.parse("tokens: ring=2"), rank, timeout=20)
    torch.testing.assert_close(first[0, 0, 0], weight[4:].sum(0))
    assert empty.shape == (1, 1, 0, 4)
