"""Which model families of the installed transformers are exact under weft: a table.

Every causal, masked, vision and encoder-decoder family, and some of images, video or sound with
text, is built with random weights and a tiny configuration, and
`weft_integrations.transformers.verify` compares it with itself on two layouts.

    python -m benchmarks.families --write          # all, and writes docs/families.md
    python -m benchmarks.families llama bert       # some, printed
    python -m benchmarks.families --uses --write   # what people do with exact families
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import logging
import re
import resource
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers.models.auto import modeling_auto as auto

from weft import Field, Layout
from weft.errors import WeftError
from weft_axes.fields import run
from weft_axes.fields.registry import function_name
from weft_integrations.transformers import verify

from . import encoder_families, image_families
from .family_uses import LAYOUT, USES, tried

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
ABOUT = {
    "vision": " By tokens, or else by height.",
    "image-text": (
        " A tiny model with images, or sound, across borders of ranks. Of other families"
        " `verify(model, layout, batch=...)` tells, by a call of yours."
    ),
    "encoder-decoder": (
        " Rows of an encoder and of a decoder, of other lengths, the encoder's with padding;"
        " encoders of sound stay whole."
    ),
}
VERDICTS = ("exact", "refused", "not tried", "WRONG", "FAILED")
LAYOUTS = ("tokens(zigzag): ring=2", "tokens: tile=2x2")
OF_IMAGES = ("height: ring=2",)
#: Encoders and decoders that take no example of others: of padding, or of labels.
OWN_CALLS = ("fsmt", "prophetnet")
#: Bytes that a family may take: a configuration that is not tiny.
MEMORY = 40 << 30
KINDS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "vision": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "image-text": dict.fromkeys(image_families.FAMILIES, ""),
    "encoder-decoder": encoder_families.NAMES,
}
#: Kinds whose uses are not tried.
NO_USES = ("vision", "image-text", "encoder-decoder")
#: Sizes of a tiny model, for whichever of these options a configuration has.
TINY = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"), 97),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "emb_dim", "dim"), 32),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "attention_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim",), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("expert_ffn_hidden_size", "intermediate_size_mlp"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 640),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 8),
    **dict.fromkeys(("index_head_dim", "indexer_head_dim"), 8),
    **dict.fromkeys(("index_n_heads", "indexer_n_heads"), 4),
    # Choices of keys: below the length, so that some are dropped.
    **dict.fromkeys(("index_topk", "keep_window_size"), 5),
    **dict.fromkeys(("index_topk_blocks",), 2),
    **dict.fromkeys(("index_block_size", "index_kpool", "indexer_compress_ratio"), 4),
    **dict.fromkeys(("indexer_budget",), 8),
    **dict.fromkeys(("indexer_kv_heads",), 1),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}
#: Set even where the default is None.
REQUIRED = (
    *("vocab_size", "head_dim", "pad_token_id", "num_key_value_heads"),
    *("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget"),
    "indexer_compress_ratio",
)
#: Further settings that a family needs to be a model.
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_d_ssm": 64}
SWIN = {"depths": [2], "num_heads": [4], "window_size": 2, "embed_dim": 32}
CONVNEXT = {"patch_size": 2, "hidden_sizes": [8] * 4, "depths": [1] * 4}
REFORMER = {
    "attention_head_size": 8,
    "attn_layers": ["local", "lsh"],
    "axial_pos_embds": False,
    "num_buckets": 4,
    "num_hidden_layers": 2,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
#: By family, or by model where one family has several kinds.
EXTRA: dict[str, dict] = {
    "dory": {"n_input_layers": 2, "n_output_layers": 1},
    "falcon_h1": MAMBA,
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "luke": {"entity_vocab_size": 97},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"] * 2},
    "kimi_linear": {
        "num_experts_per_token": 2,
        "num_experts": 4,
        "topk_group": 1,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "esm": {"pad_token_id": 1},
    "longcat_flash": {"head_dim": 4},
    "swin": SWIN,
    "zaya": {"num_experts_per_tok": 1},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 2,
        "sliding_window": 8,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
    },
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"] * 2,
        "index_n_heads": 2,
    },
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "swinv2": SWIN,
    "donut-swin": SWIN,
    "convnext": CONVNEXT,
    "convnextv2": CONVNEXT,
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "neomme": {"head_dim": 16},
    "reformer": REFORMER,
    "ReformerModelWithLMHead": REFORMER | {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
    },
    "bailing_hybrid": {
        "num_expert_group": 1,
        "topk_group": 1,
        "num_experts_per_token": 2,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "layer_group_size": 2,
    },
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), PLAIN_ROPE),
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "zamba": {
        "n_mamba_heads": 2,
        "mamba_dt_rank": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_hidden_layers": 9,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
    },
    "zamba2": {
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_d_state": 16,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_hidden_layers": 6,
        "hybrid_layer_ids": [2, 5],
        "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32},
    },
}


@dataclass(frozen=True)
class Row:
    """One family: its kind, its model's class, and what was found."""

    kind: str
    family: str
    model: str
    verdict: str  # one of VERDICTS
    why: str = ""
    whole: str = ""  # functions that ran whole, of all
    uses: tuple[str, ...] = ("",) * len(USES)  # found for each of USES; "": not tried


