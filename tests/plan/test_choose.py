"""Chunks that travel in sub_chunks: the same numbers and bytes, and less traffic that shows."""

import pytest
import torch
from covering import covering
from exact import Case, assert_exact

import weft
from weft import Layout
from weft.plan import plan as plans
from weft.plan.plan import Pass
from weft.plan.predict import forecast_of, plan_for
from weft.plan.problem import Problem
from weft.plan.program import Block, MovingDim
from weft.plan.scheduler.choose import choose_sub_chunks, schedule
from weft.plan.timing import Costs, duration
from weft.runtime.marks import name_of

LINES = [
    "tokens: ring=4",
    "tokens(zigzag): ring=4",
    "tokens(striped): ring=3",
    "tokens: pass_q=4",
    "tokens(zigzag): burst=4",
    "tokens: tile=2x2",
    "tokens(striped): tile=3x2",
    "tokens: hierarchical=2x2",
    "tokens(zigzag): ulysses=2 x ring=2",
    "tokens: gather=2 x ring=2",
]
CALLS = {
    "full": {},
    "causal": {"mask": weft.Causal()},
    "packed": {"mask": weft.Documents((3, 1, 7, 2)) & weft.Causal()},
    "a window, rows that see nothing": {"mask": weft.Window(2, 1) & weft.FirstKeys(5)},
    "padded": {"mask": weft.KeyPadding((0, 9))},
    "bias": {"bias": True, "mask": weft.Causal()},
    "all at once": {
        "sinks": True,
        "softcap": 2.0,
        "lse_gradient": True,
        "value_dim": 3,
        "mask": weft.prefix_lm(4),
    },
    "fewer tokens than sub_chunks": {"lengths": ((3, 2),)},
    "no keys": {"lengths": ((5, 0),)},
    "fewer keys": {"lengths": ((17, 6),)},
}


@pytest.fixture
def in_pieces(number, monkeypatch) -> int:
    """Pipelines, even of small calls, in which every chunk travels in a number of sub_chunks."""
    monkeypatch.setattr(plans, "SMALL_BLOCK", 0)
    monkeypatch.setattr(
        plans, "choose_sub_chunks", lambda q, kv, *_: (number if q else 1, number if kv else 1)
    )
    return number


@pytest.mark.few(15)
@covering("line call number", LINES, CALLS, [2, 3])
def test_pieces_are_exact(line, call, in_pieces):
    case = Case(**({"heads": 4, "kv_heads": 2} | CALLS[call]))
    assert_exact(Layout.parse(line), case)


def ask(tokens: int, heads: int = 8, mask: weft.Mask | None = None) -> Problem:
    """Self-attention in fp32 with heads of 64 numbers."""
    mask = mask or weft.Full()
    sizes = (("tokens",), ((tokens, tokens),), 1, heads, heads, 64, 64, torch.float32, "cpu")
    return Problem(*sizes, mask=mask)


@pytest.mark.few(8)
@covering("line mask number", LINES[:-1], [weft.Full(), weft.Causal(), weft.Window(3, 2)], [2, 3])
def test_pieces_move_no_more_bytes(line, mask, in_pieces, monkeypatch):
    layout, problem = Layout.parse(line), ask(41, mask=mask)
    cut = [plan_for(layout, problem, rank) for rank in range(layout.world_size)]
    monkeypatch.setattr(plans, "choose_sub_chunks", lambda *_: (1, 1))
    whole = [plan_for(layout, problem, rank) for rank in range(layout.world_size)]
    for one in ("forward", "backward"):
        moved = [
            sum(getattr(forecast_of(plan), one).traffic.bytes for plan in these)
            for these in (cut, whole)
        ]
        assert moved[0] <= moved[1]
        if isinstance(mask, weft.Full):
            assert moved[0] == moved[1]


# -- when chunks are cut ---------------------------------------------------------------------------


def rings(a: int, b: int) -> tuple[tuple[MovingDim, ...], tuple[MovingDim, ...]]:
    """A tile of two rings."""
    sides = (("q", a), ("kv", b))
    return tuple((MovingDim(name, n, "ring"),) if n > 1 else () for name, n in sides)


def balanced(line: str, problem: Problem) -> Layout:
    """A layout whose rates make traffic alone take as long as compute alone."""
    flops = 1e12
    declared = Layout.parse(line).declaration
    plan = plan_for(Layout.from_dict(declared | {"rates": {"latency": 0.0}}), problem, 0)
    parts = [forecast_of(plan).forward.traffic.bytes, forecast_of(plan).backward.traffic.bytes]
    ranks = Layout.from_dict(declared).world_size
    work = 2 * 3.5 * problem.heads * problem.n * problem.m * 128 / ranks
    rates = {"flops": flops, "bandwidth": sum(parts) * flops / work, "latency": 0.0}
    return Layout.from_dict(declared | {"rates": rates})


