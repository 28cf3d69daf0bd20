"""Four ranks round no worse than one: errors against fp64, relative to the one-device kernel's.

Inputs are numbers that the dtype holds, so all error is the computation's own. Partial results
travel in the input's dtype and are merged once in fp32: each entry is rounded once more than on one
device, so errors may grow by about a factor of sqrt(2); the limit is 2. They are compared as root
mean squares, since the largest of some thousand errors is luck.
"""

from __future__ import annotations

import dataclasses

import exact
import pytest
import torch
from covering import covering
from torch import Tensor

import weft
from weft.bias import alibi
from weft.comm import Transport, run_threads
from weft.kernels import TileView, named
from weft.layout import Layout
from weft.testing.cases import Case
from weft.testing.check import Comparison, check_rank, gradient_rounding
from weft.testing.reference import reference

LAYOUTS = ["ring-4", "ring-zigzag-4", "pass-q-4", "burst-4", "tile-2x2", "ulysses-4"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = {
    "full": exact.Case(),
    "causal": exact.Case(mask=weft.Causal()),
    "window, sinks": exact.Case(mask=weft.Causal(window=60), sinks=True),
}
SHAPE = {"lengths": exact.tokens(250), "heads": 4, "kv_heads": 4, "dim": 32, "batch": 1, "seed": 2}


def squares(layout: Layout, case: exact.Case, dtype: torch.dtype) -> dict[str, float]:
    """Sum of squared errors of every tensor over all ranks."""
    whole = exact.problem(case, dtype)

    def rank(transport: Transport) -> dict[str, float]:
        pairs = exact.attend(layout.on(transport), case, whole, dtype)
        return {n: (f.double() - w).square().sum().item() for n, (f, w) in pairs.items()}

    ranks = run_threads(layout.mesh, rank, timeout=60.0)
    return {name: sum(r[name] for r in ranks) for name in ranks[0] if name != "dsinks"}


@pytest.fixture(scope="module")
def one_device():
    """Squared errors on one device, by case and dtype."""
    return {
        (name, dtype): squares(Layout.single(), case.with_(**SHAPE), dtype)
        for name, case in CASES.items()
        for dtype in DTYPES
    }


@covering("layout case dtype", LAYOUTS, CASES, DTYPES)
def test_four_ranks_are_within_twice_the_kernels_own_error(
    one_device, layout: str, case: str, dtype: torch.dtype
) -> None:
    found = squares(Layout.load(layout), CASES[case].with_(**SHAPE), dtype)
    own = one_device[case, dtype]
    ratios = {name: (value / own[name]) ** 0.5 for name, value in found.items()}
    assert max(ratios.values()) <= 2.0, ratios


#: Layouts of 16 ranks, with what of a call all of them hold, and so count.
SIXTEEN = {
    "ring=16": (),
    "pass_q=16": (),
    "kv_parallel=16": ("out", "lse", "dq"),
    "shared_context=16": ("dk", "dv"),
}


@pytest.mark.parametrize("line", SIXTEEN)
def test_sixteen_parts_are_rounded_no_oftener_than_two(line: str) -> None:
    """Added one after another in bf16 they would be off by three roundings, not by one."""
    layout, case = Layout.parse(f"tokens: {line}"), CASES["full"].with_(**SHAPE)
    found, own = (squares(on, case, torch.bfloat16) for on in (layout, Layout.single()))
    for name in SIXTEEN[line]:
        found[name] /= 16
    ratios = {name: (value / own[name]) ** 0.5 for name, value in found.items()}
    assert ratios.pop("lse") <= 2.0  # of fp32
    assert max(ratios.values()) <= 1.5, ratios


def rectangle(dtype: torch.dtype) -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 64, 32, generator=make).to(dtype) for _ in range(4)]


