"""Mutated files, lines and command lines: each is taken, or refused in one line, in bounded time.

    python -m benchmarks.fuzz                  # 20,000 inputs
    python -m benchmarks.fuzz --count 1000 --seed 7
    python -m benchmarks.fuzz --only 4711      # one input again, and its message

An input is made from the seed and its number alone, so what fails can be had again. Files are
shipped layouts, strategies and models with lines, words and bytes changed; lines are layouts on
one line; checkpoints, weights and black boxes are damaged and forged, see `fuzz_folders`;
run files, configurations and files of tokens are those of `fuzz_runs`;
command lines run `weft list`, `explain`, `check --threads`, `train` and `rates` in this
process, the last two only with options that must be refused.

What is accepted is run to its end on threads: a small call of every layout, a small forward pass of
every model. What is too large for that is only read.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import io
import math
import os
import random
import re
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import typer

import weft
from weft.declare import catalog
from weft.declare.hardware import Hardware
from weft_cli.cli import app
from weft_models.declare.model_file import ModelSpec
from weft_planner.work import lengths_of_model, model_work

from .fuzz_folders import Folders
from .fuzz_runs import Runs

#: CPU seconds that one input may take; a command may draw a picture or plan some dozens of ranks.
LIMIT = 5.0
#: Bytes by which one input may raise the most that the process has held.
PEAK = 1 << 30
#: Ranks, weights and blocks of what is run.
MOST_RANKS, MOST_WEIGHTS, MOST_BLOCKS = 8, 1 << 20, 24
#: Seconds after which the process says where it is, and ends.
HANG = 60.0
#: Bytes that all inputs together may take: what takes more raises MemoryError.
MEMORY = 4 << 30

NUMBERS = (
    "0", "-1", "1", "2", "3", "-0", "1.5", "1e308", "nan", "inf", "-inf", "0x10", "1_0", "٣",
    "18446744073709551616", "-9223372036854775809", "9" * 5000, "true", "1e-400", "007",
)  # fmt: skip
WORDS = (
    "", " ", "R", "R(top_k)", "S(seq)", "S(head) -> S(seq)", "P(softmax)", "->", "S()", "S(seq",
    "ring", "tile", "mesh_tile", "heads", "batch", "tokens", "replicate", "__class__", "a" * 300,
    "é" * 200, "/", "../..", "/dev/null", "~", "./", "x", " x ", ":", ";", "=", "[", "]]", "{", '"',
    "'''", "#", "\\", "\\u0000", "\\x00", "\x00", "\x7f", "\ud7ff", "🧵", "[bold]", "%s", "{0}",
    "[" * 1000 + "]" * 1000, "{a=" * 200 + "1" + "}" * 200, " " * 100_000, "\t" * 50_000,
    "x" * 100_000, "(" * 5000, "a." * 2000 + "b",
)  # fmt: skip
LINES = (
    "tokens: ring=4",
    "tokens(zigzag): ulysses=2 x ring=4",
    "batch: dp=2; heads: tp=2; rows: tile=2x4; features: local",
    "tokens: hierarchical=2x2",
    "tokens(striped): pass_q=3",
    "replicate: r=2; tokens: burst=2",
)
COMMANDS = (
    ["list"],
    ["list", "layouts"],
    ["explain", "call", "tile-2x2", "--length", "64", "--mask", "causal"],
    ["explain", "call", "tokens(zigzag): ring=4", "--length", "64", "--heads", "4"],
    ["explain", "call", "pair-2x2", "--axis", "rows", "--length", "16", "--dtype", "float32"],
    ["check", "ring-2", "--threads", "--length", "13", "--batch", "1", "--heads", "2"],
    ["check", "tile-2x2", "--threads", "--length", "9", "--mask", "window:3"],
    ["check", "tokens: ulysses=2", "--threads", "--length", "8", "--heads", "4", "--seed", "1"],
)
#: These would start processes or train: only what must be refused before that.
REFUSED = (
    ["train", "tabular", "no-such-layout", "--steps", "1"],
    ["train", "no-such-model", "ring-2"],
    ["rates", "no-such-layout", "--length", "64"],
)
SIZES = ("0", "1", "2", "3", "8", "17", "-1", "1_0", "1073741825", "18446744073709551616")
OPTIONS = {
    "--axis": ("tokens", "rows", "rows+columns", "tokens+tokens"),
    "--length": (*SIZES, "tokens=8", "rows=4,columns=3", "a=1,b=2"),
    "--keys": SIZES,
    "--heads": SIZES,
    "--kv-heads": SIZES,
    "--head-dim": SIZES,
    "--batch": SIZES,
    "--nproc": SIZES,
    "--seed": (*SIZES, "9223372036854775807", "9223372036854775808"),
    "--mask": (
        "full",
        "causal",
        "window:2",
        "window:1:2:3",
        "window:",
        "first-keys:9999",
        "documents",
        "documents:1:2",
        "padding",
        "padding:1",
        "prefix:-1",
        "causal:1",
    ),
    "--order": ("contiguous", "zigzag", "striped"),
    "--dtype": ("fp64", "float32", "bfloat16", "fp16", "fp8", "int8", "float8_e4m3fn"),
    "--device": ("cpu", "cuda", "meta"),
    "--timeline": ("x.png", "x.gif", "/nowhere/x.png", ""),
    "--trace": ("", ".", "x.json", "/", "/nowhere/x.json", "a" * 300),
    "--score-matrix": ("x.svg", "", ".png", "a" * 300 + ".png"),
    "--symbolic": (),
    "--help": (),
    "--nonsense": (),
}
VALUES = (
    "tokens", "rows", "rows+columns", "tokens+tokens", "tokens=8", "a=1,b=2", "full", "causal",
    "window:2", "window:1:2:3", "window:", "first-keys:9999", "documents:1:2", "prefix:-1",
    "zigzag", "striped", "fp64", "bfloat16", "fp8", "int8", "cpu", "cuda", "meta", "x.png", "x.gif",
    "/nowhere/x.png", ".", "/",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of one input: `kind` is "taken", "refused", or what escaped."""

    kind: str
    message: str
    seconds: float
    nbytes: int = 0

    @property
    def wrong(self) -> str:
        """Why this is a defect, empty if it is none."""
        if self.kind not in ("taken", "refused", "usage"):
            return f"{self.kind} escaped: {self.message[:300]}"
        if self.kind == "refused" and ("\n" in self.message.strip() or len(self.message) > 2100):
            return f"a refusal of {len(self.message)} characters: {self.message[:200]!r}"
        if self.seconds > LIMIT:
            return f"took {self.seconds:.1f} s"
        if self.nbytes > PEAK:
            return f"took {self.nbytes:,} bytes"
        return ""