BALANCED = [f"{name}={n}" for name in ("ring", "pass_q", "burst") for n in (2, 3, 4, 8, 16)]
BALANCED += [f"tile={a}x{b}" for a, b in ((2, 2), (2, 4), (4, 2), (3, 3), (4, 4), (4, 8))]


@pytest.mark.few(10)
@pytest.mark.parametrize("heads", [8, 16], ids="{} heads".format)
@pytest.mark.parametrize("line", BALANCED)
def test_balanced_traffic_is_hidden(line, heads):
    """Forward and backward within 1.25 of the larger of compute alone and traffic alone."""
    problem = ask(1 << 14, heads)
    layout = balanced(f"tokens: {line}", problem)
    plan = plan_for(layout, problem, rank=0)
    compute, traffic, total = map(sum, zip(*map(clock, (plan.forward, plan.backward))))
    assert traffic == pytest.approx(compute, rel=0.02)
    assert total <= 1.25 * max(compute, traffic)


def clock(tile: Pass) -> tuple[float, float, float]:
    """Of a pass on one link: its blocks, and its transfers, one after another; and the program."""
    program = tile.program
    costs = tile.plan.costs(tile.dims, tile.backward).cut(program.sub_chunks)
    blocks = program.a * program.b * costs.block
    return blocks, sum(map(costs.transfer, program.transfers)), duration(program, costs)


def test_few_chunks_that_take_as_long_as_their_blocks_cut():
    for shape in ((1, 2), (2, 1), (2, 2)):
        costs = Costs(block=1.0, kv=2.0)
        q, kv = rings(*shape)
        assert choose_sub_chunks((q, kv), costs, False) == (2 if q else 1, 2 if kv else 1)


@pytest.mark.parametrize(
    ("shape", "costs"),
    [
        ((1, 1), Costs()),
        ((1, 4), Costs(block=1.0, kv=0.1)),  # hidden as they are
        ((1, 32), Costs(block=1.0, kv=1.0)),  # many chunks
        ((1, 2), Costs(block=1.0, kv=2.0, latency=0.1)),  # short blocks
    ],
    ids=["nothing travels", "hidden", "many", "short"],
)
def test_other_chunks_travel_whole(shape, costs):
    assert choose_sub_chunks(rings(*shape), costs, False) == (1, 1)


def test_chunks_whose_launches_and_merges_cost_more_travel_whole():
    whole = Costs(block=1.0, kv=2.0)
    assert choose_sub_chunks(rings(1, 2), whole, False) == (1, 2)
    for price in ({"launch": 0.6}, {"merge_q": 0.6}):
        assert choose_sub_chunks(rings(1, 2), Costs(block=1.6, kv=2.0, **price), False) == (1, 1)
    grows = Costs(block=1.6, kv=2.0, merge_kv=0.6)  # a half has half of it
    assert grows.cut((1, 2)).block == 0.8


def test_a_collective_is_not_cut():
    dims = (MovingDim("kv", 2, "gather"),)
    assert choose_sub_chunks(((), dims), Costs(block=1.0, kv=2.0), False) == (1, 1)


@pytest.mark.parametrize("backward", [False, True])
def test_cut_chunks_are_never_slower(backward):
    for shape in ((1, 2), (2, 1), (1, 5), (2, 2), (2, 4), (4, 4)):
        for traffic in (0.1, 0.5, 1.0, 2.0, 8.0):
            costs = Costs(1.0, traffic, traffic, traffic / 2, traffic)
            cut = choose_sub_chunks(rings(*shape), costs, backward)
            whole = schedule(rings(*shape), costs, backward)
            made = schedule(rings(*shape), costs, backward, sub_chunks=cut)
            assert duration(made, costs.cut(cut)) <= duration(whole, costs)


# -- how they are named ----------------------------------------------------------------------------


def test_pieces_are_named_after_their_owner():
    problem = ask(1 << 12)
    tile = plan_for(balanced("tokens: ring=2", problem), problem, rank=0).forward
    assert tile.program.sub_chunks == (1, 2)
    transfers, blocks = tile.program.transfers, [b for s in tile.program.steps for b in s.blocks]
    assert [name_of(tile, t) for t in transfers] == ["kv 1a on ring", "kv 1b on ring"]
    assert "q 0 x kv 1b" in [name_of(tile, b) for b in blocks]
    assert name_of(tile, Block((0,), (0, 2))) == "q 0 x kv 0"
