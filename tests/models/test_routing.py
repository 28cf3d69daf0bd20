"""Learned top-k routing: exact by its definition on every mesh, and only what is chosen moves."""

import dataclasses

import exact
import pytest
import reference
import routed
import torch
from routed import Case, layout_of

import weft
from weft.comm import run_threads
from weft.declare.routing import Routing
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout
from weft.plan.order import shard_spans
from weft_models.routing.attention import routed_attention
from weft_models.routing.router import (
    Router,
    block_visibility,
    choose_keys,
    counted,
    entropy,
    imbalance,
    split_blocks,
)

# A score is a sum of `dim` products, a row a sum of at most 24 terms, a logit one of 4 dim s
# products of statistics, all of order one and in fp64: some hundred roundings of 1e-16 each.
LIMIT = 1e-11

CASE = Case()
CAUSAL = CASE.with_(mask=weft.Causal())


ROUTED = Layout.load("routed-4")
MESHES = {
    "routed": ROUTED,
    "three ranks": layout_of({"r": 3}, {"r": "routed"}),
    "one rank": layout_of({"r": 1}, {"r": "routed"}),
    "head x routed": Layout.load("head-x-routed"),
    "ulysses outside": layout_of({"u": 2, "r": 3}, {"u": "ulysses", "r": "routed"}),
    "two routed dims": layout_of({"o": 2, "i": 2}, {"o": "routed", "i": "routed"}),
    "2 x 3 routed": layout_of({"o": 2, "i": 3}, {"o": "routed", "i": "routed"}),
    "three routed dims": layout_of({"a": 2, "b": 2, "c": 2}, dict.fromkeys("abc", "routed")),
    "tensor parallel": layout_of({"tp": 2, "r": 3}, {"r": "routed"}, shard={"heads": ["tp"]}),
    "data parallel": layout_of({"dp": 2, "r": 3}, {"r": "routed"}, shard={"batch": ["dp"]}),
    "zigzag": layout_of({"r": 3}, {"r": "routed"}, order={"tokens": "zigzag"}),
    "striped": layout_of({"r": 3}, {"r": "routed"}, order={"tokens": "striped"}),
}
OPTIONS = {
    "full": CASE,
    "causal": CAUSAL,
    "uneven": CASE.with_(n=17, blocks=2, top_k=2),
    "uneven causal": CAUSAL.with_(n=19, blocks=2, top_k=2),
    "ranks without tokens": CASE.with_(n=5, blocks=2, top_k=3),
    "routes per head": CASE.with_(per_head=True, blocks=2, top_k=2),
    "capped": CASE.with_(fan_out_cap=1, blocks=2, top_k=2),
}


@pytest.mark.few(14)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_computes_what_one_device_does(mesh, options):
    assert_exact(MESHES[mesh], OPTIONS[options])


@pytest.mark.parametrize(
    "case",
    {
        "every block": CASE.with_(top_k=3),
        "more than there are": CASE.with_(top_k=9),
        "no blocks of one rank alone": CASE.with_(blocks=3, n=14),
        "chunks over all ranks": CASE.with_(chunks=8, n=18),
        "one head": CASE.with_(heads=1, kv_heads=1),
        "no shared heads": CASE.with_(kv_heads=4, per_head=True),
        "all heads share": CASE.with_(kv_heads=1, per_head=True),
        "wider values": CASE.with_(value_dim=7),
        "longer context": CASE.with_(m=22),
        "shorter context": CASE.with_(n=18, m=9),
        "context without keys on a rank": CASE.with_(m=3, top_k=2),
        "own scale": CASE.with_(scale=0.3),
        "hot": CAUSAL.with_(temperature=3.0, top_k=2),
        "capped per head": CAUSAL.with_(per_head=True, fan_out_cap=2, blocks=2),
        "causal, not strict": CAUSAL.with_(strict=False),
        "window": CASE.with_(mask=weft.Causal(6), blocks=2, top_k=2),
        "training rows": CASE.with_(mask=weft.FirstKeys(9), blocks=2, top_k=2),
        "no training rows": CASE.with_(mask=weft.FirstKeys(0)),
        "documents": CASE.with_(mask=weft.Documents((5, 11)), blocks=2, top_k=2),
        "packed documents": CASE.with_(mask=weft.Documents((5, 11)) & weft.Causal(), blocks=2),
        "prefix": CASE.with_(mask=weft.prefix_lm(5), top_k=2),
        "untrained": CASE.with_(std=0.0, top_k=2),
        "no samples": CASE.with_(batch=0),
    }.items(),
    ids=lambda item: item[0],
)
def test_every_option_computes_what_it_says(case):
    assert_exact(ROUTED, case[1])