class Fuzz:
    """Makes the input of a number, and feeds it to what should read it."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder = seed, folder
        self.folders, self.runs = Folders(folder), Runs(folder, mutated)
        self.files = {
            kind: [path.read_text() for path in sorted(catalog.folder(kind).glob("*.toml"))]
            for kind in catalog.KINDS
        }

    def run(self, number: int) -> tuple[str, object, Outcome]:
        """The reader's name, the input, and what became of it."""
        rng = random.Random(f"{self.seed}/{number}")
        feeds = (self._file, self._line, self._command, self.folders.feed, self.runs.feed)
        feed = rng.choices(feeds, (25, 15, 10, 30, 20))[0]
        name, given, call = feed(rng)
        start, before = time.process_time(), _peak()
        try:
            kind, message = call()
        except weft.WeftError as error:
            kind, message = "refused", str(error)
        except Exception as error:
            kind, message = type(error).__name__, str(error)
        took = time.process_time() - start
        return name, given, Outcome(kind, message, took, _peak() - before)

    def _file(self, rng: random.Random) -> tuple[str, object, Callable]:
        kind = rng.choice(catalog.KINDS)
        text = rng.choice(self.files[kind])
        text = varied(rng, text)
        data = text.encode(errors="surrogatepass")
        if rng.random() < 0.08:
            at = rng.randrange(len(data) + 1)
            data = data[:at] + rng.randbytes(rng.randint(1, 4)) + data[at:]
        path = self.folder / "input.toml"
        path.write_bytes(data)
        load = {
            "layouts": weft.Layout.load,
            "strategies": weft.Strategy.load,
            "models": ModelSpec.load,
            "hardware": Hardware.load,
        }[kind]

        def call() -> tuple[str, str]:
            loaded = load(path)
            if kind == "layouts":
                weft.Layout.from_dict(loaded.declaration).to_toml()
                return run_layout(loaded, str(path))
            return run_model(loaded) if kind == "models" else ("taken", "")

        return kind, data, call

    def _line(self, rng: random.Random) -> tuple[str, object, Callable]:
        line = rng.choice(LINES)
        line = varied(rng, line)

        def call() -> tuple[str, str]:
            parsed = weft.Layout.parse(line)
            parsed.to_toml()
            return run_layout(parsed, line)

        return "line", line, call

    def _command(self, rng: random.Random) -> tuple[str, object, Callable]:
        words = list(rng.choice(COMMANDS))
        if rng.random() < 0.1:
            words = list(rng.choice(REFUSED))
        for _ in range(rng.randint(1, 3)):
            how = rng.random()
            if how < 0.6:
                option, values = rng.choice(list(OPTIONS.items()))
                values = values if rng.random() < 0.7 else _value(rng)
                words += (
                    [option]
                    if isinstance(values, tuple) and not values
                    else [
                        option,
                        values if isinstance(values, str) else rng.choice(values),
                    ]
                )
            elif how < 0.9 and words[0] not in ("train", "rates"):
                words[rng.randrange(1, len(words)) if len(words) > 1 else 0] = _value(rng)
            else:
                at = rng.randrange(1, len(words) + 1)
                words[at:at] = [mutated(rng, _value(rng))[:2000]]
        words = [w.replace("\x00", "")[:120_000] for w in words]  # a command line has no NUL
        if words[0] == "check" and "--threads" not in words:
            words.append("--threads")
        return "command", words, lambda: run_command(words)


