"""Ranks are killed at seeded moments, and training goes on: who is named, how soon, what comes out.

    python -m benchmarks.campaigns kills              # 30 kills
    python -m benchmarks.campaigns kills --count 1    # 5 kills

A run trains a table model on a ring of two processes. In each attempt one rank gets SIGKILL: while
ranks start, in the forward pass, in the backward pass, and while a checkpoint is written. Every
other run is started by torchrun, the others as `weft train` starts
its ranks. The last attempt is left alone; its weights must be those of a run that nobody disturbed,
bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .common import note, notes, stored, table

LAYOUT, RANKS, STEPS, EVERY = "rows: ring=2", 2, 24, 2
TIMEOUT = 60.0

#: Phase -> the most seconds after its beginning at which a rank is killed.
PHASES = {
    "start-up": 1.0,
    "forward": 0.01,
    "backward": 0.01,
    "writing a checkpoint": 0.02,
}


@dataclass(frozen=True)
class Kill:
    """Rank `rank` gets SIGKILL `delay` seconds after its phase began for the `nth` time."""

    phase: str
    rank: int
    nth: int
    delay: float


def draw(seed: int) -> list[Kill]:
    """One kill per phase, in any order."""
    rng = random.Random(seed)
    order = list(PHASES)
    rng.shuffle(order)
    return [
        Kill(
            phase,
            rng.randrange(RANKS),
            1 if phase == "start-up" else rng.randint(1, 3),
            rng.choice([0.0, rng.uniform(0.0, PHASES[phase])]),
        )
        for phase in order
    ]


# -- one rank -------------------------------------------------------------------------------------


def rank(folder: str, kills: list[dict]) -> None:
    """Trains, and dies in the attempt, the phase and at the moment that are meant for it."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    mine = int(os.environ["RANK"])
    kill = Kill(**kills[attempt]) if attempt < len(kills) else None
    note(folder, attempt=attempt, rank=mine, event="started")
    counts = dict.fromkeys(PHASES, 0)

    def die() -> None:
        note(folder, attempt=attempt, rank=mine, event="killed")
        os.kill(os.getpid(), signal.SIGKILL)

    def begins(phase: str) -> None:
        counts[phase] += 1
        if kill and (kill.phase, kill.rank, kill.nth) == (phase, mine, counts[phase]):
            if kill.delay == 0.0:
                die()
            threading.Timer(kill.delay, die).start()

    begins("start-up")
    try:
        train(folder, begins)
    except Exception as error:
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        note(folder, attempt=attempt, rank=mine, event="failed", text=message)
        raise


def train(folder: str, begins) -> None:
    import torch

    from weft import Layout
    from weft.checkpoint import folder as files
    from weft_models.models import ModelSpec
    from weft_models.train import trainer

    torch.set_num_threads(1)
    spec = ModelSpec.load("tabular")
    length = {"rows": (24, 32), "features": (3, 4)}
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"length": length})})
    compose, save_file = trainer.compose, files.save_file

    def observed(*args, **options):
        model = compose(*args, **options)
        model.register_forward_pre_hook(lambda *_: begins("forward") if model.training else None)

        def backward(_module, _inputs, output) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: begins("backward"))

        model.register_forward_hook(backward)
        return model

    trainer.compose = observed
    files.save_file = lambda *args, **options: (
        begins("writing a checkpoint") or save_file(*args, **options)
    )
    layout = Layout.parse(LAYOUT)
    bound = layout.build("cpu", timeout=TIMEOUT)
    layout = bound if isinstance(bound, Layout) else layout
    given = {"steps": STEPS, "batch": 2, "checkpoint_every": EVERY, "quiet": True}
    trainer.fit(spec, layout, checkpoint_dir=f"{folder}/run", **given)


# -- one run --------------------------------------------------------------------------------------


def run(kills: list[Kill], launcher: str) -> tuple[list[dict], str, int]:
    """What happened, a digest of the final weights, and the launcher's exit code."""
    with tempfile.TemporaryDirectory(prefix="weft-kills-") as folder:
        Path(folder, "kills.json").write_text(json.dumps([asdict(kill) for kill in kills]))
        module = ["-m", "benchmarks.kills"]
        if launcher == "torchrun":
            elastic = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
            elastic += ["--max-restarts", str(len(kills)), "--monitor-interval", "0.1"]
            command = [sys.executable, *elastic, *module, "rank", folder]
        else:
            command = [sys.executable, *module, "launch", folder]
        with open(f"{folder}/output", "w") as output:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=900
            )
        if done.returncode:
            print(Path(folder, "output").read_text()[-3000:], file=sys.stderr)
        return notes(folder), weights(Path(folder, "run")), done.returncode


