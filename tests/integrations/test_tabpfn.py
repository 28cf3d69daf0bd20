"""TabPFN architectures with their rows split give their own one-process output and gradients.

The architectures are built from their configuration, with random weights.
"""

import copy
import dataclasses
import importlib.util

import pytest
import torch

import weft
from weft.comm import run_threads
from weft.errors import DeclarationError, UnsupportedError
from weft.layout import Layout

if importlib.util.find_spec("tabpfn") is None:
    pytest.skip(
        "NOT RUN: tabpfn is not installed, so nothing here says that its models work; "
        "pip install -e '.[tabpfn]'",
        allow_module_level=True,
    )

from tabpfn.architectures import tabpfn_v2, tabpfn_v2_5, tabpfn_v2_6, tabpfn_v3, tabpfn_v3_5

from weft import parallelize
from weft_integrations.tabular import parallelize_tabpfn

# fp64 throughout: two blocks of two attentions and an MLP, sums of at most 30 rows.
TOLERANCE = 1e-11

COLUMNS_AND_ROWS = {"emsize": 32, "nlayers": 2, "nhead": 4, "features_per_group": 2}
INDUCED = {"embed_dim": 16, "nlayers": 2, "dist_embed_num_blocks": 2, "dist_embed_num_heads": 2}
INDUCED |= {"dist_embed_num_inducing_points": 3, "feat_agg_num_blocks": 2, "feat_agg_num_heads": 2}
INDUCED |= {"feat_agg_num_cls_tokens": 2, "icl_num_heads": 4, "icl_num_kv_heads_test": 1}
INDUCED |= {"decoder_head_dim": 8, "decoder_num_heads": 2, "softmax_scaling_mlp_hidden_dim": 8}

ARCHITECTURES = {
    "v2": (tabpfn_v2, tabpfn_v2.TabPFNV2Config, COLUMNS_AND_ROWS),
    "v2.5": (
        tabpfn_v2_5,
        tabpfn_v2_5.TabPFNV2p5Config,
        {**COLUMNS_AND_ROWS, "num_thinking_rows": 3},
    ),
    "v2.6": (
        tabpfn_v2_6,
        tabpfn_v2_6.TabPFNV2p6Config,
        {**COLUMNS_AND_ROWS, "num_thinking_rows": 3},
    ),
    "v3": (tabpfn_v3, tabpfn_v3.TabPFNV3Config, INDUCED),
    "v3.5": (tabpfn_v3_5, tabpfn_v3_5.TabPFNV3p5Config, INDUCED),
}
ON = ["rows: ring=2", "rows: tile=2x2", "rows(striped): ring=3", "rows: ulysses=2 x ring=2"]
CASES = [(name, line) for name in ("v2.6", "v3.5") for line in ON]
CASES += [(name, "rows: tile=2x2") for name in ("v2", "v2.5", "v3")]


def build(name, classes=3):
    module, config, sizes = ARCHITECTURES[name]
    torch.manual_seed(0)
    sizes = {"max_num_classes": classes, "num_buckets": 5, **sizes}
    model = module.get_architecture(config(**sizes)).double()
    for parameter in model.parameters():
        # The package starts output projections at zero, which would hide the attention.
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def table(rows=20, train=13, columns=5, batch=2, classes=3):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, batch, columns, dtype=torch.float64, generator=generator)
    x[4, 0, 1] = float("nan")
    y = torch.randint(0, classes, (train, batch), generator=generator).double()
    return x, y


def predict(model, x, y):
    """v3.5 has heads for both tasks, and takes the task by name."""
    both = isinstance(model, tabpfn_v3_5.TabPFNV3p5)
    return model(x, y, task_type="multiclass") if both else model(x, y)


