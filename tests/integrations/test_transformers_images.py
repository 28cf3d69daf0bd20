"""Models of images with text: what their processors give, what `generate` hands on, and blocks."""

import copy
import importlib.util

import pytest
import tiny
import torch
from fp64 import whole
from tiny import SMALL, draw_ids, on_ranks, seeded

from weft.errors import ShapeError
from weft.masks import Causal, is_empty

if importlib.util.find_spec("transformers") is None:
    pytest.skip("NOT RUN: transformers is not installed", allow_module_level=True)

import transformers as hf

from weft_integrations import consistency
from weft_integrations.transformers.hooks import find_embeddings
from weft_integrations.transformers.masks import Blocks

hf.logging.set_verbosity_error()

# Sixteen roundings of fp32, in which transformers computes rotary angles, norms and losses.
FP32 = 16 * 2.0**-23
LENGTH, IMAGE = 29, 90
LAYOUTS = "tokens(zigzag): ring=2", "tokens: tile=2x2"
TEXT = SMALL | {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "initializer_range": 0.4,
}
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads"),
)
VISION = tiny.SIZES | {"num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
MARKS = {"image_token_id": IMAGE, "video_token_id": 91}


def gemma3():
    ids = {"image_token_index": IMAGE, "boi_token_index": 92, "eoi_token_index": 93}
    vision = VISION | {"vision_use_head": False}
    config = hf.Gemma3Config(
        text_config=TEXT | {"query_pre_attn_scalar": 8},
        vision_config=vision,
        mm_tokens_per_image=4,
        **ids,
    )
    return hf.Gemma3ForConditionalGeneration(config)


def gemma4():
    text = {"global_head_dim": 8, "num_global_key_value_heads": 2, "vocab_size_per_layer_input": 97}
    text |= {"hidden_size_per_layer_input": 8, "use_bidirectional_attention": "vision"}
    vision = {"num_key_value_heads": 4, "head_dim": 8, "pooling_kernel_size": 2}
    vision |= {"position_embedding_size": 64, "patch_size": 4}
    config = hf.Gemma4Config(
        text_config=TEXT | text,
        vision_config={k: v for k, v in VISION.items() if k != "image_size"} | vision,
        audio_config=None,
        **MARKS,
    )
    return hf.Gemma4ForConditionalGeneration(config)


def llava():
    text = {k: v for k, v in TEXT.items() if k not in ("sliding_window", "layer_types")}
    config = hf.LlavaConfig(
        text_config=text | {"model_type": "llama"},
        vision_config=VISION | {"model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )
    return hf.LlavaForConditionalGeneration(config)


GEMMAS = {"gemma3": (gemma3, "token_type_ids"), "gemma4": (gemma4, "mm_token_type_ids")}


def step(model, **batch):
    """The loss of a call, its logits, and the gradients of all parameters."""
    out = model(**{k: v.clone() for k, v in batch.items()})
    out.loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return out.loss.item(), whole(out.logits).detach(), grads


def check_step(model, line, batch):
    want, logits, grads = step(copy.deepcopy(model), **batch)
    ranks = on_ranks(model, line, lambda own: step(own, **batch))
    for loss, seen, _ in ranks:
        assert abs(loss - want) < FP32 * want
        assert (seen - logits).abs().max() < FP32 * logits.abs().max()
    largest = max(g.abs().max() for g in grads.values())
    for name, grad in grads.items():
        mean = torch.stack([g[name] for *_, g in ranks]).mean(0)
        assert (mean - grad).abs().max() < FP32 * largest, name


# Calls that are split are tested: one that every rank computes whole is right, too.
split = pytest.mark.filterwarnings("error:.*every rank computes all")


@split
@pytest.mark.parametrize("family", GEMMAS)
def test_text_alone_with_the_processors_token_types(family):
    make, name = GEMMAS[family]
    ids = draw_ids(2, LENGTH, 3, 80)
    batch = {"input_ids": ids, "labels": ids, name: torch.zeros_like(ids)}
    check_step(seeded(make), LAYOUTS[0], batch)


@split
@pytest.mark.parametrize(("family", "line"), list(zip(GEMMAS, LAYOUTS)))
def test_embedded_images_see_themselves_across_ranks(family, line):
    make, name = GEMMAS[family]
    ids = draw_ids(2, LENGTH, 3, 80)
    model = seeded(make)
    types = torch.zeros_like(ids)
    types[0, 5:9] = types[0, 12:17] = types[1, 20:26] = 1  # on borders of both layouts
    batch = {"labels": ids, name: types}
    if family == "gemma3":
        batch["inputs_embeds"] = model.get_input_embeddings()(ids).detach()
    else:  # whose embeddings of a layer are looked up by ids
        batch["input_ids"] = ids
    check_step(model, line, batch)


@split
def test_blocks_of_padded_rows():
    ids = draw_ids(2, LENGTH, 3, 80)
    types, padding = torch.zeros_like(ids), torch.ones_like(ids)
    types[0, 5:9] = types[1, 12:17] = 1
    padding[1, 22:] = 0
    labels = ids.where(padding == 1, -100)
    batch = {"input_ids": ids, "token_type_ids": types, "attention_mask": padding, "labels": labels}
    check_step(seeded(gemma3), LAYOUTS[0], batch)


def test_blocks_answer_as_their_ids_do():
    ids = torch.full((3, 16), -1)
    ids[0, 2:5], ids[0, 5:9], ids[1, 0:4], ids[1, 12:16] = 0, 1, 0, 1
    blocks = Blocks.of_ids(ids)
    assert blocks == Blocks((((2, 4), (5, 8)), ((0, 3), (12, 15)), ()))
    place = torch.arange(16)
    b, q, k = torch.arange(3)[:, None, None], place[:, None], place[None]
    want = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None]
    assert torch.equal(blocks.allowed(b, b * 0, q, k), want)
    every = [(low, high) for low in range(16) for high in range(low, 16)]
    for numbers in ((0, 1, 2), (0,), (2,), (1, 2)):
        part, rows = blocks.of_sequences(numbers), want[list(numbers)]
        for low, high in every:
            seen = rows[:, low : high + 1].any(0).any(0).nonzero().flatten().tolist()
            for interval in (part.keys((low, high)), part.queries((low, high))):
                assert all(interval[0] <= at <= interval[1] for at in seen)
            for other in every[::7]:
                tile = rows[:, low : high + 1, other[0] : other[1] + 1]
                assert not part.is_full((low, high), other) or tile.all()
                assert not is_empty(part, (low, high), other) or not tile.any()
    assert blocks.of_sequences((0,)).is_full((5, 6), (6, 8))
    for row in range(3):  # numbers of sequences stay those of the whole batch
        assert torch.equal(blocks.of_sequences((row,)).allowed(b[row], b[row], q, k), want[row])
    both = Causal() | blocks
    assert is_empty(both, (5, 8), (9, 15))
    assert not is_empty(both, (2, 3), (4, 4))
    assert both.diagonal((9, 11), (9, 11)) == 0
    assert both.diagonal((2, 3), (2, 4)) is None
    with pytest.raises(ShapeError, match="3 rows"):
        blocks.check(16, 16, 2)


@split
@pytest.mark.parametrize(("make", "tokens"), [(llava, 16), (gemma3, 4)])
def test_generation_with_images_gives_one_devices_tokens(make, tokens):
    ids = draw_ids(1, LENGTH, 3, 80)
    ids[0, 6 : 6 + tokens] = IMAGE
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(2)).double()
    batch = {"input_ids": ids, "pixel_values": pixels}
    if make is gemma3:
        batch["token_type_ids"] = (ids == IMAGE).long()
    options = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}

    def run(model):
        return model.generate(**batch, suppress_tokens=[IMAGE], **options)

    model = seeded(make)
    want = run(model)
    assert want.shape == (1, LENGTH + 6)
    got = on_ranks(model, LAYOUTS[0], run)
    assert all(torch.equal(tokens, want) for tokens in got)


