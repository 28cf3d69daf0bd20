"""A table of many rows on 1, 2, 4 and 8 ranks: memory, time, and prediction from a sharded cache.

    python -m benchmarks.tables train --rows 150000 --ranks 1 4       an hour of two cores
    python -m benchmarks.tables train --rows 20000 --ranks 1 2 4 8    memory per rank, in minutes
    python -m benchmarks.tables predict --rows 1000000 --ranks 4      a million context rows
    python -m benchmarks.tables plot                                  tables.md and tables.png anew

One block of `models/tabular.toml` on embedded cells, rows x 5 features x 96 in fp32: attention over
features, over rows (4 heads, all rows are keys), and a perceptron. `train` is a forward and a
backward pass. `predict` encodes the rows once, and has test rows attend to their keys and values.
Every rank is a process; ranks share the machine's cores, so time is that of the same work on them,
and not a speedup. Peaks are by how much a process's memory grows, as Linux counts it, while the C
library gives back what is freed (`MALLOC_MMAP_THRESHOLD_`). Every run adds to results/tables.json,
and draws results/tables.md and tables.png anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

import weft
from weft.launch.launcher import run
from weft.layout import Layout
from weft_models.models import ModelSpec, compose

from .common import RESULTS, save, saving

FEATURES, MIB = 5, 1 << 20
TRAIN = {1: "rows: local", 2: "rows: ring=2", 4: "rows: tile=2x2", 8: "rows: tile=2x4"}
PREDICT = {n: f"rows: kv_parallel={n}" if n > 1 else "rows: local" for n in (1, 2, 4, 8)}
BATCHES = (16, 64, 256)  # test rows at a time
DIMS = {"rows": 1, "features": 2}
TITLES = {
    "train": ("layout", "rows", "forward s", "backward s", "kept MiB", "peak MiB", "received MiB"),
    "predict": ("layout", "rows", "encode s", "cache MiB", "encode MiB", "predict MiB"),
}


def one_block() -> ModelSpec:
    """The blocks of `models/tabular.toml`, once and without a head."""
    changes = {"name": "one block", "head": None, "repeat": 1}
    return ModelSpec.load("tabular").model_copy(update=changes)


def _bound(line: str) -> Layout:
    layout = Layout.parse(line)
    return layout.build("cpu", timeout=36_000) if layout.mesh else layout


def _cells(layout: Layout, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """This rank's embedded cells, a function of the global row, so that no rank makes the whole."""
    mine = layout.positions("rows", rows).to(dtype)[:, None, None]
    columns = torch.arange(FEATURES * 96, dtype=dtype).view(FEATURES, 96) + 1
    return torch.sin(mine * (columns.sqrt() % 1) + columns)[None]


# -- training --------------------------------------------------------------------------------------


def _step(layout: Layout, rows: int, dtype: torch.dtype, seen: dict[int, int]) -> dict:
    """A forward and a backward pass; bytes that autograd keeps in `seen`, by address."""
    trunk = compose(one_block(), layout, seed=1, dtype=dtype)
    x = _cells(layout, rows, dtype).requires_grad_()
    start = time.perf_counter()
    with saving(trunk, seen):
        out = trunk(x, lengths={"rows": rows, "features": FEATURES}, masks={"first-keys": rows})
        loss = layout.mean((out * x.detach()).sum(), out.numel())
    middle = time.perf_counter()
    loss.backward()
    layout.sync_gradients(trunk)
    seconds = (middle - start, time.perf_counter() - middle)
    return {"seconds": seconds, "grads": [x.grad, *(p.grad for p in trunk.parameters())]}


def train(line: str, rows: int) -> dict:
    """Numbers of a row, of the rank with the most of each."""
    layout, seen = _prepare(line), {}
    _step(layout, 64, torch.float32, {})  # loads what is loaded once
    grown = _Peak()
    with weft.traffic(layout) as moved:
        found = _step(layout, rows, torch.float32, seen)
    numbers = [*found["seconds"], sum(seen.values()) / MIB, grown.mib(), moved.bytes / MIB]
    row = dict(zip(TITLES["train"][2:], _most(layout, numbers)))
    return row | {"error": _train_error(layout), "layout": line, "rows": rows}


