"""The trace: the last steps of every rank, as JSON lines in a mapped file that outlives it.

Every process keeps its last 256 messages, votes and sums, and its last 32 calls, in lines of one
width of a small mapped file (in `/dev/shm`, or the temporary folder). A step costs a few
microseconds, and a rank that was killed or stopped leaves its lines. torch's flight recorder knows
NCCL alone, is a pickle, and dies with its process: it does not serve here.

    rank 0  steps --> /dev/shm/weft-steps-RUN/rank-0 --+
    rank 1  steps --> /dev/shm/weft-steps-RUN/rank-1 --+--> the first of them that fails copies all
    rank 2  killed    /dev/shm/weft-steps-RUN/rank-2 --+    of its machine to DIR/weft-rank-N.jsonl

`weft blackbox` reads either folder, also while ranks run. A rank that ends without a failure
removes its file.

Other users write to `/dev/shm`, too. Folders and files there are this user's own, and closed to
others; those of others are not opened, and how many are looked at is limited.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import itertools
import json
import mmap
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .._caching import cached
from .._opening import open_to_read, read_bytes, replacing
from .._torch import default_store
from . import failures

#: Environment variable that names the folder to write to; "off" keeps no trace.
VARIABLE = "WEFT_BLACKBOX"
#: Used as a step where there is no trace.
NOTHING = contextlib.nullcontext()
#: Seconds for which a rank is stopped (SIGSTOP) and waited for until it counts as frozen.
FROZEN = 15.0
#: How many calls and steps are kept, after a line for the process and one for its failure.
CALLS, STEPS = 32, 256
#: Bytes of a line, and of the file.
WIDTH = 1024
SIZE = (2 + CALLS + STEPS) * WIDTH

#: Some ranks as ranges, both ends included.
Ranges = tuple[tuple[int, int], ...]
_RANGES = 12  # named of a step's ranks
_NAMES = WIDTH - 256  # bytes for a step's names; the others are numbers
_KEPT = 600.0  # seconds for which the files of a run remain after its processes are gone
_FOREIGN = 86_400.0  # the same of files that name no process, such as another version's
_RECENT = 60.0  # seconds for which a failure may be the cause of others
_TURN = 1.0  # seconds to wait for other ranks' copies
_ENTRIES, _RUNS = 65_536, 1_024  # that are looked at: names in a folder, and folders of runs
_MOST_RANKS = 1 << 17
_PUBLIC = 8  # letters of a run's name that others see, who then cannot take the name of its copies
_RUN, _RANK = re.compile(r"weft-steps-.{1,64}"), re.compile(r"rank-[0-9]{1,6}")
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError)
_encode = json.JSONEncoder(separators=(",", ":")).encode


class TraceStep:
    """A step in a trace: a context in which this rank waits for it to end."""

    __slots__ = ("began", "count", "names", "trace", "waited")

    def __init__(self, trace: Trace, count: int, names: str) -> None:
        self.trace, self.count, self.names = trace, count, names
        self.began, self.waited = time.time(), 0.0
        self._write()

    def __enter__(self) -> None:
        self.waited = time.time()
        self._write()

    def __exit__(self, failed: object, *_: object) -> None:
        self._write(time.time(), failed is not None)

    def _write(self, ended: float = 0.0, failed: bool = False) -> None:
        count = self.count
        if self.trace.steps - count < STEPS:  # else a newer step has its line
            self.trace.write_line(
                2 + CALLS + count % STEPS,
                f'{{"kind":"step","count":{count},"began":{self.began:.6f},"awaited":'
                f'{self.waited:.6f},"ended":{ended:.6f},"failed":{int(failed)},{self.names}',
            )


class Trace:
    """The lines of one process, and the files that it copies them to.

    All ranks of the run share its name; `root` is the folder for all runs.
    """

    def __init__(self, rank: int, ranks: int, run: str, root: Path) -> None:
        self.rank, self.run = rank, run
        self.path = root / f"weft-steps-{run[:_PUBLIC]}" / f"rank-{rank}"
        #: the number of the latest step
        self.steps = 0
        self._steps, self._calls = itertools.count(1), itertools.count(1)
        self._turns: Counter[tuple[str, Ranges]] = Counter()
        self._map, self._has_failed = _mapped(self.path), False
        process = {"kind": "process", "run": run, "rank": rank, "ranks": ranks, "host": _host()}
        process |= {"pid": os.getpid(), "started": _status(os.getpid())[1]}
        self.write_line(0, _encode(process))

    def call(self, label: str, number: int, ranks: Ranges, tag: int, detail: str) -> None:
        """A pass of a call begins; its steps have the same tag."""
        count = next(self._calls)
        fields = {"kind": "call", "count": count, "began": time.time(), "number": number}
        fields |= {"tag": str(tag), "to": ranks, "what": label, "detail": detail}
        self.write_line(2 + count % CALLS, _fitting(fields, WIDTH))

    def step(
        self,
        layout: str,
        mesh_dim: str,
        payload: str,
        tag: int,
        step: int,
        to: Ranges,
        source: Ranges,
        nbytes: int,
        turn: int = 0,
    ) -> TraceStep:
        """Something begins that other world ranks take part in.

        `step` is that of the tile program, -1 outside one; `nbytes` counts both ways; `turn` is how
        many collectives of its kind these ranks have begun.
        """
        self.steps = count = next(self._steps)
        names = _names(to, source, mesh_dim, payload, layout)
        numbers = f'"tag":"{tag}","turn":{turn},"step":{step},"bytes":{nbytes}'
        return TraceStep(self, count, f"{numbers},{names}")

    def collective(
        self, layout: str, mesh_dim: str, payload: str, ranks: Ranges, nbytes: int
    ) -> TraceStep:
        """Something begins in which some world ranks all wait for all."""
        self._turns[payload, ranks] += 1
        turn = self._turns[payload, ranks]
        return self.step(layout, mesh_dim, payload, 0, -1, ranks, ranks, nbytes, turn)

    def failed(self, error: str) -> None:
        """This rank fails: copy the last steps of all ranks of this machine."""
        fields = {"kind": "failure", "at": time.time(), "error": error}
        self.write_line(1, _fitting(fields, WIDTH))
        self._has_failed = True
        self.copy_all()

    def copy_all(self) -> None:
        """Copy the last steps of all ranks of this machine; a full disk must hide no failure."""
        with contextlib.suppress(OSError), _in_turn(self.path.parent):
            _copy(self.content(), self.rank)
            for path in self._others():
                with contextlib.suppress(*_UNREADABLE):
                    _copy(_content(path), self.rank)

    def content(self) -> bytes:
        """The lines as they are now."""
        return self._map[:]

    def peers(self) -> dict[int, dict[str, Any]]:
        """The processes of the other ranks of this machine whose files are there, by rank."""
        heads = filter(None, map(_head, self._others()))
        return {head["rank"]: head for head in heads if head["host"] == _host()}

    def lost(self) -> list[int]:
        """World ranks of this machine that were killed or stopped before they noticed a failure."""
        return sorted(
            rank
            for rank, head in self.peers().items()
            if _state(head) != "runs" and not _has_noticed(self._path_of(rank))
        )

    def has_failed(self, rank: int) -> bool:
        """True if a rank of this machine has recorded a failure by itself."""
        return any("by" not in failure for failure in _failures(self._path_of(rank)))

    def failed_first(self) -> tuple[int, str] | None:
        """The other rank of this run that failed first within `_RECENT` seconds, and its error."""
        found: list[tuple[float, int, str]] = []
        for path in itertools.islice(trace_folder(self.run).glob("weft-rank-*.jsonl"), _ENTRIES):
            with contextlib.suppress(*_UNREADABLE), open_to_read(path) as file:
                _, head, failure = (json.loads(file.readline(WIDTH)) for _ in range(3))
                if head["run"] == self.run and head["rank"] != self.rank and "by" not in failure:
                    found.append((failure["at"], head["rank"], failure["error"]))
        found = [each for each in found if each[0] > time.time() - _RECENT]
        return min(found)[1:] if found else None

    def frozen(self) -> dict[int, int]:
        """Ranks of this machine that a signal has stopped, with their processes."""
        heads = self.peers().items()
        return {rank: head["pid"] for rank, head in heads if _letter(head) == "T"}

    def note_frozen(self, rank: int) -> None:
        """Record in the file of a frozen rank that it is being killed."""
        why = f"stopped (SIGSTOP) for {FROZEN:g} s while others waited for it, so it was killed"
        fields = {"kind": "failure", "at": time.time(), "error": f"was {why}", "by": self.rank}
        with contextlib.suppress(OSError), open(self._path_of(rank), "r+b", opener=_existing) as f:
            f.seek(WIDTH)
            f.write(_encode(fields).encode().ljust(WIDTH - 1) + b"\n")

    def in_words(self, ranks: Sequence[int]) -> str:
        """Lost ranks, and what became of them.

        >>> Trace(0, 2, "a1", Path(tempfile.mkdtemp())).in_words([2, 3])
        'ranks 2, 3 of this machine were killed, or ended silently'
        """
        several = len(ranks) > 1
        if not several:
            for failure in _failures(self._path_of(ranks[0])):
                if "by" in failure:
                    return f"{failures.who(ranks)} {failure.get('error')}"
            head = self.peers().get(ranks[0])
            if head is not None and _state(head) == "stopped":
                return f"{failures.who(ranks)} is stopped (SIGSTOP)"
        were = "were" if several else "was"
        return f"{failures.who(ranks)} of this machine {were} killed, or ended silently"

    @property
    def hint(self) -> str:
        """The command that shows who waited for whom."""
        return f"`weft blackbox {trace_folder(self.run)}` says who waited for whom"

    def close(self) -> None:
        """The process ends: remove its file, and as the last one those of killed ranks, too.

        Each looks after it has removed its own, so that of two which end at one time one is last.
        """
        with contextlib.suppress(OSError):
            self.path.unlink()
        if all(_state(head) == "gone" for head in self.peers().values()):
            _remove_of_killed(self.path.parent)

    def _path_of(self, rank: int) -> Path:
        return self.path.with_name(f"rank-{rank}")

    def write_line(self, index: int, text: str) -> None:
        """Replace a line of the file."""
        self._map[index * WIDTH : (index + 1) * WIDTH] = text.encode().ljust(WIDTH - 1) + b"\n"

    def _others(self) -> list[Path]:
        return [path for path in _ranks(self.path.parent) if path != self.path]


@cached(1024)
def _names(to: Ranges, source: Ranges, mesh_dim: str, payload: str, layout: str) -> str:
    """Names as the end of a step's line: they are the same in every turn of a ring."""
    names = {"to": to, "source": source, "mesh_dim": mesh_dim, "payload": payload}
    return _fitting(names | {"layout": layout}, _NAMES)[1:]