def assert_exact(layout: Layout, case: Case) -> None:
    if case.batch == 2 and "dp" in layout.mesh:
        case = case.with_(batch=3)
    found = routed.errors(layout, case)
    wrong = {name: f"{value:.1e}" for name, value in found.items() if not value <= LIMIT}
    assert not wrong, wrong


@pytest.mark.parametrize("mask", [weft.Full(), weft.Causal()], ids=["full", "causal"])
@pytest.mark.parametrize("mesh", ["routed", "head x routed", "2 x 3 routed", "zigzag"])
def test_an_untrained_router_that_takes_every_block_is_exact_attention(mesh, mask):
    case = CASE.with_(n=19, blocks=2, top_k=99, std=0.0, mask=mask)
    whole = routed.Whole.draw(case)
    leaves = [t.clone().requires_grad_() for t in (whole.q, whole.k, whole.v)]
    out, _ = reference.attention(*leaves, mask)
    (out * whole.dout).sum().backward()
    wanted = dict(zip(routed.NAMES, (out.detach(), *(t.grad for t in leaves))))

    def rank(transport):
        layout = MESHES[mesh].on(transport)
        found, _ = routed.attend(layout, case, whole)
        for name, full in wanted.items():
            side = "query" if name in ("out", "dq") else "key"
            part = exact.cut(layout, case.exact_case, full, side, layout.coords)
            assert exact.error(found[name], part, full) <= LIMIT, name

    run_threads(MESHES[mesh].mesh, rank)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_lower_precision_stays_near_the_reference(dtype, limit):
    # A large bias must not cost half precision its digits: log(w n) spans about 7 here.
    case = CASE.with_(n=32, blocks=2, top_k=7, dim=8, std=0.05)
    whole = routed.Whole.draw(case)
    rounded = [t.to(dtype).double() for t in dataclasses.astuple(whole)]
    case_errors = _errors_of(case, routed.Whole(*rounded), dtype)
    assert max(case_errors[name] for name in ("out", "dq", "dk", "dv")) <= limit, case_errors


def _errors_of(case, whole, dtype):
    wanted, weights, chosen = routed.reference(ROUTED, case, whole, case.routing.blocks)

    def rank(transport):
        layout = ROUTED.on(transport)
        found, how = routed.attend(layout, case, whole, dtype)
        return routed.compare(layout, case, found, how, wanted, weights, chosen)

    ranks = run_threads(ROUTED.mesh, rank)
    return {name: max(r[name] for r in ranks) for name in ranks[0]}


def _on_processes(rank: int, case: Case) -> dict[str, float]:
    layout = Layout.load("routed-4")
    layout = layout.build("cpu")
    whole = routed.Whole.draw(case)
    wanted, weights, chosen = routed.reference(layout, case, whole, case.routing.blocks)
    found, how = routed.attend(layout, case, whole)
    return routed.compare(layout, case, found, how, wanted, weights, chosen)


@pytest.mark.parametrize("case", [CASE, CAUSAL.with_(n=19, blocks=2, top_k=2, per_head=True)])
def test_real_processes_compute_the_same(pool, case):
    for found in pool.run(_on_processes, case):
        assert max(found.values()) <= LIMIT, found


# -- traffic --------------------------------------------------------------------------------------


