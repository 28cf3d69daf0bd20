"""`weft.choose` picks one device's keys on every layout: whole rows, or lists that merge."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from covering import covering
from torch import Tensor

import weft
from weft.comm import Transport, run_threads
from weft.declare.choice_rule import ChoiceRule
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft_axes.fetching import choosing

BATCH, HEADS, GROUPS, DIM = 2, 4, 2, 3
LINES = (
    "tokens: ring=4",
    "tokens(zigzag): ring=3",
    "tokens(striped): pass_q=3",
    "tokens: hierarchical=2x2",
    "tokens(zigzag): tile=2x2",
    "tokens: ulysses=2 x ring=2",
    "tokens: ring=1",
)
MASKS = (weft.Causal(), weft.Full(), weft.Causal(window=3), weft.Documents((4, 1, 8)))


def layout_of(line: str, lists: str = "") -> weft.Layout:
    """A layout whose lists merge along "all" of its mesh dims, the "first" or the "last"."""
    layout = weft.Layout.parse(line)
    dims = {"": [], "all": [*layout.mesh], "first": [*layout.mesh][:1], "last": [*layout.mesh][-1:]}
    entries = [{"strategy": "choose_lists", "on": dim} for dim in dims[lists]]
    table = {"choose": {"tokens": entries}} if entries else {}
    return weft.Layout.from_dict({**layout.declaration, **table})


def drawn(n: int, ties: bool, heads: int = HEADS, groups: int = GROUPS) -> tuple[Tensor, ...]:
    """Index queries, index keys and weights; with `ties` small whole numbers."""
    make = torch.Generator().manual_seed(n)
    shapes = (BATCH, heads, n, DIM), (BATCH, groups, n, DIM), (BATCH, heads, n)
    tensors = (torch.randn(shape, dtype=torch.float64, generator=make) for shape in shapes)
    return tuple(t.round().clamp(-1, 1) if ties else t for t in tensors)


def dense(iq: Tensor, ik: Tensor, weights: Tensor, mask: weft.Mask) -> Tensor:
    """Scores (b, n, m) of one device, by their definition."""
    ik = ik.repeat_interleave(iq.shape[1] // ik.shape[1], 1)
    scores = ((iq @ ik.mT).relu() * weights[..., None]).sum(1)
    zero, at = torch.tensor(0), torch.arange(iq.shape[2])
    return scores.masked_fill(~mask.allowed(zero, zero, at[:, None], at), -torch.inf) + 0.0


def expected(scores: Tensor, count: int, lists: bool) -> Tensor:
    """One device's numbers: those of torch.topk, or the beginning of a stable sort."""
    count = min(count, scores.shape[-1])
    if lists:
        best, places = (t[..., :count] for t in scores.sort(dim=-1, descending=True, stable=True))
    else:
        best, places = scores.topk(count, -1)
    return places.masked_fill(best.isneginf(), -1).int().unsqueeze(1)


def chosen(layout: weft.Layout, tensors, count: int, mask: weft.Mask, wanted: Tensor) -> list:
    """Every rank's traffic, its choice compared with its part of what is wanted."""
    n = tensors[0].shape[2]

    def work(transport: Transport):
        mine = layout.on(transport)
        local = [mine.shard(t, {"tokens": 2}) for t in tensors]
        with weft.traffic() as report:
            choice = weft.choose(*local, mine, "tokens", count, mask, length=n)
        assert report.as_predicted, report.differences()
        assert torch.equal(choice.numbers, mine.shard(wanted, {"tokens": 2}))
        return report

    return run_threads(layout.mesh, work)


@pytest.mark.few(16)
@covering(
    "line lists n count mask ties",
    LINES,
    ("", "all", "first", "last"),
    (13, 5, 1),
    (1, 4, 5, 40),
    MASKS,
    (False, True),
)
def test_choices_are_one_devices(line, lists, n, count, mask, ties) -> None:
    if isinstance(mask, weft.Documents):
        mask, n = mask & weft.Causal(), 13
    tensors = drawn(n, ties)
    wanted = expected(dense(*tensors, mask), count, bool(lists))
    chosen(layout_of(line, lists), tensors, count, mask, wanted)


def test_keys_split_alone_are_gathered_for_whole_queries() -> None:
    layout, tensors = weft.Layout.load("kv-parallel-4"), drawn(13, True)
    wanted = expected(dense(*tensors, weft.Causal()), 4, False)

    def work(transport: Transport) -> None:
        mine, (iq, ik, weights) = layout.on(transport), tensors
        ik = mine.shard(ik, {"tokens": 2}, keys=("tokens",))
        with weft.traffic() as report:
            choice = weft.choose(iq, ik, weights, mine, "tokens", 4, weft.Causal(), length=13)
        assert report.as_predicted, report.differences()
        assert torch.equal(choice.numbers, wanted)

    run_threads(layout.mesh, work)


