"""The time of `weft check --symbolic` for 4,096 ranks, without starting ranks or making tensors.

python -m benchmarks.symbolic                # writes results/symbolic.md
python -m benchmarks.symbolic --only 2       # one case by its number, nothing written
"""

from __future__ import annotations

import argparse
import time

import weft
from weft.masks.names import mask_named
from weft.proof.symbolic import prove
from weft.testing.cases import Case

from .timing import RESULTS

TOKENS = 65_536
#: layout and mask, each on 4,096 ranks
CASES = (
    ("tokens: ring=4096", "full"),
    ("tokens: ring=4096", "causal"),
    ("tokens(zigzag): ring=4096", "causal"),
    ("tokens: tile=64x64", "causal"),
    ("tokens: tile=64x64", "documents"),
    ("tokens: tile=64x64", "causal-documents"),
    ("tokens(zigzag): tile=64x64", "causal"),
    ("tokens: ulysses=8 x ring=512", "causal"),
    ("tokens: hierarchical=64x64", "causal"),
)


def row(line: str, mask: str) -> str:
    """A line of the table: what came out, and the seconds it took."""
    layout = weft.Layout.parse(line)
    shown = mask_named(mask, TOKENS, TOKENS, 1)
    case = Case(mask, TOKENS, batch=1, heads=16, dim=64, mask=shown)
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        claims = prove(layout, case.problem)
        verdict = "proven" if all(claim.ok for claim in claims) else "NOT PROVEN"
        of = next(c.how for c in claims if "score" in c.what)
    except weft.UnsupportedError as error:
        verdict, of = "refused", str(error)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return f"| `{line}` | {mask} | {verdict} | {wall:.0f} | {cpu:.0f} | {of} |"


def main() -> None:
    """Prove the cases and write the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", type=int)
    given = options.parse_args()
    chosen = CASES if given.only is None else [CASES[given.only]]
    rows = []
    for line, mask in chosen:
        rows.append(row(line, mask))
        print(rows[-1], flush=True)
    if given.only is None:
        (RESULTS / "symbolic.md").write_text(
            "# Proofs without tensors\n\n"
            f"`python -m benchmarks.symbolic`: `weft check LAYOUT --symbolic --length {TOKENS} "
            "--mask MASK` for 4,096 ranks on one core, each layout forward and backward.\n\n"
            "| layout | mask | | seconds | of them CPU | visible scores |\n"
            "| --- | --- | --- | ---: | ---: | --- |\n" + "\n".join(rows) + "\n"
        )


if __name__ == "__main__":
    main()
