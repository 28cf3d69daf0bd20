"""Black boxes: what ranks keep of their last steps, and what `weft blackbox` makes of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_cli import run

import weft
from weft.inspect.blackbox import Box, describe, load
from weft.launch.rings import CALLS, STEPS, read_rings
from weft.launch.trace import BlackBox, ranks_in_words

# -- rings ----------------------------------------------------------------------------------------


@pytest.fixture
def box(tmp_path, monkeypatch):
    """A box of rank 0 that writes to a folder of its own."""
    monkeypatch.setenv("WEFT_BLACKBOX", str(tmp_path / "out"))
    return BlackBox(0, 2, "a1", tmp_path / "rings")


def test_the_last_steps_and_calls_are_kept(box):
    for i in range(STEPS + 40):
        if i % 4 == 0:
            box.call("an attention call", i // 4, "0-1", i // 4, "mask full " * 200)
        with box.step("ring-2", "ring", "kv", i // 4, i % 4, "1", "1", 512):
            pass
    found = read_rings(box.path.read_bytes())
    assert [s["count"] for s in found["steps"]] == list(range(41, STEPS + 41))
    assert [c["call"] for c in found["calls"]] == list(range((STEPS + 40) // 4))[-CALLS:]
    last = found["steps"][-1]
    assert (last["call"], last["step"], last["to"], last["bytes"]) == (73, 3, "1", 512)
    assert last["began"] <= last["awaited"] <= last["ended"]
    assert not last["failed"]


def test_a_wait_that_raises_has_failed(box):
    with pytest.raises(RuntimeError), box.step("ring-2", "ring", "kv", 1, 0, "1", "1", 512):
        raise RuntimeError
    assert box.read()["steps"][-1]["failed"]


def test_a_step_that_ends_late_is_not_mistaken_for_a_newer_one(box):
    late = box.step("ring-2", "ring", "kv", 1, 0, "1", "1", 512)
    for _ in range(STEPS):
        box.step("ring-2", "ring", "kv", 2, 0, "1", "1", 512)
    late.__exit__(None)
    assert not any(step["ended"] for step in box.read()["steps"])


def test_many_peers_and_long_names_are_cut(box):
    box.step("x" * 500, "ring", "kv", 1, 0, "1", "1", 512)
    box.step("ring", "ring", "a vote", "#1", -1, ranks_in_words(range(0, 4096, 2)), "0", 0)
    found = box.read()
    assert len(found["steps"]) == 2
    assert found["steps"][1]["to"].startswith("0,2,4")


def test_an_unwritable_folder_hides_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WEFT_BLACKBOX", str(tmp_path / "file" / "below"))
    box = BlackBox(0, 2, "a1", tmp_path / "file")
    box.step("ring-2", "ring", "kv", 1, 0, "1", "1", 512)
    box.failed("mine")
    box.close()
    assert box.read()["failure"]["error"] == "mine"


def test_whoever_fails_writes_for_those_that_have_not(tmp_path, box):
    other = BlackBox(1, 2, "a1", tmp_path / "rings")
    other.step("ring-2", "ring", "kv", 1, 0, "0", "0", 512)
    box.failed("rank 1 did not answer")
    found = {b.rank: b.data for b in load(tmp_path / "out")}
    assert {rank: data["by"] for rank, data in found.items()} == {0: 0, 1: 0}
    other.failed("its own words")
    box.failed("again")
    assert load(tmp_path / "out")[1].data["failure"]["error"] == "its own words"
    for one in (box, other):
        one.close()
    assert not list((tmp_path / "rings").iterdir())


# -- in words -------------------------------------------------------------------------------------


def step(payload="kv", tag="7", to="", source="", awaited=2.0, ended=None, **more) -> dict:
    given = {"count": 1, "layout": "ring-4", "mesh_dim": "ring", "payload": payload, "tag": tag}
    given |= {"step": 0, "to": to, "from": source, "bytes": 64, "began": 1.0, "failed": False}
    return given | {"awaited": awaited, "ended": ended, "call": 3} | more


def boxes(*steps: list[dict], calls: dict[int, list[dict]] | None = None, **more) -> list[Box]:
    common = {"ranks": len(steps), "run": "a1", "by": 0, "written": 9.0, "failure": None} | more
    return [
        Box(common | {"rank": rank, "steps": done, "calls": (calls or {}).get(rank, [])})
        for rank, done in enumerate(steps)
    ]


def test_a_chain_of_waits_ends_at_the_rank_that_waits_for_nobody():
    done = step(tag="6", to="0", ended=3.0)
    text = describe(boxes([step(source="1")], [step(source="2")], [done]))
    assert "rank 0 waits for rank 1 for 7.0 s: kv along mesh dim 'ring', 64 bytes, step 0" in text
    assert "rank 1 waits for rank 2" in text
    assert "rank 2 waits for nobody: the last it did was kv along 'ring', step 0 of call 3" in text
    assert text.endswith("=> all that wait do so, directly or not, for rank 2")


def test_ranks_that_wait_for_each_other_are_a_circle():
    text = describe(boxes([step(source="1")], [step(source="0", payload="q")]))
    assert text.endswith("=> ranks wait for each other: 0 -> 1 -> 0")


def test_what_was_sent_is_on_its_way():
    text = describe(boxes([step(source="1")], [step(to="0", awaited=None)]))
    assert "rank 0 waits for rank 1 (begun there, too: on its way)" in text
    assert text.endswith("=> no rank waits for one that has not answered")


def test_a_later_vote_answers_an_earlier_one():
    vote = {"payload": "a vote", "source": "0-1", "to": "0-1", "step": None}
    first, second = step(tag="#1", **vote), step(tag="#2", awaited=None, **vote)
    assert "not answered" in describe(boxes([first], [second]))
    behind = step(tag="#0", ended=3.0, **vote)
    assert describe(boxes([first], [behind])).endswith("for rank 1")


def test_a_record_that_does_not_reach_back_accuses_nobody():
    newer = [step(tag="9", count=500, began=5.0, awaited=6.0, ended=7.0)]
    assert "no rank waits" in describe(boxes([step(source="1")], newer))


def test_a_failed_wait_that_was_overcome_is_no_wait():
    failed = step(source="1", ended=3.0, failed=True)
    later = step(tag="8", source="1", awaited=4.0, ended=5.0)
    assert boxes([failed, later])[0].waits is None
    assert boxes([failed])[0].waits == failed


def call(number: int, detail: str) -> dict:
    return {"count": number, "call": number, "what": "an attention call", "ranks": "0-2",
            "tag": str(number), "began": 1.0, "detail": detail}  # fmt: skip


def test_ranks_that_made_other_calls_diverged_at_the_first_of_them():
    same, other = [call(1, "full"), call(2, "full")], [call(1, "full"), call(2, "causal")]
    text = describe(boxes([], [], [], calls={0: same, 1: other, 2: same}))
    assert "ranks 0-2 diverged at call 2:\n  ranks 0, 2: full\n  rank 1: causal" in text


def test_ranks_that_made_fewer_calls_are_named():
    two, one = [call(1, "full"), call(2, "full")], [call(1, "full")]
    text = describe(boxes([], [], [], calls={0: two, 1: one, 2: two}))
    assert "rank 1 came to call 1, others to call 2: full" in text


def test_files_of_another_run_and_missing_ranks(tmp_path):
    new, old = boxes([], [], [])[0].data, boxes([], [], [])[1].data
    (tmp_path / "weft-rank-0.json").write_text(json.dumps(new | {"written": 20.0}))
    (tmp_path / "weft-rank-1.json").write_text(json.dumps(old | {"run": "b2"}))
    assert "no file of ranks 1-2" in run("blackbox", str(tmp_path))
    assert "has ranks 0" in run("blackbox", str(tmp_path), "--rank", "1", code=1)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rank": "a"}', "[" * 5000])
def test_a_file_that_is_no_black_box_is_refused_by_name(tmp_path, content):
    (tmp_path / "weft-rank-0.json").write_text(content)
    assert "weft-rank-0.json: no black box" in run("blackbox", str(tmp_path), code=1)
    assert "no file weft-rank-N.json" in run("blackbox", str(tmp_path / "none"), code=1)


# -- on processes ---------------------------------------------------------------------------------


def _attend(rank: int, folder: str, sleeper: int | None, causal: int | None) -> str:
    """Two calls; before the second a rank sleeps until it is released, or attends otherwise."""
    os.environ["WEFT_BLACKBOX"] = folder
    layout = weft.Layout.parse("tokens: ring=4").build("cpu", timeout=60)
    x = layout.shard(torch.randn(1, 2, 32, 4), {"tokens": 2})
    weft.attention(x, x, x, layout, "tokens")
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    while rank == sleeper and not Path(folder, "go on").exists():
        time.sleep(0.02)
    try:
        weft.attention(x, x, x, layout, "tokens", weft.Causal() if rank == causal else weft.Full())
    except weft.WeftError as error:
        return str(error)
    return ""


def test_a_signal_shows_who_all_wait_for(pool, tmp_path):
    """The ranks wait in torch meanwhile, where Python runs no handler."""
    asking = subprocess.Popen([sys.executable, "-c", _ASK, str(tmp_path)], text=True)
    assert pool.run(_attend, str(tmp_path), 2, None, timeout=60) == [""] * 4
    assert asking.wait(10) == 0
    texts = describe(load(tmp_path))
    assert "ranks 0-1, 3 wait for rank 2" in texts
    assert "a vote along mesh dim 'ring' of an attention call, call" in texts
    assert "rank 2 waits for nobody" in texts
    assert texts.endswith("for rank 2")


_ASK = f"""
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
until = time.monotonic() + 30
while len(list(folder.glob("pid-*"))) < 4 and time.monotonic() < until:
    time.sleep(0.02)
