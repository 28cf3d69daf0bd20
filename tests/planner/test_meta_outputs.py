"""Shapes of outputs from memory: those that the functions give, of inputs that are alike alone."""

from __future__ import annotations

import pytest
import torch

from weft_planner import meta_outputs
from weft_planner.live import Live
from weft_planner.meta_outputs import on_shapes

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(meta_outputs, "_KNOWN", {})


def meta(*shape, dtype=torch.float32, **kwargs):
    return torch.empty(*shape, dtype=dtype, device="meta", **kwargs)


def facts(out):
    outs = out if isinstance(out, (tuple, list)) else [out]
    return [(t.shape, t.stride(), t.dtype, t.device.type) for t in outs]


X, Y, HALF = meta(4, 6), meta(6, 4).T, meta(4, 6, dtype=torch.bfloat16)
CALLS = [
    (aten.exp.default, (X,), {}),
    (aten.exp.default, (Y,), {}),
    (aten.exp.default, (HALF,), {}),
    (aten.exp.default, (meta(4, 6, dtype=torch.int64),), {}),
    (aten.mul.Tensor, (X, HALF), {}),
    (aten.mul.Tensor, (meta(4, 6, dtype=torch.int64), 1), {}),
    (aten.mul.Tensor, (meta(4, 6, dtype=torch.int64), 1.0), {}),
    (aten.mul.Tensor, (meta(4, 6, dtype=torch.bool), True), {}),
    (aten.mul.Tensor, (meta(4, 6, dtype=torch.bool), 1), {}),
    (aten.mm.default, (X, Y.T), {}),
    (aten.mm.default, (X, X.T), {}),
    (aten.cat.default, ([X, Y],), {}),
    (aten.cat.default, ([X, Y], 1), {}),
    (aten.cat.default, ([X, X, Y], 1), {}),
    (aten._to_copy.default, (X,), {"dtype": torch.bfloat16}),
    (aten._to_copy.default, (X,), {"dtype": torch.float64}),
    (aten.native_layer_norm.default, (X, [6], None, None, 1e-5), {}),
    (aten.zeros.default, ([3, 2],), {"device": torch.device("meta")}),
]


def test_second_call_has_the_outputs_of_the_first():
    """Calls that differ by a stride, a dtype, the type of a number or a keyword stay apart."""
    for _ in range(2):
        for func, args, kwargs in CALLS:
            assert facts(on_shapes(func, args, kwargs)) == facts(func(*args, **kwargs))
    assert len(meta_outputs._KNOWN) == len(CALLS)


def test_views_in_place_changes_and_real_tensors_are_always_called():
    x, real = meta(4, 6), torch.ones(4, 6)
    for _ in range(2):
        assert on_shapes(aten.t.default, (x,), {})._base is x
        assert on_shapes(aten.add_.Tensor, (x, 1), {}) is x
        view = on_shapes(aten._unsafe_view.default, (x, [24]), {})
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        torch.testing.assert_close(on_shapes(aten.exp.default, (real,), {}), real.exp())
        assert on_shapes(aten.nonzero.default, (torch.eye(2),), {}).tolist() == [[0, 0], [1, 1]]
        assert on_shapes(aten.ones.default, ([2],), {}).sum() == 2
    assert not meta_outputs._KNOWN


def test_memory_of_shapes_ends(monkeypatch):
    monkeypatch.setattr(meta_outputs, "_MOST", 3)
    for n in range(1, 9):
        on_shapes(aten.exp.default, (meta(n),), {})
    assert 0 < len(meta_outputs._KNOWN) <= 3


def test_more_layers_and_longer_rows_find_no_more_shapes():
    """What a step takes to count does not grow by the Python that finds shapes."""
    from weft import Layout

    hf = pytest.importorskip("transformers")
    from weft_planner.hf_config import HFModel
    from weft_planner.hf_step import count_model

    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 128, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    found = {}
    for kind, period in (("llama", 1), ("qwen3_5_text", 4)):
        for periods in (1, 2):
            config = hf.AutoConfig.for_model(kind, num_hidden_layers=period * periods, **sizes)
            counted = count_model(HFModel(config), Layout.parse("tokens: ring=2"), 16384)
            found[kind, periods] = len(meta_outputs._KNOWN)
            assert counted.layers == period * periods
        assert found[kind, 2] - found[kind, 1] < 5


def test_counts_are_those_of_the_functions_themselves(monkeypatch):
    def run():
        weight = torch.nn.Parameter(meta(64, 64))
        with Live([weight]) as live:
            for _ in range(3):
                x = meta(8, 64)
                torch.nn.functional.silu(x @ weight).pow(2).sum().backward()
        return live.peaks, live.flops, live.moved, live.now

    known = run()
    monkeypatch.setattr("weft_planner.live.on_shapes", lambda f, args, kwargs: f(*args, **kwargs))
    assert run() == known
