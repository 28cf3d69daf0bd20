"""Which rows ranks need of each other's chunks: asked of a tile group at once, and one by one."""

import itertools
import math

import pytest
import torch
from draw import Dim, layout_of
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import visible as seen_by
from test_tiles import visible_queries

import weft
from weft.masks import Mask, merge_intervals
from weft.plan.intervals import SpanTable, visible
from weft.plan.order import ORDERS, Span, count, positions
from weft.plan.plan import Pass, Plan
from weft.plan.predict import plan_for
from weft.plan.problem import Problem
from weft.plan.sides import Side
from weft.plan.tiles import visible_keys

# -- spans and intervals --------------------------------------------------------------------------

intervals = st.lists(st.tuples(st.integers(-5, 60), st.integers(-5, 60)), max_size=6)


@st.composite
def chunks(draw) -> tuple[Span, ...]:
    spans, start = [], draw(st.integers(0, 9))
    for _ in range(draw(st.integers(0, 4))):
        spans.append(Span(start, draw(st.integers(1, 6)), draw(st.integers(1, 5))))
        start = spans[-1].last + draw(st.integers(1, 9))
    return tuple(draw(st.permutations(spans)))


@given(intervals)
def test_merged_intervals_hold_the_same_numbers_and_do_not_touch(drawn):
    found = merge_intervals(drawn)
    assert [x for low, high in found for x in range(low, high + 1)] == sorted(
        {x for low, high in drawn for x in range(low, high + 1)}
    )
    assert all(a[1] + 1 < b[0] for a, b in itertools.pairwise(found))


@given(st.lists(chunks(), max_size=5), intervals)
def test_visible_rows_of_many_chunks_are_those_of_each(drawn, wanted):
    wanted = merge_intervals(wanted)
    table = SpanTable(enumerate(drawn)).visible(wanted)
    for spans, rows in zip(drawn, table.tolist()):
        hit = [
            i
            for i, x in enumerate(positions(spans).tolist())
            if any(low <= x <= high for low, high in wanted)
        ]
        expected = (hit[0], hit[-1] + 1) if hit else (0, 0)
        assert visible(spans, wanted) == tuple(rows) == expected


# -- what ranks need ------------------------------------------------------------------------------


def documents(n: int) -> st.SearchStrategy:
    cuts = st.sets(st.integers(1, max(1, n - 1)), max_size=4) if n > 1 else st.just(set())
    edges = cuts.map(lambda found: [0, *sorted(found), n])
    even = st.sampled_from([d for d in range(1, n + 1) if n % d == 0])
    equal = even.map(lambda d: list(range(0, n + 1, d)))
    pairs = st.one_of(edges, equal).map(itertools.pairwise)
    return pairs.map(lambda pairs: weft.Documents(tuple(b - a for a, b in pairs)))


def masks(n: int) -> st.SearchStrategy:
    causal = st.one_of(st.none(), st.integers(1, n)).map(weft.Causal)
    return st.one_of(
        st.sampled_from([weft.Full(), weft.MaskMod(lambda b, h, q, k: (q + k) % 3 != 0)]),
        causal,
        documents(n),
        st.tuples(documents(n), causal).map(lambda pair: pair[0] & pair[1]),
        st.integers(0, n).map(weft.FirstKeys),
        st.integers(0, n).map(weft.prefix_lm),
        st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda pair: weft.Window(*pair)),
    )


dims = st.builds(
    Dim,
    size=st.integers(2, 4),
    splits=st.just("tokens"),
    role=st.sampled_from(["query", "key", "head"]),
    transport=st.sampled_from(["ring", "gather", "auto"]),
    backward=st.sampled_from([None, "query", "key"]),
)


@st.composite
def plans(draw) -> list[Plan]:
    """The plans of all ranks of a small mesh."""
    chosen = draw(st.lists(dims, min_size=1, max_size=3))
    if math.prod(d.size for d in chosen) > 16:
        chosen = chosen[:2]
    chosen = [
        d if d.role != "head" else Dim(d.size, "tokens", "head", False, "auto", None)
        for d in chosen
    ]
    n = draw(st.integers(1, 40))
    layout = layout_of(chosen, {"tokens": draw(st.sampled_from(list(ORDERS)))})
    heads = math.prod(d.size for d in chosen if d.role == "head")
    problem = Problem(
        ("tokens",), ((n, n),), 1, heads, heads, 4, 4, torch.float32, "cpu", mask=draw(masks(n))
    )
    return [plan_for(layout, problem, rank) for rank in range(layout.world_size)]


