"""Counted bytes equal the published formulas, and masks ship no more than what is seen.

In units of one chunk of queries, u = (N / P) heads dim itemsize bytes, with g = kv heads / heads
and lam = 4 / (dim itemsize): a logsumexp or delta travels in fp32 per row and head.
"""

import io
from fractions import Fraction

import pytest
import torch
from rich.console import Console

import weft
from weft import Causal, FirstKeys, Full, Layout, Window
from weft.comm import run_threads
from weft.inspect.words import nbytes

HEADS, DIM, BATCH = 8, 16, 2


def _layout(mesh: dict, entries: list[str], order: str = "contiguous") -> Layout:
    attend = [dict(zip(("strategy", "on"), entry.split())) for entry in entries]
    shard = {"tokens": list(mesh)}
    declaration = {"mesh": mesh, "shard": shard, "order": {"tokens": order}}
    return Layout.from_dict(declaration | {"attend": {"tokens": attend}})


def _measure(layout: Layout, n: int, kv_heads: int, dtype=torch.float32, mask=None, **options):
    """Per rank: (forward, backward) `Traffic`."""
    mask = Full() if mask is None else mask
    make = torch.Generator().manual_seed(0)
    whole = [torch.randn(BATCH, h, n, DIM, generator=make) for h in (HEADS, kv_heads, kv_heads)]

    def rank(transport):
        here = layout.on(transport)
        q, k, v = (here.shard(t.to(dtype), {"tokens": 2}).requires_grad_() for t in whole)
        with weft.traffic(here) as forward:
            out = weft.attention(q, k, v, here, "tokens", mask, length=n, **options)
        with weft.traffic(here) as backward:
            out.backward(torch.randn(out.shape, dtype=dtype))
        return forward, backward

    return run_threads(layout.mesh, rank, timeout=20)


def _tile(a, b, g, lam):
    return (a - 1) * (2 + lam) + 2 * g * (b - 1), (a - 1) * (3 + 2 * lam) + 4 * g * (b - 1)


def _ulysses(ways, g):
    return ((2 + 2 * g) * Fraction(ways - 1, ways),) * 2


def _add(*terms):
    return tuple(map(sum, zip(*terms)))


FORMULAS = {
    # name: (mesh, strategies, (g, lam) -> chunks received forward and backward)
    "ring": ({"r": 4}, ["ring r"], lambda g, lam: _tile(1, 4, g, lam)),
    "gather": ({"r": 4}, ["gather r"], lambda g, lam: _tile(1, 4, g, lam)),
    "ring of 8": ({"r": 8}, ["ring r"], lambda g, lam: _tile(1, 8, g, lam)),
    "double ring": ({"a": 2, "b": 4}, ["ring a", "ring b"], lambda g, lam: _tile(1, 8, g, lam)),
    "pass-Q": ({"r": 4}, ["pass_q r"], lambda g, lam: _tile(4, 1, g, lam)),
    "double pass-Q": (
        {"a": 2, "b": 2},
        ["pass_q a", "pass_q b"],
        lambda g, lam: _tile(4, 1, g, lam),
    ),
    "burst": (
        {"r": 4},
        ["burst r"],
        lambda g, lam: (_tile(1, 4, g, lam)[0], _tile(4, 1, g, lam)[1]),
    ),
    "tile 2x2": ({"a": 2, "b": 2}, ["ring a", "pass_q b"], lambda g, lam: _tile(2, 2, g, lam)),
    "tile 4x2": ({"a": 2, "b": 4}, ["ring a", "pass_q b"], lambda g, lam: _tile(4, 2, g, lam)),
    "tile 3x5": ({"a": 5, "b": 3}, ["ring a", "pass_q b"], lambda g, lam: _tile(3, 5, g, lam)),
    "Ulysses": ({"h": 2}, ["ulysses h"], lambda g, lam: _ulysses(2, g)),
    "Ulysses x ring": (
        {"h": 2, "r": 4},
        ["ulysses h", "ring r"],
        lambda g, lam: _add(_ulysses(2, g), _tile(1, 4, g, lam)),
    ),
    "Ulysses x tile": (
        {"h": 2, "a": 2, "b": 3},
        ["ulysses h", "ring a", "pass_q b"],
        lambda g, lam: _add(_ulysses(2, g), _tile(3, 2, g, lam)),
    ),
    "tile x Ulysses": (
        {"a": 2, "b": 2, "h": 2},
        ["ring a", "pass_q b", "ulysses h"],
        lambda g, lam: _add(_ulysses(2, g), _tile(2, 2, g, lam)),
    ),
}


@pytest.mark.few(13)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("name", FORMULAS)
def test_bytes_received_are_those_of_the_formula(name, kv_heads, dtype):
    mesh, entries, formula = FORMULAS[name]
    layout = _layout(mesh, entries)
    chunk = 4
    n = chunk * layout.world_size
    unit = BATCH * HEADS * chunk * DIM * dtype.itemsize
    lam = Fraction(4, DIM * dtype.itemsize)
    wanted = [unit * part for part in formula(Fraction(kv_heads, HEADS), lam)]
    for passes in _measure(layout, n, kv_heads, dtype):
        assert [moved.bytes for moved in passes] == wanted
        assert [sum(moved.sent.values()) for moved in passes] == wanted


