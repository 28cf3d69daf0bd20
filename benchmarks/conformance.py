"""The conformance kit on other packages' attentions, and on weft's: who is exact, and where not.

    pip install --no-deps --target /tmp/peers deepspeed==0.19.8 psutil py-cpuinfo hjson msgpack \\
        ninja tqdm ring-attention-pytorch==0.5.20 beartype jaxtyping wadler-lindig \\
        mosaic-attention==0.3.0 yunchang==0.6.4 axolotl-ringmaster==0.2.7
    python -m benchmarks.conformance --peers /tmp/peers
    python -m benchmarks.conformance --peers /tmp/peers --only deepspeed

`--no-deps` keeps your torch. Four CPU processes, gloo; writes results/conformance.md.
"""

from __future__ import annotations

import argparse
import sys

from weft.testing import conformance

from .peers import PEERS
from .timing import RESULTS

HEAD = """# Conformance

`python -m benchmarks.conformance --peers DIR` runs the cases of `weft.testing` on {ranks} CPU
processes over gloo, forward and backward, and compares output and gradients with softmax attention
on one device in fp64. Errors are relative to the largest entry. "refused": raised on every rank.
"FAILED": only some ranks raised, or one gave no answer in time. Adapters: `benchmarks/peers.py`.
"""


def main() -> None:
    """Run the chosen peers, print their tables, and write the results."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--peers", help="a folder with the packages, made by pip install --target")
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--only", help=f"one of: {', '.join(PEERS)}")
    options.add_argument("--timeout", type=float, default=20.0)
    chosen = options.parse_args()
    if chosen.peers:
        sys.path.append(chosen.peers)  # after the environment's own torch
    parts = [HEAD.format(ranks=chosen.ranks)]
    for name in [chosen.only] if chosen.only else PEERS:
        attend, dtype = PEERS[name]
        report = conformance(attend, chosen.ranks, dtype=dtype, timeout=chosen.timeout, name=name)
        print(report)
        about = f"{attend.__doc__.strip()} {str(dtype)[6:]}, allowed {report.limit:.0e}."
        parts.append(f"\n## {name}\n\n{about}\n\n{report.markdown()}\n")
    if not chosen.only:
        (RESULTS / "conformance.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
