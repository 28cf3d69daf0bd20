"""Files of the trace where several users share a machine: neither reaches the other's runs."""

import faulthandler
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft._opening import open_to_lock
from weft.launch import trace
from weft.launch.trace import SIZE, Trace, _sweep
from weft_cli.inspect.blackbox import load_records, read_records

ZERO = ((0, 0),)
ATTACKER, VICTIM = 64_001, 64_002


def as_user(user: int, do: Callable[[], Any]) -> Any:
    """The result of a function in a child process of another user; its error, as text."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(20, exit=True)
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            text = json.dumps(do())
        except BaseException as error:
            text = json.dumps(f"{type(error).__name__}: {error}")
        os.write(theirs, text.encode())
        os._exit(0)
    os.close(theirs)
    with open(ours) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text or '"it hung"')


@pytest.fixture
def shared(monkeypatch):
    """A folder for all users, as /dev/shm and /tmp are."""
    if os.geteuid():
        pytest.skip("only root becomes two users")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "shared")
        path.mkdir()
        Path(folder).chmod(0o755)
        path.chmod(0o1777)
        monkeypatch.setattr("weft.launch.trace.root", lambda: path)
        monkeypatch.setattr("weft_cli.inspect.blackbox.root", lambda: path)
        monkeypatch.setattr(tempfile, "tempdir", str(path))
        monkeypatch.delenv("WEFT_BLACKBOX", raising=False)
        monkeypatch.setattr(trace, "_folder", None)
        yield path


def _lay_traps(shared: Path, target: Path) -> None:
    """A pipe, a rank that is a path, a device, a link and very many runs."""
    head = {"kind": "process", "run": "x", "ranks": 2, "host": socket.gethostname()[:64]}
    for number, (name, rank) in enumerate((("pipe", 0), ("path", str(target)), ("many", 1))):
        folder = shared / f"weft-steps-{name}"
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
        if name == "pipe":
            os.mkfifo(folder / "rank-0")
        else:
            gone = head | {"rank": rank, "pid": 2**31 - 1 - number}
            (folder / "rank-0").write_text(json.dumps(gone))
        os.utime(folder, (1, 1))
    (shared / "weft-steps-link").symlink_to("/dev")
    for number in range(2000):
        (shared / f"weft-steps-{number}").mkdir()


def _whole_life(victims: Path) -> list[str]:
    """All that a rank does with the files of its machine."""
    begin = time.process_time()
    _sweep(trace.root())
    box = Trace(0, 1, "a1", trace.root())
    box.step("ring-2", "ring", "kv", 1, 0, ZERO, ZERO, 512)
    lost = box.lost()
    box.failed("its own words")
    trace.remove_traces({2**31 - 1, 2**31 - 2, 2**31 - 3})
    newest = load_records()[0].head.run
    copied = trace.trace_folder("a1")
    kept = read_records(copied / "weft-rank-0.jsonl").failure.error
    box.close()
    modes = [oct(copied.stat().st_mode & 0o777), str(lost), newest, kept]
    return [*modes, str(time.process_time() - begin < 5), (victims / "a.jsonl").read_text()]


def test_another_users_steps_neither_stop_nor_redirect_a_run(shared):
    victims = shared / "victims"
    victims.mkdir()
    (victims / "a.jsonl").write_text("precious")
    for path in (victims, victims / "a.jsonl"):
        os.chown(path, VICTIM, VICTIM)
    as_user(ATTACKER, lambda: _lay_traps(shared, victims / "a"))
    found = as_user(VICTIM, lambda: _whole_life(victims))
    assert found == ["0o700", "[]", "a1", "its own words", "True", "precious"]
    assert len(list(shared.glob("weft-steps-*"))) == 2004  # theirs stay, the run's own went


@pytest.mark.parametrize("trap", ["folder", "link"])
@pytest.mark.parametrize("name", ["weft-steps-a1", "weft-blackbox-a1"])
def test_a_folder_that_another_user_made_first_gets_nothing(name, trap, shared):
    def lay() -> None:
        if trap == "link":
            (shared / "mine").mkdir(mode=0o777)
            (shared / "mine").chmod(0o777)
            (shared / name).symlink_to(shared / "mine")
        else:
            (shared / name).mkdir()
            (shared / name).chmod(0o777)

    def fail() -> str:
        box = Trace(0, 1, "a1", trace.root())
        box.step("ring-2", "ring", "kv", 1, 0, ZERO, ZERO, 512)
        box.failed("secret")
        box.close()
        return str(len(box.content()))

    as_user(ATTACKER, lay)
    assert int(as_user(VICTIM, fail)) == SIZE
    assert not list((shared / name).iterdir())


@pytest.mark.parametrize("name", ["weft-steps-a1", "weft-blackbox-a1"])
def test_root_writes_nothing_into_folders_of_others(name, shared):
    as_user(ATTACKER, lambda: (shared / name).mkdir(mode=0o755))
    box = Trace(0, 1, "a1", trace.root())
    box.failed("secret")
    assert not list((shared / name).iterdir())
    box.close()


def test_steps_of_a_run_are_closed_to_other_users(shared):
    def leave() -> None:
        Trace(0, 1, "a1", trace.root()).step("ring-2", "ring", "kv", 1, 0, ZERO, ZERO, 512)

    as_user(VICTIM, leave)
    for read in (lambda: os.listdir(shared / "weft-steps-a1"), load_records):
        said = as_user(ATTACKER, read)
        assert "PermissionError" in said or "no run on this machine" in said


def test_others_see_a_part_of_a_run_s_name_alone(tmp_path):
    """The name of its copies in a folder for all has the whole: nobody can take it before."""
    assert Trace(0, 1, "0123456789abcdef", tmp_path).path.parent.name == "weft-steps-01234567"
    assert trace._temporary("0123456789abcdef").name == "weft-blackbox-0123456789abcdef"


def test_a_restarted_rank_takes_its_file_anew(tmp_path):
    before = Trace(0, 2, "a1", tmp_path)
    before.step("ring-2", "ring", "kv", 1, 0, ZERO, ZERO, 512)
    again = Trace(0, 2, "a1", tmp_path)
    before.step("ring-2", "ring", "q", 1, 0, ZERO, ZERO, 512)
    assert again.path.read_bytes() == again.content()
    assert b'"q"' not in again.content()


def test_a_black_box_of_another_user_is_not_read_as_our_own(shared):
    folder = shared / "weft-blackbox-a1"

    def forge() -> None:
        folder.mkdir()
        process = {"kind": "process", "run": "a1", "rank": 0, "ranks": 1, "host": "h", "pid": 1}
        (folder / "weft-rank-0.jsonl").write_text(json.dumps(process))

    as_user(ATTACKER, forge)
    said = as_user(VICTIM, lambda: load_records(folder)[0].head.run)
    assert f"belongs to another user ({ATTACKER})" in said


def test_who_reads_a_file_of_locks_does_not_lock_it(shared):
    """Also one that an earlier version has made."""
    (shared / ".lock").touch(mode=0o644)
    os.chown(shared / ".lock", VICTIM, VICTIM)
    for name in (".lock", "new"):
        as_user(VICTIM, lambda: open_to_lock(shared / name).close())  # noqa: B023
        said = as_user(ATTACKER, lambda: open(shared / name).close())  # noqa: B023
        assert "PermissionError" in said