@pytest.mark.parametrize("order", ["zigzag", "striped"])
@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_balanced_causal_work_moves_no_more_than_full_work(order, transport):
    layout = _layout({"r": 4}, [f"{transport} r"], order)
    full = _measure(layout, 64, 2)
    causal = _measure(layout, 64, 2, mask=Causal())
    for ours, theirs in zip(causal, full):
        assert all(some.bytes <= whole.bytes for some, whole in zip(ours, theirs))


def test_every_tensor_is_counted_under_its_name_and_mesh_dim():
    layout = _layout({"h": 2, "a": 2, "b": 2}, ["ulysses h", "ring a", "pass_q b"])
    forward, backward = _measure(layout, 32, 2)[0]
    assert set(forward.received) == {
        ("h", "qkv"),
        ("h", "out"),
        ("a", "kv"),
        ("b", "q"),
        ("b", "out"),
    }
    assert set(backward.by_tensor()) == {"dout", "dqkv", "kv", "dkv", "q", "dq"}
    assert sum(forward.by_mesh_dim().values()) == forward.bytes
    assert all(forward.calls.values())


def test_the_outer_ring_carries_each_chunk_once():
    """Per rank of w in a node, an outer dim of P / w carries 2 g (P / w - 1) chunks."""
    layout = _layout({"inter": 2, "intra": 4}, ["ring inter", "ring intra"])
    unit = 2 * BATCH * 2 * 4 * DIM * 4
    for forward, _ in _measure(layout, 32, 2):
        assert forward.by_mesh_dim() == {"inter": unit, "intra": 6 * unit}


TOKEN = 2 * BATCH * 2 * DIM * 4  # a key and a value of every sequence and of 2 heads
QUERY = BATCH * HEADS * DIM * 4


@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_a_window_ships_only_the_halo(transport):
    layout = _layout({"r": 4}, [f"{transport} r"])
    for rank, (forward, backward) in enumerate(_measure(layout, 64, 2, mask=Causal(window=6))):
        assert forward.bytes == (5 * TOKEN if rank else 0)
        assert backward.by_tensor().get("kv", 0) == (5 * TOKEN if rank else 0)
        assert backward.by_tensor().get("dkv", 0) == (5 * TOKEN if rank < 3 else 0)


def test_window_wider_than_chunk_ships_the_chunks_that_it_reaches():
    layout = _layout({"r": 4}, ["ring r"])
    for rank, (forward, _) in enumerate(_measure(layout, 64, 2, mask=Causal(window=20))):
        assert forward.bytes == min(19, 16 * rank) * TOKEN


def test_a_two_sided_window_ships_a_halo_on_both_sides():
    layout = _layout({"r": 4}, ["ring r"])
    for rank, (forward, _) in enumerate(_measure(layout, 64, 2, mask=Window(3, 5))):
        assert forward.bytes == ((3 if rank else 0) + (5 if rank < 3 else 0)) * TOKEN


def test_a_window_ships_only_the_queries_that_see_the_keys():
    layout = _layout({"r": 4}, ["pass_q r"])
    row = QUERY * 2 + BATCH * HEADS * 4  # a query there; its output and logsumexp back
    for rank, (forward, _) in enumerate(_measure(layout, 64, 2, mask=Causal(window=6))):
        there, back = 5 * QUERY * (rank < 3), 5 * (row - QUERY) * (rank > 0)
        assert forward.bytes == there + back


@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_a_context_ships_only_context(transport):
    layout = _layout({"r": 4}, [f"{transport} r"])
    own = [16, 4, 0, 0]
    for rank, (forward, backward) in enumerate(_measure(layout, 64, 2, mask=FirstKeys(20))):
        assert forward.bytes == (20 - own[rank]) * TOKEN
        assert backward.by_tensor().get("dkv", 0) == own[rank] * 3 * TOKEN


def test_queries_travel_only_to_ranks_that_hold_context():
    layout = _layout({"r": 4}, ["pass_q r"])
    for rank, (forward, _) in enumerate(_measure(layout, 64, 2, mask=FirstKeys(20))):
        assert forward.by_tensor().get("q", 0) == (3 * 16 * QUERY if rank < 2 else 0)


def test_gather_sends_no_unseen_keys_in_contiguous_order():
    layout = _layout({"r": 4}, ["gather r"])
    for rank, (forward, _) in enumerate(_measure(layout, 64, 2, mask=Causal())):
        assert forward.bytes == rank * 16 * TOKEN


