"""Tensors in one buffer: where they begin, and that predicted bytes are those of the buffer."""

import hypothesis.strategies as st
import pytest
import strides
import torch
from exact import Case, assert_exact, tokens
from hypothesis import given, settings

import weft
from weft.comm import Transport
from weft.declare.mesh import coordinates
from weft.move.rotate import pack, unpack
from weft.plan.memory import ALIGNMENT, payload_bytes
from weft.plan.plan import Plan
from weft.plan.predict import forecast_of, plan_for
from weft.plan.problem import Problem
from weft.plan.program import Payload
from weft.plan.steps import _Buffers, form_of, steps_of
from weft.runtime import resharding, tile_run

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SHAPES = st.lists(
    st.tuples(st.lists(st.integers(0, 5), min_size=4, max_size=4), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=5,
)


@given(SHAPES, st.sampled_from(strides.NAMES), st.sampled_from([1, ALIGNMENT]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_what_is_packed_is_unpacked(shapes, name, alignment):
    tensors = [strides.lay(torch.randn(*shape).to(dtype), name) for shape, dtype in shapes]
    shapes = [(tuple(t.shape), t.dtype) for t in tensors]
    if alignment == 1 and len({dtype for _, dtype in shapes}) > 1:
        return  # all-to-alls, which are not aligned, are of one dtype
    form = form_of(shapes, alignment)
    buffer = pack(tensors, form)
    assert buffer.is_contiguous()
    assert (buffer.shape, buffer.dtype) == ((form.numel,), form.dtype)
    for t, found in zip(tensors, unpack(buffer, form)):
        assert torch.equal(t, found)
        assert found.data_ptr() % alignment == 0 or not found.numel() or len(tensors) == 1


@pytest.fixture
def unpacked(monkeypatch):
    """Tensors that arrived, with the buffers in which they did."""
    seen = []

    def spy(buffer, form):
        found = unpack(buffer, form)
        seen.extend((buffer, t) for t in found)
        return found

    monkeypatch.setattr(tile_run, "unpack", spy)
    return seen


@pytest.mark.parametrize("line", ["tokens: ring=2", "tokens: pass_q=2", "tokens: tile=2x2"])
def test_received_tensors_begin_at_multiples_of_16_bytes(unpacked, line):
    """5 heads of 1,001 rows: lse and delta of 20,020 bytes each come before q and dout."""
    layout = weft.Layout.parse(line)
    length = 1001 * layout.world_size
    q, k, v = torch.randn(3, 1, 5, length, 8, dtype=torch.bfloat16)

    def rank(layout):
        mine = [layout.shard(t, {"tokens": 2}).requires_grad_() for t in (q, k, v)]
        weft.attention(*mine, layout, "tokens", length=length).sum().backward()

    weft.on_threads(layout, rank)
    assert unpacked
    for buffer, t in unpacked:
        assert (t.data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 7, 1001])
def test_payload_bytes_are_those_of_the_buffer(dtype, rows):
    problem = Problem(("tokens",), ((2002, 2002),), 1, 5, 5, 20, 12, dtype, "cpu")
    plan = plan_for(weft.Layout.load("ring-2"), problem, rank=0)
    accum = plan.accum_dtype
    shapes = {
        (Payload.Q, True): [(1, 5, rows), (1, 5, rows), (1, 5, rows, 20), (1, 5, rows, 12)],
        (Payload.OUT, False): [(1, 5, rows), (1, 5, rows, 12)],
        (Payload.KV, False): [(1, 5, rows, 20), (1, 5, rows, 12)],
        (Payload.DQ, True): [(1, 5, rows, 20)],
    }
    for (payload, backward), sizes in shapes.items():
        typed = [(size, accum if len(size) == 3 else dtype) for size in sizes]
        nbytes = payload_bytes(plan, payload, backward, rows)
        form = form_of(typed)
        assert nbytes == form.numel * form.dtype.itemsize
        dense = 5 * rows * problem.row_bytes(payload, backward)
        assert 0 <= nbytes - dense < ALIGNMENT * len(sizes)


@pytest.mark.parametrize("name", ["ring-4", "pass-q-4", "tile-2x2", "burst-4", "hierarchical-2x2"])
def test_predicted_bytes_are_counted_bytes_where_rows_need_padding(name):
    layout, heads, length = weft.Layout.load(name), 5, 37
    problem = Problem(
        ("tokens",), ((length, length),), 1, heads, heads, 6, 10, torch.bfloat16, "cpu"
    )
    q, k = torch.randn(2, 1, heads, length, 6, dtype=torch.bfloat16)
    v = torch.randn(1, heads, length, 10, dtype=torch.bfloat16)

    def rank(layout):
        mine = [layout.shard(t, {"tokens": 2}).requires_grad_() for t in (q, k, v)]
        with weft.traffic(layout) as moved:
            weft.attention(*mine, layout, "tokens", length=length).sum().backward()
        forecast = forecast_of(plan_for(layout, problem, layout.rank))
        wanted = forecast.forward.traffic.received + forecast.backward.traffic.received
        return moved.received == wanted, +moved.received, +wanted

    for same, found, wanted in weft.on_threads(layout, rank):
        assert same, (found, wanted)


def test_odd_rows_are_exact():
    case = Case(lengths=tokens(37), heads=5, kv_heads=5, dim=3, value_dim=7, lse_gradient=True)
    for name in ("ring-4", "tile-2x2"):
        assert_exact(weft.Layout.load(name), case)


def test_all_to_alls_are_not_padded():
    shapes = [((3,), torch.float32), ((5,), torch.float32)]
    assert form_of(shapes, 1).numel == 8
    assert form_of(shapes).numel == 4 + 5


# -- buffers and indices that are used again ------------------------------------------------------


def buffers_received(plan) -> list[tuple[int, int]]:
    """How many messages a rank receives in each pass, and into how many buffers."""
    counts = []
    for tile in (plan.forward, plan.backward):
        moves = [move for step in steps_of(tile).steps for move in step.begin]
        buffers = [move.receive.buffer for move in moves if move.receive is not None]
        counts.append((len(buffers), len(set(buffers))))
    return counts


def test_ring_receives_into_two_buffers_however_many_ranks_there_are():
    problem = Problem.of("tokens", 64, heads=2, head_dim=8)
    layout = weft.Layout.parse("tokens: ring=8")
    for rank in range(8):
        forward, backward = buffers_received(plan_for(layout, problem, rank))
        assert forward == (7, 2)
        assert backward[1] <= 4  # two of gradients beside them


def test_a_buffer_is_kept_for_the_next_step_only():
    four, five = (form_of([((n, 4), torch.float32)]) for n in (4, 5))
    buffers = _Buffers()
    one = buffers.take(four)
    buffers.retire(one, four)
    assert buffers.recycle([one], [four]) == ()  # still on its way out
    other = buffers.take(four)
    assert other != one
    assert buffers.recycle([], [five, four]) == ()
    assert buffers.take(five) != one  # too small
    assert buffers.take(four) == one
    buffers.retire(one, four)
    assert buffers.recycle([], [five]) == (one,)  # the next step needs a larger one


@pytest.mark.parametrize(
    "line", ["tokens: pass_q=4", "tokens: pass_q=2 x ring=4", "tokens: tile=2x4"]
)
@pytest.mark.parametrize("mask", [weft.Full(), weft.Causal(9)], ids=str)
@pytest.mark.parametrize("heads", [1, 2])
def test_a_buffer_in_flight_is_neither_reused_nor_freed(line, mask, heads, monkeypatch):
    """Queries of one sequence and head are sent without a copy: some rows of what came."""
    monkeypatch.setattr("weft.plan.plan.SMALL_BLOCK", 0)  # rings, as of long sequences
    problem = Problem.of("tokens", 64, heads=heads, head_dim=8, mask=mask)
    layout = weft.Layout.parse(line)
    for rank in range(layout.world_size):
        plan = Plan(layout, problem.on(layout, rank), coordinates(layout.mesh, rank))
        for tile in (plan.forward, plan.backward):
            sending, filled = [], {}
            for step in steps_of(tile).steps:
                for move in step.begin:
                    if move.send is not None:
                        whole = filled.get((move.transfer.payload, move.transfer.source))
                        sending.append((move.number, {move.send.buffer, whole}))
                    if move.receive is not None:
                        assert all(move.receive.buffer not in read for _, read in sending)
                for move in step.end:
                    sending = [(number, read) for number, read in sending if number != move.number]
                    if move.receive is not None:
                        filled[move.transfer.payload, move.transfer.target] = move.receive.buffer
                assert not any(read & {*step.frees} for _, read in sending)


def test_a_second_call_copies_and_sorts_nothing(monkeypatch):
    """Zigzag inside Ulysses sorts tokens on the way in and out, by indices that are kept."""
    weft.clear_caches()
    copies, sorts, sort = [], [], torch.argsort
    monkeypatch.setattr(resharding, "upload", lambda t, device: copies.append(t) or t)
    monkeypatch.setattr(torch, "argsort", lambda *a, **named: sorts.append(a) or sort(*a, **named))
    layout = weft.Layout.parse("tokens(zigzag): ulysses=2 x ring=2")
    q = torch.randn(1, 4, 32, 8)
    counts = []

    def rank(layout):
        for _ in range(3):
            mine = layout.shard(q, {"tokens": 2}).requires_grad_()
            weft.attention(mine, mine, mine, layout, "tokens", weft.Causal()).sum().backward()
            layout.gather(mine.detach(), {"tokens": 2})
            if layout.rank == 0:
                counts.append((len(copies), len(sorts)))

    weft.on_threads(layout, rank)
    assert counts[0][0] > 0
    assert counts[1] == counts[2]


@pytest.mark.parametrize(
    ("line", "launches"),
    [("tokens: gather=4", 1), ("tokens: ring=4", 3), ("tokens: gather=2 x gather=2", 2)],
)
def test_what_begins_and_ends_together_is_one_launch(monkeypatch, line, launches):
    """Each would cost a launch of its own on a GPU, in a row on one stream."""
    layout, started = weft.Layout.parse(line), []
    start = Transport.start
    monkeypatch.setattr(
        Transport,
        "start",
        lambda self, p2p, *a: started.append(len(p2p.sends)) or start(self, p2p, *a),
    )
    q = torch.randn(1, 2, 32, 8)

    def rank(layout):
        mine = layout.shard(q, {"tokens": 2})
        return weft.attention(mine, mine, mine, layout, "tokens")

    weft.on_threads(layout, rank)
    assert len(started) == 4 * launches
    assert sum(started) == 4 * 3