def test_ties_of_rows_and_of_lists_are_other_choices() -> None:
    scores = dense(*drawn(29, ties=True, heads=1, groups=1), weft.Full())
    assert not torch.equal(
        expected(scores, 8, False).sort(-1).values, expected(scores, 8, True).sort(-1).values
    )


@pytest.mark.parametrize("lists", ["", "all"])
def test_equal_scores_alone_take_the_lowest_positions_or_topks(lists) -> None:
    iq, ik, weights = (torch.zeros_like(t) for t in drawn(9, True))
    weights[:, 1] = -1.0  # -0.0 where others are 0.0
    wanted = expected(dense(iq, ik, weights, weft.Full()), 4, bool(lists))
    assert not lists or wanted.unique().tolist() == [0, 1, 2, 3]
    chosen(layout_of("tokens: ring=4", lists), (iq, ik, weights), 4, weft.Full(), wanted)


def test_pieces_of_rows_choose_as_all_rows(monkeypatch) -> None:
    tensors = drawn(13, True)
    monkeypatch.setattr(choosing, "AT_ONCE", BATCH * HEADS * 13 * 2)
    for lists in ("", "all"):
        wanted = expected(dense(*tensors, weft.Causal()), 5, bool(lists))
        chosen(layout_of("tokens: ring=4", lists), tensors, 5, weft.Causal(), wanted)


def test_bytes_are_those_of_the_formulas() -> None:
    tensors, count, size = drawn(16, False), 3, 8
    for name, lists in (("ring-4", False), ("lists-4", True)):
        layout = weft.Layout.load(name)
        wanted = expected(dense(*tensors, weft.Full()), count, lists)
        for report in chosen(layout, tensors, count, weft.Full(), wanted):
            found = report.by_tensor()
            if lists:  # three ranks' queries and weights, and three lists of its own queries
                assert found["index"] == 3 * 4 * BATCH * HEADS * (DIM + 1) * size
                assert found["lists"] == 3 * 4 * BATCH * count * (size + 4)
            else:
                assert found == {"index": 12 * BATCH * GROUPS * DIM * size}


def test_lists_merge_on_the_way_over_an_outer_link() -> None:
    layout, tensors = layout_of("tokens: hierarchical=2x2", "all"), drawn(16, False)
    wanted = expected(dense(*tensors, weft.Full()), 3, True)
    for report in chosen(layout, tensors, 3, weft.Full(), wanted):
        entry = BATCH * 3 * (8 + 4)
        assert report.received["inter", "lists"] == 4 * entry  # one merged list a query
        assert report.received["intra", "lists"] == 8 * entry


def test_a_choice_is_attended_on_the_same_layout() -> None:
    layout = weft.Layout.load("lists-4")
    iq, ik, weights = drawn(13, False)
    q, k, v = torch.randn(3, BATCH, 2, 13, 4, dtype=torch.float64).unbind(0)
    one = weft.Layout.single()
    choice = weft.choose(iq, ik, weights, one, "tokens", 3, weft.Causal())
    out = weft.attention(q, k, v, one, "tokens", weft.Causal(), choice=choice)

    def work(transport: Transport) -> None:
        mine = layout.on(transport)
        local = [mine.shard(t, {"tokens": 2}) for t in (iq, ik, weights, q, k, v)]
        mask = weft.Causal()
        found = weft.choose(*local[:3], mine, "tokens", 3, mask, length=13)
        part = weft.attention(*local[3:], mine, "tokens", mask, length=13, choice=found)
        torch.testing.assert_close(part, mine.shard(out, {"tokens": 2}), rtol=1e-12, atol=1e-12)

    run_threads(layout.mesh, work)


@pytest.mark.parametrize("lists", ["", "all"])
def test_a_score_that_is_nan_is_refused_on_every_rank(lists) -> None:
    layout, tensors = layout_of("tokens: ring=3", lists), drawn(13, False)
    tensors[1][1, 0, 7] = torch.nan

    def work(transport: Transport) -> str:
        mine = layout.on(transport)
        local = [mine.shard(t, {"tokens": 2}) for t in tensors]
        with pytest.raises((ShapeError, weft.RankError), match="score is NaN") as caught:
            weft.choose(*local, mine, "tokens", 3, weft.Causal(), length=13)
        return str(caught.value)

    assert all(run_threads(layout.mesh, work, timeout=20))


