"""Keys by halo: what queries see travels, once; exact, counted, proven, refused where wrong."""

from __future__ import annotations

import itertools

import pytest
import torch
from exact import Case, assert_exact, attend, errors, problem, tokens
from exact import cut as cut_of

import weft
from weft import (
    Boxes,
    Causal,
    ChosenKeys,
    Documents,
    FirstKeys,
    Full,
    KeyPadding,
    Layout,
    MaskMod,
    Near,
    Window,
)
from weft.comm import run_threads
from weft.declare.strategy import Rule
from weft.errors import DeclarationError, UnsupportedError
from weft.inspect.traffic import traffic
from weft.masks import describe
from weft.plan.order import Span, ascending, count
from weft.plan.predict import forecast_of, plan_for, plans_for
from weft.plan.problem import Problem
from weft.plan.seen import _interleaved
from weft_proof.symbolic import prove
from weft_proof.takes import seen_defects

SINKS = FirstKeys(2) | Causal(window=3)


def named(value: object) -> str:
    """A parameter of a test in short: of a case its mask."""
    return describe(value.mask) if isinstance(value, Case) else str(value)


@pytest.fixture
def forced(tmp_path):
    """A strategy whose keys come by halo under every mask, by its path."""
    path = tmp_path / "forced.toml"
    path.write_text(
        '[rule.seen]\nquery = "S(seq)"\nkey = "S(seq) -> S(seq) + seen"\n'
        'out = "S(seq)"\ntransport = "halo"\n'
    )
    return str(path)


def layout_of(forced: str, ranks: int = 4, order: str = "contiguous", **tables) -> Layout:
    """Tokens split over ranks, with keys by halo whatever the mask."""
    data = {
        "mesh": {"seen": ranks},
        "shard": {"tokens": ["seen"]},
        "order": {"tokens": order},
        "attend": {"tokens": [{"strategy": forced, "on": "seen"}]},
    }
    return Layout.from_dict(data | tables)


def by_halo(layout: Layout, case: Case) -> bool:
    sizes = {"heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.dim}
    lengths = dict(zip(case.axes, case.lengths))
    asked = Problem.of(case.axes, lengths, batch=case.batch, mask=case.mask, **sizes)
    return plan_for(layout, asked, 0).seen is not None


# -- exactness -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "case"),
    [
        ("tokens: seen=4", Case(mask=Window(2, 1), value_dim=3)),
        ("tokens: seen=4", Case(mask=Causal(window=3), lengths=tokens(10), sinks=True)),
        ("tokens: seen=4", Case(mask=SINKS, lse_gradient=True, batch=1)),
        ("tokens: seen=4", Case(mask=Causal(window=3, offset=5), lengths=tokens(11, 16))),
        ("tokens: seen=4", Case(mask=Documents((5, 1, 7)) & Causal(4), softcap=2.0, bias=True)),
        ("tokens: seen=7", Case(mask=Window(0, 1), lengths=tokens(9), kv_heads=4)),
        ("tokens(zigzag): seen=3", Case(mask=Window(1, 1), lengths=tokens(25))),
        ("tokens: seen=2 x ring=2", Case(mask=Causal(window=2), lengths=tokens(17))),
        ("tokens: ring=2 x seen=2", Case(mask=Window(1, 2), lengths=tokens(17))),
        ("tokens: seen=2 x pass_q=2", Case(mask=Causal(window=2), lengths=tokens(17))),
        ("tokens: ulysses=2 x seen=3", Case(mask=Causal(window=3), lengths=tokens(19))),
        ("tokens: seen=2 x ulysses=2", Case(mask=Causal(window=3), lengths=tokens(19))),
        ("tokens: seen=2 x seen=2", Case(mask=Window(2, 2), lengths=tokens(19))),
        ("batch: dp=2; heads: tp=2; tokens: seen=2", Case(mask=Causal(window=3), batch=3)),
    ],
    ids=named,
)
def test_windows_are_exact_on_layouts_of_seen_keys(line, case):
    layout = Layout.parse(line)
    assert by_halo(layout, case)
    assert_exact(layout, case)


