"""Bytes that attention moves: weft's tiles against a ring, at 16 to 4,096 ranks, in one process.

    python benchmarks/volume.py                  writes results/volume.md and results/volume.json
    python benchmarks/volume.py --ranks 16 64    prints these rows only

Numbers are read off the plan that weft would run, of rank 0. One unit u is a rank's share of the
queries, (N/P) heads head_dim element_size bytes; g = key/value heads / heads. The fp32 numbers
that travel with rows (logsumexp, delta) are left out of the reductions, as in the papers, and
counted in the column "bytes".

Every layout that a row names is then run, forward and backward, by one rank of torch's fake process
group on meta tensors: the code of real ranks, through to the messages that it hands to torch. What
that rank counts must be what the plan says, byte for byte, or nothing is written.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import weft
from weft._torch import fake_ranks
from weft.plan.plan import Pass, Plan
from weft.plan.predict import plan_for
from weft.plan.problem import Problem
from weft.plan.program import Payload

HEADS, HEAD_DIM, DTYPE = 32, 128, torch.bfloat16
#: Bytes of one token's queries.
TOKEN = HEADS * HEAD_DIM * DTYPE.itemsize
#: Tokens of a rank where heads are split too, so that all shares are whole.
MIX_TOKENS = 8
RANKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
RATIOS = {"1": 1, "1/4": 4, "1/8": 8}  # g -> query heads per key/value head
#: Reductions that papers report for 64, 128 and 256 GPUs, in percent.
PAPERS = {64: 71, 128: 77, 256: 85}
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Volume:
    """Units u received by a rank: forward and backward, and both with the fp32 row numbers."""

    forward: float
    backward: float
    exact: float

    @property
    def together(self) -> float:
        return self.forward + self.backward


def plan(line: str, group: int, ranks: int, tokens: int = 1) -> Plan:
    """Rank 0's plan on a layout line, `tokens` tokens per rank, `group` query heads per KV head."""
    n = ranks * tokens
    problem = Problem(
        axes=("tokens",),
        lengths=((n, n),),
        batch=1,
        heads=HEADS,
        kv_heads=HEADS // group,
        head_dim=HEAD_DIM,
        value_dim=HEAD_DIM,
        dtype=DTYPE,
        device="cpu",
    )
    return plan_for(weft.Layout.parse(line), problem, rank=0)


def received(run: Plan, tile: Pass, row_numbers: bool) -> float:
    """Units that one pass of a tile program receives."""
    item, accum = run.problem.dtype.itemsize, run.accum_dtype.itemsize if row_numbers else 0
    d, e = run.problem.head_dim * item, run.problem.value_dim * item
    row = {
        Payload.Q: d + e + 2 * accum if tile.backward else d,
        Payload.KV: d + e,
        Payload.OUT: e + accum,
        Payload.DQ: d,
        Payload.DKV: d + e,
    }
    total = 0
    for t in tile.program.transfers:
        low, high = tile.transfer_rows(t)[1]
        total += (high - low) * run.compute[t.payload.side].heads * row[t.payload]
    return total / unit(run)


def resharded(run: Plan) -> float:
    """Units received in all-to-alls before and after the tile program; equal in both passes."""
    total = 0.0
    for side, resharding in enumerate(run.resharding):
        for level, _ in enumerate(run.all_to_alls[side]):
            after = resharding.state(level + 1, run.coords)
            share = after.batch * after.heads * after.size(2) * run.problem.head_dim
            size = run.sizes[resharding.steps[level].mesh_dim]
            # q goes there and out comes back; k and v go there
            total += 2 * share * (size - 1) / size * run.problem.dtype.itemsize
    return total / unit(run)


def unit(run: Plan) -> float:
    """Bytes of a rank's share of the queries."""
    return TOKEN * run.problem.n / math.prod(run.sizes.values())


