"""Masks and biases of single sequences, where the axes that are not attended are split."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from world import draw

import weft
from weft import Bias, KeyPadding, Layout, MaskMod, compose
from weft.nn import MultiAxisAttention
from weft_models.models import ModelSpec
from weft_models.pair.triangle import TriangleAttention

F64 = torch.float64
AXES = ("batch", "rows", "features", "embed")
SIZES = {"batch": 2, "rows": 6, "features": 5}
SEQUENCES = SIZES["batch"] * SIZES["features"]
DIMS = {"batch": 0, "rows": 1, "features": 2}
LINES = [
    "batch: dp=2; rows: local",
    "features: ring=2; rows: local",
    "features: ring=2; rows: gather=2",
    "features: axial=2; rows: local",
    "features(zigzag): ring=2; rows: local",
    "batch: dp=2; features: ring=2; rows: ring=2",
    "features: ring=2; rows: ulysses=2",
]


def attends(layout, heads=2, **more):
    given = {"axis": "rows", "axes": AXES, "layout": layout, "dtype": F64} | more
    return MultiAxisAttention(8, heads, generator=torch.Generator().manual_seed(0), **given)


X = draw(2, 6, 5, 8)
PADDING = KeyPadding([1 + i % 6 for i in range(SEQUENCES)])
BY_SEQUENCE = MaskMod(lambda b, h, q, k: (q * 7 + k * 3 + b) % 5 != 0)
SLOPES = Bias(lambda b, h, q, k: -0.1 * (b + 1) * (h + 1) * (q - k).abs())
LEARNED = draw(SEQUENCES, 1, 6, 6, seed=3)


def _run(layout: Layout, given: dict, learned: bool) -> list[torch.Tensor]:
    """The output and the gradients of x and of a learned bias, whole."""
    attend = attends(layout)
    x = layout.shard(X, DIMS).clone().requires_grad_()
    bias = nn.Parameter(LEARNED.clone()) if learned else None
    given = given | ({"bias": bias} if learned else {})
    out = attend(x, lengths=SIZES, **given)
    out.backward(layout.shard(draw(2, 6, 5, 8, seed=7), DIMS))
    found = [layout.gather(t, DIMS) for t in (out.detach(), x.grad)]
    if bias is not None:
        layout.sync_gradients(nn.ParameterList([bias]))
        found.append(bias.grad)
    return found


@pytest.mark.few(10)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("kind", ["padding", "function", "bias", "learned"])
def test_sequences_are_numbered_by_their_axes_wherever_they_lie(line, kind):
    given = {
        "padding": {"mask": PADDING},
        "function": {"mask": BY_SEQUENCE},
        "bias": {"bias": SLOPES, "mask": PADDING},
        "learned": {},
    }[kind]
    wanted = _run(Layout.single(), given, kind == "learned")
    for found in weft.on_threads(Layout.parse(line), _run, given, kind == "learned"):
        for a, b in zip(found, wanted, strict=True):
            assert (a - b).abs().max() <= 1e-11 * b.abs().max()


def _on_a_process(rank: int) -> float:
    layout = Layout.parse("features: ring=2; rows: ring=2").build("cpu", timeout=30)
    given = {"mask": PADDING, "bias": SLOPES}
    pairs = zip(_run(layout, given, False), _run(Layout.single(), given, False), strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def test_sequences_are_numbered_alike_on_real_ranks(pool):
    assert max(pool.run(_on_a_process)) <= 1e-11


@pytest.mark.slow
def test_a_compiled_module_numbers_them_too():
    def run(layout):
        attend = attends(layout, dtype=torch.float32)
        x = layout.shard(X.float(), DIMS)
        eager = attend(x, mask=PADDING, lengths=SIZES)
        compiled = torch.compile(attend, backend="eager")(x, mask=PADDING, lengths=SIZES)
        return (eager - compiled).abs().max().item()

    assert max(weft.on_threads(Layout.parse("features: ring=2; rows: local"), run)) < 1e-6


def test_the_first_axis_is_outermost_whatever_the_order_of_context():
    x, context = draw(2, 5, 3, 8), draw(3, 5, 8, seed=1)
    pad = [1, 2, 3, 4, 5, 1]
    attend = MultiAxisAttention(
        8, 2, axis="rows", axes=AXES, context_axes=("features", "rows", "embed"), dtype=F64
    )
    out = attend(x, context, KeyPadding(pad))
    for b in range(2):
        for f in range(3):
            one = attend(
                x[b : b + 1, :, f : f + 1], context[f : f + 1], KeyPadding([pad[3 * b + f]])
            )
            assert (out[b, :, f] - one[0, :, 0]).abs().max() < 1e-12


def test_chunks_that_are_uneven_need_their_lengths():
    def run(layout):
        attend = attends(layout)
        return attend(layout.shard(X, DIMS), mask=PADDING)

    with pytest.raises(weft.ShapeError, match="lengths"):
        weft.on_threads(Layout.parse("features: ring=2; rows: local"), run)


# -- a context that lies whole --------------------------------------------------------------------


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("line", ["rows: ring=2", "batch: dp=2; rows(zigzag): ring=2"])
def test_biases_over_a_context_mean_whole_tensors(line, learned):
    context, queries = draw(2, 4, 8, seed=1), 6 * 5
    axes = {"axes": AXES, "context_axes": ("batch", "notes", "embed")}
    whole = draw(2, 1, queries, 4, seed=5)
    bias = whole if learned else Bias(lambda b, h, q, k: 0.1 * (b + 1) * q - 0.3 * k)

    def run(layout):
        attend = attends(layout, axis="notes", **axes)
        far = layout.shard(context, {"batch": 0})
        out = attend(layout.shard(X, DIMS), far, bias=bias, lengths=SIZES)
        return layout.gather(out.detach(), DIMS)

    wanted = run(Layout.single())
    for out in weft.on_threads(Layout.parse(line), run):
        assert (out - wanted).abs().max() < 1e-11


NOTES = {"axis": "notes", "context_axes": ("batch", "notes", "embed")}
GRID = MaskMod(lambda b, h, q, k: (q + k) % 3 != 0)
POSITIONS = {
    "mask": {"mask": GRID},
    "mask in another": {"mask": GRID & KeyPadding([4, 3])},
    "bias": {"bias": Bias(lambda b, h, q, k: 0.1 * q * k)},
    "alike": {"bias": weft.alibi(2)},
    "both": {"mask": GRID, "bias": Bias(lambda b, h, q, k: 0.1 * q * k)},
}


def _to_notes(layout, rows: int, given: dict, lengths=None, batch: int = 2):
    """What every token gets from notes; the layout splits rows, samples, or both."""
    attend = attends(layout, **NOTES)
    x = layout.shard(draw(batch, rows, 3, 8), {"batch": 0, "rows": 1})
    far = layout.shard(draw(batch, 4, 8, seed=1), {"batch": 0})
    return attend(x, far, lengths=lengths, **given).detach()


@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ("rows: ring=2", 5),
        ("rows: ring=3", 7),
        ("rows(zigzag): ring=2", 5),
        ("rows: ulysses=2 x ring=2", 6),
    ],
)
def test_uneven_queries_of_a_context_are_refused_on_every_rank(line, rows, kind):
    """No rank knows the length of them all from its own, and attention there exchanges nothing."""
    wanted = _to_notes(Layout.single(), rows, POSITIONS[kind])

    def rank(layout):
        with pytest.raises(weft.ShapeError, match="no lengths were given, so the chunks of"):
            _to_notes(layout, rows, POSITIONS[kind])
        out = _to_notes(layout, rows, POSITIONS[kind], {"rows": rows})
        assert (out - layout.shard(wanted, DIMS)).abs().max() < 1e-11

    weft.on_threads(Layout.parse(line), rank, timeout=20)


@pytest.mark.parametrize(
    "line", ["rows: ring=2", "rows: ulysses=2 x ring=2", "batch: dp=2; rows: ring=2"]
)
@pytest.mark.parametrize("kind", POSITIONS)
def test_even_queries_of_a_context_need_no_lengths(line, kind):
    wanted = _to_notes(Layout.single(), 8, POSITIONS[kind])

    def rank(layout):
        out = _to_notes(layout, 8, POSITIONS[kind])
        assert (out - layout.shard(wanted, DIMS)).abs().max() < 1e-11

    weft.on_threads(Layout.parse(line), rank, timeout=20)


def test_length_of_one_axis_that_wrong_refused_where_another_compared():
    """Only rank 2 holds other rows than `lengths` says."""

    def rank(layout):
        with pytest.raises(weft.ShapeError, match=r"chunks of x must|long here and not"):
            _to_notes(layout, 6, {"mask": BY_SEQUENCE}, {"rows": 5})

    weft.on_threads(Layout.parse("batch: dp=2; rows: ring=3"), rank, timeout=20)


@pytest.mark.parametrize(
    ("line", "batch", "rows", "given"),
    [
        ("rows: ring=2", 2, 5, {"mask": KeyPadding([4, 2])}),
        ("rows: ring=2", 2, 5, {"mask": KeyPadding([4, 2]) & weft.FirstKeys(3)}),
        ("rows(zigzag): ring=2", 2, 5, {}),
        ("batch: dp=2; rows: local", 3, 5, {"bias": weft.alibi(2)}),
    ],
    ids=str,
)
def test_ranks_do_not_ask_for_positions_that_nobody_looks_at(line, batch, rows, given, monkeypatch):
    wanted = _to_notes(Layout.single(), rows, given, batch=batch)

    def rank(layout):
        asked = []
        monkeypatch.setattr(layout.bound, "all_gather_text", lambda *_: asked.append(1))
        out = _to_notes(layout, rows, given, batch=batch)
        assert not asked
        assert (out - layout.shard(wanted, DIMS)).abs().max() < 1e-11

    weft.on_threads(Layout.parse(line), rank, timeout=20)


BY_SAMPLE = {
    "alike": {"mask": GRID},
    "mask": {"mask": MaskMod(lambda b, h, q, k: (b + q + k) % 3 != 0)},
    "bias": {"bias": Bias(lambda b, h, q, k: 0.1 * (b + 1) * q - 0.3 * k)},
    "learned": {"bias": draw(5, 1, 12, 4, seed=5)},
    "padding": {"mask": KeyPadding([4, 1, 2, 3, 1])},
}


def _chunks_of_samples(layout, held, kind) -> None:
    """Ranks along dp hold as many samples as `held` says, and of the rows what the layout says."""
    x, far, given = draw(5, 4, 3, 8), draw(5, 4, 8, seed=1), BY_SAMPLE[kind]
    at = layout.coords["dp"]
    mine = slice(sum(held[:at]), sum(held[: at + 1]))

    def out(layout, x, far):
        return attends(layout, **NOTES)(x, far, **given)

    wanted = layout.shard(out(Layout.single(), x, far)[mine], {"rows": 1})
    found = out(layout, layout.shard(x[mine], {"rows": 1}), far[mine])
    assert found.shape == wanted.shape
    assert not len(found) or (found - wanted).abs().max() < 1e-11


@pytest.mark.few(12)
@pytest.mark.parametrize("held", [(3, 2), (2, 3), (4, 1), (0, 5)], ids=str)
@pytest.mark.parametrize("line", ["batch: dp=2; rows: local", "batch: dp=2; rows(zigzag): ring=2"])
@pytest.mark.parametrize("kind", BY_SAMPLE)
def test_ranks_hold_any_samples_of_a_context(kind, line, held):
    """As for attention over axes of x: those whose mask or bias is of samples ask for them."""
    weft.on_threads(Layout.parse(line), _chunks_of_samples, held, kind, timeout=20)


def test_samples_of_context_that_ranks_share_are_refused_where_unequal():
    def rank(layout):
        n = 3 if layout.rank == 0 else 2
        attend = attends(layout, **NOTES)
        with pytest.raises(weft.ShapeError, match=r"same part of axis 'batch'.*\[3, 2, 2, 2\]"):
            attend(draw(n, 2, 3, 8), draw(n, 4, 8), GRID)

    weft.on_threads(Layout.parse("batch: dp=2; rows: ring=2"), rank, timeout=20)


@pytest.mark.parametrize("line", ["batch: dp=2; features: ring=2", "features(zigzag): ring=2"])
def test_sequences_of_several_axes_of_context_numbered_at_any_lengths(line):
    axes = {"axes": AXES, "context_axes": ("batch", "features", "notes", "embed")}
    x, far = draw(3, 2, 5, 8), draw(3, 5, 4, 8, seed=1)
    mask = MaskMod(lambda b, h, q, k: (b + q + k) % 4 != 0)

    def run(layout):
        attend = attends(layout, axis="notes", **axes)
        here = layout.shard(x, {"batch": 0, "features": 2})
        return attend(here, layout.shard(far, {"batch": 0, "features": 1}), mask).detach()

    wanted = run(Layout.single())

    def rank(layout):
        mine = layout.shard(wanted, {"batch": 0, "features": 2})
        assert (run(layout) - mine).abs().max() < 1e-11

    weft.on_threads(Layout.parse(f"{line}; notes: local; rows: local"), rank, timeout=20)


def test_chunks_of_order_refused_where_they_are_not_its_own():
    def rank(layout):
        n = 1 + 3 * layout.rank
        axes = {"axes": AXES, "context_axes": ("batch", "features", "notes", "embed")}
        attend = attends(layout, axis="notes", **axes)
        with pytest.raises(weft.ShapeError, match=r"hold \[1, 4\]; layout.shard gives them"):
            attend(draw(2, 2, n, 8), draw(2, n, 4, 8), GRID)

    weft.on_threads(Layout.parse("features(zigzag): ring=2; rows: local"), rank, timeout=20)


@pytest.mark.parametrize(("count", "wanted"), [(1, "1"), (3, "2 or 1")])
def test_learned_bias_over_a_context_is_whole_on_every_rank(count, wanted):
    def rank(layout):
        bias = draw(count, 1, 9 if layout.rank == 0 else 6, 4)  # the queries that lie here
        with pytest.raises(weft.ShapeError, match=rf"must be \({wanted}, heads or 1, 15, keys\)"):
            _to_notes(layout, 5, {"bias": bias}, {"rows": 5})

    weft.on_threads(Layout.parse("rows: ring=2"), rank, timeout=20)


HEADED = {
    "alibi": lambda: {"bias": weft.alibi(4)},
    "function": lambda: {"bias": SLOPES},
    "mask": lambda: {"mask": MaskMod(lambda b, h, q, k: (q + k + b + h) % 3 != 0)},
    "learned": lambda: {"bias": nn.Parameter(draw(1, 4, 30, 4, seed=5))},
    "learned, per sample": lambda: {"bias": nn.Parameter(draw(2, 4, 30, 4, seed=5))},
    "learned, heads alike": lambda: {"bias": nn.Parameter(draw(2, 1, 30, 4, seed=5))},
}


@pytest.mark.few(8)
@pytest.mark.parametrize("kind", HEADED)
@pytest.mark.parametrize(
    "line",
    ["heads: tp=2", "heads: tp=2; rows(zigzag): ring=2", "batch: dp=2; heads: tp=2; rows: local"],
)
def test_masks_and_biases_over_context_know_heads_by_their_numbers(line, kind):
    context, weights = draw(2, 4, 8, seed=1), draw(2, 6, 5, 8, seed=7)
    axes = {"axes": AXES, "context_axes": ("batch", "notes", "embed"), "kv_heads": 2}

    def run(layout):
        attend = attends(layout, 4, axis="notes", **axes)
        x, given = layout.shard(X, DIMS).clone().requires_grad_(), HEADED[kind]()
        out = attend(x, layout.shard(context, {"batch": 0}), lengths=SIZES, **given)
        out.backward(layout.shard(weights, DIMS))
        found = [layout.gather(t, DIMS) for t in (out.detach(), x.grad)]
        if isinstance(bias := given.get("bias"), nn.Parameter):
            layout.sync_gradients(nn.ParameterList([bias]))
            found.append(bias.grad)
        return found

    wanted = run(Layout.single())
    for found in weft.on_threads(Layout.parse(line), run):
        for a, b in zip(found, wanted, strict=True):
            assert (a - b).abs().max() <= 1e-11 * b.abs().max()


# -- pair tensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line", ["", "rows: ring=2; columns: local", "batch: dp=2; columns: ring=2"]
)
def test_triangle_attention_counts_the_sequences_of_all_samples(line):
    z = draw(2, 5, 5, 8)
    pad = [1 + i % 5 for i in range(10)]
    dims = {"batch": 0, "rows": 1, "columns": 2}

    def run(layout, mask):
        weights = torch.Generator().manual_seed(0)
        attend = TriangleAttention(
            8, 2, axis="columns", layout=layout, generator=weights, dtype=F64
        )
        out = attend(
            layout.shard(z, dims), mask=mask, lengths={"rows": 5, "columns": 5, "batch": 2}
        )
        return layout.gather(out.detach(), dims)

    lone = TriangleAttention(
        8, 2, axis="columns", generator=torch.Generator().manual_seed(0), dtype=F64
    )
    layout = Layout.parse(line) if line else Layout.single()
    masks = KeyPadding(pad), MaskMod(lambda b, h, q, k: k < 1 + b % 5)
    wanted = torch.cat(
        [lone(z[i : i + 1], mask=KeyPadding(pad[5 * i : 5 * i + 5])) for i in (0, 1)]
    )
    for mask in masks:
        for out in weft.on_threads(layout, run, mask):
            assert (out - wanted).abs().max() < 1e-11


def test_a_composed_model_takes_padding_of_its_sequences():
    spec = {
        "axes": list(AXES),
        "sizes": {"embed": 8, "heads": 2},
        "block": [{"attend": "rows", "mask": "padding"}, {"attend": "features"}],
    }

    def run(layout):
        model = compose(ModelSpec.from_dict(spec), layout, dtype=F64)
        out = model(layout.shard(X, DIMS), masks={"padding": list(PADDING.lengths)}, lengths=SIZES)
        return layout.gather(out.detach(), DIMS)

    wanted = run(Layout.single())
    for line in ("features: ring=2; rows: local", "features: tile=2x2; rows: local"):
        for out in weft.on_threads(Layout.parse(line), run):
            assert (out - wanted).abs().max() < 1e-11


@pytest.mark.parametrize(
    "line", [None, "features: ring=2; rows: local", "batch: dp=2; rows: local"]
)
@pytest.mark.parametrize("count", [2, 9, 11, 20])
def test_a_learned_bias_of_other_sequences_is_refused(line, count):
    def run(layout):
        attend = attends(layout)
        with pytest.raises(weft.ShapeError, match=f"bias of {count} sequences|make 10|long here"):
            attend(layout.shard(X, DIMS), bias=draw(count, 1, 6, 6), lengths=SIZES)

    weft.on_threads(Layout.parse(line) if line else Layout.single(), run)


def test_a_learned_bias_says_how_many_samples_there_are():
    """A batch that the mesh does not divide needs no lengths=: the bias has one entry of each."""
    x, bias = draw(3, 6, 2, 8), draw(6, 1, 6, 6, seed=2)

    def run(layout):
        attend = attends(layout)
        return layout.gather(attend(layout.shard(x, DIMS), bias=bias).detach(), DIMS)

    wanted = run(Layout.single())
    for out in weft.on_threads(Layout.parse("batch: dp=2; rows: local"), run):
        assert (out - wanted).abs().max() < 1e-11


@pytest.mark.parametrize(
    "line", ["other: ring=2; batch: dp=2; rows: local", "batch: dp=2; other: ring=2; rows: local"]
)
def test_axes_not_named_by_a_module_are_outermost(line):
    y, pad = draw(2, 4, 6, 8), KeyPadding([1 + i % 6 for i in range(8)])  # other batch rows embed
    dims = {"other": 0, "batch": 1}

    def run(layout):
        attend = attends(layout, axes=("batch", "rows", "embed"))
        if not layout.mesh:
            return attend(y.flatten(0, 1), mask=pad).unflatten(0, (2, 4)).detach()
        return layout.gather(attend(layout.shard(y, dims)[0], mask=pad)[None].detach(), dims)

    wanted = run(Layout.single())
    for out in weft.on_threads(Layout.parse(line), run):
        assert (out - wanted).abs().max() < 1e-11
