"""The module of learned routing on any axis and mesh: training, warm-up, imitation, reports."""

import copy
import pickle

import pytest
import torch
from routed import layout_of
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import weft
from weft.comm import run_threads
from weft.declare.routing import Routing
from weft.errors import DeclarationError, UnsupportedError
from weft.layout import Layout
from weft_models.models import ModelSpec
from weft_models.routing import RoutedAttention, routed_modules, routing_penalty
from weft_models.routing.attention import routed_attention
from weft_models.routing.report import heaviest_blocks, measure_routing, observe
from weft_models.routing.router import Router
from weft_models.train import fit, stream

ROUTED = Layout.load("routed-4")
ONE = layout_of({"r": 1}, {"r": "routed"})
MESHES = {
    "routed": ROUTED,
    "head x routed": Layout.load("head-x-routed"),
    "two routed dims": layout_of({"o": 2, "i": 2}, {"o": "routed", "i": "routed"}),
    "tensor parallel": layout_of({"tp": 2, "r": 2}, {"r": "routed"}, shard={"heads": ["tp"]}),
}


def small(**routing) -> ModelSpec:
    """A model that routes 64 tokens, and a small batch."""
    options = {"chunks": 8, "warm_up": 0.7, "imitate": 3.0, **routing}
    blocks = [{"attend": "tokens", "init_k_from_q": True, "routing": options}, {"mlp": 64}]
    return ModelSpec.from_dict(
        {
            "head": "tokens",
            "axes": ["batch", "tokens", "embed"],
            "sizes": {"embed": 32, "heads": 4, "vocabulary": 16},
            "block": blocks,
            "train": {"batch": 4, "lr": 3e-3, "length": {"tokens": [64, 64]}},
        }
    )


def losses(layout: Layout, spec: ModelSpec, steps: int = 3) -> list[float]:
    def rank(transport):
        run = fit(spec, layout.on(transport), steps=steps, quiet=True, dtype=torch.float64)
        return [(r.loss, r.norm) for r in run.records]

    ranks = run_threads(layout.mesh, rank)
    flat = [[number for record in found for number in record] for found in ranks]
    assert all(found == pytest.approx(flat[0]) for found in flat)
    return flat[0]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mesh", "routing"),
    [
        pytest.param("routed", {"warm_up": 0.5}, marks=pytest.mark.slow),
        ("head x routed", {"warm_up": 0.5}),
        ("two routed dims", {"warm_up": 0.0, "load": 0.1, "entropy": 0.1, "top_k": 2}),
        pytest.param("tensor parallel", {"warm_up": 1.0, "load": 0.1}, marks=pytest.mark.slow),
        ("head x routed", {"warm_up": 1.0, "warm_temperature": 4.0, "per_head": True}),
    ],
)
def test_training_is_the_same_on_every_mesh(mesh, routing):
    # Three steps of AdamW in fp64: rounding of 1e-15 grows a little in every step.
    spec = small(**routing)
    alone = losses(ONE, spec)
    assert losses(MESHES[mesh], spec) == pytest.approx(alone, rel=1e-8)


def test_a_layout_that_does_not_route_computes_full_attention():
    spec = small()
    assert not routed_modules(weft.compose(spec))
    for name, count in (("ring-4", 0), ("routed-4", 1)):
        layout = Layout.load(name)
        found = run_threads(
            layout.mesh, lambda t, on=layout: len(routed_modules(weft.compose(spec, on.on(t))))
        )
        assert found == [count] * 4


def test_warm_up_takes_all_blocks_first_then_top_k():
    module = RoutedAttention(8, 2, axis="tokens", routing={"top_k": 2, "chunks": 9, "warm_up": 0.5})
    taken = []
    for progress in (0.0, 0.25, 0.3, 0.4, 0.5, 1.0):
        module.progress = progress
        taken.append(module.current().top_k)
    assert taken == [8, 8, 7, 5, 2, 2]
    assert module.eval().current().top_k == 2