def _fitting(fields: dict[str, Any], width: int) -> str:
    """Fields as JSON of fewer than `width` characters; the longest are cut."""
    while len(text := _encode(fields)) >= width:
        longest = max(fields, key=lambda name: len(_encode(fields[name])))
        fields[longest] = fields[longest][: len(fields[longest]) * 3 // 4]
    return text


def _mapped(path: Path) -> mmap.mmap:
    """Blank lines in a file that remains until it is removed; in memory if there can be none."""
    try:
        make_own_folder(path.parent)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # of the rank before a restart
        with open(path, "x+b", opener=_closed_to_others) as file:
            file.write(b" " * SIZE)  # so that its blocks are reserved, however full the disk gets
            file.flush()
            return mmap.mmap(file.fileno(), SIZE)
    except OSError:
        return mmap.mmap(-1, SIZE)


@contextlib.contextmanager
def _in_turn(folder: Path) -> Iterator[None]:
    """One rank of this machine after another, so that none replaces newer lines by older ones.

    A rank that was stopped in its turn is not waited for longer than `_TURN`.
    """
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # there is none, and only this rank's lines to copy
        yield
        return
    try:
        deadline = time.monotonic() + _TURN
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.001)
        yield
    finally:
        os.close(lock)


def _copy(content: bytes, by: int) -> None:
    """Copies a rank's lines, unless `by` is another rank and this one has done so itself."""
    lines = [stripped for line in content.split(b"\n") if (stripped := line.strip(b" \0"))]
    head = _checked_head(lines[0])
    target = _target(head)
    if target.parent == _temporary(head["run"]):
        make_own_folder(target.parent)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
    if by != head["rank"]:
        with contextlib.suppress(*_UNREADABLE), open_to_read(target) as file:
            copy = json.loads(file.readline(WIDTH))
            if (copy["by"], copy["run"]) == (head["rank"], head["run"]):
                return
    copy = {"kind": "copy", "run": head["run"], "by": by, "written": time.time()}
    copy |= {"process": state_of(head["pid"])}
    with replacing(target) as partial:
        partial.write_bytes(b"\n".join([_encode(copy).encode(), *lines, b""]))


