"""Training on reproducible layouts: not one bit of a weight depends on the layout."""

from __future__ import annotations

import functools
import math
import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from weft import Layout, UnsupportedError
from weft.same_bits.modules import exact_sums, make_reproducible
from weft.same_bits.sums import ExactSums
from weft_models.models import ModelSpec, compose
from weft_models.train import fit, stream
from weft_models.train.same_bits import OtherBits, Trace, first_other_bits, trace
from weft_models.train.step import mean, score

TOKENS = ModelSpec.from_dict(
    {
        "head": "tokens",
        "axes": ["batch", "tokens", "embed"],
        "sizes": {"embed": 24, "heads": 6, "kv_heads": 6, "vocabulary": 19},
        "block": [
            {"attend": "tokens", "mask": "causal", "rope": True, "qk_norm": True, "gate": True},
            {"mlp": 40, "activation": "silu", "gated": True},
        ],
        "train": {"steps": 2, "batch": 4, "accumulate": 2, "length": {"tokens": [21, 43]}},
    },
    name="tokens",
)
TABLES = ModelSpec.load("tabular")  # with heads of 9 numbers
TABLES = TABLES.model_copy(update={"sizes": TABLES.sizes.model_copy(update={"embed": 36})})
TABLES = TABLES.training({"steps": 2, "batch": 2, "length": {"rows": [13, 29], "features": [2, 5]}})
SINGLE = Layout.single(reproducible=True)
BY_HEADS = {
    "reproducible": True,
    "mesh": {"head": 2},
    "shard": {"tokens": ["head"]},
    "attend": {"tokens": [{"strategy": "ulysses", "on": "head"}]},
    "carry": {"tokens": [{"strategy": "ulysses", "on": "head"}]},
}
BY_TIME = {
    "reproducible": True,
    "mesh": {"t": 2},
    "shard": {"time": ["t"]},
    "attend": {"time": [{"strategy": "ring", "on": "t"}]},
}
TOKEN_LINES = (
    "tokens: ring=3",
    "tokens(zigzag): ring=6",
    "tokens: ulysses=6",
    "tokens: tile=2x2",
    "tokens(zigzag): tile=3x2",
    "tokens: hierarchical=2x3",
    "tokens(zigzag): ulysses=2 x ring=2",
    "batch: dp=2; tokens: tile=2x1",
    "batch: dp=2; tokens(zigzag): ring=3",
)
TABLE_LINES = (
    "rows(zigzag): ring=3",
    "features: ring=3",
    "rows: tile=2x2",
    "batch: dp=2; rows: ring=2",
    "rows: ulysses=2; features: ring=2",
)


def _bits(spec: ModelSpec, line: str | None, dtype: torch.dtype = torch.float32) -> Trace:
    layout = Layout.single(reproducible=True) if line is None else _reproducible(line)
    return trace(spec, layout, spec.train.steps, dtype=dtype)


def _reproducible(line: str) -> Layout:
    return Layout.parse(f"{line}; reproducible")


