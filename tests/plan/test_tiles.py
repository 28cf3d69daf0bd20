"""Tiles as kernel calls: each visible score once, few calls, equal work on all ranks."""

import itertools
import random

import pytest
import torch
from reference import visible

from weft.layout import Layout
from weft.masks import (
    Boxes,
    Causal,
    Documents,
    FirstKeys,
    Full,
    MaskMod,
    Near,
    Window,
    describe,
    merge_intervals,
    prefix_lm,
)
from weft.plan import intervals
from weft.plan.order import ORDERS, Span, count, join, positions, product, shard_spans
from weft.plan.tiles import KernelCall, Kind, in_row_blocks, tile_calls, visible_keys


def visible_queries(mask, q, k) -> tuple[int, int]:
    """Memory indices [low, high) of `q` outside which surely no key in `k` is seen."""
    return intervals.visible(
        q,
        merge_intervals(seen for span in k for seen in mask.query_intervals(intervals.hull(span))),
    )


def band_of(n: int, m: int, left: int, right: int) -> torch.Tensor:
    """Scores of a window, counted from the last row and the last column as flash-attn does."""
    rows, columns = torch.arange(n)[:, None] + m - n, torch.arange(m)
    return (columns >= rows - left) & (columns <= rows + right)


def _times_computed(mask, seen, q, k, row_block, windows=False) -> torch.Tensor:
    """How often each score of a tile is computed by its calls."""
    times = torch.zeros(count(q), count(k), dtype=torch.int)
    for call in tile_calls(mask, q, k, row_block, windows=windows):
        part = times[call.q0 : call.q1, call.k0 : call.k1]
        if call.kind is Kind.FULL:
            part += 1
        elif call.kind is Kind.CAUSAL:
            assert part.shape[0] == part.shape[1]
            part += torch.ones_like(part).tril()
        elif call.kind is Kind.WINDOW:
            assert min(call.window) >= 0
            band = band_of(*part.shape, *call.window)
            assert band.any(1).all()
            assert call.entries == band.sum()
            part += band.int()
        else:
            assert part.shape[0] <= row_block
            part += seen[call.q0 : call.q1, call.k0 : call.k1].int()
    return times


def _offset_masks(n: int, m: int, draw: random.Random) -> list:
    """Masks of n queries among m keys."""
    ends = sorted({*draw.sample(range(1, m + 1), min(3, m)), m})
    documents = [b - a for a, b in zip([0, *ends], ends)]
    w, left, right = (draw.randint(1, 9) for _ in range(3))
    o = draw.choice([m - n, 0, draw.randint(-n - 2, m + 2)])
    inside = draw.randint(0, m - n) if n <= m else None
    packed = [] if inside is None else [Documents(documents, offset=inside)]
    return [
        Causal(offset=o),
        Causal(w, offset=o),
        Window(left, right - 1, offset=o),
        prefix_lm(min(w, m), offset=o),
        Causal(offset=o) & Causal(w, offset=o + 2),
        Causal(offset=o) | Window(left, right, offset=0),
        MaskMod(lambda b, h, q, k: (q + k) % 3 != 0) & Causal(offset=o),
        *packed,
        *(p & Causal(offset=inside) for p in packed),
    ]


def _masks(n: int, draw: random.Random) -> list:
    documents = []
    while sum(documents) < n:
        documents.append(min(draw.randint(1, 12), n - sum(documents)))
    w, left, right, c = (draw.randint(1, 9) for _ in range(4))
    return [
        Full(),
        Causal(),
        Causal(w),
        Window(left, right - 1),
        FirstKeys(min(c, n)),
        Documents(documents),
        Documents(documents) & Causal(),
        Documents(documents) & Causal(w),
        prefix_lm(min(c, n)),
        Window(left, right) | FirstKeys(min(c, n)),
        MaskMod(lambda b, h, q, k: (q + k) % 3 != 0) & Causal(),
        *_grids(n, draw),
    ]