@pytest.mark.parametrize("kernel", ["cpu-flash", "math", "flex"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_biases_are_not_rounded_to_half_precision(dtype: torch.dtype, kernel: str) -> None:
    """-200.3 in bf16 is -200: as a logit that is a factor of 1.35 in a probability."""
    q, k, v, dout = rectangle(dtype)
    i = torch.arange(64)
    bias = (-1.37 * (i[:, None] - i).abs() - 200.3).expand(1, 2, 64, 64)
    wide, exactly = [t.double() for t in (q, k, v, dout)], TileView(0.18, bias=bias.double())
    out, lse = named("math").forward(*wide[:3], exactly)
    delta = (wide[3] * out).sum(-1)
    wanted = named("math").backward((wide[3], *wide[:3], None, lse, delta), exactly)[:3]
    view = TileView(0.18, bias=bias)
    found = named(kernel).forward(q, k, v, view)
    torch.testing.assert_close(found[1].double(), lse, rtol=0, atol=1e-3)
    grads = named(kernel).backward((dout, q, k, v, None, lse.float(), delta.float()), view)
    for mine, right in zip((found[0], *grads[:3]), (out, *wanted)):
        gap = (mine.double() - right).abs().max() / right.abs().max()
        assert gap <= 2 * torch.finfo(dtype).eps, gap


def test_positional_biases_keep_their_precision_on_a_ring() -> None:
    """The same through `weft.attention`, against one device in fp64."""
    layout, dims = Layout.load("ring-2"), {"batch": 0, "heads": 1, "tokens": 2}
    bias = weft.Bias(lambda b, h, q, k: alibi(2).fn(b, h, q, k) - 200.3)
    q, k, v, _ = rectangle(torch.bfloat16)
    wide = [t.double() for t in (q, k, v)]
    wanted = weft.attention(*wide, Layout.single(), "tokens", bias=bias)

    def rank(transport: Transport) -> float:
        on = layout.on(transport)
        mine = (on.shard(t, dims) for t in (q, k, v))
        out = weft.attention(*mine, on, "tokens", bias=bias)
        return (out.double() - on.shard(wanted, dims)).abs().max().item()

    limit = 2 * torch.finfo(torch.bfloat16).eps * wanted.abs().max().item()
    assert max(run_threads(layout.mesh, rank)) <= limit


# -- large scores ---------------------------------------------------------------------------------


def _findings(line: str, case: Case) -> list[Comparison]:
    layout = Layout.parse(f"tokens: {line}")
    return run_threads(layout.mesh, lambda t: check_rank(layout.on(t), case))[0]


@pytest.mark.few(7)
@pytest.mark.parametrize("line", ["ring=4", "pass_q=4", "tile=2x2", "ulysses=4"])
@pytest.mark.parametrize(
    ("dtype", "spread"),
    [("float64", 30), ("float32", 10), ("float32", 30), ("float16", 50), ("bfloat16", 100)],
)
def test_the_promise_holds_where_scores_are_large(line, dtype, spread):
    for seed in (0, 1, 2, 2000):  # 2000: a row whose weight is shared by keys of two ranks
        sizes = {"batch": 1, "heads": 4, "kv_heads": 4, "dim": 32}
        case = Case("", 64, **sizes, dtype=getattr(torch, dtype), spread=spread, seed=seed)
        for found in _findings(line, case):
            assert found.error <= found.allowed, (seed, found)


@pytest.mark.parametrize(("dtype", "spread"), [(torch.float16, 50), (torch.bfloat16, 100)])
def test_surrogate_outputs_keep_the_error_of_peaked_rows(dtype, spread):
    """Where all weight is on one key a gradient is what is left of two equal numbers."""

    def gradients(line: str, seed: int) -> torch.Tensor:
        make = torch.Generator().manual_seed(seed)
        q, k, v, dout = (torch.randn(1, 2, 48, 64, generator=make) for _ in range(4))
        whole = [(q * spread).to(dtype), (k * spread).to(dtype), v.to(dtype)]
        layout = Layout.parse(f"tokens: {line}")

        def rank(bound: Layout) -> torch.Tensor:
            mine = [bound.shard(t, {"tokens": 2}).requires_grad_() for t in whole]
            out = weft.attention(*mine, bound, "tokens")
            out.backward(bound.shard(dout.to(dtype), {"tokens": 2}))
            return bound.gather(mine[0].grad, {"tokens": 2}).double()

        return weft.on_threads(layout, rank)[0]

    for seed in range(3):
        with_output = gradients("ring=4", seed)
        without = gradients("pass_q=4", seed)
        # fp32 rounds |dout| |v| = 64 at 78 entries' root; times spread * |k| / sqrt(64)
        assert (without - with_output).norm() <= 0.01


@pytest.mark.parametrize(
    ("line", "dtype", "spread", "dim"),
    [
        ("pass_q=2", "float16", 90, 16),
        ("pass_q=4", "bfloat16", 80, 16),
        ("tile=2x2", "bfloat16", 300, 40),
        ("ring=8", "float32", 30, 64),
        ("pass_q=2", "float64", 30, 64),
    ],
)
def test_gradients_of_saturated_rows_are_exact_to_their_rounding(line, dtype, spread, dim):
    """On one device with 16 head dims both sums of `ds` are added in one order, and cancel to 0."""
    for seed in (2, 7):
        sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "dim": dim}
        case = Case("", 64, **sizes, dtype=getattr(torch, dtype), spread=spread, seed=seed)
        for mask in (weft.Full(), weft.Causal()):
            for found in _findings(line, dataclasses.replace(case, mask=mask)):
                assert found.error <= found.allowed, (seed, mask, found)


@pytest.mark.parametrize("mask", [weft.Full(), weft.Causal()])
def test_ordinary_gradients_are_allowed_a_few_roundings_more(mask):
    case = Case("", 64, mask=mask, dtype=torch.float32, dim=64)
    full = case.draw()
    for name, bound in gradient_rounding(case, full).items():
        assert bound <= 200 * torch.finfo(torch.float32).eps * case.wanted(full)[name].abs().max()


def test_the_reference_of_large_scores_is_a_softmax():
    """exp(score - lse) would be off by a rounding of lse: 1e-13 at 2,000, on one key's weight."""
    q, k, v = (torch.tensor(x, dtype=torch.float64) for x in ([2000.1], [1.0, 0.5], [1.0, 3.0]))
    out, _ = reference(q.view(1, 1, 1, 1), k.view(1, 1, 2, 1), v.view(1, 1, 2, 1), scale=1.0)
    assert out.item() == 1.0
