"""Windows over split axes: halos, borders, strides, boxes of several axes, and their bytes."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from weft import Layout, ShapeError, UnsupportedError
from weft.move.windows import Wanted, Windows, bordered, plan_ranges
from weft.plan.held import Held
from weft.plan.order import Span
from weft_proof.takes import take_defects
from weft_proof.windows import prove_windows, window_defects

SEVEN = Held("rows", (("r", 2),), ((Span(0, 4),), (Span(4, 3),)))

CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
PAD_MODES = {"zeros": "constant", "circular": "circular", "reflect": "reflect"}
PAD_MODES["replicate"] = "replicate"


def padded(x: Tensor, around, border: str | None) -> Tensor:
    """x with what a border puts around its last dims."""
    pads = [n for pair in reversed(around) for n in pair]
    if border is None or not any(pads):
        return x
    return F.pad(x, pads, mode=PAD_MODES[border])


def cases(seed: int):
    """A layout line, sizes, and (around, border, stride) of one random window function."""
    rng = random.Random(seed)
    dims = rng.choice([1, 2, 2, 3])
    ranks = [rng.choice([1, 2, 3]) for _ in range(dims)] if seed % 2 else [2, 2, 1][:dims]
    axes = ("height", "width", "time")[:dims]
    line = "; ".join(f"{a}: gather={n}" if n > 1 else f"{a}: local" for a, n in zip(axes, ranks))
    sizes = [rng.randrange(4, 10) for _ in axes]
    around = [(rng.randrange(0, 4), rng.randrange(0, 4)) for _ in axes]
    border = rng.choice([*PAD_MODES, None])
    return line, axes, sizes, around, border, [rng.randrange(1, 4) for _ in axes]


def box_bytes(layout, axes, sizes, around, border, stride, rest: int) -> int:
    """Bytes that a rank lacks, axis by axis: those of the surface of its box, corners once."""
    own = [layout.local_length(a, n) for a, n in zip(axes, sizes)]
    total, held = 0, list(own)
    for i, (axis, n) in enumerate(zip(axes, sizes)):
        before, after = around[i]
        first = before if border is None else 0
        last = n - after if border is None else n
        positions = {p for s in layout.spans(axis, n) for p in range(s.start, s.last + 1)}
        anchors = [p for p in range(first, last, stride[i]) if p in positions]
        if not anchors:
            held[i] = 0
            continue
        seen = range(anchors[0] - before, anchors[-1] + after + 1)
        wraps = {"zeros": lambda p, n: -1, "circular": lambda p, n: p % n, None: None}
        wraps["replicate"] = lambda p, n: min(max(p, 0), n - 1)
        wraps["reflect"] = lambda p, n: -p if p < 0 else 2 * (n - 1) - p
        wanted = [p if 0 <= p < n else wraps[border](p, n) for p in seen]
        lacking = sum(p >= 0 and p not in positions for p in wanted)
        total += lacking * math.prod(held[:i] + own[i + 1 :])
        held[i] = len(wanted)
    return total * rest


@pytest.mark.few(10)
@pytest.mark.parametrize("seed", range(24))
def test_windows_equal_one_device_in_values_gradients_and_bytes(seed):
    line, axes, sizes, around, border, stride = cases(seed)
    if border in ("circular", "reflect"):
        around = [(min(a, n - 1), min(b, n - 1)) for (a, b), n in zip(around, sizes)]
    if border is None and any(a + b + 1 > n for (a, b), n in zip(around, sizes)):
        around = [(1, 1)] * len(axes)
    torch.manual_seed(seed)
    kernel = [a + 1 + b for a, b in around]
    x = torch.randn(2, 3, *sizes, dtype=torch.float64).requires_grad_()
    weight = torch.randn(4, 3, *kernel, dtype=torch.float64).requires_grad_()
    conv = CONVOLUTIONS[len(axes) - 1]
    out = conv(padded(x, around, border), weight, stride=stride)
    dout = torch.randn_like(out)
    wanted = [out, *torch.autograd.grad(out, [x, weight], dout)]
    dims = range(2, 2 + len(axes))

    def outputs(layout, axis: str, i: int) -> range:
        """Global numbers of the outputs that this rank computes."""
        first = around[i][0] if border is None else 0
        anchors = range(first, first + out.shape[2 + i] * stride[i], stride[i])
        held = {p for s in layout.spans(axis, sizes[i]) for p in range(s.start, s.last + 1)}
        found = [o for o, p in enumerate(anchors) if p in held]
        return range(found[0], found[-1] + 1) if found else range(0)

    def rank(layout):
        local = layout.shard(x.detach(), dict(zip(axes, dims))).requires_grad_()
        own = weight.detach().clone().requires_grad_()
        options = {"dim": tuple(dims), "length": tuple(sizes), "around": tuple(around)}
        options |= {"border": border, "stride": tuple(stride), "axis": axes}
        run = lambda box: conv(box, own, stride=stride)  # noqa: E731
        with weft.traffic(layout) as forward:
            y = weft.halo(run, local, layout=layout, **options)
        places = [outputs(layout, a, i) for i, a in enumerate(axes)]
        part = dout
        for dim, place in zip(dims, places):
            part = part.narrow(dim, place.start, len(place))
        with weft.traffic(layout) as backward:
            y.backward(part)
        assert (forward.sent, backward.sent) == (forward.predicted.sent, backward.predicted.sent)
        lacking = box_bytes(layout, axes, sizes, around, border, stride, 2 * 3 * 8)
        assert sum(forward.received.values()) == lacking
        assert sum(backward.sent.values()) == lacking
        return y.detach(), places, local.grad, own.grad, layout.rank

    ranks = weft.on_threads(Layout.parse(line), rank)
    y = torch.zeros_like(out)
    seen = torch.zeros_like(out)
    for part, places, *_ in ranks:
        index = (slice(None), slice(None), *(slice(p.start, p.stop) for p in places))
        y[index], seen[index] = part, seen[index] + 1
    assert (seen == 1).all()
    dx = torch.zeros_like(x)
    for _, _, grad, _, number in ranks:
        layout = Layout.parse(line)
        coords = dict(zip(layout.mesh, _coords(layout, number)))
        index = [slice(None), slice(None)]
        for axis, n in zip(axes, sizes):
            spans = layout.spans(axis, n, coords)
            low = spans[0].start if spans else 0
            index.append(slice(low, low + sum(s.count for s in spans)))
        dx[tuple(index)] = grad
    found = [y, dx, sum(r[3] for r in ranks)]
    for a, b in zip(found, wanted):
        torch.testing.assert_close(
            a, b.detach(), rtol=0, atol=1e-12 * max(1, float(b.detach().abs().max()))
        )


def _coords(layout, number: int) -> list[int]:
    made = []
    for size in reversed(layout.mesh.values()):
        number, at = divmod(number, size)
        made.insert(0, at)
    return made


@pytest.mark.parametrize("border", PAD_MODES)
def test_two_ranks_on_both_sides_are_one_peer(border):
    x = torch.arange(6.0, dtype=torch.float64).view(1, 6)

    def rank(layout):
        local = layout.shard(x, {"width": 1})
        run = lambda t: t.unfold(1, 5, 1).sum(-1)  # noqa: E731
        options = {"layout": layout, "axis": "width", "around": (2, 2), "border": border}
        return layout.gather(weft.halo(run, local, **options), {"width": 1})

    whole = padded(x[None], [(2, 2)], border)[0].unfold(1, 5, 1).sum(-1)
    for found in weft.on_threads(Layout.parse("width: gather=2"), rank):
        torch.testing.assert_close(found, whole)


def test_windows_of_documents_end_where_documents_do():
    x, documents = torch.randn(1, 11, dtype=torch.float64), (3, 1, 7)
    whole = torch.cat([F.pad(t, (2, 1)).unfold(1, 4, 1).sum(-1) for t in x.split(documents, 1)], 1)

    def rank(layout):
        local = layout.shard(x, {"tokens": 1})
        options = {"layout": layout, "axis": "tokens", "around": (2, 1), "length": 11}
        run = lambda t: t.unfold(1, 4, 1).sum(-1)  # noqa: E731
        out = weft.halo(run, local, documents=weft.Documents(documents), **options)
        return layout.gather(out, {"tokens": 1})

    for found in weft.on_threads(Layout.parse("tokens(zigzag): ring=3"), rank):
        torch.testing.assert_close(found, whole)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"around": (1, 1), "columns": 1}, ShapeError, "and not both"),
        ({"around": (1, -1)}, ShapeError, "0 or more positions before"),
        ({"around": (1, 1), "stride": 0}, ShapeError, "stride = 0"),
        ({"around": (1, 1), "border": "circle"}, ShapeError, "did you mean 'circular'"),
        ({"around": (9, 0), "border": "reflect"}, ShapeError, "needs an axis of 10 or more"),
        ({"around": (1, 1), "axis": ("height", "width")}, ShapeError, "one of each of"),
        (
            {"around": (1, 1), "axis": ("height", "tokens"), "dim": (1, 2)},
            UnsupportedError,
            "contiguous order",
        ),
    ],
)
def test_windows_that_are_none_are_refused_on_every_rank(options, error, message):
    def rank(layout):
        x = torch.randn(1, 3, 3)
        with pytest.raises(error, match=message):
            weft.halo(lambda t: t, x, layout=layout, **{"axis": "height", **options})
        return True

    line = "height: gather=2; tokens(zigzag): ring=2"
    assert all(weft.on_threads(Layout.parse(line), rank))


# -- plans ----------------------------------------------------------------------------------------


def test_windows_are_proven_on_a_few_and_on_many_ranks():
    for ranks, length in ((3, 37), (5, 4), (512, 1537)):
        claims = prove_windows(Layout.parse(f"height: gather={ranks}"), "height", length)
        assert [claim.ok for claim in claims] == [True]


class LocalPhase(Windows):
    """Strides are counted from the beginning of each chunk."""

    def ranges(self, edges):
        first, *others = super().ranges(edges)
        return (first, *((low - 1, high - 1) for low, high in others))


class Doubled(Windows):
    """Two chunks compute the outputs between them."""

    def edges(self, starts):
        first, *others, last = super().edges(starts)
        return (first, *(e + 1 for e in others[:1]), *others[1:], last - 1)


@pytest.mark.parametrize("wrong", [LocalPhase, Doubled])
def test_wrong_windows_are_found(wrong):
    layout, window = Layout.parse("height: gather=3"), Windows.over(13, 3, 2, (1, 1))
    assert not [*window_defects(layout, "height", 13, window)]
    assert [*window_defects(layout, "height", 13, wrong(**vars(window)))]


def test_a_chunk_that_sends_nothing_is_found():
    plan = plan_ranges(SEVEN, ((-1, 5), (3, 8))).wanted
    assert not [*take_defects(plan)]
    assert [*take_defects(Unsent(*vars(plan).values()))]


class Unsent(Wanted):
    """The first chunk sends nothing."""

    def take(self, chunk):
        move = super().take(chunk)
        return move if chunk else type(move)(move.rank, (), move.arrived, move.shape)


def test_positions_run_up_and_down_and_repeat():
    wanted = ((Span(6, 3, -1), Span(2, 2, 0)), (Span(-1, 2, 0), Span(0, 3, 3), *bordered(5, 7, 7)))
    plan = Wanted(SEVEN, wanted)
    assert not [*take_defects(plan)]
    assert [plan.received(chunk) for chunk in (0, 1)] == [3, 2]
    assert sorted(itertools.chain(*(o.put[0] for o in plan.take(1).arrived))) == [2, 3, 4, 5, 6]