def moved(layout: Layout, case: Case, **options):
    """Per rank: what a forward and a backward pass moved, and how they were routed."""
    whole = routed.Whole.draw(case)

    def rank(transport):
        bound = layout.on(transport)
        with weft.traffic(bound) as traffic:
            found, how = routed.attend(bound, case, whole, **options)
        assert found["out"].isfinite().all()
        return traffic, how

    return run_threads(layout.mesh, rank)


@pytest.mark.parametrize("k", [1, 2, 7])
def test_bytes_those_of_ring_times_k_over_others_plus_summaries(k):
    case = CASE.with_(n=64, top_k=k, kv_heads=2, dim=16, summary_dim=4)
    eight = Layout.load("routed-8")
    chunk = case.batch * case.kv_heads * (case.n // 8) * (2 * case.dim) * 8
    summary = case.batch * case.kv_heads * 4 * 8
    for traffic, how in moved(eight, case):
        found = traffic.by_tensor()
        assert found["kv"] == k * chunk == sum(how.bytes.values())
        assert found["kv"] / (7 * chunk) == pytest.approx(k / 7)
        assert found["summaries"] == found["dsummaries"] == 7 * summary
        assert found["routes"] == 7 * case.batch * 8 * 8  # a row of 8 weights from 7 ranks


@pytest.mark.parametrize("mesh", ["routed", "2 x 3 routed", "three routed dims"])
def test_gradients_travel_back_the_way_keys_came(mesh):
    case = CASE.with_(n=41, blocks=2, top_k=2, per_head=True)
    ranks = moved(MESHES[mesh], case)
    for traffic, how in ranks:
        for mesh_dim, nbytes in how.bytes.items():
            assert traffic.received[mesh_dim, "kv"] == nbytes == traffic.sent[mesh_dim, "dkv"]
            assert traffic.sent[mesh_dim, "kv"] == traffic.received[mesh_dim, "dkv"]


def test_outer_link_carries_block_once_for_all_ranks_behind_it():
    layout = MESHES["2 x 3 routed"]
    case = CASE.with_(n=24, top_k=5)
    for traffic, _ in moved(layout, case):
        chunk = case.batch * case.kv_heads * 4 * 2 * case.dim * 8
        # All take all: over the outer dim one chunk from each partner, not one per destination.
        assert traffic.received["o", "kv"] == chunk
        assert traffic.received["i", "kv"] == 4 * chunk


def test_blocks_of_the_own_rank_do_not_travel():
    one = MESHES["one rank"]
    ((traffic, how),) = moved(one, CASE.with_(chunks=4, top_k=2))
    assert how.chosen.sum() == 2 * 4 * 2
    assert traffic.bytes == 0


# -- choosing -------------------------------------------------------------------------------------


def test_equal_weights_go_to_the_lowest_blocks():
    others = ~torch.eye(5, dtype=torch.bool)
    picked = choose_keys(torch.zeros(1, 1, 5, 5), others, 2)[0, 0]
    assert [row.nonzero().flatten().tolist() for row in picked] == [
        [1, 2], [0, 2], [0, 1], [0, 1], [0, 1],
    ]  # fmt: skip


def test_a_cap_gives_the_strongest_claims_their_block():
    shares = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.0, 4.0], [5.0, 1.0, 0.0]])[None, None]
    others = ~torch.eye(3, dtype=torch.bool)
    free, capped = choose_keys(shares, others, 1), choose_keys(shares, others, 1, fan_out_cap=1)
    assert free[0, 0].nonzero()[:, 1].tolist() == [2, 2, 0]
    assert capped[0, 0].nonzero()[:, 1].tolist() == [1, 2, 0]


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_no_block_is_chosen_more_often_than_the_cap(cap):
    case = CASE.with_(n=24, blocks=2, top_k=3, fan_out_cap=cap)
    free = moved(ROUTED, case.with_(fan_out_cap=None))[0][1].fan_out
    assert free.max() > 3, "the free choice must exceed the caps for this test to mean anything"
    for _, how in moved(ROUTED, case):
        assert how.fan_out.max() <= cap
        assert how.chosen.sum(-1).max() <= 3


