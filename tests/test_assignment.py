"""Documents on ranks, balanced: equal tokens, equal work, few cuts; exact, and by its own order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exact import Case, assert_exact, tokens

import weft
from benchmarks.pack import received
from weft import Causal, Documents, Layout
from weft.declare.orders import TokenOrder
from weft.errors import DeclarationError, ShapeError
from weft.packing.assignment import scores_of
from weft.packing.balance import assign
from weft.plan.order import chunk_sizes


def skewed(name: str, count: int = 4096, seed: int = 0) -> list[int]:
    """Document lengths in tokens: most are short, and the long ones have most of the work."""
    draw = np.random.default_rng(seed)
    if name == "lognormal":
        made = draw.lognormal(6.5, 1.2, count)
    elif name == "pareto":
        made = np.minimum(draw.pareto(1.1, count) * 200 + 16, 1 << 20)
    else:  # 2 % are books
        made = np.where(draw.random(count) < 0.02, draw.integers(30_000, 131_072, count), 900)
    return np.maximum(made, 1).astype(int).tolist()


def work_of(chunk, window=None) -> int:
    return sum(scores_of(f.stop, window) - scores_of(f.start, window) for f in chunk)


# -- the assignment ------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("ranks", [8, 64, 1024])
@pytest.mark.parametrize("name", ["lognormal", "pareto", "books"])
def test_work_and_tokens_are_balanced(name, ranks, window):
    lengths = skewed(name)
    sizes = chunk_sizes(sum(lengths), ranks)
    chunks = assign(lengths, sizes, window)
    work = [work_of(chunk, window) for chunk in chunks]
    assert max(work) <= 1.05 * sum(work) / ranks
    assert [sum(f.stop - f.start for f in chunk) for chunk in chunks] == sizes


@pytest.mark.parametrize("seed", range(40))
def test_every_token_is_on_one_rank(seed):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, draw.integers(2, 300), draw.integers(1, 40)).tolist()
    ranks, window = int(draw.integers(1, 30)), (None, 5)[seed % 2]
    sizes = chunk_sizes(sum(lengths), ranks)
    chunks = assign(lengths, sizes, window)
    held = sorted(
        (f.document, position)
        for chunk in chunks
        for f in chunk
        for position in range(f.start, f.stop)
    )
    assert held == [(i, position) for i, n in enumerate(lengths) for position in range(n)]
    assert [sum(f.stop - f.start for f in chunk) for chunk in chunks] == sizes


def test_documents_that_fit_stay_whole():
    """But for one a rank at most, where its tokens end."""
    lengths = skewed("lognormal")
    chunks = assign(lengths, chunk_sizes(sum(lengths), 8))
    assert sum(map(len, chunks)) <= len(lengths) + 8


def test_one_document_is_cut_as_by_zigzag():
    chunks = assign([64], [16] * 4)
    assert sorted(work_of(chunk) for chunk in chunks)[-1] <= 1.05 * scores_of(64, None) / 4
    assert max(map(len, chunks)) == 2


# -- as an order of the axis ---------------------------------------------------------------------

LENGTHS = (5, 1, 30, 2, 2, 9, 1, 14, 7)
LAYOUTS = {
    "ring": "tokens: ring=4",
    "tile": "tokens: tile=2x2",
    "pass-Q": "tokens: pass_q=3",
    "gather": "tokens: gather=3",
    "ulysses x ring": "tokens: ulysses=2 x ring=2",
    "dp x ring": "batch: dp=2; tokens: ring=2",
    "heads x burst": "heads: tp=2; tokens: burst=2",
}
PACKED = Layout.parse("tokens: ring=4").pack(LENGTHS)
MASKS = {
    "causal": PACKED.mask,
    "window": Documents(LENGTHS) & Causal(3),
    "by row": Documents((LENGTHS, (40, 31))) & Causal(),
    "function": weft.MaskMod(lambda b, h, q, k: (q - k) % 3 != 1),
}


def packed(line: str) -> Layout:
    layout = Layout.parse(line)
    return layout.reorder("tokens", layout.pack(LENGTHS).order)


#: The pairs that are tried: every layout and every mask at least once.
PAIRS = [
    (line, mask)
    for i, line in enumerate(LAYOUTS)
    for j, mask in enumerate(MASKS)
    if (i + j) % 4 == 0 or (i + 2 * j) % 7 == 5
]


@pytest.mark.parametrize(("line", "mask"), PAIRS)
def test_attention_in_an_order_that_is_data_is_exact(line, mask):
    case, layout = Case(lengths=tokens(71), mask=MASKS[mask]), packed(LAYOUTS[line])
    assert_exact(layout, case.with_(lse_gradient=True))
    assert_exact(layout, case.with_(bias=True))


@pytest.mark.parametrize("line", LAYOUTS.values(), ids=LAYOUTS)
def test_bytes_are_as_planned(line):
    """And a call needs no length, though chunks are uneven: the order has it."""
    layout, mask = packed(line), PACKED.mask
    plans = layout.plan("tokens", length=71, heads=4, head_dim=8, batch=2, mask=mask).ranks()
    q = torch.randn(2, 4, 71, 8)

    def rank(bound: Layout) -> tuple[int, int]:
        local = bound.shard(q, {"batch": 0, "heads": 1, "tokens": 2}).requires_grad_()
        with weft.traffic(bound) as forward:
            out = weft.attention(local, local, local, bound, "tokens", mask)
        with weft.traffic(bound) as backward:
            out.sum().backward()
        return forward.bytes, backward.bytes

    counted = weft.on_threads(layout, rank)
    assert counted == [(p.traffic.forward.bytes, p.traffic.backward.bytes) for p in plans]


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("name", ["lognormal", "books"])
def test_fewer_bytes_than_zigzag(name, ranks):
    lengths, layout = skewed(name), Layout.parse(f"tokens: ring={ranks}")
    ours = layout.reorder("tokens", layout.pack(lengths).order)
    zigzag = Layout.parse(f"tokens(zigzag): ring={ranks}")
    assert received(ours, lengths) < 0.75 * received(zigzag, lengths)


def test_rows_are_counted_as_in_a_plan():
    lengths, layout = skewed("lognormal"), Layout.parse("tokens: ring=8")
    packed = layout.pack(lengths)
    layout = layout.reorder("tokens", packed.order)
    options = {"length": sum(lengths), "heads": 1, "head_dim": 1, "mask": packed.mask}
    plans = [layout.plan("tokens", rank=rank, **options) for rank in range(8)]
    nbytes = sum(plan.traffic.forward.bytes for plan in plans)
    keys_and_values = 2 * 4 * received(layout, lengths)  # fp32
    assert nbytes == pytest.approx(keys_and_values, rel=0.01)


def test_tensors_go_there_and_back():
    layout, x = packed("tokens: ring=4"), torch.arange(71)

    def rank(bound: Layout):
        local = bound.shard(x, {"tokens": 0})
        assert torch.equal(local, bound.positions("tokens", 71))
        starts = np.cumsum([0, *LENGTHS])
        document = np.searchsorted(starts, local.numpy(), side="right") - 1
        within = PACKED.positions(bound.chunk("tokens"))
        assert torch.equal(local, within + torch.from_numpy(starts[document]))
        assert torch.equal(bound.gather(local, {"tokens": 0}), x)

    weft.on_threads(layout, rank)


def test_layouts_are_equal_by_the_order_s_value():
    layout = Layout.parse("tokens: ring=4")
    one, other = (layout.reorder("tokens", layout.pack(LENGTHS).order) for _ in range(2))
    assert one == other != layout
    assert hash(one) == hash(other)
    assert one != layout.reorder("tokens", layout.pack(LENGTHS[::-1]).order)


def test_ranks_that_packed_otherwise_are_refused_together():
    layout = Layout.parse("tokens: ring=2")
    q = torch.randn(1, 2, 8, 4)

    def rank(bound: Layout):
        bound = bound.reorder("tokens", bound.pack((8,) if bound.rank else (3, 5)).order)
        local = bound.shard(q, {"tokens": 2})
        with pytest.raises(ShapeError, match=r"ordered \w+(.|\n)*rank 1: .*ordered \w+"):
            weft.attention(local, local, local, bound, "tokens", Causal())

    weft.on_threads(layout, rank)


def test_what_does_not_fit_is_refused():
    layout = Layout.parse("tokens: ring=2")
    order = layout.pack((3, 5)).order
    with pytest.raises(
        ShapeError, match=r"order is of 8 tokens in chunks of .4, 4., but an axis of 9"
    ):
        layout.reorder("tokens", order).spans("tokens", 9, {"ring": 0})
    with pytest.raises(DeclarationError, match=r"chunks of .4, 4. tokens on an axis that is split"):
        Layout.parse("tokens: ring=4").reorder("tokens", order)
    with pytest.raises(DeclarationError, match="every position once"):
        layout.reorder("tokens", TokenOrder((((0, 4),), ((3, 4),))))
    with pytest.raises(DeclarationError, match="is data, which no file says"):
        layout.reorder("tokens", order).to_toml()
    with pytest.raises(ShapeError, match="at least 1 token"):
        layout.pack((3, 0))
    with pytest.raises(ShapeError, match="differ by row"):
        layout.pack(Documents(((3, 5), (8,))))
    for lengths in (7, Documents((3, 5)) & Causal()):
        with pytest.raises(ShapeError, match="lengths is a sequence"):
            layout.pack(lengths)
    for wrong in (layout.pack((3, 5)), "zigzag"):
        with pytest.raises(DeclarationError, match=r"such as layout.pack\(lengths\).order, found"):
            layout.reorder("tokens", wrong)
    with pytest.raises(DeclarationError, match="mesh size of -1"):
        Layout.parse("tokens: ring=-1").pack((3, 5))


def test_cumulative_lengths_and_one_device():
    single = Layout.single()
    assignment = single.pack(Documents.from_cu_seqlens(torch.tensor([0, 3, 8])))
    assert assignment == single.pack(np.array([3, 5]))
    assert assignment.targets == 6
    assert single.reorder("tokens", assignment.order) is single
