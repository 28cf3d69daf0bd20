"""Tiny models of images, video or sound with text, and calls as their processors make them.

For the fourth table of `benchmarks.families` and for tests: `built("qwen3_vl")` is a model with
random weights, `example("qwen3_vl")` a call of it in which images of several tokens stand between
words. `padded`, `packed`, `early` and `with_video` make other calls of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor

Call = dict[str, Any]

IMAGE, VIDEO, SOUND = 90, 91, 94
#: The first id that is no word.
MARKS = 88
TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN = {k: v for k, v in TEXT.items() if k != "head_dim"}
WINDOWS = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
SIGLIP = TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}
CLIP = TOWER | {"model_type": "clip_vision_model", "projection_dim": 32}
#: A tower of Qwen's: patches of 4 x 4 pixels in pairs of frames, four of which are one token.
GRIDS = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
}
DEEPSTACK = GRIDS | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
OPT = {
    "model_type": "opt",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "ffn_dim": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 32,
    "dropout": 0.0,
}
STATES = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": ROPE | {"partial_rotary_factor": 1.0},
}


class Family(NamedTuple):
    """A tiny model of a family: its class, its configuration, and a call of it."""

    model: str
    config: Any
    call: Callable[[torch.Generator], Call]


def words(count: int, generator: torch.Generator) -> Tensor:
    """Ids (1, count) of words."""
    return torch.randint(3, 80, (1, count), generator=generator)


def between(sizes: Sequence[int], generator: torch.Generator, mark: int = IMAGE) -> Tensor:
    """Ids (1, n) of images of these many tokens, around each quarter of a row of words."""
    n = 4 * max(*sizes, 3) + 14
    ids = words(n, generator)
    for quarter, size in enumerate(sizes, 1):
        start = quarter * n // 4 - size // 2
        ids[:, start : start + size] = mark
    return ids


def numbers(generator: torch.Generator, *shape: int) -> Tensor:
    """Pixels, in fp64."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# -- images of any size, as grids of patches -------------------------------------------------------

#: (frames, height, width) of each image, in patches.
_SIZES = torch.tensor([[1, 4, 6], [1, 4, 4], [1, 6, 4]])