def _grids(n: int, draw: random.Random) -> list:
    rows = draw.choice([d for d in range(1, n + 1) if n % d == 0])
    grid = rows, n // rows
    size = tuple(draw.randint(1, length) for length in grid)
    circular = tuple(draw.random() < 0.5 for _ in grid)
    step = tuple(draw.randint(1, max(length // k, 1)) for length, k in zip(grid, size))
    return [
        Near(grid, size, step, circular),
        Boxes(grid, size, tuple(draw.randrange(s) for s in size), circular),
        Boxes(grid, size) & Causal(),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_tiles_of_a_grid_are_skipped_exactly(seed):
    """A part of a grid that is split along both axes is a strip of every one of its rows."""
    draw, skipped = random.Random(seed), 0
    for _ in range(12):
        grid = draw.randint(3, 7), draw.randint(3, 8)
        n = grid[0] * grid[1]
        boxes = [
            (a, b) for a in (range(2), range(2, grid[0])) for b in (range(2), range(2, grid[1]))
        ]
        chunks = [tuple(Span(y * grid[1] + x[0], len(x)) for y in y_s) for y_s, x in boxes]
        kernel = draw.choice([(2, 2), (1, 2), (2, 1)])
        circular = (draw.random() < 0.3, draw.random() < 0.3)
        for mask in (Near(grid, kernel, circular=circular), Boxes(grid, kernel, (0, 0), circular)):
            seen = visible(mask, 1, 1, n, n)[0, 0]
            for q, k in itertools.product(chunks, chunks):
                tile = seen[positions(q)][:, positions(k)]
                assert bool(tile_calls(mask, q, k)) == bool(tile.any()), (mask, q, k)
                skipped += not tile.any()
    assert skipped > 20


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(12))
def test_calls_compute_each_visible_score_exactly_once(seed):
    draw = random.Random(seed)
    for _ in range(40):
        n = draw.randint(1, 40)
        row_block = draw.choice([3, 512])
        parts = draw.choice([(1,), (2,), (3,), (2, 2), (4,)])
        spans = shard_spans(n, parts, draw.choice(list(ORDERS)))
        q, k = draw.choice(spans), draw.choice(spans)
        if draw.random() < 0.3:
            k = join(sorted(s for chunk in spans for s in chunk))
        for mask in _masks(n, draw):
            seen = visible(mask, 1, 1, n, n)[0, 0][positions(q)][:, positions(k)]
            for windows in (False, True):
                times = _times_computed(mask, seen, q, k, row_block, windows)
                assert torch.equal(times, seen.int()), (mask, q, k, windows)


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", range(12))
def test_offset_queries_compute_each_visible_score_once(seed):
    """Queries and keys are split into other numbers of chunks, too."""
    draw = random.Random(100 + seed)
    for _ in range(30):
        n, m = draw.randint(1, 30), draw.randint(1, 40)
        row_block, order = draw.choice([3, 512]), draw.choice(list(ORDERS))
        q, k = (
            draw.choice(shard_spans(length, draw.choice([(1,), (2,), (3,), (2, 2)]), order))
            for length in (n, m)
        )
        for mask in _offset_masks(n, m, draw):
            seen = visible(mask, 1, 1, n, m)[0, 0][positions(q)][:, positions(k)]
            for windows in (False, True):
                times = _times_computed(mask, seen, q, k, row_block, windows)
                assert torch.equal(times, seen.int()), (mask, q, k, windows)


@pytest.mark.parametrize("mask", [Causal(5), Window(4, 3), Documents((9, 15)) & Causal(4)])
@pytest.mark.parametrize("order", ORDERS)
def test_windows_are_plain_calls_where_kernels_take_them(mask, order):
    for spans in itertools.product(shard_spans(24, (2,), order), repeat=2):
        calls = tile_calls(mask, *spans, windows=True)
        assert Kind.MASKED not in {call.kind for call in calls}


@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize("offset", [0, 24, 7, 64])
def test_tiles_of_queries_at_an_offset_are_plain_calls(order, offset):
    """No mask tensor is needed where chunks of queries and keys have the same steps."""
    q_spans, k_spans = shard_spans(40, (4,), order), shard_spans(64, (4,), order)
    for q in q_spans:
        for k in k_spans:
            kinds = {call.kind for call in tile_calls(Causal(offset=offset), q, k)}
            assert Kind.MASKED not in kinds


def test_queries_that_are_the_last_keys_are_one_causal_call():
    """As where there are as many keys as queries, striped ones too."""
    for step in (1, 2):
        q, k = (Span(0, 8, step),), (Span(24, 8, step),)
        assert tile_calls(Causal(offset=24), q, k) == (KernelCall(0, 8, 0, 8, Kind.CAUSAL),)
    two = (Span(0, 4), Span(12, 4)), (Span(24, 4), Span(36, 4))
    assert tile_calls(Causal(offset=24), *two) == (KernelCall(0, 8, 0, 8, Kind.CAUSAL),)


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(4))
def test_rows_outside_what_is_visible_are_never_seen(seed):
    draw = random.Random(seed)
    for _ in range(60):
        n, m = draw.randint(1, 40), draw.randint(1, 40)
        order = draw.choice(list(ORDERS))
        q, k = (draw.choice(shard_spans(length, (3,), order)) for length in (n, m))
        for mask in _offset_masks(n, m, draw):
            seen = visible(mask, 1, 1, n, m)[0, 0][positions(q)][:, positions(k)]
            low, high = visible_keys(mask, q, k)
            assert not seen[:, :low].any()
            assert not seen[:, high:].any()
            low, high = visible_queries(mask, q, k)
            assert not seen[:low].any()
            assert not seen[high:].any()
    for _ in range(60):
        n = draw.randint(1, 40)
        spans = shard_spans(n, (3,), draw.choice(list(ORDERS)))
        q, k = draw.choice(spans), draw.choice(spans)
        for mask in _masks(n, draw):
            seen = visible(mask, 1, 1, n, n)[0, 0][positions(q)][:, positions(k)]
            low, high = visible_keys(mask, q, k)
            assert not seen[:, :low].any()
            assert not seen[:, high:].any()
            low, high = visible_queries(mask, q, k)
            assert not seen[:low].any()
            assert not seen[high:].any()


def test_positions_of_two_axes_are_tiled_as_truly():
    for orders in (("contiguous", "striped"), ("zigzag", "contiguous"), ("striped", "zigzag")):
        outer, inner = (shard_spans(n, (2,), order) for n, order in zip((5, 6), orders))
        tiles = [product(a, b, 6) for a in outer for b in inner]
        for mask in (Causal(), Causal(4), Documents((7, 11, 12)) & Causal(), FirstKeys(13)):
            for q in tiles:
                for k in tiles:
                    seen = visible(mask, 1, 1, 30, 30)[0, 0][positions(q)][:, positions(k)]
                    assert torch.equal(_times_computed(mask, seen, q, k, 512), seen.int())


def test_row_blocks_cover_full_calls_once():
    calls = (KernelCall(0, 10, 0, 4, Kind.FULL), KernelCall(0, 7, 4, 11, Kind.CAUSAL))
    times = torch.zeros(10, 11, dtype=torch.int)
    for call in in_row_blocks(calls, 3):
        assert call.q1 - call.q0 <= 3
        part = times[call.q0 : call.q1, call.k0 : call.k1]
        if call.kind is Kind.FULL:
            part += 1
        else:
            rows = torch.arange(call.q0, call.q1)[:, None]
            part += (torch.arange(call.k0, call.k1) - 4 <= rows).int()
    wanted = torch.zeros_like(times)
    wanted[:, :4] = 1
    wanted[:7, 4:] = torch.ones(7, 7, dtype=torch.int).tril()
    assert torch.equal(times, wanted)


# -- balance and number of calls -------------------------------------------------------------------

LAYOUTS = {
    "ring of 8": ({"a": 8}, ["ring a"]),
    "tile 2x4": ({"a": 2, "b": 4}, ["ring a", "pass_q b"]),
    "tile 4x2": ({"a": 4, "b": 2}, ["ring a", "pass_q b"]),
    "hierarchical 2x4": ({"a": 2, "b": 4}, ["ring a", "ring b"]),
    "head x ring of 8": ({"h": 2, "a": 8}, ["ulysses h", "ring a"]),
    "ring of 8 x head": ({"a": 8, "h": 2}, ["ring a", "ulysses h"]),
}


def _layout(name: str, order: str) -> Layout:
    mesh, entries = LAYOUTS[name]
    attend = [dict(zip(("strategy", "on"), entry.split())) for entry in entries]
    shard = {"tokens": list(mesh)}
    declaration = {"mesh": mesh, "shard": shard, "order": {"tokens": order}}
    return Layout.from_dict(declaration | {"attend": {"tokens": attend}})


def _calls_by_rank(layout: Layout, mask, n: int, backward: bool = False) -> list[list[KernelCall]]:
    from weft.declare.mesh import coordinates
    from weft.plan.plan import Plan
    from weft.plan.problem import LocalProblem

    sizes = 1, 2, 2, 8, 8, torch.float32
    problem = LocalProblem(("tokens",), ((n, n),), *sizes, "cpu", mask=mask)
    ranks = []
    for rank in range(layout.world_size):
        plan = Plan(layout, problem, coordinates(layout.mesh, rank))
        run = plan.backward if backward else plan.forward
        blocks = [block for step in run.program.steps for block in step.blocks]
        ranks.append([call for block in blocks for call in run.block(block).calls])
    return ranks


@pytest.mark.few(4)
@pytest.mark.parametrize("order", ["zigzag", "striped"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_causal_work_of_busiest_rank_at_most_twentieth_above_mean(name, order):
    n = 4096
    for backward in (False, True):
        ranks = _calls_by_rank(_layout(name, order), Causal(), n, backward)
        work = [sum(call.entries for call in calls) for calls in ranks]
        heads = 2 if "head" in name else 1
        assert sum(work) == heads * n * (n + 1) // 2
        assert max(work) * len(work) / sum(work) <= 1.05


@pytest.mark.parametrize("order", ["zigzag", "striped"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_causal_tiles_are_few_plain_calls_without_masks(name, order):
    layout = _layout(name, order)
    for calls in _calls_by_rank(layout, Causal(), 4096):
        assert all(call.kind is not Kind.MASKED for call in calls)
        # One call a chunk; two sides of a Ulysses all-to-all may be far apart: up to four a pair.
        assert len(calls) <= (32 if "head" in name else 8)


def test_striped_chunks_that_ulysses_joins_are_one_call_a_chunk():
    for calls in _calls_by_rank(_layout("head x ring of 8", "striped"), Causal(), 4096):
        assert len(calls) == 8


CALLS = [
    # mask, order, chunk of the queries, chunk of the keys (of 4, 64 tokens each) -> kinds
    (Full(), "striped", 0, 3, ["full"]),
    (Causal(), "contiguous", 2, 2, ["causal"]),
    (Causal(), "contiguous", 3, 1, ["full"]),
    (Causal(), "contiguous", 1, 3, []),
    (Causal(), "zigzag", 1, 1, ["causal"]),
    (Causal(), "zigzag", 1, 0, ["full"]),
    (Causal(), "zigzag", 0, 1, ["full"]),
    (Causal(), "striped", 2, 1, ["causal"]),
    (Causal(), "striped", 1, 2, ["causal"]),
    (FirstKeys(100), "contiguous", 3, 1, ["full"]),
    (Documents((64, 128, 64)), "contiguous", 1, 2, ["full"]),
    (Documents((64, 128, 64)) & Causal(), "contiguous", 2, 1, ["full"]),
    (Documents((100, 156)) & Causal(), "contiguous", 1, 1, ["causal", "causal"]),
]


@pytest.mark.parametrize(
    ("mask", "order", "i", "j", "kinds"),
    CALLS,
    ids=[f"{describe(c[0])} {c[1]} {c[2]} {c[3]}" for c in CALLS],
)
def test_tiles_of_common_masks_are_one_or_two_plain_calls(mask, order, i, j, kinds):
    chunks = shard_spans(256, (4,), order)
    assert [call.kind.value for call in tile_calls(mask, chunks[i], chunks[j])] == kinds


def test_adjacent_full_parts_are_one_call():
    zigzag = shard_spans(256, (4,), "zigzag")
    whole = join(sorted(s for chunk in zigzag[:3] for s in chunk))
    calls = tile_calls(Causal(), zigzag[3], whole)
    assert [call.kind.value for call in calls] == ["full"]
