"""Memory of a loss beyond hidden states and weights: whole logits, chunks, a cut vocabulary.

    python -m benchmarks.loss_memory                  prints its measurements
    python -m benchmarks.loss_memory --write          and writes results/loss_memory.md
    python -m benchmarks.loss_memory large --write    one of the two tables anew

Every row is how much a fresh process grows in memory, from before the loss (VmRSS of Linux) to its
highest mark after the backward pass (VmHWM), gradients included; a small loss ran before, so that
libraries are loaded. First 4 processes that communicate, with few tokens, so that whole logits fit
this machine; then one rank's share of 131,072 tokens and 151,936 words, alone: its chunks are those
of a rank among 4, without the messages.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch.nn import functional as F

import weft
from weft.launch import launcher as launch
from weft.losses import cross_entropy

from .common import RESULTS, save

WORDS, WIDTH, RANKS = 151_936, 32, 4
M_MMAP_THRESHOLD = -3  # of glibc's mallopt
SMALL, SMALL_CHUNK = 2_048, 128
LARGE, LARGE_CHUNK = 131_072, 1_024
#: How a loss is made: the layout of 4 ranks, and the mesh dim that cuts the vocabulary.
SIDES = {
    "whole": ("tokens: ring=4", ()),
    "chunked": ("tokens: ring=4", ()),
    "vocab-parallel, other tokens": ("tokens: ring=4", ("ring",)),
    "vocab-parallel, same tokens": ("heads: tp=4; tokens: local", ("tp",)),
}


def status(name: str) -> int:
    """A number of bytes that Linux keeps of this process."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith(name)))


def grown(run: Callable[[], None]) -> tuple[int, float]:
    """By how many bytes the process grew at most while a function ran, and its seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
    before, begin = status("VmRSS"), time.perf_counter()
    run()
    return status("VmHWM") - before, time.perf_counter() - begin


def loss(side: str, layout: weft.Layout, tokens: int, words: int, chunk: int) -> tuple[int, float]:
    """Of one rank that has so many tokens and words; the growth of memory, and seconds."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # what is freed goes back to the system
    step(side, layout, 8, 8, 2)()
    return grown(step(side, layout, tokens, words, chunk))


def step(side: str, layout: weft.Layout, tokens: int, words: int, chunk: int) -> Callable[[], None]:
    """A loss of random hidden states, and its backward pass."""
    seeded = torch.Generator().manual_seed(layout.rank)
    hidden = torch.randn(tokens, WIDTH, generator=seeded).requires_grad_()
    weight = torch.randn(words, WIDTH, generator=seeded).requires_grad_()
    labels = torch.randint(words, (tokens,), generator=seeded)
    dims = SIDES[side][1] if layout.mesh else ()

    def run() -> None:
        if side == "whole":
            total = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
            layout.mean(total, tokens).backward()
        else:
            cross_entropy(hidden, weight, labels, layout, vocab_dims=dims, chunk=chunk).backward()

    return run


def tokens_of(side: str, tokens: int) -> int:
    """Tokens of a rank of 4."""
    return tokens if side.endswith("same tokens") else tokens // RANKS


def words_of(side: str) -> int:
    """Words of a rank of 4."""
    return WORDS // RANKS if side.startswith("vocab") else WORDS


def together(side: str) -> tuple[int, float]:
    """One of 4 ranks that communicate, with few tokens."""
    torch.set_num_threads(1)
    layout = weft.Layout.parse(SIDES[side][0]).build("cpu", timeout=300)
    return loss(side, layout, tokens_of(side, SMALL), words_of(side), SMALL_CHUNK)


def alone(side: str) -> tuple[int, float]:
    """The share of one of 4 ranks, with all tokens, without the others.

    A rank that has a part of the words goes through all tokens, wherever their hidden states are.
    """
    layout = weft.Layout.single()
    tokens = LARGE if side.startswith("vocab") else LARGE // RANKS
    return loss(side, layout, tokens, words_of(side), LARGE_CHUNK)