def test_temperature_moves_by_equal_factors_during_warm_up():
    options = {"top_k": 1, "chunks": 4, "warm_up": 1.0, "warm_temperature": 4.0}
    module = RoutedAttention(8, 2, axis="tokens", routing=options)
    found = []
    for module.progress in (0.0, 0.5, 1.0):
        found.append(module.current().temperature)
    assert found == pytest.approx([4.0, 2.0, 1.0])


def test_the_module_attends_any_axis_of_a_tensor():
    axes = ("batch", "rows", "features", "embed")
    make = torch.Generator().manual_seed(0)
    options = {"axes": axes, "routing": {"top_k": 3, "chunks": 4}}
    x = torch.randn(2, 12, 5, 16, generator=make)
    routed_one = RoutedAttention(16, 2, axis="rows", generator=make.manual_seed(1), **options)
    full = weft.MultiAxisAttention(16, 2, axis="rows", axes=axes, generator=make.manual_seed(1))
    out, how = routed_one(x, return_routes=True)
    assert how.chosen.shape == (10, 1, 4, 4)
    assert torch.allclose(out, full(x), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"top": 1}, "unknown key 'top'.*did you mean 'top_k'"),
        ({"top_k": 0}, "top_k = 0"),
        (None, "routes nothing along tokens"),
    ],
)
def test_routing_options_that_mean_nothing_are_refused(options, text):
    with pytest.raises(DeclarationError, match=text):
        RoutedAttention(8, 2, axis="tokens", routing=options)


def test_a_router_learns_by_imitation_which_block_a_query_needs():
    # One head; queries of block i match the keys of block (i + 1) mod 4 exactly.
    torch.manual_seed(0)
    means = 3.0 * torch.eye(4, 8)
    options = Routing(top_k=1, chunks=4, imitate=1.0)
    router = Router(8, 1, 1, 8, Layout.single())
    optimizer = torch.optim.Adam(router.parameters(), lr=0.02)

    def step(top_k: int):
        order = torch.stack([torch.randperm(4) for _ in range(8)])
        k = means[order].repeat_interleave(6, 1) + 0.1 * torch.randn(8, 24, 8)
        q = means[order.roll(-1, 1)].repeat_interleave(6, 1) + 0.1 * torch.randn(8, 24, 8)
        q, k = q[:, None], k[:, None]
        now = options.model_copy(update={"top_k": top_k})
        return routed_attention(
            q, k, k, router, Layout.single(), "tokens", now, want_attention=top_k > 1
        )[1]

    wanted = torch.tensor([1, 2, 3, 0]).expand(8, 4)

    def hits() -> float:
        return (heaviest_blocks(step(1), 1)[:, 0, :, 0] == wanted).float().mean().item()

    assert hits() < 0.6
    for _ in range(60):
        optimizer.zero_grad()
        step(3).penalty(options).backward()
        optimizer.step()
    assert hits() == 1.0


def test_a_copy_and_an_average_begin_without_the_latest_call():
    module = RoutedAttention(16, 2, axis="tokens", routing={"top_k": 2, "chunks": 4, "load": 0.1})
    average = AveragedModel(module)
    x = torch.randn(2, 12, 16)
    out = module(x)
    copies = [copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))]
    average.update_parameters(module)
    for other in (*copies, copy.deepcopy(average).module):
        assert other.last is None
        assert torch.equal(other(x), out)
    assert module.penalty().requires_grad


def test_a_penalty_that_would_train_nothing_is_refused():
    module = RoutedAttention(16, 2, axis="tokens", routing={"top_k": 2, "chunks": 4, "load": 0.1})
    x = torch.randn(2, 12, 16, requires_grad=True)
    checkpoint(module, x, use_reentrant=False)
    routing_penalty(module).backward()
    wanted = [p.grad for p in module.router.parameters()]
    assert any(g is not None and g.any() for g in wanted)
    checkpoint(module, x, use_reentrant=True)
    with pytest.raises(UnsupportedError, match=r"train nothing.*use_reentrant=False"):
        routing_penalty(module)
    with torch.no_grad():
        looked = routing_penalty(module)
        assert torch.equal(looked, routing_penalty(module.eval()))
    assert torch.equal(looked, routing_penalty(module))


