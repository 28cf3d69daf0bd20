"""Time before anything is computed: planning a call, `weft explain`, and `import weft`.

    python benchmarks/planning.py                    writes results/planning.md and planning.json
    python benchmarks/planning.py plans              prints this part only; so explain, imports

Plans: one rank plans the forward and the backward pass of a call on 1,048,576 tokens, 32 heads and
8 key/value heads of dim 128 in bf16. Times are those of one core that this process used, the best
and the median over new packings; the program was scheduled for an earlier packing, as in every
training step but the first. "with calls" adds the kernel calls of all blocks of both passes, and
"first" is the first plan of a mesh, with its scheduling. Commands and imports are timed likewise:
seconds of one core, with everything that they load.

The documents are 128 of random lengths, new ones for every plan, or 128 of equal lengths that no
two ranks share, so that no rank can infer from one other rank the needs of all.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

sys.path.insert(0, os.path.dirname(__file__))  # as a script, and as a module of benchmarks

import torch
from timing import RESULTS, save

import weft
from weft.masks import Mask
from weft.plan.plan import Plan
from weft.plan.predict import plan_for
from weft.plan.problem import Problem

TOKENS, DOCUMENTS = 1 << 20, 128
#: A layout and the milliseconds that its plan, with its kernel calls, may take.
WANTED = {
    "ring=8": 5,
    "ring=64": 20,
    "tile=16x16": 50,
    "ulysses=8 x tile=8x8": 100,
    "tile=32x32": 100,
}
LARGE = ("ring=512", "tile=16x32", "ring=4096", "tile=64x64", "ulysses=8 x tile=8x64")
#: What `weft explain` is asked for, and the seconds that it may take.
EXPLAINED = {
    "tokens: ring=256": 3,
    "tokens(zigzag): tile=16x16": 3,
    "tokens: ulysses=4 x tile=8x8": 3,
    "tokens: ring=4096": 15,
    "tokens(zigzag): tile=64x64": 15,
    "tokens: ulysses=8 x tile=8x64": 15,
}
YARDSTICK = "import torch.distributed.tensor"


# -- plans ----------------------------------------------------------------------------------------


def packings(seed: int) -> Iterator[Mask]:
    """New packings of documents of random lengths, without end."""
    draw = random.Random(seed)
    while True:
        cuts = sorted(draw.sample(range(1, TOKENS), DOCUMENTS - 1))
        lengths = (b - a for a, b in itertools.pairwise([0, *cuts, TOKENS]))
        yield weft.Documents(tuple(lengths)) & weft.Causal()


def same(mask: Callable[[], Mask]) -> Iterator[Mask]:
    """A mask made anew each time."""
    while True:
        yield mask()


def equal() -> Mask:
    return weft.Documents((TOKENS // DOCUMENTS,) * DOCUMENTS) & weft.Causal()


def plan(layout: weft.Layout, mask: Mask) -> Plan:
    """One rank's plan; a rank in the middle, which has neighbours before and after."""
    problem = Problem(
        axes=("tokens",),
        lengths=((TOKENS, TOKENS),),
        batch=1,
        heads=32,
        kv_heads=8,
        head_dim=128,
        value_dim=128,
        dtype=torch.bfloat16,
        device="cpu",
        mask=mask,
    )
    return plan_for(layout, problem, rank=layout.world_size // 3)


def planned(line: str, masks: Iterator[Mask], repeats: int) -> dict[str, float]:
    """Milliseconds of the first plan, and of later ones without and with their kernel calls."""
    layout = weft.Layout.parse(f"tokens(zigzag): {line}")
    weft.clear_caches()
    first, _ = timed(layout, next(masks))
    alone, with_calls = zip(*(timed(layout, next(masks)) for _ in range(repeats)))
    return {
        "first": first,
        "plan": min(alone),
        "best": min(with_calls),
        "median": statistics.median(with_calls),
    }


def timed(layout: weft.Layout, mask: Mask) -> tuple[float, float]:
    start = time.process_time()
    made = plan(layout, mask)
    alone = time.process_time()
    made.check_kernels()
    return 1e3 * (alone - start), 1e3 * (time.process_time() - start)


def plans(repeats: int = 7) -> tuple[str, list]:
    """The tables of planning times, and their rows."""
    lines = [
        "| layout, zigzag | ranks | mask | target | with calls, best | median | plan | first |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    rows = []
    cases = [
        (line, name, masks, wanted)
        for line, wanted in WANTED.items()
        for name, masks in (("random documents", packings(1)), ("equal documents", same(equal)))
    ] + [
        (line, name, masks, None)
        for line in LARGE
        for name, masks in (
            ("full", same(weft.Full)),
            ("causal", same(weft.Causal)),
            ("random documents", packings(2)),
        )
    ]
    for line, name, masks, wanted in cases:
        found = planned(line, masks, repeats)
        ranks = weft.Layout.parse(f"tokens: {line}").world_size
        rows.append({"layout": line, "ranks": ranks, "mask": name, "wanted": wanted} | found)
        shown = (f"{found[key]:.1f}" for key in ("best", "median", "plan", "first"))
        lines.append(f"| {line} | {ranks} | {name} | {wanted or ''} | {' | '.join(shown)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines), rows


# -- commands and imports -------------------------------------------------------------------------


def explain(repeats: int = 2) -> tuple[str, list]:
    """Seconds of `weft explain` as a command, imports and all."""
    lines = ["| weft explain | mask | target | best | median |", "|---|---|---:|---:|---:|"]
    rows = []
    for (line, wanted), mask in itertools.product(EXPLAINED.items(), ("full", "causal")):
        command = [sys.executable, "-m", "weft", "explain", line, "--mask", mask]
        command += ["--length", str(TOKENS)]
        seconds = [run(command) for _ in range(repeats)]
        rows.append({"layout": line, "mask": mask, "wanted": wanted, "seconds": seconds})
        shown = f"{min(seconds):.1f} | {statistics.median(seconds):.1f}"
        lines.append(f"| {line} | {mask} | {wanted} | {shown} |")
        print(lines[-1], flush=True)
    return "\n".join(lines), rows


def imports(repeats: int = 7) -> tuple[str, dict]:
    """Seconds of `import weft` and of `import torch.distributed.tensor`, in turn."""
    run([sys.executable, "-c", "import weft"])  # writes what Python keeps of modules it has read
    seconds: dict[str, list[float]] = {}
    for code in ("pass", "import torch", YARDSTICK, "import weft") * repeats:
        seconds.setdefault(code, []).append(run([sys.executable, "-c", code]))
    lines = ["| python -c | best | median |", "|---|---:|---:|"]
    for code, taken in seconds.items():
        lines.append(f"| {code} | {min(taken):.2f} | {statistics.median(taken):.2f} |")
    more = min(seconds["import weft"]) - min(seconds[YARDSTICK])
    lines.append(f"\n`import weft` takes {more:.2f} s more than `{YARDSTICK}` (target: 0.3).")
    print("\n".join(lines), flush=True)
    return "\n".join(lines), seconds


def run(command: list[str]) -> float:
    """Seconds of processor time of a command. Raises `CalledProcessError` where it fails.

    Python keeps modules compiled, as it does for whoever has not forbidden it.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    start = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - start


PARTS = {
    "plans": ("Plans, in milliseconds", plans),
    "explain": ("`weft explain`, in seconds", explain),
    "imports": ("Imports, in seconds", imports),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=PARTS, help="this one only; nothing is written")
    chosen = parser.parse_args().part
    torch.set_num_threads(1)
    about = __doc__.split("\n\n", 2)[2]
    text, data = f"# Before anything is computed\n\n{about}", {}
    for name, (title, part) in PARTS.items():
        if chosen in (None, name):
            table, data[name] = part()
            text += f"\n## {title}\n\n{table}\n"
    if chosen is None:
        (RESULTS / "planning.md").write_text(text)
        save("planning", data)


if __name__ == "__main__":
    main()