def tiny_config(family: str, name: str):
    """A small configuration of a family."""
    kind = getattr(transformers, name).config_class
    if getattr(kind, "sub_configs", None) and not hasattr(kind(), "hidden_size"):
        config = kind()
        for name in kind.sub_configs:
            inner = getattr(config, name)
            if inner is not None:
                setattr(config, name, _shrunk(type(inner), {}))
        return config
    return _shrunk(kind, EXTRA.get(name, EXTRA.get(family, {})))


def _shrunk(kind, extra: dict):
    named = set(inspect.signature(kind.__init__).parameters) | set(kind().to_dict())
    aliases = set(getattr(kind, "attribute_map", {}))
    default = kind().to_dict()
    values = {n: v for n, v in TINY.items() if n in named - aliases}
    values = {n: v for n, v in values.items() if not isinstance(default.get(n), list | tuple)}
    kv, heads = default.get("num_key_value_heads"), default.get("num_attention_heads")
    if kv is not None and kv == heads:
        values["num_key_value_heads"] = 4
    if "qk_rope_head_dim" in named:
        values.pop("head_dim", None)
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(default.get(token), int) and default[token] >= TINY["vocab_size"]:
            values[token] = 2
    needed = {n: v for n, v in values.items() if default.get(n, 0) is not None or n in REQUIRED}
    return kind(**{n: v for n, v in (needed | extra).items() if n in named})


class TooLong(BaseException):
    """No `Exception`, of which `verify` would make a refusal."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Ends a family that takes too much of the processor, however busy it is with other things."""

    def stop(*_: object) -> None:
        raise TooLong(f"took more than {seconds} s of the processor")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def model_name(kind: str, family: str) -> str:
    """The class of a family's model, the first of several."""
    if kind == "image-text":
        return image_families.FAMILIES[family]().model
    name = KINDS[kind][family]
    return name[0] if isinstance(name, tuple) else name


def built(family: str, name: str) -> torch.nn.Module:
    """A tiny model with random weights; biases too, so that nothing is hidden by a zero."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(tiny_config(family, name)).eval()
    for p in model.parameters():
        if p.dim() == 1 and p.is_floating_point():
            p.data += 0.1 * torch.randn_like(p)
    return model


def used(row: Row) -> Row:
    """The same family with what was found of each use."""
    try:
        with limited(120):
            return replace(row, uses=tuple(tried(built(row.family, row.model)).values()))
    except (Exception, TooLong) as error:
        return replace(row, uses=(f"not tried: {one_line(error)[:60]}",) * len(USES))


def written() -> list[Row]:
    """The rows of the page as it is."""
    rows, kind = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            kind = line[3:].lower()
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if kind in KINDS and len(cells) == 5 + len(USES) and cells[0] in KINDS[kind]:
            family, model, verdict, whole, *uses, why = cells
            why = why.replace("\\", "").replace("&lt;", "<")
            rows.append(Row(kind, family, model, verdict, why, whole, tuple(uses)))
    return rows


def judge(kind: str, family: str) -> Row:
    """Build one family and verify it on every layout."""
    row = Row(kind, family, model_name(kind, family), "not tried")
    try:
        with limited(120):
            model, call = case_of(kind, family)
            parameters = sum(p.numel() for p in model.parameters())
            if parameters > 100e6:
                return replace(row, why=f"{parameters / 1e6:.0f} M weights")
    except (Exception, TooLong) as error:
        return replace(row, why=f"no tiny model: {one_line(error)}")
    found = compared(row, model, call, LAYOUTS)
    if kind == "vision" and found.verdict != "exact":
        by_height = compared(row, model, call, OF_IMAGES)
        found = replace(by_height, why=f"by height {by_height.why}".strip())
    return found


def compared(row: Row, model: torch.nn.Module, call: Any, layouts: tuple[str, ...]) -> Row:
    """A family's row, whatever it raises."""
    whole: set[str] = set()
    try:
        with limited(180), counted() as functions:
            for line in layouts:
                whole |= {*verify(model, Layout.parse(line), batch=call).ran_whole}
    except WeftError as error:
        why, verdict = one_line(error), "refused"
        for sign, other in (
            ("could not be run on", "not tried"),
            ("on ranks it fails", "FAILED"),
            (" differs", "WRONG"),
        ):
            verdict = other if sign in str(error) else verdict
        return replace(row, verdict=verdict, why=why)
    except (Exception, TooLong) as error:
        return replace(row, verdict="FAILED", why=f"{type(error).__name__}: {one_line(error)}")
    names = ", ".join(sorted(name.removeprefix("torch's ") for name in whole))
    share = f"{len(whole)} of {len(functions)}: {names}" if whole else "none"
    return replace(row, verdict="exact", whole=share)


@contextlib.contextmanager
def counted() -> Iterator[set[str]]:
    """The functions of torch that are called on fields."""
    rules, names = run.run_function, set()

    def counting(cls: type, func: Any, *others: Any) -> Any:
        names.add(function_name(func))
        return rules(cls, func, *others)

    methods = patch.object(run, "run_function", counting)
    with methods, patch.object(Field, "__torch_function__", classmethod(counting)):
        yield names


