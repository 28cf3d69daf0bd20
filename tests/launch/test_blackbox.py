"""Black boxes: what ranks keep of their last steps, and what `weft blackbox` makes of it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from pool import Pool
from world import cli

import weft
from weft.launch.trace import CALLS, SIZE, STEPS, Trace, _sweep, rank_ranges
from weft_cli.inspect.blackbox import Box, RecordedLine, describe_run, load_records, read_records

ZERO, ONE = ((0, 0),), ((1, 1),)

# -- lines ----------------------------------------------------------------------------------------


@pytest.fixture
def box(tmp_path, monkeypatch):
    """A trace of rank 0 that writes to a folder of its own."""
    monkeypatch.setenv("WEFT_BLACKBOX", str(tmp_path / "out"))
    return Trace(0, 2, "a1", tmp_path / "weft-steps")


def test_the_last_steps_and_calls_are_kept(box):
    for i in range(STEPS + 40):
        if i % 4 == 0:
            box.call("an attention call", i // 4, ((0, 1),), i // 4, "mask full " * 200)
        with box.step("ring-2", "ring", "kv", i // 4, i % 4, ONE, ONE, 512):
            pass
    assert box.path.stat().st_size == SIZE
    kept = read_records(box.path)
    assert [s.count for s in kept.steps] == list(range(41, STEPS + 41))
    assert [c.number for c in kept.calls] == list(range((STEPS + 40) // 4))[-CALLS:]
    last = kept.steps[-1]
    assert (last.tag, last.step, last.to, last.bytes) == ("73", 3, ONE, 512)
    assert last.began <= last.awaited <= last.ended
    assert abs(last.ended - time.time()) < 60
    assert not last.failed


def test_a_wait_that_raises_has_failed(box):
    with pytest.raises(RuntimeError), box.step("ring-2", "ring", "kv", 1, 0, ONE, ONE, 512):
        raise RuntimeError
    assert read_records(box.path).steps[-1].failed


def test_step_that_ends_late_is_not_mistaken_for_newer_one(box):
    late = box.step("ring-2", "ring", "kv", 1, 0, ONE, ONE, 512)
    for _ in range(STEPS):
        box.step("ring-2", "ring", "kv", 2, 0, ONE, ONE, 512)
    late.__exit__(None)
    assert not any(step.ended for step in read_records(box.path).steps)


def test_many_peers_and_long_names_are_cut(box):
    box.step("x" * 500, 'é"\n' * 300, "kv", 2**63, 10**6, ONE, ONE, 2**60)
    box.collective("ring", "ring", "a vote", rank_ranges(range(0, 100_000, 2)), 0)
    box.call("\x1b[2J" * 300, 2**60, ((0, 4095),), 2**63, "\n" * 3000)
    kept = read_records(box.path)
    assert len(kept.steps) == 2
    assert kept.steps[1].to[:3] == ((0, 0), (2, 2), (4, 4))
    assert len(kept.calls) == 1


def test_an_unwritable_folder_hides_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WEFT_BLACKBOX", str(tmp_path / "file" / "below"))
    box = Trace(0, 2, "a1", tmp_path / "file")
    box.step("ring-2", "ring", "kv", 1, 0, ONE, ONE, 512)
    box.failed("mine")
    box.close()
    (tmp_path / "content").write_bytes(box.content())
    assert read_records(tmp_path / "content").failure.error == "mine"


def test_newest_run_of_machine_is_read_while_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("weft_cli.inspect.blackbox.root", lambda: tmp_path)
    assert "no run on this machine" in cli("blackbox", code=1)
    for number, name in enumerate(("older", "newer")):
        trace = Trace(0, 1, name, tmp_path)
        trace.step("ring-2", "ring", "kv", 1, 0, ZERO, ZERO, 512)
        os.utime(trace.path.parent, (number, number))
    text = cli("blackbox")
    assert "run newer, 1 ranks, as of" in text
    assert "rank 0 waits for nobody: the last it did was kv along mesh dim 'ring'" in text


def test_steps_of_ended_processes_are_swept(tmp_path):
    hour, day = 3600.0, 25 * 3600.0
    gone, live = b'{"pid":%d}' % (2**31 - 1), b'{"pid":%d}' % os.getpid()
    cases = {
        "gone": (gone, hour, False),
        "gone just now": (gone, 60.0, True),
        "live": (live, day, True),
        "binary": (b"\x00\x01WEFT" * 40, day, False),
        "binary of today": (b"\x00\x01WEFT" * 40, hour, True),
        "no process": (b'{"rank":0}', day, False),
        "no object": (b"[]", day, False),
        "empty": (None, hour, False),
    }
    for name, (content, age, _) in cases.items():
        run_folder = tmp_path / f"weft-steps-{name}"
        run_folder.mkdir()
        if content is not None:
            (run_folder / "rank-0").write_bytes(content)
        os.utime(run_folder, (time.time() - age,) * 2)
    _sweep(tmp_path)
    left = {path.name.removeprefix("weft-steps-") for path in tmp_path.iterdir()}
    assert left == {name for name, (*_, stays) in cases.items() if stays}


def test_whoever_fails_writes_for_those_that_have_not(tmp_path, box):
    other = Trace(1, 2, "a1", tmp_path / "weft-steps")
    other.step("ring-2", "ring", "kv", 1, 0, ZERO, ZERO, 512)
    box.failed("rank 1 did not answer")
    heads = [path.read_text().partition("\n")[0] for path in (tmp_path / "out").iterdir()]
    assert [json.loads(head)["by"] for head in heads] == [0, 0]
    other.failed("its own words")
    box.failed("again")
    assert load_records(tmp_path / "out")[1].failure.error == "its own words"
    for one in (box, other):
        one.close()
    assert not list((tmp_path / "weft-steps").iterdir())


def test_a_stopped_rank_is_lost_until_it_records_a_failure(box, tmp_path, monkeypatch):
    monkeypatch.setattr("weft.launch.trace.state_of", lambda pid: "stopped")
    other = Trace(1, 2, "a1", tmp_path / "weft-steps")
    assert box.lost() == [1]
    other.failed("rank 0 did not answer")
    assert box.lost() == []
    other.step("ring-2", "ring", "kv", 2, 0, ZERO, ZERO, 512)
    assert box.lost() == [1]


# -- in words -------------------------------------------------------------------------------------


def step(payload="kv", tag="7", to=(), source=(), awaited=2.0, ended=0.0, **more) -> RecordedLine:
    fields = {"count": 1, "layout": "ring-4", "mesh_dim": "ring", "payload": payload, "tag": tag}
    fields |= {"step": 0, "to": to, "source": source, "bytes": 64, "began": 1.0}
    fields |= {"turn": 0, "failed": False}
    return RecordedLine(kind="step", **(fields | {"awaited": awaited, "ended": ended} | more))


def boxes(
    *steps: list[RecordedLine], calls: dict[int, list[RecordedLine]] | None = None, **more
) -> list[Box]:
    common = {"kind": "process", "ranks": len(steps), "run": "a1", "host": "", "pid": 1}
    copy = RecordedLine(kind="copy", written=9.0, process="runs")
    return [
        Box(RecordedLine(rank=rank, **(common | more)), copy, done, (calls or {}).get(rank, []))
        for rank, done in enumerate(steps)
    ]


def test_chain_of_waits_ends_at_rank_that_waits_for_nobody():
    done, made = step(tag="6", to=ZERO, ended=3.0), {2: [call(3, "full", tag="6")]}
    text = describe_run(boxes([step(source=ONE)], [step(source=((2, 2),))], [done], calls=made))
    assert "rank 0 waits for rank 1 for 7.0 s: kv along mesh dim 'ring', 64 bytes, step 0" in text
    assert "rank 1 waits for rank 2" in text
    assert (
        "rank 2 waits for nobody: the last it did was kv along mesh dim 'ring', 64 bytes, step 0"
        in text
    )
    assert "of an attention call, call 3 of ranks 0-2, ended" in text
    assert text.endswith("=> all that wait do so, directly or not, for rank 2")


def test_ranks_that_wait_for_each_other_are_named():
    text = describe_run(boxes([step(source=ONE)], [step(source=ZERO, payload="q")]))
    assert text.endswith("=> ranks 0-1 wait for each other")


def test_what_was_sent_is_on_its_way():
    text = describe_run(boxes([step(source=ONE)], [step(to=ZERO, awaited=0.0)]))
    assert "rank 0 waits for rank 1 (begun there, too: on its way)" in text
    assert text.endswith("=> no rank waits for one that has not answered")


def test_a_later_vote_answers_an_earlier_one():
    vote = {"payload": "a vote", "source": ((0, 1),), "to": ((0, 1),), "step": -1}
    first, second = step(turn=1, **vote), step(turn=2, awaited=0.0, **vote)
    assert "not answered" in describe_run(boxes([first], [second]))
    behind = step(turn=0, ended=3.0, **vote)
    assert describe_run(boxes([first], [behind])).endswith("for rank 1")


def test_a_record_that_does_not_reach_back_accuses_nobody():
    newer = [step(tag="9", count=500, began=5.0, awaited=6.0, ended=7.0)]
    assert "no rank waits" in describe_run(boxes([step(source=ONE)], newer))


def test_a_failed_wait_that_was_overcome_is_no_wait():
    failed = step(source=ONE, ended=3.0, failed=True)
    later = step(tag="8", source=ONE, awaited=4.0, ended=5.0)
    assert boxes([failed, later])[0].waits is None
    assert boxes([failed])[0].waits == failed


def call(number: int, detail: str, tag: str = "") -> RecordedLine:
    what, ranks = "an attention call", ((0, 2),)
    fields = {"count": number, "number": number, "tag": tag or str(number), "to": ranks}
    return RecordedLine(kind="call", began=1.0, what=what, detail=detail, **fields)


def test_ranks_that_made_other_calls_diverged_at_first_of_them():
    same, other = [call(1, "full"), call(2, "full")], [call(1, "full"), call(2, "causal")]
    text = describe_run(boxes([], [], [], calls={0: same, 1: other, 2: same}))
    assert "ranks 0-2 diverged at call 2:\n  ranks 0, 2: full\n  rank 1: causal" in text


def written(path: Path, number: int = 0, lines: str = "", **more) -> None:
    """A file as a rank writes it."""
    top = {"kind": "copy", "written": 9.0, "by": number, "process": "runs"}
    head = {"kind": "process", "run": "a1", "rank": number, "ranks": 3, "host": "h", "pid": 1}
    texts = (json.dumps({k: more.get(k, v) for k, v in part.items()}) for part in (top, head))
    (path / f"weft-rank-{number}.jsonl").write_text("\n".join([*texts, lines]))


def test_files_of_another_run_and_missing_ranks(tmp_path):
    written(tmp_path, 0, written=20.0)
    written(tmp_path, 1, run="b2")
    assert "no file of ranks 1-2" in cli("blackbox", str(tmp_path))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rank": "a"}', "[" * 5000])
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path, content):
    (tmp_path / "weft-rank-0.jsonl").write_text(content)
    assert "weft-rank-0.jsonl: no trace" in cli("blackbox", str(tmp_path), code=1)
    assert "no file weft-rank-N.jsonl" in cli("blackbox", str(tmp_path / "none"), code=1)


def forged(**more) -> str:
    """A step with some fields of a forger."""
    return json.dumps(step(to=ZERO, source=ONE).model_dump() | more)


FORGED = {
    "all ranks": forged(to=[(0, 131071)], source=[(0, 131071)]),
    "more than all": forged(to=[(0, 999999999999)]),
    "backwards": forged(source=[(5, 2), (-9, -1)]),
    "many": forged(to=[(0, 131071)] * 10_000),
    "no time": forged().replace('"awaited": 2.0', '"awaited": 1e300'),
    "late": forged(awaited=9999999999999999),
    "a turn": forged(turn=2**62, payload="a vote"),
    "no call": '{"kind":"call"}\n["call"]\n[[[[\n{}\n\x00\xff',
    "deep": "[" * 100_000,
    "failed at": '{"kind":"failure","at":-9999999999999999,"error":"x"}',
    "escapes": '{"kind":"failure","at":5,"error":"\\u001b[2J\\u009b2J"}\n'
    + forged(mesh_dim="\x1b]0;owned\x07", payload="\x1b[31m", layout="\u202e", tag="\r"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_lines_cost_little_and_reach_no_terminal(name, tmp_path):
    written(tmp_path, 0, FORGED[name], ranks=131072)
    written(tmp_path, 1, FORGED[name], run="a1", process="\x1b[2J")
    begin = time.process_time()
    text = cli("blackbox", str(tmp_path))
    assert time.process_time() - begin < 5
    assert not [c for c in text if c in "\x1b\x9b\x07\r\u202e"]


@pytest.mark.parametrize("wrong", [{"ranks": 10**9}, {"rank": -1}, {"pid": 10**30}, {"run": 5}])
def test_a_forged_head_is_refused(wrong, tmp_path):
    written(tmp_path, 0, **wrong)
    assert "weft-rank-0.jsonl: no trace" in cli("blackbox", str(tmp_path), code=1)


# -- on processes ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool():
    """Ranks that have not failed in another file: calls abandoned there differ in their counts."""
    with Pool(4) as processes:
        yield processes


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


@pytest.mark.sample
def test_a_run_that_goes_on_shows_who_all_wait_for(pool, tmp_path):
    """The ranks wait in torch meanwhile, where Python runs no handler: nobody asks them."""
    command = [sys.executable, "-c", _ASK, str(tmp_path)]
    asking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert pool.run(_attend, str(tmp_path), 2, None, timeout=60) == [""] * 4
    text, _ = asking.communicate(timeout=60)
    assert "ranks 0-1, 3 wait for rank 2" in text
    assert "a vote along mesh dim 'ring' of an attention call, call" in text
    assert "rank 2 waits for nobody" in text
    assert text.endswith("for rank 2\n")
    assert not [*tmp_path.glob("weft-rank-*")]


_ASK = """
import contextlib, sys, time
from pathlib import Path
from weft.errors import DeclarationError
from weft_cli.inspect.blackbox import describe_run, load_records
folder = Path(sys.argv[1])
until, text = time.monotonic() + 30, ""
while "ranks 0-1, 3 wait" not in text and time.monotonic() < until:  # not all of them do yet
    time.sleep(0.1)
    pids = {path.read_text() for path in folder.glob("pid-*")}
    for steps in (p for p in Path("/dev/shm").glob("weft-steps-*") if list(p.glob("rank-*"))):
        with contextlib.suppress(DeclarationError):  # of another version, or ended meanwhile
            boxes = load_records(steps)
            if {str(box.head.pid) for box in boxes} == pids:
                text = describe_run(boxes)
