"""Tiny models of an encoder and a decoder, and calls of them, for `benchmarks.families` and tests.

`built("t5")` is a model with random weights, `example("t5")` a call of it: 29 tokens of a source,
some of them padding, and 17 labels of another sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers.models.auto import modeling_auto as auto

from .image_families import numbers

VOCABULARY, FIRST = 97, 3
_SIZES = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "decoder_start_token_id": 2,
    "eos_token_id": 2,
    "forced_eos_token_id": None,
}
_BART = _SIZES | {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 0,
}
_T5 = _SIZES | {
    **dict.fromkeys(("num_layers", "num_decoder_layers"), 2),
    "num_heads": 4,
    "d_kv": 8,
    "d_ff": 48,
    # Small, so that rows have distances beyond the last bucket.
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
_WHISPER = {n: v for n, v in _BART.items() if n != "max_position_embeddings"} | {
    "num_mel_bins": 8,
    "max_source_positions": 25,
    "max_target_positions": 64,
    "begin_suppress_tokens": None,
    "suppress_tokens": None,
}
#: Options of tiny models, of families whose calls tests make.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian"), _BART),
    **dict.fromkeys(("t5", "umt5"), _T5),
    "whisper": _WHISPER,
}
#: And of others.
OPTIONS = FAMILIES | dict.fromkeys(("mt5", "longt5", "switch_transformers"), _T5)
#: Families of the table, with their models.
NAMES = {
    **{
        family: name
        for family, name in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.items()
        if getattr(hf, name).config_class().is_encoder_decoder
    },
    "whisper": "WhisperForConditionalGeneration",
    "speech_to_text": "Speech2TextForConditionalGeneration",
    "moonshine": "MoonshineForConditionalGeneration",
}


def model_of(name: str, options: Mapping[str, Any], **others: Any) -> torch.nn.Module:
    """A model by its class, in fp64, of weights such that every token matters."""
    kind = getattr(hf, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**options, **others})).double().eval()
    for p in model.parameters():
        if p.requires_grad and p.dim() > 1:
            torch.nn.init.normal_(p, std=0.25)
        elif p.requires_grad:
            torch.nn.init.normal_(p, mean=0.5, std=0.2)
    return model


def built(family: str, **options: Any) -> torch.nn.Module:
    """The model of a family."""
    return model_of(NAMES[family], OPTIONS[family], **options)


def ids(generator: torch.Generator, length: int) -> Tensor:
    """Two rows of ids that are no special tokens."""
    return torch.randint(FIRST, VOCABULARY, (2, length), generator=generator)


def example(family: str, source: int = 29, target: int = 17, left: bool = False) -> dict[str, Any]:
    """A call with labels, of which two are left out, and padding in the second row's source."""
    generator = torch.Generator().manual_seed(1)
    labels = ids(generator, target)
    labels[0, -2:] = -100
    if family == "whisper":
        return {"input_features": numbers(generator, 2, 8, 50), "labels": labels}
    seen = torch.ones(2, source, dtype=torch.long)
    seen[1, slice(None, 6) if left else slice(-6, None)] = 0
    return {"input_ids": ids(generator, source), "attention_mask": seen, "labels": labels}