def _grids(name: str, text: Mapping, tower: Mapping, images: int = 3, **options: Any) -> Family:
    marks = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    marks |= {"vision_start_token_id": 88, "vision_end_token_id": 89} | options
    config = getattr(hf, f"{name}Config")(text_config=text, vision_config=tower, **marks)

    def call(generator: torch.Generator) -> Call:
        grid = _SIZES[:images]
        made = {
            "input_ids": between((grid.prod(-1) // 4).tolist(), generator),
            "pixel_values": numbers(generator, int(grid.prod(-1).sum()), 96),
            "image_grid_thw": grid,
        }
        return _typed(made)

    return Family(f"{name}ForConditionalGeneration", config, call)


def _typed(call: Call) -> Call:
    ids = call["input_ids"]
    return call | {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}


def _omni() -> Family:
    sound = {
        "num_mel_bins": 8,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "max_source_positions": 20,
        "n_window": 4,
        "output_dim": 32,
        "n_window_infer": 8,
        "conv_chunksize": 10,
        "downsample_hidden_size": 8,
    }
    text = PLAIN | EXPERTS | {"rope_parameters": ROPE}
    marks = {"audio_token_id": SOUND, "audio_start_token_id": 95}
    grids = _grids("Qwen3OmniMoeThinker", text, DEEPSTACK, 2, audio_config=sound, **marks)

    def call(generator: torch.Generator) -> Call:
        made = grids.call(generator)
        ids, image = made["input_ids"], made["input_ids"] == IMAGE
        first = image & ~image.roll(1, 1)
        ids = ids.masked_fill(first.roll(-1, 1), 88).masked_fill((image.roll(1, 1) & ~image), 89)
        del made["mm_token_type_ids"]
        return made | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return grids._replace(call=call)


# -- images of one size ----------------------------------------------------------------------------


def _fixed(
    name: str,
    text: Mapping,
    tower: Mapping,
    tokens: int,
    images: int = 3,
    extra: Callable[[Call], Call] = lambda call: {},
    model: str = "",
    **options: Any,
) -> Family:
    config = getattr(hf, f"{name}Config")(text_config=text, vision_config=tower, **options)

    def call(generator: torch.Generator) -> Call:
        ids = between([tokens] * images, generator)
        if images == 1:  # across two quarters
            ids = words(2 * tokens + 2, generator)
            ids[:, tokens // 2 - 1 : tokens // 2 - 1 + tokens] = IMAGE
        made = {"input_ids": ids, "pixel_values": numbers(generator, images, 3, 32, 32)}
        return made | extra(made)

    return Family(model or f"{name}ForConditionalGeneration", config, call)


def _nested(call: Call) -> Call:
    """Images (rows, images, ...)."""
    return {"pixel_values": call["pixel_values"][None]}


def _tiles(call: Call) -> Call:
    """Two tiles of each image."""
    pixels = call["pixel_values"]
    both = torch.stack([pixels, pixels.flip(-1)], 1)
    return {"pixel_values": both, "image_sizes": torch.tensor([[32, 32]] * len(pixels))}


def _types(call: Call) -> Call:
    return {"token_type_ids": (call["input_ids"] == IMAGE).long()}


def _prefix(call: Call) -> Call:
    """All but the last words see each other."""
    ids = call["input_ids"]
    seen = torch.arange(ids.shape[1]) < ids.shape[1] - 8
    return {"token_type_ids": (~seen).long().expand_as(ids)}


def _gemma4() -> Family:
    text = TEXT | {
        "sliding_window": 8,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 8,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "use_bidirectional_attention": "vision",
    }
    tower = {k: v for k, v in TOWER.items() if k != "image_size"} | {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
    }
    marks = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": SOUND}
    config = hf.Gemma4Config(text_config=text, vision_config=tower, audio_config=None, **marks)

    def call(generator: torch.Generator) -> Call:
        ids = between([4, 4, 4], generator)
        at = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1)
        places = at.reshape(1, -1, 2).expand(3, -1, -1)
        pixels = torch.rand((3, 16, 48), generator=generator, dtype=torch.float64)
        types = (ids == IMAGE).long()
        return {
            "input_ids": ids,
            "pixel_values": pixels,
            "image_position_ids": places,
            "mm_token_type_ids": types,
        }

    return Family("Gemma4ForConditionalGeneration", config, call)


def _blip2(text: Mapping = OPT) -> Family:
    queries = {k: PLAIN[k] for k in ("vocab_size", "hidden_size", "intermediate_size")}
    queries |= {"num_hidden_layers": 2, "num_attention_heads": 4, "encoder_hidden_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = hf.Blip2Config(
        vision_config=TOWER,
        qformer_config=queries | dropout,
        text_config=text,
        num_query_tokens=6,
        image_token_index=IMAGE,
    )

    def call(generator: torch.Generator) -> Call:
        ids = words(34, generator).repeat(2, 1)
        ids[0, 6:12] = ids[1, 14:20] = IMAGE
        return {"input_ids": ids, "pixel_values": numbers(generator, 2, 3, 32, 32)}

    return Family("Blip2ForConditionalGeneration", config, call)


def _mllama() -> Family:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    text = PLAIN | {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]}
    tower = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 4,
        "intermediate_size": 48,
        "vision_output_dim": 64,
        "image_size": 16,
        "patch_size": 8,
        "max_num_tiles": 2,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    }
    text |= {"rope_parameters": rope}
    config = hf.MllamaConfig(text_config=text, vision_config=tower, image_token_index=IMAGE)

    def call(generator: torch.Generator) -> Call:
        ids = words(33, generator)
        seen = torch.ones(1, 33, 1, 2, dtype=torch.long)
        seen[:, :3] = seen[:, 20:, :, 1] = 0
        return {
            "input_ids": ids,
            "pixel_values": numbers(generator, 1, 1, 2, 3, 16, 16),
            "aspect_ratio_ids": torch.tensor([[2]]),
            "aspect_ratio_mask": torch.ones(1, 1, 2, dtype=torch.long),
            "cross_attention_mask": seen,
        }

    return Family("MllamaForConditionalGeneration", config, call)


def _audio() -> Family:
    sound = {
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": 8,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "max_source_positions": 20,
    }
    text = TEXT | {"model_type": "qwen2"}
    config = hf.Qwen2AudioConfig(text_config=text, audio_config=sound, audio_token_index=SOUND)

    def call(generator: torch.Generator) -> Call:
        return {
            "input_ids": between([10, 10], generator, SOUND),
            "input_features": numbers(generator, 2, 8, 40),
            "feature_attention_mask": torch.ones(2, 40, dtype=torch.long),
        }

    return Family("Qwen2AudioForConditionalGeneration", config, call)


