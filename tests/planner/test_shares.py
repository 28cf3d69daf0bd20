"""Unequal shares of tokens and heads: exact, bytes as planned, refused where parts are equal."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from exact import Case, assert_exact, tokens
from world import cli

import weft
from weft import Causal, Layout
from weft.declare.hardware import Hardware
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.plan.order import chunk_sizes, shard_sizes
from weft.plan.problem import Problem
from weft_models.models import ModelSpec
from weft_models.train import fit
from weft_planner.flow import replayed
from weft_proof.symbolic import prove


def shared(line: str, **share: tuple[float, ...]) -> Layout:
    """A layout on one line with shares of its mesh dims."""
    data = Layout.parse(line).declaration
    return Layout.from_dict({**data, "share": share}, name=line)


LAYOUTS = {
    "ring": shared("tokens: ring=4", ring=(1, 1, 2, 4)),
    "zigzag gather": shared("tokens(zigzag): gather=4", gather=(4, 1, 2, 1)),
    "striped burst": shared("tokens(striped): burst=3", burst=(1, 2, 1)),
    "pass-Q": shared("tokens: pass_q=3", pass_q=(3, 1, 2)),
    "tile": shared("tokens: tile=2x2", row=(2, 1), col=(4, 1)),
    "hierarchical": shared("tokens(zigzag): hierarchical=2x2", inter=(1, 3)),
    "ulysses": shared("tokens: ulysses=4", ulysses=(1, 1, 2, 4)),
    "ulysses x ring": shared("tokens(zigzag): ulysses=2 x ring=2", ulysses=(1, 2), ring=(3, 1)),
    "ring x ulysses": shared("tokens: ring=2 x ulysses=2", ulysses=(1, 2)),
    "a rank of nearly none": shared("tokens: ring=4", ring=(1, 1, 1, 61)),
    "dp": shared("batch: dp=2; tokens: ring=2", ring=(1, 3)),
    "tp": shared("heads: tp=2; tokens: ulysses=2", ulysses=(1, 3)),
}
MASKS = {"full": weft.Full(), "causal": Causal(), "window": weft.Window(5, 0)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_on_unequal_shares_is_exact(name):
    i = list(LAYOUTS).index(name)
    mask = list(MASKS.values())[i % 3]
    case = Case(lengths=tokens(29), heads=8, kv_heads=(8, 4)[i % 2], mask=mask, dim=5)
    assert_exact(LAYOUTS[name], case.with_(lse_gradient=True))
    assert_exact(LAYOUTS[name], case.with_(bias=True, mask=weft.Full()))


@pytest.mark.parametrize("name", ["ring", "tile", "ulysses x ring", "striped burst"])
def test_plans_of_unequal_shares_are_proven(name):
    problem = Problem.of("tokens", 29, heads=8, mask=Causal())
    assert all(claim.ok for claim in prove(LAYOUTS[name], problem))


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_of_unequal_shares_are_as_planned(name):
    layout, dims = LAYOUTS[name], {"batch": 0, "heads": 1, "tokens": 2}
    q = torch.randn(2, 8, 29, 8)

    def rank(bound: Layout) -> int:
        mine = bound.shard(q, dims).requires_grad_()
        with weft.traffic(bound) as counted:
            out = weft.attention(mine, mine, mine, bound, "tokens", Causal(), length=29)
            out.sum().backward()
        assert counted.as_predicted
        assert torch.equal(bound.gather(mine.detach(), dims), q)
        return mine.shape[2]

    held = weft.on_threads(layout, rank)
    assert sum(held) == 29 * layout.world_size // layout.size("tokens")
    if name == "ring":
        assert held == [4, 4, 7, 14]


def test_shares_are_apportioned_by_largest_remainders():
    assert chunk_sizes(64, (1, 1, 2, 4)) == [8, 8, 16, 32]
    assert chunk_sizes(7, (1, 1, 1)) == [3, 2, 2]
    assert chunk_sizes(0, (1, 2)) == [0, 0]
    assert shard_sizes(30, (2, (2, 1))) == (10, 5, 10, 5)


def test_layouts_with_other_shares_are_other_layouts():
    first, other = LAYOUTS["ring"], shared("tokens: ring=4", ring=(1, 1, 1, 1))
    assert first != other != Layout.parse("tokens: ring=4")
    assert first == Layout.from_dict(dict(first.declaration))
    assert "[share]\nring = [1, 1, 2, 4]" in first.to_toml()


@pytest.mark.parametrize(
    ("line", "share", "said"),
    [
        ("tokens: ring=4", {"rign": (1, 1, 1, 1)}, "no mesh dim 'rign'; did you mean 'ring'"),
        ("tokens: ring=4", {"ring": (1, 2)}, "has 4 coordinates; give one share for each"),
        ("tokens: ring=-1", {"ring": (1, 2)}, "has -1 coordinates"),
        ("tokens: ring=2", {"ring": (1, 0)}, "share.ring"),
        ("batch: dp=2; tokens: ring=2", {"dp": (1, 2)}, "splits 'batch'"),
        ("heads: tp=2; tokens: ring=2", {"tp": (1, 2)}, "splits 'heads'"),
    ],
)
def test_shares_that_cannot_be_are_refused(line, share, said):
    with pytest.raises(DeclarationError, match=re.escape(said)):
        shared(line, **share)


def test_calls_that_need_equal_parts_are_refused():
    layout = LAYOUTS["ring"]
    with pytest.raises(UnsupportedError, match=r"packing needs equal parts of tokens, and .share."):
        layout.pack([3, 5])
    with pytest.raises(UnsupportedError, match="a DTensor needs equal parts"):
        layout.placements({"tokens": 0})

    def rank(bound: Layout) -> None:
        mine = bound.shard(torch.randn(1, 2, 29, 4), {"tokens": 2})
        with pytest.raises(ShapeError, match="unequal shares; give the global length"):
            weft.attention(mine, mine, mine, bound, "tokens")
        with pytest.raises(UnsupportedError, match="moving tensors between layouts needs"):
            bound.redistribute(mine, bound, {"tokens": 2}, {"tokens": 29})
        with pytest.raises(UnsupportedError, match="a recurrence needs equal parts"):
            weft.halo(lambda run: run[..., 1:, :], mine, 1, layout=bound, axis="tokens", dim=2)

    weft.on_threads(layout, rank)


# -- on the clock --------------------------------------------------------------------------------


def machine(rate: float, speeds=(1, 1, 2, 4)) -> Hardware:
    level = {"name": "network", "rate": rate}
    return Hardware.from_dict({"device": {"flops": 1e14, "speeds": speeds}, "level": [level]})


def test_seconds_of_ranks_follow_their_speeds():
    call = Problem.of("tokens", 4096, heads=8)
    timing = replayed(Layout.parse("tokens: ulysses=4"), call, machine(1e12)).timing
    slowest, *_, fastest = timing.compute_of_ranks
    assert slowest == pytest.approx(4 * fastest)
    assert sum(timing.compute) == pytest.approx(slowest)
    even = replayed(shared("tokens: ulysses=4", ulysses=(1, 1, 2, 4)), call, machine(1e12)).timing
    assert even.compute_of_ranks == pytest.approx((sum(even.compute),) * 4)


def test_explain_shows_the_seconds_of_each_rank(tmp_path):
    layout = shared("tokens: ring=2", ring=(1, 3))
    path = tmp_path / "layout.toml"
    path.write_text(layout.to_toml() + "\n[rates]\nspeeds = [1, 3]\n")
    said = cli("explain", "call", str(path), "--length", "4096")
    assert "compute alone, rank by rank: " in said, said


# -- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ring x ulysses", "hierarchical"])
def test_training_on_unequal_shares_has_the_losses_of_one_device(name):
    options = {"steps": 2, "batch": 2, "quiet": True, "dtype": torch.float64}
    spec = ModelSpec.load("causal_lm")
    wanted = fit(spec, Layout.single(), **options).losses
    for losses in weft.on_threads(LAYOUTS[name], lambda on: fit(spec, on, **options).losses):
        assert losses == pytest.approx(wanted, rel=1e-12)


def test_transformers_models_on_unequal_shares_are_as_on_one_device():
    models = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40}
    config = models.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    single = models.LlamaForCausalLM(config)
    tokens = torch.randint(0, 40, (2, 14))
    loss = single(tokens, labels=tokens).loss.detach()

    def rank(layout: Layout):
        model = weft.parallelize(copy.deepcopy(single), layout)
        return model(tokens, labels=tokens).loss.detach()

    for found in weft.on_threads(LAYOUTS["ulysses x ring"], rank):
        torch.testing.assert_close(found, loss)
