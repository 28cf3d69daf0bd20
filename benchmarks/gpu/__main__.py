"""The first twenty minutes on a GPU: is everything exact, how fast is it, does it overlap.

    python -m benchmarks.gpu                      all parts, within 20 minutes
    python -m benchmarks.gpu --only exactness     one part; repeat for more
    python -m benchmarks.gpu --list

Every part is a process of its own with a limit of time, so that one that fails, hangs or spoils the
GPU's memory does not take the others with it. Writes results/gpu.md. Without a GPU the parts that a
CPU can run are rehearsed at tiny sizes, and results/gpu-rehearsal.md says which were left out.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from .parts import CannotRun, Where

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
#: Seconds for all parts together.
LIMIT = 20 * 60
_LEFT_OUT = 3  # the exit code of a part that this machine cannot run


@dataclass(frozen=True)
class Part:
    """A part: the function that runs it, and its limit in seconds."""

    title: str
    module: str
    function: str
    seconds: int


PARTS = {
    "exactness": Part("Every kernel against fp64", "exactness", "run", 180),
    "tests": Part("Tests that need a GPU", "tests", "run", 180),
    "sync": Part("Does the CPU wait for the GPU", "host", "run_sync", 90),
    "flex": Part("FlexAttention of many kinds", "compiled", "run_flex", 240),
    "merge": Part("The fused merge", "compiled", "run_merge", 90),
    "speed": Part("Speed beside SDPA", "speed", "run", 240),
    "overlap": Part("A message beside attention", "messages", "run_overlap", 90),
    "peak": Part("Memory of a ring of eight", "messages", "run_peak", 90),
    "ranks": Part("Virtual ranks as a share of one call", "kernels", "run", 240),
    "steps": Part("The CPU's work per step", "host", "run_steps", 90),
}


def main() -> None:
    """Run parts, print each as it ends, write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; repeatable")
    parser.add_argument("--list", action="store_true", help="the parts there are")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.list:
        for name, part in PARTS.items():
            print(f"{name:10} {part.title}, {part.seconds} s at most")
        return
    if options.part:
        run_here(PARTS[options.part], Where(device))
        return
    chosen = options.only or list(PARTS)
    sections, deadline = [], time.monotonic() + LIMIT
    for name in chosen:
        sections.append(run_apart(name, PARTS[name], deadline))
        print(sections[-1], flush=True)
    if options.only:
        return
    path = RESULTS / ("gpu.md" if device == "cuda" else "gpu-rehearsal.md")
    RESULTS.mkdir(exist_ok=True)
    path.write_text("\n\n".join([heading(device), *sections]) + "\n")
    print(f"\nwritten to {path.relative_to(ROOT)}")


def run_here(part: Part, where: Where) -> None:
    """One part in this process: prints its report, or ends with `_LEFT_OUT` and the reason."""
    module = importlib.import_module(f".{part.module}", __package__)
    try:
        print(getattr(module, part.function)(where))
    except CannotRun as reason:
        print(reason)
        raise SystemExit(_LEFT_OUT) from None


def run_apart(name: str, part: Part, deadline: float) -> str:
    """One part in a process of its own: its section of the report, whatever becomes of it."""
    left = min(part.seconds, deadline - time.monotonic())
    title, start = f"## {part.title}", time.monotonic()
    if left < 5:
        return f"{title}\n\nLeft out: the {LIMIT // 60} minutes were over."
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return f"{title}\n\n**FAILED**: not done within {left:.0f} s.\n\n{output}".rstrip()
    taken = time.monotonic() - start
    if done.returncode == _LEFT_OUT:
        return f"{title}\n\nLeft out: {done.stdout.strip()}."
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-15:])
        return f"{title}\n\n**FAILED** after {taken:.0f} s:\n\n```\n{last}\n```"
    return f"{title}\n\n{done.stdout.strip()}\n\n*{taken:.0f} s*"


def heading(device: str) -> str:
    """What ran where; of a CPU that it is no GPU."""
    if device == "cuda":
        software = {
            "torch": torch.__version__,
            "CUDA": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),
        }
        versions = ", ".join(f"{name} {version}" for name, version in software.items())
        return f"# On one {torch.cuda.get_device_name()}\n\n{versions}."
    return (
        "# Rehearsal on a CPU\n\n"
        "**No GPU ran this.** `python -m benchmarks.gpu` found none, so the parts that a CPU can "
        "run were run at tiny sizes: that shows that they work, and nothing of a GPU. Times are "
        f"those of this CPU.\n\ntorch {torch.__version__}, {platform.machine()}."
    )


if __name__ == "__main__":
    main()