def _train_error(layout: Layout) -> float:
    """Largest relative gap to one process in fp64, of all gradients of a small table."""
    alone = _step(Layout.single(), 37, torch.float64, {})["grads"]
    mine = _step(layout, 37, torch.float64, {})["grads"]
    wanted = [layout.shard(alone[0], DIMS), *alone[1:]]
    pairs = zip(mine, wanted, alone)
    gaps = [((a - b).abs().max() / w.abs().max()).item() for a, b, w in pairs if a.numel()]
    return _most(layout, [max(gaps)])[0]


# -- prediction ------------------------------------------------------------------------------------


def predict(line: str, rows: int) -> dict:
    """Numbers of a row: encoding, and test rows in batches against the cache."""
    ranks = Layout.parse(line).world_size
    encoding = _prepare(f"rows: pass_q={ranks}" if ranks > 1 else line)
    trunk = compose(one_block(), encoding, seed=1)
    predicting = _bound(line)
    small = trunk.encode(_cells(encoding, 64, torch.float32), "rows", lengths=_lengths(64))
    _answer(predicting, small.to(predicting), 16)
    grown, start = _Peak(), time.perf_counter()
    cache = trunk.encode(_cells(encoding, rows, torch.float32), "rows", lengths=_lengths(rows))
    seconds, encoded = time.perf_counter() - start, grown.mib()
    moved = cache.to(predicting)
    del cache
    assert moved.nbytes == moved.bytes_per_rank[predicting.rank]
    grown, per_row = _Peak(), {}
    for batch in BATCHES:
        times = [_answer(predicting, moved, batch) for _ in range(3)]
        per_row[str(batch)] = 1e3 * statistics.median(times) / batch
    numbers = [seconds, moved.nbytes / MIB, encoded, grown.mib()]
    row = dict(zip(TITLES["predict"][2:], _most(predicting, numbers)))
    error = _predict_error(predicting, encoding)
    return row | {"ms per test row": per_row, "error": error, "layout": line, "rows": rows}


def _lengths(rows: int) -> dict[str, int]:
    return {"rows": rows, "features": FEATURES}


@torch.no_grad()
def _answer(layout: Layout, cache, batch: int) -> float:
    """Seconds that a batch of test rows takes."""
    trunk = compose(one_block(), layout, seed=1)
    x = _cells(layout, batch, torch.float32)
    start = time.perf_counter()
    trunk(x, lengths=_lengths(batch), cache=cache)
    return time.perf_counter() - start


@torch.no_grad()
def _predict_error(layout: Layout, encoding: Layout) -> float:
    """Largest relative gap to one pass over 50 rows on one process in fp64, 37 of them encoded."""
    spec, single, made = one_block(), Layout.single(), {"seed": 1, "dtype": torch.float64}
    whole = _cells(single, 50, torch.float64)
    wanted = compose(spec, single, **made)(whole, masks={"first-keys": 37})[:, 37:]
    trunk = compose(spec, encoding, **made)
    cache = trunk.encode(encoding.shard(whole[:, :37], DIMS), "rows", lengths=_lengths(37))
    test = layout.shard(whole[:, 37:], DIMS)
    found = compose(spec, layout, **made)(test, lengths=_lengths(13), cache=cache.to(layout))
    gap = (found - layout.shard(wanted, DIMS)).abs().max() / wanted.abs().max()
    return _most(layout, [gap.item()])[0]


# -- what both measure -----------------------------------------------------------------------------


def _prepare(line: str) -> Layout:
    layout = _bound(line)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // layout.world_size))
    return layout


