"""The first minutes on a GPU: is everything exact, how fast is it, does it overlap.

    python -m benchmarks.gpu                      the parts that are missing, as far as 9 minutes go
    python -m benchmarks.gpu                      again: the next of them, until none is missing
    python -m benchmarks.gpu --wheels FOLDER      where weft's requirements are not installed
    python -m benchmarks.gpu --only exactness     this part, also again; repeat for more
    python -m benchmarks.gpu --list

Every part is a process with a limit of 150 s at most, so that one that fails, hangs or spoils the
GPU's memory does not take the others with it. Every row is in results/gpu.md as soon as it is
known: whatever ends the command, finished rows stay. The last line names parts that failed or took
too long, and those that found something wrong; a later call repeats the first, after those that no
call began. Without a GPU the parts that a
CPU can run are rehearsed at tiny sizes, and results/gpu-rehearsal.md says which were left out.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from .parts import CannotRun, Where
from .report import Report

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
#: Seconds of one call of the command.
LIMIT = 9 * 60 + 30
_LEFT_OUT = 3  # the exit code of a part that this machine cannot run


@dataclass(frozen=True)
class Part:
    """A part: the function that runs it, and its limit in seconds.

    The function yields lines, each as soon as it is known.
    """

    title: str
    module: str
    function: str
    seconds: int


#: What the first call does comes first: the rest waits for the next.
PARTS = {
    "support": Part("Versions, and which kernel computes what", "support", "run", 60),
    "exactness": Part("Every kernel against fp64", "exactness", "run", 120),
    "merge": Part("The fused merge", "compiled", "run_merge", 60),
    "sync": Part("Does the CPU wait for the GPU", "host", "run_sync", 90),
    "speed": Part("Speed against SDPA", "speed", "run", 150),
    "peak": Part("Memory of a ring of eight", "messages", "run_peak", 60),
    "step": Part("Memory of a training step, predicted and allocated", "step", "run", 150),
    "tests": Part("Tests that need a GPU", "tests", "run", 150),
    "world": Part("A world of one: bind, vote, sum, end", "world", "run", 60),
    "overlap": Part("A message during attention", "messages", "run_overlap", 60),
    "documents": Part("Packed documents, new lengths in every step", "documents", "run", 90),
    "steps": Part("The CPU's work per step", "host", "run_steps", 60),
    "exactness-flex": Part("FlexAttention against fp64", "exactness", "run_flex", 150),
    "flex": Part("FlexAttention of many kinds", "compiled", "run_flex", 150),
    "ranks": Part("Virtual ranks as a share of one call", "kernels", "run", 150),
    "long": Part("A million tokens", "speed", "run_long", 120),
}


def main() -> None:
    """Run parts and print their rows; each is in the report when it is printed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; repeatable")
    parser.add_argument("--list", action="store_true", help="the parts there are")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the report's folder")
    parser.add_argument("--wheels", type=Path, help="wheels of what weft needs and is not here")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.list:
        for name, part in PARTS.items():
            print(f"{name:14} {part.title}, {part.seconds} s at most")
        return
    if options.part:
        run_here(PARTS[options.part], Where(device))
        return
    if options.wheels:
        install(options.wheels, options.results / "wheels")
    path = options.results / ("gpu.md" if device == "cuda" else "gpu-rehearsal.md")
    report, deadline = Report(path, heading(device), [*PARTS]), time.monotonic() + LIMIT
    for name in options.only or report.missing():
        if deadline - time.monotonic() < PARTS[name].seconds:
            break
        run_apart(name, PARTS[name], report)
    said = {"missing, call the command again": report.missing(), "FAILED": report.failed()}
    said["WRONG"] = report.wrong()
    more = "".join(f"; {what}: {', '.join(names)}" for what, names in said.items() if names)
    print(f"\nwritten to {path}{more}")


def install(wheels: Path, target: Path) -> None:
    """Wheels of a folder, without a network, where the parts find them, and weft's source."""
    found = sorted(map(str, wheels.glob("*.whl")))
    if not found:
        raise SystemExit(f"--wheels {wheels}: there is no *.whl")
    if not target.exists():
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
        subprocess.run([*command, "--target", str(target), *found], check=True)
    here = [str(target.absolute()), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in here if path)


def run_here(part: Part, where: Where) -> None:
    """One part in this process: prints its rows, or ends with `_LEFT_OUT` and the reason."""
    module = importlib.import_module(f".{part.module}", __package__)
    try:
        for line in getattr(module, part.function)(where):
            print(line, flush=True)
    except CannotRun as reason:
        print(reason)
        raise SystemExit(_LEFT_OUT) from None


def run_apart(name: str, part: Part, report: Report) -> None:
    """One part in a process: its rows go to the report as they come, whatever becomes of it."""
    report.begin(name, part.title)
    print(f"\n## {part.title}\n", flush=True)
    start, late = time.monotonic(), threading.Event()
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        )

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(part.seconds, kill)
        timer.start()
        last = ""
        for line in process.stdout or ():
            last = line.rstrip("\n")
            report.add(name, last)
            print(last, flush=True)
        code = process.wait()
        timer.cancel()
        errors.seek(0)
        tail = "\n".join(errors.read().strip().splitlines()[-15:])
    taken = time.monotonic() - start
    verdict = f"*{taken:.0f} s*"
    if late.is_set():
        verdict = f"**FAILED**: not done within {part.seconds} s; the rows above stand."
    elif code == _LEFT_OUT:
        verdict = f"Left out: {last}."
    elif code:
        verdict = f"**FAILED** after {taken:.0f} s:\n\n```\n{tail}\n```"
    report.end(name, verdict, failed=late.is_set() or code not in (0, _LEFT_OUT))
    print(f"\n{verdict}", flush=True)


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