time.sleep(0.3)
os.kill(int((folder / "pid-0").read_text()), {int(signal.SIGUSR1)})
while len(list(folder.glob("weft-rank-*.json"))) < 4 and time.monotonic() < until:
    time.sleep(0.02)
(folder / "go on").write_text("")
"""


_TAKES_THE_SIGNAL = """
import gc, os, signal, sys, time
import torch, weft
weft.Layout.parse("tokens: ring=1; batch: dp=1").build("cpu", timeout=30)
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append("one"))
signal.signal(signal.SIGUSR2, lambda *_: seen.append("two"))
gc.collect()
files = [open(f"{sys.argv[1]}/{i}", "wb") for i in range(20)]
for number in (signal.SIGUSR1, signal.SIGUSR2):
    os.kill(os.getpid(), number)
time.sleep(0.5)
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGUSR1)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
for file in files:
    file.close()
print(seen, sum(os.path.getsize(file.name) for file in files))
"""


def test_a_program_may_take_the_signal_after_a_layout_was_built(tmp_path):
    """Python writes numbers of signals to a descriptor, which must not become a file's."""
    command = [sys.executable, "-c", _TAKES_THE_SIGNAL, str(tmp_path)]
    kept = os.environ | {"WEFT_BLACKBOX": str(tmp_path / "weft")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=kept)
    assert done.stdout == "['one', 'two'] 0\n", done.stderr
    assert not [*tmp_path.glob("weft*")]  # nobody asked for a black box


