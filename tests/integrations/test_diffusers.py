"""diffusers' transformers on a layout: outputs and gradients are those of one process."""

import copy
import inspect

import pytest
import torch

import weft
from weft import Layout
from weft.errors import DeclarationError, UnsupportedError

diffusers = pytest.importorskip("diffusers")
from weft import parallelize, restore  # noqa: E402
from weft_integrations.diffusers import parallelize_diffusers  # noqa: E402

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
    leaves = {n: inputs[n].clone().requires_grad_() for n in names if n in inputs}
    outs = model(**{**inputs, **leaves}, return_dict=False)[0]
    outs = dict(enumerate(outs if isinstance(outs, list) else [outs]))
    sum((out * _draw(*out.shape, seed=9)).sum() for out in outs.values()).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found = {f"out {i}": out.detach() for i, out in outs.items()}
    return {**found, **{f"d {n}": t.grad for n, t in leaves.items()}, **grads}


def _assert_exact(
    line: str, whole, inputs: dict, text: str = "sharded", limit: float = LIMIT
) -> None:
    wanted = _step(copy.deepcopy(whole), inputs)

    def rank(layout: Layout) -> None:
        model = parallelize(copy.deepcopy(whole), layout, text=text)
        found = _step(model, inputs)
        layout.sync_gradients(model)
        assert found.keys() == wanted.keys()
        for name, mine in found.items():
            size = max(1.0, wanted[name].abs().max().item())
            torch.testing.assert_close(mine, wanted[name], rtol=0, atol=limit * size, msg=name)

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