@functools.cache
def volume(line: str, group: int, ranks: int, tokens: int = 1) -> Volume:
    """What rank 0 receives on a layout, by its plan."""
    run = plan(line, group, ranks, tokens)
    passes = (run.forward, run.backward)
    forward, backward = (received(run, tile, False) + resharded(run) for tile in passes)
    exact = sum(received(run, tile, True) + resharded(run) for tile in passes)
    return Volume(forward, backward, exact)


def tiles(ranks: int) -> Iterable[tuple[int, int]]:
    """(query chunks, key/value chunks) of every power-of-two tile."""
    for power in range(int(math.log2(ranks)) + 1):
        yield 2**power, ranks // 2**power


def tile_line(a: int, b: int, ulysses: int = 1) -> str:
    """The layout line of a tile of `a` query chunks by `b` key/value chunks."""
    head = f"ulysses={ulysses} x " if ulysses > 1 else ""
    if a * b == 1:
        return f"tokens: ulysses={ulysses}"
    return f"tokens: {head}tile={b}x{a}" if a > 1 else f"tokens: {head}ring={b}"


def lower_bound(group: int, ranks: int, backward: bool) -> float:
    """The least units that a rank can receive which computes all heads of its scores.

    It must see a chunks of queries and b of keys with a b >= P, holding one of each:
    min (a - 1) x + (b - 1) y = 2 sqrt(x y P) - x - y, where x is what a chunk of queries costs
    (Q and O; or Q, dO and dQ) and y what one of keys does (K and V; or K, V, dK and dV).
    """
    x, y = (3, 4 / group) if backward else (2, 2 / group)
    if x > y * ranks:
        return y * (ranks - 1)  # fewer chunks than one cannot be had: a = 1
    return 2 * math.sqrt(x * y * ranks) - x - y


@dataclass(frozen=True)
class Row:
    """One line of the table: percent less than the ring, shapes as query x key/value chunks."""

    ranks: int
    g: str
    forward: float
    backward: float
    together: float
    shapes: tuple[str, str, str]
    bytes: float
    bound: tuple[float, float]
    papers: int | None
    mix: str = ""
    mix_together: float = 0.0


def row(ranks: int, g: str, mixes: bool = True) -> Row:
    """The best power-of-two tile of each pass and of both, and the best mix with Ulysses."""
    group = RATIOS[g]
    found = {(a, b): volume(tile_line(a, b), group, ranks) for a, b in tiles(ranks)}
    ring = found[1, ranks]
    best = {
        name: min(found, key=lambda shape, name=name: (getattr(found[shape], name), shape))
        for name in ("forward", "backward", "together")
    }

    def saved(name: str) -> float:
        return 100 * (1 - getattr(found[best[name]], name) / getattr(ring, name))

    bound = tuple(
        getattr(found[best[name]], name) / lower_bound(group, ranks, name == "backward")
        for name in ("forward", "backward")
    )
    mix, mixed = best_mix(ranks, group) if mixes else ("", ring)
    return Row(
        ranks,
        g,
        *(saved(name) for name in ("forward", "backward", "together")),
        tuple("x".join(map(str, best[name])) for name in best),
        100 * (1 - found[best["together"]].exact / ring.exact),
        bound,
        PAPERS.get(ranks),
        mix,
        100 * (1 - mixed.together / ring.together),
    )