def launch(folder: str) -> None:
    """The ranks of `weft train`, with what its launcher says noted."""
    from weft.launch.launcher import run as launched

    kills = json.loads(Path(folder, "kills.json").read_text())

    def tell(text: str) -> None:
        note(folder, event="reported", text=text)

    launched(rank, folder, kills, ranks=RANKS, restarts=len(kills), on_restart=tell)


def weights(folder: Path) -> str:
    """A digest of all tensors of the last checkpoint but the random generators' states."""
    from weft.checkpoint.run import complete_steps, step_folder

    steps = complete_steps(folder)
    if not steps or steps[-1] != STEPS:
        return f"ended at step {steps[-1] if steps else 0}"
    digest = hashlib.sha256()
    for name, tensor in sorted(stored(step_folder(folder, steps[-1])).items()):
        if not name.startswith("random."):
            digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()[:12]


# -- the table ------------------------------------------------------------------------------------


def rows(number: int, kills: list[Kill], launcher: str, notes: list[dict]) -> Iterator[list[str]]:
    """One row per kill: when the survivor failed, whom it named, when all were there again."""
    for attempt, kill in enumerate(kills):
        here = [n for n in notes if n.get("attempt") == attempt]
        died = next((n["time"] for n in here if n["event"] == "killed"), None)
        start = [f"{number}.{attempt + 1}", launcher, kill.phase, str(kill.rank)]
        if died is None:
            yield [*start, "not reached", "", "", ""]
            continue
        failed = [n for n in here if n["event"] == "failed"]
        again = [n["time"] for n in notes if n.get("attempt") == attempt + 1]
        reported = next(
            (n["text"] for n in notes if n["event"] == "reported" and n["time"] > died), ""
        )
        named = reported.partition(";")[0] if launcher == "weft" else ""
        message = failed[0]["text"] if failed else "stopped by the launcher"
        noticed = f"{failed[0]['time'] - died:.2f}" if failed else ""
        back = f"{max(again[:RANKS]) - died:.1f}" if again else ""
        yield [*start, noticed, back, named, message.replace("|", "/")[:90]]


HEAD = (
    "kill | started by | killed in | rank | survivor fails after, s | all back after, s"
    " | launcher names | survivor says"
)


def kills(given: argparse.Namespace) -> str:
    """Runs of five kills each, compared with one that nobody disturbed."""
    runs = given.count or 6
    _, wanted, code = run([], "weft")
    rows_of, results, bad = [], [], code
    for number in range(runs) if given.only is None else [given.only]:
        meant, launcher = draw(number), ("weft", "torchrun")[number % 2]
        happened, found, code = run(meant, launcher)
        rows_of += list(rows(number + 1, meant, launcher, happened))
        same = "bitwise those of the undisturbed run" if found == wanted else f"OTHERS: {found}"
        results.append((number + 1, launcher, len(meant), same, code))
        bad += code != 0 or found != wanted
        print(*results[-1], flush=True)
    given.failed = bad > 0
    return report(rows_of, results, runs)


def report(kills: list[list[str]], results: list[tuple], runs: int) -> str:
    reached = [row for row in kills if row[4] != "not reached"]
    return f"""# Kills

`python -m benchmarks.campaigns kills --count {runs} --write`: {len(reached)} ranks killed with
SIGKILL at seeded moments of {runs} training runs on {RANKS} processes, {STEPS}
steps, a checkpoint every {EVERY}. Every run goes on by itself after each kill.

{table("run | started by | kills | final weights and optimizer states | exit code", results)}

A survivor that was stopped before it noticed says nothing. `all back` is when the new ranks had
started: after they imported torch as `weft` starts them, before under torchrun.

{table(HEAD, kills)}
"""


if __name__ == "__main__":
    how, where = sys.argv[1:]
    if how == "launch":
        launch(where)
    else:
        rank(where, json.loads(Path(where, "kills.json").read_text()))
