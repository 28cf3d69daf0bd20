"""Layouts timed side by side: in turns, with bytes that are counted, and nonsense refused."""

import pytest
import torch
from world import cli

import weft
from weft import Layout
from weft.testing.cases import Case
from weft_cli.commands import side_by_side as timing
from weft_cli.commands.side_by_side import call_work, side_by_side
from weft_models.models import ModelSpec
from weft_planner.work import Work, lengths_of_model, model_work

SMALL = ("--length", "64", "--heads", "8", "--kv-heads", "4", "--head-dim", "16")
CASE = Case("", 37, batch=1, kv_heads=2, dim=8, mask=weft.Causal(), dtype=torch.float64)


def test_layouts_take_turns_and_another_one_begins_each_round():
    seen = []
    q = torch.ones(1, requires_grad=True)
    works = [Work(lambda i=i: seen.append(i) or q * 2, [q]) for i in range(3)]
    side_by_side([(Layout.single(), work) for work in works], 2, "cpu")
    assert seen == [0, 1, 2, 0, 1, 2, 1, 2, 0]  # once each to count, then two rounds


def test_the_slowest_rank_and_the_busiest_count():
    def rank(layout):
        took = [(1.0, 3.0), (2.0, 2.5)] if layout.rank else [(2.0, 2.5), (1.0, 4.0)]
        counted = {"forward": 5, "backward": 7 * layout.rank, "kept": 2 - layout.rank, "held": 1}
        return timing._over_ranks(layout, counted, took)

    first, second = weft.on_threads(Layout.parse("tokens: ring=2"), rank)
    assert first == second == timing.TimedPasses((2.0, 2.0), (3.0, 4.0), (5, 7), 2, 1)
    assert first.medians == (2.0, 1.5, 3.5)


def _on_ranks(rank: int) -> list[timing.TimedPasses]:
    layouts = [Layout.load(name).build("cpu", timeout=60) for name in ("ring-zigzag-4", "pass-q-4")]
    return side_by_side([(each, call_work(each, CASE, "cpu")) for each in layouts], 2, "cpu")


def test_layouts_on_real_ranks_receive_what_their_plans_say(pool):
    first, *others = pool.run(_on_ranks)
    assert all(other == first for other in others)
    for name, passes in zip(("ring-zigzag-4", "pass-q-4"), first, strict=True):
        options = {"heads": 8, "kv_heads": 2, "head_dim": 8, "batch": 1, "dtype": torch.float64}
        plan = Layout.load(name).plan("tokens", length=37, mask=weft.Causal(), **options)
        moved = [each.traffic for each in plan.ranks()]
        most = [max(getattr(m, way).bytes for m in moved) for way in ("forward", "backward")]
        assert list(passes.received) == most
        assert passes.kept >= 8 * (2 * 8 + 2 * 2) * 8 * 9  # q, out, k, v of 9 tokens, in fp64
        assert passes.held > 0
        assert len(passes.whole) == 2
        assert min(passes.medians) > 0


def test_a_layer_keeps_its_input_and_not_its_weight():
    layer, x = torch.nn.Linear(64, 64), torch.randn(3, 64, requires_grad=True)
    work = Work(lambda: layer(x), [*layer.parameters(), x])
    assert timing._counted(Layout.single(), work, "cpu")["kept"] == x.nbytes


def _kept_by_a_model(rank: int) -> tuple[int, int, int]:
    """Bytes of a model's weights, and what is kept on one rank and where ranks split heads."""
    spec, kept, weights = ModelSpec.load("causal_lm"), [], 0
    for layout in (Layout.single(), Layout.parse("heads: tp=2; tokens: ring=2").build("cpu")):
        work = model_work(layout, spec, 1, {"tokens": 4}, torch.float32, "cpu")
        kept.append(timing._counted(layout, work, "cpu")["kept"])
        weights = weights or sum(leaf.nbytes for leaf in work.leaves)
    return weights, *kept


def test_weights_are_not_kept_where_ranks_split_them_either(pool):
    for weights, alone, split in pool.run(_kept_by_a_model):
        assert split < alone < weights / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal_lm", "tabular", "pair", "weather"])
def test_every_model_that_ships_is_timed(name):
    spec = ModelSpec.load(name)
    lengths = lengths_of_model(spec, dict.fromkeys(spec.axes[1:-1], 12))
    work = model_work(Layout.single(), spec, 1, lengths, torch.float32, "cpu")
    (found,) = side_by_side([(Layout.single(), work)], 1, "cpu")
    assert found.received == (0, 0)
    assert min(found.kept, *found.medians) > 0
    assert all(leaf.grad is not None for leaf in work.leaves if leaf.requires_grad)


@pytest.mark.slow
def test_the_command_starts_ranks():
    shown = cli("bench", "call", "ring-2", "tokens: ulysses=2", *SMALL, "--rounds", "1")
    title = "64 tokens, 8/4 heads of 16, full, float32: 2 processes on cpu, medians of 1 rounds"
    assert title in shown


@pytest.mark.sample
def test_the_command_shows_times_and_bytes_of_each_layout():
    shown = cli("bench", "call", "tokens: local", "tokens: local", *SMALL, "--rounds", "3")
    assert "float32: 1 process on cpu, medians of 3 rounds" in shown
    assert "1.00" in shown
    assert "bytes of the busiest rank" in shown


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("call ring-2 ring-4", "the same ranks, but these take 2 (ring-2), 4 (ring-4)"),
        ("call ring-2 --nproc 3", "has 2 ranks, but there are 3"),
        ("call ring-4 ulysses-4 --heads 3", "ulysses-4.toml: 3 local heads cannot be split 4 ways"),
        ("call ring-2 --length 1000000000 --head-dim 128", "and this machine has"),
        ("call routed-4", "routes keys of axis 'tokens' by learned weights"),
        ("call ring-2 --mask causl", "did you mean 'causal'?"),
        ("call ring-2 --dtype int8", "dtype 'int8'"),
        ("model causla_lm ring-2", "did you mean 'causal_lm'?"),
        ("model causal_lm weather-dp-x-ring", "shards axis 'lat', which model 'causal_lm' does"),
        ("model weather weather-dp-x-ring --batch 1", "2 ranks split axis 'batch'"),
        ("model causal_lm ring-2 --length foo=3", "no axis 'foo' with a length; known: tokens"),
        ("model causal_lm ring-2 --length 64", "a model needs AXIS=N,AXIS=N"),
        ("model causal_lm ring-2 --length tokens=0", "lengths are 1 to"),
    ],
)
def test_nonsense_is_refused_in_one_line_before_anything_starts(words, text):
    shown = cli("bench", *words.split(), code=1)
    assert text in shown
    assert shown.startswith("error: ")
    assert shown.count("error") == 1