_ROPE = {"rope_parameters": ROPE}
_GLM = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_GLM_ROPE = {"rope_parameters": _GLM | {"partial_rotary_factor": 1.0}}
_LLAMA, _QWEN2 = TEXT | {"model_type": "llama"}, TEXT | {"model_type": "qwen2"}
_COHERE = TEXT | WINDOWS | {"model_type": "cohere2"}
_QWEN2_TOWER = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 32,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "mlp_ratio": 2,
}
_INDEX = {"image_token_index": IMAGE}

FAMILIES: dict[str, Callable[[], Family]] = {
    "aya_vision": lambda: _fixed(
        "AyaVision", _COHERE, SIGLIP, 4, downsample_factor=2, vision_feature_layer=-1,
        vision_feature_select_strategy="full", **_INDEX,
    ),
    "blip_2": _blip2,
    "gemma3": lambda: _fixed(
        "Gemma3", TEXT | WINDOWS | {"query_pre_attn_scalar": 8}, TOWER | {"vision_use_head": False},
        4, extra=_types, mm_tokens_per_image=4, **_INDEX, boi_token_index=88, eoi_token_index=89,
    ),
    "gemma4": _gemma4,
    "glm4v": lambda: _grids("Glm4v", PLAIN | _GLM_ROPE, GRIDS | {"image_size": 24}),
    "idefics3": lambda: _fixed(
        "Idefics3", _LLAMA, TOWER, 4, extra=_nested, image_token_id=IMAGE, scale_factor=2
    ),
    "internvl": lambda: _fixed(
        "InternVL", _QWEN2, TOWER | {"image_size": [32, 32], "patch_size": [8, 8]}, 4,
        image_token_id=IMAGE, image_seq_length=4,
    ),
    "llava": lambda: _fixed("Llava", _LLAMA, CLIP, 16, image_seq_length=16, **_INDEX),
    "llava_next": lambda: _fixed(
        "LlavaNext", _LLAMA, CLIP, 36, 2, _tiles, image_grid_pinpoints=[[32, 32]],
        vision_feature_select_strategy="default", **_INDEX,
    ),
    "llava_onevision": lambda: _fixed(
        "LlavaOnevision", _QWEN2, SIGLIP, 36, 2,
        lambda call: _tiles(call) | {"batch_num_images": torch.tensor([1, 1])},
        image_grid_pinpoints=[[32, 32]], video_token_index=VIDEO, **_INDEX,
    ),
    "mistral3": lambda: _fixed(
        "Mistral3", TEXT | {"model_type": "mistral"},
        TOWER | {"model_type": "pixtral", "head_dim": 8}, 4, spatial_merge_size=2,
        extra=lambda call: {"image_sizes": torch.tensor([[32, 32]] * 3)}, **_INDEX,
    ),
    "mllama": _mllama,
    "paligemma": lambda: _fixed(
        "PaliGemma", TEXT | {"model_type": "gemma"}, SIGLIP | {"projection_dim": 32}, 16, 1,
        _prefix, projection_dim=32, hidden_size=32, vocab_size=97, **_INDEX,
    ),
    "qwen2_5_vl": lambda: _grids(
        "Qwen2_5_VL", PLAIN | _ROPE, GRIDS | {"window_size": 16, "fullatt_block_indexes": [1]}
    ),
    "qwen2_audio": _audio,
    "qwen2_vl": lambda: _grids("Qwen2VL", PLAIN | _ROPE, _QWEN2_TOWER),
    "qwen3_5": lambda: _grids("Qwen3_5", TEXT | STATES, GRIDS | {"num_position_embeddings": 16}),
    "qwen3_5_moe": lambda: _grids(
        "Qwen3_5Moe", TEXT | STATES | EXPERTS, GRIDS | {"num_position_embeddings": 16}
    ),
    "qwen3_omni_moe": _omni,
    "qwen3_vl": lambda: _grids("Qwen3VL", TEXT | _ROPE, DEEPSTACK),
    "qwen3_vl_moe": lambda: _grids("Qwen3VLMoe", TEXT | _ROPE | EXPERTS, DEEPSTACK),
    "smolvlm": lambda: _fixed(
        "SmolVLM", _LLAMA, TOWER, 4, extra=_nested, image_token_id=IMAGE, scale_factor=2
    ),
}  # fmt: skip
#: Models that are no family of their own.
VARIANTS = {"blip_2 with llama": lambda: _blip2(_LLAMA)}


def built(family: str, attention: str = "sdpa") -> torch.nn.Module:
    """A tiny model in fp64 with random weights; biases too, so that nothing is hidden by a zero."""
    name, config, _ = (FAMILIES | VARIANTS)[family]()
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(hf, name)(config).double().eval()
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.15)
        else:
            torch.nn.init.normal_(p, mean=0.5, std=0.2)
    model.set_attn_implementation(attention)
    if "moe" in family:
        model.set_experts_implementation("eager")
    return model


