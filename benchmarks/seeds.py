"""Random layouts on a seeded transport: late messages in any order, ranks killed at any step.

    python -m benchmarks.seeds                    # 10,000 runs
    python -m benchmarks.seeds --write            # and results/seeds.md
    python -m benchmarks.seeds --count 300 --first 5000
    python -m benchmarks.seeds --only 4711        # one run again, described

Every run attends forward and backward on a random layout, mask and shape, compared in fp64 with
plain attention; one in five kills a rank at a random message. Right is: without a kill every
number within 1e-11; with one, every other rank either ends with right numbers or raises a
`RankError`, and nobody waits for ever. The last line is a digest of all that happened, message by
message: the same whenever the same runs are made.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import weft
from tests.seeded import Kill, Killed, SeededRun, run_seeded
from weft.testing.cases import Case
from weft.testing.check import local_part
from weft.testing.reference import relative_error

TERMS = ("ring={}", "gather={}", "pass_q={}", "burst={}", "ulysses={}", "tile={}x{}",
         "hierarchical={}x{}")  # fmt: skip
LIMIT = 1e-11
RESULTS = Path(__file__).parent / "results" / "seeds.md"


@dataclass(frozen=True)
class Draw:
    """One random run."""

    line: str
    case: Case
    kill: Kill | None


def draw(number: int) -> Draw:
    """The run of a number: at most eight ranks."""
    rng = random.Random(f"draw/{number}")
    while True:
        terms, ranks, ways = [], 1, 1
        for _ in range(rng.choice((1, 1, 2))):
            term = rng.choice(TERMS)
            sizes = [rng.choice((2, 2, 3, 4)) for _ in range(term.count("{}"))]
            terms.append(term.format(*sizes))
            for size in sizes:
                ranks *= size
                ways *= size if term.startswith("ulysses") else 1
        if ranks <= 8:
            break
    order = rng.choice(("", "(zigzag)", "(striped)"))
    line = f"tokens{order}: {' x '.join(terms)}"
    n, batch = rng.randint(1, 19), rng.choice((1, 2))
    kv_heads = rng.choice((1, 2)) * ways
    mask = _mask(rng, n, batch)
    square = isinstance(mask, weft.Causal | weft.Window | weft.Documents)
    m = n if square or rng.random() < 0.5 else rng.randint(1, 19)
    if isinstance(mask, weft.KeyPadding):
        m = n
    case = Case(str(number), n, m, batch, kv_heads * rng.choice((1, 2)), kv_heads, 2, mask)
    kill = Kill(rng.randrange(ranks), rng.randrange(24)) if rng.random() < 0.2 else None
    return Draw(line, case, kill)


def _mask(rng: random.Random, n: int, batch: int) -> weft.Mask:
    cut = rng.randint(1, n)
    return rng.choice(
        (
            weft.Full(),
            weft.Causal(),
            weft.Causal(window=rng.randint(1, n)),
            weft.Window(rng.randint(0, 4), rng.randint(0, 4)),
            weft.Documents(tuple(x for x in (cut, n - cut) if x)),
            weft.KeyPadding(tuple(rng.randint(0, n) for _ in range(batch))),
        )
    )


def attend(drawn: Draw, seed: object) -> tuple[SeededRun, list[float]]:
    """The run, and per rank its largest error (0 where it raised)."""
    layout, case = weft.Layout.parse(drawn.line), drawn.case
    full = case.draw()
    expected = case.wanted(full)

    def rank(transport) -> float:
        bound = layout.on(transport)
        leaves = [local_part(bound, case, full[x], x).clone().requires_grad_() for x in "qkv"]
        out = weft.attention(*leaves, bound, "tokens", case.mask, length=(case.n, case.m))
        out.backward(local_part(bound, case, full["dout"], "dout").clone())
        results = {"out": out.detach()} | {f"d{x}": t.grad for x, t in zip("qkv", leaves)}
        return max(
            relative_error(t, local_part(bound, case, expected[name], name), expected[name])
            for name, t in results.items()
        )

    run = run_seeded(layout.mesh, rank, seed, drawn.kill)
    return run, [result or 0.0 for result in run.results]


def judge(drawn: Draw, run: SeededRun, errors: list[float]) -> str:
    """Why a run is wrong, empty if it is right."""
    if max(errors) > LIMIT:
        return f"off by {max(errors):.1e}"
    died = drawn.kill is not None and isinstance(run.errors[drawn.kill.rank], Killed)
    for rank, error in enumerate(run.errors):
        if error is None:
            continue
        if not died:
            return f"rank {rank} raised {type(error).__name__}: {error}"
        named = f"rank {drawn.kill.rank} failed" in str(error)
        if rank != drawn.kill.rank and not (isinstance(error, weft.RankError) and named):
            return f"rank {rank} does not name rank {drawn.kill.rank}: {error}"
    return ""


def main() -> int:
    """Make the runs; print what went wrong, how runs ended, and the digest of all."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--count", type=int, default=10_000)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--only", type=int, help="one run, by its number")
    options.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    numbers = range(chosen.first, chosen.first + chosen.count)
    ended: collections.Counter = collections.Counter()
    digest, wrong, start = hashlib.sha256(), 0, time.perf_counter()
    for number in numbers if chosen.only is None else [chosen.only]:
        drawn = draw(number)
        run, errors = attend(drawn, number)
        why = judge(drawn, run, errors)
        raised = sum(e is not None for e in run.errors)
        ended["wrong" if why else f"a rank killed, {raised} raised" if raised else "exact"] += 1
        wrong += bool(why)
        digest.update(f"{number} {run.digest} {raised};".encode())
        if why or chosen.only is not None:
            print(f"#{number} {drawn}\n    {why or 'right'}; messages by rank {run.steps}")
    for name, count in sorted(ended.items()):
        print(f"{count:6} {name}")
    took = time.perf_counter() - start
    print(f"{sum(ended.values())} runs in {took:.0f} s, {wrong} wrong; digest {digest.hexdigest()}")
    if chosen.write:
        RESULTS.write_text(report(chosen, ended, took, wrong, digest.hexdigest()))
    return 1 if wrong else 0


def report(
    chosen: argparse.Namespace, ended: collections.Counter, took: float, wrong: int, digest: str
) -> str:
    """What is written of all runs."""
    killed = sum(count for name, count in ended.items() if "killed" in name)
    rows = "\n".join(f"| {name} | {count:,} |" for name, count in sorted(ended.items()))
    return f"""# Seeded runs

`python -m benchmarks.seeds --count {chosen.count} --first {chosen.first} --write`: random layouts,
masks and shapes on a transport that delivers late and in any legal order, by a seed. A rank was
killed in {killed:,} of them. {took:.0f} s on one core, {wrong} wrong.

| how it ended | runs |
| --- | ---: |
{rows}

Digest of all that happened, message by message, the same whenever these runs are made:
`{digest}`
"""


if __name__ == "__main__":
    raise SystemExit(main())
