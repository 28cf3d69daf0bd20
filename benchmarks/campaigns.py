"""Campaigns that test a promise, each with its page in `benchmarks/results`.

    python -m benchmarks.campaigns seeds                    random layouts, late messages, kills
    python -m benchmarks.campaigns seeds --only 4711        one of them again, described
    python -m benchmarks.campaigns symbolic                 proofs for 4,096 ranks, without tensors
    python -m benchmarks.campaigns resources                leaks over many layouts and calls
    python -m benchmarks.campaigns blackbox                 the cost of the trace of last steps
    python -m benchmarks.campaigns conformance --peers DIR  other packages' attentions
    python -m benchmarks.campaigns kills                    ranks killed in training that goes on
    python -m benchmarks.campaigns elastic                  agents killed, and runs with fewer ranks
    python -m benchmarks.campaigns faults                   ranks killed and frozen in any program
    python -m benchmarks.campaigns users                    another uid attacks a run (as root)

`--write` writes the page, `--count N` makes fewer runs than it has, `--only N` one of them again.

Conformance needs, in the folder DIR (`--no-deps` keeps your torch):

    pip install --no-deps --target DIR deepspeed==0.19.8 psutil py-cpuinfo hjson msgpack \\
        ninja tqdm ring-attention-pytorch==0.5.20 beartype jaxtyping wadler-lindig \\
        mosaic-attention==0.3.0 yunchang==0.6.4 axolotl-ringmaster==0.2.7 ring-flash-attn==0.1.8
"""

from __future__ import annotations

import argparse
import collections
import gc
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import weft
from weft.launch import launcher
from weft.testing import Report, standard_cases
from weft.testing.cases import Case
from weft_cli.mask_names import mask_named
from weft_proof.symbolic import prove

from .common import RESULTS, table
from .elastic import elastic
from .faults import faults
from .kills import kills
from .users import users

LINE = "tokens: ring=2"
BOTH = (
    "ring=4, pass_q=4, gather=4, burst=4, ulysses=4, tile=2x2, hierarchical=2x2, ring=2 x ulysses=2"
)
MIXED = ["tokens(zigzag): ring=4", *(f"tokens: {rule}" for rule in BOTH.split(", "))]

# -- proofs without tensors ------------------------------------------------------------------------

