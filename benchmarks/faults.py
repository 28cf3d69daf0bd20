"""Ranks are killed and frozen under every kind of program: who ends, how soon, who is named.

    python -m benchmarks.campaigns faults                # 60 faults
    python -m benchmarks.campaigns faults --count 1      # one of each kind of fault and program
    python -m benchmarks.campaigns faults --only 7       # one of them

Programs: `weft train` (its own launcher), and under torchrun a loop with `sync_gradients`, FSDP2, a
transformers `Trainer` on context groups, and `generate` with a sharded cache. Four ranks on this
machine, at default settings. Once all ranks are at work, one that a seed draws gets SIGKILL
or SIGSTOP at a moment that it draws, too.

Seconds count from the fault until the launcher and all ranks, the frozen one too, have ended. A
survivor names the rank where what it wrote has the rank's number; of `weft train` that is its
launcher.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .common import table

RANKS, LIMIT = 4, 30.0
PROGRAMS = ("train", "loop", "fsdp", "trainer", "generate")
#: The body of each program of torchrun; `step()` is repeated until the fault.
BODIES = {
    "loop": """
layout = weft.Layout.parse("tokens: ring=4").build("cpu")
axes = ("batch", "tokens", "embed")
model = weft.MultiAxisAttention(32, 4, axis="tokens", axes=axes, layout=layout)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
def step():
    model(torch.randn(2, 16, 32)).square().mean().backward()
    layout.sync_gradients(model)
    optimizer.step(), optimizer.zero_grad()
""",
    "fsdp": """
from torch.distributed.fsdp import fully_shard
layout = weft.Layout.parse("tokens: ring=4").build("cpu")
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = weft.MultiAxisAttention(
            32, 4, axis="tokens", axes=("batch", "tokens", "embed"), layout=layout)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(32, 4096), torch.nn.Linear(4096, 32))
    def forward(self, x):
        return x + self.mlp(self.attend(x))
model = torch.nn.Sequential(*[Block() for _ in range(4)])
for block in model:
    fully_shard(block, mesh=layout.device_mesh)
fully_shard(model, mesh=layout.device_mesh)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
def step():
    model(torch.randn(2, 16, 32)).square().mean().backward()
    optimizer.step(), optimizer.zero_grad()
""",
    "trainer": """
import transformers as hf
from weft_integrations import trainers
layout = trainers.layout("tokens: ring=2", "cpu")
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, vocab_size=64)
model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))
class Marked(hf.TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        at_work()
ids = torch.randint(0, 64, (4096, 32))
data = [{"input_ids": row, "labels": row} for row in ids]
args = hf.TrainingArguments(tempfile.mkdtemp(), use_cpu=True, max_steps=10**6, report_to=[],
                            per_device_train_batch_size=1, save_strategy="no", disable_tqdm=True)
trainer = trainers.of(hf.Trainer, layout)(model=model, args=args, train_dataset=data,
                                          callbacks=[Marked()])
step = trainer.train
""",
    "generate": """
import transformers as hf
layout = weft.Layout.parse("tokens: ring=4").build("cpu")
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, vocab_size=64)
model = weft.parallelize(hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)).eval(), layout)
ids = torch.randint(0, 64, (1, 32))
def step():
    model.generate(ids, max_new_tokens=16, do_sample=False)
""",
}
_HEAD = """
import os, sys, tempfile
import torch, weft
torch.manual_seed(0)
def at_work():
    with open(os.path.join(sys.argv[1], f"pid-{os.environ['RANK']}"), "w") as file:
        file.write(str(os.getpid()))
"""
_TAIL = """
while True:
    step()
    at_work()
