"""Models on layouts: the same function, the same gradients, and refusals that say what to do."""

import pytest
import torch
from refusals import refused
from torch import nn
from world import draw

import weft
from weft.comm import run_threads
from weft.errors import DeclarationError, ShapeError
from weft.layout import Layout
from weft.nn import MultiAxisAttention
from weft.nn.geometry import resolve_axes
from weft_axes.nn.parameters import HeadWeight
from weft_models.models import ModelSpec, compose
from weft_models.models.tabular import column_statistics, standardise_columns

GRID = ("batch", "rows", "features", "embed")

DATA_PARALLEL = {"mesh": {"dp": 2}, "shard": {"batch": ["dp"]}}
HEADS = {"mesh": {"tp": 2}, "shard": {"heads": ["tp"]}}
HEADS_AND_ROWS = {
    "mesh": {"tp": 2, "r": 2},
    "shard": {"heads": ["tp"], "rows": ["r"]},
    "attend": {"rows": [{"strategy": "ring", "on": "r"}]},
}
STRIPED_ROWS = {
    "mesh": {"r": 3},
    "shard": {"rows": ["r"]},
    "order": {"rows": "striped"},
    "attend": {"rows": [{"strategy": "pass_q", "on": "r"}]},
}

CASES = [
    pytest.param("tabular", DATA_PARALLEL, id="tabular-data parallel"),
    pytest.param("tabular", HEADS, id="tabular-split heads"),
    pytest.param("tabular", HEADS_AND_ROWS, id="tabular-split heads and rows"),
    pytest.param("tabular", STRIPED_ROWS, id="tabular-striped rows"),
    ("tabular", "tabular-2x2"),
    ("tabular", "tabular-axial-2x2"),
    ("causal_lm", "tp-x-ring"),
    ("causal_lm", "ring-zigzag-4"),
    ("causal_lm", "dp-x-tile"),
    ("pair", "pair-2x2"),
]


def _layout(layout) -> Layout:
    return Layout.load(layout) if isinstance(layout, str) else Layout.from_dict(layout)


def _example(head: str):
    """Global input, keyword arguments of forward, and the dims of input and output."""
    generator = torch.Generator().manual_seed(1)
    if head == "tokens":
        ids = torch.randint(32, (2, 21), generator=generator)
        return (
            ids,
            {"lengths": {"tokens": 21}},
            {"batch": 0, "tokens": 1},
            {"batch": 0, "tokens": 1},
        )
    if head == "pair":
        pairs = torch.rand(2, 7, 7, generator=generator, dtype=torch.float64)
        pairs[pairs < 0.3] = float("nan")
        dims = {"batch": 0, "rows": 1, "columns": 2}
        return pairs, {"lengths": {"rows": 7, "columns": 7}}, dims, dims
    cells = torch.randn(2, 13, 5, generator=generator, dtype=torch.float64)
    cells[0, 2, 1] = cells[1, 11, 0] = float("nan")
    cells[..., -1] = torch.randint(3, (2, 13), generator=generator).double()
    given = {"train": 8, "lengths": {"rows": 13, "features": 5}}
    return cells, given, {"batch": 0, "rows": 1, "features": 2}, {"batch": 0, "rows": 1}


def _run(name: str, layout: Layout, example=None):
    """Local output and synced parameter gradients for a fixed random weighting of the output."""
    spec = ModelSpec.load(name)
    model = compose(spec, layout, seed=3, dtype=torch.float64)
    x, given, dims, out_dims = example or _example(spec.head)
    out = model(layout.shard(x, dims), **given)
    full = (*x.shape[: len(out_dims)], *out.shape[len(out_dims) :])
    weights = draw(full, seed=2)
    weights = layout.shard(weights, out_dims)
    layout.mean((out * weights).sum(), out.numel()).backward()
    layout.sync_gradients(model)
    return model, out.detach(), out_dims


@pytest.mark.few(5)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_model_computes_the_same_on_layout_as_on_one_device(name, layout):
    _check_same(name, _layout(layout))