BAD = {
    "weights \\(b, i, n\\)": lambda iq, ik, w: (iq, ik, w[:, :1], 3, weft.Full()),
    "i a multiple of g": lambda iq, ik, w: (iq[:, :3], ik, w[:, :3], 3, weft.Full()),
    "one floating dtype": lambda iq, ik, w: (iq, ik.float(), w, 3, weft.Full()),
    "1 or more, found 0": lambda iq, ik, w: (iq, ik, w, 0, weft.Full()),
    "1 or more, found True": lambda iq, ik, w: (iq, ik, w, True, weft.Full()),
    "local index keys": lambda iq, ik, w: (iq, ik[:, :, :1], w, 3, weft.Full()),
    "a mask is": lambda iq, ik, w: (iq, ik, w, 3, "causal"),
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_refused_everywhere(message) -> None:
    layout, tensors = weft.Layout.load("lists-4"), drawn(13, False)

    def work(transport: Transport) -> str:
        mine = layout.on(transport)
        local = [mine.shard(t, {"tokens": 2}) for t in tensors]
        last = transport.rank == 1
        options = BAD[message](*local) if last else (*local, 3, weft.Full())
        with pytest.raises((weft.WeftError, TypeError)) as caught:
            weft.choose(*options[:3], mine, "tokens", *options[3:], length=13)
        return str(caught.value)

    assert re.search(message, run_threads(layout.mesh, work, timeout=10)[1])


def test_ranks_that_choose_other_numbers_of_keys_are_refused() -> None:
    tensors = drawn(8, False)

    def work(layout: weft.Layout) -> None:
        local = [layout.shard(t, {"tokens": 2}) for t in tensors]
        weft.choose(*local, layout, "tokens", 3 + layout.rank)

    with pytest.raises(ShapeError, match="top_k 4"):
        weft.on_threads(weft.Layout.load("lists-4"), work)


def test_another_axis_on_one_rank_is_told_to_all() -> None:
    layout, tensors = weft.Layout.load("lists-4"), drawn(8, False)

    def work(transport: Transport) -> str:
        mine = layout.on(transport)
        local = [mine.shard(t, {"tokens": 2}) for t in tensors]
        with pytest.raises(weft.WeftError) as caught:
            weft.choose(*local, mine, "tokns" if transport.rank == 1 else "tokens", 3)
        return str(caught.value)

    said = run_threads(layout.mesh, work, timeout=10)
    assert all("tokns" in text for text in said)
    assert not any("sent nothing" in text for text in said)


def test_masks_of_sequences_on_a_split_batch_are_refused() -> None:
    layout = weft.Layout.parse("batch: dp=2; tokens: ring=2")
    mask = weft.KeyPadding(torch.tensor([3, 4]))

    def work(bound: weft.Layout) -> None:
        local = [bound.shard(t, {"batch": 0, "tokens": 2}) for t in drawn(4, False)]
        weft.choose(*local, bound, "tokens", 2, mask)

    with pytest.raises(UnsupportedError, match="masks that differ"):
        weft.on_threads(layout, work)


def test_a_mask_per_sequence_hides_keys_from_a_choice() -> None:
    tensors, mask = drawn(8, False), weft.KeyPadding(torch.tensor([3, 8]))

    def work(layout: weft.Layout) -> Tensor:
        local = [layout.shard(t, {"tokens": 2}) for t in tensors]
        return weft.choose(*local, layout, "tokens", 5, mask).numbers

    for numbers in weft.on_threads(weft.Layout.load("lists-4"), work):
        assert numbers[0].max() == 2
        assert (numbers[0] == -1).sum(-1).eq(2).all()
        assert (numbers[1] >= 0).all()


# -- the grammar ----------------------------------------------------------------------------------

WORDS = ("S(seq)", "S(seq) -> R", "R", "P(top_k) -> S(seq)", "P(top_k)", "S(head)")
LEGAL = {("S(seq) -> R", "S(seq)"): False, ("S(seq)", "P(top_k) -> S(seq)"): True}
REASONS = {
    ("S(seq)", "S(seq)"): "every rank would choose among its own keys only",
    ("S(seq) -> R", "P(top_k) -> S(seq)"): "each key once for every rank",
}


@pytest.mark.parametrize("words", list(itertools.product(WORDS, repeat=2)))
def test_two_pairs_of_index_and_choice_are_legal(words) -> None:
    if words in LEGAL:
        assert ChoiceRule.parse(*words).lists is LEGAL[words]
        return
    with pytest.raises(DeclarationError, match=re.escape(REASONS.get(words, "whole sequence"))):
        ChoiceRule.parse(*words)


TABLES = {
    "chooses keys, and is no attention": ("attend", "choose_lists", "ring"),
    "chooses no keys": ("choose", "ring", "ring"),
    "does not split the axis": ("choose", "choose_lists", "dp"),
    "name it in \\[choose\\]": ("carry", "choose_lists", "ring"),
}


@pytest.mark.parametrize("message", TABLES)
def test_a_table_takes_the_strategies_that_belong_there(message) -> None:
    table, strategy, on = TABLES[message]
    data = {
        "mesh": {"dp": 2, "ring": 2},
        "shard": {"batch": ["dp"], "tokens": ["ring"]},
        "attend": {"tokens": [{"strategy": "ring", "on": "ring"}]},
    }
    data[table] = {"tokens": [{"strategy": strategy, "on": on}]}
    with pytest.raises(DeclarationError, match=message):
        weft.Layout.from_dict(data)


def test_layouts_that_choose_in_other_ways_are_not_equal() -> None:
    rows, lists = (layout_of("tokens: ring=4", lists) for lists in ("", "all"))
    assert rows != lists
    assert rows == weft.Layout.parse("tokens: ring=4")
    assert "choose_lists" in lists.to_toml()