#: Sizes and inputs of transformers that have them; others are in the table.
_SIZES = {"attention_head_dim": 8, "num_attention_heads": 2, "num_layers": 2, "sample_size": 8}
_SIZES |= {"in_channels": 4, "out_channels": 4, "joint_attention_dim": 8, "condition_dim": 4}
_SIZES |= {"caption_projection_dim": 16, "pooled_projection_dim": 8, "pos_embed_max_size": 16}
_SIZES |= {"cross_attention_dim": 16, "caption_channels": 8, "text_embed_dim": 8, "text_dim": 8}
_SIZES |= {"num_single_layers": 1, "time_embed_dim": 8, "freq_dim": 16, "ffn_dim": 16}
_THERE = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
_INPUTS = {n: _draw(2, 2).abs() for n in ("original_size", "target_size", "crop_coords")}
_INPUTS |= {"encoder_hidden_states": _draw(2, 5, 8, seed=1), "encoder_attention_mask": _THERE}
_INPUTS |= {"pooled_projections": _draw(2, 8), "timestep": torch.tensor([0.3, 0.7]).double()}
_INPUTS |= {"img_ids": 9 * _draw(13, 4).abs(), "txt_ids": torch.zeros(5, 4).double()}
_INPUTS |= {"guidance": torch.tensor([3.0, 7.0]).double()}
_THREE = {n: _INPUTS[n][:, :3] for n in ("img_ids", "txt_ids")}
_STEPS = {"timestep": torch.tensor([3, 7])}
#: Transformers that nothing in weft names: latents, sizes, inputs, and what is next to one process
#: where they compute in fp32 within.
OTHERS = {
    "SD3": ((2, 4, 6, 8), {}, {}, LIMIT),
    "AuraFlow": ((2, 4, 6, 8), {"num_mmdit_layers": 1, "num_single_dit_layers": 1}, {}, LIMIT),
    "PixArt": (
        (2, 4, 8, 8),
        {"norm_num_groups": 1, "use_additional_conditions": False, "out_channels": 8},
        {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}, "attention_mask": None},
        LIMIT,
    ),
    "Sana": (
        (2, 4, 6, 8),
        {"num_cross_attention_heads": 2, "cross_attention_head_dim": 8},
        {"guidance": None},
        1e-6,
    ),
    "LTXVideo": ((2, 18, 4), {}, {"num_frames": 2, "height": 3, "width": 3}, LIMIT),
    "Mochi": ((2, 4, 2, 6, 4), {"time_embed_dim": 4}, {}, 1e-5),
    "Chroma": (
        (2, 13, 4),
        {"attention_head_dim": 16, "axes_dims_rope": (4, 4, 8), "approximator_num_channels": 8}
        | {"approximator_hidden_dim": 16, "approximator_layers": 1},
        _THREE,
        LIMIT,
    ),
    "Lumina2": (
        (2, 4, 6, 8),
        {"hidden_size": 24, "num_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 4}
        | {"num_kv_heads": 2, "multiple_of": 8, "axes_dim_rope": (2, 2, 2), "cap_feat_dim": 8}
        | {"axes_lens": (32, 32, 32)},
        {},
        LIMIT,
    ),
    "CogView4": ((2, 4, 6, 8), {"rope_axes_dim": (4, 4)}, {}, LIMIT),
    "CogView3Plus": ((2, 4, 6, 8), {}, {}, LIMIT),
    "Allegro": (
        (2, 4, 2, 8, 8),
        {"attention_head_dim": 24, "cross_attention_dim": 48, "sample_frames": 2}
        | {"sample_height": 8, "sample_width": 8},
        {"attention_mask": torch.ones(2, 2, 8, 8), **_STEPS},
        LIMIT,
    ),
    "Flux2": (
        (2, 13, 4),
        {"attention_head_dim": 16, "timestep_guidance_channels": 8, "axes_dims_rope": (4,) * 4},
        {},
        LIMIT,
    ),
    "SkyReelsV2": ((2, 4, 3, 4, 6), {"attention_head_dim": 12, "rope_max_seq_len": 32}, {}, LIMIT),
    "StableAudioDiT": (
        (2, 4, 16),
        {"sample_size": 16, "num_key_value_attention_heads": 2, "time_proj_dim": 8}
        | {"global_states_input_dim": 8, "cross_attention_input_dim": 8},
        {"global_hidden_states": _draw(2, 1, 8), "encoder_attention_mask": None}
        | {"rotary_embedding": (_draw(17, 4).cos(), _draw(17, 4).sin())},
        LIMIT,
    ),
    "Latte": (
        (2, 4, 3, 8, 8),
        {"patch_size": 2, "norm_type": "ada_norm_single", "num_embeds_ada_norm": 10}
        | {"video_length": 3, "norm_elementwise_affine": False},
        {"encoder_attention_mask": None, **_STEPS},
        LIMIT,
    ),
    "Bria": (
        (2, 13, 4),
        {"attention_head_dim": 16, "axes_dims_rope": [4, 4, 8], "pooled_projection_dim": None},
        {"guidance": None, **_THREE},
        LIMIT,
    ),
    "ZImage": (
        (1,),
        {"dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
        | {"cap_feat_dim": 8, "axes_dims": [4, 6, 6], "axes_lens": [64] * 3},
        {"x": [_draw(4, 1, 4, 6), _draw(4, 1, 6, 4, seed=5)], "t": torch.tensor([0.3, 0.7])}
        | {"cap_feats": [_draw(5, 8, seed=1), _draw(3, 8, seed=4)]},
        LIMIT,
    ),
}


def _named(name: str):
    """A transformer of the table, and its inputs."""
    shape, own, given, _ = OTHERS[name]
    kinds = (getattr(diffusers, f"{name}{end}", None) for end in _ENDS)
    kind = next(found for found in kinds if found is not None)
    sizes, known = (inspect.signature(f).parameters for f in (kind.__init__, kind.forward))
    inputs = {"hidden_states": _draw(*shape), **_INPUTS}
    return kind(**{n: x for n, x in _SIZES.items() if n in sizes} | own), {
        n: x for n, x in inputs.items() if n in known
    } | given


_ENDS = ("Transformer2DModel", "Transformer3DModel", "Model")


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:.*pad_sequence has no rule")
@pytest.mark.parametrize("name", OTHERS)
def test_transformers_that_weft_has_never_heard_of(name):
    model, given = _seeded(_named, name)
    for p in model.parameters():
        if not p.any():  # modulations begin at zero, which hides the blocks
            torch.nn.init.normal_(p, std=0.1)
    for line in ("tokens: ring=2", "tokens(zigzag): ulysses=2 x pass_q=2"):
        _assert_exact(line, model, given, limit=OTHERS[name][-1])


def test_layouts_text_and_lengths_of_all_kinds():
    for text, image, line, how in (
        (1, 6, "tokens: tile=2x2", "whole"),
        (4, 8, "tokens: gather=4", "sharded"),
        (7, 7, "tokens: ring=3", "sharded"),
        (2, 3, "tokens: ring=4", "sharded"),
        (1, 1, "tokens: ring=2", "sharded"),
    ):
        _assert_exact(line, *_seeded(_flux, text, image), how)


@pytest.mark.parametrize(
    ("text", "image", "how"), [(8, 24, "sharded"), (5, 13, "sharded"), (5, 13, "whole")]
)
def test_text_and_image_are_attended_together_as_they_are_stored(text, image, how):
    whole, inputs = _seeded(_flux, text, image)
    of_head = 2 * 2 * (text + image) * 16 * 8  # both calls, both rows, 16 fp64 numbers

    def rank(layout: Layout) -> dict[str, int]:
        model = parallelize(copy.deepcopy(whole), layout, text=how)
        with weft.traffic() as moved, torch.no_grad():
            model(**inputs)
        return {name: moved.by_tensor()[name] for name in ("qkv", "out", "kv")} | {
            "align": moved.by_tensor().get("align", 0)
        }

    found = weft.on_threads(Layout.parse("tokens: ring=2 x ulysses=2"), rank)
    sums = {name: sum(sent[name] for sent in found) for name in found[0]}
    assert sums == {"qkv": 3 * of_head, "out": of_head, "kv": 4 * of_head, "align": 0}


class _Mixes(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x + x.roll(1, 1))


def _mixed(model):
    model.transformer_blocks[0].ff = _Mixes(model.transformer_blocks[0].ff)


#: Name -> (transformer, its options, a change of it, changes of its inputs).
WAYS = {
    "recomputed blocks": (
        _hunyuan_video,
        {"guidance_embeds": True},
        lambda model: model.enable_gradient_checkpointing(),
        {},
    ),
    "a ControlNet": (
        _flux,
        {},
        lambda model: None,
        {
            "controlnet_block_samples": [_draw(2, 13, 32)],
            "controlnet_single_block_samples": [_draw(2, 13, 32)],
        },
    ),
    "a module that mixes tokens": (_flux, {}, _mixed, {}),
    "a first frame of its own": (
        _hunyuan_video,
        {"guidance_embeds": True, "image_condition_type": "token_replace"},
        lambda model: None,
        {},
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_what_users_put_into_a_transformer_is_that_of_one_process(name):
    make, options, change, changes = WAYS[name]
    model, inputs = _seeded(make, **options)
    change(model)
    _assert_exact("tokens: ring=2", model, {**inputs, **changes})


CACHES = {
    "by values": lambda: diffusers.FirstBlockCacheConfig(threshold=0.5),
    "by steps": lambda: diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
    ),
}


@pytest.mark.parametrize("name", CACHES)
def test_caches_of_steps_are_those_of_one_process(name):
    whole, inputs = _seeded(_flux)

    def steps(model) -> torch.Tensor:
        model.enable_cache(CACHES[name]())
        scales = (1 + 1e-3 * k for k in range(4))
        with model.cache_context("cond"), torch.no_grad():
            each = ({**inputs, "hidden_states": inputs["hidden_states"] * s} for s in scales)
            return torch.stack([model(**given).sample for given in each])

    wanted = steps(copy.deepcopy(whole))

    def rank(layout: Layout) -> None:
        found = steps(parallelize(copy.deepcopy(whole), layout))
        torch.testing.assert_close(found, wanted, rtol=0, atol=LIMIT)

    weft.on_threads(Layout.parse("tokens: ring=2"), rank)


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


def test_what_cannot_be_split_is_refused():
    layout = Layout.single()
    with pytest.raises(UnsupportedError, match="Linear of torch is a model of none"):
        parallelize(torch.nn.Linear(2, 2), layout)
    with pytest.raises(UnsupportedError, match="AutoencoderTiny has no list of blocks"):
        parallelize(diffusers.AutoencoderTiny(), layout)
    model, inputs = _seeded(_flux, text=1)
    with pytest.raises(DeclarationError, match="nothing else"):
        parallelize(model, Layout.parse("tokens: ring=2; batch: dp=2").on(_transport()))
    with pytest.raises(DeclarationError, match="text='half'"):
        parallelize(model, layout, text="half")
    split = parallelize(model, layout)
    split.transformer_blocks[0].attn.processor._attention_backend = "flash"
    with pytest.raises(UnsupportedError, match="attention of 'flash', which sees past"):
        split(**inputs)
    split.transformer_blocks[0].attn.processor._attention_backend = None
    split._parallel_config = object()
    with pytest.raises(UnsupportedError, match="diffusers' own parallelism"):
        split(**inputs)


class _Blocks(torch.nn.Module):
    """Blocks of rows (b, e), which are no tokens."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4)])

    def forward(self, x):
        return self.blocks[0](x)


def test_blocks_that_get_no_tokens_are_refused():
    def rank(layout: Layout) -> None:
        with pytest.raises(UnsupportedError, match="none of its blocks got tokens"):
            parallelize_diffusers(_Blocks(), layout)(torch.ones(2, 4))

    weft.on_threads(Layout.parse("tokens: ring=2"), rank)


def _transport():
    from weft.comm.threads import Post, ThreadTransport

    return ThreadTransport({"ring": 2, "dp": 2}, 0, Post(4, 1.0))