def run(model, x, y, grad_output):
    out = predict(model, x, y)
    out.backward(grad_output)
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "line"), CASES)
def test_output_and_gradients_are_those_of_one_process(name, line):
    model, (x, y) = build(name), table()
    grad_output = torch.randn(7, 2, 3, dtype=torch.float64)
    want, want_grads = run(copy.deepcopy(model), x, y, grad_output)
    largest = max(grad.norm() for grad in want_grads.values())
    layout = Layout.parse(line)

    def work(transport):
        bound = layout.on(transport)
        sharded = parallelize(copy.deepcopy(model), bound)
        assert sharded.state_dict().keys() == model.state_dict().keys()
        with weft.traffic(bound) as moved:
            out, _ = run(sharded, x, y, grad_output)
        bound.sync_gradients(sharded)
        grads = {n: p.grad for n, p in sharded.named_parameters() if n in want_grads}
        return out, grads, moved.by_tensor()

    for out, grads, moved in run_threads(layout.mesh, work, timeout=30):
        torch.testing.assert_close(out, want, rtol=TOLERANCE, atol=TOLERANCE)
        assert moved
        for key, grad in grads.items():
            # The gradient of a key's bias is rounding itself.
            size = max(want_grads[key].norm(), 1e-3 * largest)
            assert (grad - want_grads[key]).norm() / size < TOLERANCE, key


def run_embeddings(model, x, y):
    """Every tensor that the model returns beside its output, and gradients through them alone."""
    both = isinstance(model, tabpfn_v3_5.TabPFNV3p5)
    task = {"task_type": "multiclass"} if both else {}
    found = model(x, y, only_return_standard_out=False, **task)
    found = {name: t for name, t in found.items() if isinstance(t, torch.Tensor)}
    weights = torch.Generator().manual_seed(2)
    sum(
        (t * torch.randn(t.shape, dtype=t.dtype, generator=weights)).sum()
        for name, t in sorted(found.items())
        if name != "standard"
    ).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: t.detach() for name, t in found.items()}, grads


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_embeddings_and_gradients_through_them_are_those_of_one_process(name):
    model, (x, y) = build(name), table()
    want, want_grads = run_embeddings(copy.deepcopy(model), x, y)
    assert len(want) > 1
    largest = max(grad.norm() for grad in want_grads.values())

    def work(bound):
        sharded = parallelize(copy.deepcopy(model), bound)
        found, _ = run_embeddings(sharded, x, y)
        bound.sync_gradients(sharded)
        return found, {n: p.grad for n, p in sharded.named_parameters() if n in want_grads}

    for found, grads in weft.on_threads(Layout.parse("rows: ring=2"), work):
        for key, t in found.items():
            torch.testing.assert_close(t, want[key], rtol=TOLERANCE, atol=TOLERANCE)
        for key, grad in grads.items():
            size = max(want_grads[key].norm(), 1e-3 * largest)
            assert (grad - want_grads[key]).norm() / size < TOLERANCE, key


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_see_training_rows_on_other_ranks(name):
    """Without communication the output differs: the check above can fail."""
    model, (x, y) = build(name), table()
    want = predict(model, x, y)
    changed = x.clone()
    changed[0] += 1.0  # a training row, which test rows see only through attention
    assert (predict(model, changed, y) - want).abs().max() > 1e6 * TOLERANCE


@pytest.mark.parametrize("name", ["v2.6", "v3"])
def test_regression_head_and_recomputed_blocks(name):
    model, (x, y) = build(name, classes=0), table()
    grad_output = torch.randn(7, 2, 5, dtype=torch.float64)
    want, want_grads = run(copy.deepcopy(model), x, y, grad_output)
    layout = Layout.parse("rows: ring=2")

    def work(transport):
        bound = layout.on(transport)
        sharded = parallelize(copy.deepcopy(model), bound)
        default = sharded.get_default_performance_options()
        options = dataclasses.replace(default, force_recompute_layer=True)
        out = sharded(x, y, performance_options=options)
        out.backward(grad_output)
        bound.sync_gradients(sharded)
        return out, {n: p.grad for n, p in sharded.named_parameters() if n in want_grads}

    for out, grads in run_threads(layout.mesh, work, timeout=30):
        torch.testing.assert_close(out, want, rtol=TOLERANCE, atol=TOLERANCE)
        for key, grad in grads.items():
            assert (grad - want_grads[key]).norm() < TOLERANCE * want_grads[key].norm(), key