@pytest.mark.parametrize(
    ("axis", "strategy"),
    [(a, s) for a in ("rows", "features") for s in ("ring", "pass_q", "ulysses", "axial")],
)
def test_ranks_may_be_left_without_rows_or_features(axis, strategy):
    cells = torch.randn(2, 5, 3, dtype=torch.float64)
    cells[..., -1] = torch.randint(3, (2, 5)).double()
    given = {"train": 3, "lengths": {"rows": 5, "features": 3}}
    example = cells, given, {"batch": 0, "rows": 1, "features": 2}, {"batch": 0, "rows": 1}
    attend = {axis: [{"strategy": strategy, "on": "x"}]}
    layout = {"mesh": {"x": 4}, "shard": {axis: ["x"]}, "attend": attend}
    _check_same("tabular", Layout.from_dict(layout), example, all_used=False)


def _check_same(name: str, layout: Layout, example=None, *, all_used: bool = True) -> None:
    reference, expected, out_dims = _run(name, Layout.single(), example)
    heads = {n for n, m in reference.named_modules() if isinstance(m, HeadWeight)}

    def rank(transport):
        on = layout.on(transport)
        model, out, _ = _run(name, on, example)
        torch.testing.assert_close(out, on.shard(expected, out_dims), rtol=0, atol=1e-12)
        for (key, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            whole = q.grad
            if key.removesuffix(".weight") in heads:
                count = spec_heads(whole, model)
                whole = on.shard(whole.unflatten(0, (count, -1)), {"heads": 0}).flatten(0, 1)
            assert not all_used or whole.abs().max() > 0, f"{key} has no gradient on one device"
            assert (p.grad - whole).abs().max() < 1e-12, key

    run_threads(dict(layout.mesh), rank)


def spec_heads(weight: torch.Tensor, model: nn.Module) -> int:
    sizes = model.spec.sizes
    return weight.shape[0] // (sizes.embed // sizes.heads)


@pytest.mark.parametrize("line", ["tokens: ring=2", "tokens: ulysses=2"])
@pytest.mark.parametrize("module", [MultiAxisAttention, weft.nn.GatedDeltaNet])
def test_lengths_misspelt_on_one_rank_are_refused_on_all(module, line):
    def rank(layout):
        layer = module(8, 2, axis="tokens", layout=layout)
        lengths = {"tokens"[: 6 - layout.rank]: 4}
        return refused(lambda: layer(torch.zeros(1, 2, 8), lengths=lengths))

    for said in weft.on_threads(Layout.parse(line), rank):
        assert said.startswith("ShapeError")
        assert "lengths has 'token', which is none of the axes" in said


def test_attention_of_rows_among_themselves_refused_where_queries_lie_whole():
    layout = {"mesh": {"kv": 2}, "replicate": ["kv"]}
    layout |= {"attend": {"rows": [{"strategy": "kv_parallel", "on": "kv"}]}}

    def rank(transport):
        compose("tabular", Layout.from_dict(layout).on(transport))(torch.zeros(1, 4, 3), train=2)

    with pytest.raises(ShapeError, match="queries of axis 'rows' whole and their keys split: att"):
        run_threads({"kv": 2}, rank)


@pytest.mark.parametrize("features", ["local", "ring=2"])
def test_loss_of_gathered_logits_counts_once_where_ranks_split_features(features):
    cells, given, dims, out_dims = _example("table")
    classes = cells[:, 8:, -1].long().flatten()

    def rank(layout):
        model = compose("tabular", layout, seed=3, dtype=torch.float64)
        logits = layout.gather(model(layout.shard(cells, dims), **given), out_dims)
        loss = nn.functional.cross_entropy(logits[:, 8:].flatten(0, 1), classes)
        layout.once(loss, "features").backward()
        layout.sync_gradients(model)
        return [p.grad for p in model.parameters()]

    wanted = rank(Layout.single())
    for found in weft.on_threads(Layout.parse(f"rows: ring=2; features: {features}"), rank):
        torch.testing.assert_close(found, wanted)


# -- MultiAxisAttention ----------------------------------------------------------------------------


def _by_hand(module: MultiAxisAttention, x, context, attended: list[int], allowed=None):
    """Softmax attention written out, attended dims moved last and flattened."""
    kept = [d for d in range(x.ndim - 1) if d not in attended]

    def heads(t, weight):
        t = t.permute(*kept, *attended, t.ndim - 1)
        t = t.flatten(len(kept), -2) @ weight.T  # ... n h*d
        return t.unflatten(-1, (-1, module.head_dim)).transpose(-3, -2)  # ... h n d

    q = heads(x, module.query.weight)
    k, v = heads(context, module.key.weight), heads(context, module.value.weight)
    group = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    scores = q @ k.transpose(-1, -2) * module.head_dim**-0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(-3, -2).flatten(-2) @ module.out.weight
    sizes = [x.shape[d] for d in (*kept, *attended)]
    order = [(*kept, *attended).index(d) for d in range(x.ndim - 1)]
    return out.unflatten(len(kept), sizes[len(kept) :]).permute(*order, x.ndim - 1)


@pytest.mark.parametrize(
    ("axis", "attended"),
    [
        ("rows", [1]),
        ("features", [2]),
        (1, [1]),
        (-2, [2]),
        (("rows", "features"), [1, 2]),
        (("features", "rows"), [2, 1]),
        ("batch", [0]),
    ],
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_over_any_axis_is_softmax_attention_over_that_axis(axis, attended, kv_heads):
    module = MultiAxisAttention(16, 4, axis=axis, axes=GRID, kv_heads=kv_heads, dtype=torch.float64)
    x = torch.randn(2, 5, 3, 16, dtype=torch.float64)
    torch.testing.assert_close(module(x), _by_hand(module, x, x, attended))


def test_keys_and_values_may_come_from_another_tensor():
    module = MultiAxisAttention(16, 2, axis="rows", axes=GRID, dtype=torch.float64)
    x = torch.randn(2, 5, 3, 16, dtype=torch.float64)
    context = torch.randn(2, 9, 3, 16, dtype=torch.float64)
    torch.testing.assert_close(module(x, context), _by_hand(module, x, context, [1]))


RING = {
    "mesh": {"r": 3},
    "shard": {"rows": ["r"]},
    "attend": {"rows": [{"strategy": "ring", "on": "r"}]},
}
SHARED = {
    "mesh": {"r": 3},
    "shard": {"rows": ["r"]},
    "attend": {"rows": [{"strategy": "shared_context", "on": "r"}]},
}


@pytest.mark.parametrize(
    ("layout", "options", "context_length"),
    [
        (RING, {"axis": "rows"}, None),
        (RING, {"axis": ("rows", "features")}, None),
        (RING, {"axis": ("features", "rows")}, None),
        (RING, {"axis": "features"}, None),
        (RING, {"axis": "rows", "rope": True, "qk_norm": True}, 11),
        (SHARED, {"axis": "rows", "rope": True, "qk_norm": True}, 4),
    ],
)
def test_attention_and_its_gradients_are_the_same_on_a_layout(layout, options, context_length):
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(2, 2, 7, 3, 16, generator=generator, dtype=torch.float64)
    context = None
    if context_length:
        context = torch.randn(2, context_length, 3, 16, generator=generator, dtype=torch.float64)
    whole = {"rows": context_length, "features": 3} if context_length else None

    def run(on: Layout):
        generator = torch.Generator().manual_seed(5)
        place = {"axes": GRID, "generator": generator, "dtype": torch.float64}
        module = MultiAxisAttention(16, 4, kv_heads=2, layout=on, **options, **place)
        local, source = on.shard(x, {"rows": 1}).clone().requires_grad_(), context
        if context is not None and layout is not SHARED:
            source = on.shard(context, {"rows": 1})
        out = module(local, source, lengths={"rows": 7, "features": 3}, context_lengths=whole)
        (out * on.shard(weights, {"rows": 1})).sum().backward()
        on.sync_gradients(module)
        return out, local.grad, [p.grad for p in module.parameters()]

    expected, expected_x, expected_parameters = run(Layout.single())

    def rank(transport):
        on = Layout.from_dict(layout).on(transport)
        out, grad_x, parameters = run(on)
        torch.testing.assert_close(out, on.shard(expected, {"rows": 1}))
        torch.testing.assert_close(grad_x, on.shard(expected_x, {"rows": 1}))
        torch.testing.assert_close(parameters, expected_parameters)

    run_threads({"r": 3}, rank)


@pytest.mark.parametrize(
    ("line", "axis"),
    [
        ("rows: ring=2 x shared_context=2", "rows"),
        ("rows: shared_context=2 x pass_q=2", "rows"),
        ("rows(zigzag): shared_context=2 x ring=2", "rows"),
        ("rows+features: tile=2x2", ("rows", "features")),
        ("rows: ring=2 x shared_context=2", ("rows", "features")),
    ],
)
def test_rotary_keys_may_be_replicated_and_split(line, axis):
    x, weights = draw(2, 7, 3, 16), draw(2, 7, 3, 16, seed=1)
    context, dims = draw(2, 5, 3, 16, seed=2), {"rows": 1, "features": 2}

    def run(on: Layout):
        generator = torch.Generator().manual_seed(5)
        place = {"axes": GRID, "generator": generator, "dtype": torch.float64}
        module = MultiAxisAttention(16, 4, axis=axis, rope=True, layout=on, **place)
        local = on.shard(x, dims).clone().requires_grad_()
        keys = [name for name in dims if name in on.attend]
        source = on.shard(context, dims, keys=keys)
        whole = {"lengths": {"rows": 7, "features": 3}}
        whole["context_lengths"] = {"rows": 5, "features": 3}
        out = module(local, source, **whole)
        (out * on.shard(weights, dims)).sum().backward()
        on.sync_gradients(module)
        found = [on.gather(t, dims) for t in (out.detach(), local.grad)]
        return *found, *(p.grad for p in module.parameters())

    wanted = run(Layout.single())
    for found in weft.on_threads(Layout.parse(line), run):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_rejects_tensors_with_other_axes_and_missing_contexts():
    module = MultiAxisAttention(16, 4, axis="rows", axes=GRID)
    with pytest.raises(ShapeError, match=r"x must have the axes .* embed = 16, found shape \(2, 5"):
        module(torch.randn(2, 5, 16))
    with pytest.raises(ShapeError, match=r"context must have .*\(2, 5, 3, 8\)"):
        module(torch.randn(2, 5, 3, 16), torch.randn(2, 5, 3, 8))

    def rank(transport):
        layout = Layout.from_dict(SHARED).on(transport)
        MultiAxisAttention(16, 4, axis="rows", axes=GRID, layout=layout)(torch.randn(2, 5, 3, 16))

    with pytest.raises(ShapeError, match=r"splits axis 'rows' but has its keys R .* as context"):
        run_threads({"r": 3}, rank)


@pytest.mark.parametrize("given_to", ["module", "forward"])
def test_mask_of_the_module_or_of_the_call_is_honoured(given_to):
    mask = weft.FirstKeys(3)
    at_rest, in_call = (mask, None) if given_to == "module" else (None, mask)
    module = MultiAxisAttention(16, 2, axis=1, axes=GRID, mask=at_rest, dtype=torch.float64)
    x = torch.randn(2, 5, 3, 16, dtype=torch.float64)
    allowed = (torch.arange(5) < 3).expand(5, 5)
    torch.testing.assert_close(module(x, mask=in_call), _by_hand(module, x, x, [1], allowed))


def test_rotary_scores_depend_on_distance_only():
    module = MultiAxisAttention(16, 2, axis="tokens", rope=True, qk_norm=True, dtype=torch.float64)
    x = torch.randn(1, 1, 16, dtype=torch.float64).expand(1, 6, 16)
    other = torch.randn(1, 6, 16, dtype=torch.float64)
    shifted = torch.cat([other[:, :2], x[:, :4]], dim=1)
    torch.testing.assert_close(module(x), x @ module.value.weight.T @ module.out.weight)
    assert (module(shifted) - module(shifted.roll(1, 1)).roll(-1, 1)).abs().max() > 1e-6


def test_key_projections_may_start_as_copies_of_the_query_projections():
    module = MultiAxisAttention(16, 4, axis="tokens", kv_heads=2, init_k_from_q=True)
    query = module.query.weight.unflatten(0, (4, 4))
    assert torch.equal(module.key.weight.unflatten(0, (2, 4)), query[::2])


@pytest.mark.parametrize(
    ("axis", "text"),
    [("cells", "'cells'"), (3, "'embed'"), (("rows", 1), "'rows'"), ((), "no axis")],
)
def test_rejects_axes_that_cannot_be_attended(axis, text):
    with pytest.raises(DeclarationError, match=text):
        resolve_axes(axis, GRID)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "text"),
    [(3, None, "embed_dim=16"), (4, 3, "kv_heads=3"), (1, 1, "num_heads=1")],
)
def test_rejects_heads_that_do_not_divide(heads, kv_heads, text):
    def rank(transport):
        layout = Layout.from_dict(HEADS).on(transport)
        MultiAxisAttention(16, heads, axis="tokens", kv_heads=kv_heads, layout=layout)

    with pytest.raises(DeclarationError, match=text):
        run_threads({"tp": 2}, rank)


