"""One of four torchrun agents is killed, and the run goes on with three: how soon, how exactly.

    python -m benchmarks.campaigns elastic                # 10 kills
    python -m benchmarks.campaigns elastic --only 0       # a sample
    python -m benchmarks.campaigns elastic --back         # the agent comes back

Each run has one agent per rank under `torchrun --nnodes=3:4`, and trains `causal_lm` in fp64 with a
checkpoint every two steps: four ranks on `batch: dp=2; tokens: ring=2`, three on `tokens: ring=-1`.
An agent and its rank get SIGKILL at a seeded step. The final weights are compared with those of one
undisturbed process, and every rank notes which examples it drew.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .common import note, notes, stored, table

#: Steps of a run, and of one in which the agent comes back.
STEPS, MORE_STEPS = 30, 150
MODEL, EVERY, BATCH = "causal_lm", 2, 4
LAYOUTS = ["batch: dp=2; tokens: ring=2", "tokens: ring=-1"]
#: torch's agents share a store by default, and one that joins later then waits for an address that
#: was written in the first round alone (torch 2.13 and 2.14).
STORE_PER_ROUND = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LIMIT = 600.0


# -- one rank -------------------------------------------------------------------------------------


def rank(folder: str, arguments: list[str]) -> None:
    """`weft train`, with a note of the examples of every step."""
    import torch

    from weft_cli.cli import app
    from weft_models.train import trainer

    torch.set_num_threads(1)
    take_step = trainer.take_step

    def noted(model, layout, optimizer, data, step):
        record = take_step(model, layout, optimizer, data, step)
        drawn = [i for part in range(data.parts) for i in data._examples(step, part)]
        note(folder, rank=layout.rank, ranks=layout.world_size, step=step, drawn=drawn)
        return record

    trainer.take_step = noted
    app(arguments, prog_name="weft")


# -- one run --------------------------------------------------------------------------------------


class Run:
    """Four agents, or one process, in a folder."""

    def __init__(self, folder: str, more: dict[str, str], steps: int, ranks: int = 4) -> None:
        self.folder, self.more, self.agents = Path(folder), more, []
        self.port = random.SystemRandom().randrange(20000, 30000)
        (self.folder / "run.toml").write_text(
            f'model = "{MODEL}"\ndtype = "float64"\n'
            + (f"[elastic]\nlayouts = {json.dumps(LAYOUTS)}\n" if ranks > 1 else "")
            + f"[train]\nsteps = {steps}\nbatch = {BATCH}\ncheckpoint_every = {EVERY}\n"
        )
        self.options = ["--config", f"{folder}/run.toml", "--device", "cpu", "--timeout", "60"]
        self.options += ["--log-dir", f"{folder}/log", "--checkpoint-dir", f"{folder}/steps"]

    def start(self, number: int) -> subprocess.Popen:
        """Start an agent, with one rank."""
        rendezvous = f"is_host={int(number == 0)},last_call_timeout=5"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=3:4"]
        command += ["--nproc-per-node=1", "--max-restarts=5", "--rdzv-backend=c10d"]
        command += [f"--rdzv-endpoint=localhost:{self.port}", f"--rdzv-id={self.folder.name}"]
        command += [f"--rdzv-conf={rendezvous}", "--monitor-interval=0.5"]
        command += ["-m", "benchmarks.elastic", str(self.folder), "--"]
        command += ["train", *self.options, "--elastic", "3:4"]
        return self._launch(command, number)

    def alone(self) -> None:
        """The run on one process, from beginning to end."""
        command = [sys.executable, "-m", "benchmarks.elastic", str(self.folder), "--"]
        code = self._launch([*command, "train", *self.options], 0).wait(LIMIT)
        if code:
            raise SystemExit((self.folder / "agent0.log").read_text()[-3000:])

    def _launch(self, command: list[str], number: int) -> subprocess.Popen:
        environment = os.environ | self.more | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with open(self.folder / f"agent{number}.log", "a") as log:
            return subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def steps(self) -> int:
        """Steps of the latest checkpoint."""
        names = (p.parent.name for p in self.folder.glob("steps/step-*/index.json"))
        return max((int(name.removeprefix("step-")) for name in names), default=0)

    def until(self, done, end: float) -> bool:
        """Wait for something; False if all agents ended before, or the time did."""
        while time.time() < end:
            if done():
                return True
            if all(agent.poll() is not None for agent in self.agents):
                return bool(done())
            time.sleep(0.1)
        return False

    def kill(self, number: int) -> None:
        """SIGKILL to an agent's rank and to itself."""
        agent = self.agents[number]
        for process in (*_children(agent.pid), agent.pid):
            os.kill(process, signal.SIGKILL)
        agent.wait()

    def close(self) -> None:
        """End what is left."""
        for number, agent in enumerate(self.agents):
            if agent.poll() is None:
                self.kill(number)


def _children(pid: int) -> list[int]:
    return [int(word) for word in os.popen(f"ps --ppid {pid} -o pid=").read().split()]