@pytest.mark.parametrize(
    ("order", "ranks", "case"),
    [
        ("contiguous", 4, Case(mask=Full(), kv_heads=1)),
        ("contiguous", 5, Case(mask=Causal(window=9), lengths=tokens(11))),  # wider than chunks
        ("contiguous", 4, Case(mask=KeyPadding((13, 2, 0)), batch=3)),
        ("contiguous", 3, Case(mask=MaskMod(lambda b, h, q, k: (q + k + b) % 3 != 0))),
        ("contiguous", 4, Case(mask=FirstKeys(0))),
        ("contiguous", 4, Case(mask=Window(3, 3), lengths=tokens(3))),  # an empty rank
        ("striped", 4, Case(mask=Causal(window=3), lse_gradient=True)),
        ("striped", 3, Case(mask=SINKS, lengths=tokens(31))),
        ("striped", 2, Case(mask=FirstKeys(5), lse_gradient=True)),  # own keys between those
        ("striped", 4, Case(mask=FirstKeys(3), lengths=tokens(14))),
        ("striped", 2, Case(mask=KeyPadding((4, 9, 13)) & Window(2, 0), batch=3)),
        ("striped", 3, Case(mask=Causal(4, offset=12), lengths=tokens(5, 17))),
        ("zigzag", 4, Case(mask=Causal(), lengths=tokens(14))),
    ],
    ids=named,
)
def test_every_mask_is_exact_with_keys_by_halo(forced, order, ranks, case):
    layout = layout_of(forced, ranks, order)
    assert by_halo(layout, case)
    assert_exact(layout, case)


GRID = {"axes": ("lat", "lon"), "lengths": ((7, 7), (9, 9)), "batch": 1}


@pytest.mark.parametrize(
    ("line", "mask"),
    [
        ("lat+lon: seen=2 x seen=2", Near((7, 9), 3, circular=(False, True))),
        ("lat+lon: seen=2 x seen=3", Boxes((7, 9), (3, 3), (1, 1), circular=(False, True))),
        ("lat+lon: seen=3", Near((7, 9), (3, 5), dilation=(1, 1))),
        ("lat+lon: seen=2 x ring=2", Near((7, 9), 3)),
    ],
    ids=str,
)
def test_neighbourhoods_and_boxes_of_a_grid_are_exact(line, mask):
    layout, case = Layout.parse(line), Case(mask=mask, **GRID)
    assert by_halo(layout, case)
    assert_exact(layout, case)
    asked = Problem.of(case.axes, {"lat": 7, "lon": 9}, heads=2, head_dim=4, mask=mask)
    claims = prove(layout, asked)
    assert all(claim.ok for claim in claims), claims