def needed(mask: Mask, tile: Pass, plan: Plan, side: Side, number: int) -> tuple[int, int]:
    """Rows that a rank needs of a chunk, from each of its other side's chunks in turn."""
    spans = tile.spans(side, plan.coords, number)
    if isinstance(mask, weft.Full):
        return 0, count(spans)
    own = tile.program.own(side.other)
    others = {
        tile.geometry.chunk(side.other, tile.chunk(side.other, plan.coords, i))
        for i in range(own.step)
    }
    rows = [
        visible_queries(mask, spans, other)
        if side is Side.QUERY
        else visible_keys(mask, other, spans)
        for other in others
        if other
    ]
    rows = [(a, b) for a, b in rows if a < b]
    return (min(a for a, _ in rows), max(b for _, b in rows)) if rows else (0, 0)


def groups(made: list[Plan], tile: Pass) -> list[list[Plan]]:
    """Ranks that differ along the dims on which chunks travel only."""
    moving = {d.name for dims in tile.dims for d in dims}
    found: dict[tuple, list[Plan]] = {}
    for plan in made:
        key = tuple(c for d, c in plan.coords.items() if d not in moving)
        found.setdefault(key, []).append(plan)
    return list(found.values())


def all_need_the_same(group: list[Plan], which: str, side: Side) -> bool:
    """The same question as the geometry's, asked of every rank about every chunk."""
    rows: dict[tuple, set] = {}
    for plan in group:
        tile = getattr(plan, which)
        own = tile.program.own(side)
        for number in tile.program.chunks(side):
            if number not in own:
                owner = tile.chunk(side, plan.coords, number)
                found = needed(plan.problem.mask, tile, plan, side, number)
                spans = tile.spans(side, plan.coords, number)
                assert found == tile.geometry.needed(side, plan.coords, spans)
                rows.setdefault((number // own.step, *owner.values()), set()).add(found)
    return all(len(found) == 1 for found in rows.values())


@settings(max_examples=60, deadline=None)
@given(plans())
def test_a_group_decides_as_all_ranks_would(made):
    for which in ("forward", "backward"):
        for group in groups(made, getattr(made[0], which)):
            found = {getattr(plan, which).relayed for plan in group}
            assert found == {tuple(all_need_the_same(group, which, side) for side in Side)}
            assert len({getattr(plan, which).program for plan in group}) == 1


@settings(max_examples=30, deadline=None)
@given(plans())
def test_what_sent_what_received_and_holds_all_that_is_seen(made):
    by_coords = {tuple(plan.coords.values()): plan for plan in made}
    p = made[0].problem
    seen = seen_by(p.mask, 1, 1, p.n, p.m)[0, 0]
    for plan, which in itertools.product(made, ("forward", "backward")):
        tile = getattr(plan, which)
        for t in tile.program.transfers:
            size = plan.sizes[t.mesh_dim]
            source = {
                **plan.coords,
                t.mesh_dim: (plan.coords[t.mesh_dim] + t.ring_offset) % size,
            }
            its = getattr(by_coords[tuple(source.values())], which)
            assert its.transfer_rows(t)[0] == tile.transfer_rows(t)[1]
        for t in tile.program.transfers:
            if not t.payload.is_chunk:
                continue
            side = t.payload.side
            low, high = tile.transfer_rows(t)[1]
            chunk = positions(tile.spans(side, plan.coords, t.target))
            rest = torch.cat([chunk[:low], chunk[high:]])
            for other in tile.program.chunks(side.other):
                mine = positions(tile.spans(side.other, plan.coords, other))
                scores = seen[rest][:, mine] if side is Side.QUERY else seen[mine][:, rest]
                assert not scores.any()


@pytest.mark.parametrize("line", ["ring=8", "tile=4x2", "ulysses=2 x ring=4"])
def test_equal_documents_of_one_rank_each_relayed_and_nothing_moves(line):
    layout = weft.Layout.parse(f"tokens: {line}")
    mask = weft.Documents((4,) * 16) & weft.Causal()
    problem = Problem(("tokens",), ((64, 64),), 1, 2, 2, 4, 4, torch.float32, "cpu", mask=mask)
    plan = plan_for(layout, problem, 3)
    assert plan.forward.relayed == plan.backward.relayed == (True, True)
    rows = [r for t in plan.backward.program.transfers for r in plan.backward.transfer_rows(t)]
    assert all(low == high for low, high in rows)