def _target(head: dict[str, Any]) -> Path:
    """The file that a rank's lines are copied to."""
    return trace_folder(head["run"]) / f"weft-rank-{head['rank']}.jsonl"


def _head(path: Path) -> dict[str, Any] | None:
    """The first line of a mapped file; None if it names no process."""
    try:
        with open_to_read(path) as file:
            return _checked_head(file.readline(WIDTH))
    except _UNREADABLE:
        return None


def _checked_head(line: bytes) -> dict[str, Any]:
    """The process that a line names; `ValueError` if it names none, `KeyError` for a lack."""
    head = json.loads(line)
    numbers = [(head["rank"], _MOST_RANKS), (head["pid"], 2**31)]
    texts = [head["host"], head["run"]]
    if not all(type(n) is int and 0 <= n < most for n, most in numbers):
        raise ValueError("a rank and a process have numbers")
    if not all(isinstance(text, str) for text in texts) or not head["run"].isalnum():
        raise ValueError("a run has a name of letters and digits")
    return head


def _pid_in(path: Path) -> int | None:
    """The process of a mapped file, also of another version's; None if it names none."""
    try:
        with open_to_read(path) as file:
            pid = json.loads(file.readline(SIZE))["pid"]
        return pid if isinstance(pid, int) else None
    except _UNREADABLE:
        return None