def kill_one(number: int, wanted: dict, back: bool) -> tuple[list[str], bool]:
    """One run with one kill: a row of the table, and whether all is as it should be."""
    draw = random.Random(number)
    victim, at = draw.randint(1, 3), 2 * draw.randint(1, 5)  # not the agent that keeps the store
    with tempfile.TemporaryDirectory(prefix="weft-elastic-") as folder:
        steps = MORE_STEPS if back else STEPS
        run, end = Run(folder, STORE_PER_ROUND if back else {}, steps), time.time() + LIMIT
        run.agents = [run.start(i) for i in range(4)]
        try:
            run.until(lambda: run.steps() >= at, end)
            run.kill(victim)
            killed, then = time.time(), run.steps()
            run.until(lambda: run.steps() > then, end)
            recovered, grown = time.time() - killed, ""
            if back:
                joined, before = time.time(), run.steps()
                run.agents[victim] = run.start(victim)
                fours = [n for n in notes(run.folder) if n["ranks"] == 4]
                run.until(lambda: sum(n["ranks"] == 4 for n in notes(run.folder)) > len(fours), end)
                run.until(lambda: run.steps() > before, end)
                grown = f"{time.time() - joined:.0f}"
            run.until(lambda: run.steps() == steps and _all_done(run), end)
            codes = [a.poll() for i, a in enumerate(run.agents) if back or i != victim]
            sizes = [size for size, _ in _by_size(notes(run.folder))]
            error = weights_error(run.folder, steps, wanted)
            drawn = drawn_once(notes(run.folder), steps)
        finally:
            run.close()
        ok = not any(codes) and error < 1e-10 and drawn and sizes == [4, 3, 4][: 2 + back]
        if not ok:
            for log in sorted(run.folder.glob("agent*.log")):
                print(log.name, log.read_text()[-2500:], sep="\n", file=sys.stderr)
    row = [f"{number + 1}", f"{victim}", f"{then}", f"{recovered:.0f}", grown]
    row += [" -> ".join(map(str, sizes)), f"{error:.1e}"]
    row += ["once" if drawn else "NOT ONCE", f"{codes}"]
    return row, ok


def _all_done(run: Run) -> bool:
    return all(agent.poll() is not None for agent in run.agents)


def _by_size(notes: list[dict]) -> Iterator[tuple[int, list[dict]]]:
    """Notes by the number of ranks, one start after another."""
    start: list[dict] = []
    for each in notes:
        if start and each["ranks"] != start[-1]["ranks"]:
            yield start[-1]["ranks"], start
            start = []
        start.append(each)
    if start:
        yield start[-1]["ranks"], start


def drawn_once(notes: list[dict], steps: int) -> bool:
    """Whether the steps that the final weights consist of drew each example once, and none else.

    A step is done again where its checkpoint was not written: its last time counts. Ranks that
    split tokens draw the same examples.
    """
    last: dict[int, int] = {}
    for each in notes:
        last[each["step"]] = each["ranks"]
    drawn: dict[int, set[int]] = {}
    for each in notes:
        if each["ranks"] == last[each["step"]]:
            drawn.setdefault(each["step"], set()).update(each["drawn"])
    return drawn == {s: set(range(s * BATCH, (s + 1) * BATCH)) for s in range(steps)}


def weights(folder: Path, steps: int) -> dict:
    """The model's tensors in the checkpoint of a run's last step."""
    found = stored(folder / "steps" / f"step-{steps:06d}")
    return {name: tensor for name, tensor in found.items() if name.startswith("model.")}


def weights_error(folder: Path, steps: int, wanted: dict) -> float:
    """The largest relative difference of a tensor; infinite where the run did not end."""
    if not (folder / "steps" / f"step-{steps:06d}" / "index.json").exists():
        return float("inf")
    found = weights(folder, steps)
    assert wanted
    assert found.keys() == wanted.keys()
    return max(float((found[n] - w).norm() / w.norm().clamp(min=1e-3)) for n, w in wanted.items())


HEAD = (
    "kill | agent | at step | next checkpoint after, s | grown after, s | ranks"
    " | error of the weights | examples drawn | exit codes"
)


def elastic(given: argparse.Namespace) -> str:
    """Runs with one kill each, compared with one undisturbed process."""
    with tempfile.TemporaryDirectory(prefix="weft-elastic-") as folder:
        steps = MORE_STEPS if given.back else STEPS
        whole = Run(folder, {}, steps, ranks=1)
        whole.alone()
        wanted = weights(Path(folder), steps)
        assert drawn_once(notes(whole.folder), steps)
    rows, given.failed = [], False
    for number in range(given.count or 10) if given.only is None else [given.only]:
        row, ok = kill_one(number, wanted, given.back)
        rows.append(row)
        given.failed |= not ok
        print(*row, f"load {os.getloadavg()[0]:.0f}", flush=True)
    about = f"`python -m benchmarks.campaigns {' '.join(sys.argv[1:])}`: {__doc__.splitlines()[0]}"
    return f"# Kills of one agent of four\n\n{about}\n\n{table(HEAD, rows)}\n"


if __name__ == "__main__":
    where, _, *arguments = sys.argv[1:]
    rank(where, arguments)