def test_a_neighbourhood_on_a_grid_receives_its_strips_alone():
    """The row and the column beside its own, and the corner, which another rank passes on."""
    asked = Problem.of(
        ("lat", "lon"), {"lat": 8, "lon": 8}, heads=1, head_dim=4, mask=Near((8, 8), 3)
    )
    for plan in plans_for(Layout.parse("lat+lon: seen=2 x seen=2"), asked, range(4)):
        assert count(plan.seen.spans(plan.coords)) == 4 + 4 + 1
        moved = forecast_of(plan).forward.traffic.by_mesh_dim()
        assert sorted(n // (2 * 4 * 4) for n in moved.values()) == [4 + 1, 4 + 1]


def test_a_choice_of_keys_restricts_what_came():
    """Of the keys in its window every query sees those that it chose, wherever they rested."""
    n, mask, make = 17, Causal(window=5), torch.Generator().manual_seed(3)
    numbers = torch.randint(-1, n, (1, 1, n, 9), generator=make)
    q, k, v, dout = torch.randn(4, 1, 2, n, 4, dtype=torch.float64, generator=make).unbind(0)

    def on(layout):
        cut = (layout.shard(t, {"tokens": 2}) for t in (q, k, v, numbers, dout))
        *leaves, chosen, grad = (t.clone() for t in cut)
        leaves = [t.requires_grad_() for t in leaves]
        choice = ChosenKeys(chosen)
        out = weft.attention(*leaves, layout, "tokens", mask, length=n, choice=choice)
        found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        return [layout.gather(t, {"tokens": 2}) for t in found]

    wanted = on(Layout.single())
    for found in weft.on_threads(Layout.parse("tokens: seen=4"), on):
        assert max((a - b).abs().max() for a, b in zip(found, wanted)) < 1e-13


def test_documents_that_differ_by_sequence_are_exact(forced):
    mask = Documents(((4, 9), (13,), (1, 3, 9))) & Causal(window=4)
    case = Case(mask=mask, batch=3)
    assert_exact(layout_of(forced, 3), case)
    data = {"mesh": {"dp": 2, "seen": 3}, "shard": {"batch": ["dp"], "tokens": ["seen"]}}
    assert_exact(layout_of(forced, 3, **data), case)


def test_packed_documents_are_exact_in_their_order():
    layout = Layout.parse("tokens: seen=3")
    packed = layout.pack([3, 11, 2, 8, 1, 9])
    mask = packed.mask & Causal(window=4)
    assert_exact(layout.reorder("tokens", packed.order), Case(mask=mask, lengths=tokens(34)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_stays_within_twice_one_device(dtype):
    case = Case(mask=Causal(window=5), lengths=tokens(40), dim=16, heads=4, kv_heads=2)
    found, one = (
        errors(layout, case, dtype) for layout in (Layout.parse("tokens: seen=4"), Layout.single())
    )
    assert all(found[name] <= 2 * one[name] + 1e-7 for name in found), (found, one)


# -- traffic ---------------------------------------------------------------------------------------


def test_a_window_receives_its_own_bytes_alone():
    """64 keys and values of one head of 64, in bfloat16; and their gradients on the way back."""
    asked = Problem.of(
        "tokens", 8192, heads=1, head_dim=64, dtype=torch.bfloat16, mask=Window(64, 0)
    )
    forecasts = [
        forecast_of(plan) for plan in plans_for(Layout.parse("tokens: seen=8"), asked, range(8))
    ]
    assert [f.forward.traffic.bytes for f in forecasts] == [0] + 7 * [64 * 64 * 2 * 2]
    assert [f.backward.traffic.bytes for f in forecasts] == 7 * [64 * 64 * 2 * 2] + [0]
    assert [f.forward.live_bytes for f in forecasts] == [0] + 7 * [64 * 64 * 2 * 2]


def test_first_keys_and_a_window_travel_without_those_between():
    asked = Problem.of("tokens", 64, heads=1, head_dim=4, mask=FirstKeys(2) | Causal(window=3))
    plan = plan_for(Layout.parse("tokens: seen=4"), asked, 3)
    assert plan.compute.key.spans == (Span(0, 2), Span(46, 18))
    ring = plan_for(Layout.parse("tokens: ring=4"), asked, 3)
    assert forecast_of(ring).forward.traffic.bytes == forecast_of(plan).forward.traffic.bytes


@pytest.mark.parametrize(
    ("line", "mask", "n"),
    [
        ("tokens: seen=4", Window(3, 2), 18),
        ("tokens: seen=5", SINKS, 13),
        ("tokens: ring=2 x seen=2", Causal(window=3), 19),
        ("tokens: seen=2 x seen=3", Window(1, 1), 23),
        ("tokens: ulysses=2 x seen=2", Causal(window=3), 15),
        ("tokens: seen=3", Causal(), 12),
    ],
)
def test_predicted_bytes_are_counted_in_both_passes(line, mask, n):
    case = Case(mask=mask, lengths=tokens(n))
    whole, layout = problem(case), Layout.parse(line)

    def rank(transport):
        bound = layout.on(transport)
        with traffic(bound) as moved:
            attend(bound, case, whole)
        return moved

    for moved in run_threads(layout.mesh, rank, timeout=20.0):
        assert moved.as_predicted, moved.differences()
        assert moved.predicted.bytes or moved.predicted.sent


def test_gradients_alone_travel_in_the_backward_pass():
    """A ring sends keys again; here those that came are kept."""
    asked = Problem.of("tokens", 64, heads=2, head_dim=4, mask=Causal(window=5))
    seen, ring = (
        forecast_of(plan_for(Layout.parse(f"tokens: {name}=4"), asked, 1)).backward.traffic
        for name in ("seen", "ring")
    )
    assert set(seen.by_tensor()) == {"dkv"}
    assert 2 * seen.bytes == ring.bytes


# -- the choice ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "halo"),
    [
        (Full(), False),
        (Causal(), False),
        (Causal(window=4), True),
        (Causal(window=16), True),
        (Causal(window=17), False),  # 16 keys of others: a whole chunk
        (Causal(window=33), False),
        (Causal(window=34), False),  # 33: more than is kept, though less than three chunks
        (Window(16, 15), True),  # of either side less than a chunk
        (SINKS, True),
        (Documents((16, 16, 32)), False),
        (Documents((15, 17, 32)), True),
        (Documents((15, 2, 47)) & Causal(window=8), True),
        (KeyPadding((64,)), False),
    ],
    ids=str,
)
def test_each_mask_chooses_halo_or_chunks(mask, halo):
    case = Case(mask=mask, lengths=tokens(64), batch=1)
    assert by_halo(Layout.parse("tokens: seen=4"), case) is halo


def test_the_choice_is_every_ranks():
    """Also where ranks hold sequences whose documents differ."""
    mask = Documents(((8, 8), (15, 1), (16,), (5, 11))) & Causal(window=3)
    layout = Layout.parse("batch: dp=2; tokens: seen=2 x ring=2")
    asked = Problem.of("tokens", 16, heads=2, batch=4, mask=mask)
    assert len({plan.seen is None for plan in plans_for(layout, asked, range(8))}) == 1


# -- proof -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "mask"),
    [
        ("tokens: seen=4", Window(3, 2)),
        ("tokens: seen=2 x ring=2", SINKS),
        ("tokens(striped): seen=2", FirstKeys(4)),
        ("tokens: seen=2 x pass_q=2", Causal(window=3)),
        ("tokens: ulysses=2 x seen=3", Documents((5, 20, 12)) & Causal(window=3)),
    ],
)
def test_a_proof_knows_keys_by_halo(line, mask):
    layout, asked = Layout.parse(line), Problem.of("tokens", 37, heads=2, head_dim=4, mask=mask)
    claims = prove(layout, asked)
    assert all(claim.ok for claim in claims), claims
    assert any("halo" in claim.what for claim in claims)


def test_a_key_that_is_lacking_is_found():
    asked = Problem.of("tokens", 37, heads=2, head_dim=4, mask=Window(3, 2))
    plans = [*plans_for(Layout.parse("tokens: seen=4"), asked, range(4))]
    wrong = plans[1].seen
    wanted = wrong.wanted(plans[1].coords)
    short = tuple((Span(s[0].start + 1, s[0].count - 1), *s[1:]) for s in wanted.wanted)
    wrong._wanted = {key: type(wanted)(wanted.held, short) for key in wrong._wanted}
    plans = [plans[0].at(plan.coords) for plan in plans]
    for plan in plans:
        plan.resharding.key._memo.clear()
    plans = [plan.at(plan.coords) for plan in plans]
    assert any("sees" in defect for defect in seen_defects(plans))


def test_keys_in_another_order_than_their_positions_are_found(monkeypatch):
    """In few spans is not in order: 0 2 1 3 5 7 are two, 0 1 2 3 5 7 three."""
    monkeypatch.setattr("weft.plan.resharding.interleaved", ascending)
    asked = Problem.of("tokens", 37, heads=2, head_dim=4, mask=FirstKeys(4))
    claims = prove(Layout.parse("tokens(striped): seen=2"), asked)
    assert any("are taken for" in defect for claim in claims for defect in claim.defects)


def test_stretches_put_positions_in_their_order():
    own, received = (Span(4, 3), Span(12, 2)), (Span(2, 2), Span(7, 1), Span(14, 1))
    places = [*range(4, 7), 12, 13], [2, 3, 7, 14]
    pieces = _interleaved(own, received)
    joined = [p for s in pieces for p in places[s.received][s.low : s.high]]
    assert joined == sorted([*places[0], *places[1]])
    assert sum(s.high - s.low for s in pieces) == count(own) + count(received)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"key": "S(seq) + seen"}, "come to those that a rank has"),
        ({"key": "S(head) + seen"}, "only keys are seen"),
        ({"key": "R -> S(seq) + seen"}, "come to those that a rank has"),
        ({"query": "S(seq) -> S(seq) + seen", "key": "S(seq)"}, "belongs to key"),
        ({"transport": "ring"}, "'halo' brings what queries see"),
        ({"key": "S(seq) -> R", "transport": "halo"}, "'halo' brings what queries see"),
        ({"backward": "key"}, "one role in both passes"),
        ({"forward": "auto"}, "one role in both passes"),
    ],
)
def test_a_wrong_rule_is_refused_by_name(rule, said):
    right = {"query": "S(seq)", "key": "S(seq) -> S(seq) + seen", "out": "S(seq)"}
    assert Rule.parse(**right).describe().count("S(seq) -> S(seq) + seen") == 1
    with pytest.raises(DeclarationError, match=said.replace("(", r"\(").replace(")", r"\)")):
        Rule.parse(**(right | rule))