# -- the table model -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table_model():
    return compose("tabular", seed=5)


def test_no_test_row_changes_another_rows_output(table_model):
    cells, given, _, _ = _example("table")
    cells = cells.float()
    before = table_model(cells, **given)
    cells[:, 10] = torch.tensor([50.0, -3.0, float("nan"), 1e9, 2.0])
    after = table_model(cells, **given)
    others = [i for i in range(13) if i != 10]
    assert (after[:, others] - before[:, others]).abs().max() == 0
    assert (after[:, 10] - before[:, 10]).abs().max() > 1e-3


def test_classes_of_test_rows_are_never_read(table_model):
    cells, given, _, _ = _example("table")
    before = table_model(cells.float(), **given)
    cells[:, 8:, -1] = float("nan")
    assert torch.equal(table_model(cells.float(), **given), before)


def test_a_class_the_model_does_not_know_is_an_error(table_model):
    cells, given, _, _ = _example("table")
    cells[0, 0, -1] = 11
    with pytest.raises(IndexError):
        table_model(cells.float(), **given)


def test_every_training_row_and_every_feature_matters(table_model):
    cells, given, _, _ = _example("table")
    cells = cells.float()
    before = table_model(cells, **given)[:, 8:]
    for row, column in [(0, 0), (3, 2), (7, 3), (5, 4)]:
        changed = cells.clone()
        changed[:, row, column] = 2.0 - cells[:, row, column]
        assert (table_model(changed, **given)[:, 8:] - before).abs().max() > 1e-6


