"""Every shipped layout on GPUs that compute nothing, as a table.

    python -m tests.null_cuda [LAYOUT ...] [--write]    of all layouts, to results/null_gpu.md

Per layout the most of all its ranks: memory of sixteen layers of attention, forward and backward,
with the GPU as far as the CPU and 1,000 launches behind it; of one layer how often the CPU waits
for the GPU, the kernels launched, the most kinds of a Triton kernel. Below, what a strict replay of
all calls finds. What is reserved beyond the allocated is so at no lag, too: blocks of transient
tensors that lie idle, whole, or split by tensors that are kept (fp32 copies of routed layouts).
`bash .ci/run-null-gpu` makes the environment, and runs this and the tests.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import weft
from weft.declare import catalog

from .gpu import missing
from .ranks import ROOT, world
from .replay import faults, logs_of

RESULTS = ROOT / "benchmarks" / "results" / "null_gpu.md"
#: Memory reserved with the GPU behind, of what is allocated: at most.
MOST_RESERVED = 1.1


def by_size(names: Sequence[str]) -> dict[int, list[str]]:
    """Layouts by their number of ranks."""
    found: dict[int, list[str]] = defaultdict(list)
    for name in names:
        found[weft.Layout.load(name).world_size].append(name)
    return dict(found)


def merged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The most of all ranks; kinds by kernel."""
    if any("refused" in row for row in rows):
        return next(row for row in rows if "refused" in row)
    kernels = {kernel for row in rows for kernel in row["kinds"]}
    of_rank = [key for key in rows[0] if key not in ("kinds", "waits")]
    numbers = {key: max(row[key] for row in rows) for key in of_rank}
    kinds = {kernel: max(row["kinds"].get(kernel, 0) for row in rows) for kernel in sorted(kernels)}
    waits = max((row["waits"] for row in rows), key=len)
    return {**numbers, "waits": waits, "kinds": kinds}


def replayed(names: Sequence[str], folder: Path) -> list[str]:
    """What a strict replay of two steps of layouts of one size finds, at once and in order."""
    size = weft.Layout.load(names[0]).world_size
    world(size, folder, "strict", [*names])
    logs = logs_of(folder)
    assert len(logs) == size, f"{len(logs)} logs of {size} ranks"
    return [*faults(logs), *faults(logs, in_order=True)]


def table(names: Sequence[str]) -> Iterator[str]:
    """The lines of the table, and below it what was found."""
    heads = ("layout", "ranks", "allocated MiB", "reserved", "reserved, 1,000 behind")
    heads += ("of allocated", "waits", "launches", "kinds")
    yield "| " + " | ".join(heads) + " |"
    yield "| --- |" + " ---: |" * (len(heads) - 1)
    notes = []
    with tempfile.TemporaryDirectory() as folder:
        for size, of in by_size(names).items():
            ranks = world(size, Path(folder) / f"{size}", "measured", of)
            for name in of:
                row = merged([rank[name] for rank in ranks])
                if "refused" in row:
                    notes.append(f"- {name} was refused: {row['refused']}")
                    continue
                yield _line(name, size, row)
                notes += [f"- {name} waits at `{wait}`" for wait in dict.fromkeys(row["waits"])]
            found = replayed(of, Path(folder) / f"{size}-strict") or ["nothing."]
            notes += [f"- Replay of the layouts of {size} ranks: {text}" for text in found]
    yield ""
    yield from notes


def _line(name: str, ranks: int, row: dict[str, Any]) -> str:
    sizes = [row[key] for key in ("allocated 0", "reserved 0", "reserved 1000")]
    cells = [name, ranks, *(f"{size / 2**20:.0f}" for size in sizes), f"{sizes[2] / sizes[0]:.2f}"]
    cells += [len(row["waits"]), row["launches"], max(row["kinds"].values(), default=0)]
    return "| " + " | ".join(map(str, cells)) + " |"


def main(*arguments: str) -> None:
    if lacking := missing():
        sys.exit(f"{lacking} is missing: `bash .ci/run-null-gpu` makes an environment that has it")
    names = [a for a in arguments if not a.startswith("-")] or catalog.names("layouts")
    start, lines = time.strftime("%Y-%m-%d"), []
    for line in table(names):
        print(line, flush=True)
        lines.append(line)
    if "--write" in arguments:
        of = f"weft {weft.__version__}, torch {torch.__version__}, {start}."
        head = ["# Every shipped layout on a GPU that computes nothing", "", of, ""]
        text = (__doc__ or "").split("\n\n")[2].replace("\n", " ")
        RESULTS.write_text("\n".join([*head, text, "", *lines, ""]))


if __name__ == "__main__":
    main(*sys.argv[1:])