def formula(side: str, tokens: int, chunk: int) -> int:
    """Bytes beyond hidden states and weights that fp32 takes, the two gradients included."""
    gradients = 4 * WIDTH * (tokens + words_of(side))
    if side == "whole":  # logits, their log-softmax, and the gradient of both
        return gradients + 3 * 4 * tokens * WORDS
    return gradients + 4 * chunk * words_of(side)


def gib(nbytes: float) -> str:
    """Bytes in words."""
    return f"{nbytes / 2**30:.3f}"


def sizes(part: str) -> dict[str, tuple[int, int]]:
    """Tokens of a rank and of a chunk, by how the loss is made."""
    if part == "small":
        return {side: (tokens_of(side, SMALL), SMALL_CHUNK) for side in SIDES}
    return {
        "whole": (LARGE // RANKS, 0),
        "chunked": (LARGE // RANKS, LARGE_CHUNK),
        "vocab-parallel": (LARGE, LARGE_CHUNK),
    }


def measured(part: str) -> dict[str, tuple[int, float]]:
    """Bytes and seconds by how the loss is made; whole logits of all tokens do not fit."""
    if part == "small":
        return {side: launch.run(together, side, ranks=RANKS) for side in SIDES}
    ran = {}
    for side in ("chunked", "vocab-parallel"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            ran[side] = fresh.submit(alone, side).result()
    return ran


def table(part: str, ran: Mapping[str, tuple[int, float]]) -> str:
    """Measurements and formula, in Markdown."""
    lines = ["| loss | peak, GiB | formula, GiB | seconds |", "| --- | ---: | ---: | ---: |"]
    for side, size in sizes(part).items():
        peak, seconds = (
            (gib(ran[side][0]), f"{ran[side][1]:.0f}") if side in ran else ("not run", "")
        )
        lines.append(f"| {side} | {peak} | {gib(formula(side, *size))} | {seconds} |")
    return "\n".join(lines)


def page(rows: Mapping[str, Mapping[str, tuple[int, float]]]) -> str:
    """The tables, and how they were made."""
    return "\n\n".join(
        [
            "# Memory of a loss",
            "`python -m benchmarks.loss_memory --write`: how far a fresh process grows while a loss"
            f" over {WORDS:,} words and its backward pass run, hidden states of {WIDTH} numbers and"
            " the head's weight not counted, their gradients included; fp32 on the CPU, torch"
            f" {torch.__version__}, rank 0.",
            f"{RANKS} processes, {SMALL:,} tokens of all ranks together, chunks of {SMALL_CHUNK}"
            " tokens:",
            table("small", rows.get("small", {})),
            f"One rank's share of {LARGE:,} tokens on {RANKS} ranks, run alone, chunks of"
            f" {LARGE_CHUNK:,} tokens. Vocab-parallel, it has {WORDS // RANKS:,} words and goes"
            " through all tokens (here it holds all their hidden states; where ranks have other"
            " tokens, a chunk's):",
            table("large", rows.get("large", {})),
            "A row that says 'not run' has its formula alone. In numbers of 4 bytes, T tokens and v"
            " words of the rank, E wide: whole `3 T v + E (T + v)`: logits,"
            " their log-softmax and its gradient exist together."
            " Chunked `chunk v + E (T + v)`: of logits, one chunk's, whatever T; ranks that cut the"
            " vocabulary have `v = words / ranks`. In bf16 a chunk's logits exist twice, in 2 and 4"
            " bytes, and the weight's gradient is added up in fp32. With `softcap` or `entropy`"
            " another chunk's. Seconds are those of a machine of two cores that others used, too.",
        ]
    )


def main() -> None:
    """Measure every row in fresh processes, print the tables, and write them if asked."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("parts", nargs="*", metavar="small|large", help="default: both")
    options.add_argument("--write", action="store_true", help="write results/loss_memory.md")
    given = options.parse_args()
    kept = RESULTS / "loss_memory.json"
    for part in given.parts or ("small", "large"):
        made = measured(part)
        print(table(part, made), flush=True)
        if given.write:
            rows = {**(json.loads(kept.read_text()) if kept.exists() else {}), part: made}
            save("loss_memory", rows)
            (RESULTS / "loss_memory.md").write_text(page(rows) + "\n")


if __name__ == "__main__":
    main()