def test_units_of_a_feature_do_not_matter(table_model):
    cells, given, _, _ = _example("table")
    before = table_model(cells.float(), **given)
    cells[..., 2] = 1000.0 * cells[..., 2] + 30.0
    torch.testing.assert_close(table_model(cells.float(), **given), before, atol=1e-4, rtol=1e-3)


def test_statistics_come_from_training_rows_alone_and_skip_gaps():
    cells = torch.tensor([[1.0, 7.0], [3.0, 7.0], [float("nan"), 7.0], [8.0, 9.0]])[None].double()
    known = torch.tensor([True, True, True, False])
    out = standardise_columns(cells, *column_statistics(cells, known, Layout.single()))
    squashed = 4.0 * torch.tanh(torch.tensor([-1.0, 1.0, 6.0], dtype=torch.float64) / 4.0)
    torch.testing.assert_close(out[0, [0, 1, 3], 0], squashed)
    assert out[0, 2, 0].isnan()
    assert (out[0, :, 1] == 0).all()


# -- model files -----------------------------------------------------------------------------------


def _model_file(**changes) -> dict:
    return {
        "head": "table",
        "axes": list(GRID),
        "sizes": {"embed": 8, "heads": 2, "classes": 3},
        "block": [{"attend": "rows", "mask": "first-keys"}, {"mlp": 16}],
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"colour": 1}, r"my\.toml: unknown key 'colour'"),
        ({"head": "tree"}, r"head = 'tree': there is no such head; known: .*weft.register_head"),
        ({"axes": ["batch", "rows", "embed"]}, r"needs 4 different axes"),
        ({"axes": ["batch", "heads", "features", "embed"]}, r"'heads' is reserved"),
        ({"sizes": {"embed": 8, "heads": 3, "classes": 3}}, r"sizes: embed = 8 is not a multiple"),
        ({"block": [{"attend": "rows", "heads": 3}]}, r"embed = 8 must be a multiple of heads = 3"),
        ({"block": [{"attend": "rows", "kv_heads": 3}]}, r"and that of kv_heads = 3"),
        ({"sizes": {"embed": 8, "heads": 2}}, r"needs sizes\.classes"),
        ({"block": [{"attend": "lines"}]}, r"no axis 'lines'.*'rows', 'features'"),
        (
            {"block": [{"attend": "rows", "maks": "full"}]},
            r"unknown key 'block\.0\.maks'; did you mean 'mask'",
        ),
        ({"block": [{"attend": "rows", "mask": "casual"}]}, r"'casual'; did you mean 'causal'"),
        ({"block": [{"attend": "rows", "mask": {"window": 4}}]}, r"takes \[left, right\].* 4$"),
        ({"block": [{"mlp": 8, "attend": "rows"}]}, r"block\.0.*: a block has exactly one of"),
        ({"block": [{"attend": "rows", "rope": 3}]}, r"rope: 3: write true, or a list of attended"),
        ({"block": [{"attend": "rows", "bias": "alibbi"}]}, r"'alibbi' is no bias; write 'alibi'"),
        ({"block": [{"attend": "rows", "bias": {"alibi": 8}}]}, "'alibi' takes nothing, found 8"),
        ({"block": [{"attend": "rows", "scale": True}]}, r"block\.0\.scale = True: give a number"),
        ({"sizes": {"embed": 16, "heads": True}}, r"heads = True: give a whole number"),
        ({"block": [{"mlp": 8}], "repeat": True}, "repeat = True: give a whole number"),
        (
            {"train": {"length": {"rows": [True, 4]}}},
            r"length\.rows\.0 = True: give a whole number",
        ),
        ({"block": [{"attend": "rows", "context": "z"}]}, r"no context is called 'z'"),
        ({"block": [{"repeat": 2, "block": [{"mpl": 3}]}]}, r"block\.0\.block\.0.*exactly one of"),
        (
            {"sizes": {"embed": 8, "heads": 2, "classes": 3, "clases": 1}},
            r"'sizes.clases'; did you",
        ),
        ({"block": [{"mlp": 0}]}, r"my\.toml: block\.0\.mlp = 0: give 1 or more$"),
        ({"train": {"length": {"lines": [1, 2]}}}, r"train\.length names axis 'lines'"),
        ({"train": {"length": {"rows": [9, 2]}}}, r"length\.rows = \[9, 2\]: give the smallest"),
    ],
)
def test_rejects_model_files_by_file_key_and_value(changes, text):
    with pytest.raises(DeclarationError, match=text):
        ModelSpec.from_dict(_model_file(**changes), source="my.toml")


