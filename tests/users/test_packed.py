"""Packed documents in one kernel call: what is grouped, what the kernel is asked, exact results."""

from __future__ import annotations

import itertools
import random

import flash_formula
import pytest
import torch
from exact import Case, assert_exact, tokens
from flash_formula import BACKWARD, FORWARD

import weft
from weft import Bias, Documents, attention
from weft.comm import run_threads
from weft.layout import Layout
from weft.masks import Causal, FirstKeys, Full
from weft.plan.order import Span
from weft.plan.tiles import (
    MAX_PACKED_SPANS,
    MAX_SPANS,
    Group,
    KernelCall,
    Kind,
    grouped,
    tile_calls,
)

LENGTHS = (5, 1, 9, 3, 2, 12, 7, 1)  # 40 tokens


# -- groups ---------------------------------------------------------------------------------------


def _random_calls(draw: random.Random) -> tuple[KernelCall, ...]:
    calls = []
    for _ in range(draw.randint(1, 12)):
        q0, k0, n = draw.randint(0, 30), draw.randint(0, 30), draw.randint(1, 6)
        kind = draw.choice(list(Kind))
        m = n if kind is Kind.CAUSAL else draw.randint(1, 6)
        calls.append(KernelCall(q0, q0 + n, k0, k0 + m, kind))
    return tuple(calls)


def _rectangles(calls) -> list[tuple]:
    """What is computed, whatever it is called: one score is full and causal."""
    return sorted((c.q0, c.q1, c.k0, c.k1, c.kind if c.entries > 1 else "point") for c in calls)


@pytest.mark.parametrize("seed", range(20))
def test_group_of_one_kind_and_shares_no_row_or_column(seed):
    draw = random.Random(seed)
    for _ in range(30):
        calls = _random_calls(draw)
        groups = grouped(calls)
        assert _rectangles(c for g in groups for c in g.calls) == _rectangles(calls)
        for group in groups:
            assert {c.kind for c in group.calls} == {group.kind}
            assert len(group.calls) == 1 or group.kind is not Kind.MASKED
            for a, b in itertools.combinations(group.calls, 2):
                assert a.q1 <= b.q0 or b.q1 <= a.q0
                assert a.k1 <= b.k0 or b.k1 <= a.k0


@pytest.mark.parametrize(
    ("calls", "rows", "columns", "varlen_segments"),
    [
        ([(0, 2, 0, 2), (2, 5, 2, 5)], ((0, 5),), ((0, 5),), ((2, 2), (3, 3))),
        ([(0, 2, 4, 9), (3, 5, 0, 4)], ((0, 2), (3, 5)), ((4, 9), (0, 4)), ((2, 5), (2, 4))),
        ([(1, 4, 2, 3)], ((1, 4),), ((2, 3),), None),
    ],
)
def test_ranges_of_a_group_are_few(calls, rows, columns, varlen_segments):
    group = Group(tuple(KernelCall(*c, Kind.FULL) for c in calls))
    assert (group.rows, group.columns, group.varlen_segments) == (rows, columns, varlen_segments)


def test_calls_that_share_rows_are_not_grouped_without_end():
    calls = tuple(KernelCall(0, 2, k, k + 1, Kind.FULL) for k in range(5))
    assert [group.calls for group in grouped(calls, most=5)] == [(call,) for call in calls]
    assert grouped(calls, most=4) is None


def test_many_parts_that_see_many_others_take_a_mask():
    """500 documents and all that went before: 125,000 pairs of parts."""
    mask, whole = Documents((2,) * 500) | Causal(), (Span(0, 1000),)
    calls = tile_calls(mask, whole, whole, row_block=100, most=MAX_PACKED_SPANS)
    assert [(c.q0, c.kind) for c in calls] == [(q0, Kind.MASKED) for q0 in range(0, 1000, 100)]


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


# -- attention ------------------------------------------------------------------------------------


@pytest.fixture
def package(monkeypatch):
    """A kernel that packs in use for all plain calls on the CPU."""
    flash_formula.prefer_on_cpu(monkeypatch)
    yield flash_formula.install(monkeypatch)
    monkeypatch.undo()
    weft.clear_caches()


