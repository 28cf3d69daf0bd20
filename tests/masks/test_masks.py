"""Masks: what each lets be seen, and that what it claims of intervals is true."""

import itertools
import random
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from covering import covering
from reference import visible

import weft
from weft import Layout
from weft.errors import ShapeError
from weft.masks import (
    Boxes,
    Causal,
    Documents,
    FirstKeys,
    Full,
    KeyPadding,
    Mask,
    MaskMod,
    Near,
    Window,
    describe,
    is_empty,
    prefix_lm,
)

N = 12
DOCUMENT = [0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2, 3]

#: mask -> the rule in plain Python for query q, key k of sequence b and head h
RULES = {
    Full(): lambda b, h, q, k: True,
    Causal(): lambda b, h, q, k: k <= q,
    Causal(window=3): lambda b, h, q, k: q - 3 < k <= q,
    Window(2, 1): lambda b, h, q, k: q - 2 <= k <= q + 1,
    FirstKeys(5): lambda b, h, q, k: k < 5,
    FirstKeys(0): lambda b, h, q, k: False,
    Documents((3, 1, 7, 1)): lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k],
    Causal() & Documents([3, 1, 7, 1]): lambda b, h, q, k: k <= q and DOCUMENT[q] == DOCUMENT[k],
    Causal(4) & Documents([3, 1, 7, 1]): lambda b, h, q, k: (
        q - 4 < k <= q and DOCUMENT[q] == DOCUMENT[k]
    ),
    prefix_lm(4): lambda b, h, q, k: k <= q or k < 4,
    Window(1, 0) | FirstKeys(2): lambda b, h, q, k: q - 1 <= k <= q or k < 2,
    KeyPadding([3, 12]): lambda b, h, q, k: k < (3, 12)[b],
    KeyPadding([0, 7]) & Causal(): lambda b, h, q, k: k < (0, 7)[b] and k <= q,
    MaskMod(lambda b, h, q, k: (q + k + b * h) % 3 == 0): lambda b, h, q, k: (
        (q + k + b * h) % 3 == 0
    ),
    (Window(0, 3) & FirstKeys(9)) | Documents((6, 6)): lambda b, h, q, k: (
        (q <= k <= q + 3 and k < 9) or (q < 6) == (k < 6)
    ),
    Near(12, 5): lambda b, h, q, k: 0 <= k - min(max(q - 2, 0), 7) < 5,
    Near(12, 4, 3): lambda b, h, q, k: (k - q) % 3 == 0,
    Near((3, 4), (2, 3), circular=(True, False)): lambda b, h, q, k: (
        (k // 4 - q // 4) % 3 in (2, 0) and 0 <= k % 4 - (q % 4 > 1) < 3
    ),
    Boxes((3, 4), 2, (1, 0)): lambda b, h, q, k: (
        (q // 4 > 0) == (k // 4 > 0) and q % 4 // 2 == k % 4 // 2
    ),
    Boxes((3, 4), (1, 3), (0, 2), (False, True)): lambda b, h, q, k: (
        q // 4 == k // 4 and (q % 4 == 1) == (k % 4 == 1)
    ),
    Near((3, 4), 3) & Causal(): lambda b, h, q, k: k <= q and 0 <= k % 4 - (q % 4 > 1) < 3,
    Boxes(12, 5) | Window(1, 0): lambda b, h, q, k: q // 5 == k // 5 or k == q - 1,
}
#: the same for `FEW` queries and `N` keys
FEW = 5
OFFSET_RULES = {
    Causal(offset=7): lambda b, h, q, k: k <= q + 7,
    Causal(offset=0): lambda b, h, q, k: k <= q,
    Causal(offset=-2): lambda b, h, q, k: k <= q - 2,
    Causal(offset=40): lambda b, h, q, k: True,
    Causal(3, offset=4): lambda b, h, q, k: q + 1 < k <= q + 4,
    Causal(2, offset=10): lambda b, h, q, k: q + 8 < k <= q + 10,
    Window(2, 1, offset=6): lambda b, h, q, k: q + 4 <= k <= q + 7,
    Window(1, 0, offset=-3): lambda b, h, q, k: q - 4 <= k <= q - 3,
    Documents((3, 1, 7, 1), offset=7): lambda b, h, q, k: DOCUMENT[q + 7] == DOCUMENT[k],
    Causal(offset=2) & Documents((3, 1, 7, 1), offset=2): lambda b, h, q, k: (
        k <= q + 2 and DOCUMENT[q + 2] == DOCUMENT[k]
    ),
    Documents([(3, 1, 7, 1), (12,)], offset=3): lambda b, h, q, k: (
        b == 1 or DOCUMENT[q + 3] == DOCUMENT[k]
    ),
    Causal(offset=7) & KeyPadding([9, 0]): lambda b, h, q, k: k <= q + 7 and k < (9, 0)[b],
    Causal(offset=5) & Causal(offset=7): lambda b, h, q, k: k <= q + 5,
    Causal(offset=5) | Causal(offset=7): lambda b, h, q, k: k <= q + 7,
    Causal(offset=3) | Documents((4, 8), offset=6): lambda b, h, q, k: k <= q + 3 or k >= 4,
    prefix_lm(9, offset=6): lambda b, h, q, k: k <= q + 6 or k < 9,
}
CASES = [
    pytest.param(mask, rule, n, id=describe(mask))
    for n, rules in ((N, RULES), (FEW, OFFSET_RULES))
    for mask, rule in rules.items()
]


def _intervals(length):
    return [(low, high) for low in range(length) for high in range(low, length)]


@pytest.mark.parametrize(("mask", "rule", "n"), CASES)
def test_a_mask_shows_what_its_rule_in_plain_python_shows(mask, rule, n):
    mask.check(n, N, 2)
    seen = visible(mask, 2, 3, n, N)
    for b, h, q, k in itertools.product(range(2), range(3), range(n), range(N)):
        assert seen[b, h, q, k].item() == rule(b, h, q, k), (b, h, q, k)


@pytest.mark.parametrize(("mask", "rule", "n"), CASES)
def test_what_a_mask_claims_of_intervals_holds(mask, rule, n):
    seen = visible(mask, 2, 3, n, N)
    ahead = torch.arange(N) - torch.arange(n)[:, None]
    for k in _intervals(N):
        columns = seen[..., k[0] : k[1] + 1]
        low, high = mask.queries(k)
        assert not columns[:, :, : max(low, 0)].any()
        assert not columns[:, :, max(high + 1, 0) :].any()
    for q in _intervals(n):
        rows = seen[:, :, q[0] : q[1] + 1]
        low, high = mask.keys(q)
        assert not rows[..., : max(low, 0)].any()
        assert not rows[..., max(high + 1, 0) :].any()
        for k in _intervals(N):
            tile = rows[..., k[0] : k[1] + 1]
            if mask.is_full(q, k):
                assert tile.all(), (q, k)
            if is_empty(mask, q, k):
                assert not tile.any(), (q, k)
            diagonal = mask.diagonal(q, k)
            if diagonal is not None:
                causal = ahead[q[0] : q[1] + 1, k[0] : k[1] + 1] <= diagonal
                assert (tile == causal).all(), (q, k)


@pytest.mark.parametrize(("mask", "rule", "n"), CASES)
def test_intervals_hold_all_that_is_seen(mask, rule, n):
    seen = visible(mask, 2, 3, n, N).flatten(0, 1).any(0)
    exact = isinstance(mask, Near | Boxes)
    for q in _intervals(n):
        held = _positions(mask.key_intervals(q))
        assert {*seen[q[0] : q[1] + 1].any(0).nonzero().flatten().tolist()} <= held
        assert not exact or held == {*seen[q[0] : q[1] + 1].any(0).nonzero().flatten().tolist()}
    for k in _intervals(N):
        held = _positions(mask.query_intervals(k))
        assert {*seen[:, k[0] : k[1] + 1].any(1).nonzero().flatten().tolist()} <= held
        assert not exact or held == {*seen[:, k[0] : k[1] + 1].any(1).nonzero().flatten().tolist()}


def _positions(intervals) -> set[int]:
    assert all(a <= b < c - 1 for (a, b), (c, _) in itertools.pairwise(intervals))
    return {p for low, high in intervals for p in range(max(low, 0), min(high, N - 1) + 1)}


def _near(q: int, length: int, kernel: int, dilation: int, circular: bool) -> set[int]:
    """The keys of one query along one axis, of its own residue, as NATTEN has them."""
    if circular:
        return {(q + dilation * (i - kernel // 2)) % length for i in range(kernel)}
    residue, index = q % dilation, q // dilation
    alike = len(range(residue, length, dilation))
    first = min(max(index - kernel // 2, 0), alike - kernel)
    return {residue + dilation * i for i in range(first, first + kernel)}


def _box(q: int, length: int, size: int, shift: int, circular: bool) -> set[int]:
    """The places whose box, after an axis is rolled as Swin does, is that of one query."""
    if length <= size:
        return set(range(length))
    box = [(i - shift) % length // size if circular else (i - shift) // size for i in range(length)]
    return {k for k in range(length) if box[k] == box[q]}


def _drawn_grid(draw: random.Random) -> tuple[Mask, list]:
    """A random mask of a grid, and per axis what each coordinate sees."""
    lengths = tuple(draw.choice([(13,), (7, 5), (4, 9), (3, 2, 4), (1, 6), (8, 1)]))
    ends = tuple(draw.random() < 0.5 for _ in lengths)
    if draw.random() < 0.5:
        steps = tuple(draw.randint(1, min(3, n)) for n in lengths)
        kernels = tuple(draw.randint(1, n // d) for n, d in zip(lengths, steps))
        mask, rule, given = Near(lengths, kernels, steps, ends), _near, (kernels, steps)
    else:
        sizes = tuple(draw.randint(1, n + 1) for n in lengths)
        shifts = tuple(draw.randrange(size) for size in sizes)
        mask, rule, given = Boxes(lengths, sizes, shifts, ends), _box, (sizes, shifts)
    axes = zip(lengths, *given, ends)
    return mask, [[rule(q, *of_axis) for q in range(of_axis[0])] for of_axis in axes]


@pytest.mark.parametrize("seed", range(8))
def test_masks_of_a_grid_see_what_their_axes_see(seed):
    draw = random.Random(seed)
    for _ in range(4):
        mask, axes = _drawn_grid(draw)
        places = list(itertools.product(*(range(len(axis)) for axis in axes)))
        wanted = torch.tensor(
            [[all(c in axis[a] for axis, a, c in zip(axes, q, k)) for k in places] for q in places]
        )
        n = len(places)
        assert torch.equal(visible(mask, 1, 1, n, n)[0, 0], wanted), mask
        for _ in range(60):
            q, k = (tuple(sorted(draw.choices(range(n), k=2))) for _ in range(2))
            tile = wanted[q[0] : q[1] + 1, k[0] : k[1] + 1]
            assert is_empty(mask, q, k) == (not tile.any()), (mask, q, k)
            assert mask.is_full(q, k) <= bool(tile.all()), (mask, q, k)
            if isinstance(mask, Boxes) or max(mask.dilation) == 1:
                assert mask.is_full(q, k) == bool(tile.all()), (mask, q, k)


def test_intervals_of_a_large_grid_are_few():
    """Some rows of 721 x 1440 places: where strips are many, one interval holds those of a row."""
    found = Near((721, 1440), (7, 7), circular=(False, True)).key_intervals((0, 3))
    assert len(found) == 2 * 7 - 6
    assert found[-1][1] == 7 * 1440 - 1
    strips = Near((13, 90, 1440), (5, 61, 61)).key_intervals((700_000, 700_010))
    assert 1 <= len(strips) <= 4096


@pytest.mark.parametrize(("mask", "rule", "n"), CASES)
def test_a_mask_that_ignores_batch_and_head_says_so(mask, rule, n):
    seen = visible(mask, 2, 3, n, N)
    if not mask.per_sample:
        assert (seen == seen[:1, :1]).all()
    if mask.uniform:
        assert (seen == seen[:, :, :1]).all()


@pytest.mark.parametrize(
    "mask",
    [Full(), Causal(), Documents((3, 1, 7, 1)), Causal() & Documents((3, 1, 7, 1)), prefix_lm(4)],
    ids=describe,
)
def test_structure_is_recognised_where_it_is(mask):
    """Claiming nothing would always be safe; these tiles must be seen as plain."""
    seen = visible(mask, 1, 1, N, N)[0, 0]
    document = (4, 10)
    assert mask.is_full((10, 10), (4, 4)) == bool(seen[10, 4])
    assert mask.is_full(document, document) or mask.diagonal(document, document) == 0


@pytest.mark.parametrize(
    "mask",
    [
        Causal(offset=7),
        Causal(20, offset=7),
        Causal(offset=7) & Documents((3, 1, 7, 1), offset=7),
        Causal(offset=7) & Causal(offset=9),
        prefix_lm(4, offset=7),
    ],
    ids=describe,
)
def test_the_diagonal_of_an_offset_is_recognised(mask):
    assert mask.diagonal((0, 3), (4, 10)) == 7
    assert mask.is_full((3, 3), (4, 10))
    assert not mask.is_full((2, 3), (4, 10))


def test_an_offset_is_shown_by_its_name_alone():
    """`Causal(7)` would read as a window."""
    assert describe(Causal(offset=7)) == "Causal(offset=7)"
    assert describe(Causal(3, offset=0)) == "Causal(3, offset=0)"
    assert describe(Window(1, 2, offset=-1)) == "Window(1, 2, offset=-1)"
    with pytest.raises(TypeError):
        Window(1, 2, 3)


def test_masks_of_two_offsets_are_two_masks():
    assert len({Causal(), Causal(offset=0), Causal(offset=1), Causal(offset=np.int64(1))}) == 3


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Causal(0), "at least 1 key"),
        (lambda: Window(-1, 2), "0 or more"),
        (lambda: FirstKeys(-1), "0 or more"),
        (lambda: Documents((3, 0)), "at least 1 token"),
        (lambda: Causal().check(3, 4, 1), "as many keys as queries"),
        (lambda: Causal().check(3, 4, 1), r"offset=1\) aligns the last query with the last key"),
        (lambda: Causal(offset=1 << 60), "below 2"),
        (lambda: Causal(offset=1.5), "Causal: offset is a whole number"),
        (lambda: Documents((2, 2), offset=1).check(4, 4, 1), "outside the documents"),
        (lambda: Documents((2, 2), offset=-1).check(2, 4, 1), "outside the documents"),
        (lambda: Documents((2, 2), offset=1).check(2, 5, 1), "add up to 4, but there are 5 keys"),
        (lambda: Documents((2, 2)).check(2, 4, 1), "but there are 2 queries"),
        (lambda: Window(1, 1).check(3, 4, 1), "as many keys as queries"),
        (lambda: FirstKeys(5).check(3, 4, 1), "more keys than the 4"),
        (lambda: Documents((2, 2)).check(5, 5, 1), "add up to 4, but there are 5"),
        (lambda: KeyPadding((2, 2)).check(5, 5, 3), "2 lengths for a batch of 3"),
        (lambda: KeyPadding((2, 6)).check(5, 5, 2), "must be in 0..5"),
        (lambda: (Full() & Causal()).check(3, 4, 1), "as many keys as queries"),
        (lambda: (Full() | FirstKeys(9)).check(3, 4, 1), "more keys than the 4"),
        (lambda: visible(MaskMod(lambda b, h, q, k: q - k), 1, 1, 2, 2), "bool tensor"),
        (lambda: Near((5, 9), (7, 3)), "7 keys does not fit on an axis of 5; take a kernel of 5"),
        (lambda: Near(9, 5, 2), "5 keys times dilation 2 does not fit on an axis of 9"),
        (lambda: Near((5, 9), (3, 3, 3)), r"kernel = \(3, 3, 3\): one, or one for each of"),
        (lambda: Near(9, 3, 0), "dilation = 0: 1 or more"),
        (lambda: Near((), 3), "one axis or more"),
        (lambda: Near(9, 3, circular="lon"), "circular = 'lon': true or false"),
        (lambda: Boxes((4, 4), 2, (0, 2)), "a shift is below the size of a box"),
        (lambda: Boxes((4, 4), 2).check(12, 12, 1), "4 x 4 = 16 places, found 12 queries"),
        (lambda: Near((4, 4), 2).check(16, 20, 1), "found 16 queries and 20 keys"),
    ],
)
def test_masks_that_do_not_fit_are_refused(make, reason):
    with pytest.raises(ShapeError, match=reason):
        make()


@pytest.mark.parametrize("mask", ["causal", 3, torch.ones(3, 3)])
def test_what_is_no_mask_is_refused_by_name(mask) -> None:
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(weft.ShapeError, match=r"a mask is a weft.Mask .* MaskMod"):
        weft.attention(q, q, q, weft.Layout.single(), "tokens", mask)


# -- what is no number of keys --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: weft.Causal(2.7), "Causal: window"),
        (lambda: weft.Window(1.5, 2), "Window: left"),
        (lambda: weft.Window(True, 2), "Window: left"),
        (lambda: weft.FirstKeys("3"), "FirstKeys: n"),
        (lambda: weft.FirstKeys(True), "FirstKeys: n"),
        (lambda: weft.Documents((3.9, 4.9)), "Documents: a length"),
        (lambda: weft.Documents(7), "Documents: lengths is a sequence"),
        (lambda: weft.KeyPadding([2, None]), "KeyPadding: a length"),
    ],
)
def test_numbers_of_keys_are_whole(make, what):
    with pytest.raises(ShapeError, match=what):
        make()


UNLIMITED = {
    weft.Causal(window=sys.maxsize): weft.Causal(),
    weft.Window(sys.maxsize, 0): weft.Causal(),
    weft.Window(2, 10**40): weft.Window(2, 12),
    weft.Window(sys.maxsize, sys.maxsize): weft.Full(),
    weft.Causal(window=sys.maxsize) & weft.Window(3, sys.maxsize): weft.Causal(window=4),
}


@pytest.mark.parametrize("kernel", [None, "flex"])
def test_window_that_no_axis_fills_no_limit_to_any_kernel(kernel):
    q = torch.randn(1, 2, 12, 8, dtype=torch.float64)
    for mask, plain in UNLIMITED.items():
        found, want = (
            weft.attention(q, q, q, weft.Layout.single(), "tokens", m, kernel=kernel)
            for m in (mask, plain)
        )
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize(
    "line",
    ["tokens: ring=4", "tokens: pass_q=4", "tokens(zigzag): burst=4", "tokens: tile=2x2"],
)
def test_window_that_no_axis_fills_no_limit_on_any_layout(line):
    q = torch.randn(1, 2, 12, 8, dtype=torch.float64)
    dims = {"tokens": 2}

    def gradients(layout, mask):
        x = layout.shard(q, dims).requires_grad_()
        out = weft.attention(x, x, x, layout, "tokens", mask)
        out.backward(layout.shard(q, dims))
        return layout.gather(torch.stack([out.detach(), x.grad], 0), {"tokens": 3})

    def compare(layout):
        for mask, plain in UNLIMITED.items():
            found, want = (gradients(*given) for given in ((layout, mask), (layout, plain)))
            torch.testing.assert_close(found, want)

    weft.on_threads(weft.Layout.parse(line), compare)


def test_whole_numbers_of_any_kind_are_taken():
    one = weft.Documents(torch.tensor([3, 4])), weft.Window(np.int64(1), torch.tensor(2))
    assert one == (weft.Documents((3, 4)), weft.Window(1, 2))
    assert all(type(x) is int for x in (*one[0].lengths, one[1].left, one[1].right))


# -- masks of one's own ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PerHead(Mask):
    def allowed(self, b, h, q, k):
        return k <= h + b


@dataclass(frozen=True)
class Strict(Causal):
    """Causal, but for the diagonal."""

    def allowed(self, b, h, q, k):
        return q > k

    def diagonal(self, q, k):
        return None

    def is_full(self, q, k):
        return q[0] > k[1]


@pytest.mark.few(2)
@pytest.mark.parametrize("mask", [PerHead(), Strict(), Strict() & PerHead()], ids=repr)
@pytest.mark.parametrize("kernel", ["math", "flex", None])
def test_a_mask_of_ones_own_sees_what_it_says(mask, kernel):
    x = torch.randn(2, 3, 6, 16, dtype=torch.float64)
    b, h, i = torch.arange(2)[:, None, None, None], torch.arange(3)[:, None, None], torch.arange(6)
    visible = mask.allowed(b, h, i[:, None], i).expand(2, 3, 6, 6)
    scores = (x @ x.mT / 4).masked_fill(~visible, float("-inf"))
    want = torch.softmax(scores, -1).nan_to_num(0.0) @ x

    def run(layout):
        mine = layout.shard(x, {"tokens": 2})
        out = weft.attention(mine, mine, mine, layout, "tokens", mask, kernel=kernel)
        return layout.gather(out, {"tokens": 2})

    for line in (None, "tokens: ring=2", "tokens: ulysses=3"):
        layout = Layout.parse(line) if line else Layout.single()
        for out in weft.on_threads(layout, run):
            assert (out - want).abs().max() < 1e-12


def test_a_mask_that_answers_an_older_question_is_refused():
    with pytest.raises(TypeError, match=r"define diagonal"):

        class Older(Causal):
            def is_causal(self, q, k):
                return False


# -- functions of single positions ----------------------------------------------------------------

DOC = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 2, 2, 2]])
TABLE = torch.randn(4, 15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SEEN = torch.rand(8, 8, generator=torch.Generator().manual_seed(1)) < 0.7
INDEXED = {
    "b then q": (
        lambda b, h, q, k: DOC[b][q] == DOC[b][k],
        lambda b, h, q, k: DOC[b, q] == DOC[b, k],
    ),
    "q then k": (lambda b, h, q, k: SEEN[q][k], lambda b, h, q, k: SEEN[q, k]),
    "h then q": (lambda b, h, q, k: DOC[h % 2][q] <= k, lambda b, h, q, k: DOC[h % 2, q] <= k),
}


@pytest.mark.few(2)
@covering(
    "name line kernel",
    INDEXED,
    ["ring=2", "pass_q=2", "ulysses=2", "tile=2x2"],
    [None, "math", "flex"],
)
def test_nested_indices_mean_the_same_as_in_flex_attention(name, line, kernel):
    """8 heads and 8 tokens: a wrong broadcast would have a right shape."""
    layout = weft.Layout.parse(f"tokens: {line}")
    make = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 8, 8, 4, generator=make, dtype=torch.float64) for _ in range(4)]

    def rank(bound: weft.Layout, fn, kernel) -> list[torch.Tensor]:
        *mine, dout = (bound.shard(t, {"tokens": 2}).clone() for t in whole)
        mine = [t.requires_grad_() for t in mine]
        bias = weft.Bias(lambda b, h, q, k: TABLE[h % 4][q - k + 7])
        out = weft.attention(*mine, bound, "tokens", weft.MaskMod(fn), bias=bias, kernel=kernel)
        out.backward(dout)
        return [bound.gather(t.detach(), {"tokens": 2}) for t in (out, *(t.grad for t in mine))]

    nested, together = INDEXED[name]
    found = weft.on_threads(layout, rank, nested, kernel)[0]
    wanted = rank(weft.Layout.single(), together, "math")
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
