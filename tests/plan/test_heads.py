"""Heads that ranks do not divide: shares of whole heads, exact, balanced, bytes as planned."""

from __future__ import annotations

import copy

import pytest
import torch
from exact import Case, assert_exact, tokens

import weft
from weft import Causal, Layout
from weft.errors import ShapeError
from weft.plan.heads import nested, share_heads

#: Layout, query heads, key/value heads.
UNEVEN = [
    ("tokens: ulysses=4", 6, 6),
    ("tokens: ulysses=4", 10, 5),
    ("tokens: ulysses=3", 14, 2),
    ("tokens: ulysses=3", 8, 8),
    ("tokens: ulysses=8", 28, 4),
    ("tokens: ulysses=3", 7, 1),
    ("tokens: ulysses=2 x ring=2", 9, 3),
    ("tokens: ring=2 x ulysses=3", 7, 7),
    ("tokens: ulysses=2 x ulysses=2", 7, 7),
    ("tokens: ulysses=2 x ring=2 x ulysses=2", 10, 2),
    ("tokens(zigzag): pass_q=2 x ulysses=3", 4, 2),
    ("tokens: ulysses=3 x tile=1x2", 5, 5),
    ("heads: tp=2; tokens: ulysses=3", 28, 4),
    ("batch: dp=2; tokens: ulysses=3", 14, 7),
]


@pytest.mark.parametrize(("line", "heads", "kv_heads"), UNEVEN)
def test_heads_that_ranks_do_not_divide_are_exact(line, heads, kv_heads):
    case = Case(lengths=tokens(13), heads=heads, kv_heads=kv_heads, dim=5, value_dim=3)
    assert_exact(Layout.parse(line), case.with_(mask=Causal(), lse_gradient=True, sinks=True))
    assert_exact(Layout.parse(line), case.with_(bias=True, softcap=3.0))


@pytest.mark.parametrize(("line", "heads", "kv_heads"), UNEVEN)
def test_bytes_of_uneven_heads_are_as_planned(line, heads, kv_heads):
    layout, dims = Layout.parse(line), {"batch": 0, "heads": 1, "tokens": 2}
    q, k = (torch.randn(2, h, 13, 8) for h in (heads, kv_heads))
    sizes = {"length": 13, "heads": heads, "kv_heads": kv_heads, "head_dim": 8, "batch": 2}

    def rank(bound: Layout) -> None:
        mine = [bound.shard(x, dims).requires_grad_() for x in (q, k, k)]
        with weft.traffic(bound) as counted:
            out = weft.attention(*mine, bound, "tokens", Causal(), length=13)
            out.sum().backward()
        assert counted.as_predicted
        plan = bound.plan("tokens", rank=bound.rank, mask=Causal(), **sizes).traffic
        assert counted.bytes == plan.forward.bytes + plan.backward.bytes

    weft.on_threads(layout, rank)


@pytest.mark.few(16)
@pytest.mark.parametrize("ways", range(1, 17))
@pytest.mark.parametrize(("heads", "kv_heads"), [(40, 8), (28, 4), (14, 2), (16, 16), (24, 1)])
def test_shares_are_whole_balanced_and_served(heads, kv_heads, ways):
    """DTensor's ceil chunks (6 heads on 4 ranks: 2, 2, 2, 0) are whole, but not balanced."""
    if ways > heads:
        return
    shares = share_heads(heads, kv_heads, ways)
    assert max(shares.queries) - min(shares.queries) <= 1
    assert sum(shares.queries) == heads
    group, first = heads // kv_heads, 0
    for queries, keys in zip(shares.queries, shares.copies, strict=True):
        each = queries // len(keys)
        assert each * len(keys) == queries
        served = [keys[i // each] for i in range(queries)]
        assert served == [(first + i) // group for i in range(queries)]
        first += queries
    if heads % ways == 0:
        assert shares.repeat is not None  # one copy, or as many of each


def test_scores_of_ranks_follow_their_heads():
    plans = Layout.parse("tokens: ulysses=4").plan("tokens", length=8, heads=6).ranks()
    assert [plan.scores.forward for plan in plans] == [128, 64, 128, 64]


def test_nested_shares_add_up():
    leaves = (3, 2, 3, 2, 3, 2)
    assert nested(leaves, (3, 2), ()) == [5, 5, 5]
    assert nested(leaves, (2, 3), ()) == [8, 7]
    assert nested(leaves, (2, 3), (1,)) == [2, 3, 2]


def test_fewer_heads_than_ranks_are_refused():
    with pytest.raises(ShapeError, match=r"3 local heads cannot be split 4 ways over mesh dims"):
        Layout.parse("tokens: ulysses=4").plan("tokens", length=8, heads=3)


@pytest.mark.few(1)
@pytest.mark.parametrize("line", ["tokens: ulysses=3", "tokens: ring=2 x ulysses=3"])
def test_transformers_models_with_uneven_heads_are_as_on_one_device(line):
    """14 heads of queries and 2 of keys, as Qwen2.5-0.5B has."""
    models = pytest.importorskip("transformers")
    sizes = {"hidden_size": 56, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40}
    config = models.Qwen2Config(num_attention_heads=14, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    single = models.Qwen2ForCausalLM(config)
    tokens = torch.randint(0, 40, (2, 13))
    loss = single(tokens, labels=tokens).loss
    loss.backward()

    def rank(layout: Layout):
        model = copy.deepcopy(single)
        model.zero_grad()
        model = weft.parallelize(model, layout)
        found = model(tokens, labels=tokens).loss
        found.backward()
        layout.sync_gradients(model)
        return found.detach(), {name: p.grad for name, p in model.named_parameters()}

    for found, gradients in weft.on_threads(Layout.parse(line), rank):
        torch.testing.assert_close(found, loss.detach())
        for name, p in single.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, atol=1e-5, rtol=1e-4)
