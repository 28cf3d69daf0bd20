"""Any mask as slices: exact, and what a function costs is what weft's own mask costs."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import weft
from weft import MaskMod, attention
from weft.declare import catalog
from weft.layout import Layout
from weft.masks import (
    Boxes,
    Causal,
    Documents,
    FirstKeys,
    Full,
    KeyPadding,
    Near,
    Or,
    Window,
    prefix_lm,
    slices,
)
from weft.masks.slices import Slices, question, sliced

N = 64
DOCUMENTS = (5, 1, 30, 20, 8)
OWN = [
    Full(),
    Causal(),
    Causal(window=9),
    Window(5, 3),
    FirstKeys(24),
    Documents((16,) * 4),
    Documents(DOCUMENTS),
    Documents(DOCUMENTS) & Causal(),
    Documents([(16,) * 4, (30, 34)]),
    prefix_lm(20),
    Near((N,), 7),
    Near((N,), 3, 3),
    Near((N,), 9, circular=True),
    Near((8, 8), 3),
    Boxes((N,), 12, 5),
    Boxes((8, 8), 4),
    KeyPadding((50, 64)),
    Causal(window=6) | FirstKeys(4),
]
ONE_AXIS = [
    (name, axis)
    for name in catalog.names("layouts")
    for axis in Layout.load(name).attend
    if "+" not in axis and not any(r.top_k for r in Layout.load(name).rules((axis,)).values())
]


def by_function(mask: weft.Mask) -> MaskMod:
    """A mask of which weft knows nothing but its function."""
    return MaskMod(lambda b, h, q, k: mask.allowed(b, h, q, k))


def dense(mask: weft.Mask, n: int, m: int) -> np.ndarray:
    """(n, m) of the first sequence and head."""
    zero = torch.zeros((), dtype=torch.int64)
    return mask.allowed(zero, zero, torch.arange(n)[:, None], torch.arange(m)).expand(n, m).numpy()


def drawn(found: Slices) -> np.ndarray:
    """(n, m): 0 where nothing is seen, 1 where some may be, 2 where all is; no pair is in two."""
    whole = np.zeros((found.n, found.m), int)
    for q0, q1, k0, k1, low, high, full in found.slices:
        for row in range(q0, q1 + 1):
            keys = slice(max(k0, row + low), min(k1, row + high) + 1)
            assert keys.start < keys.stop
            assert not whole[row, keys].any()
            whole[row, keys] = 1 + full
    return whole


def noise(seed: int, size: int, n: int, m: int) -> MaskMod:
    """Random blocks of pairs."""
    make = torch.Generator().manual_seed(seed)
    table = torch.rand(n // size + 1, m // size + 1, generator=make) < 0.4
    return MaskMod(lambda b, h, q, k: table[q // size, k // size])


ASKED = {"noise": noise(0, 1, 50, 70), "blocks": noise(1, 8, 50, 70), "rows": noise(2, 40, 50, 70)}
ASKED |= {str(i): mask for i, mask in enumerate(OWN[:8])}


@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize("mask", ASKED.values(), ids=ASKED)
def test_slices_answer_as_brute_force_does(mask, shares, monkeypatch):
    monkeypatch.setattr(slices, "BLOCK", 8)
    n, m = (N, N) if mask in OWN else (50, 70)
    cpu, draw = torch.device("cpu"), random.Random(0)
    asked = question(mask, n, m, 1, 1, cpu)
    found, seen = (
        asked.slices([asked.share(i, shares, cpu) for i in range(shares)]),
        dense(mask, n, m),
    )
    assert np.array_equal(drawn(found), 2 * seen)
    assert np.array_equal(found.counts(), seen.sum(1))
    assert np.array_equal(found.counts(of_keys=True), seen.sum(0))
    for _ in range(100):
        (a, b), (c, d) = (sorted(draw.choices(range(size), k=2)) for size in (n, m))
        q, k = np.arange(a, b + 1)[:, None], np.arange(c, d + 1)
        part = seen[a : b + 1, c : d + 1]
        keys = [x for low, high in found.key_intervals((a, b)) for x in range(low, high + 1)]
        assert keys == np.flatnonzero(seen[a : b + 1].any(0)).tolist()
        rows = [x for low, high in found.query_intervals((c, d)) for x in range(low, high + 1)]
        assert rows == np.flatnonzero(seen[:, c : d + 1].any(1)).tolist()
        assert found.is_full((a, b), (c, d)) == part.all()
        if band := found.band((a, b), (c, d)):
            assert np.array_equal(part, (k >= q + band[0]) & (k <= q + band[1]))


@pytest.mark.parametrize("seed", range(4))
def test_blocks_that_are_kept_coarsely_hide_no_visible_pair(seed, monkeypatch):
    """Rows 0 to 39 are noise; of the others exact runs are few enough to keep."""
    monkeypatch.setattr(slices, "BLOCK", 8)
    monkeypatch.setattr(slices, "MOST_RUNS", 0)
    table = dense(noise(seed, 1, 80, 80), 80, 80) & (np.arange(80)[:, None] < 40)
    table[40:, 3:50] = table[:, 64:] = True
    mask = weft.masks.given.mask_of(torch.from_numpy(table))
    found = drawn(sliced(mask, 80, 80))
    assert not found[~table].max() > 1
    assert found[table].min() > 0
    assert (found[:, 64:] == 2).all()
    assert (found[40:] == 2 * table[40:]).all()


@pytest.mark.parametrize("mask", OWN, ids=str)
def test_rows_of_own_masks_have_the_slices_of_their_pairs(mask):
    cpu = torch.device("cpu")
    asked = question(mask, N, N, 2, 1, cpu)
    assert sliced(mask, N, N, 2) == asked.slices([asked.share(0, 1, cpu)])


def costs(layout: Layout, axis: str, mask: weft.Mask) -> np.ndarray:
    """Bytes and scores of every rank in both passes."""
    plans = layout.plan(axis, length=N, heads=8, head_dim=8, batch=2, mask=mask).ranks()
    return np.array([(p.traffic.forward.bytes, p.traffic.backward.bytes, *p.scores) for p in plans])


#: Of these own masks less is known than slices tell.
COARSE = (Near, Boxes, KeyPadding, Window, Or)


@pytest.mark.parametrize(("name", "axis"), ONE_AXIS)
def test_a_function_costs_what_weft_s_own_mask_costs(name, axis):
    layout = Layout.load(name)
    for mask in OWN:
        own, found = costs(layout, axis, mask), costs(layout, axis, by_function(mask))
        if isinstance(mask, COARSE) or mask == OWN[-1]:
            assert (found <= own).all(), mask
        else:
            assert (found == own).all(), mask


def _tree(parents: tuple[int, ...]) -> torch.Tensor:
    """(n, n): a token sees itself and those that it follows."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            seen[token] |= seen[parent]
    return seen


