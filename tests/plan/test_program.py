"""Programs as data: every block once and only with what has arrived; every result home once."""

import functools
import itertools
import math

import pytest

from weft.declare.hardware import Hardware
from weft.plan.program import MovingDim, Payload, Program
from weft.plan.replay import live_chunks
from weft.plan.scheduler.choose import live_bound, schedule
from weft.plan.shifts import Shifts
from weft.plan.sides import Sides
from weft.plan.timing import Costs

SIZES = [(), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]
PAIRS = [(a, b) for a, b in itertools.product(SIZES, repeat=2) if math.prod(a + b) <= 12]
COSTS = [Costs(block=0.2, q=3.0, kv=1.0), Costs(block=5.0, q=0.5, kv=2.0, back_kv=2.0)]


def _dims(prefix: str, sizes: tuple[int, ...], transports) -> tuple[MovingDim, ...]:
    names = (f"{prefix}{i}" for i in range(len(sizes)))
    return tuple(MovingDim(*dim) for dim in zip(names, sizes, transports))


@functools.cache
def _programs(q_sizes, kv_sizes) -> list:
    """Programs of a tile with their dims, for every mix of transports, costs, pass and relay."""
    programs, count = [], len(q_sizes) + len(kv_sizes)
    mixes = [("ring",) * count, ("gather",) * count, tuple(["ring", "gather"] * count)[:count]]
    for transports, costs, backward, relay in itertools.product(
        sorted(set(mixes)), COSTS, (False, True), (False, True)
    ):
        dims = Sides(
            _dims("q", q_sizes, transports[: len(q_sizes)]),
            _dims("k", kv_sizes, transports[len(q_sizes) :]),
        )
        program = schedule(dims, costs, backward, Sides(relay, relay))
        programs.append((program, dims, backward))
    return programs


def _times(program: Program) -> tuple[dict, dict]:
    """Step in which each transfer begins, and after which it has ended; each happens once."""
    begin, end = {}, {}
    for i, step in enumerate(program.steps):
        for transfers, times in ((step.begin, begin), (step.end, end)):
            for transfer in transfers:
                assert transfer not in times
                times[transfer] = i
    assert begin.keys() == end.keys()
    assert all(begin[t] <= end[t] for t in begin)
    return begin, end


def _arrived(end: dict, payload: Payload) -> dict[int, int]:
    """Chunk number -> the first step that may use it."""
    arrived = {0: 0}
    for transfer, step in end.items():
        if transfer.payload is payload:
            assert transfer.target not in arrived, "a chunk came twice"
            arrived[transfer.target] = step + 1
    return arrived


@pytest.mark.few(5)
@pytest.mark.parametrize(("q_sizes", "kv_sizes"), PAIRS, ids=str)
def test_blocks_computed_once_after_their_chunks_arrived_in_earlier_steps(q_sizes, kv_sizes):
    a, b = math.prod(q_sizes), math.prod(kv_sizes)
    for program, *_ in _programs(q_sizes, kv_sizes):
        assert (program.a, program.b) == (a, b)
        begin, end = _times(program)
        q, kv = _arrived(end, Payload.Q), _arrived(end, Payload.KV)
        assert set(q) == set(range(a))
        assert set(kv) == set(range(b))
        done = []
        for i, step in enumerate(program.steps):
            for block in step.blocks:
                for x, y in itertools.product(block.q, block.kv):
                    assert q[x] <= i
                    assert kv[y] <= i
                    done.append((x, y))
        assert sorted(done) == sorted(itertools.product(range(a), range(b)))
        for transfer, step in begin.items():
            if transfer.payload in (Payload.Q, Payload.KV):
                held = q if transfer.payload is Payload.Q else kv
                assert held[transfer.source] <= step, "passed on before it came"


@pytest.mark.few(12)
@pytest.mark.parametrize(("q_sizes", "kv_sizes"), PAIRS, ids=str)
def test_what_is_computed_while_chunks_travel_is_a_prefix_rectangle(q_sizes, kv_sizes):
    for program, *_ in _programs(q_sizes, kv_sizes):
        begin, end = _times(program)
        for payload in (Payload.Q, Payload.KV):
            order = sorted((end[t], t.target) for t in end if t.payload is payload)
            held = {0}
            for _, group in itertools.groupby(order, key=lambda pair: pair[0]):
                held |= {target for _, target in group}
                taken = {t.source for t in begin if t.payload is payload and t.target in held}
                assert taken <= held, "a chunk came without the one that it is passed on from"