def test_model_specs_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        ModelSpec.load("tabular").repeat = 9


@pytest.mark.parametrize(
    ("model", "layout", "text"),
    [
        ("tabular", "ring-2", "shards axis 'tokens', which model 'tabular' does not have"),
        ("causal_lm", {"mesh": {"tp": 3}, "shard": {"heads": ["tp"]}}, "heads=4 .* multiple of 3"),
        ("tabular", {"mesh": {"r": 2}, "shard": {"rows": ["r"]}}, r"\[attend\] does not say how"),
    ],
)
def test_rejects_layouts_that_do_not_fit_the_model(model, layout, text):
    layout = _layout(layout)
    with pytest.raises(DeclarationError, match=text):
        run_threads(dict(layout.mesh), lambda transport: compose(model, layout.on(transport)))


def test_a_user_may_bring_a_model_file_of_their_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'head = "table"\naxes = ["batch", "samples", "genes", "embed"]\n'
        "sizes = { embed = 8, heads = 2, classes = 2 }\n"
        'block = [{ attend = ["samples", "genes"] }, { mlp = 8 }]\n'
    )
    model = compose(path)
    assert model.spec.name == "mine"
    assert model(torch.zeros(1, 6, 4), train=4).shape == (1, 6, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_columns_are_standardised_before_they_are_rounded(dtype):
    years = torch.randint(2000, 2016, (1, 60, 3), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(60)[None, :, None] % 2
    cells = torch.cat([years, labels], -1).float()
    near = torch.cat([(years - 2000).float(), labels.float()], -1)

    model = compose("tabular", dtype=dtype)
    with torch.no_grad():
        far, close = (model(given, train=50).float() for given in (cells, near))
    assert far.isfinite().all()
    # A column's offset is no part of what the model sees; rounding before made it 0.1 and more.
    assert (far - close).abs().max() < 0.03


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"mask": weft.Causal()}, "mask"),
        ({"bias": weft.alibi(2)}, "bias"),
        ({"rope": True}, "rope"),
    ],
)
def test_kept_keys_attended_by_calls_that_say_where_they_are(options, what):
    attend, z = MultiAxisAttention(16, 2, axis="tokens", **options), torch.randn(1, 5, 16)
    k, v = attend.keys_values(z)
    with pytest.raises(DeclarationError, match=f"this attention has .*{what}"):
        attend.attend(z, k, v, {"tokens": 5})
    plain = MultiAxisAttention(16, 2, axis="tokens")
    k, v = plain.keys_values(z)
    assert (plain.attend(z, k, v, {"tokens": 5}) - plain(z)).abs().max() < 1e-6