def test_text_is_generated_by_split_prompts():
    ids = draw_ids(1, LENGTH, 3, 80)
    zeros = torch.zeros_like(ids)
    options = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}

    def run(model):
        return model.generate(input_ids=ids, token_type_ids=zeros, **options)

    model = seeded(gemma3)
    want = run(model)
    assert all(torch.equal(tokens, want) for tokens in on_ranks(model, LAYOUTS[0], run))


def test_a_text_decoders_vision_tower_is_not_split():
    config = hf.Blip2Config(
        vision_config=VISION,
        qformer_config={k: TEXT[k] for k in SIZES} | {"encoder_hidden_size": 32},
        text_config={
            "model_type": "opt",
            "vocab_size": 97,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
        },
        num_query_tokens=6,
        image_token_index=IMAGE,
    )
    model = seeded(lambda: hf.Blip2ForConditionalGeneration(config))
    assert find_embeddings(model) is None
    assert find_embeddings(model.vision_model) is model.vision_model.embeddings


@pytest.mark.parametrize("nested", [False, True])
def test_images_beyond_the_first_numbers_are_compared(nested, monkeypatch):
    monkeypatch.setattr(consistency, "_LOOKED_AT", 64)  # of gradients, which are many more
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(2)).double()
    ids = draw_ids(1, LENGTH, 3, 80).repeat(1, 2)
    ids[0, 3:51] = IMAGE
    model = seeded(llava)
    name = "mm_encoder_outputs" if nested else "pixel_values"

    def run(own):
        images = pixels.clone()
        if own._weft.layout.rank == 1:
            images[2] = -images[2]
        value = images
        if nested:
            value = {"image": own.get_image_features(pixel_values=images, return_dict=True)}
        with pytest.raises(ShapeError, match=f"{name}.*differs between"):
            own(input_ids=ids, **{name: value})
        return True

    assert all(on_ranks(model, "tokens: ring=2", run))


def test_towers_of_two_encoders_are_split():
    """Their text configuration is of an encoder that the classifier of images does not have."""
    vision, text = VISION | {"projection_dim": 32}, {k: TEXT[k] for k in SIZES}
    config = hf.CLIPConfig(vision_config=vision, text_config=text, projection_dim=32)
    model = seeded(lambda: hf.CLIPForImageClassification(config))
    assert find_embeddings(model) is model.vision_model.embeddings