TOKENS = 65_536
#: Layout and mask, each on 4,096 ranks.
PROOFS = (
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


def proof(line: str, mask: str) -> tuple[object, ...]:
    """What came out, and the seconds it took."""
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
    return f"`{line}`", mask, verdict, f"{wall:.0f}", f"{cpu:.0f}", of


def symbolic(given: argparse.Namespace) -> str:
    """The time of `weft check --symbolic` for 4,096 ranks on one core."""
    head = "layout | mask | | seconds: | of them CPU: | visible scores"
    rows = table(head, [proof(*case) for case in PROOFS[: given.count]])
    return f"""# Proofs without tensors

`python -m benchmarks.campaigns symbolic`: `weft check LAYOUT --symbolic --length {TOKENS} --mask
MASK` for 4,096 ranks on one core, each layout forward and backward.

{rows}
"""


# -- leaks -----------------------------------------------------------------------------------------


def held() -> tuple[int, int, str]:
    """Descriptors, threads and MiB of memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    size = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return len(os.listdir("/proc/self/fd")), threading.active_count(), f"{size:.0f}"


def attend(layout: weft.Layout, number: int, length: int = 16) -> None:
    """Attend forward and backward under a mask that is new."""
    local = layout.local_length("tokens", length)
    q, k, v = (torch.randn(1, 4, local, 8, requires_grad=True) for _ in range(3))
    mask: weft.Mask = weft.MaskMod(lambda b, h, q, k: (q % 3 != 1) & (q - k < 9 + number))
    if number % 2:
        mask = weft.Documents((first := 1 + number % (length - 1), length - first))
    weft.attention(q, k, v, layout, "tokens", mask, length=length).sum().backward()


def resources_rank(lines: Sequence[str], parts: dict[str, int]) -> list[tuple[object, ...]]:
    """What a rank holds at a tenth of the way and at the end of each part."""
    torch.set_num_threads(1)
    found, begin = [], time.perf_counter()
    bind = lambda line: weft.Layout.parse(line).build("cpu", timeout=60)  # noqa: E731
    layouts, draw = [bind(line) for line in lines], random.Random(0)
    for what, count in parts.items():
        for number in range(1, count + 1):
            layout = bind(LINE) if "bound" in what else draw.choice(layouts)
            attend(layout, number, draw.randrange(16, 200) if "lengths" in what else 16)
            if number in (count // 10, count):
                took = f"{time.perf_counter() - begin:.0f}"
                found.append((f"{number:,} {what}", len(lines), *held(), took))
    return found


def resources(given: argparse.Namespace) -> str:
    """Descriptors, threads and memory over many layouts and many calls."""
    calls = given.count or 20_000
    parts = {"layouts bound and dropped": max(calls // 100, 10), "calls under new masks": calls}
    rows = launcher.run(resources_rank, (LINE,), parts, ranks=2)
    mixed = {"calls of other lengths, masks and layouts": calls // 2}
    rows += launcher.run(resources_rank, MIXED, mixed, ranks=4)
    return f"""# Leaks

`python -m benchmarks.campaigns resources`: each call with its backward pass, under a mask that was
not there before, of 2 processes on `{LINE}`, then of 4 on {len(MIXED)} layouts in turns; rank 0.

{table("after | layouts: | descriptors: | threads: | memory, MiB: | seconds:", rows)}

What grows in the last part are caches by value, each of a bounded size. A run that emptied them
every 500 calls (`weft.clear_caches`) had 320 MiB after 550 calls and 322 after 5,500.
"""


# -- the black box ---------------------------------------------------------------------------------


def blackbox_rank(tokens: int, repeats: int) -> dict[bool, list[float]]:
    """Seconds of every call of a rank, with and without a box in turns."""
    torch.set_num_threads(1)
    layout = weft.Layout.parse(LINE).build("cpu", timeout=60)
    x = layout.shard(torch.randn(1, 4, tokens, 32), {"tokens": 2}).requires_grad_()
    box = layout.bound.box
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * repeats + 20):
        kept = turn % 2 == 0
        layout.bound.box = box if kept else None
        begin = time.perf_counter()
        weft.attention(x, x, x, layout, "tokens", length=tokens).sum().backward()
        if turn >= 20:
            seconds[kept].append(time.perf_counter() - begin)
    layout.bound.box = box
    return seconds


def noting(repeats: int = 20_000) -> float:
    """Seconds to note one step that begins, is waited for and ends."""
    from weft.launch.trace import Trace, root

    peer = ((1, 1),)
    box = Trace(0, 1, f"benchmark-{os.getpid()}", root())
    samples = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(repeats // 20):
            with box.step("tokens: ring=2", "ring", "kv", 123456789, 3, peer, peer, 65536):
                pass
        samples.append((time.perf_counter() - begin) / (repeats // 20))
    box.close()
    return statistics.median(samples)


def blackbox(given: argparse.Namespace) -> str:
    """Calls so short that their own cost is nearly all of it, with a box and without."""
    tokens, repeats = 64, given.count or 1500
    seconds = launcher.run(blackbox_rank, tokens, repeats, ranks=2)
    ratios = statistics.quantiles(a / b for a, b in zip(seconds[True], seconds[False]))
    rows = [
        (name, f"{statistics.median(seconds[kept]) * 1e3:.3f}")
        for name, kept in (("with a box", True), ("without", False))
    ]
    return f"""# The black box

`python -m benchmarks.campaigns blackbox`: 2 processes on `{LINE}`, {tokens} tokens, 4 heads of 32,
forward and backward, medians of {repeats} calls in turn.

{table(" | per call, ms:", rows)}

Ratio of neighbours in time, median: {ratios[1]:.3f} (half of them between {ratios[0]:.2f} and
{ratios[2]:.2f}). To note one step that begins, is waited for and ends takes {noting() * 1e6:.1f} µs
by itself.
"""


# -- random layouts on a seeded transport ----------------------------------------------------------


def seeds(given: argparse.Namespace) -> str:
    """Runs of `benchmarks.seeds`: what went wrong, how runs ended, and the digest of all."""
    from .seeds import campaign

    torch.set_num_threads(1)
    count = given.count or 10_000
    numbers = range(count) if given.only is None else [given.only]
    start = time.perf_counter()
    ended, wrong, digest = campaign(numbers, show=given.only is not None)
    took = time.perf_counter() - start
    killed = sum(n for name, n in ended.items() if "killed" in name)
    given.failed = wrong > 0
    return f"""# Seeded runs

`python -m benchmarks.campaigns seeds --count {count}`: random layouts, masks and shapes on a
transport that delivers late and in any legal order, by a seed. A rank was killed in {killed:,} of
them. {took:.0f} s on one core, {wrong} wrong.

{table("how it ended | runs:", [(name, f"{n:,}") for name, n in sorted(ended.items())])}

Digest of all that happened, message by message, the same whenever these runs are made:
`{digest}`
"""


# -- other packages --------------------------------------------------------------------------------


def about(report: Report) -> tuple[object, ...]:
    """A row of the summary: cases by verdict, and which tensors are wrong."""
    counts = collections.Counter(f.verdict for f in report.findings)
    worst: dict[str, float] = {}
    for finding in report.findings:
        for name, off in finding.errors.items():
            worst[name] = max(off, worst.get(name, 0.0))
    wrong = ", ".join(name for name, off in worst.items() if off > report.limit)
    return report.name, *(counts[v] for v in ("exact", "refused", "WRONG", "FAILED")), wrong


def conformance(given: argparse.Namespace) -> str:
    """The conformance kit on other packages' attentions, and on weft's: who is exact, and where."""
    from .peers import PEERS

    if given.peers:
        sys.path.append(given.peers)  # after the environment's own torch
    ranks, summary, parts = 4, [], []
    for name, peer in PEERS.items():
        cases = [c for c in standard_cases(ranks) if c.name in (peer.cases or c.name)]
        on = weft.Layout.parse(peer.line) if peer.line else ranks
        options = {"dtype": peer.dtype, "cases": cases, "timeout": 40.0, "name": name}
        report = weft.testing.conformance(peer.attend, on, **options)
        print(report, flush=True)
        summary.append(about(report))
        what = f"{peer.attend.__doc__.strip()} {str(peer.dtype)[6:]}, allowed {report.limit:.0e}."
        parts.append(f"## {name}\n\n{what}\n\n{report.markdown()}\n")
    head = "attention | exact: | refused: | wrong: | failed: | what is wrong"
    return f"""# Conformance

`python -m benchmarks.campaigns conformance --peers DIR` runs the cases of `weft.testing` on {ranks}
CPU processes over gloo, forward and backward, and compares output and gradients with softmax
attention on one device in fp64. Errors are relative to the largest entry. "refused": raised on
every rank. "FAILED": only some ranks raised or were killed, gave no answer in time, or gloo broke.
Adapters: `benchmarks/peers.py`. Packages that call flash-attn, which needs a GPU, were given its
functions in plain torch (`benchmarks/flash_kernel.py`), so their communication and merging is what
was tried.
Python {platform.python_version()}, torch {torch.__version__}.

{table(head, summary)}

""" + "\n".join(parts)


CAMPAIGNS = (seeds, symbolic, resources, blackbox, conformance, kills, elastic, faults, users)


def main() -> int:
    """Run a campaign, print its page, and write it if asked."""
    by_name = {campaign.__name__: campaign for campaign in CAMPAIGNS}
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("campaign", choices=by_name)
    parser.add_argument("--count", type=int, help="runs, of this campaign's own kind")
    parser.add_argument("--only", type=int, help="one run, by its number")
    parser.add_argument("--back", action="store_true", help="of elastic: the agent comes back")
    parser.add_argument("--peers", help="of conformance: where the other packages are")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/CAMPAIGN.md")
    given = parser.parse_args()
    page = by_name[given.campaign](given)
    print(page)
    if given.write:
        (RESULTS / f"{given.campaign}.md").write_text(page)
    return int(getattr(given, "failed", False))


if __name__ == "__main__":
    raise SystemExit(main())
