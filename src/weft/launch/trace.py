"""The trace: the last steps of every rank, as JSON lines in memory that outlives it.

Every process keeps its last 256 messages, votes and sums, and its last 32 calls, in lines of fixed
width of a small mapped file (in `/dev/shm`, or the temporary folder). A step costs a few
microseconds, and a rank that was killed or stopped leaves its lines. torch's flight recorder knows
NCCL alone, is a pickle, and dies with its process: it does not serve here.

    rank 0  steps --> /dev/shm/weft-steps-RUN/rank-0 --+
    rank 1  steps --> /dev/shm/weft-steps-RUN/rank-1 --+--> the first of them that fails copies all
    rank 2  killed    /dev/shm/weft-steps-RUN/rank-2 --+    of its machine to DIR/weft-rank-N.jsonl

`weft blackbox` reads either folder, also while ranks run, see `weft.inspect.blackbox`. A rank that
ends well takes its file away.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import mmap
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .._caching import cached
from .._torch import default_store
from . import failures

if sys.platform != "win32":
    import fcntl

#: Environment variable that names the folder to write to; "off" keeps no trace.
VARIABLE = "WEFT_BLACKBOX"
#: Used as a step where there is no trace.
NOTHING = contextlib.nullcontext()
#: How many calls and steps are kept, and the bytes of each line.
CALLS, CALL_BYTES = 32, 640
STEPS, STEP_BYTES = 256, 384
_HEAD_BYTES, _FAILURE_BYTES = 512, 2048
_CALLS_AT = _HEAD_BYTES + _FAILURE_BYTES
_STEPS_AT = _CALLS_AT + CALLS * CALL_BYTES
SIZE = _STEPS_AT + STEPS * STEP_BYTES

#: Number, when begun, awaited and ended in microseconds; the last two are filled in where they are.
_STEP = '["step",%10d,%17d,                0,                0,'
_NUMBER, _AWAITED, _ENDED = slice(8, 18), slice(37, 54), slice(55, 72)
_NAME_BYTES = STEP_BYTES - 140  # of a step's last five fields; the others are numbers
_PEERS = 12  # named of a step
_KEPT = 600.0  # seconds that a run whose processes are gone may leave its files
_TURN = 1.0  # seconds to wait for others' copies
_FOREIGN = 86_400.0  # the same of files that name no process, such as another version's
_encode = json.JSONEncoder(separators=(",", ":")).encode


class TraceStep:
    """A step in a trace: a context in which this rank waits for it to end."""

    __slots__ = ("at", "lines", "number")

    def __init__(self, lines: mmap.mmap, at: int, number: int) -> None:
        self.lines, self.at, self.number = lines, at, number

    def __enter__(self) -> None:
        self._put(_AWAITED, time.time_ns() // 1000)

    def __exit__(self, failed: object, *_: object) -> None:
        now = time.time_ns() // 1000
        self._put(_ENDED, -now if failed else now)

    def _put(self, place: slice, when: int) -> None:
        at, lines = self.at, self.lines
        if int(lines[at + _NUMBER.start : at + _NUMBER.stop]) == self.number:  # else a newer one
            lines[at + place.start : at + place.stop] = b"%17d" % when


class Trace:
    """The lines of one process, and the files that it copies them to.

    Args:
        rank: in the world.
        ranks: how many there are.
        run: a name that all ranks of the run share.
        root: the folder for all runs.
    """

    def __init__(self, rank: int, ranks: int, run: str, root: Path) -> None:
        self.rank, self.run = rank, run
        self.path = root / f"weft-steps-{run}" / f"rank-{rank}"
        self._steps, self._calls = itertools.count(1), itertools.count(1)
        self._turns: Counter[tuple[str, str]] = Counter()
        self._map, self._has_failed = _mapped(self.path), False
        head = {"run": run, "rank": rank, "ranks": ranks, "host": socket.gethostname()[:64]}
        self._line(0, _HEAD_BYTES, _encode(head | {"pid": os.getpid()}))

    def call(self, what: str, number: int, ranks: str, tag: int, detail: str) -> None:
        """A pass of a call begins; its steps have the same tag."""
        count = next(self._calls)
        at = _CALLS_AT + count % CALLS * CALL_BYTES
        fields = ["call", count, time.time_ns() // 1000, number, str(tag), ranks, what, detail]
        self._line(at, CALL_BYTES, _fitting(fields, CALL_BYTES))

    def step(
        self,
        layout: str,
        mesh_dim: str,
        payload: str,
        tag: int | str,
        step: int,
        to: str,
        source: str,
        nbytes: int,
    ) -> TraceStep:
        """Something begins that other ranks take part in.

        Args:
            layout: its name.
            mesh_dim: along which it goes.
            payload: of the message.
            tag: that of its pass; for what all do together, how many of it they have begun.
            step: of the tile program, -1 where there is none.
            to: world ranks that this one sends to, separated by commas.
            source: those it receives from.
            nbytes: both ways.
        """
        count = next(self._steps)
        at = _STEPS_AT + count % STEPS * STEP_BYTES
        names = _names(to, source, mesh_dim, payload, layout)
        head = _STEP % (count, time.time_ns() // 1000)
        self._line(at, STEP_BYTES, f'{head}"{tag}",{step},{nbytes},{names}')
        return TraceStep(self._map, at, count)

    def together(
        self, layout: str, mesh_dim: str, payload: str, ranks: str, nbytes: int
    ) -> TraceStep:
        """Something begins in which some world ranks all wait for all."""
        self._turns[payload, ranks] += 1
        turn = f"#{self._turns[payload, ranks]}"
        return self.step(layout, mesh_dim, payload, turn, -1, ranks, ranks, nbytes)

    def failed(self, error: str) -> None:
        """This rank fails: write what all ranks of this machine did last."""
        fields = ["failed", time.time_ns() // 1000, error]
        self._line(_HEAD_BYTES, _FAILURE_BYTES, _fitting(fields, _FAILURE_BYTES))
        self._has_failed = True
        self.write()

    def write(self) -> None:
        """Write `weft-rank-N.jsonl` of this rank, and of those of this machine that have not."""
        with contextlib.suppress(OSError):  # a full disk must not hide the failure
            target = trace_folder(self.run)
            target.mkdir(parents=True, exist_ok=True)
            with _in_turn(self.path.parent):
                _copy(self.content(), target, self.rank)
            for path in self.path.parent.glob("rank-*"):
                if path != self.path:
                    errors = OSError, ValueError, KeyError, TypeError
                    with contextlib.suppress(*errors), _in_turn(self.path.parent):
                        _copy(path.read_bytes(), target, self.rank)

    def content(self) -> bytes:
        """The lines as they are now."""
        return self._map[:]

    def lost(self) -> list[int]:
        """World ranks of this machine that were killed or stopped before they noticed a failure."""
        return sorted(
            other["rank"]
            for path in self.path.parent.glob("rank-*")
            if path != self.path and (other := _read(path))
            if other["process"] in ("gone", "stopped") and not other["noticed"]
        )

    def close(self) -> None:
        """The process ends: its steps are of no use any more.

        Nor are those of killed ranks of this machine, once they are copied: where this one failed.
        """
        for path in self.path.parent.glob("rank-*") if self._has_failed else ():
            other = _read(path) if path != self.path else None
            if (
                other
                and other["process"] == "gone"
                and _copied(trace_folder(self.run), other).exists()
            ):
                with contextlib.suppress(OSError):
                    path.unlink()
        with contextlib.suppress(OSError):
            self.path.unlink()
            self.path.parent.rmdir()

    def _line(self, at: int, width: int, text: str) -> None:
        self._map[at : at + width] = text.encode().ljust(width - 1) + b"\n"


@cached(1024)
def _names(*names: str) -> str:
    """Names as the end of a step's line: they are the same in every turn of a ring."""
    return _fitting([*names], _NAME_BYTES)[1:]


