"""The scheduler: complete programs, near the optimum, within a declared number of live chunks."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
from search import optimum

from weft.declare.hardware import Hardware
from weft.plan.program import MovingDim, Payload, Program, ProgramStep, Transfer
from weft.plan.replay import live_chunks
from weft.plan.scheduler.choose import live_bound, schedule
from weft.plan.shifts import Shifts
from weft.plan.timing import Costs, duration, timeline

SHAPES = [(a, b) for a in range(1, 7) for b in range(1, 13) if 2 <= a * b <= 12 and a <= b * 3]
#: one chunk of keys and values against one block, and queries against keys and values
TRANSFERS = (0.1, 0.3, 0.7, 1.0, 1.6, 4.0)
QUERIES = (0.5, 1.0, 2.0)


#: nodes of two: cards for each level; cards of the node that messages between nodes pass as well
_NODE = {"name": "node", "ranks": 2, "rate": 4.0}
LEVELS = [
    {"device": {"flops": 1.0}, "level": [_NODE, {"name": "cluster", **outer}]}
    for outer in ({"rate": 1.0}, {"through": True, "uplink": 2.0}, {"through": True, "uplink": 99})
]


# These tests look at the same programs: each worker makes each of them once.
made = functools.cache(schedule)


def dims(size: int, name: str, transport: str = "ring") -> tuple[MovingDim, ...]:
    return (MovingDim(name, size, transport),) if size > 1 else ()


def tile(a: int, b: int, transport: str = "ring"):
    return dims(a, "col", transport), dims(b, "row", transport)


def grid(backward: bool):
    for kv, ratio in itertools.product(TRANSFERS, QUERIES):
        q = kv * ratio
        yield Costs(1.0, q * 1.5 if backward else q, kv, q, kv)


def check_complete(program: Program, backward: bool) -> None:
    """Every block once, from chunks that are here; every partial result sent, once complete."""
    here = {(Payload.Q, 0), (Payload.KV, 0)}
    computed, flying, sent = set(), set(), set()
    back = {Payload.DQ, Payload.DKV} if backward else {Payload.OUT}
    for step in program.steps:
        done = set(computed)
        for t in step.begin:
            if t.payload in back:
                line = {(i, j) for i in range(program.a) for j in range(program.b)}
                mine = {ij for ij in line if ij[t.payload is Payload.DKV] == t.source}
                assert mine <= done, f"{t} leaves before its blocks are computed"
                sent.add((t.payload, t.source))
            else:
                assert (t.payload, t.source) in here, f"{t} has no source yet"
            flying.add(t)
        for block in step.blocks:
            for ij in itertools.product(block.q, block.kv):
                assert ij not in computed
                assert {(Payload.Q, ij[0]), (Payload.KV, ij[1])} <= here
                computed.add(ij)
        for t in step.end:
            flying.remove(t)
            here.add((t.payload, t.target))
    assert not flying
    assert len(computed) == program.a * program.b
    outstanding = {(Payload.DQ if backward else Payload.OUT, i) for i in range(1, program.a)}
    outstanding |= {(Payload.DKV, j) for j in range(1, program.b)} if backward else set()
    assert sent == outstanding


@pytest.mark.few(1)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_programs_compute_every_block_once_and_send_every_result(backward, transport):
    for i, shape in enumerate(SHAPES):
        for costs in list(grid(backward))[i % 4 :: 4]:
            check_complete(made(tile(*shape, transport), costs, backward), backward)


@pytest.mark.few(3)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 4), (4, 4)])
def test_nested_rings_compute_every_block_once(sizes, backward):
    outer, inner = (MovingDim(n, s, "ring") for n, s in zip(("outer", "inner"), sizes))
    for i, level in enumerate(LEVELS):
        for costs in list(grid(backward))[i::3]:
            shifts = Shifts(Hardware.from_dict(level), dict(zip(("outer", "inner"), sizes)))
            slow = replace(costs, shifts=shifts, slowest=shifts.slowest)
            for q, kv in (((), (outer, inner)), ((outer, inner), ()), ((outer,), (inner,))):
                program = schedule((q, kv), slow, backward)
                check_complete(program, backward)
                assert live_chunks(program) <= live_bound((q, kv))


@pytest.mark.few(10)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_program_is_quicker_by_more_than_five_percent(shape, backward):
    for costs in list(grid(backward))[SHAPES.index(shape) % 2 :: 2]:
        found = duration(made(tile(*shape), costs, backward), costs)
        best = optimum(*shape, costs, backward, limit=found / 1.05)
        assert found <= 1.05 * best + 1e-9, f"{costs}: {found:.3f}, there is {best:.3f}"


def test_the_search_finds_what_is_quicker():
    costs = Costs(1.0, 1.5, 1.0, 1.0, 1.0)
    plain = duration(made(tile(3, 3, "gather"), costs, True), costs)
    assert optimum(3, 3, costs, True, limit=plain / 1.05) < plain / 1.05


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_never_slower_than_gather_all_compute_reduce(backward):
    for shape in [*SHAPES, (4, 4), (8, 4), (3, 16)]:
        for costs in list(grid(backward))[:: 1 if shape in SHAPES else 5]:
            plain = made(tile(*shape, "gather"), costs, backward)
            found = made(tile(*shape), costs, backward)
            assert duration(found, costs) <= duration(plain, costs) + 1e-9


@pytest.mark.few(1)
@pytest.mark.parametrize("backward", [False, True])
def test_live_chunks_stay_within_the_declared_bound(backward):
    for shape in [*SHAPES, (1, 64), (64, 1), (8, 8)]:
        for costs in list(grid(backward))[:: 1 if shape in SHAPES else 5]:
            program = made(tile(*shape), costs, backward)
            assert live_chunks(program) <= live_bound(tile(*shape))


def test_a_ring_is_double_buffered():
    assert live_bound(tile(1, 16)) == live_bound(tile(16, 1)) == 2
    assert live_bound(tile(4, 4)) == 6


def test_a_balanced_ring_hides_its_traffic():
    costs = Costs(block=1.0, kv=1.0)
    program = schedule(tile(1, 8), costs, False)
    assert duration(program, costs) == pytest.approx(8.0)


def test_transfers_queue_on_one_link_only():
    begun = (Transfer(Payload.Q, "col", 1, 0, 1), Transfer(Payload.KV, "row", 1, 0, 1))
    program = Program(1, 1, (ProgramStep(begun, (), begun),))
    assert [end for _, _, end in timeline(program, Costs())[0].transfers] == [1.0, 2.0]
    level = [{"name": "node", "ranks": 2, "rate": 2.0}, {"name": "cluster", "rate": 1.0}]
    machine = Hardware.from_dict({"device": {"flops": 1.0}, "level": level})
    shifts = Shifts(machine, {"row": 2, "col": 2})  # a neighbour in the node, and one in the other
    apart = timeline(program, Costs(shifts=shifts, slowest=shifts.slowest))[0]
    assert [end for _, _, end in apart.transfers] == [0.5, 1.0]
    assert apart.end == 1.0


def test_programs_for_thousands_of_ranks_are_quick():
    for q, kv in (tile(1, 4096), tile(64, 64)):
        program = schedule((q, kv), Costs(block=0.125), True)
        assert len(program.transfers) == 2 * (len(q) and 63) + 2 * (63 if q else 4095)