def test_a_causal_query_block_is_summarised_by_its_first_token():
    (block,) = split_blocks(shard_spans(12, (3,))[1], 1)
    assert counted(weft.Causal(), block).tolist() == [0]
    assert counted(weft.Full(), block).tolist() == [0, 1, 2, 3]
    assert counted(weft.FirstKeys(6), block).tolist() == [0, 1]


def test_blocks_see_all_some_or_none_of_each_other():
    blocks = tuple(b for spans in shard_spans(12, (3,)) for b in split_blocks(spans, 1))
    seen = block_visibility(weft.Causal(), blocks, blocks)
    assert seen.eligible.int().tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert seen.whole.int().tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert seen.causal == (True, True, True)
    partly = block_visibility(weft.FirstKeys(6), blocks, blocks)
    assert partly.eligible[0].tolist() == [False, True, False]
    assert partly.whole[0].tolist() == [True, False, False]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_routing_tells_a_causal_query_nothing_of_later_tokens(order, strict):
    layout = layout_of({"r": 3}, {"r": "routed"}, order={"tokens": order})
    case = CAUSAL.with_(n=24, strict=strict, std=3.0, top_k=2)
    whole = routed.Whole.draw(case)
    changed = [t.clone() for t in dataclasses.astuple(whole)]
    for t in changed[:3]:
        t[:, :, 20:] += 5.0
    outs = []
    for tensors in (whole, routed.Whole(*changed)):
        wanted, *_ = routed.reference(layout, case, tensors, 1)
        found = run_threads(
            layout.mesh,
            lambda t, w=tensors: layout.on(t).gather(
                routed.attend(layout.on(t), case, w)[0]["out"], {"tokens": 2}
            ),
        )[0]
        assert exact.error(found, wanted["out"], wanted["out"]) <= LIMIT
        outs.append(found)
    leak = (outs[0] - outs[1])[:, :, :20].abs().max().item()
    assert leak == 0.0 if strict else leak > 1e-3


# -- reports --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["routed", "head x routed", "tensor parallel"])
@pytest.mark.parametrize("case", [CASE.with_(n=18, top_k=2, blocks=2), CAUSAL.with_(n=18)])
def test_attention_weight_is_what_the_queries_gave_to_each_block(mesh, case):
    whole, layout = routed.Whole.draw(case), MESHES[mesh]
    ranks = 3 if mesh == "tensor parallel" else layout.mesh.get("route")
    blocks = routed.block_positions(layout, "tokens", case.n, case.routing.blocks)
    values = torch.zeros(case.batch, case.kv_heads, case.n, len(blocks), dtype=torch.float64)
    for j, tokens in enumerate(blocks):
        values[:, :, tokens, j] = 1.0
    shown = dataclasses.replace(
        whole, v=values, dout=whole.dout.new_zeros(*whole.q.shape[:3], len(blocks))
    )
    wanted, *_ = routed.reference(layout, case, shown, case.routing.blocks)

    def rank(transport):
        return routed.attend(layout.on(transport), case, whole, want_attention=True)[1]

    for how in run_threads(layout.mesh, rank):
        assert torch.allclose(
            how.attention_weight.sum(-1), torch.ones_like(how.attention_weight.sum(-1))
        )
        for i, block in enumerate(how.own):
            mean = wanted["out"][:, :, blocks[block]].mean((1, 2))
            assert torch.allclose(how.attention_weight[:, 0, i], mean, atol=1e-12)
    assert ranks * case.routing.blocks == len(blocks)


def test_entropy_one_for_uniform_weights_and_falls_as_they_sharpen():
    others = ~torch.eye(4, dtype=torch.bool)
    uniform = torch.zeros(1, 1, 4, 4)
    sharp = torch.where(others, torch.tensor([3.0, 1e-9, 1e-9, 3.0]).log(), 0.0)[None, None]
    assert torch.allclose(entropy(uniform, others), torch.ones(4))
    assert entropy(sharp, others)[0, 0, 1] < 0.7
    assert entropy(torch.zeros(1, 1, 1, 2), torch.tensor([[True, False]])).item() == 0.0


