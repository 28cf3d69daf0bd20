"""Ranks that a command starts: no orphans, the rank that failed first is named, restarts."""

import datetime
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from ports import free_job, free_port

from weft._torch import default_store
from weft.comm.processes import ProcessTransport
from weft.comm.transport import Transport
from weft.comm.world import init_process_group
from weft.errors import ShapeError
from weft.launch import environment as place
from weft.launch import failures
from weft.launch import launcher as launch
from weft.launch.environment import launch_id


def alive(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize(
    "after",
    [pytest.param(0.5, marks=pytest.mark.slow), pytest.param(5.0, marks=pytest.mark.sample)],
)
def test_ranks_end_with_a_launcher_that_is_killed(after, tmp_path):
    """Whatever they are at: starting, importing, at work."""
    words = ["train", "causal_lm", "ring-2", "--steps", "100000", "--log-dir", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-m", "weft", *words],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as shell:
        try:
            assert "2 ranks on cpu" in shell.stdout.readline()
            time.sleep(after)
            shell.kill()
            until = time.monotonic() + 60
            while alive(shell.pid) and time.monotonic() < until:
                time.sleep(0.1)
            assert not alive(shell.pid)
        finally:
            for process in alive(shell.pid):
                os.kill(process, signal.SIGKILL)


_INTERRUPTED = """
import os, signal, sys, time
from multiprocessing import util
from weft.launch import launcher as launch

start = util.spawnv_passfds

def slowly(path, args, fds):
    started = start(path, args, fds)
    if any(b"spawn_main" in os.fsencode(arg) for arg in args):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.0)  # the rank waits for its task
    return started

if __name__ == "__main__":
    util.spawnv_passfds = slowly
    try:
        launch.run(time.sleep, [60.0], ranks=2)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.slow
def test_rank_that_being_started_when_ctrl_c_comes_says_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_INTERRUPTED)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=True
    )
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def _die(how: str, folder: str) -> str:
    """Rank 1 dies, and rank 0 fails of it at once, with an error that is not weft's."""
    init_process_group("cpu", datetime.timedelta(seconds=60))
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if how == "refuses":
        Path(folder, f"tried-{attempt}").touch()
        raise ShapeError("never so")
    if how == "recovers" and attempt == "1":
        return f"attempt {attempt}"
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return "not reached"


@pytest.mark.slow
def test_ranks_start_again_after_a_death(tmp_path):
    """The death of rank 1 is named, not the error of rank 0 that follows from it."""
    notes = []
    given = {"ranks": 2, "restarts": 1, "on_restart": notes.append}
    assert launch.run(_die, "recovers", str(tmp_path), **given) == "attempt 1"
    assert notes == ["rank 1 was killed by SIGKILL; 2 ranks start again (1 of 1)"]


def _one_too_many() -> tuple[str, str | None]:
    """Rank 1 of three dies whenever it is started; two are all right."""
    init_process_group("cpu", datetime.timedelta(seconds=60))
    if (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "3"):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return os.environ["WORLD_SIZE"], launch_id()


@pytest.mark.slow
def test_a_rank_that_dies_twice_is_left_out():
    notes: list[str] = []
    given = {"ranks": 3, "fewest": 2, "restarts": 2, "on_restart": notes.append}
    size, name = launch.run(_one_too_many, **given)
    assert (size, name is not None) == ("2", True)
    assert notes == [
        "rank 1 was killed by SIGKILL; 3 ranks start again (1 of 2)",
        "rank 1 was killed by SIGKILL; 2 ranks start again (2 of 2)",
    ]
    with pytest.raises(launch.LaunchError, match="rank 1 was killed by SIGKILL"):
        launch.run(_one_too_many, **given | {"restarts": 1})


@pytest.mark.slow
def test_what_is_refused_is_not_tried_again(tmp_path):
    with pytest.raises(launch.LaunchError, match=r"ShapeError: never so$"):
        launch.run(_die, "refuses", str(tmp_path), ranks=2, restarts=3)
    assert [path.name for path in tmp_path.iterdir()] == ["tried-0"]


#: A launcher that starts one process and ends without a word to it.
ENDS = """
import multiprocessing, os, threading, time
from weft.launch import launcher

def work():
    threading.Thread(target=launcher._end_with_launcher, daemon=True).start()
    time.sleep(120)

if __name__ == "__main__":
    rank = multiprocessing.get_context("spawn").Process(target=work)
    rank.start()
    print(rank.pid, flush=True)
    os._exit(0)
"""


def test_a_rank_ends_with_its_launcher(tmp_path):
    (tmp_path / "ends.py").write_text(ENDS)
    # Its output ends when the last process that writes to it has ended.
    command = [sys.executable, tmp_path / "ends.py"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=90, check=True)
    assert said.stdout.strip().isdigit()


FOLLOWS, ERROR = ("gloo", True), ("ValueError", False)

#: What ranks say as they end, in order, silently where None: rank, message and whether it follows.
ENDINGS = {
    "killed, others follow": ([(0, FOLLOWS), (2, None), (1, FOLLOWS)], "rank 2 was killed by KILL"),
    "an error, others follow": ([(1, FOLLOWS), (0, ERROR), (2, FOLLOWS)], "rank 0: ValueError"),
    "an error, others are ended": ([(1, ERROR), (0, None), (2, None)], "rank 1: ValueError"),
    "all follow": ([(2, FOLLOWS), (0, FOLLOWS), (1, FOLLOWS)], "rank 2: gloo"),
    "two are stopped": ([(1, FOLLOWS)], "rank 1: gloo"),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_the_ending_that_others_follow_from_is_named(case, monkeypatch):
    monkeypatch.setattr(launch, "_how_it_ended", lambda process: " was killed by KILL")
    monkeypatch.setattr(launch, "NEWS", 0.2)
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
    order, named = ENDINGS[case]

    def speak():
        for rank, words in order:
            if words is not None:
                pipes[rank][1].send_bytes(pickle.dumps((None, *words, False)))
            pipes[rank][1].close()
            time.sleep(0.02)

    speaker = threading.Thread(target=speak)
    speaker.start()
    with pytest.raises(launch.LaunchError) as error:
        launch._result([(None, receiver) for receiver, _ in pipes])
    speaker.join()
    assert str(error.value) == named


def _shown(folder: str) -> None:
    """A rank writes in what kind of store it meets others, and who may come to its folder."""
    init_process_group("cpu", datetime.timedelta(seconds=60))
    dist.barrier()
    file = Path(os.environ[place.STORE])
    store = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    found = f"{type(store).__name__} {file.parent.stat().st_mode & 0o777:o}"
    Path(folder, os.environ["RANK"]).write_text(found)


@pytest.mark.sample
def test_ranks_meet_where_no_other_user_comes(tmp_path):
    """A store on a port is open to every user, and torch's rendezvous unpickles what it reads."""
    launch.run(_shown, str(tmp_path), ranks=2)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["FileStore 700"] * 2


def _of_step(rank: int, job: int, tasks: int = 2) -> dict[str, str]:
    """What srun sets in one of its tasks, and no other launcher's variables."""
    others = ("SLURM_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_RANK", "MASTER_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    return inherited | {
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "elsewhere,localhost",
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


_BUILDS = """
import torch, weft
layout = weft.Layout.parse("tokens: ring=2").build("cpu", timeout=60)
print(layout.rank, layout.gather(torch.tensor([float(layout.rank)]), {"tokens": 0}).tolist())
"""


@pytest.mark.slow
def test_a_program_that_srun_starts_builds_its_layout():
    job = free_job(lambda job: int(place.slurm_variables(_of_step(0, job))["MASTER_PORT"]))
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", _BUILDS],
            env=_of_step(rank, job),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, task in enumerate(tasks):
        out, err = task.communicate(timeout=90)
        assert out == f"{rank} [0.0, 1.0]\n", err


def test_batch_script_and_interactive_shell_are_no_step_of_srun(monkeypatch):
    """SLURM tells both the number of tasks that a step would have."""
    step = _of_step(0, 1, tasks=4)
    assert place.already_launched(step) == place.Place(0, 4, 0, "slurm")
    assert place.already_launched(step | {"SLURM_STEP_NUM_TASKS": "1"}) is None  # salloc's shell
    batch = {k: v for k, v in step.items() if not k.startswith("SLURM_STEP_")}
    assert place.already_launched(batch) is None
    for name in [*os.environ]:
        monkeypatch.delenv(name)
    for name, value in batch.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **named: asked.update(named))
    asked = {}
    init_process_group("cpu", datetime.timedelta(seconds=60))
    assert (asked["rank"], asked["world_size"], "RANK" in os.environ) == (0, 1, False)


def _lost(number: int, folder: str) -> None:
    """Rank 1 gets a signal before its second call, and writes that before."""
    import torch

    import weft

    Path(folder, f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    declared = weft.Layout.parse("tokens: ring=2")
    layout = declared.bind(declared.build("cpu", timeout=60).device_mesh, timeout=3)
    x = torch.randn(1, 2, 4, 4)
    weft.attention(x, x, x, layout, "tokens")
    if layout.rank == 1:
        Path(folder, "lost").touch()
        os.kill(os.getpid(), number)
    weft.attention(x, x, x, layout, "tokens")


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.sample),
    ],
)
def test_the_launcher_ends_with_a_lost_rank_and_leaves_nothing(number, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_BLACKBOX", str(tmp_path / "box"))
    how = "was killed by SIGKILL" if number == signal.SIGKILL else r"(is|was) stopped \(SIGSTOP\)"
    with pytest.raises(launch.LaunchError, match=f"rank 1 (ended or did not answer|{how})"):
        launch.run(_lost, int(number), str(tmp_path), ranks=2)
    # rank 0 notices within 3 s; torch waits 30 s for a rank that does not hear SIGTERM
    assert time.time() - (tmp_path / "lost").stat().st_mtime < 25
    pids = [f'"pid":{path.read_text()}'.encode() for path in tmp_path.glob("pid-*")]
    left = [path.read_bytes() for path in Path("/dev/shm").glob("weft-steps-*/rank-*")]
    assert not [pid for pid in pids for content in left if pid in content]
    assert (tmp_path / "box" / "weft-rank-1.jsonl").exists()


#: Ranks that meet by their environment, forked from one process, run after run: FOLDER and then
#: PORT:VICTIM:SLOW of each. What a rank is told is written to FOLDER/VICTIM-SLOW-RANK.
_BY_ENVIRONMENT = """
import os, signal, sys, time
import torch, weft
torch.set_num_threads(1)
folder, *runs = sys.argv[1:]
for run in runs:
    port, victim, slow = map(int, run.split(":"))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    children = []
    for rank in range(3):
        child = os.fork()
        if child:
            children.append(child)
            continue
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        layout = weft.Layout.parse("tokens: ring=3").build("cpu", timeout=20)
        x = torch.randn(1, 2, 4, 4)
        try:
            for step in range(4):
                if step == 2 and rank == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == 2 and rank == slow:
                    time.sleep(2.5)
                weft.attention(x, x, x, layout, "tokens")
        except weft.RankError as error:
            open(f"{folder}/{victim}-{slow}-{rank}", "w").write(str(error))
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)
"""


@pytest.mark.sample
def test_survivors_name_rank_that_was_killed_whoever_keeps_the_store(tmp_path):
    """Also one that comes late, when the ranks that noticed have ended and the store with them."""
    runs = [(0, 9), (1, 2), (1, 0)]
    words = [f"{free_port()}:{victim}:{slow}" for victim, slow in runs]
    command = [sys.executable, "-c", _BY_ENVIRONMENT, str(tmp_path), *words]
    env = os.environ | {"WEFT_BLACKBOX": str(tmp_path / "box")}
    subprocess.run(command, env=env, timeout=120, check=True)
    for victim, slow in runs:
        for rank in {0, 1, 2} - {victim}:
            text = (tmp_path / f"{victim}-{slow}-{rank}").read_text()
            assert text.startswith(f"rank {victim} ended or did not answer"), (victim, slow, text)


def test_who_keeps_store_named_where_nobody_can_tell_who_failed(monkeypatch):
    """As on another machine: the rank at the other end may have ended because of a third."""

    class Gone(ProcessTransport):
        def __init__(self) -> None:
            Transport.__init__(self, {"ring": 3}, 2)
            self.name, self.title, self.box = "x", "mine", None
            self.timeout = datetime.timedelta(seconds=5)

    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(failures, "default_store", _no_store)
    error = Gone()._lost("kv", lambda: [1], "ring", RuntimeError("Connection closed by peer"))
    assert "rank 0, whose process keeps the store" in str(error)
    assert "rank 1" not in str(error)


def _no_store():
    raise RuntimeError("Connection reset by peer")