def _fitting(fields: list[Any], width: int) -> str:
    """Fields as JSON of fewer than `width` characters; the longest are cut."""
    text = _encode(fields)
    while len(text) >= width:
        longest = max(range(len(fields)), key=lambda i: len(str(fields[i])))
        fields[longest] = fields[longest][: len(fields[longest]) * 3 // 4]
        text = _encode(fields)
    return text


def _mapped(path: Path) -> mmap.mmap:
    """Blank lines in a file that is there until somebody takes it away; else in this process."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path, "w+b") as file:
            file.write(b" " * SIZE)  # so that it has its room, however full the disk gets
            file.flush()
            return mmap.mmap(file.fileno(), SIZE)
    except OSError:
        return mmap.mmap(-1, SIZE)


@contextlib.contextmanager
def _in_turn(folder: Path) -> Iterator[None]:
    """One rank of this machine after another, so that none replaces newer lines by those it read.

    A rank that was stopped in its turn is not waited for longer than `_TURN`.
    """
    place = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _TURN
        while sys.platform != "win32" and time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.001)
        yield
    finally:
        os.close(place)  # gives the turn away


def _copy(content: bytes, target: Path, by: int) -> None:
    """Copies a rank's lines, unless `by` is another rank and this one has done so itself."""
    lines = [stripped for line in content.split(b"\n") if (stripped := line.strip(b" \0"))]
    head = json.loads(lines[0])
    rank = int(head["rank"])
    path = _copied(target, head)
    if by != rank:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with path.open() as file:
                first, second = json.loads(file.readline()), json.loads(file.readline())
            if first["by"] == rank and second["run"] == head["run"]:
                return
    top = {"written": time.time(), "by": by, "process": state_of(int(head["pid"]))}
    part = target / f".weft-rank-{rank}.{os.getpid()}.{threading.get_ident()}"
    part.write_bytes(b"\n".join([_encode(top).encode(), *lines, b""]))
    part.replace(path)


def _copied(target: Path, head: dict[str, Any]) -> Path:
    """The file that a rank's lines are copied to."""
    return target / f"weft-rank-{head['rank']}.jsonl"


def _read(path: Path) -> dict[str, Any] | None:
    """Another rank's head, the state of its process, and whether it noticed a failure, if it is of
    this machine: then it has a line of it, and has begun nothing since.
    """
    try:
        first, *rest = path.read_bytes().split(b"\n")
        head = json.loads(first)
        if head["host"] != socket.gethostname()[:64]:
            return None
        fields = [json.loads(line) for line in rest if line.strip(b" \0")]
        failed = max((f[1] for f in fields if f[0] == "failed"), default=None)
        began = max((f[2] for f in fields if f[0] == "step"), default=0)
        noticed = failed is not None and began <= failed
        return head | {"process": state_of(int(head["pid"])), "noticed": noticed}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def remove_traces(pids: Collection[int]) -> None:
    """Remove the files of a run's killed processes, all of which are gone; for their launcher.

    Lines that no rank has copied are copied first.
    """
    for run in root().glob("weft-steps-*"):
        ranks = {path: _read(path) for path in run.glob("rank-*")}
        own = {path: head for path, head in ranks.items() if head and head["pid"] in pids}
        if not own or any(head["process"] != "gone" for head in own.values()):
            continue
        with contextlib.suppress(OSError):
            target = trace_folder(run.name.removeprefix("weft-steps-"))
            for path, head in own.items():
                if not _copied(target, head).exists():
                    target.mkdir(parents=True, exist_ok=True)
                    _copy(path.read_bytes(), target, head["rank"])
                path.unlink()
            run.rmdir()


def state_of(pid: int) -> str:
    """The state of a process of this machine: "runs", "stopped" or "gone"."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, OverflowError):
        return "gone"
    except OSError:
        return "runs"  # another process, or a system without /proc
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(state, "runs")


# -- of this process ------------------------------------------------------------------------------

_lock = threading.Lock()
_world: object = None
_trace: Trace | None = None
_folder: Path | None = None


def of_process(limit: float) -> Trace | None:
    """The trace of this process in its world; None if the environment says "off".

    Args:
        limit: seconds that the world's store may take to say the run's name.
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
    """Where ranks write: as the environment says, else the program, else a temporary folder."""
    named = os.environ.get(VARIABLE)
    if named and named != "off":
        return Path(named)
    return _folder or Path(tempfile.gettempdir()) / f"weft-blackbox-{run}"


def root() -> Path:
    """Where the mapped files of all runs of this machine are."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def failed(error: str) -> None:
    """This process fails, for whatever reason; no-op without a trace."""
    if _trace is not None:
        _trace.failed(error)


def peers_in_words(ranks: Sequence[int]) -> str:
    """The first dozen of some ranks, in their order."""
    return ",".join(map(str, ranks[:_PEERS]))


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks as ranges, the first dozen of them.

    >>> ranks_in_words([0, 1, 2, 5])
    '0-2,5'
    """
    ends: list[list[int]] = []
    for rank in ranks:
        if ends and rank == ends[-1][1] + 1:
            ends[-1][1] = rank
        else:
            ends.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ends[:_PEERS])