def _value(rng: random.Random) -> str:
    return rng.choice(rng.choice((NUMBERS, WORDS, VALUES, VALUES)))


def varied(rng: random.Random, text: str) -> str:
    """The text with changes: half of the time such that it may still be accepted."""
    change = exchanged if rng.random() < 0.5 else mutated
    for _ in range(rng.randint(1, 4)):
        text = change(rng, text)
    return text


def exchanged(rng: random.Random, text: str) -> str:
    """The text with another small number, or another of its words, in one place."""
    tokens = [match.span() for match in re.finditer(r"[A-Za-z_]+|[0-9]+", text)]
    if not tokens:
        return text
    (low, high), (first, last) = rng.choice(tokens), rng.choice(tokens)
    digits = text[low:high].isdigit()
    other = str(rng.choice((1, 2, 2, 3, 4, 6, 8))) if digits else text[first:last]
    return text[:low] + other + text[high:]


def mutated(rng: random.Random, text: str) -> str:
    """The text with one change: a word, number, line or run of characters."""
    how = rng.randrange(7)
    lines = text.splitlines(keepends=True)
    at, other = rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)
    if how == 0:
        return text[:at] + rng.choice(rng.choice((NUMBERS, WORDS))) + text[at:]
    if how == 1:
        return text[: min(at, other)] + text[max(at, other) :]
    if how == 2 and lines:
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
        return "".join(lines)
    if how == 3 and lines:
        del lines[rng.randrange(len(lines))]
        return "".join(lines)
    if how == 4:
        low = min(at, other)
        return text[:low] + text[low : low + 20] * rng.choice((2, 3, 50)) + text[low + 20 :]
    digits = [i for i, c in enumerate(text) if c.isdigit()]
    if how == 5 and digits:
        i = rng.choice(digits)
        return text[:i] + rng.choice(NUMBERS) + text[i + 1 :]
    quoted = [i for i, c in enumerate(text) if c == '"']
    if len(quoted) > 1:
        i = rng.randrange(len(quoted) - 1)
        return text[: quoted[i] + 1] + rng.choice(WORDS + VALUES) + text[quoted[i + 1] :]
    return text + rng.choice(WORDS)