def test_imbalance_is_one_where_blocks_are_chosen_alike():
    eligible = torch.ones(4, 4, dtype=torch.bool)
    fair = torch.eye(4, dtype=torch.bool)[None, None]
    unfair = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    unfair[..., 0] = True
    favour = torch.tensor([3.97, 0.01, 0.01, 0.01]).log().expand(1, 1, 4, 4)
    assert imbalance(torch.zeros(1, 1, 4, 4), eligible, fair).item() == pytest.approx(1.0)
    assert imbalance(favour, eligible, unfair).item() == pytest.approx(3.97)


# -- refusals -------------------------------------------------------------------------------------


def on_rank(layout: Layout, fn):
    return run_threads(layout.mesh, lambda t: fn(layout.on(t)))


def local(layout: Layout, n: int = 16):
    q, k, v = torch.randn(3, 1, 2, n // layout.size("tokens"), 4).unbind(0)
    return q, k, v


def call(layout: Layout, routing: Routing = Routing(top_k=1), **options):  # noqa: B008
    same = torch.Generator().manual_seed(0)
    router = Router(4, 2, 2, routing.summary_dim, layout, same)
    return routed_attention(*local(layout), router, layout, "tokens", routing, **options)


def test_plain_attention_refuses_routed_layout_and_says_what_to_use():
    names = r"'route' routes keys.*weft\.routing\.RoutedAttention"
    with pytest.raises(UnsupportedError, match=names):
        on_rank(ROUTED, lambda bound: weft.attention(*local(bound), bound, "tokens"))


@pytest.mark.parametrize(("strategy", "moves"), [("ring", "keys"), ("pass_q", "queries")])
def test_another_moving_role_beside_routing_is_refused_by_name(strategy, moves):
    layout = layout_of({"r": 2, "x": 2}, {"r": "routed", "x": strategy})
    with pytest.raises(UnsupportedError, match=f"mesh dim 'x' moves {moves} as well as those"):
        on_rank(layout, call)


def test_masks_of_samples_are_refused():
    with pytest.raises(UnsupportedError, match="not KeyPadding, which depends on the sample"):
        on_rank(ROUTED, lambda bound: call(bound, mask=weft.KeyPadding((7,))))


def test_chunks_that_the_ranks_cannot_share_are_refused():
    with pytest.raises(DeclarationError, match="chunks = 6 cannot be shared by the 4 ranks"):
        on_rank(ROUTED, lambda bound: call(bound, Routing(top_k=1, chunks=6)))


def test_routes_per_head_need_heads_that_divide():
    layout = layout_of({"u": 4, "r": 2}, {"u": "ulysses", "r": "routed"})
    case = CASE.with_(heads=4, kv_heads=2)
    assert_exact(layout, case)
    with pytest.raises(UnsupportedError, match="per_head routing needs key/value heads"):
        routed.errors(layout, case.with_(per_head=True))


def test_ranks_that_disagree_about_routing_are_named():
    def rank(bound):
        return call(bound, Routing(top_k=1 + (bound.rank == 2)))

    with pytest.raises(
        ShapeError, match=r"(?s)must be the same on every rank.*rank 2: .*top_k\":2"
    ):
        on_rank(ROUTED, rank)


@pytest.mark.parametrize("scale", [0.0, -0.4])
def test_scales_that_give_padding_a_weight_are_refused(scale):
    def rank(layout):
        with pytest.raises(weft.UnsupportedError, match="takes a finite scale of at least"):
            _attend(layout, scale)

    weft.on_threads(Layout.load("routed-4"), rank)


def test_half_precision_refuses_scales_beyond_its_lowest_number():
    with pytest.raises(
        weft.UnsupportedError, match=r"float16 takes .* at least 0\.03, found 0\.01"
    ):
        _attend(Layout.single(), 0.01, torch.float16)


def _attend(layout, scale, dtype=torch.float64):
    q = torch.randn(1, 2, 4, 4, dtype=dtype)
    routing = Routing(top_k=1, chunks=4)
    router = Router(4, 2, 2, routing.summary_dim, layout)
    routed_attention(q, q, q, router, layout, "tokens", routing, scale=scale)