@functools.cache
def _alone(kind: str, dtype: torch.dtype = torch.float32) -> Trace:
    return _bits(TOKENS if kind == "tokens" else TABLES, None, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("line", TOKEN_LINES)
def test_a_layout_changes_no_bit_of_a_language_model(line):
    assert first_other_bits(_alone("tokens"), _bits(TOKENS, line)) is None


@pytest.mark.slow
def test_nor_after_twenty_steps():
    spec = TOKENS.training(
        {"steps": 20, "accumulate": 1, "batch": 1, "length": {"tokens": [17, 23]}}
    )
    assert first_other_bits(_bits(spec, None), _bits(spec, "tokens: ring=3")) is None


@pytest.mark.slow
@pytest.mark.parametrize("line", ["tokens: ring=3", TOKEN_LINES[-2]])
def test_nor_in_half_precision(line):
    dtype = torch.bfloat16
    assert first_other_bits(_alone("tokens", dtype), _bits(TOKENS, line, dtype)) is None


@pytest.mark.slow
@pytest.mark.parametrize("line", TABLE_LINES)
def test_a_layout_changes_no_bit_of_a_table_model(line):
    assert first_other_bits(_alone("tables"), _bits(TABLES, line)) is None


def test_a_layout_changes_no_bit_of_a_pair_model():
    length = {"rows": (7, 9), "columns": (7, 9)}
    spec = ModelSpec.load("pair").training({"steps": 1, "batch": 2, "length": length})
    line = "rows: tile=2x1; columns: ring=2"
    assert first_other_bits(_bits(spec, None), _bits(spec, line)) is None


@pytest.mark.parametrize("strategy", ["ring", "pass_q"])
def test_axes_attended_alone_and_jointly_keep_their_bits(strategy):
    blocks = [{"attend": "lat"}, {"attend": "lat+lon"}, {"attend": "lon"}, {"mlp": 20}]
    axes = {"axes": ["batch", "lat", "lon", "embed"], "sizes": {"embed": 18, "heads": 2}}
    spec = ModelSpec.from_dict({**axes, "block": blocks})
    make, dims = torch.Generator().manual_seed(0), {"batch": 0, "lat": 1, "lon": 2}
    x, dout = (torch.randn(2, 7, 5, 18, generator=make) for _ in range(2))

    def rank(layout: Layout) -> list[torch.Tensor]:
        model = compose(spec, layout, seed=0, dtype=torch.float32)
        out = model(layout.shard(x, dims), lengths={"lat": 7, "lon": 5})
        out.backward(layout.shard(dout, dims))
        layout.sync_gradients(model)
        return [layout.gather(out.detach(), dims), *(p.grad for p in model.parameters())]

    bound = {"lat": [{"strategy": "ring", "on": "y"}]}
    bound["lat+lon"] = [{"strategy": strategy, "on": "y"}]
    split = {"mesh": {"y": 3}, "shard": {"lat": ["y"]}, "attend": bound, "reproducible": True}
    found = weft.on_threads(Layout.from_dict(split), rank)[0]
    assert all(map(torch.equal, found, rank(SINGLE)))


def test_an_ordinary_layout_changes_some():
    plain = trace(TOKENS, Layout.single(), 1)
    found = first_other_bits(plain, trace(TOKENS, Layout.parse("tokens: ring=2"), 1))
    assert isinstance(found, OtherBits)
    assert 0 < found.count <= found.of
    assert found.most < 1e-4
    one = torch.ones(3)
    assert first_other_bits({"x": one}, {"x": one.nextafter(2 * one)}).count == 3
    assert first_other_bits({"x": one * math.nan}, {"x": one * math.nan}) is None
    assert first_other_bits({"x": one * 0}, {"x": one * -0.0}).count == 3


@pytest.mark.sample
def test_checkpoint_is_resumed_on_another_layout_with_the_same_bits(tmp_path):
    spec = TOKENS.training({"steps": 5, "checkpoint_every": 2})

    def run(line: str | None, folder, **options) -> tuple[list, dict]:
        def rank(layout: Layout):
            made = fit(spec, layout, quiet=True, checkpoint_dir=folder, **options)
            weights = {k: p.detach().clone() for k, p in made.model.named_parameters()}
            return [(r.loss, r.norm) for r in made.records], weights

        if line is None:
            return rank(Layout.single(reproducible=True))
        return weft.on_threads(_reproducible(line), rank)[0]

    numbers, weights = run(None, tmp_path / "undisturbed")
    run("tokens: ring=2", tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "step-000005")
    rest, resumed = run("tokens(zigzag): ring=3", tmp_path / "moved", resume=True)
    assert rest == numbers[4:]
    assert all(torch.equal(p, resumed[name]) for name, p in weights.items())


def test_gradients_are_as_exact_as_ordinary_ones():
    def gradients(layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model = compose(TOKENS, layout, dtype=torch.float32).to(dtype)
        batch = stream(TOKENS, layout, 0).batch(0)
        values = score("tokens", model(batch.inputs, **batch.given), batch)
        mean(layout, values, batch.counted.sum())[0].backward()
        return {name: p.grad for name, p in model.named_parameters()}

    exact = gradients(Layout.single(), torch.float64)
    plain = gradients(Layout.single(), torch.float32)
    ours = gradients(Layout.single(reproducible=True), torch.float32)

    def error(of: dict) -> float:
        return max(float((of[k] - g).norm() / g.norm()) for k, g in exact.items())

    assert error(ours) <= 2 * error(plain)


def _drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    # Sizes over many binary orders, so that the order of additions matters.
    return torch.randn(*shape, generator=random) * torch.exp(
        torch.randn(shape, generator=random) * 3
    )


def test_sums_depend_neither_on_order_nor_on_ranks():
    a, b = _drawn(500, 7), _drawn(500, 69, seed=1)
    b[:, 5:] = nn.functional.normalize(b[:, 5:], dim=0)  # whose norms round to 1 from both sides
    ids = torch.arange(500) % 11

    def sums(layout: Layout) -> list[torch.Tensor]:
        of = exact_sums(layout, "tokens")
        x, y, i = (layout.shard(t, {"tokens": 0}) for t in (a, b, ids))
        return [*of.of_products(x, y), of.of_rows(x), of.of_rows(y, (i, 11))]

    one = sums(Layout.single(reproducible=True))
    for line in ("tokens: ring=3", "tokens(zigzag): ring=4"):
        for made in weft.on_threads(_reproducible(line), sums):
            assert all(map(torch.equal, made, one))
    shuffled = torch.randperm(500)
    of = exact_sums(Layout.single())
    assert all(map(torch.equal, of.of_products(a[shuffled], b[shuffled]), one))
    exact = a.double().t() @ b.double()
    scale = a.double().norm(dim=0)[:, None] * b.double().norm(dim=0)
    assert ((one[0] - exact).abs() / scale).max() < 2.0**-25
    assert ((one[2] - a.double().sum(0)).abs() / a.double().abs().sum(0)).max() < 1e-12


def test_sums_of_very_different_numbers_depend_on_no_order():
    """fp64 alone does not add these exactly: they span more bits than it has."""
    random = torch.Generator().manual_seed(7)
    sizes = torch.randint(-40, 40, (600, 1), generator=random)
    rows = torch.ldexp(torch.randn(600, 3, generator=random), sizes)
    shuffled = rows[torch.randperm(600, generator=random)]
    plain = rows.double(), shuffled.double()
    assert not torch.equal(*(t.flip(0).cumsum(0)[-1] for t in plain))
    assert torch.equal(*(exact_sums(Layout.single()).of_rows(t) for t in (rows, shuffled)))
    one = exact_sums(Layout.single()).of_rows(rows)
    for line in ("tokens: ring=3", "tokens(zigzag): ring=4"):
        made = weft.on_threads(
            _reproducible(line),
            lambda layout: exact_sums(layout, "tokens").of_rows(layout.shard(rows, {"tokens": 0})),
        )
        assert all(torch.equal(m, one) for m in made)
    grid = torch.ldexp(torch.ones(()).double(), torch.frexp(600 * rows.abs().amax(0)).exponent - 51)
    assert ((one - rows.double().sum(0)).abs() <= 600 * grid).all()


def test_sums_that_outgrow_their_parts_depend_on_no_order():
    """Numbers of one sign and size: the sum of n has log2(n) bits more than each of them."""
    rows = 1 + torch.rand(4096, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    of = exact_sums(Layout.single()).of_rows
    assert torch.equal(of(rows), of(rows.flip(0)))


def test_sums_of_the_smallest_numbers_depend_on_no_order():
    """No power of two in fp32 makes their squares whole numbers."""
    random = torch.Generator().manual_seed(1)
    a, b = (torch.randn(600, n, generator=random) for n in (3, 40))
    a, order = a * 2.0**-123, torch.randperm(600, generator=random)
    of = exact_sums(Layout.single()).of_products
    (one, _), (other, _) = of(a, b), of(a[order], b[order])
    assert torch.equal(one, other)
    assert (one - a.double().t() @ b.double()).abs().max() < 2.0**-123 * 600 * 2.0**-25


def test_norms_next_to_power_of_two_depend_on_no_order():
    """One bit of a sum of squares decides the grid of a whole column, so fp32 must not round it."""
    random = torch.Generator().manual_seed(3)
    above = torch.randn(256, 5, generator=random)
    of = exact_sums(Layout.single()).of_products
    rows = torch.full((256, 1), 2.0**-13)
    rows[:17] = math.sqrt((16 - 256 * 2.0**-24) / 17)  # squares add up to 2^4 if each is rounded up
    for _ in range(200):
        rows[0] = rows[0].nextafter(2 * rows[0])
        one, _ = of(above, rows)
        order = torch.randperm(256, generator=random)
        assert torch.equal(of(above[order], rows[order])[0], one)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_stay_so(value):
    rows = torch.ones(4, 3)
    rows[1, 2] = value
    of = ExactSums(Layout.single().bound, ())
    for made in (of.of_rows(rows), of.of_products(rows, torch.ones(4, 1))[0][:, 0]):
        assert made.isfinite().tolist() == [True, True, False]


def test_sums_of_nothing_are_zero():
    of = ExactSums(Layout.single().bound, ())
    assert of.of_rows(torch.zeros(0, 3)).tolist() == [0.0] * 3
    assert not any(t.any() for t in of.of_products(torch.zeros(0, 3), torch.zeros(0, 2)))


class _Unknown(nn.Module):
    """A weight meets tokens in a function that has no rule."""

    def __init__(self, how) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.ones(4, 4)), how

    def forward(self, x):
        return self.how(x, self.weight)


@pytest.mark.parametrize("function", [F.silu, F.gelu, F.softplus, torch.sigmoid])
def test_an_activation_does_not_depend_on_its_place_in_memory(function):
    layer = make_reproducible(_Unknown(lambda x, w: function(x)), SINGLE)
    rows = torch.randn(41, 45, generator=torch.Generator().manual_seed(1)) * 3

    def bits(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        made = layer(x)
        return [made, *torch.autograd.grad(made.sum(), x)]

    one, gate = bits(rows), torch.cat([rows, rows], 1)[:, 45:]
    assert not gate.is_contiguous()
    assert all(map(torch.equal, bits(gate), one))
    assert all(map(torch.equal, bits(rows[7:30]), (t[7:30] for t in one)))
    assert torch.allclose(one[0], function(rows), atol=1e-5)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda x, w: torch.einsum("ne,ef->nf", x, w), "einsum"),
        (lambda x, w: torch.cat([x, w]), "cat"),
        (lambda x, w: x + w[1:2], "part of a weight"),
        (lambda x, w: x @ w.exp()[:2].t(), "part of a weight"),
    ],
)
def test_weights_in_functions_without_a_rule_are_refused(how, words):
    model = make_reproducible(_Unknown(how), Layout.single(reproducible=True))
    with pytest.raises(UnsupportedError, match=words):
        model(torch.ones(3, 4))
    assert make_reproducible(nn.Linear(4, 4), Layout.single())(torch.ones(3, 4)).shape == (3, 4)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        *((function, function.__name__) for function in (F.elu, F.mish, torch.sinh, torch.exp2)),
        (lambda x, w: torch.logaddexp(x, x), "logaddexp"),
        (lambda x, w: x.abs() ** 2.5, "pow"),
        (lambda x, w: (x + 0).sigmoid_(), "sigmoid_"),
        (lambda x, w: x.bfloat16().rsqrt(), "rsqrt"),
        (lambda x, w: torch.einsum("ne,ef->nf", x, w.requires_grad_(False)), "einsum"),
    ],
)
def test_functions_that_depend_on_a_place_in_memory_are_refused(how, words):
    takes_x = how if how.__name__ == "<lambda>" else lambda x, w: how(x)
    with pytest.raises(UnsupportedError, match=f"torch's {words}|torch's __{words}"):
        make_reproducible(_Unknown(takes_x), SINGLE)(torch.ones(3, 4))


