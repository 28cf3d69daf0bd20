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
from weft.masks import is_empty

if importlib.util.find_spec("tabpfn") is None:
    pytest.skip(
        "NOT RUN: tabpfn is not installed, so nothing here says that its models work; "
        "pip install 'weft-attention[tabpfn]'",
        allow_module_level=True,
    )

from tabpfn.architectures import tabpfn_v2, tabpfn_v2_5, tabpfn_v2_6

from weft.integrations.tabpfn import QueriesFrom, parallelize

# fp64 throughout: two blocks of two attentions and an MLP, sums of at most 30 rows.
TOLERANCE = 1e-11

ARCHITECTURES = {
    "v2.5": (tabpfn_v2_5, tabpfn_v2_5.TabPFNV2p5Config),
    "v2.6": (tabpfn_v2_6, tabpfn_v2_6.TabPFNV2p6Config),
}
LAYOUTS = ["rows: ring=2", "rows: tile=2x2", "rows(striped): ring=3", "rows: ulysses=2 x ring=2"]


def build(name, classes=3, kind=None):
    module, config = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = module.get_architecture(
        config(
            max_num_classes=classes,
            num_buckets=5,
            emsize=32,
            nlayers=2,
            nhead=4,
            features_per_group=2,
            num_thinking_rows=3,
        )
    ).double()
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


def run(model, x, y, grad_output):
    out = model(x, y)
    out.backward(grad_output)
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_output_and_gradients_are_those_of_one_process(name, line):
    model, (x, y) = build(name), table()
    grad_output = torch.randn(7, 2, 3, dtype=torch.float64)
    want, want_grads = run(copy.deepcopy(model), x, y, grad_output)
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
            worst = (grad - want_grads[key]).norm() / want_grads[key].norm()
            assert worst < TOLERANCE, key


def test_rows_see_training_rows_on_other_ranks():
    """Without communication the output differs: the check above can fail."""
    model, (x, y) = build("v2.6"), table()
    want = model(x, y)
    changed = x.clone()
    changed[0] += 1.0  # a training row, which test rows see only through attention
    assert (model(changed, y) - want).abs().max() > 1e-3


def test_regression_head_and_recomputed_blocks():
    model, (x, y) = build("v2.6", classes=0), table()
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


def test_queries_from_is_what_it_says():
    mask, index = QueriesFrom(3), torch.arange(6)
    seen = mask.allowed(index, index, index[:, None], index)
    assert seen[3:].all()
    assert not seen[:3].any()
    assert is_empty(mask, (0, 2), (0, 5))
    assert mask.is_full((3, 5), (0, 5))
    assert not mask.is_full((2, 5), (0, 5))


def test_refuses_caches_other_architectures_and_other_splits():
    layout = Layout.single()
    x, y = table()
    with pytest.raises(UnsupportedError, match="return_kv_cache"):
        parallelize(build("v2.6"), layout)(x, y, return_kv_cache=True)
    older = tabpfn_v2.get_architecture(
        tabpfn_v2.TabPFNV2Config(max_num_classes=3, num_buckets=5, emsize=32, nlayers=1, nhead=4)
    )
    with pytest.raises(UnsupportedError, match="TabPFNV2 is not TabPFN"):
        parallelize(older, layout)
    with pytest.raises(DeclarationError, match="nothing else"):
        parallelize(build("v2.6"), Layout.parse("batch: dp=2; rows: ring=2"))
