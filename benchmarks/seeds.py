"""Random layouts on a seeded transport: late messages in any order, ranks killed at any step.

`python -m benchmarks.campaigns seeds` makes the runs.

Every run attends forward and backward on a random layout, mask and shape, compared in fp64 with
plain attention; one in five kills a rank at a random message. Right is: without a kill every
number within 1e-11; with one, every other rank either ends with right numbers or raises a
`RankError`, and nobody waits for ever.
"""

from __future__ import annotations

import collections
import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass

import weft
from tests.seeded import Kill, Killed, SeededRun, run_seeded
from weft.testing.cases import Case
from weft.testing.check import local_part
from weft.testing.reference import relative_error

TERMS = ("ring={}", "gather={}", "pass_q={}", "burst={}", "ulysses={}", "tile={}x{}",
         "hierarchical={}x{}")  # fmt: skip
LIMIT = 1e-11


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


def campaign(numbers: Iterable[int], show: bool = False) -> tuple[collections.Counter, int, str]:
    """Make runs: how they ended, how many were wrong, and the digest of all."""
    ended: collections.Counter = collections.Counter()
    digest, wrong = hashlib.sha256(), 0
    for number in numbers:
        drawn = draw(number)
        run, errors = attend(drawn, number)
        why = judge(drawn, run, errors)
        raised = sum(e is not None for e in run.errors)
        ended["wrong" if why else f"a rank killed, {raised} raised" if raised else "exact"] += 1
        wrong += bool(why)
        digest.update(f"{number} {run.digest} {raised};".encode())
        if why or show:
            print(f"#{number} {drawn}\n    {why or 'right'}; messages by rank {run.steps}")
    return ended, wrong, digest.hexdigest()