class _Peak:
    """By how much this process's memory grows from here, at most; Linux only."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self._status("VmRSS")

    def mib(self) -> float:
        return (self._status("VmHWM") - self.before) / MIB

    @staticmethod
    def _status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _most(layout: Layout, numbers: list[float]) -> list[float]:
    rows = map(json.loads, layout.bound.all_gather_text(json.dumps(numbers)).values())
    return [max(column) for column in zip(*rows)]


def measure(part: str, rows: int, ranks: int) -> dict:
    """A row of a part on so many new processes."""
    fn, lines = (train, TRAIN) if part == "train" else (predict, PREDICT)
    if ranks > 1:
        return run(fn, lines[ranks], rows, ranks=ranks)
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:  # nothing is in its memory yet
        return alone.submit(fn, lines[ranks], rows).result()


# -- results ---------------------------------------------------------------------------------------


def report(data: dict) -> str:
    """The results as Markdown."""
    lines = [f"# Tables of many rows\n\n`{data['command']}`, {data['machine']}."]
    lines.append("One block, 5 features, 96 wide, 4 heads, fp32; the largest number of any rank.")
    for part, titles in TITLES.items():
        found = sorted((r for r in data["rows"] if r["part"] == part), key=_place)
        more = [f"ms/row, {b} at a time" for b in BATCHES] if part == "predict" else []
        titles = ["ranks", *titles, *more, "error in fp64"]
        lines += [f"\n## {part}\n", _line(titles), _line(["---:"] * len(titles))]
        for r in found:
            per_row = [f"{r['ms per test row'][str(b)]:.2f}" for b in BATCHES] if more else []
            shown = [r["ranks"], f"`{r['layout']}`", f"{r['rows']:,}"]
            numbers = [f"{r[t]:,.1f}" for t in TITLES[part][2:]]
            lines.append(_line([*shown, *numbers, *per_row, f"{r['error']:.0e}"]))
        lines += [
            f"\nRanks: {r['ranks']}, rows: {r['rows']:,}: {r['note']}."
            for r in found
            if r.get("note")
        ]
    return "\n".join(lines) + "\n"


def _place(row: dict) -> tuple[int, int]:
    return row["rows"], row["ranks"]


def _line(cells: list) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def plot(data: dict, path: Path) -> None:
    """Memory per rank over ranks, beside 1/P; time per test row over the batch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    kinds = (("train", "peak MiB"), ("train", "kept MiB"), ("predict", "cache MiB"))
    for color, (part, key) in enumerate(kinds):
        lengths = sorted({r["rows"] for r in data["rows"] if r["part"] == part})
        for rows, marker in zip(lengths, itertools.cycle("os^v")):
            mine = [r for r in data["rows"] if (r["part"], r["rows"]) == (part, rows)]
            mine.sort(key=_place)
            ranks, size = [r["ranks"] for r in mine], [r[key] for r in mine]
            left.plot(ranks, size, f"C{color}{marker}-", label=f"{part}: {key}, {rows:,} rows")
            ideal = [size[0] * ranks[0] / n for n in ranks]
            left.plot(ranks, ideal, f"C{color}:", lw=1)
    for r in sorted((r for r in data["rows"] if r["part"] == "predict"), key=_place):
        label = f"ranks: {r['ranks']}, context rows: {r['rows']:,}"
        right.plot(BATCHES, [r["ms per test row"][str(b)] for b in BATCHES], "o-", label=label)
    left.set(xlabel="ranks", ylabel="MiB of one rank (dotted: 1/P)", xscale="log", yscale="log")
    right.set(xlabel="test rows at a time", ylabel="ms per test row", xscale="log", yscale="log")
    for ax, ticks in ((left, (1, 2, 4, 8)), (right, BATCHES)):
        ax.set_xticks(ticks, ticks)
        ax.minorticks_off()
        if ax.lines:
            ax.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Measure what is asked for, one number of ranks after the other, and report all so far."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=("train", "predict", "plot"))
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], choices=(1, 2, 4, 8))
    parser.add_argument("--note", default="", help="what readers should know, as what else ran")
    parser.add_argument("--out", default="tables", help="name of the result files")
    options = parser.parse_args()
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(MIB))  # else glibc keeps what is freed
    path = RESULTS / f"{options.out}.json"
    data = json.loads(path.read_text()) if path.exists() else {"rows": []}
    data |= {"command": "python -m benchmarks.tables", "machine": _machine()}
    for ranks in options.ranks if options.part != "plot" else ():
        row = {"part": options.part, "ranks": ranks, "note": options.note}
        row |= measure(options.part, options.rows, ranks)
        key = (row["part"], *_place(row))
        data["rows"] = [r for r in data["rows"] if (r["part"], *_place(r)) != key] + [row]
        save(options.out, data)  # after each: the next may take hours
        print(json.dumps(row), flush=True)
    (RESULTS / f"{options.out}.md").write_text(report(data))
    plot(data, RESULTS / f"{options.out}.png")


def _machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
