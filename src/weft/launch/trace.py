"""The black box: the last steps of every rank, in memory that outlives it.

Every process keeps its last 256 messages, votes and sums, and its last 32 calls, in two rings. They
lie in a small file in the machine's memory (`/dev/shm`, or the temporary folder), so that a rank
that was killed or stopped leaves them, too.

    rank 0  steps --> /dev/shm/weft-steps-RUN/rank-0 --+
    rank 1  steps --> /dev/shm/weft-steps-RUN/rank-1 --+--> the first of them to fail, or to get
    rank 2  killed    /dev/shm/weft-steps-RUN/rank-2 --+    SIGUSR1, writes DIR/weft-rank-N.json

A rank that writes does so also for the ranks of its machine that have not. A rank that ends well
takes its file away. `weft blackbox DIR` reads them, see `weft.inspect.blackbox`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .._torch import default_store
from . import failures
from .rings import Rings, read_rings

#: Environment variable that names the folder to write to; "off" keeps no box.
VARIABLE = "WEFT_BLACKBOX"
#: What stands for a step where there is no box.
NOTHING = contextlib.nullcontext()

_PEERS = 12  # named of a step
_KEPT = 600.0  # seconds that a run whose processes are gone may leave its rings


class BlackBox(Rings):
    """The rings of this process, and the files that it writes for others to read.

    Args:
        rank: in the world.
        ranks: how many there are.
        run: a name that all ranks of the run share.
        root: the folder for the rings of all runs.
    """

    def __init__(self, rank: int, ranks: int, run: str, root: Path) -> None:
        super().__init__(rank, ranks, run, root / f"weft-steps-{run}" / f"rank-{rank}")

    def failed(self, error: str) -> None:
        """This rank fails: write what all ranks of this machine did last."""
        self.fail(error)
        self.write()

    def write(self) -> None:
        """Write `weft-rank-N.json` of this rank, and of those here that have not."""
        with contextlib.suppress(OSError):  # a full disk must not hide what failed
            target = folder(self.run)
            target.mkdir(parents=True, exist_ok=True)
            _write(target, self.read() | {"by": self.rank})
            for path in self.path.parent.glob("rank-*"):
                found = path != self.path and _read(path)
                if found and not _wrote_itself(target, found):
                    _write(target, found | {"by": self.rank})

    def close(self) -> None:
        """The process ends well: its steps are of no use any more."""
        with contextlib.suppress(OSError):
            self.path.unlink()
            self.path.parent.rmdir()


def _write(target: Path, found: dict[str, Any]) -> None:
    part = target / f".weft-rank-{found['rank']}.{os.getpid()}.{threading.get_ident()}"
    part.write_text(json.dumps(found | {"written": time.time()}, indent=1))
    part.replace(target / f"weft-rank-{found['rank']}.json")


def _wrote_itself(target: Path, found: dict[str, Any]) -> bool:
    with contextlib.suppress(OSError, ValueError, KeyError):
        there = json.loads((target / f"weft-rank-{found['rank']}.json").read_text())
        return there["run"] == found["run"] and there["by"] == there["rank"]
    return False


def _read(path: Path) -> dict[str, Any] | None:
    """The content of another rank's file, and the state of its process."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        found = read_rings(path.read_bytes())
        return found | {"process": state_of(found["pid"])}
    return None


def state_of(pid: int) -> str:
    """What became of a process of this machine: "runs", "stopped" or "gone"."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return "gone"
    except OSError:
        return "runs"  # another process, or a system without /proc
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(state, "runs")


# -- of this process ------------------------------------------------------------------------------

_lock = threading.Lock()
_world: object = None
_box: BlackBox | None = None
#: The descriptor to which Python writes the numbers of signals. It is never closed: the next file
#: would get it, and at the interpreter's end the thread that reads would wake.
_wakeup = -1
_folder: Path | None = None


def of_process(limit: float) -> BlackBox | None:
    """The black box of this process in its world; None if the environment says "off".

    Args:
        limit: seconds that the world's store may take to say the run's name.
    """
    global _world, _box
    with _lock:
        if _world is not dist.group.WORLD and os.environ.get(VARIABLE) != "off":
            first = _world is None
            if _box is not None:
                _box.close()
            root = _root()
            _sweep(root)
            _box = BlackBox(dist.get_rank(), dist.get_world_size(), _name_of_run(limit), root)
            _world = dist.group.WORLD
            if first:
                _listen()
        return _box


def write_to(path: str | os.PathLike) -> None:
    """Where this process writes, unless the environment names another folder."""
    global _folder
    _folder = Path(path).absolute()


def folder(run: str) -> Path:
    """Where ranks write: as the environment says, else the program, else a temporary folder."""
    named = os.environ.get(VARIABLE)
    if named and named != "off":
        return Path(named)
    return _folder or Path(tempfile.gettempdir()) / f"weft-blackbox-{run}"


def failed(error: str) -> None:
    """This process fails, for whatever reason; no-op without a black box."""
    if _box is not None:
        _box.failed(error)


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
    mine = secrets.token_hex(4)

    def ask() -> str:
        return default_store().compare_set("weft/blackbox", "", mine).decode()

    return failures.within(limit, ask) or mine


def _root() -> Path:
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _sweep(root: Path) -> None:
    """Remove the files of runs whose processes are gone, ten minutes after they began."""
    for left in root.glob("weft-steps-*"):
        with contextlib.suppress(OSError, ValueError):
            if time.time() - left.stat().st_mtime > _KEPT:
                boxes = [read_rings(path.read_bytes()) for path in left.glob("rank-*")]
                if all(state_of(box["pid"]) == "gone" for box in boxes):
                    shutil.rmtree(left, ignore_errors=True)


def _listen() -> None:
    """Write when this process ends by an exception, and on SIGUSR1 where nobody else wants it.

    The signal's own handler has to wait while the main thread waits for another rank in torch: a
    thread is woken by Python's C code instead.
    """
    atexit.register(_close)
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return
    global _wakeup
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    _wakeup = theirs.detach()
    before = signal.set_wakeup_fd(_wakeup, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)  # set by other code
    signal.signal(signal.SIGUSR1, _asked)
    threading.Thread(target=_wake, args=(ours,), name="weft-blackbox", daemon=True).start()
    os.register_at_fork(after_in_child=_forget)


def _asked(*_: object) -> None:
    if not _wakes() and _box is not None:  # else the thread has written
        _box.write()


def _wakes() -> bool:
    """Whether signals wake the thread, as they do unless other code has set another descriptor."""
    now = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(now, warn_on_full_buffer=now != _wakeup)
    return now == _wakeup != -1


def _wake(ours: socket.socket) -> None:
    while number := ours.recv(1):
        asked = number[0] == signal.SIGUSR1 and signal.getsignal(signal.SIGUSR1) is _asked
        if asked and _box is not None:
            _box.write()


def _forget() -> None:
    """A forked child is no rank."""
    global _box
    _box = None
    with contextlib.suppress(ValueError):  # not the main thread
        if _wakes():
            signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGUSR1) is _asked:  # else it is the program's by now
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def _close() -> None:
    if _box is None:
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        _box.failed(f"{type(error).__name__}: {error}")
    _box.close()


__all__ = [
    "NOTHING",
    "BlackBox",
    "failed",
    "folder",
    "of_process",
    "peers_in_words",
    "ranks_in_words",
    "state_of",
    "write_to",
]