def _answers(prompt: int, answer: int) -> MaskMod:
    """Answers that share a question: each sees it and itself."""
    return MaskMod(
        lambda b, h, q, k: (
            (q >= k) & ((k < prompt) | ((q - prompt) // answer == (k - prompt) // answer))
        )
    )


def _drafts(n: int) -> MaskMod:
    """Depths one after another: causal in the first, of the others the own diagonals beside it."""
    return MaskMod(
        lambda b, h, q, k: torch.where(
            k < n, k <= q % n - q // n, (q % n == k % n + (q // n - k // n)) & (q >= k)
        )
    )


PEOPLE = {
    "prefix": MaskMod(lambda b, h, q, k: (q >= k) | (k < 20)),
    "block diffusion": MaskMod(
        lambda b, h, q, k: torch.where(
            q < 32,
            (k < 32) & (q // 8 == k // 8) | (k >= 32) & (q // 8 > (k - 32) // 8),
            (k >= 32) & (q // 8 >= k // 8),
        )
    ),
    "tree": _tree(tuple((i - 1) // 3 for i in range(N))),
    "drafts": _drafts(16),
    "dilated": MaskMod(lambda b, h, q, k: (q >= k) & ((q - k) % 4 == 0)),
    "sink and window": MaskMod(lambda b, h, q, k: (q >= k) & ((q - k < 9) | (k < 3))),
    "many answers": _answers(16, 12),
    "random blocks": noise(5, 8, N, N),
    "random": torch.rand(2, 1, N, N, generator=torch.Generator().manual_seed(1)) < 0.3,
    "by head": MaskMod(lambda b, h, q, k: (q - k <= 4 * h) & (q >= k)),
    "block mask": create_block_mask(lambda b, h, q, k: q >= k, 1, None, N, N, "cpu", BLOCK_SIZE=16),
    "blocks alone": BlockMask.from_kv_blocks(
        torch.tensor([[[1, 1, 0, 1]]]),
        torch.tensor([[[[0, 1, 2, 3]] * 4]]).view(1, 1, 4, 4),
        torch.tensor([[[1, 0, 2, 0]]]),
        torch.tensor([[[[3, 1, 2, 0], [0, 1, 2, 3]] * 2]]).view(1, 1, 4, 4),
        BLOCK_SIZE=16,
        mask_mod=lambda b, h, q, k: q >= k,
        seq_lengths=(N, N),
    ),
}
EVERY_OTHER = {"ring=4", "pass_q=2 x gather=2", "ulysses=2 x ring=2"}


@pytest.mark.parametrize("line", sorted(EVERY_OTHER))
@pytest.mark.parametrize("mask", PEOPLE.values(), ids=PEOPLE)
def test_masks_that_people_have_are_exact(mask, line):
    q, k, v = torch.randn(
        3, 2, 4, N, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    known = weft.masks.given.mask_of(mask)
    b, h, i = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None], torch.arange(N)
    seen = known.allowed(b, h, i[:, None], i).expand(2, 4, N, N)

    def grads(q, k, v, attend) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = attend(*leaves)
        out.square().sum().backward()
        return [out.detach(), *(t.grad for t in leaves)]

    bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)
    blind = ~seen.any(-1, keepdim=True)

    def plain(q, k, v):
        scores = (q @ k.mT * 8**-0.5 + bias).masked_fill(blind, 0)
        return scores.softmax(-1).masked_fill(blind, 0) @ v

    def rank(layout: Layout) -> list[torch.Tensor]:
        local = [layout.shard(t, {"tokens": 2}) for t in (q, k, v)]
        found = grads(*local, lambda *qkv: attention(*qkv, layout, "tokens", mask))
        return [layout.gather(t, {"tokens": 2}) for t in found]

    wanted = grads(q, k, v, plain)
    for found in weft.on_threads(Layout.parse(f"tokens: {line}"), rank):
        for a, b in zip(found, wanted):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_rank_without_sequences_asks_for_nothing():
    mask = sliced(MaskMod(lambda b, h, q, k: b + q >= k), 4, 4, 0, 1)
    assert mask.key_intervals((0, 3)) == mask.query_intervals((0, 3)) == mask.cuts(4) == ()


def test_random_blocks_are_computed_one_by_one():
    """Nothing hidden is computed, however many blocks there are."""
    mask, layout = noise(3, 64, 2048, 2048), Layout.parse("tokens: ring=2")
    plans = layout.plan("tokens", length=2048, heads=1, mask=mask).ranks()
    assert sum(p.scores.forward for p in plans) == dense(mask, 2048, 2048).sum()