def _name_of_run(limit: float) -> str:
    drawn = secrets.token_hex(4)

    def ask() -> str:
        return default_store().compare_set("weft/blackbox", "", drawn).decode()

    return failures.within(limit, ask) or drawn


def _sweep(runs: Path) -> None:
    """Remove the files of runs whose processes are gone, ten minutes after they began.

    Files that name no process are removed after a day; whoever still writes to one may go on.
    """
    for left in runs.glob("weft-steps-*"):
        with contextlib.suppress(OSError):
            age = time.time() - left.stat().st_mtime
            if age > _KEPT and (age > _FOREIGN if (ended := _ended(left)) is None else ended):
                shutil.rmtree(left, ignore_errors=True)


def _ended(run: Path) -> bool | None:
    """Whether the processes of a run are gone; None if a file does not name its process."""
    try:
        heads = [json.loads(path.open("rb").readline(SIZE)) for path in run.glob("rank-*")]
        return all(state_of(head["pid"]) == "gone" for head in heads)
    except (ValueError, KeyError, TypeError):
        return None


def _forget() -> None:
    """A forked child is no rank."""
    global _trace
    _trace = None


def _close() -> None:
    if _trace is None:
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        _trace.failed(f"{type(error).__name__}: {error}")
    _trace.close()


__all__ = [
    "NOTHING",
    "Trace",
    "TraceStep",
    "failed",
    "of_process",
    "peers_in_words",
    "ranks_in_words",
    "remove_traces",
    "root",
    "state_of",
    "trace_folder",
    "write_to",
]
