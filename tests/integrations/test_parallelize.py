"""`weft.parallelize` and `weft.restore`: whose model it is, and what they leave behind."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import weft
from weft import DeclarationError, Layout, UnsupportedError

tabpfn = pytest.importorskip("tabpfn.architectures.tabpfn_v2")
hf = pytest.importorskip("transformers")
LAYOUT = Layout.parse("rows: ring=2")


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2)).eval()


def table_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "TabICL":
        from tabicl._model.tabicl import TabICL

        return TabICL(max_classes=3).train()
    if kind == "TabPFN v3":
        from tabpfn.architectures import tabpfn_v3

        config = tabpfn_v3.TabPFNV3Config(
            max_num_classes=10, num_buckets=20, embed_dim=16, dist_embed_num_blocks=2,
            dist_embed_num_heads=2, dist_embed_num_inducing_points=3, feat_agg_num_blocks=2,
            feat_agg_num_heads=2, feat_agg_num_cls_tokens=2, nlayers=2, icl_num_heads=4,
            icl_num_kv_heads=2, decoder_num_heads=4, decoder_head_dim=8,
        )  # fmt: skip
        model = tabpfn_v3.get_architecture(config)
    else:
        config = tabpfn.TabPFNV2Config(
            max_num_classes=3, num_buckets=5, emsize=8, nlayers=1, nhead=2, features_per_group=2
        )
        model = tabpfn.get_architecture(config)
    for p in model.parameters():  # some begin as zeros
        nn.init.normal_(p, std=0.1)
    return model


def predict(kind: str, model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)  # ranks are threads, and share torch's own
    x = torch.randn(8, 1, 4, generator=generator)
    y = torch.tensor([[0.0], [1], [2], [0], [1]])
    return model(x.transpose(0, 1), y.T) if kind == "TabICL" else model(x, y)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["TabICL", "TabPFN v2", "TabPFN v3"])
def test_a_table_model_is_restored(kind: str):
    """Neither hooks nor modules of weft's are left, and it goes onto another layout."""
    model = table_model(kind)
    before = {name: type(module) for name, module in model.named_modules()}
    expected = predict(kind, model)

    def work(layout: Layout) -> torch.Tensor:
        own = table_model(kind)
        own.load_state_dict(model.state_dict())
        parallelized = weft.parallelize(own, layout)
        out = predict(kind, parallelized)
        with pytest.raises(DeclarationError, match=r"parallelized already; weft\.restore"):
            weft.parallelize(own, layout)
        assert weft.restore(own) is own
        assert {name: type(module) for name, module in own.named_modules()} == before
        hooks = [m for m in own.modules() if m._forward_hooks or m._forward_pre_hooks]
        assert not hooks
        assert all("forward" not in vars(m) for m in own.modules())
        torch.testing.assert_close(predict(kind, own), expected, rtol=0, atol=0)
        torch.testing.assert_close(predict(kind, weft.parallelize(own, layout)), out)
        return out

    for out in weft.on_threads(LAYOUT, work):
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def parallelized(kind: str) -> nn.Module:
    """A model of a kind on one device, with all hooks and functions of weft's."""
    layout = Layout.single()
    if kind == "transformers":
        return weft.parallelize(gpt2(), layout)
    if kind == "fields":
        model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4))
        return weft.parallelize(model, layout, dims={"height": -2})
    if kind == "diffusers":
        diffusers = pytest.importorskip("diffusers")
        model = diffusers.FluxTransformer2DModel(
            in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8,
            num_attention_heads=2, joint_attention_dim=8, pooled_projection_dim=8,
            axes_dims_rope=(2, 2, 4),
        )  # fmt: skip
        return weft.parallelize(model, layout)
    return weft.parallelize(table_model(kind), layout)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "kind", ["fields", "TabICL", "transformers", "diffusers", "TabPFN v2", "TabPFN v3"]
)
def test_a_parallelized_model_is_not_pickled(kind: str):
    """Its functions belong to this process: alone, in a container, and by `torch.save`."""
    model = parallelized(kind)
    ways = {
        "pickle": lambda: pickle.dumps(model),
        "torch.save": lambda: torch.save(nn.ModuleDict({"model": model}), io.BytesIO()),
    }
    if kind != "transformers":  # of which a copy is parallelized, too
        ways["copy"] = lambda: copy.deepcopy(nn.ModuleList([model]))
    for way in ways.values():
        with pytest.raises(DeclarationError, match=r"weft\.restore\(model\) first"):
            way()
    restored = weft.restore(model)
    weights = pickle.loads(pickle.dumps(restored)).state_dict()
    assert all(torch.equal(p, weights[name]) for name, p in restored.state_dict().items())
    copy.deepcopy(restored)


def call(kind: str, model: nn.Module) -> torch.Tensor:
    if kind == "transformers":
        return model(input_ids=torch.arange(8)[None]).logits
    return model(torch.ones(1, 3, 6, 5)) if kind == "fields" else predict(kind, model)


def image_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Linear(5, 5))


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=10, hidden_size=8, intermediate_size=9, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).eval()


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["transformers", "fields", "TabICL", "TabPFN v2", "TabPFN v3"])
def test_layers_that_round_by_a_whole_tensor_are_refused(kind: str):
    """`quantize_dynamic` after `parallelize`: every rank would round by its own tokens."""
    lines = {"transformers": "tokens: ring=2", "fields": "height: gather=2"}

    def work(layout: Layout) -> None:
        made = {"transformers": llama, "fields": image_model}.get(kind, lambda: table_model(kind))
        model = weft.parallelize(made(), layout)
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)
        with pytest.raises(UnsupportedError, match=r"dynamic.*rounds by a scale of all tokens"):
            call(kind, model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weft.on_threads(Layout.parse(lines.get(kind, "rows: ring=2")), work)


class RoundedLinear(nn.Linear):
    """A linear layer whose weights are rounded, as packages of quantization put in place."""

    @classmethod
    def put_in(cls, model: nn.Module) -> None:
        for module in [*model.modules()]:
            for name, child in [*module.named_children()]:
                if type(child) is nn.Linear:
                    rounded = cls(child.in_features, child.out_features, child.bias is not None)
                    rounded.load_state_dict(child.state_dict())
                    setattr(module, name, rounded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, (self.weight * 64).round() / 64, self.bias)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["transformers", "fields"])