def best_mix(ranks: int, group: int) -> tuple[str, Volume]:
    """Heads over the innermost ranks, as many as there are key/value heads, and a tile outside."""
    ways = min(HEADS // group, ranks)
    rest = ranks // ways
    found = {
        tile_line(a, b, ways): volume(tile_line(a, b, ways), group, ranks, MIX_TOKENS)
        for a, b in tiles(rest)
    }
    line = min(found, key=lambda name: found[name].together)
    return line.removeprefix("tokens: "), found[line]


def table(rows: list[Row]) -> str:
    """The rows as markdown."""
    lines = [
        "| ranks | g | forward % | backward % | together % | papers % | shapes | bytes % | "
        "x bound | with heads | together % |",
        "|---:|---:|---:|---:|---:|---:|---|---:|---|---|---:|",
    ]
    for r in rows:
        lines.append(
            f"| {r.ranks} | {r.g} | {r.forward:.1f} | {r.backward:.1f} | {r.together:.1f} | "
            f"{r.papers or ''} | {', '.join(r.shapes)} | {r.bytes:.1f} | "
            f"{r.bound[0]:.2f}, {r.bound[1]:.2f} | {r.mix} | {r.mix_together:.1f} |"
        )
    return "\n".join(lines)


ABOUT = f"""# Bytes moved, against a ring

Reduction of what a rank receives against a ring of the same ranks (K and V forward; K, V, dK and
dV backward, in the input's dtype), for the best power-of-two tile of each pass, and for one shape
in both. {HEADS} heads of dim {HEAD_DIM}, bf16; g = key/value heads / heads. Shapes are query x
key/value chunks for forward, backward, together. "bytes" is the reduction of both passes with the
fp32 logsumexp and delta counted. "x bound" divides forward and backward by the least that any rank
can receive that computes all heads of its scores and holds one copy of its data. "with heads":
Ulysses over as many ranks as there are key/value heads, the rest a tile. All layouts named here
were also run, forward and backward, by one rank of torch's fake process group on meta tensors,
which counted exactly these bytes.
"Papers" are the figures that Mesh-Attention (arXiv:2512.20968) is cited with.

"""


def count(line: str, group: int, ranks: int, tokens: int = 1, rank: int = 0) -> float:
    """Units that one rank of `ranks` receives, forward and backward, as it counts them itself.

    Raises `RuntimeError` where it counts anything else than its plan says.
    """

    def make(heads: int) -> torch.Tensor:
        shape = (1, heads, tokens, HEAD_DIM)
        return torch.empty(shape, dtype=DTYPE, device="meta", requires_grad=True)

    layout = weft.Layout.parse(line)
    q, k, v = make(HEADS), make(HEADS // group), make(HEADS // group)
    with fake_ranks(rank, ranks):
        layout = layout.build("cpu")
        with weft.traffic(layout) as moved:
            out = weft.attention(q, k, v, layout, "tokens", length=ranks * tokens)
            out.backward(torch.empty_like(out))
    if not moved.as_predicted:
        raise RuntimeError(f"{line}: predicted, counted {moved.differences()}")
    return moved.bytes / (TOKEN * tokens)


def named(r: Row) -> list[tuple[str, int]]:
    """The layouts that a row names, each with its tokens per rank: the ring first, the mix last."""
    shapes = ([int(n) for n in shape.split("x")] for shape in dict.fromkeys(r.shapes))
    lines = dict.fromkeys([tile_line(1, r.ranks), *(tile_line(a, b) for a, b in shapes)])
    return [(line, 1) for line in lines] + [(f"tokens: {r.mix}", MIX_TOKENS)] * bool(r.mix)


def check(r: Row) -> int:
    """Run the layouts of a row, and raise `RuntimeError` if a byte differs; how many there are."""
    group = RATIOS[r.g]
    for line, tokens in named(r):
        found, forecast = (f(line, group, r.ranks, tokens) for f in (count, exact))
        if found != forecast:
            raise RuntimeError(
                f"{r.ranks} ranks, {line}: counted {found} u, predicted {forecast} u"
            )
    return len(named(r))


def exact(line: str, group: int, ranks: int, tokens: int) -> float:
    """Units that the plan says, with the fp32 row numbers, of what `count` counts."""
    return volume(line, group, ranks, tokens).exact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", help="these only; nothing is written")
    args = parser.parse_args()
    started = time.perf_counter()
    rows = [row(ranks, g) for g in RATIOS for ranks in args.ranks or RANKS]
    print(table(rows))
    print(f"planned in {time.perf_counter() - started:.0f} s")
    started = time.perf_counter()
    print(f"{sum(map(check, rows))} layouts run by one rank each: every byte as planned")
    print(f"counted in {time.perf_counter() - started:.0f} s")
    if not args.ranks:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "volume.md").write_text(ABOUT + table(rows) + "\n")
        (RESULTS / "volume.json").write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