def test_a_bias_tensor_is_refused_on_every_rank(forced):
    layout = layout_of(forced, 2)

    def rank(transport):
        q = torch.randn(1, 2, 4, 8)
        bias = torch.zeros(1, 1, 4, 8)
        with pytest.raises(UnsupportedError, match="a bias tensor"):
            weft.attention(q, q, q, layout.on(transport), "tokens", Causal(3), bias=bias)

    run_threads(layout.mesh, rank, timeout=20.0)


# -- around the call -------------------------------------------------------------------------------


def test_activation_checkpoints_compute_the_same_gradients():
    case = Case(mask=Causal(window=3), lengths=tokens(13))
    whole, layout = problem(case), Layout.parse("tokens: seen=3")

    def rank(transport):
        bound = layout.on(transport)
        q, k, v, dout = (
            cut_of(bound, case, t, side, bound.coords)
            for t, side in (
                (whole.q, "query"),
                (whole.k, "key"),
                (whole.v, "key"),
                (whole.dout, "query"),
            )
        )
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]

        def call(*tensors):
            return weft.attention(*tensors, bound, "tokens", case.mask, length=13)

        plain = torch.autograd.grad(call(*leaves), leaves, dout)
        with traffic(bound) as moved:
            out = torch.utils.checkpoint.checkpoint(call, *leaves, use_reentrant=False)
            again = torch.autograd.grad(out, leaves, dout)
        assert all(map(torch.equal, plain, again))
        assert moved.as_predicted
        return moved.received["seen", "kv"]

    # forward, and again when it is computed again
    assert run_threads(layout.mesh, rank, timeout=20.0) == [0, *2 * [2 * 2 * 2 * 2 * 2 * 4 * 8]]