@pytest.mark.parametrize(
    "how",
    [
        lambda x, w: x @ w.detach(),
        lambda x, w: x @ w.detach()[:, 0],
        lambda x, w: torch.addmm(w.detach()[0], x, w.detach()),
        lambda x, w: x**3 + x**0.5,
    ],
)
def test_rows_do_not_depend_on_others(how):
    layer = make_reproducible(_Unknown(how), SINGLE)
    layer.weight.data = torch.randn(46, 46, generator=torch.Generator().manual_seed(0))
    rows = torch.rand(37, 46, generator=torch.Generator().manual_seed(1))
    for i, n in [(0, 1), (7, 3), (30, 7)]:
        assert torch.equal(layer(rows)[i : i + n], layer(rows[i : i + n]))


def test_weight_and_its_norm_have_the_gradient_of_one_device():
    """As DoRA scales by a magnitude over a norm without gradient."""
    x = torch.randn(37, 4, generator=torch.Generator().manual_seed(0))

    def rank(layout: Layout) -> torch.Tensor:
        scaled = _Unknown(lambda x, w: x * (w[0] / w[0].detach().norm().expand(4) - 1))
        make_reproducible(scaled, layout)(layout.shard(x, {"tokens": 0})).square().sum().backward()
        layout.sync_gradients(scaled)
        return scaled.weight.grad

    for line in ("tokens: ring=2", "tokens(zigzag): ring=3"):
        assert torch.equal(weft.on_threads(_reproducible(line), rank)[0], rank(SINGLE))


