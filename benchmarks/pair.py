"""Memory of a Pairformer block per rank: `python -m benchmarks.pair [--objects N] [--write]`.

Every rank is a process. Columns, each the largest over all ranks: bytes kept for the backward pass
(tensors that autograd saves, without weights), growth of the process's peak memory over a forward
and a backward pass (on Linux), bytes received, and the error against one process in fp64.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import weft
from weft.launch.launcher import run
from weft.layout import Layout
from weft_models.pair.pairformer import PairformerBlock

from .common import saving

LAYOUTS = {
    1: "",
    2: "rows: ring=2",
    3: "rows: ring=3",
    4: "rows: ring=2; columns: pass_q=2",
    6: "rows: ring=3; columns: pass_q=2",
}
SINGLE_DIM, PAIR_DIM = 96, 32
PAIR, SINGLE = {"rows": 1, "columns": 2}, {"rows": 1}
MIB = 1 << 20
RESULTS = Path(__file__).parent / "results" / "pair.md"


def _layout(line: str) -> Layout:
    return Layout.parse(line).build("cpu") if line else Layout.single()


def _inputs(objects: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    single = torch.randn(1, objects, SINGLE_DIM, generator=make)
    return single.to(dtype), torch.randn(1, objects, objects, PAIR_DIM, generator=make).to(dtype)


def step(layout: Layout, objects: int, dtype: torch.dtype, seen: dict[int, int]) -> list:
    """One step on this rank's part: outputs and gradients of the weights; saved bytes in `seen`."""
    make = torch.Generator().manual_seed(1)
    sizes = {"single_heads": 4, "pair_heads": 4, "layout": layout, "generator": make}
    block = PairformerBlock(SINGLE_DIM, PAIR_DIM, **sizes).to(dtype)
    single, pair = _inputs(objects, dtype)
    single, pair = layout.shard(single, SINGLE), layout.shard(pair, PAIR)
    with saving(block, seen):
        out = block(single, pair, dict.fromkeys(PAIR, objects))
    loss = out[0].square().sum() / layout.size("columns") + out[1].square().sum()
    loss.backward()
    layout.sync_gradients(block)
    outputs = layout.gather(out[0].detach(), SINGLE), layout.gather(out[1].detach(), PAIR)
    return [*outputs, *(p.grad for p in block.parameters())]


def _status(key: str) -> int:
    """Bytes that Linux says this process has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def measure(line: str, objects: int) -> dict[str, float]:
    """On every rank: the numbers of a row, the largest over all ranks."""
    layout, seen = _layout(line), {}
    torch.set_num_threads(1)
    step(layout, 8, torch.float32, {})  # loads what is loaded once
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    with weft.traffic(layout) as moved:
        step(layout, objects, torch.float32, seen)
    grown = _status("VmHWM") - before
    expected = step(Layout.single(), 24, torch.float64, {})
    results = step(layout, 24, torch.float64, {})
    error = max(
        ((a - b).abs().max() / b.abs().max().clamp_min(1.0)).item()
        for a, b in zip(results, expected)
    )
    own = torch.tensor([sum(seen.values()), grown, moved.bytes, error]).double()
    rows = layout.gather(own[None], dict.fromkeys(layout.sharding, 0)) if line else own[None]
    kept, grown, received, error = rows.max(0).values.tolist()
    return {"kept": kept / MIB, "peak": grown / MIB, "received": received / MIB, "error": error}


def main() -> None:
    """Print the table, or write it to benchmarks/results/pair.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=192)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS}")
    args = parser.parse_args()
    lines = [
        "# Memory of a Pairformer block",
        "",
        f"`python -m benchmarks.pair --write`: {args.objects} objects, {PAIR_DIM} channels in fp32 "
        f"({4 * PAIR_DIM * args.objects**2 / MIB:.1f} MiB), MiB of the largest rank.",
        "",
        "| ranks | layout | kept for backward | peak | received | largest error in fp64 |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for ranks, line in LAYOUTS.items():
        row = run(measure, line, args.objects, ranks=ranks)
        numbers = " | ".join(f"{row[key]:.0f}" for key in ("kept", "peak", "received"))
        name = f"`{line}`" if line else "one process"
        lines.append(f"| {ranks} | {name} | {numbers} | {row['error']:.0e} |")
        print(lines[-1], flush=True)
    if args.write:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
