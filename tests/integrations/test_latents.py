"""Latents of transformers' multi-head latent attention travel, and the models stay as they are."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from torch import nn

if importlib.util.find_spec("transformers") is None:
    pytest.skip("NOT RUN: transformers is not installed", allow_module_level=True)

import transformers
from fp64 import InFP64, whole
from pool import Pool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import weft
from benchmarks import families
from weft import Layout
from weft.errors import DeclarationError, UnsupportedError
from weft_integrations.transformers import latents
from weft_integrations.transformers.mark import Mark

#: Families with the attention of DeepSeek V3, besides those that are always tried.
OTHERS = ["glm4_moe_lite", "youtu", "minicpm3", "longcat_flash", "axk1"]
#: These choose their keys besides.
CHOOSING = ["glm_moe_dsa", "hy_v4"]


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()


def made(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A small model of a family, in train mode without dropout."""
    name = families.KINDS["causal"][family]
    kind = getattr(transformers, name if isinstance(name, str) else name[0])
    config = families._shrunk(kind.config_class, dict(families.EXTRA.get(family, {})))
    config.attention_dropout = 0.0
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.train()


def tokens(n: int = 29) -> torch.Tensor:
    return torch.randint(3, 90, (2, n), generator=torch.Generator().manual_seed(n))


def trained(model: nn.Module, ids: torch.Tensor) -> tuple:
    """Loss, logits and gradients of a step in fp64 all through."""
    with InFP64():
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return out.loss.detach(), whole(out.logits).detach(), grads


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def compared(family: str, line: str, travel: str, change=lambda model: model) -> tuple:
    """The largest error against one device, the received bytes of a rank, and the gradients."""
    model = change(made(family))
    loss, logits, grads = trained(copy.deepcopy(model), tokens())

    def rank(layout):
        own = weft.parallelize(copy.deepcopy(model), layout, latents=travel)
        with weft.traffic() as moved:
            found = trained(own, tokens())
        return found, moved.by_tensor()

    ranks = weft.on_threads(Layout.parse(line), rank, timeout=60)
    errors = [
        gap(found[i], wanted) for found, _ in ranks for i, wanted in enumerate((loss, logits))
    ]
    for name, wanted in grads.items():
        if wanted.abs().max() > 1e-12:
            mean = sum(found[2].get(name, torch.zeros_like(wanted)) for found, _ in ranks)
            errors.append(gap(mean / len(ranks), wanted))
    return max(errors), ranks[0][1], grads


@pytest.mark.parametrize(
    ("family", "line"),
    [
        ("deepseek_v3", "tokens(zigzag): ring=2"),
        ("deepseek_v2", "tokens: ulysses=2"),
        ("kimi_linear", "tokens: ring=2"),
        pytest.param("deepseek_v3", "tokens: tile=2x2", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "tokens: ulysses=2 x ring=2", marks=pytest.mark.slow),
        ("deepseek_v32", "tokens(zigzag): ring=2"),
        *[
            pytest.param(f, "tokens(zigzag): ring=2", marks=pytest.mark.slow)
            for f in (*OTHERS, *CHOOSING)
        ],
    ],
)
def test_latents_travel_in_unmodified_models(family, line):
    error, moved, grads = compared(family, line, "latents")
    assert error < 1e-11
    assert any("kv_b_proj" in name for name in grads)
    assert moved


def test_latents_are_fewer_bytes_than_keys():
    line = "tokens(zigzag): ring=2"
    config = made("deepseek_v3").config
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    expanded = config.num_attention_heads * (
        config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    )
    error, narrow, _ = compared("deepseek_v3", line, "latents")
    assert error < 1e-11
    error, wide, _ = compared("deepseek_v3", line, "keys")
    assert error < 1e-11
    assert narrow["kv"] * expanded == wide["kv"] * latent
    assert narrow["dkv"] * expanded == wide["dkv"] * latent


def adapted(model: nn.Module, dropout: float = 0.0) -> nn.Module:
    """The model with adapters of the projection that expands latents."""
    peft = pytest.importorskip("peft", reason="NOT RUN: peft is not installed")
    options = {"r": 2, "target_modules": ["kv_b_proj"], "lora_dropout": dropout}
    model = peft.get_peft_model(model, peft.LoraConfig(**options)).double()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    return model


def test_adapters_of_the_projection_get_their_gradients():
    error, moved, grads = compared("deepseek_v3", "tokens(zigzag): ring=2", "latents", adapted)
    assert error < 1e-11
    assert any("lora_A" in name for name in grads)
    assert moved["kv"]


