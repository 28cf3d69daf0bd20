"""`layout.plan`: what a call would do, asked without ranks, is what ranks then do."""

import itertools

import pytest
import torch

import weft
from weft import Layout
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.inspect.events import COMPUTE
from weft.plan.plan import Plan
from weft.plan.predict import forecast_of
from weft.plan.problem import Problem


@pytest.mark.parametrize("line", ["ring=4", "tile=2x2", "ulysses=2 x pass_q=2"])
@pytest.mark.parametrize(
    "mask",
    [weft.Full(), weft.Causal(), weft.Documents((10, 27)), weft.Documents(((10, 27), (1, 35, 1)))],
)
def test_planned_traffic_is_counted_traffic(line, mask):
    layout = Layout.parse(f"tokens(zigzag): {line}")
    planned = layout.plan("tokens", length=37, heads=4, kv_heads=2, head_dim=8, mask=mask, batch=2)
    q, k, v = torch.randn(2, 4, 37, 8), torch.randn(2, 2, 37, 8), torch.randn(2, 2, 37, 8)

    def rank(bound: Layout) -> tuple[int, int]:
        leaves = [bound.shard(x, {"tokens": 2}).requires_grad_() for x in (q, k, v)]
        with weft.traffic(bound) as forward:
            out = weft.attention(*leaves, bound, "tokens", mask, length=37)
        with weft.traffic(bound) as backward:
            out.sum().backward()
        return forward.bytes, backward.bytes

    expected = [(p.traffic.forward.bytes, p.traffic.backward.bytes) for p in planned.ranks()]
    assert expected == weft.on_threads(layout, rank)


def test_ranks_together_compute_all_visible_scores():
    plan = Layout.load("tile-2x2").plan("tokens", length=40, heads=2, mask=weft.Causal())
    assert sum(each.scores.forward for each in plan.ranks()) == 2 * 40 * 41 // 2
    matrix = plan.score_matrix()
    assert matrix.groups == [[0], [1], [2], [3]]
    assert ((matrix.owners >= 0) == torch.ones(40, 40).tril().bool().numpy()).all()


def test_a_plan_has_a_timeline_and_draws(tmp_path):
    plan = Layout.load("ring-4").plan("tokens", length=64, heads=2)
    lanes = {event.lane for event in plan.timeline().events}
    assert lanes == {COMPUTE, "ring"}
    plan.timeline().draw(tmp_path / "program.png")
    plan.score_matrix().draw(tmp_path / "scores.png", title="ring")
    for name in ("program.png", "scores.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_several_axes_cross_attention_and_numpy_sizes_are_taken():
    import numpy as np

    single = Layout.single()
    joint = single.plan(("rows", "features"), length={"rows": 8, "features": 3}, heads=1)
    assert joint.scores.forward == 24 * 24
    cross = single.plan("tokens", length=(8, np.int64(5)), heads=np.int64(2))
    assert cross.scores.forward == 2 * 8 * 5


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_device_is_planned_by_its_type(device):
    ring, options = Layout.load("ring-4"), {"length": 65536, "heads": 32, "dtype": torch.bfloat16}

    def found(given):
        plan = ring.plan("tokens", **options, device=given)
        return plan._plan.kernel(False).name, plan._plan.shifts, plan.bound, plan.program

    for given in (f"{device}:0", torch.device(device), torch.device(device, 0)):
        assert found(given) == found(device)
    assert ring.plan("tokens", **options, device="meta")._plan.kernel(False).name == "meta"


@pytest.mark.parametrize("device", ["gpu", "cuda:first", "mps", "", None])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(ShapeError, match="known are cpu, cuda and meta") as refused:
        Layout.load("ring-4").plan("tokens", length=8, heads=1, device=device)
    assert repr(device) in str(refused.value)


@pytest.mark.parametrize("length", [-4, 10.7, True, "12", (8, 8, 8), None, {"rows": 8}])
def test_a_length_that_attention_refuses_has_no_plan(length):
    ring = Layout.load("ring-4")
    with pytest.raises(ShapeError, match="length") as planned:
        ring.plan("tokens", length=length, heads=1)
    if length is not None:  # which attention reads from the shards
        q = torch.zeros(1, 1, 3, 8)
        with pytest.raises(ShapeError) as called:
            weft.attention(q, q, q, Layout.single(), "tokens", length=length)
        assert str(planned.value) == str(called.value)


def test_what_no_rank_could_run_is_refused():
    ring = Layout.load("ring-4")
    with pytest.raises(ShapeError, match="rank 4 is none of the 4 ranks"):
        ring.plan("tokens", length=8, heads=1, rank=4)
    with pytest.raises(ShapeError, match="add up to 7"):
        ring.plan("tokens", length=8, heads=1, mask=weft.Documents((3, 4)))
    with pytest.raises(ShapeError, match="3 query heads cannot share 2"):
        ring.plan("tokens", length=8, heads=3, kv_heads=2)
    with pytest.raises(UnsupportedError, match="a router or the model chooses"):
        Layout.parse("tokens: routed=4").plan("tokens", length=64, heads=1)
    free = Layout.from_dict(
        {
            "mesh": {"ring": -1},
            "shard": {"tokens": ["ring"]},
            "attend": {"tokens": [{"strategy": "ring", "on": "ring"}]},
        }
    )
    with pytest.raises(DeclarationError, match=r"layout\.resolve"):
        free.plan("tokens", length=8, heads=1)
    assert free.resolve(2).plan("tokens", length=8, heads=1).traffic.forward.bytes


def test_a_plan_refuses_a_problem_of_all_ranks():
    layout, problem = Layout.load("tp-x-ring"), Problem.of("tokens", 64, heads=8, batch=2)
    with pytest.raises(ShapeError, match=r"give problem\.on\(layout, rank\)"):
        Plan(layout, problem, {"tp": 0, "ring": 0})
    for rank, place in enumerate(itertools.product(range(2), repeat=2)):
        local = problem.on(layout, rank)
        assert (local.batch, local.heads, local.kv_heads) == (2, 4, 4)
        plan = Plan(layout, local, dict(zip(layout.mesh, place)))
        planned = layout.plan("tokens", length=64, heads=8, batch=2, rank=rank)
        assert forecast_of(plan).forward.traffic.bytes == planned.traffic.forward.bytes