def test_a_call_that_needs_nobody_moves_nothing():
    layout = Layout.from_dict({"mesh": {"dp": 2}, "shard": {"batch": ["dp"]}})

    def rank(transport):
        here = layout.on(transport)
        q = torch.randn(2, 4, 6, 8, requires_grad=True)
        with weft.traffic(here) as moved:
            weft.attention(q, q, q, here, "tokens", Causal()).sum().backward()
        return moved.bytes, sum(moved.calls.values())

    assert run_threads(layout.mesh, rank, timeout=20) == [(0, 0)] * 2


# -- predicted beside counted ---------------------------------------------------------------------


def _reports(line: str, calls: int) -> list:
    layout = Layout.parse(line)

    def rank(transport):
        here = layout.on(transport)
        q, k, v = torch.randn(3, BATCH, HEADS, 3, DIM, requires_grad=True).unbind(0)
        with weft.traffic(here) as report:
            for _ in range(calls):
                out = weft.attention(q, k, v, here, "tokens", Causal())
                out.backward(torch.randn_like(out))
        return report

    return run_threads(layout.mesh, rank, timeout=20)


@pytest.mark.parametrize("line", ["tokens: tile=2x2", "tokens: ulysses=2 x ring=2"])
def test_a_report_holds_what_the_plans_predicted_for_every_call(line):
    once, thrice = _reports(line, 1)[-1], _reports(line, 3)[-1]
    for report in (once, thrice):
        assert report.bytes > 0
        assert report.predicted.received == report.received
        assert report.predicted.sent == report.sent
        assert report.predicted.calls == report.calls
        assert report.as_predicted
    assert thrice.predicted.bytes == 3 * once.predicted.bytes


def test_a_report_names_what_differs_from_the_prediction():
    report = _reports("tokens: ring=2", 1)[-1]
    report.received["ring", "kv"] += 1
    predicted = report.predicted.received["ring", "kv"]
    assert report.differences() == {("received", "ring", "kv"): (predicted, predicted + 1)}
    assert not report.as_predicted


def test_a_report_is_a_table_and_tensorboard_scalars():
    report = _reports("tokens: tile=2x2", 1)[-1]
    console = Console(width=100, file=io.StringIO())
    console.print(report)
    text = console.file.getvalue()
    assert "row" in text
    assert "dkv" in text
    assert text.count(nbytes(report.bytes)) >= 2  # counted and predicted
    logged = {}

    class Writer:
        def add_scalar(self, name, value, step):
            logged[name, step] = value

    report.log(Writer(), 7)
    assert logged["traffic/row/kv", 7] == report.received["row", "kv"]
    assert logged["traffic/counted", 7] == logged["traffic/predicted", 7] == report.bytes


def test_reports_may_be_nested_and_other_sums_are_only_counted():
    layout = Layout.parse("tokens: ring=2")

    def rank(transport):
        here = layout.on(transport)
        q = torch.randn(BATCH, HEADS, 3, DIM)
        with weft.traffic(here) as outer:
            weft.attention(q, q, q, here, "tokens")
            with weft.traffic(here) as inner:
                weft.attention(q, q, q, here, "tokens")
            here.mean(torch.ones(()), 1)
        return outer, inner

    outer, inner = run_threads(layout.mesh, rank, timeout=20)[0]
    assert outer.predicted.bytes == 2 * inner.predicted.bytes > 0
    assert inner.bytes == inner.predicted.bytes
    assert outer.bytes > outer.predicted.bytes
    assert outer.as_predicted


# -- several layouts ------------------------------------------------------------------------------


def test_a_transport_of_several_layouts_is_counted_once():
    layout, other = (_layout({"r": 2}, [f"{name} r"]) for name in ("ring", "pass_q"))

    def rank(transport):
        here, there = layout.on(transport), other.on(transport)
        q = torch.randn(BATCH, HEADS, 3, DIM)
        with weft.traffic(here) as one, weft.traffic(here, there, here) as several:
            weft.attention(q, q, q, here, "tokens")
            weft.attention(q, q, q, there, "tokens")
        return one, several

    for one, several in run_threads(layout.mesh, rank, timeout=20):
        assert one.bytes > 0
        assert several == one


def test_everything_that_thread_moves_is_counted_on_layouts_beside_too():
    attends = [{"attend": "rows"}, {"attend": "cols"}]
    sizes = {"embed": 16, "heads": 2}
    axes = ["batch", "rows", "cols", "embed"]
    spec = weft.models.ModelSpec.from_dict({"axes": axes, "sizes": sizes, "block": attends})
    home = Layout.parse("rows: ring=2; cols: local")
    away = Layout.parse("cols: ring=2; rows: local")
    x = torch.randn(1, 8, 8, 16)

    def rank(layout):
        model = weft.compose(spec, layout, layouts={"cols": away})
        beside = model.blocks[1].layout
        counted = weft.traffic(layout), weft.traffic(layout, beside), weft.traffic()
        with counted[0] as one, counted[1] as both, counted[2] as all_of_it:
            model(layout.shard(x, {"rows": 1}))
        return one, both, all_of_it

    for one, both, all_of_it in weft.on_threads(home, rank):
        assert both.bytes > one.bytes > 0
        assert all_of_it == both