def test_checkpointed_layers_expand_again():
    ids, stock = tokens(16), made("deepseek_v3")

    def run(layout, checkpointed):
        model = copy.deepcopy(stock)
        weft.parallelize(model, layout, latents="latents")
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(input_ids=ids, labels=ids).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    layout = Layout.parse("tokens: ring=2")
    one, other = (weft.on_threads(layout, run, kept, timeout=60) for kept in (False, True))
    for plain, again in zip(one, other):
        assert plain.keys() == again.keys()
        assert all(gap(again[n], g) < 1e-9 for n, g in plain.items() if g.abs().max() > 1e-9)


@pytest.fixture(scope="module")
def two():
    with Pool(2, preload=("transformers", "test_latents")) as pool:
        yield pool


def _wrapped(rank, way):
    """The largest error of a gradient that torch averages over processes, and the bytes sent."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ring",))
    layout = Layout.parse("tokens(zigzag): ring=2").bind(mesh, timeout=60)
    stock, ids = made("deepseek_v3"), tokens()
    own = weft.parallelize(copy.deepcopy(stock), layout, latents="latents")
    if way == "ddp":
        options = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
        around = nn.parallel.DistributedDataParallel(own, **options)
    else:
        for block in (*own.model.layers, own):
            fully_shard(block, mesh=mesh)
            block.set_force_sum_reduction_for_comms(True)  # gloo has no average
        around = own
    if way == "fsdp with checkpoints":
        own.gradient_checkpointing_enable()
    found = []
    with weft.traffic() as moved:
        for model in (stock, around):
            model(input_ids=ids, labels=ids).loss.backward()
            grads = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
            full = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
            found.append({n: g for n, g in full.items() if g is not None and g.abs().max() > 1e-9})
    wanted, averaged = found
    return max(gap(averaged[n], g) for n, g in wanted.items()), moved.by_tensor()


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("fsdp with checkpoints", marks=pytest.mark.sample),
        pytest.param("fsdp", marks=pytest.mark.slow),
        pytest.param("ddp", marks=pytest.mark.slow),
    ],
)
def test_torch_averages_gradients_of_expanded_latents(two, way):
    for error, moved in two.run(_wrapped, way, timeout=240):
        assert error < 1e-5  # the model's norms are in fp32
        assert moved["kv"]


def _dropped(rank):
    """The bytes of keys that adapters send, without dropout and with it."""
    mesh, sent = init_device_mesh("cpu", (2,), mesh_dim_names=("ring",)), []
    layout = Layout.parse("tokens(zigzag): ring=2").bind(mesh, timeout=60)
    for dropout in (0.0, 0.5):
        model = adapted(made("deepseek_v3"), dropout)
        own = weft.parallelize(model, layout, latents="latents")
        torch.manual_seed(0)
        with weft.traffic() as moved:
            trained(own, tokens())
        sent.append(moved.by_tensor()["kv"])
    return sent


def test_adapters_with_dropout_send_keys(two):
    """A mask of dropout would not be the same again."""
    for without, dropped in two.run(_dropped, timeout=240):
        assert dropped > without


def test_generation_caches_latents_as_before():
    model = made("deepseek_v3", torch.float32).eval()
    ids, options = tokens(40), {"max_new_tokens": 3, "do_sample": False}
    wanted = copy.deepcopy(model).generate(ids, **options)

    def rank(layout):
        own = weft.parallelize(copy.deepcopy(model), layout, latents="latents")
        return own.generate(ids, **options)

    for found in weft.on_threads(Layout.parse("tokens: ring=2"), rank, timeout=60):
        assert torch.equal(found, wanted)


def test_restored_models_expand_by_themselves():
    model = made("deepseek_v3")

    def rank(layout):
        own = weft.parallelize(copy.deepcopy(model), layout)
        assert not any(map(latents.expands_latents, own.modules()))  # handed on
        return weft.restore(own)

    model = weft.on_threads(Layout.parse("tokens: ring=2"), rank)[0]
    assert sum(map(latents.expands_latents, model.modules())) == model.config.num_hidden_layers
    assert not any("_weft" in name for m in model.modules() for name in vars(m))


def test_latents_are_no_keys_for_other_code():
    both = latents.Unexpanded(torch.zeros(1), torch.zeros(1), weft.Expansion(nn.Identity()))
    assert not isinstance(both, Mark)
    for use in (lambda: both.shape, lambda: both + 1, lambda: torch.cat([both])):
        with pytest.raises(UnsupportedError, match="latents='keys'"):
            use()
    with pytest.raises(UnsupportedError, match="another value"):
        latents.taken(both, torch.zeros(1), whole=False)
    with pytest.raises(DeclarationError, match="latents='both'"):
        weft.parallelize(made("deepseek_v3"), Layout.single(), latents="both")
