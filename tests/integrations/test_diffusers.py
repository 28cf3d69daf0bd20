"""diffusers' transformers on a layout: outputs and gradients are those of one process."""

import copy

import pytest
import torch

import weft
from weft import Layout
from weft.errors import DeclarationError, ShapeError, UnsupportedError

diffusers = pytest.importorskip("diffusers")
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor  # noqa: E402

from weft import parallelize, restore  # noqa: E402

LIMIT = 1e-11
SHARED = {"num_attention_heads": 2, "num_layers": 1}


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=make, dtype=torch.float64)


def _flux(text: int = 5, image: int = 13, **options):
    sizes = {"patch_size": 1, "in_channels": 4, "num_single_layers": 1, "attention_head_dim": 16}
    sizes |= {"joint_attention_dim": 8, "pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8)}
    model = diffusers.FluxTransformer2DModel(**SHARED, **sizes, **options)
    return model, {
        "hidden_states": _draw(2, image, 4),
        "encoder_hidden_states": _draw(2, text, 8, seed=1),
        "pooled_projections": _draw(2, 8, seed=2),
        "timestep": torch.tensor([0.3, 0.7]).double(),
        "img_ids": 9 * _draw(image, 3).abs(),
        "txt_ids": torch.zeros(text, 3).double(),
    }


def _qwen(text: int = 5, **options):
    sizes = {"patch_size": 2, "in_channels": 16, "out_channels": 4, "attention_head_dim": 16}
    sizes |= {"joint_attention_dim": 8, "axes_dims_rope": (4, 6, 6)}
    model = diffusers.QwenImageTransformer2DModel(**SHARED, **sizes, **options)
    there = torch.ones(2, text)
    there[0, -2:] = there[1, 0] = 0
    return model, {
        "hidden_states": _draw(2, 12, 16),
        "encoder_hidden_states": _draw(2, text, 8, seed=1),
        "encoder_hidden_states_mask": there,
        "timestep": torch.tensor([0.3, 0.7]).double(),
        "img_shapes": [[(1, 3, 4)]] * 2,
    }


def _wan(per_token: bool = False, **options):
    sizes = {"attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 8}
    sizes |= {"freq_dim": 16, "ffn_dim": 16, "rope_max_seq_len": 32}
    model = diffusers.WanTransformer3DModel(**SHARED, **sizes, **options)
    return model, {
        "hidden_states": _draw(2, 4, 3, 4, 6),
        "encoder_hidden_states": _draw(2, 9, 8, seed=1),  # as many as a rank of two has tokens
        "timestep": _draw(2, 18).abs() if per_token else torch.tensor([3.0, 70.0]).double(),
    }


def _cogvideox():
    sizes = {"attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "time_embed_dim": 4}
    sizes |= {"text_embed_dim": 8, "sample_width": 6, "sample_height": 4, "sample_frames": 9}
    sizes |= {"max_text_seq_length": 5, "use_rotary_positional_embeddings": True}
    model = diffusers.CogVideoXTransformer3DModel(**SHARED, **sizes)
    return model, {
        "hidden_states": _draw(2, 3, 4, 4, 6),
        "encoder_hidden_states": _draw(2, 5, 8, seed=1),
        "timestep": torch.tensor([3, 70]),
        "image_rotary_emb": (_draw(18, 8, seed=2).cos(), _draw(18, 8, seed=2).sin()),
    }


def _hunyuan_video(**options):
    sizes = {"in_channels": 4, "out_channels": 4, "attention_head_dim": 10, "num_single_layers": 1}
    sizes |= {"num_refiner_layers": 1, "patch_size": 1, "text_embed_dim": 8}
    sizes |= {"pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4)}
    model = diffusers.HunyuanVideoTransformer3DModel(**SHARED, **sizes, **options)
    there = torch.ones(2, 5, dtype=torch.long)
    there[0, -2:] = 0
    return model, {
        "hidden_states": _draw(2, 4, 2, 3, 3),
        "encoder_hidden_states": _draw(2, 5, 8, seed=1),
        "encoder_attention_mask": there,
        "pooled_projections": _draw(2, 8, seed=2),
        "timestep": torch.tensor([3, 70]),
        "guidance": torch.tensor([1000.0, 2000.0]).double(),
    }


@pytest.fixture(autouse=True)
def _no_fp32_islands(monkeypatch):
    """Wan computes its norms in fp32, whatever its dtype: here everything is fp64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def _seeded(make, *args, **options):
    torch.manual_seed(0)
    model, inputs = make(*args, **options)
    return model.double(), inputs


def _step(model, inputs: dict) -> dict[str, torch.Tensor]:
    """Outputs, and gradients of inputs and weights."""
    names = ("hidden_states", "encoder_hidden_states")
    leaves = {n: inputs[n].clone().requires_grad_() for n in names}
    out = model(**{**inputs, **leaves}).sample
    (out * _draw(*out.shape, seed=9)).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"sample": out.detach(), **{f"d{n}": t.grad for n, t in leaves.items()}, **grads}


def _assert_exact(line: str, whole, inputs: dict, text: str = "sharded") -> None:
    wanted = _step(copy.deepcopy(whole), inputs)

    def rank(layout: Layout) -> None:
        model = parallelize(copy.deepcopy(whole), layout, text=text)
        found = _step(model, inputs)
        layout.sync_gradients(model)
        assert found.keys() == wanted.keys()
        for name, mine in found.items():
            if name in ("dhidden_states", "dencoder_hidden_states"):
                mine = layout.sum(mine, "tokens")
            size = max(1.0, wanted[name].abs().max().item())
            torch.testing.assert_close(mine, wanted[name], rtol=0, atol=LIMIT * size, msg=name)

    weft.on_threads(Layout.parse(line), rank)


FAMILIES = {
    "Flux": (_flux, {}),
    "Qwen-Image with a text mask": (_qwen, {}),
    "Wan": (_wan, {}),
    "Wan, a time step per token": (_wan, {"per_token": True}),
    "Wan, image to video": (_wan, {"image_dim": 8, "added_kv_proj_dim": 24}),
    "CogVideoX": (_cogvideox, {}),
    "HunyuanVideo with a text mask": (_hunyuan_video, {"guidance_embeds": True}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_that_of_one_process(name):
    make, options = FAMILIES[name]
    model, inputs = _seeded(make, **options)
    if "image_dim" in options:
        inputs["encoder_hidden_states"] = _draw(2, 512, 8, seed=1)
        inputs["encoder_hidden_states_image"] = _draw(2, 7, 8, seed=3)
    _assert_exact("tokens: ring=2", model, inputs)
    if name != "Wan, image to video":
        _assert_exact("tokens(zigzag): ulysses=2 x pass_q=2", model, inputs, "whole")


def test_layouts_text_and_lengths_of_all_kinds():
    for text, image, line, how in (
        (1, 6, "tokens: tile=2x2", "whole"),
        (4, 8, "tokens: gather=4", "sharded"),
        (7, 7, "tokens: ring=3", "sharded"),
    ):
        _assert_exact(line, *_seeded(_flux, text, image), how)


def test_transformer_runs_with_other_sizes_next_and_can_be_restored():
    whole, _ = _seeded(_flux)

    def rank(layout: Layout) -> None:
        model = parallelize(copy.deepcopy(whole), layout)
        with torch.no_grad():
            for text, image in ((5, 13), (6, 9)):
                inputs = _seeded(_flux, text, image)[1]
                found = model(**inputs).sample
                torch.testing.assert_close(found, whole(**inputs).sample, rtol=0, atol=LIMIT)
            with pytest.raises(DeclarationError, match="parallelized already"):
                parallelize(model, layout)
            found = restore(model)(**inputs).sample
            assert torch.equal(found, whole(**inputs).sample)

    weft.on_threads(Layout.parse("tokens: ring=2"), rank)


REFUSED = {
    "ControlNet": ({"controlnet_block_samples": [torch.zeros(2, 13, 32)]}, "controlnet_block"),
    "image prompt": ({"joint_attention_kwargs": {"ip_adapter_masks": torch.ones(1)}}, "ip_adapter"),
    "ids with a batch": ({"img_ids": torch.zeros(1, 13, 3)}, "2 dims"),
    "ids of other tokens": ({"img_ids": torch.zeros(12, 3)}, "not have the tokens of image"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_split_is_refused_on_every_rank(name):
    changes, message = REFUSED[name]
    whole, inputs = _seeded(_flux)

    def rank(layout: Layout) -> None:
        model = parallelize(copy.deepcopy(whole), layout)
        with pytest.raises((ShapeError, UnsupportedError), match=message):
            model(**{**inputs, **changes})
        model(**inputs)  # the next call is not disturbed

    weft.on_threads(Layout.parse("tokens: ring=2"), rank)


CACHES = {
    "by values": lambda: diffusers.FirstBlockCacheConfig(threshold=0.1),
    "by steps": lambda: diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
    ),
}


@pytest.mark.parametrize("name", CACHES)
def test_caches_are_refused_on_every_rank_until_they_are_off(name):
    whole, inputs = _seeded(_flux)

    def rank(layout: Layout) -> None:
        model = parallelize(copy.deepcopy(whole), layout)
        if layout.rank == 1:
            model.enable_cache(CACHES[name]())
        refused = pytest.raises((UnsupportedError, ShapeError), match="Hook, which goes by this")
        with model.cache_context("cond"), torch.no_grad(), refused:
            model(**inputs)
        if layout.rank == 1:
            model.disable_cache()
        model(**inputs)

    weft.on_threads(Layout.parse("tokens: ring=2"), rank)


def test_a_model_or_an_option_that_nobody_tried_is_refused():
    layout = Layout.single()
    with pytest.raises(UnsupportedError, match="Linear of torch is a model of none"):
        parallelize(torch.nn.Linear(2, 2), layout)
    model, _ = _seeded(_hunyuan_video, image_condition_type="token_replace")
    with pytest.raises(UnsupportedError, match="first frame"):
        parallelize(model, layout)
    model, inputs = _seeded(_flux, text=1)
    with pytest.raises(DeclarationError, match="nothing else"):
        parallelize(model, Layout.parse("tokens: ring=2; batch: dp=2").on(_transport()))
    model.enable_gradient_checkpointing()
    with pytest.raises(UnsupportedError, match="checkpointing"):
        parallelize(model, layout)(**inputs)


def _transport():
    from weft.comm.threads import Post, ThreadTransport

    return ThreadTransport({"ring": 2, "dp": 2}, 0, Post(4, 1.0))


class _Mixes(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x + x.roll(1, 1))


class _Scales(_Mixes):
    def forward(self, x):
        return 2 * self.inner(x)


class _Processor(FluxAttnProcessor):
    pass


def test_modules_of_an_unknown_package_are_refused_by_name():
    layout = Layout.single()
    model, _ = _seeded(_flux)
    model.transformer_blocks[0].ff = _Mixes(model.transformer_blocks[0].ff)
    with pytest.raises(UnsupportedError, match=r"transformer_blocks\.0\.ff of Flux.* is a _Mixes"):
        parallelize(model, layout)
    model, _ = _seeded(_flux)
    model.transformer_blocks[0].attn.processor = _Processor()
    with pytest.raises(UnsupportedError, match=r"tokenwise=\(\"transformer_blocks.0.attn.proc"):
        parallelize(model, layout)
    with pytest.raises(DeclarationError, match="no such modules"):
        parallelize(model, layout, tokenwise="transformer_blocks.7")
    model, _ = _seeded(_flux)
    model.transformer_blocks[0].ff = torch.nn.Sequential(
        model.transformer_blocks[0].ff, torch.nn.Conv1d(1, 1, 3)
    )
    with pytest.raises(UnsupportedError, match=r"transformer_blocks\.0\.ff\.1 .* is a Conv1d"):
        parallelize(model, layout)


def test_modules_that_are_said_to_be_tokenwise_are_taken():
    model, inputs = _seeded(_flux)
    model.transformer_blocks[0].ff = _Scales(model.transformer_blocks[0].ff)
    model.transformer_blocks[0].attn.processor = _Processor()
    paths = ["transformer_blocks.0.ff", "transformer_blocks.0.attn.processor"]
    wanted = model(**inputs).sample

    def rank(layout: Layout) -> None:
        sharded = parallelize(copy.deepcopy(model), layout, tokenwise=paths)
        torch.testing.assert_close(sharded(**inputs).sample, wanted, rtol=0, atol=LIMIT)

    weft.on_threads(Layout.parse("tokens: ring=2"), rank)


def test_too_few_image_tokens_are_refused_with_alternatives():
    whole, inputs = _seeded(_flux, text=1, image=8)

    def rank(layout: Layout) -> None:
        with pytest.raises(ShapeError, match=r"\[3, 3, 3, 0\]; .* 9 image tokens would do"):
            parallelize(copy.deepcopy(whole), layout, text="whole")(**inputs)

    weft.on_threads(Layout.parse("tokens: ring=4"), rank)
    _assert_exact("tokens: ring=4", *_seeded(_flux, 1, 9), "whole")


def test_fewer_text_tokens_than_ranks_need_whole_text():
    whole, inputs = _seeded(_flux, text=2)

    def rank(layout: Layout) -> None:
        with pytest.raises(ShapeError, match="text='whole'"):
            parallelize(copy.deepcopy(whole), layout)(**inputs)

    weft.on_threads(Layout.parse("tokens: ring=3"), rank)
