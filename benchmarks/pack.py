"""Balance and traffic of `layout.pack` against zigzag: `python -m benchmarks.pack [--write]`.

Per distribution of 4,096 documents and number of ranks: the largest rank's work over the mean, rows
of keys and values that ranks receive (by the plan's chunks, which tests compare with a plan's
bytes), a lower bound on these for contiguous pieces, and process time.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np

from weft import Causal, Documents, Layout
from weft.masks.base import merge_intervals
from weft.plan.intervals import SpanTable, hull

DOCUMENTS = 4096
RESULTS = Path(__file__).parent / "results" / "packing.md"


def distributions() -> dict[str, list[int]]:
    """Document lengths in tokens."""
    draw = np.random.default_rng(0)
    books = draw.random(DOCUMENTS) < 0.02
    made = {
        "lognormal": draw.lognormal(6.5, 1.2, DOCUMENTS),
        "2 % books": np.where(books, draw.integers(30_000, 131_072, DOCUMENTS), 900),
        "uniform": draw.integers(1, 4096, DOCUMENTS),
        "Pareto 1.1": np.minimum(draw.pareto(1.1, DOCUMENTS) * 200 + 16, 1 << 20),
    }
    return {name: np.maximum(x, 1).astype(int).tolist() for name, x in made.items()}


def unbalance(layout: Layout, lengths: list[int]) -> float:
    """The largest rank's causal scores over the mean."""
    seen = np.concatenate([np.arange(1, n + 1) for n in lengths])
    before = np.concatenate([[0], np.cumsum(seen)])
    work = []
    for rank in range(layout.world_size):
        spans = layout.spans("tokens", len(seen), {"ring": rank})
        work.append(sum(before[s.last + 1] - before[s.start] for s in spans))
    return max(work) * len(work) / sum(work)


def received(layout: Layout, lengths: list[int]) -> int:
    """Rows of keys and values that all ranks receive in a forward pass."""
    mask, total = Documents(tuple(lengths)) & Causal(), 0
    ranks = range(layout.world_size)
    chunks = [layout.spans("tokens", sum(lengths), {"ring": rank}) for rank in ranks]
    table = SpanTable(enumerate(chunks))
    for rank, chunk in enumerate(chunks):
        rows = table.visible(merge_intervals(mask.keys(hull(span)) for span in chunk))
        rows[rank] = 0
        total += int((rows[:, 1] - rows[:, 0]).sum())
    return total


def fewest(lengths: list[int], ranks: int, unbalance: float = 1.05) -> float:
    """Rows received if documents are cut into contiguous pieces, of as much work as may be.

    Ideal, since the tokens that fill a rank up count as no work.
    """
    work = unbalance * sum(n * (n + 1) // 2 for n in lengths) / ranks
    most, rows = math.ceil(sum(lengths) / ranks), 0.0
    for left in map(float, lengths):
        while left * left / 2 > work or left > most:
            left = max(math.sqrt(max(0.0, left * left - 2 * work)), left - most)
            rows += left
    return rows


def main() -> None:
    """Print the table, or write it to benchmarks/results/packing.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS}")
    write = parser.parse_args().write
    lines = [
        "# Packed documents against zigzag",
        "",
        f"`python -m benchmarks.pack --write`: {DOCUMENTS:,} documents; see docs/losses.md.",
        "",
        "| documents | ranks | max/mean | of zigzag | rows / zigzag's | fewest | planned, ms |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, lengths in distributions().items():
        for size in (8, 64, 1024):
            layout = Layout.parse(f"tokens: ring={size}")
            took = []
            for _ in range(7):
                start = time.process_time()
                packed = layout.pack(lengths)
                took.append(time.process_time() - start)
            ours = layout.reorder("tokens", packed.order)
            zigzag = Layout.parse(f"tokens(zigzag): ring={size}")
            theirs = received(zigzag, lengths)
            rows = (f"{n / theirs:.2f}" for n in (received(ours, lengths), fewest(lengths, size)))
            packed_work, zigzag_work = (unbalance(order, lengths) for order in (ours, zigzag))
            shares = f"{packed_work:.3f} | {zigzag_work:.2f} | {' | '.join(rows)}"
            lines.append(f"| {name} | {size:,} | {shares} | {min(took) * 1e3:.1f} |")
            print(lines[-1], flush=True)
    if write:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
