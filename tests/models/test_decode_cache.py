"""weft's language models decode on ranks as in one process, from keys of which a rank has some.

The reference keeps no keys: it reads all tokens again for each new one.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import weft
from weft.errors import DeclarationError, ShapeError
from weft.layout import Layout
from weft_models.models import ModelSpec
from weft_models.models.decode_cache import DecodeCache
from weft_models.models.sampling import Sampling

LAYOUTS = {
    "ring, zigzag": "tokens(zigzag): ring=4",
    "tile": "tokens: tile=2x2",
    "tile, striped": "tokens(striped): tile=2x2",
    "ulysses": "tokens: ulysses=2",
    "hierarchical": "tokens: hierarchical=2x2",
    "queries whole, keys split": "kv-parallel-4",
    "keys whole, queries split": "shared-context-4",
    "heads and tokens split": "tp-x-ring",
    "batch and tokens split": "dp-x-tile",
}


def layout_of(text: str) -> Layout:
    return Layout.parse(text) if ":" in text else Layout.load(text)


CONTEXT = {"notes": {"axes": ["batch", "tokens", "embed"], "embed": 32}}


def spec(contexts=None, **block) -> ModelSpec:
    """A small model whose attention block is causal with rope, or as said."""
    block = {"attend": "tokens", "mask": "causal", "rope": True} | block
    sizes = {"embed": 32, "heads": 4, "kv_heads": 2, "vocabulary": 32}
    given = {"axes": ["batch", "tokens", "embed"], "head": "tokens", "sizes": sizes, "repeat": 2}
    given |= {} if contexts is None else {"context": contexts}
    return ModelSpec.from_dict(given | {"block": [block, {"mlp": 32}]})


def draw(rows: int, length: int) -> torch.Tensor:
    return torch.randint(32, (rows, length), generator=torch.Generator().manual_seed(1))


def build(layout: Layout | None = None, model: str | ModelSpec = "causal_lm") -> torch.nn.Module:
    return weft.compose(model, layout, dtype=torch.float64)


@torch.no_grad()
def greedy(model: torch.nn.Module, ids: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return ids


def on_ranks(layout: Layout, ids: torch.Tensor, model="causal_lm", **options) -> list:
    """What `generate` makes of the rows of each rank, and these rows of full tensors."""

    def rank(bound: Layout):
        seed = options.get("seed")
        given = {k: v for k, v in options.items() if k != "seed"}
        if seed is not None:
            given["generator"] = torch.Generator().manual_seed(seed)
        made = build(bound, model).generate(bound.shard(ids, {"batch": 0}), **given)
        return made, lambda whole: bound.shard(whole, {"batch": 0})

    return weft.on_threads(layout, rank)


def assert_same(layout: Layout, want: torch.Tensor, ids: torch.Tensor, **options) -> None:
    for made, part in on_ranks(layout, ids, **options):
        assert torch.equal(made, part(want))


@pytest.fixture(scope="module")
def continued() -> torch.Tensor:
    want = greedy(build(), draw(3, 13), 72)
    assert len(want[0, 13:].unique()) > 5
    return want


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_tokens_are_those_without_a_cache(name: str, continued: torch.Tensor) -> None:
    """More tokens than a block on each of two ranks, so that blocks go to all."""
    layout = layout_of(LAYOUTS[name])
    assert_same(layout, continued, continued[:, :13], max_new_tokens=np.int64(72))


@pytest.mark.parametrize("length", [1, 2, 3, 7, 45])
def test_a_prompt_may_have_any_length(length: int) -> None:
    ids = draw(2, length)
    want = greedy(build(), ids, 9)
    for text in ("tokens(zigzag): ring=4", "kv-parallel-4"):
        assert_same(layout_of(text), want, ids.int(), max_new_tokens=9)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "block",
    [
        {"mask": {"causal": {"window": 5}}},
        {"mask": {"window": [6, 0]}},
        {"rope": False, "gate": True, "scale": 0.4},
    ],
    ids=["causal with a window", "a window", "a gate, and no rope"],
)
def test_blocks_of_other_kinds_decode(block: dict) -> None:
    model, ids = spec(**block), draw(2, 11)
    want = greedy(build(None, model), ids, 40)
    for text in ("tokens(zigzag): ring=2", "kv-parallel-4"):
        assert_same(layout_of(text), want, ids, model=model, max_new_tokens=40)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", ["ring, zigzag", "heads and tokens split", "batch and tokens split"]
)
@pytest.mark.parametrize("top_k", [None, 4])
def test_samples_are_those_of_one_process_with_its_seed(name: str, top_k: int | None) -> None:
    """Rows on other ranks draw from the same generator, each its number."""
    ids = draw(1, 9).expand(3, -1)
    options = {"max_new_tokens": 24, "do_sample": True, "temperature": 1.5, "top_k": top_k}
    want = build().generate(ids, **options, generator=torch.Generator().manual_seed(5))
    assert len({tuple(row) for row in want.tolist()}) == 3
    assert_same(layout_of(LAYOUTS[name]), want, ids, **options, seed=5)


def test_tokens_are_drawn_with_their_probabilities() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0]).expand(20_000, -1)
    own, generator = torch.arange(20_000), torch.Generator().manual_seed(0)
    for top_k, rest in ((None, logits[0] / 2), (2, torch.tensor([1.0, -9e9, 0.5, -9e9]))):
        chosen = Sampling(1, True, 2.0, top_k, None, 4)
        shares = chosen.next_tokens(logits, 20_000, own, generator).bincount(minlength=4) / 20_000
        assert (shares - rest.softmax(0)).abs().max() < 0.015


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ring, zigzag", "batch and tokens split"])
def test_rows_end_with_the_end_of_their_text(name: str, continued: torch.Tensor) -> None:
    ids = continued[:, :13]
    for rows in (slice(None), slice(0, 1)):  # rows that never end, and all that do
        want = continued[rows, :48].clone()
        end = int(want[0, 20])
        for row in want:
            at = (row[13:] == end).nonzero()
            if len(at):
                row[13 + int(at[0]) :] = end
        assert int((want == end).sum(1).max()) > 20
        layout = layout_of(LAYOUTS[name if len(want) > 1 else "ring, zigzag"])
        assert_same(layout, want, ids[rows], max_new_tokens=35, eos_token_id=end)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ring, zigzag", "queries whole, keys split"])
def test_a_decoding_step_costs_the_same_at_any_length(name: str) -> None:
    """A rank receives b h (d + 1) numbers per layer from each other one, and nothing else."""
    ids = draw(2, 101)

    @torch.no_grad()
    def rank(bound: Layout):
        model = build(bound)
        cache, moved = DecodeCache(model.spec, bound, model.stack.blocks, 40), []
        for step in range(41):
            with weft.traffic(bound) as traffic:
                model(ids if not step else ids[:, step : step + 1], cache=cache)
            moved.append(traffic.bytes)
        positions = cache.held.positions(cache.part)
        assert len(positions) == cache.count == cache.room
        return positions, cache.nbytes, moved[1:]

    ranks = weft.on_threads(layout_of(LAYOUTS[name]), rank)
    assert torch.cat([positions for positions, *_ in ranks]).sort()[0].tolist() == [*range(141)]
    for _, nbytes, moved in ranks:
        per_token = 2 * 2 * 2 * 2 * 16 * 8  # layers, keys and values, rows, heads, head dim, bytes
        assert nbytes <= (141 / 4 + 32) * per_token
        assert set(moved) == {2 * 3 * 2 * 4 * (16 + 1) * 8}


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("name", ["ring, zigzag", "heads and tokens split"])
def test_ranks_that_sample_different_tokens_are_told(name: str, steps: int) -> None:
    ids = draw(4, 9)

    def rank(bound: Layout):
        own = torch.Generator().manual_seed(int(bound.rank == 2))
        options = {"max_new_tokens": steps, "do_sample": True, "temperature": 9.0}
        with pytest.raises(ShapeError, match=r"tokens that ranks decode (.|\n)*rank 2") as caught:
            build(bound).generate(ids, generator=own, **options)
        return str(caught.value)

    for text in weft.on_threads(layout_of(LAYOUTS[name]), rank):
        assert "at position 9" in re.sub(r"\s+", " ", text)


REFUSED = {
    "rows of different lengths": ([[3, 1], [4]], {}, "rows of different lengths are calls of"),
    "no batch": (torch.zeros(3, dtype=torch.long), {}, r"\(3,\); rows"),
    "no tokens": (draw(2, 0), {}, r"at least one token, found \(2, 0\)"),
    "no ids": (torch.zeros(1, 3), {}, "whole numbers from 0 to 31, found torch.float32"),
    "unknown ids": (torch.tensor([[3, 32]]), {}, "from 0 to 31, found torch.int64 from 3 to 32"),
    "no steps": (draw(1, 3), {"max_new_tokens": 0}, "max_new_tokens=0: at least 1"),
    "half a step": (draw(1, 3), {"max_new_tokens": 0.5}, "max_new_tokens is a whole number"),
    "no temperature": (draw(1, 3), {"temperature": 0}, "temperature=0.0: above 0"),
    "none of the likeliest": (draw(1, 3), {"top_k": 0}, "top_k=0: at least 1"),
    "no such end": (draw(1, 3), {"eos_token_id": 32}, "eos_token_id=32: at least 0, at most 31"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("alone", [True, False])
def test_bad_arguments_of_some_ranks_are_refused_on_all(name: str, alone: bool) -> None:
    ids, options, message = REFUSED[name]

    def rank(bound: Layout):
        wrong = not alone or bound.rank == 1
        given = (ids, options) if wrong else (draw(1, 3), {})
        with pytest.raises(ShapeError, match=message):
            build(bound).generate(given[0], **{"max_new_tokens": 2} | given[1])
        return True

    assert all(weft.on_threads(Layout.parse("tokens: ring=2"), rank))


MODELS = {
    "a recurrence": ("hybrid", "block 0 carries a state"),
    "all see all": (spec(mask="full"), r"block 0 has mask = \[\], and not 'causal'"),
    "a prefix": (spec(mask={"prefix": 3}), r"block 0 has mask = \[\('prefix', 3\)\]"),
    "a window to the right": (
        spec(mask={"window": [3, 1]}),
        ".*'window' with no keys to the right",
    ),
    "a bias": (spec(bias="alibi"), "block 0 has a bias"),
    "a context": (
        spec(context="notes", mask=[], rope=False, contexts=CONTEXT),
        "block 0 attends 'notes', and not 'tokens' itself",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_are_not_causal_attention_are_refused(name: str) -> None:
    model, message = MODELS[name]
    with pytest.raises(DeclarationError, match=f"cannot decode along 'tokens': {message}"):
        build(None, model).generate(draw(1, 3), max_new_tokens=2)


def test_learned_routing_is_refused() -> None:
    def rank(bound: Layout):
        with pytest.raises(DeclarationError, match="block 0 routes its keys"):
            build(bound).generate(draw(1, 300), max_new_tokens=2)
        return True

    assert all(weft.on_threads(Layout.load("routed-4"), rank))


@torch.no_grad()
def test_logits_under_autocast_are_those_without_a_cache() -> None:
    model, ids = weft.compose("causal_lm"), draw(2, 20)
    with torch.autocast("cpu", torch.bfloat16):
        want = model(ids)
        cache = DecodeCache(model.spec, model.layout, model.stack.blocks, 10)
        got = [model(ids[:, :10], cache=cache)]
        got += [model(ids[:, i : i + 1], cache=cache) for i in range(10, 20)]
    assert (torch.cat(got, 1) - want[:, 9:]).abs().max() < 0.05 * want.abs().max()


def _on_processes(rank: int, options: dict) -> list:
    made = []
    for text in ("tokens(zigzag): ring=4", "tp-x-ring"):
        seeded = torch.Generator().manual_seed(5)
        model = build(layout_of(text).build("cpu"))
        made.append(model.generate(draw(2, 13), generator=seeded, **options).tolist())
    return made


def test_real_ranks_sample_the_tokens_of_one_process(pool) -> None:
    options = {"max_new_tokens": 40, "do_sample": True}
    seeded = torch.Generator().manual_seed(5)
    want = build().generate(draw(2, 13), generator=seeded, **options).tolist()
    for made in pool.run(_on_processes, options):
        assert made == [want, want]
