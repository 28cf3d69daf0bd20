"""Peers of this machine: killed and frozen ranks are named by their processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ports import free_port

from weft.errors import DeclarationError, RankError
from weft.launch import peers
from weft.launch import trace as traces
from weft.launch.environment import wait_limit
from weft.launch.trace import Trace
from weft_cli.inspect.blackbox import describe_run, load_records


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """The trace of rank 0, which writes to a folder of the test."""
    monkeypatch.setenv("WEFT_BLACKBOX", str(tmp_path / "out"))
    return Trace(0, 3, "a1", tmp_path)


class Peer:
    """A process that does nothing, with the trace of a rank."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        self.trace = Trace(rank, 3, "a1", folder)
        head = {"kind": "process", "run": "a1", "rank": rank, "ranks": 3}
        head |= {"host": traces._host(), "pid": self.process.pid}
        head |= {"started": traces._status(self.process.pid)[1]}
        self.trace.write_line(0, json.dumps(head))
        self.trace.step("ring-2", "ring", "kv", 1, 0, ((0, 0),), ((0, 0),), 512)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """It ends well."""
        self.trace.close()
        self.kill()


@pytest.fixture
def start(tmp_path):
    """Starts processes that are ranks."""
    started: list[Peer] = []

    def begin(rank: int) -> Peer:
        started.append(Peer(rank, tmp_path))
        return started[-1]

    yield begin
    for peer in started:
        peer.kill()


@pytest.fixture
def watch(trace, monkeypatch):
    """A watch with short looks, and what it said."""
    monkeypatch.setattr(peers, "_TICK", 0.05)
    monkeypatch.setattr(peers, "FROZEN", 0.5)
    said: list[str] = []
    watching = peers.PeerWatch(trace, said.append)
    yield said
    watching.close()


def _until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_a_killed_rank_is_named_once_and_copied(trace, start, watch, tmp_path):
    first, second = start(1), start(2)
    time.sleep(0.2)
    first.kill()
    _until(lambda: watch)
    second.kill()  # as a launcher does
    _until(lambda: trace.lost() == [1, 2])
    time.sleep(0.2)
    assert len(watch) == 1
    assert "rank 1 of this machine was killed, or ended silently" in watch[0]
    assert {box.rank for box in load_records(tmp_path / "out")} == {0, 1, 2}


def test_a_rank_that_ends_well_is_not_named(start, watch):
    peer = start(1)
    time.sleep(0.2)
    peer.end()
    time.sleep(0.3)
    assert not watch


def test_a_frozen_rank_is_killed_by_who_waits_for_it(trace, start, watch):
    process = start(1).process
    os.kill(process.pid, signal.SIGSTOP)
    process.wait()  # the main thread waits in one place, as in torch
    assert process.returncode == -signal.SIGKILL
    _until(lambda: watch)
    assert "rank 1 was stopped (SIGSTOP) for" in watch[0]
    assert trace.lost() == [1]
    assert traces.why_killed(process.pid) is None  # it is of no run in shared memory


def test_a_frozen_rank_that_nobody_waits_for_goes_on(start, watch):
    peer = start(1)
    os.kill(peer.process.pid, signal.SIGSTOP)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        sum(range(1000))
    assert peer.process.poll() is None
    os.kill(peer.process.pid, signal.SIGCONT)
    peer.end()
    assert not watch


def test_the_last_survivor_removes_the_traces_of_the_killed(trace, start, tmp_path):
    killed, alive = start(1), start(2)
    killed.kill()
    trace.failed("rank 1 did not answer")
    trace.close()
    left = {path.name for path in (tmp_path / "weft-steps-a1").iterdir()}
    assert left == {"rank-1", "rank-2"}  # so rank 2, which is late, still sees who was killed
    alive.end()
    assert not (tmp_path / "weft-steps-a1").exists()


def test_an_error_of_torch_names_the_rank_that_was_lost(trace, start, monkeypatch):
    start(1).kill()
    monkeypatch.setattr(peers, "_watch", peers.PeerWatch(trace, lambda text: None))
    error = RuntimeError("Connection closed by peer [127.0.0.1]:5")
    assert peers.add_lost(error) == [1]
    assert "weft: rank 1 of this machine was killed" in error.__notes__[0]
    named = RankError("rank 1 ended")
    peers.add_lost(named)
    assert not getattr(named, "__notes__", [])
    peers._watch.close()


#: Rank 1 raises an error of its own while rank 0 waits in torch.
RAISES = """
import sys, torch, torch.distributed as dist, weft
layout = weft.Layout.parse("tokens: ring=2").build("cpu", timeout=60)
def fails():
    if layout.rank == 1:
        raise KeyError("a user's own")
x, model = torch.ones(1, 4), torch.nn.Linear(4, 4)
"""
WAITS = {
    "barrier": "fails(), dist.barrier()",
    "fsdp": """
from torch.distributed.fsdp import fully_shard
fully_shard(model, mesh=layout.device_mesh)
model(x), fails(), model(x).sum().backward()
""",
    "accelerate": """
import accelerate
model = accelerate.Accelerator(cpu=True).prepare(model)
model(x).sum().backward(), fails(), model(x).sum().backward()
""",
    "trainer": """
import transformers as hf
sizes = dict.fromkeys(["hidden_size", "intermediate_size", "vocab_size"], 16)
model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
class Fails(hf.TrainerCallback):
    def on_step_end(self, *_, **__): fails()
given = hf.TrainingArguments(sys.argv[1], use_cpu=True, max_steps=4, report_to=[])
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 64
hf.Trainer(model, given, train_dataset=rows, callbacks=[Fails()]).train()
""",
}


@pytest.mark.parametrize(
    "waits", ["barrier", *(pytest.param(w, marks=pytest.mark.slow) for w in [*WAITS][1:])]
)
def test_an_error_of_one_rank_is_named_where_others_wait_in_torch(waits, tmp_path):
    environ = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ |= {"WORLD_SIZE": "2", "WEFT_BLACKBOX": str(tmp_path)}
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", RAISES + WAITS[waits], str(tmp_path)],
            env=environ | {"RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    )
    said = first.communicate(timeout=90)[1]
    second.communicate(timeout=90)
    assert 'weft: rank 1 failed first: KeyError: "a user\'s own"' in said, said


def test_a_process_number_that_is_taken_again_is_gone(trace, start):
    start(1)
    head = trace.peers()[1]
    assert traces._state(head) == "runs"
    assert traces._state(head | {"started": head["started"] - 1}) == "gone"


def test_waits_outside_of_weft_leave_a_verdict(trace, start, tmp_path):
    start(1).kill()
    trace.failed("Connection closed by peer")
    text = describe_run(load_records(tmp_path / "out"))
    assert "=> rank 1 (its process has ended or was killed); others may wait" in text


def test_watches_end_with_their_process(trace):
    before = threading.active_count()
    peers.PeerWatch(trace, print).close()
    assert threading.active_count() == before


@pytest.mark.parametrize("given", ["abc", "0", "-3", "nan", "inf"])
def test_a_limit_that_is_no_time_is_refused_by_name(given):
    with pytest.raises(DeclarationError, match=r"WEFT_TIMEOUT=.*seconds"):
        wait_limit(environ={"WEFT_TIMEOUT": given})