def test_layers_replaced_after_parallelize_compute_as_on_one_device(kind: str):
    make = {"transformers": llama, "fields": image_model}[kind]
    source = make()  # once: ranks are threads, and share torch's generator
    alone = copy.deepcopy(source)
    before = call(kind, alone)
    RoundedLinear.put_in(alone)
    expected = call(kind, alone)
    assert (before - expected).abs().max() > 1e-3

    def work(layout: Layout) -> torch.Tensor:
        model = weft.parallelize(copy.deepcopy(source), layout)
        RoundedLinear.put_in(model)
        out = call(kind, model)
        return out.full_tensor() if isinstance(out, weft.Field) else out

    line = {"transformers": "tokens: ring=2", "fields": "height: gather=2"}[kind]
    for out in weft.on_threads(Layout.parse(line), work):
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_one_line_of_the_log_says_what_is_split(caplog):
    caplog.set_level("INFO", "weft")
    config = hf.LlamaConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
    )

    def work(layout: Layout) -> None:
        weft.parallelize(hf.LlamaForCausalLM(config), layout)

    weft.on_threads(Layout.parse("tokens: ulysses=1 x ring=2"), work)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "weft"]
    assert "LlamaForCausalLM on layout 'tokens: ulysses=1 x ring=2': tokens over 2 ranks" in line
    assert "attention by ring; in one step on a rank's own: 2 LlamaMLP, 5 LlamaRMSNorm" in line


def test_transformers_model_known_in_adapters_and_by_its_own_class():
    peft = pytest.importorskip("peft")
    layout = Layout.parse("tokens: ring=2")

    class Mine(hf.GPT2LMHeadModel):
        pass

    def work(bound: Layout) -> None:
        config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
        adapted = peft.get_peft_model(gpt2(), config)
        assert weft.parallelize(adapted, bound) is adapted
        assert weft.restore(adapted) is adapted
        mine = weft.parallelize(Mine(gpt2().config).eval(), bound, "tokens")
        assert "_weft" in vars(mine)
        with pytest.raises(DeclarationError, match=r"no axis 'rows'"):
            weft.parallelize(gpt2(), bound, "rows")
        with pytest.raises(TypeError, match="text"):
            weft.parallelize(gpt2(), bound, text="whole")

    weft.on_threads(layout, work)


def attend(layout: Layout) -> nn.Module:
    return weft.MultiAxisAttention(8, 2, axis="rows", axes=("batch", "rows", "e"), layout=layout)


def test_model_of_weft_s_own_is_on_its_layout_already():
    def work(layout: Layout) -> None:
        own = nn.Sequential(attend(layout))
        with pytest.warns(UserWarning, match=r"weft\.data_parallel"):
            assert weft.parallelize(own, layout) is own
        with pytest.raises(DeclarationError, match="was made on layout"):
            weft.parallelize(own, Layout.single())
        with pytest.raises(DeclarationError, match="made for their axes"):
            weft.parallelize(own, layout, "rows")

    weft.on_threads(LAYOUT, work)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one device sums nothing
        single = attend(Layout.single())
        assert weft.parallelize(single, Layout.single()) is single


def test_other_models_and_the_old_meaning_are_refused():
    with pytest.raises(UnsupportedError, match="Linear of torch is a model of none of trans"):
        weft.parallelize(nn.Linear(2, 2), Layout.single())
    for old in ({"axis": "fsdp"}, {"axis": "ddp"}, {"way": "ddp"}, {"blocks": None}):
        with pytest.raises(DeclarationError, match=r"weft\.data_parallel\(model, layout"):
            weft.parallelize(gpt2(), Layout.single(), **old)
    for model in (nn.Linear(2, 2), gpt2()):
        with pytest.raises(DeclarationError, match="not parallelized, so nothing is undone"):
            weft.restore(model)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["transformers", "TabPFN v2", "TabICL"])
@pytest.mark.parametrize("line", ["{}: ring=2; heads: tp=2", "heads: tp=4; {}: local"])
def test_layout_that_splits_heads_is_refused_with_its_factor(kind: str, line: str):
    """Ranks along the mesh dim would repeat each other's work in silence."""
    axis = "tokens" if kind == "transformers" else "rows"
    layout = Layout.parse(line.format(axis))
    factor = layout.mesh["tp"]

    def rank(layout: Layout) -> None:
        model = gpt2() if kind == "transformers" else table_model(kind)
        refused = rf"'tp',\) split heads.* everything {factor} times over; .* '{axis}'"
        with pytest.raises(DeclarationError, match=refused):
            weft.parallelize(model, layout)

    weft.on_threads(layout, rank)


@pytest.mark.sample
def test_no_package_is_imported_to_tell_models_apart():
    code = """
import sys, torch, weft
try:
    weft.parallelize(torch.nn.Linear(2, 2), weft.Layout.single())
except weft.UnsupportedError:
    pass
print([p for p in ("transformers", "diffusers", "tabpfn", "tabicl", "peft") if p in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]", done.stdout
