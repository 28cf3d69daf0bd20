"""The conformance kit on other packages' attentions, and on weft's: who is exact, and where not.

    pip install --no-deps --target /tmp/peers deepspeed==0.19.8 psutil py-cpuinfo hjson msgpack \\
        ninja tqdm ring-attention-pytorch==0.5.20 beartype jaxtyping wadler-lindig \\
        mosaic-attention==0.3.0 yunchang==0.6.4 axolotl-ringmaster==0.2.7 ring-flash-attn==0.1.8
    python -m benchmarks.conformance --peers /tmp/peers
    python -m benchmarks.conformance --peers /tmp/peers --only deepspeed

`--no-deps` keeps your torch. Four CPU processes, gloo; writes results/conformance.md. Packages that
need flash-attn, which needs a GPU, get its functions in plain torch (`benchmarks/flash_kernel.py`).
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections import Counter

import torch

import weft
from weft.testing import Report, conformance, standard_cases

from .peers import PEERS
from .timing import RESULTS

RANKS = 4
HEAD = """# Conformance

`python -m benchmarks.conformance --peers DIR` runs the cases of `weft.testing` on {ranks} CPU
processes over gloo, forward and backward, and compares output and gradients with softmax attention
on one device in fp64. Errors are relative to the largest entry. "refused": raised on every rank.
"FAILED": only some ranks raised or were killed, gave no answer in time, or gloo broke. Adapters:
`benchmarks/peers.py`. Packages that call flash-attn, which needs a GPU, were given its functions in
plain torch (`benchmarks/flash_kernel.py`), so their communication and merging is what was tried.
Python {python}, torch {torch}.
"""


def about(report: Report) -> str:
    """A row of the summary: cases by verdict."""
    counts = Counter(f.verdict for f in report.findings)
    wrong = [name for name, off in worst(report).items() if off > report.limit]
    numbers = " | ".join(str(counts[v]) for v in ("exact", "refused", "WRONG", "FAILED"))
    return f"| {report.name} | {numbers} | {', '.join(wrong)} |"


def worst(report: Report) -> dict[str, float]:
    """The largest error of every tensor."""
    found: dict[str, float] = {}
    for finding in report.findings:
        for name, off in finding.errors.items():
            found[name] = max(off, found.get(name, 0.0))
    return found


def main() -> None:
    """Run the chosen peers, print their tables, and write the results."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--peers", help="a folder with the packages, made by pip install --target")
    options.add_argument("--only", help=f"one of: {', '.join(PEERS)}")
    options.add_argument("--timeout", type=float, default=40.0)
    chosen = options.parse_args()
    if chosen.peers:
        sys.path.append(chosen.peers)  # after the environment's own torch
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    summary = [
        "\n| attention | exact | refused | wrong | failed | what is wrong |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    parts = []
    for name in [chosen.only] if chosen.only else PEERS:
        peer = PEERS[name]
        cases = [c for c in standard_cases(RANKS) if c.name in (peer.cases or c.name)]
        on = weft.Layout.parse(peer.line) if peer.line else RANKS
        given = {"dtype": peer.dtype, "cases": cases, "timeout": chosen.timeout, "name": name}
        report = conformance(peer.attend, on, **given)
        print(report, flush=True)
        summary.append(about(report))
        heading = (
            f"{peer.attend.__doc__.strip()} {str(peer.dtype)[6:]}, allowed {report.limit:.0e}."
        )
        parts.append(f"\n## {name}\n\n{heading}\n\n{report.markdown()}\n")
    if not chosen.only:
        head = HEAD.format(ranks=RANKS, **versions)
        (RESULTS / "conformance.md").write_text("\n".join([head + "\n".join(summary), *parts]))


if __name__ == "__main__":
    main()