LAYOUTS = {
    "one rank": Layout.single(),
    "ring": Layout.parse("tokens: ring=3"),
    "zigzag": Layout.parse("tokens(zigzag): ring=2"),
    "pass-Q": Layout.parse("tokens: pass_q=2"),
    "gather": Layout.parse("tokens: gather=3"),
    "tile": Layout.load("tile-2x2"),
    "ulysses x ring": Layout.parse("tokens: ulysses=2 x ring=2"),
}
MASKS = {"full": Documents(LENGTHS), "causal": Documents(LENGTHS) & Causal()}


@pytest.mark.few(10)
@pytest.mark.parametrize("lse_gradient", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_documents_are_exact(package, layout, mask, lse_gradient):
    case = Case(lengths=tokens(40), dim=8, mask=mask, lse_gradient=lse_gradient, seed=1)
    assert_exact(layout, case)
    assert max(package.calls[FORWARD]) > 2  # some calls were packed
    assert max(package.calls[BACKWARD]) > 2


def test_other_masks_are_exact_too(package):
    for mask in (Causal(), Full(), FirstKeys(17), Documents(LENGTHS) & Causal(4), MASKS["full"]):
        assert_exact(Layout.parse("tokens(striped): ring=2"), Case(lengths=tokens(40), mask=mask))


@pytest.mark.few(2)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("lengths", [LENGTHS, (1,) * (MAX_SPANS + 1), (3, 2) * 300], ids=len)
def test_one_call_does_all_documents_of_a_chunk(package, mask, lengths):
    """Also where there are more of them than calls would be made."""
    mask = Documents(lengths) & Causal() if mask is MASKS["causal"] else Documents(lengths)
    q, k, v = (draw(2, 2, sum(lengths), 8).requires_grad_() for _ in range(3))
    out = attention(q, k, v, Layout.single(), "tokens", mask)
    out.sum().backward()
    assert package.calls == {FORWARD: [2 * len(lengths)], BACKWARD: [2 * len(lengths)]}


def test_a_ring_makes_one_call_of_each_kind_per_block(package):
    """Chunks of 20: the fifth document has 2 tokens in the first and 10 in the second."""
    mask, layout = Documents((5, 1, 9, 3, 12, 9, 1)) & Causal(), Layout.parse("tokens: ring=2")
    q, k, v = (draw(1, 2, 40, 8) for _ in range(3))

    def rank(transport):
        bound = layout.on(transport)
        local = [bound.shard(t, {"tokens": 2}) for t in (q, k, v)]
        return attention(*local, bound, "tokens", mask)

    run_threads(layout.mesh, rank)
    assert sorted(package.calls[FORWARD]) == [1, 3, 5]  # causal: 5 and 3; full: 10 by 2 scores


def test_a_bias_is_still_cut_into_row_blocks(package):
    q, k, v = (draw(1, 2, 40, 8) for _ in range(3))
    bias = Bias(lambda b, h, q, k: 0.0 * (q - k))
    out = attention(q, k, v, Layout.single(), "tokens", MASKS["causal"], bias=bias)
    plain = attention(q, k, v, Layout.single(), "tokens", MASKS["causal"])
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-12)
    assert package.calls[FORWARD] == [len(LENGTHS)]


# -- documents that differ by row -----------------------------------------------------------------