@pytest.mark.few(12)
@pytest.mark.parametrize(("q_sizes", "kv_sizes"), PAIRS, ids=str)
def test_no_more_chunks_are_held_at_once_than_promised(q_sizes, kv_sizes):
    for program, dims, _ in _programs(q_sizes, kv_sizes):
        assert live_chunks(program) <= live_bound(dims)


def _coords(dims: tuple[MovingDim, ...], number: int) -> list[int]:
    digits = []
    for dim in reversed(dims):
        number, digit = divmod(number, dim.size)
        digits.insert(0, digit)
    return digits


@pytest.mark.few(12)
@pytest.mark.parametrize(("q_sizes", "kv_sizes"), PAIRS, ids=str)
def test_chunks_come_from_where_they_and_results_go_home_once(q_sizes, kv_sizes):
    for program, both, backward in _programs(q_sizes, kv_sizes):
        begin, end = _times(program)
        back = (Payload.DQ, Payload.DKV) if backward else (Payload.OUT,)
        for payload in (Payload.Q, Payload.KV, *back):
            dims = both[payload.side]
            moves = [t for t in begin if t.payload is payload]
            numbers = [t.source if payload in back else t.target for t in moves]
            assert sorted(numbers) == list(range(1, math.prod(d.size for d in dims)))
            for t in moves:
                _same_owner(dims, t)
            if payload in back:
                for t in moves:
                    _complete_before(program, begin, end, t)


def _same_owner(dims, t) -> None:
    """On every rank chunk `target` is chunk `source` of the rank `ring_offset` further along."""
    index = next(i for i, d in enumerate(dims) if d.name == t.mesh_dim)
    source, target = _coords(dims, t.source), _coords(dims, t.target)
    source[index] = (source[index] + t.ring_offset) % dims[index].size
    assert source == target


def _complete_before(program, begin, end, t) -> None:
    """A partial result leaves after its last block and after all that is merged into it."""
    for i, step in enumerate(program.steps):
        for block in step.blocks:
            if t.source in block.sides[t.payload.side]:
                assert i < begin[t]
    for other in begin:
        if other.payload is t.payload and other.target == t.source:
            assert end[other] < begin[t]


def test_a_ring_computes_while_chunks_travel_a_gather_at_once():
    ring = schedule(((), (MovingDim("r", 4, "ring"),)), Costs(), False)
    assert [len(step.blocks) for step in ring.steps] == [1] * 4
    assert all(t.ring_offset == 1 for t in ring.transfers)
    gather = schedule(((), (MovingDim("r", 4, "gather"),)), Costs(), False)
    assert [block.kv for step in gather.steps for block in step.blocks] == [(0, 1, 2, 3)]
    assert [t.ring_offset for t in gather.transfers] == [1, 2, 3]


def test_outer_ring_prefetches_during_whole_turn_of_the_inner_one():
    dims = (MovingDim("inter", 2, "ring"), MovingDim("intra", 4, "ring"))
    level = [
        {"name": "node", "ranks": 4, "rate": 1.0},
        {"name": "cluster", "rate": 0.25},
    ]
    machine = Hardware.from_dict({"device": {"flops": 1.0}, "level": level})
    shifts = Shifts(machine, {"inter": 2, "intra": 4})
    costs = Costs(kv=shifts.slowest, shifts=shifts, slowest=shifts.slowest)
    program = schedule(((), dims), costs, False)
    begin, end = _times(program)
    (outer,) = (t for t in begin if t.mesh_dim == "inter")
    assert (begin[outer], end[outer]) == (0, 3)
    assert [t.mesh_dim for t in program.transfers].count("inter") == 1


def test_square_tile_begins_to_return_rows_before_last_chunk_computed():
    sides = ((MovingDim("c", 3, "ring"),), (MovingDim("r", 3, "ring"),))
    program = schedule(sides, Costs(), False)
    begin, _ = _times(program)
    first = min(step for t, step in begin.items() if t.payload is Payload.OUT)
    last = max(i for i, step in enumerate(program.steps) if step.blocks)
    assert first <= last