def _content(path: Path) -> bytes:
    return read_bytes(path, SIZE)


def _has_noticed(path: Path) -> bool:
    """True if a rank itself recorded a failure and has begun nothing since."""
    try:
        lines = _lines(path)
        local = [line["at"] for line in lines if line["kind"] == "failure" and "by" not in line]
        begun = (line["began"] for line in lines if line["kind"] == "step")
        return bool(local) and all(began <= max(local) for began in begun)
    except _UNREADABLE:
        return False


def _failures(path: Path) -> list[dict[str, Any]]:
    """The failure that a rank, or another one for it, recorded, if any: the second line."""
    try:
        with open_to_read(path) as file:
            file.seek(WIDTH)
            line = json.loads(file.read(WIDTH).strip(b" \0\n") or b"{}")
        return [line] if line.get("kind") == "failure" else []
    except _UNREADABLE:
        return []


def _lines(path: Path) -> list[dict[str, Any]]:
    texts = filter(None, (line.strip(b" \0") for line in _content(path).split(b"\n")))
    return [json.loads(text) for text in texts]


def why_killed(pid: int) -> str | None:
    """Reason that another rank recorded when it killed a process, for its launcher."""
    for path in (path for run in runs_of(root()) for path in _ranks(run)):
        head = _head(path)
        if head and head["pid"] == pid:
            by_others = [line for line in _failures(path) if "by" in line]
            return str(by_others[-1].get("error")) if by_others else None
    return None


def remove_traces(pids: Collection[int]) -> None:
    """Remove the files of a run's killed processes; for their launcher, when all have ended."""
    for run in runs_of(root()):
        if any(head["pid"] in pids for path in _ranks(run) if (head := _head(path))):
            _remove_of_killed(run)


def _remove_of_killed(run: Path) -> None:
    """Remove the files of killed ranks of this machine, and copy those that no rank has copied."""
    for path in _ranks(run):
        with contextlib.suppress(*_UNREADABLE):
            head = _head(path)
            if head and head["host"] == _host() and state_of(head["pid"]) == "gone":
                if not _target(head).exists():
                    _copy(_content(path), head["rank"])
                path.unlink()
    with contextlib.suppress(OSError):
        run.rmdir()


def _sweep(runs: Path) -> None:
    """Remove the files of runs whose processes are gone, ten minutes after they began.

    Files that name no process are removed after a day; whoever still writes to one may go on.
    """
    for run in runs_of(runs):
        with contextlib.suppress(OSError):
            pids = [_pid_in(path) for path in _ranks(run)]
            alive = any(state_of(pid) != "gone" for pid in pids if pid is not None)
            age = time.time() - run.stat().st_mtime
            if not alive and age > (_FOREIGN if None in pids else _KEPT):
                shutil.rmtree(run, ignore_errors=True)


def runs_of(folder: Path) -> list[Path]:
    """The folders of this user's runs; of others' nothing is opened."""
    return _own_entries(folder, _RUN, stat.S_ISDIR)[:_RUNS]


def _ranks(run: Path) -> list[Path]:
    """The mapped files in the folder of a run."""
    return _own_entries(run, _RANK, stat.S_ISREG)