ROWS = ((5, 8, 11), (24,), (1, 22, 1), (1, 22, 1))
BY_ROW = {
    "documents": Documents(ROWS),
    "causal": Documents(ROWS) & Causal(),
    "window": Documents(ROWS) & Causal(3),
    "either": Documents(ROWS) | Causal(),
    "padded": Documents(ROWS) & weft.KeyPadding((24, 20, 3, 24)),
}
BY_ROW_LAYOUTS = LAYOUTS | {
    "dp x ring": Layout.parse("batch: dp=2; tokens(zigzag): ring=2"),
    "heads x striped ring": Layout.parse("heads: tp=2; tokens(striped): ring=2"),
    "burst": Layout.parse("tokens: burst=3"),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("mask", BY_ROW.values(), ids=BY_ROW)
@pytest.mark.parametrize("layout", BY_ROW_LAYOUTS.values(), ids=BY_ROW_LAYOUTS)
def test_rows_packed_differently_are_exact(layout, mask):
    assert_exact(layout, Case(lengths=tokens(24), batch=4, mask=mask, lse_gradient=True))
    assert_exact(layout, Case(lengths=tokens(24), batch=4, mask=mask, bias=True))


def test_rows_packed_differently_are_exact_by_kernels_that_pack(package):
    """Rows that follow each other with one packing are one call: 2 rows of 3 documents."""
    assert_exact(Layout.single(), Case(lengths=tokens(24), batch=4, mask=BY_ROW["causal"], dim=8))
    assert sorted(package.calls[FORWARD]) == [1, 3, 6]


@pytest.mark.parametrize("many", [False, True])
def test_flex_sees_documents_by_row(many, monkeypatch):
    """Run by run; or, where that would be too many, by a table of document numbers."""
    monkeypatch.setattr("weft.plan.plan.MOST_RUNS", 1 if many else 64)
    weft.clear_caches()
    q, k, v = (draw(4, 2, 24, 16) for _ in range(3))
    found = attention(q, k, v, Layout.single(), "tokens", BY_ROW["causal"], kernel="flex")
    weft.clear_caches()
    monkeypatch.undo()
    by_row = zip(q.split(1), k.split(1), v.split(1), ROWS)
    rows = [
        attention(*qkv, Layout.single(), "tokens", Documents(row) & Causal())
        for *qkv, row in by_row
    ]
    torch.testing.assert_close(found, torch.cat(rows), rtol=0, atol=1e-6)


def test_a_learned_bias_has_its_gradient_by_row():
    q, k, v, dout = (draw(4, 2, 24, 8) for _ in range(4))
    bias = draw(4, 1, 24, 24).requires_grad_()
    attention(q, k, v, Layout.single(), "tokens", BY_ROW["causal"], bias=bias).backward(dout)
    wanted = bias.detach().clone().requires_grad_()
    seen = torch.stack([torch.block_diag(*(torch.ones(n, n) for n in row)) for row in ROWS])
    hidden = ~(seen.bool() & torch.ones(24, 24).tril().bool())[:, None]
    scores = q @ k.mT * 8**-0.5 + wanted
    (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).backward(dout)
    torch.testing.assert_close(bias.grad, wanted.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("line", ["tokens: ring=2", "batch: dp=2; tokens: ring=2"])
def test_no_score_of_another_document_is_computed(line):
    """Nor of another row's: a row of one document alone costs its whole triangle."""
    plan = Layout.parse(line).plan("tokens", length=24, heads=1, batch=4, mask=BY_ROW["causal"])
    pairs = sum(n * (n + 1) // 2 for row in ROWS for n in row)
    assert sum(each.scores.forward for each in plan.ranks()) == pairs


def test_ranks_receive_what_their_own_rows_see():
    """Rows 0 and 1 have no document across the border of the two chunks, rows 2 and 3 do."""
    mask = Documents(((12, 12), (3, 9, 12), (24,), (4, 20))) & Causal()
    layout = Layout.parse("batch: dp=2; tokens: ring=2")
    plan = layout.plan("tokens", length=24, heads=1, batch=4, mask=mask)
    received = [each.traffic.forward.by_mesh_dim().get("ring", 0) for each in plan.ranks()]
    assert received[:3] == [0, 0, 0]
    assert received[3] > 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (((24,), (24,)), "lengths for 2 rows, but the batch has 4"),
        (((24,), (24,), (4, 19), (24,)), "lengths of row 2 add up to 23, but there are 24 queries"),
    ],
)
def test_rows_that_do_not_fit_are_refused_on_every_rank(rows, message):
    layout, q = LAYOUTS["ring"], draw(4, 2, 24, 8)

    def rank(bound):
        local = bound.shard(q, {"tokens": 2})
        with pytest.raises(weft.ShapeError, match=message):
            attention(local, local, local, bound, "tokens", Documents(rows))

    weft.on_threads(layout, rank)


@pytest.mark.parametrize("make", [list, tuple, torch.tensor])
def test_cumulative_lengths_are_taken(make):
    assert Documents.from_cu_seqlens(make([0, 3, 7])) == Documents((3, 4))
    assert Documents.from_cu_seqlens([make([0, 3, 7]), make([0, 7])]) == Documents([(3, 4), (7,)])
    padded = make([0, 0, 3, 7, 7, 7])  # an end that is repeated is that of no document
    assert Documents.from_cu_seqlens(padded) == Documents((3, 4))


@pytest.mark.parametrize("wrong", [[1, 3], [0, 3, 2], [], [0, 2.5]])
def test_cumulative_lengths_begin_at_0_and_never_decrease(wrong):
    with pytest.raises(weft.ShapeError, match="cu_seqlens"):
        Documents.from_cu_seqlens(wrong)
