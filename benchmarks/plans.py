"""What `weft plan config` counts of published models, beside by hand: a table of docs/planning.md.

    python -m benchmarks.plans             # prints it
    python -m benchmarks.plans --write     # and writes it into the page

Weights, products of a token in the forward pass without attention, and bytes of a cache of 131,072
tokens in bf16 on one rank; then the processor's seconds of `weft plan config` for 64 devices.
Shapes are those of `benchmarks/configs/shapes.json`. Needs nothing but these files.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig

from weft import Layout
from weft.declare.hardware import Hardware
from weft_planner.groups import Groups
from weft_planner.hf_config import HFModel
from weft_planner.hf_step import count_whole
from weft_planner.serving import serving

SHAPES = Path(__file__).parent / "configs" / "shapes.json"
PAGE = Path(__file__).parent.parent / "docs" / "planning.md"
#: Tokens of the row whose products are counted, and of the cache.
TOKENS, CACHED = 4096, 131072


@dataclass(frozen=True)
class Counted:
    """Weights, multiply-adds of a token, bytes of a cache of `CACHED` tokens."""

    weights: int
    products: int
    cache: int


def _deepseek_v3() -> Counted:
    d, heads, ranks = 7168, 128, 1536 + 512
    latents = d * 1536 + 1536 * heads * 192 + d * (512 + 64) + 512 * heads * 256 + heads * 128 * d
    expert, router, dense, words = 3 * d * 2048, d * 256, 3 * d * 18432, 129280 * d
    norms = 61 * (2 * d + ranks) + d
    return Counted(
        61 * latents + 3 * dense + 58 * (257 * expert + router) + 2 * words + norms,
        61 * latents + 3 * dense + 58 * (9 * expert + router) + words,
        61 * (512 + 64) * 2 * CACHED,
    )


def _glm_4_5() -> Counted:
    d, size = 5120, 128
    attention, biases = d * size * (96 + 8 + 8 + 96), size * (96 + 8 + 8)
    expert, router, dense, words = 3 * d * 1536, d * 160, 3 * d * 12288, 151552 * d
    norms = 92 * (2 * d + 2 * size) + d
    return Counted(
        92 * (attention + biases) + 3 * dense + 89 * (161 * expert + router) + 2 * words + norms,
        92 * attention + 3 * dense + 89 * (9 * expert + router) + words,
        92 * 2 * 8 * size * 2 * CACHED,
    )


def _llama_4_scout() -> Counted:
    """A chunk of 8,192 tokens is kept of 36 of 48 layers; every expert runs on every token."""
    d, size = 5120, 128
    attention, expert, words = d * size * (40 + 8 + 8 + 40), 3 * d * 8192, 202048 * d
    layer = attention + (16 + 1) * expert + 16 * d
    return Counted(
        48 * (layer + 2 * d) + 2 * words + d,
        48 * layer + words,
        2 * 8 * size * 2 * (12 * CACHED + 36 * 8191),
    )


def _qwen3_14b() -> Counted:
    d, size = 5120, 128
    layer, words = d * size * (40 + 8 + 8 + 40) + 3 * d * 17408, 151936 * d
    return Counted(
        40 * (layer + 2 * d + 2 * size) + 2 * words + d,
        40 * layer + words,
        40 * 2 * 8 * size * 2 * CACHED,
    )


def _gemma_3_27b() -> Counted:
    """One layer of six sees all tokens, ten of 62; of a window of 1,024 all but one are kept."""
    d, size = 5376, 128
    layer, words = d * size * (32 + 16 + 16 + 32) + 3 * d * 21504, 262208 * d
    return Counted(
        62 * (layer + 4 * d + 2 * size) + words + d,
        62 * layer + words,
        2 * 16 * size * 2 * (10 * CACHED + 52 * 1023),
    )


def _qwen3_next_80b() -> Counted:
    """36 of 48 layers carry a state: chunks of 64 tokens of 32 heads of 128 x 128 numbers."""
    d, size, mixed = 2048, 256, 2 * 16 * 128 + 32 * 128
    attention = d * size * (2 * 16 + 2 + 2 + 16)
    projections = d * (mixed + 32 * 128 + 2 * 32) + 32 * 128 * d
    recurrence = 32 * (64 * (3 * 128 + 2 * 128) + 3 * 128 * 128) + 4 * mixed
    expert, router, words = 3 * d * 512, d * (512 + 1), 151936 * d
    moe, small = 512 * expert + expert + router, 2 * 32 + 128 + 4 * mixed
    return Counted(
        12 * (attention + 2 * size)
        + 36 * (projections + small)
        + 48 * (moe + 2 * d)
        + 2 * words
        + d,
        12 * attention + 36 * (projections + recurrence) + 48 * (11 * expert + router) + words,
        12 * 2 * 2 * size * 2 * CACHED + 36 * (32 * 128 * 128 * 4 + 4 * mixed * 2),
    )


BY_HAND = {
    "DeepSeek-V3": _deepseek_v3,
    "GLM-4.5": _glm_4_5,
    "Llama-4-Scout": _llama_4_scout,
    "Qwen3-14B": _qwen3_14b,
    "Gemma-3-27B": _gemma_3_27b,
    "Qwen3-Next-80B-A3B": _qwen3_next_80b,
}


def model_of(name: str) -> HFModel:
    """A published model by its shape."""
    config = dict(json.loads(SHAPES.read_text())[name]["config"])
    return HFModel(AutoConfig.for_model(config.pop("model_type"), **config), name)


def planned(model: HFModel) -> Counted:
    """The same as the planner has it."""
    one = Layout.parse("tokens: local")
    step = count_whole(model, one, TOKENS, loss="full", recompute=False)
    served = serving(model, CACHED, 1)
    return Counted(model.numbers, step.flops[0] // (2 * TOKENS), served.cache + served.states)


def rows() -> Iterator[str]:
    """The table."""
    head = "weights, B", "by hand", "products of a token, G", "by hand", "cache, GB", "by hand", "s"
    yield f"| model | {' | '.join(head)} |"
    yield "|---|" + "---:|" * 7
    for name, by_hand in BY_HAND.items():
        model, start = model_of(name), time.process_time()
        Groups(model, CACHED, Hardware.load("h100-8"), 64).rows()
        seconds = time.process_time() - start
        pairs = zip(*(vars(each).values() for each in (planned(model), by_hand())))
        cells = [f"{value / 1e9:,.3f}" for both in pairs for value in both]
        yield f"| {name} | {' | '.join(cells)} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write it into {PAGE}")
    write = parser.parse_args().write
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    table = [print(line, flush=True) or line for line in rows()]
    if write:
        old = re.compile(r"\| model \| weights.*?(?=\n\n)", re.S)
        PAGE.write_text(old.sub("\n".join(table), PAGE.read_text()))


if __name__ == "__main__":
    main()