@pytest.mark.parametrize("line", [None, "tokens(zigzag): ring=2", "tokens: ulysses=2"])
def test_later_queries_attend_to_kept_keys_under_mask_and_rope(line):
    """Eight tokens, then five: keys of both, and of queries of the five alone."""
    x, lengths, first = torch.randn(2, 13, 16).double(), {"tokens": 13}, {"tokens": 8}

    def rank(layout):
        made = torch.Generator().manual_seed(0)
        options = {"rope": True, "qk_norm": True, "kv_heads": 2, "mask": weft.Causal()}
        kinds = {"dtype": torch.float64, "generator": made, "layout": layout}
        attend = MultiAxisAttention(16, 4, axis="tokens", **options, **kinds)
        own = layout.shard(x, {"tokens": 1})
        k, v = attend.keys_values(own, lengths)
        last, five = layout.shard(x[:, 8:], {"tokens": 1}), {"tokens": 5}
        if layout.world_size == 1:
            later = attend.keys_values(last, five, first=first)
            before = attend.keys_values(x[:, :8])
            k, v = (torch.cat(pair, 2) for pair in zip(before, later))
        mask = weft.Causal(offset=8)
        out = attend.attend(last, k, v, lengths, five, mask=mask, first=first)
        both = (out, five), (attend(own, lengths=lengths), lengths)
        return [layout.gather(t.detach(), {"tokens": 1}) for t, _ in both]

    layout = weft.Layout.single() if line is None else weft.Layout.parse(line)
    ranks = [rank(layout)] if line is None else weft.on_threads(layout, rank)
    for out, want in ranks:
        assert (out - want[:, 8:]).abs().max() < 1e-12