def example(family: str, labels: bool = True, seed: int = 1) -> Call:
    """A call of it, in fp64, with the labels of its words."""
    call = (FAMILIES | VARIANTS)[family]().call(torch.Generator().manual_seed(seed))
    return labelled(call) if labels else call


def labelled(call: Call) -> Call:
    """The call with labels of its words, and of nothing else."""
    ids = call["input_ids"]
    labels = torch.where(ids >= MARKS, -100, ids)
    if "attention_mask" in call:
        labels = labels.where(call["attention_mask"] == 1, -100)
    return call | {"labels": labels}


def padded(call: Call, left: bool) -> Call:
    """A call of two rows, of which the second has four tokens of padding instead of words."""
    ids, cut = call["input_ids"], 4
    pad = torch.zeros(1, cut, dtype=torch.long)
    short = ids[:, cut:] if left else ids[:, :-cut]  # words, not images
    assert ids[:, :cut].max() < MARKS
    assert ids[:, -cut:].max() < MARKS
    seen = torch.ones(2, ids.shape[1], dtype=torch.long)
    seen[1, slice(cut) if left else slice(-cut, None)] = 0
    second = torch.cat([pad, short] if left else [short, pad], 1)
    made = {n: v for n, v in call.items() if n != "labels"}
    made |= {"input_ids": torch.cat([ids, second]), "attention_mask": seen}
    pixels = call["pixel_values"]
    made["pixel_values"] = torch.cat([pixels, pixels.flip(0) + 0.5])
    for name in ("image_grid_thw", "image_sizes", "image_position_ids"):
        if name in made:
            made[name] = torch.cat([made[name]] * 2)
    if "image_grid_thw" in made:
        made["pixel_values"][len(pixels) :] = pixels + 0.5
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in made:
            made[name] = (made["input_ids"] == IMAGE).to(made[name].dtype)
    return labelled(made)


def packed(call: Call, first: int = 15) -> Call:
    """Two documents in a row: positions of text start anew, in the first of four rows."""
    ids = call["input_ids"]
    own = torch.cat([torch.arange(first), torch.arange(ids.shape[1] - first)])
    rows = [own, own, own + 3 * (ids[0] == IMAGE), own]
    return call | {"position_ids": torch.stack(rows)[:, None], "use_cache": False}


def early(call: Call) -> Call:
    """A call whose images are all within the first half of a row."""
    generator = torch.Generator().manual_seed(5)
    ids = call["input_ids"]
    longer = torch.cat([ids, words(ids.shape[1], generator)], 1)
    made = {n: v for n, v in call.items() if n != "labels"} | {"input_ids": longer}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in made:
            made[name] = (longer == IMAGE).to(made[name].dtype)
    return labelled(made)


def with_video(call: Call) -> Call:
    """A call of Qwen's with a video of two frames behind its first image."""
    ids = call["input_ids"]
    generator = torch.Generator().manual_seed(6)
    start, end = torch.tensor([[88]]), torch.tensor([[89]])
    frame = [start, torch.full((1, 2), VIDEO), end, words(1, generator)]
    behind = int((ids == IMAGE)[0].int().argmax()) + int(call["image_grid_thw"][0].prod()) // 4
    made = {n: v for n, v in call.items() if n != "labels"}
    made["input_ids"] = torch.cat([ids[:, :behind], *frame, *frame, ids[:, behind:]], 1)
    made["pixel_values_videos"] = numbers(generator, 16, 96)
    made["video_grid_thw"] = torch.tensor([[2, 2, 4]])
    return labelled(_typed(made))


def together(calls: Sequence[Call]) -> Call:
    """One call of the rows and images of several, in their order."""
    return {name: torch.cat([call[name] for call in calls]) for name in calls[0]}


def one_image(call: Call) -> Call:
    """A call of the first image alone."""
    ids = call["input_ids"].clone()
    images = ids[0] == IMAGE
    numbers_of = (images & ~images.roll(1)).cumsum(0)
    ids[0, images & (numbers_of > 1)] = 5
    made = {n: v for n, v in call.items() if n != "labels"} | {"input_ids": ids}
    grid = made.get("image_grid_thw")
    first = 1 if grid is None else int(grid[0].prod())
    made["pixel_values"] = made["pixel_values"][:first]
    if grid is not None:
        made["image_grid_thw"] = grid[:1]
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in made:
            made[name] = (ids == IMAGE).to(made[name].dtype)
    return labelled(made)
