"""Documents on ranks, balanced: equal tokens, equal work, few cuts; exact, and by its own order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exact import Case, assert_exact, tokens

import weft
from benchmarks.pack import received
from weft import Causal, Documents, Layout
from weft.comm import coordinates, index_at
from weft.declare.orders import TokenOrder
from weft.errors import DeclarationError, ShapeError
from weft.packing.groups import balance_shares
from weft.plan.order import chunk_sizes


def skewed(name: str, count: int = 4096, seed: int = 0) -> list[int]:
    """Document lengths in tokens: most are short, and the long ones have most of the work."""
    draw = np.random.default_rng(seed)
    if name == "lognormal":
        made = draw.lognormal(6.5, 1.2, count)
    elif name == "pareto":
        made = np.minimum(draw.pareto(1.1, count) * 200 + 16, 1 << 20)
    elif name == "uniform":
        made = draw.integers(1, 4096, count)
    else:  # 2 % are books
        made = np.where(draw.random(count) < 0.02, draw.integers(30_000, 131_072, count), 900)
    return np.maximum(made, 1).astype(int).tolist()


def in_equal_chunks(lengths: list[int], ranks: int) -> list[int]:
    """The lengths, the last one longer, so that all ways to split the tokens make equal chunks."""
    return [*lengths[:-1], lengths[-1] + -sum(lengths) % ranks]


def assign(lengths: list[int], ranks: int, window: int | None = None):
    """The fragments on a ring."""
    return Layout.parse(f"tokens: ring={ranks}").pack(lengths, window=window).fragments


def work_of(chunk, window=None) -> int:
    seen = [np.arange(f.start + 1, f.stop + 1) for f in chunk]
    return int(np.minimum(np.concatenate([[0], *seen]), window or 1 << 60).sum())


# -- the assignment ------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("ranks", [8, 64, 1024])
@pytest.mark.parametrize("name", ["lognormal", "pareto", "books"])
def test_work_and_tokens_are_balanced(name, ranks, window):
    lengths = skewed(name)
    chunks = assign(lengths, ranks, window)
    work = [work_of(chunk, window) for chunk in chunks]
    assert max(work) <= 1.05 * sum(work) / ranks
    sizes = chunk_sizes(sum(lengths), ranks)
    assert [sum(f.stop - f.start for f in chunk) for chunk in chunks] == sizes


@pytest.mark.parametrize("ranks", [4, 16])
def test_work_is_balanced_from_256_tokens_a_rank_on(ranks):
    """Of any lengths: skewed ones, one of half or most of the tokens at either end, one of all."""
    total = 256 * ranks + 3
    skew = np.maximum(np.random.default_rng(0).lognormal(4, 2, total), 1).astype(int)
    some = skew[: np.searchsorted(skew.cumsum(), total)].tolist()
    half, third = [1] * (total // 2), [3] * (total // 9)
    for lengths in (
        [*some, total - sum(some)],
        [total - len(half), *half],
        [*half, total - len(half)],
        [*third, total - sum(third)],
        [1] * total,
        [total],
    ):
        work = Layout.parse(f"tokens: ring={ranks}").pack(lengths).work
        assert max(work) <= 1.05 * sum(work) / ranks, lengths[:9]


@pytest.mark.few(12)
@pytest.mark.parametrize("seed", range(40))
def test_every_token_is_on_one_rank(seed):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, draw.integers(2, 300), draw.integers(1, 40)).tolist()
    ranks, window = int(draw.integers(1, 30)), (None, 5)[seed % 2]
    chunks = assign(lengths, ranks, window)
    held = sorted(
        (f.document, position)
        for chunk in chunks
        for f in chunk
        for position in range(f.start, f.stop)
    )
    assert held == [(i, position) for i, n in enumerate(lengths) for position in range(n)]
    sizes = chunk_sizes(sum(lengths), ranks)
    assert [sum(f.stop - f.start for f in chunk) for chunk in chunks] == sizes


def test_documents_that_fit_stay_whole():
    """But for one a rank at most, where its tokens end."""
    lengths = skewed("lognormal")
    chunks = assign(lengths, 8)
    assert sum(map(len, chunks)) <= len(lengths) + 8


def test_one_document_is_cut_as_by_zigzag():
    chunks = assign([64], 4)
    assert sorted(work_of(chunk) for chunk in chunks)[-1] <= 1.05 * 64 * 65 / 2 / 4
    assert max(map(len, chunks)) == 2


# -- as plans compute it --------------------------------------------------------------------------

#: Layouts that pack, with ranks and mesh dims in either order.
PACKING = [
    "tokens: ring=8",
    "tokens: pass_q=8",
    "tokens: ulysses=8",
    "tokens: ring=2 x ulysses=4",
    "tokens: ulysses=4 x gather=2",
    "tokens: ulysses=2 x ring=2 x ulysses=2",
    "tokens: pass_q=4 x ulysses=2",
    "tokens: hierarchical=2x4",
    "heads: tp=2; tokens: ring=4",
    "batch: dp=2; tokens: gather=4",
]


def computed(layout: Layout, lengths: list[int], window: int | None = None, ranks=None):
    """Of some ranks: their scores in both passes by the plans, and by the assignment."""
    assignment = layout.pack(lengths, window=window)
    on = layout.reorder("tokens", assignment.order)
    (shares,) = balance_shares(layout, "tokens")
    group_of = [max(numbers) for numbers in zip(*shares, strict=True)]
    heads, batch = 8, layout.size("batch")
    for rank in range(layout.world_size) if ranks is None else ranks:
        plan = on.plan(
            "tokens", length=sum(lengths), heads=heads, batch=batch, mask=assignment.mask, rank=rank
        )
        chunk = index_at(layout.mesh, layout.shard_dims("tokens"), coordinates(layout.mesh, rank))
        group = group_of[chunk]
        share = heads // layout.size("heads") // group_of.count(group)
        yield *plan.scores, share * assignment.work[group], group


@pytest.mark.parametrize("line", PACKING)
def test_work_is_what_plans_compute_and_balanced(line):
    lengths = [max(1, n // 4) for n in skewed("lognormal", 240)]
    rows = list(computed(Layout.parse(line), lengths))
    assert all(forward == backward == told for forward, backward, told, _ in rows)
    scores = [told for _, _, told, _ in rows]
    assert max(scores) <= 1.05 * sum(scores) / len(scores)


@pytest.mark.parametrize("line", ["tokens: gather=4 x ulysses=2", "tokens: pass_q=4"])
def test_work_in_a_window_is_balanced(line):
    """Blocks at the edge of a window are computed with a mask, so plans compute a little more."""
    lengths, window = [n // 8 for n in skewed("books", 240)], 4096
    rows = list(computed(Layout.parse(line), lengths, window))
    assert all(told <= forward == backward <= 1.15 * told for forward, backward, told, _ in rows)
    scores = [told for _, _, told, _ in rows]
    assert max(scores) <= 1.05 * sum(scores) / len(scores)


def test_groups_of_the_outer_mesh_dim_keep_documents_inside():
    """64 chunks, balanced one by one, would send more than ten times the bytes between nodes."""
    drawn = np.random.default_rng(0).lognormal(7.3, 1.3, 170).clip(512, 65536)
    lengths = in_equal_chunks(drawn.astype(int).tolist(), 64)
    between = {}
    for name, packs in (("groups", "gather=8 x ulysses=8"), ("chunks", "gather=64")):
        order = Layout.parse(f"tokens: {packs}").pack(lengths).order
        on = Layout.parse("tokens: gather=8 x ulysses=8").reorder("tokens", order)
        mask = Documents(lengths) & Causal()
        sizes = {"length": sum(lengths), "heads": 8, "head_dim": 8, "mask": mask}
        plans = [on.plan("tokens", rank=rank, **sizes) for rank in range(0, 64, 8)]
        between[name] = sum(p.traffic.forward.by_mesh_dim().get("gather", 0) for p in plans)
    assert between["groups"] < 0.1 * between["chunks"]


def test_more_slack_cuts_fewer_documents():
    lengths = in_equal_chunks(skewed("books", 512), 64)
    layout = Layout.parse("tokens: gather=8 x ulysses=8")
    rows, balance = [], []
    for slack in (0.04, 0.5, 4.0):
        packed = layout.pack(lengths, slack=slack)
        rows.append(
            received(Layout.parse("tokens: ring=64").reorder("tokens", packed.order), lengths)
        )
        balance.append(max(packed.work) * 8 / sum(packed.work))
    assert balance[0] <= 1.045 < balance[1] <= 1.5 * 1.125
    assert rows[0] > rows[1] >= rows[2]


@pytest.mark.parametrize(
    "line", ["tile=2x2", "pass_q=2 x ring=2", "burst=4", "adaptive=4 x ulysses=2"]
)
def test_work_of_queries_and_keys_is_balanced(line):
    lengths = in_equal_chunks([n // 8 for n in skewed("lognormal", 60)], 64)
    layout = Layout.parse(f"tokens: {line}")
    packed, passes = layout.pack(lengths), len(balance_shares(layout, "tokens"))
    assert sum(packed.work) == passes * sum(n * (n + 1) // 2 for n in lengths)
    assert max(packed.work) <= 1.05 * sum(packed.work) / len(packed.work)


def test_keys_split_where_queries_are_whole_are_refused():
    with pytest.raises(
        DeclarationError, match="splits the keys of axis 'tokens' over mesh dims kv"
    ):
        Layout.load("kv-parallel-4").pack([8, 8])


# -- as an order of the axis ---------------------------------------------------------------------

LENGTHS = (5, 1, 30, 2, 2, 9, 1, 14, 7)
LAYOUTS = {
    "ring": "tokens: ring=4",
    "tile": "tokens: tile=2x2",
    "pass-Q": "tokens: pass_q=3",
    "gather": "tokens: gather=3",
    "ulysses x ring": "tokens: ulysses=2 x ring=2",
    "gather x ulysses": "tokens: gather=2 x ulysses=2",
    "pass-Q x ulysses": "tokens: pass_q=2 x ulysses=2",
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
    """A layout in the order that it packs."""
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
    with pytest.raises(ShapeError, match=r"slack is a share of the mean work, .* found -1"):
        layout.pack((3, 5), slack=-1)
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