def test_what_routing_does_is_measured():
    spec = small(warm_up=0.0)

    def rank(transport):
        model = weft.compose(spec, ROUTED.on(transport))
        observe(model, True)
        data = stream(spec, ROUTED.on(transport), seed=0)
        batch = data.batch(0)
        model(batch.inputs, **batch.given)
        return measure_routing(model)

    for found in run_threads(ROUTED.mesh, rank):
        assert found["blocks taken"] == 1.0
        assert found["entropy"] == pytest.approx(1.0)  # untrained
        assert found["fan-out"] == 7.0  # equals go to block 0
        assert 0.0 < found["attention fetched"] < found["attention covered"] <= 1.0 + 1e-6
        # Two blocks a rank, both take block 0, half a chunk: a sixth of a ring's; its owner none.
        assert found["bytes saved"] in (pytest.approx(5 / 6), 1.0)


def test_penalties_of_routes_per_head_are_equal_on_split_heads():
    options = {"top_k": 2, "chunks": 4, "per_head": True, "warm_up": 0.0, "imitate": 1.0}
    seeded = torch.Generator().manual_seed(5)
    x = torch.randn(2, 16, 16, dtype=torch.float64, generator=seeded)
    trained = torch.randn(2, 16, 32, dtype=torch.float64, generator=seeded)

    def penalty(layout):
        attend = weft.routing.RoutedAttention(
            16,
            2,
            axis="tokens",
            routing=options,
            layout=layout,
            generator=torch.Generator().manual_seed(0),
            dtype=torch.float64,
        )
        with torch.no_grad():
            attend.router.key.weight.copy_(layout.shard(trained, {"heads": 0}).flatten(0, 1))
        attend(layout.shard(x, {"tokens": 1}))
        return routing_penalty(attend).item()

    found = weft.on_threads(Layout.load("head-x-routed"), penalty)
    assert found == [pytest.approx(penalty(Layout.single()), rel=1e-11)] * len(found)


def test_penalty_is_whole_one_on_every_rank_with_its_gradient():
    """Its value is one process's, and so is the sum of the ranks' gradients."""
    options = {"top_k": 2, "chunks": 4, "warm_up": 0.0, "load": 0.3, "entropy": 0.2}
    seeded = torch.Generator().manual_seed(5)
    x = torch.randn(2, 16, 16, dtype=torch.float64, generator=seeded)

    def step(layout):
        make = torch.Generator().manual_seed(0)
        place = {"layout": layout, "generator": make, "dtype": torch.float64}
        two = torch.nn.ModuleList(
            RoutedAttention(16, 2, axis="tokens", routing=options, **place) for _ in range(2)
        )
        for attend in two:
            with torch.no_grad():  # a fresh router weighs all blocks equally
                attend.router.key.weight.add_(0.1)
            attend(layout.shard(x, {"tokens": 1}))
        penalty = routing_penalty(two)
        penalty.backward()
        layout.sync_gradients(two)
        return [penalty.detach(), *(p.grad for p in two.parameters() if p.grad is not None)]

    wanted = step(Layout.single())
    assert wanted[0] > 0
    assert any(g.abs().max() > 1e-3 for g in wanted[1:])
    for found in weft.on_threads(Layout.load("routed-4"), step):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


def test_routers_whose_weights_differ_are_refused_on_every_rank():
    """Each rank weighs the blocks of its own queries: two routers would choose by two rules."""

    def rank(transport) -> str:
        layout = ROUTED.on(transport)
        drawn = torch.Generator().manual_seed(7 if transport.rank == 2 else 3)
        router = Router(8, 2, 2, 4, layout, drawn)
        q, k, v = torch.randn(3, 1, 2, 4, 8).unbind(0)
        routing = Routing(top_k=1, chunks=4)
        with pytest.raises(weft.ShapeError) as refused:
            routed_attention(q, k, v, router, layout, "tokens", routing)
        return str(refused.value)

    for message in run_threads(ROUTED.mesh, rank):
        assert "must be the same on every rank" in message
        assert "router weights" in message.rpartition("they differ in")[2], message