def _process_case(rank, line):
    layout = Layout.parse(line)
    layout = layout.build("cpu", timeout=30)
    model, (x, y) = build("v2.6"), table()
    grad_output = torch.ones(7, 2, 3, dtype=torch.float64)
    want, want_grads = run(copy.deepcopy(model), x, y, grad_output)
    sharded = parallelize(model, layout)
    out, _ = run(sharded, x, y, grad_output)
    layout.sync_gradients(sharded)
    grads = dict(sharded.named_parameters())
    errors = [(grads[n].grad - g).norm() / g.norm() for n, g in want_grads.items()]
    return ((out - want).norm() / want.norm()).item(), max(errors).item()


def test_on_real_processes(pool):
    for errors in pool.run(_process_case, "rows: tile=2x2", timeout=120):
        assert max(errors) < TOLERANCE


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tables_of_fewer_rows_than_ranks(name):
    model, (x, y) = build(name), table()
    wanted = {rows: predict(model, x[:rows], y[:2]) for rows in (3, 5, 7)}

    def work(bound):
        sharded = parallelize(copy.deepcopy(model), bound)
        for rows, want in wanted.items():
            out = predict(sharded, x[:rows], y[:2])
            torch.testing.assert_close(out, want, rtol=0, atol=TOLERANCE)

    weft.on_threads(Layout.parse("rows: ring=4"), work)


def by_inference(model, x, y):
    """Predictions with memory saved, in chunks of rows, and from a cache of training rows."""
    both = isinstance(model, tabpfn_v3_5.TabPFNV3p5)
    task = {"task_type": "multiclass"} if both else {}
    options = model.get_default_performance_options()
    saving = dataclasses.replace(options, save_peak_memory_factor=3)
    model.inference_chunk_cells = 40  # of v3
    with torch.no_grad():
        found = {"saving": model(x, y, performance_options=saving, **task)}
        found["whole"], cache = model(x, y, return_kv_cache=True, **task)
        rest = {"kv_cache": cache, "x_is_test_only": True}
        found["cached"] = model(x[len(y) :], y, **rest, **task)
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_inference_in_chunks_and_from_a_cache(name):
    model, (x, y) = build(name).eval(), table()
    wanted = by_inference(copy.deepcopy(model), x, y)

    def work(bound):
        found = by_inference(parallelize(copy.deepcopy(model), bound), x, y)
        for way, out in found.items():
            torch.testing.assert_close(out, wanted[way], rtol=0, atol=TOLERANCE, msg=way)

    weft.on_threads(Layout.parse("rows: ring=2"), work)


def test_keys_of_fewer_heads_travel_as_they_are():
    model, (x, y) = build("v2.6"), table()

    def work(bound):
        sharded = parallelize(copy.deepcopy(model), bound)
        with weft.traffic(bound) as moved, torch.no_grad():
            predict(sharded, x, y)
        return moved.by_tensor()

    # In two blocks, of 2 x 4 columns, keys and values of 8 fp64 of training rows: 4 heads for
    # these, and one for test rows, which the second rank has.
    row = 2 * (2 * 4) * 2 * 8 * 8
    first, second = weft.on_threads(Layout.parse("rows: ring=2"), work)
    assert (first["kv"], second["kv"]) == (4 * 4 * row, 12 * 4 * row + 12 * row)
    assert first.keys() == {"kv", "gather", "truth"}


def test_refuses_other_architectures_and_other_splits():
    with pytest.raises(UnsupportedError, match="Linear is not TabPFN"):
        parallelize_tabpfn(torch.nn.Linear(2, 2), Layout.single())
    with pytest.raises(DeclarationError, match="nothing else"):
        parallelize(build("v2.6"), Layout.parse("batch: dp=2; rows: ring=2"))