def case_of(kind: str, family: str) -> tuple[torch.nn.Module, dict[str, Any] | None]:
    """A family's model, and a call of it where `verify` is to make none."""
    if kind == "image-text":
        return image_families.built(family).float(), image_families.example(family)
    if kind == "vision":
        model = built(family, model_name(kind, family))
        vision = getattr(model.config, "vision_config", model.config)
        size = getattr(vision, "image_size", 64) or 64
        size = size if isinstance(size, int) else size[0]
        shape = 2, getattr(vision, "num_channels", 3), size, size
        images = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        return model, {"pixel_values": images, "labels": torch.tensor([0, 1])}
    if kind != "encoder-decoder":
        return built(family, model_name(kind, family)), None
    known = family in encoder_families.OPTIONS
    model = encoder_families.built(family) if known else built(family, model_name(kind, family))
    if family in OWN_CALLS:
        return model, None
    if getattr(model.config, "decoder_start_token_id", None) is None:
        model.config.decoder_start_token_id = model.config.pad_token_id = 0
    return model.float(), encoder_families.example(family if known else "bart")


def one_line(error: BaseException) -> str:
    """Why, without what every refusal says."""
    text = re.sub(r"\s+", " ", str(error))
    text = re.sub(r"^(\w+ on .*? is not the model.*?: |\w+ could not be .*?batch=: )", "", text)
    return text.strip()


def page(rows: list[Row]) -> str:
    """The table as a page of the docs."""
    parts = [
        "# Model families",
        f"Every causal, masked, vision and encoder-decoder family of transformers"
        f" {transformers.__version__}, and some of\nimages with text, with\n"
        "random weights and a tiny configuration, compared with itself by "
        "`weft_integrations.transformers.verify` on "
        + " and ".join(f"`{x}`" for x in LAYOUTS)
        + '. Made by `python -m benchmarks.families --write`. "exact": outputs, loss and '
        'gradients agree to 1e-6 in fp64. "refused": the function that it names has no rule. "not '
        "tried\": this page's tiny configuration made no model that runs here. whole: functions of"
        " torch without a rule, which ran whole on every rank, of all that the model called."
        " Models that choose their keys have choices of fewer keys than a row has."
        " FSMT is tried with `use_cache=False`: with it, its default, it makes no causal mask.",
        f"The columns of uses: on `{LAYOUT}` with full rows, by `python -m benchmarks.families "
        "--uses`. labels: the loss and gradients of labels; default cache: a prompt in two calls, "
        "the second with the cache that the first gives by default; packed rows: documents by "
        "`position_ids` that start anew, with `use_cache=False`; generate: eight tokens, greedily. "
        '"equal": to one device, to rounding in fp32. "equal, whole": so, and every rank computed '
        'all of the call. "none": one device has no such use of the model. Empty: not tried. '
        "inkling_text: the gradient of a router's scale, which rounds so on one device, too.",
    ]
    for kind in KINDS:
        mine = [row for row in rows if row.kind == kind]
        if not mine:
            continue
        counts = Counter(row.verdict for row in mine)
        summary = ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])
        lines = [f"| family | model | | whole | {' | '.join(USES)} | why |"]
        lines += ["|---" * (5 + len(USES)) + "|"]
        lines += [
            f"| {' | '.join((r.family, r.model, r.verdict, r.whole, *r.uses, _cell(r.why)))} |"
            for r in mine
        ]
        parts += [
            f"## {kind.capitalize()}",
            f"{len(mine)} families: {summary}.{ABOUT.get(kind, '')}",
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")


def try_uses(families: list[str], kinds: list[str], write: bool) -> None:
    """Print, and write, the uses of families that the page calls exact; other rows stay."""
    rows = written()
    for i, row in enumerate(rows):
        chosen = row.kind in kinds and (not families or row.family in families)
        if chosen and row.verdict == "exact" and row.kind not in NO_USES:
            rows[i] = used(row)
            print(row.kind, row.family, *rows[i].uses, sep=" | ", flush=True)
    if write:
        PAGE.write_text(page(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    parser.add_argument("--uses", action="store_true", help="what people do with exact families")
    parser.add_argument("--kind", choices=KINDS, action="append")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if args.uses:
        try_uses(args.families, args.kind or list(KINDS), args.write)
        return
    before = {(row.kind, row.family): row for row in written()}
    rows = []
    for kind in args.kind or KINDS:
        for family in sorted(KINDS[kind]):
            if args.families and family not in args.families:
                continue
            row = judge(kind, family)
            row = replace(row, uses=before.get((kind, family), row).uses)
            rows.append(row)
            print(kind, family, row.verdict, row.whole, row.why, sep=" | ", flush=True)
    print({v: sum(row.verdict == v for row in rows) for v in VERDICTS})
    if args.write:  # rows of other families stay
        now = before | {(row.kind, row.family): row for row in rows}
        PAGE.write_text(page(sorted(now.values(), key=lambda row: row.family)))
    if any(row.verdict in ("WRONG", "FAILED") for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