"""


@dataclass(frozen=True)
class Fault:
    """A rank is killed or frozen, some seconds after all ranks are at work."""

    program: str
    kind: str
    rank: int
    delay: float


@dataclass(frozen=True)
class Outcome:
    """Seconds until all had ended, None where they had not; survivors that named the rank."""

    fault: Fault
    seconds: float | None
    named: int
    survivors: int
    output: str = ""

    @property
    def ok(self) -> bool:
        """All ended in time, and every survivor named the rank."""
        ended = self.seconds is not None and self.seconds <= LIMIT
        return ended and self.named == self.survivors


def draw(count: int, programs: Sequence[str], seed: int = 0) -> list[Fault]:
    """So many faults of each kind in each program."""
    rng = random.Random(seed)
    return [
        Fault(program, kind, rng.randrange(RANKS), rng.uniform(0.0, 2.0))
        for program in programs
        for kind in ("killed", "frozen")
        for _ in range(count)
    ]


def run(fault: Fault) -> Outcome:
    """One program, its fault, and its end."""
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder, "logs")
        environ = os.environ | {"OMP_NUM_THREADS": "1", "WEFT_BLACKBOX": str(Path(folder, "box"))}
        with Path(folder, "output").open("w+") as output:
            launcher = subprocess.Popen(
                _command(fault.program, Path(folder), logs),
                stdout=output, stderr=subprocess.STDOUT, env=environ,
            )  # fmt: skip
            try:
                pids = _at_work(launcher, fault.program, Path(folder))
                time.sleep(fault.delay)
                sent = signal.SIGKILL if fault.kind == "killed" else signal.SIGSTOP
                os.kill(pids[fault.rank], sent)
                begin = time.monotonic()
                seconds = _ended(launcher, pids, begin)
            finally:
                _kill([launcher.pid, *pids_of(launcher.pid)])
                launcher.wait()
            output.seek(0)
            text = output.read()
        if fault.program == "train":
            return Outcome(fault, seconds, _names(text, fault.rank), 1, text)
        texts = {r: _log(logs, r) for r in range(RANKS) if r != fault.rank}
        named = sum(_names(t, fault.rank) for t in texts.values())
        return Outcome(fault, seconds, named, len(texts), "\n".join(texts.values()))


def _command(program: str, folder: Path, logs: Path) -> list[str]:
    if program == "train":
        settings = ["--steps", "100000", "--log-dir", str(folder / "run")]
        return [sys.executable, "-m", "weft", "train", "tabular", "rows: ring=4", *settings]
    script = folder / "program.py"
    script.write_text(_HEAD + BODIES[program] + _TAIL)
    options = ["--nproc-per-node", str(RANKS), "--log-dir", str(logs), "--redirects", "3"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    endpoint = ["--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    return [*torchrun, *endpoint, *options, str(script), str(folder)]


def _at_work(launcher: subprocess.Popen, program: str, folder: Path) -> dict[int, int]:
    """The processes of all ranks, by rank, once each has done a step."""
    until = time.monotonic() + 300
    while time.monotonic() < until and launcher.poll() is None:
        time.sleep(0.1)
        if program == "train":
            if not [*(folder / "run").glob("events*")]:
                continue
            time.sleep(3.0)
            found = {
                rank: pid for pid in pids_of(launcher.pid) if (rank := _rank_of(pid)) is not None
            }
        else:
            found = {int(p.name[4:]): int(p.read_text() or 0) for p in folder.glob("pid-*")}
        if len(found) == RANKS and all(found.values()):
            return found
    text = _log(folder / "logs", 0) or (folder / "output").read_text()
    raise RuntimeError(f"{program} did not start: {text[-2000:]}")


def pids_of(parent: int) -> list[int]:
    """The processes below one, as /proc has them."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
        except (OSError, ValueError):
            continue
    below, found = [parent], []
    while below:
        above = below.pop()
        children = [pid for pid, of in parents.items() if of == above]
        found += children
        below += children
    return found


def _rank_of(pid: int) -> int | None:
    """The rank of a process of `weft train`, which has it by name in its trace."""
    for path in Path("/dev/shm").glob("weft-steps-*/rank-*"):
        try:
            if f'"pid":{pid},' in path.read_bytes()[:1024].decode():
                return int(path.name.removeprefix("rank-"))
        except OSError:
            continue
    return None


def _ended(launcher: subprocess.Popen, pids: dict[int, int], begin: float) -> float | None:
    """Seconds until the launcher and all ranks have ended."""
    while time.monotonic() - begin < 4 * LIMIT:
        if launcher.poll() is not None and not any(map(_alive, pids.values())):
            return time.monotonic() - begin
        time.sleep(0.05)
    return None


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _kill(pids: Sequence[int]) -> None:
    for pid in filter(_alive, pids):
        os.kill(pid, signal.SIGKILL)


def _names(text: str, rank: int) -> bool:
    """True if a text says that this rank, and no other one, was lost."""
    lost = re.findall(r"rank (\d+)(?: of this machine)? (?:was|is|ended|has ended)", text)
    return bool(lost) and set(lost) == {str(rank)}


def _log(logs: Path, rank: int) -> str:
    files = [p for p in logs.rglob("std*.log") if p.parent.name == str(rank)]
    return "\n".join(p.read_text(errors="replace") for p in sorted(files))


def report(outcomes: Sequence[Outcome]) -> str:
    """A table by program and kind of fault."""
    rows = []
    for program, kind in dict.fromkeys((o.fault.program, o.fault.kind) for o in outcomes):
        of = [o for o in outcomes if (o.fault.program, o.fault.kind) == (program, kind)]
        times = [o.seconds for o in of]
        in_time = sum(t is not None and t <= LIMIT for t in times)
        longest = "not at all" if None in times else f"{max(filter(None, times)):.1f} s"
        named, survivors = sum(o.named for o in of), sum(o.survivors for o in of)
        rows.append((program, kind, len(of), in_time, longest, f"{named} of {survivors}"))
    head = "program | fault | faults: | all ended within 30 s: | longest: | survivors that name it:"
    return table(head, rows)


def faults(given: argparse.Namespace) -> str:
    """Faults of each kind in each program, by the time until all ended and the rank's name."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and `run` ends what it started
    outcomes = []
    for number, fault in enumerate(draw(given.count or 6, PROGRAMS)):
        if given.only in (None, number):
            outcomes.append(last := run(fault))
            took = "not ended" if last.seconds is None else f"{last.seconds:.1f} s"
            named = f"named by {last.named} of {last.survivors}"
            print(f"{number}: {fault}: {took}, {named}", flush=True)
            if not last.ok:
                print(last.output[-6000:])
    return f"# Kills and freezes\n\n{report(outcomes)}\n"
