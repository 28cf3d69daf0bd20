"""A pass on eight H100s, counted: launches, device memory, messages, and their share of attention.

    python -m benchmarks.gpu.counted                      prints the table
    python -m benchmarks.gpu.counted --write              writes results/gpu_counted.md and .json
    python -m benchmarks.gpu.counted --tokens 8192 --layout "tokens(zigzag): ring=8"
    python -m benchmarks.gpu.counted --torch-alone fused_surrogate_out     without that kernel

Counts are exact, of the real program with fake CUDA tensors (`counting`); no GPU is needed. Times
follow from them by the rates below, which are published or assumed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from weft.kernels import fused

from .counting import Counted, count_passes, visible_pairs

LAYOUTS = (
    "tokens(zigzag): ring=8",
    "tokens: ulysses=8",
    "tokens(zigzag): tile=2x4",
    "tokens(zigzag): ulysses=2 x ring=4",
    "tokens(zigzag): ulysses=4 x ring=2",
    "tokens(zigzag): ring=2 x ulysses=4",
    "tokens(zigzag): pass_q=8",
    "tokens(zigzag): burst=8",
    "tokens(zigzag): gather=8",
)
TOKENS = (8_192, 32_768, 131_072)
HEADS, KV_HEADS, HEAD_DIM, RANKS = 32, 8, 128, 8
#: FLOP/s of attention forward and backward, as FlashAttention 3 and cuDNN publish for an H100: of
#: sequences that are short, and of others.
SHORT, RATES = {"forward": 3.5e14, "backward": 3e14}, {"forward": 6e14, "backward": 4.5e14}
SHORT_TOKENS = 8_192
MEMORY_RATE = 2.8e12  # of the 3.35e12 bytes/s of HBM3, as large copies reach them
LINK_RATE = 3.5e11  # of NVLink's 4.5e11 bytes/s each way
COLUMNS = (
    "tokens",
    "layout",
    "pass",
    "launches",
    "of attention",
    "batches",
    "memory GB",
    "received GB",
    "attention ms",
    "memory ms",
    "messages ms",
    "memory / attention",
)
RESULTS = Path(__file__).parent.parent / "results"


def attention_seconds(tokens: int, name: str) -> float:
    """A rank's attention kernels in a pass of a causal call."""
    rates = SHORT if tokens <= SHORT_TOKENS else RATES
    work = 4 * HEADS * HEAD_DIM * visible_pairs(tokens) / RANKS
    return work * (2.5 if name == "backward" else 1.0) / rates[name]


def rows(
    layouts: tuple[str, ...], tokens: tuple[int, ...], torch_alone: tuple[str, ...]
) -> Iterator[dict]:
    """One row per length, layout and pass, with what `COLUMNS` says in order."""
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    for length in tokens:
        for line in layouts:
            passes = count_passes(line, length, **sizes, torch_alone=torch_alone)
            for name, counted in passes.items():
                yield dict(zip(COLUMNS, _row(length, line, name, counted)))


def _row(length: int, line: str, name: str, counted: Counted) -> tuple:
    attention = attention_seconds(length, name)
    memory, messages = counted.nbytes / MEMORY_RATE, counted.received / LINK_RATE
    return (
        length,
        line,
        name,
        counted.launches.total(),
        counted.launches["attention"],
        counted.batches,
        round(counted.nbytes / 1e9, 3),
        round(counted.received / 1e9, 3),
        round(1e3 * attention, 2),
        round(1e3 * memory, 2),
        round(1e3 * messages, 2),
        round(memory / attention, 3),
    )


def line_of(row: dict) -> str:
    """A row of the table in markdown."""
    *cells, share = row.values()
    return f"| {' | '.join(str(c) for c in cells)} | {100 * share:.0f} % |"


def header() -> list[str]:
    """The first two lines of the table."""
    return [f"| {' | '.join(COLUMNS)} |", "| ---: | --- | --- |" + " ---: |" * (len(COLUMNS) - 3)]


ABOUT = f"""# What a pass costs on eight H100s, counted

`python -m benchmarks.gpu.counted --write`. No GPU ran: the program ran with fake CUDA tensors, and
its operations were counted, of the busiest rank (the last). One layer's attention of Llama-3 8B:
{HEADS} heads of {HEAD_DIM}, {KV_HEADS} key/value heads, bf16, causal, batch 1. Launches, batches
(of point-to-point messages, and all-to-alls) and bytes are exact; "memory" is what moves beside
attention kernels, each operation's tensors read and written once. Times are these counts over
rates: attention at {RATES["forward"] / 1e12:.0f} TFLOP/s forward and {RATES["backward"] / 1e12:.0f}
backward ({SHORT["forward"] / 1e12:.0f} and {SHORT["backward"] / 1e12:.0f} up to {SHORT_TOKENS:,}
tokens), memory at {MEMORY_RATE / 1e12:.1f} TB/s, messages at {LINK_RATE / 1e9:.0f} GB/s. Nothing
hides the memory's time; messages are hidden as far as attention lasts.
"""


def main() -> None:
    """Print the table, each row as it is known, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the results")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--layout", action="append", help="a layout on one line; repeatable")
    parser.add_argument("--torch-alone", action="append", choices=fused.FUSED, default=[])
    options = parser.parse_args()
    lines = header()
    print("\n".join(lines))
    found = []
    layouts = tuple(options.layout or LAYOUTS)
    for row in rows(layouts, tuple(options.tokens), tuple(options.torch_alone)):
        found.append(row)
        lines.append(line_of(row))
        print(lines[-1], flush=True)
    if options.write:
        text = "\n".join([ABOUT, *lines, "", *without_kernels()])
        (RESULTS / "gpu_counted.md").write_text(text + "\n")
        (RESULTS / "gpu_counted.json").write_text(json.dumps(found, indent=1) + "\n")


def without_kernels() -> list[str]:
    """The backward passes that `surrogate_out` is in, with torch's operations in its place."""
    layouts = "tokens(zigzag): tile=2x4", "tokens(zigzag): pass_q=8", "tokens(zigzag): burst=8"
    found = rows(layouts, TOKENS, ("fused_surrogate_out",))
    return [
        "## Without the Triton kernel for the outputs of other ranks' rows",
        "",
        *header(),
        *(line_of(row) for row in found if row["pass"] == "backward"),
    ]


if __name__ == "__main__":
    main()