def _own_entries(folder: Path, name: re.Pattern, kind: Callable[[int], bool]) -> list[Path]:
    """Entries of a folder that are this user's, and no links; as many as are looked at."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in itertools.islice(entries, _ENTRIES):
            if name.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    known = entry.stat(follow_symlinks=False)
                    if kind(known.st_mode) and known.st_uid == os.geteuid():
                        found.append(Path(entry.path))
    return found


def make_own_folder(path: Path) -> None:
    """Make a folder that is closed to other users; `OSError` if theirs, or a link, has its name."""
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    known = os.lstat(path)
    if known.st_uid != os.geteuid() or not stat.S_ISDIR(known.st_mode) or known.st_mode & 0o022:
        raise PermissionError(errno.EACCES, "it is not closed to other users", str(path))


def _existing(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def _closed_to_others(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def state_of(pid: int) -> str:
    """The state of a process of this machine: "runs", "stopped" or "gone"."""
    letter = _status(pid)[0]
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(letter, "runs")


def age_of(pid: int) -> float:
    """Seconds since a process of this machine started; 0 where nobody tells."""
    started = _status(pid)[1]
    ticks = os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / ticks if started else 0.0


def _state(head: dict[str, Any]) -> str:
    """`state_of` the process of a head; "gone" if its number is another process's by now."""
    return "gone" if _letter(head) == "X" else state_of(head["pid"])


def _letter(head: dict[str, Any]) -> str:
    letter, started = _status(head["pid"])
    return "X" if started and head.get("started", started) != started else letter


def _status(pid: int) -> tuple[str, int]:
    """The letter of a process's state, and when it started; "R" and 0 where nobody tells."""
    try:
        os.kill(pid, 0)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (ProcessLookupError, OverflowError):
        return "X", 0
    except (OSError, ValueError, IndexError):
        return "R", 0  # another user's process, or a system without /proc


def rank_ranges(ranks: Sequence[int]) -> Ranges:
    """Ranks as ranges, the first dozen of them.

    >>> rank_ranges([0, 1, 2, 5])
    ((0, 2), (5, 5))
    """
    ends: list[tuple[int, int]] = []
    for rank in ranks:
        if ends and rank == ends[-1][1] + 1:
            ends[-1] = ends[-1][0], rank
        else:
            ends.append((rank, rank))
    return tuple(ends[:_RANGES])


# -- of this process ------------------------------------------------------------------------------

_lock = threading.Lock()
_world: object = None
_trace: Trace | None = None
_folder: Path | None = None


def of_process(limit: float) -> Trace | None:
    """The trace of this process in its world; None if the environment says "off".

    The world's store is asked for the run's name for `limit` seconds.
    """
    global _world, _trace
    with _lock:
        if _world is not dist.group.WORLD and os.environ.get(VARIABLE) != "off":
            if _trace is not None:
                _trace.close()
            if _world is None:
                atexit.register(_close)
                os.register_at_fork(after_in_child=_forget)
            _sweep(root())
            _trace = Trace(dist.get_rank(), dist.get_world_size(), _name_of_run(limit), root())
            _world = dist.group.WORLD
        return _trace


def write_to(path: str | os.PathLike) -> None:
    """Sets the folder that this process writes to, unless the environment names another one."""
    global _folder
    _folder = Path(path).absolute()


def trace_folder(run: str) -> Path:
    """The folder for copies: of the environment, else of the program, else a temporary one."""
    named = os.environ.get(VARIABLE)
    if named and named != "off":
        return Path(named)
    return _folder or _temporary(run)


def _temporary(run: str) -> Path:
    """The folder for copies where nobody names one."""
    return Path(tempfile.gettempdir()) / f"weft-blackbox-{run}"


def root() -> Path:
    """The folder of the mapped files of all runs on this machine."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def failed(error: str) -> None:
    """This process fails, for whatever reason; no-op without a trace."""
    if _trace is not None:
        _trace.failed(error)


def _host() -> str:
    return socket.gethostname()[:64]


def _name_of_run(limit: float) -> str:
    drawn = secrets.token_hex(12)

    def ask() -> str:
        return default_store().compare_set("weft/blackbox", "", drawn).decode()

    name = failures.within(limit, ask)
    return name if name and name.isalnum() else drawn  # it becomes part of a path


def _forget() -> None:
    """A forked child is no rank."""
    global _trace
    _trace = None


def _close() -> None:
    if _trace is not None:
        error = getattr(sys, "last_value", None)
        if error is not None:
            _trace.failed(f"{type(error).__name__}: {error}")
        _trace.close()
