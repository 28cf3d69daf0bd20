"""`layout.balance`: any mask's work is equal, on rings, gathers, pass-Q, tiles and with Ulysses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import weft
from weft import Causal, Documents, MaskMod
from weft.errors import DeclarationError
from weft.layout import Layout
from weft.masks import prefix_lm
from weft.masks.slices import sliced
from weft.packing.blocks import travel_of
from weft.packing.groups import balance_shares

N = 1000
NOISE = torch.rand(20, 20, generator=torch.Generator().manual_seed(0)) < 0.3
MASKS = {
    "causal": Causal(),
    "documents": Documents((100, 30, 300, 70, 500)) & Causal(),
    "prefix": prefix_lm(200),
    "sink and window": MaskMod(lambda b, h, q, k: (q >= k) & ((q - k < 90) | (k < 10))),
    "many answers": MaskMod(
        lambda b, h, q, k: (q >= k) & ((k < 200) | ((q - 200) // 100 == (k - 200) // 100))
    ),
    "random blocks": MaskMod(lambda b, h, q, k: NOISE[q // 50, k // 50]),
}
LINES = [
    "tokens: ring=8",
    "tokens: gather=3",
    "tokens: pass_q=4",
    "tokens: burst=4",
    "tokens: tile=2x2",
    "tokens: ulysses=2 x ring=4",
]


def work(layout: Layout, mask: weft.Mask) -> np.ndarray:
    """Visible scores of every rank in both passes, by its tile of a dense mask."""
    zero, i = torch.zeros((), dtype=torch.int64), torch.arange(N)
    seen = mask.allowed(zero, zero, i[:, None], i).expand(N, N).numpy()
    found = []
    for plan in layout.plan("tokens", length=N, heads=8, mask=weft.Full()).ranks():
        tiles = (plan._plan.forward, plan._plan.backward)
        for rows, columns in (
            [weft.plan.order.positions(t.tile_spans(s)) for s in weft.plan.sides.Side]
            for t in tiles
        ):
            found.append(seen[np.ix_(rows, columns)].sum())
    return np.array(found).reshape(-1, 2)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_work_of_any_mask_is_equal(mask, line):
    layout = Layout.parse(line)
    balanced = layout.reorder("tokens", layout.balance("tokens", mask, N))
    of_ranks = work(balanced, mask)
    assert (of_ranks.max(0) <= 1.05 * of_ranks.mean(0)).all()


def test_one_causal_sequence_is_balanced_as_by_zigzag():
    order = Layout.parse("tokens: ring=4").balance("tokens", Causal(), 64)
    zigzag = Layout.parse("tokens(zigzag): ring=4")
    spans = [zigzag.spans("tokens", 64, {"ring": chunk}) for chunk in range(4)]
    found = {frozenset((start, count) for start, count in chunk) for chunk in order.chunks}
    joined = {frozenset((s.start, s.count) for s in chunk) for chunk in spans}
    assert found == joined


@pytest.mark.parametrize("line", LINES[:5])
def test_equal_work_that_sends_least_is_taken(line):
    """A window's work is equal in the plain order, in which ranks need but few others' keys."""
    layout = Layout.parse(line)
    order = layout.balance("tokens", Causal(window=40), N)
    assert [chunk[0][0] for chunk in order.chunks] == sorted(c[0][0] for c in order.chunks)
    assert {len(chunk) for chunk in order.chunks} == {1}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_travel_is_what_ranks_need_of_others(mask, line):
    layout, i = Layout.parse(line), torch.arange(N)
    runs = layout.balance("tokens", mask, N).chunks
    seen = mask.allowed(i[:0], i[:0], i[:, None], i).expand(N, N).numpy()
    held = [np.array([p for a, n in chunk for p in range(a, a + n)]) for chunk in runs]
    shares, wanted = balance_shares(layout, "tokens"), 0
    for queries, keys in shares:
        for rank in range(len(runs)):
            rows = np.concatenate([h for h, g in zip(held, queries) if g == queries[rank]])
            columns = np.concatenate([h for h, g in zip(held, keys) if g == keys[rank]])
            met = seen[np.ix_(rows, columns)]
            if any(queries):
                wanted += len({*columns[met.any(0)]} - {*held[rank]})
            if any(keys):
                wanted += len({*rows[met.any(1)]} - {*held[rank]})
    assert travel_of(sliced(mask, N, N), runs, shares) == wanted


@pytest.mark.parametrize("mask", ["prefix", "random blocks"])
@pytest.mark.parametrize("line", ["tokens: ring=4", "tokens: tile=2x2"])
def test_attention_in_a_balanced_order_is_exact(line, mask):
    x = torch.randn(1, 2, N, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layout, mask = Layout.parse(line), MASKS[mask]
    layout = layout.reorder("tokens", layout.balance("tokens", mask, N))
    whole = weft.attention(x, x, x, Layout.single(), "tokens", mask)

    def rank(layout: Layout) -> torch.Tensor:
        local = layout.shard(x, {"tokens": 2})
        out = weft.attention(local, local, local, layout, "tokens", mask)
        return layout.gather(out, {"tokens": 2})

    for out in weft.on_threads(layout, rank):
        torch.testing.assert_close(out, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("line", LINES[:3])
def test_documents_are_balanced_as_they_are_packed(line):
    layout = Layout.parse(line)
    packed = layout.pack((100, 30, 300, 70, 500))
    balanced = layout.balance("tokens", packed.mask, N)
    for chunks in zip(balanced.chunks, packed.order.chunks, strict=True):
        ours, theirs = ({i for s, n in runs for i in range(s, s + n)} for runs in chunks)
        assert ours == theirs


def test_keys_that_are_split_beside_whole_queries_are_refused():
    with pytest.raises(DeclarationError, match="splits the keys"):
        Layout.load("kv-parallel-4").balance("tokens", Causal(), 64)