@pytest.mark.parametrize(
    ("line", "changes", "words"),
    [
        ("heads: tp=2; tokens: ring=2", {}, "split heads"),
        ("tokens: ring=2", {"gradients": "fsdp"}, "gradients = 'sync'"),
    ],
)
def test_what_gives_other_bits_is_refused_by_every_rank(line, changes, words):
    def rank(layout: Layout) -> None:
        with pytest.raises(UnsupportedError, match=words):
            fit(TOKENS, layout, quiet=True, **changes)

    weft.on_threads(_reproducible(line), rank)


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ("pairformer", Layout.single(reproducible=True), "found TriangleBlock"),
        ("hybrid", Layout.from_dict(BY_HEADS), "states carried by heads"),
        ("weather", Layout.from_dict(BY_TIME), "context 'forcing', which is whole where 'time' is"),
    ],
)
def test_blocks_that_were_not_shown_to_have_same_bits_refused(model, layout, words):
    def rank(bound: Layout) -> None:
        with pytest.raises(weft.DeclarationError, match=words):
            weft.compose(model, bound)

    weft.on_threads(layout, rank)


HYBRID = ModelSpec.from_dict(
    {
        "head": "tokens",
        "axes": ["batch", "tokens", "embed"],
        "sizes": {"embed": 24, "heads": 4, "vocabulary": 19},
        "block": [{"carry": "tokens"}, {"attend": "tokens", "mask": "causal"}, {"mlp": 40}],
        "train": {"steps": 2, "batch": 2, "length": {"tokens": [29, 43]}},
    },
    name="hybrid",
)


@pytest.mark.few(1)
@pytest.mark.parametrize("line", ["tokens(zigzag): ring=3", "batch: dp=2; tokens: tile=2x1"])
def test_a_layout_changes_no_bit_of_a_hybrid(line):
    assert first_other_bits(_bits(HYBRID, None), _bits(HYBRID, line)) is None


def test_a_hybrid_computes_what_it_computes_on_an_ordinary_layout():
    plain, ours = (trace(HYBRID, layout, 1) for layout in (Layout.single(), SINGLE))
    assert all(torch.allclose(plain[name], t, atol=1e-5) for name, t in ours.items())


def test_a_compiled_model_is_refused():
    layer = torch.compile(make_reproducible(nn.Linear(4, 4), SINGLE), backend="eager")
    with pytest.raises(UnsupportedError, match="is compiled"):
        layer(torch.ones(3, 4))
