"""What `layout.pack` makes of skewed document lengths, beside zigzag: `python -m benchmarks.pack`.

Per distribution of 4,096 documents and number of ranks: the largest share of work over the mean,
keys and values that ranks receive (as a plan's chunks say, which tests hold beside a plan's bytes),
the fewest that contiguous pieces allow, and process time.
"""

from __future__ import annotations

import math
import time

import numpy as np
from rich.table import Table

from weft import Causal, Documents, Layout
from weft.commands.options import console
from weft.plan.intervals import SpanTable, hull, merge_intervals

DOCUMENTS = 4096


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
    head = ("documents", "ranks", "max/mean", "of zigzag", "rows / zigzag's", "fewest", "ms")
    table = Table(*head)
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
            shares = (f"{unbalance(order, lengths):.3f}" for order in (ours, zigzag))
            table.add_row(name, str(size), *shares, *rows, f"{min(took) * 1e3:.1f}")
    console().print(table)


if __name__ == "__main__":
    main()
