"""Tensors in one buffer: where they begin, and that predicted bytes are those of the buffer."""

import hypothesis.strategies as st
import pytest
import strides
import torch
from exact import Case, assert_exact, tokens
from hypothesis import given, settings

import weft
from weft.comm import Transport
from weft.plan.memory import ALIGNMENT, payload_bytes
from weft.plan.predict import forecast_of, plan_for
from weft.plan.problem import Problem
from weft.plan.program import Payload
from weft.runtime import resharding, tile_run
from weft.runtime.buffers import Buffers, buffer_for, pack, unpack

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
    buffer = pack(tensors, alignment)
    empty = buffer_for(shapes, "cpu", alignment)
    assert buffer.is_contiguous()
    assert (buffer.shape, buffer.dtype) == (empty.shape, empty.dtype)
    for t, found in zip(tensors, unpack(buffer, shapes, alignment)):
        assert torch.equal(t, found)
        assert found.data_ptr() % alignment == 0 or not found.numel() or len(tensors) == 1


@pytest.fixture
def unpacked(monkeypatch):
    """Tensors that arrived, with the buffers in which they did."""
    seen = []

    def spy(buffer, shapes):
        found = unpack(buffer, shapes)
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
        assert nbytes == buffer_for(typed, "cpu").nbytes
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
    assert pack([torch.ones(3), torch.ones(5)], 1).shape == (8,)
    assert pack([torch.ones(3), torch.ones(5)]).shape == (4 + 5,)


# -- buffers and indices that are used again ------------------------------------------------------


@pytest.fixture
def made(monkeypatch):
    """Whether a buffer to receive into was there already, by pass of a rank."""
    found = {}

    class Spy(Buffers):
        def take(self):
            before = {id(t) for t in self.kept()}
            taken = super().take()
            found.setdefault(self, []).append(id(taken) in before)
            return taken

    monkeypatch.setattr(tile_run, "Buffers", Spy)
    return found


def test_ring_receives_into_two_buffers_however_many_ranks_there_are(made):
    layout = weft.Layout.parse("tokens: ring=8")
    q = torch.randn(1, 2, 64, 8)

    def rank(layout):
        mine = layout.shard(q, {"tokens": 2}).requires_grad_()
        weft.attention(mine, mine, mine, layout, "tokens").sum().backward()

    weft.on_threads(layout, rank)
    assert len(made) == 16
    for again in made.values():
        assert len(again) >= 7
        assert again.count(False) <= 4, again  # forward two; backward two of gradients beside them
    assert [again.count(False) for again in made.values() if len(again) == 7] == [2] * 8


def test_a_buffer_is_kept_for_the_next_step_only():
    four, five = [((4, 4), torch.float32)], [((5, 4), torch.float32)]
    buffers = Buffers(torch.device("cpu"), [[four], [four], [five, four], [five], [four]])
    buffers.step()
    one = buffers.take()
    buffers.retire(one)
    buffers.recycle([one])  # still on its way out
    buffers.step()
    assert buffers.take() is not one
    buffers.recycle([])
    buffers.step()
    assert buffers.take() is not one  # too small
    assert buffers.take() is one
    buffers.retire(one)
    buffers.recycle([])  # the next step needs a larger one
    assert not buffers.kept()


def test_a_buffer_in_flight_is_not_reused():
    """Queries of one sequence and head are packed without a copy: some rows of what came."""
    whole, rows = ((1, 1, 8, 4), torch.float32), slice(2, 6)
    buffers = Buffers(torch.device("cpu"), [[[whole]]] * 3)
    buffers.step()
    one = buffers.take()
    (came,) = unpack(one, [whole])
    part = pack([came[:, :, rows]])
    assert part.data_ptr() == came[:, :, rows].data_ptr()
    buffers.retire(one)
    buffers.recycle([part])
    buffers.step()
    assert buffers.take() is not one
    buffers.recycle([])
    buffers.step()
    assert buffers.take() is one


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