def test_a_graph_computes_the_same_gradients():
    """The op's own passes, whose fake kernels know how many keys come."""
    mask, layout = Causal(window=3), Layout.parse("tokens: seen=2")

    def rank(bound):
        q, k, v = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64).unbind(0)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]

        def call(*tensors):
            return weft.attention(*tensors, bound, "tokens", mask)

        graph = torch.compile(call, fullgraph=True, backend="aot_eager")
        found = [torch.autograd.grad(f(*leaves).square().sum(), leaves) for f in (call, graph)]
        assert all(map(torch.equal, *found))
        return True

    assert all(weft.on_threads(layout, rank))


def test_latents_come_by_halo_in_the_place_of_keys():
    """Keys and values are made of a rank's own latents and of those that its queries see."""
    n, mask, make = 15, Causal(window=3), torch.Generator().manual_seed(5)
    c, r = torch.randn(2, 1, 1, n, 3, dtype=torch.float64, generator=make).unbind(0)
    q, dout = torch.randn(2, 1, 2, n, 4, dtype=torch.float64, generator=make).unbind(0)
    weights = torch.randn(2, 3, 8, dtype=torch.float64, generator=make)

    def on(layout):
        w = weights.clone().requires_grad_()
        leaves = [layout.shard(t, {"tokens": 2}).clone().requires_grad_() for t in (q, c, r)]

        def expand(c, r):
            return tuple(
                (x @ y).unflatten(-1, (2, 4))[:, 0].transpose(1, 2) for x, y in zip((c, r), w)
            )

        travel = weft.Expansion(expand, [w], travel="latents" if layout.world_size > 1 else "keys")
        with traffic(layout) as moved:
            out = weft.attention(*leaves, layout, "tokens", mask, length=n, expand=travel)
            grads = torch.autograd.grad(out, [*leaves, w], layout.shard(dout, {"tokens": 2}))
        assert moved.as_predicted, moved.differences()
        return (
            [layout.gather(t.detach(), {"tokens": 2}) for t in (out, *grads[:3])],
            grads[3],
            moved,
        )

    wanted, of_weights, _ = on(Layout.single())
    ranks = weft.on_threads(Layout.parse("tokens: seen=3"), on)
    for found, _, moved in ranks:
        assert max((a - b).abs().max() for a, b in zip(found, wanted)) < 1e-12
        assert moved.received["seen", "kv"] in (0, 2 * (3 + 3) * 8)
    assert (sum(part for _, part, _ in ranks) - of_weights).abs().max() < 1e-12


def test_queries_and_outputs_are_not_copied_for_the_backward_pass():
    """Keys and values that came are kept beside the rank's own; what rests as it is is not."""
    layout, case = Layout.parse("tokens: seen=2"), Case(mask=Causal(window=3))
    whole = problem(case)

    def rank(transport):
        bound = layout.on(transport)
        q, k, v = (
            cut_of(bound, case, t, side, bound.coords).clone().requires_grad_()
            for t, side in ((whole.q, "query"), (whole.k, "key"), (whole.v, "key"))
        )
        kept: list = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (kept.append(t), t)[1], lambda t: t
        ):
            weft.attention(q, k, v, bound, "tokens", case.mask, length=13)
        return sum(t.data_ptr() == q.data_ptr() for t in kept), len(kept)

    for own, kept in run_threads(layout.mesh, rank, timeout=20.0):
        assert own == 1
        assert kept == len(("q", "k", "v", "out", "lse", "agreed"))


def test_shuffled_orders_of_the_same_ranges_are_told_apart():
    """Keys that came go to their own places in the gradient, whoever else wants them."""
    for left, right in itertools.product((0, 2), (0, 3)):
        if left or right:
            assert_exact(
                Layout.parse("tokens: seen=4"),
                Case(mask=Window(left, right), lengths=tokens(16), seed=left + right),
            )