(folder / "go on").write_text("")
print(text)
"""


@pytest.mark.slow
def test_a_fork_leaves_its_parent_s_steps(tmp_path):
    """A child that ends well, or by an error, is no rank."""
    command = [sys.executable, "-c", _FORKS, str(tmp_path)]
    kept = os.environ | {"WEFT_BLACKBOX": str(tmp_path / "weft")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=kept)
    assert done.stdout == "True\n", done.stderr
    assert not [*tmp_path.glob("weft*")]  # nobody failed


_FORKS = """
import os, sys
import weft
layout = weft.Layout.parse("tokens: ring=1; batch: dp=1").build("cpu", timeout=30)
child = os.fork()
if child == 0:
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
from weft.launch import trace
print(trace._trace.path.exists())
"""


def test_another_call_is_where_ranks_diverged(pool, tmp_path):
    errors = pool.run(_attend, str(tmp_path), None, 1, timeout=60)
    assert all("must be the same on every rank" in error for error in errors)
    text = describe_run(load_records(tmp_path))
    assert "ranks 0-3 diverged at call" in text
    assert (
        "\n  rank 1: an attention call, layout 'tokens: ring=4', axes tokens, mask Causal" in text
    )


def _killed(rank: int, folder: str) -> str:
    os.environ["WEFT_BLACKBOX"] = folder
    layout = weft.Layout.parse("tokens: ring=4").build("cpu", timeout=20)
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
    text = describe_run(load_records(tmp_path))
    assert "in vain for rank 1" in text, text
    # A process that was just killed may still be going when its lines are copied.
    state = r"( \(its process has ended or was killed\))?"
    assert re.search(rf"rank 1 waits for nobody{state}: the last it did was", text), text