def run_layout(layout: weft.Layout, name: str) -> tuple[str, str]:
    """Attend on threads, on every axis that an accepted layout attends, if its ranks are few."""
    if math.prod(map(abs, layout.mesh.values())) > MOST_RANKS or -1 in layout.mesh.values():
        return "taken", "not run"
    for axis in layout.attend:
        length = ",".join(f"{part}=6" for part in axis.split("+"))
        words = ["check", name, "--threads", "--axis", axis, "--length", length]
        kind, message = run_command([*words, "--heads", "4", "--head-dim", "4", "--batch", "2"])
        if kind not in ("taken", "refused"):
            return kind, message
    return "taken", ""


def run_model(spec: ModelSpec) -> tuple[str, str]:
    """A forward pass of an accepted model, if it is small, on two threads that split an axis."""
    if spec.least_weights > MOST_WEIGHTS or len(spec.blocks) > MOST_BLOCKS:
        return "taken", "not run"
    lengths = lengths_of_model(spec, {}) | dict.fromkeys(spec.axes[1:-1], 6)
    axis = next((block.axes[0] for block in spec.attends), spec.axes[0])
    if max(lengths.values()) > 64:
        return "taken", "not run"

    def rank(layout: weft.Layout) -> None:
        with torch.no_grad():
            model_work(layout, spec, 2, lengths, torch.float32, "cpu").forward()

    weft.on_threads(weft.Layout.parse(f"{axis}: ring=2"), rank)
    return "taken", ""


def _peak() -> int:
    """The most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_command(words: list[str]) -> tuple[str, str]:
    """Run one command of `weft` here: its kind of end and its stderr."""
    out, err = io.StringIO(), io.StringIO()
    command = typer.main.get_command(app)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command.main(words, prog_name="weft", standalone_mode=True)
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
    if code == 0:
        return "taken", ""
    if code == 2:
        return "usage", ""
    message = err.getvalue()
    if code == 1 and message.startswith("error:"):
        return "refused", message
    return f"exit code {code}", message or out.getvalue()[-300:]


def main() -> int:
    """Feed the inputs; print what was wrong, and a count of what was taken and refused."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--count", type=int, default=20_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", type=int, help="one input, by its number")
    chosen = options.parse_args()
    numbers = range(chosen.count) if chosen.only is None else [chosen.only]
    seen: collections.Counter = collections.Counter()
    wrong = 0
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        fuzz = Fuzz(chosen.seed, Path(folder))
        start = time.perf_counter()
        slowest = 0.0
        for number in numbers:
            faulthandler.dump_traceback_later(HANG, exit=True)
            name, given, outcome = fuzz.run(number)
            seen[name, (outcome.kind == "taken" and outcome.message) or outcome.kind] += 1
            slowest = max(slowest, outcome.seconds)
            if chosen.only is not None:
                print(f"{name}: {str(given)[:2000]}\n{outcome}")
            if outcome.wrong:
                wrong += 1
                shown = given if len(repr(given)) < 400 else f"{repr(given)[:400]}..."
                print(f"#{number} {name} {shown!r}\n    {outcome.wrong}", flush=True)
        faulthandler.cancel_dump_traceback_later()
        for (name, kind), count in sorted(seen.items()):
            print(f"{name:10} {kind:10} {count}")
        took = time.perf_counter() - start
        print(f"{len(numbers)} inputs in {took:.0f} s, the slowest {slowest:.2f} s; {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "Agg")
    raise SystemExit(main())
