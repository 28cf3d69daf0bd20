"""Ranks that end or stop before all ranks have met are named by those that wait for them."""

import datetime
import os
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist
from ports import free_port

from weft.comm import meeting
from weft.errors import RankError
from weft.launch import trace


@pytest.fixture
def sibling(monkeypatch):
    """A process of rank 1 of a launch whose rank 0 this process is."""
    placed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2"}
    for name, value in placed.items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen(["sleep", "600"], env=os.environ | {"RANK": "1"}) as process:
        yield process
        process.kill()


FATES = {signal.SIGKILL: "rank 1 ended before", signal.SIGSTOP: r"rank 1 is stopped \(SIGSTOP\)"}


@pytest.mark.parametrize("fate", FATES)
def test_a_rank_that_was_seen_and_does_not_go_on_is_named(sibling, fate, monkeypatch):
    monkeypatch.setattr(trace, "FROZEN", -1.0)
    siblings = meeting._Siblings(0, 2)
    siblings.refuse_lost([1])
    sibling.send_signal(fate)
    if fate == signal.SIGKILL:
        sibling.wait()
    else:
        os.waitid(os.P_PID, sibling.pid, os.WSTOPPED)
    with pytest.raises(RankError, match=FATES[fate]):
        siblings.refuse_lost([1])


def test_a_rank_of_another_machine_that_does_not_come_is_named():
    store = dist.HashStore()
    store.set("weft/came/2", "")
    with pytest.raises(RankError, match=r"ranks 1, 3 of 4 did not come within 0.2 s"):
        meeting.await_ranks(store, 0, 4, datetime.timedelta(seconds=0.2))


@pytest.mark.sample
def test_a_rank_that_no_other_saw_is_named_where_a_launcher_starts_all():
    environ = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    code = "import weft; weft.Layout.parse('tokens: ring=2').build('cpu', timeout=100)"
    given = {"env": environ, "timeout": 90, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], **given, check=False)
    assert "RankError: rank 1 ended before all ranks met" in done.stderr