def test_another_call_is_where_ranks_diverged(pool, tmp_path):
    errors = pool.run(_attend, str(tmp_path), None, 1, timeout=60)
    assert all("must be the same on every rank" in error for error in errors)
    text = describe(load(tmp_path))
    assert "ranks 0-3 diverged at call" in text
    assert (
        "\n  rank 1: an attention call, layout 'tokens: ring=4', axes tokens, mask Causal" in text
    )


def _killed(rank: int, folder: str) -> str:
    os.environ["WEFT_BLACKBOX"] = folder
    layout = weft.Layout.parse("tokens: ring=4").build("cpu", timeout=10)
    x = layout.shard(torch.randn(1, 2, 32, 4), {"tokens": 2})
    weft.attention(x, x, x, layout, "tokens")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        weft.attention(x, x, x, layout, "tokens")
    except weft.RankError as error:
        return str(error)
    return ""


def test_a_killed_rank_leaves_its_last_steps(pool, tmp_path):
    errors = pool.attempt(_killed, str(tmp_path), timeout=60, dying=(1,))
    assert f"`weft blackbox {tmp_path}`" in errors[0]
    text = describe(load(tmp_path))
    assert "in vain for rank 1" in text, text
    assert (
        "rank 1 waits for nobody (its process has ended or was killed): the last it did was" in text
    )
