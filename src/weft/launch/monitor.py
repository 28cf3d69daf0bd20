"""A command's ranks and their launcher detect each other's exit over local connections.

    launcher  <--- one local connection per rank --->  rank 0, rank 1, ...

The operating system closes a connection when either side ends, however it ends. So the launcher
knows which rank ended first, and a rank whose launcher is gone ends, too. A rank that
ends sends a last message, if it still can.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import active_children
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

#: Seconds by which the news of a rank's death may come after other ranks' messages about it.
_SLACK = 0.05
#: Seconds to wait for the last words of ranks that have ended; they are there, and to be read.
_NEWS = 5.0


@dataclass
class Ending:
    """The end of a rank: with a message, or silently with an exit code, if that is known."""

    rank: int
    attempt: int
    time: float = 0.0
    message: str | None = None
    follows: bool = False  # the message is about another rank's failure
    refused: bool = False  # the message is weft's refusal
    done: bool = False
    stopped: bool = False  # it was stopped (SIGSTOP), so the launcher killed it
    code: int | None = None
    pid: int = -1

    @property
    def silent(self) -> bool:
        """True if the rank ended by itself and sent no message."""
        return not self.done and self.message is None and self.code != -signal.SIGTERM

    def __str__(self) -> str:
        if self.message is not None:
            return f"rank {self.rank}: {self.message}"
        if self.stopped:
            return f"rank {self.rank} was stopped (SIGSTOP) and did not answer"
        if self.code is None:
            return f"rank {self.rank} ended silently"
        if self.code < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.code).name}"
        return f"rank {self.rank} ended with exit code {self.code}"


class LauncherMonitor:
    """The launcher's side: waits for ranks at `address`, and records how they ended.

    `on_start` is called with the number of the attempt when a rank connects, `on_end` with every
    ending.
    """

    def __init__(
        self,
        on_start: Callable[[int], None] = lambda attempt: None,
        on_end: Callable[[Ending], None] = lambda ending: None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="weft-")
        self.address = str(Path(self._folder.name) / "ranks")
        self.endings: list[Ending] = []
        self._on_start, self._on_end = on_start, on_end
        self._change = threading.Condition()
        self._open: list[Ending] = []  # of ranks that are connected; attempt -1 before their hello
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address)
        self._socket.listen(1024)
        threading.Thread(target=self._accept, name="weft-monitor", daemon=True).start()

    def close(self) -> None:
        """Stop waiting for ranks."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._socket.close()
        self._folder.cleanup()

    @property
    def pids(self) -> set[int]:
        """The processes of all ranks that connected."""
        return {ending.pid for ending in (*self.endings, *self._open)}

    def running(self, attempt: int) -> list[Ending]:
        """The ranks of an attempt that have not ended."""
        return [ending for ending in self._open if ending.attempt == attempt]

    def cause(self, before: float = float("inf")) -> Ending | None:
        """The ending that the others of the last attempt (before one) follow from; all have ended.

        A rank that ended silently before the first message; else the first message that is not
        about another rank; else the first message. A rank whose exit code nobody knows may have
        been stopped because of another's message, which then comes first.
        """
        with self._change:
            self._change.wait_for(lambda: not self._unread(before), _NEWS)
        last = max((e.attempt for e in self.endings if e.attempt < before), default=0)
        failed = [e for e in sorted(self.endings, key=lambda e: e.time) if e.attempt == last]
        failed = [e for e in failed if not e.done]
        sent = [e for e in failed if e.message is not None]
        local = [e for e in sent if not e.follows]
        first = sent[0].time if sent else float("inf")
        killed = [e for e in failed if e.silent and e.time < first + _SLACK]
        if local:
            killed = [e for e in killed if e.code is not None]
        return next(iter([*killed, *local, *sent]), None)

    def _unread(self, before: float) -> bool:
        """True if there are messages that no thread of this process has read yet."""
        try:
            waiting = bool(wait([self._socket], 0))
        except (OSError, ValueError):  # closed
            waiting = False
        return waiting or any(e.attempt < before for e in self._open)

    def _accept(self) -> None:
        while True:
            try:
                wait([self._socket])
                with self._change:  # so that `_unread` sees a connection here or there
                    connection, _ = self._socket.accept()
                    ending = Ending(-1, -1)
                    self._open.append(ending)
            except (OSError, ValueError):
                return  # closed
            threading.Thread(target=self._follow, args=(connection, ending), daemon=True).start()

    def _follow(self, connection: socket.socket, ending: Ending) -> None:
        try:
            self._read(connection, ending)
        finally:
            with self._change:
                self._open = [e for e in self._open if e is not ending]
                self._change.notify_all()

    def _read(self, connection: socket.socket, ending: Ending) -> None:
        lines = connection.makefile("rb")
        hello = json.loads(lines.readline() or "null")
        if hello is None:
            return
        ending.rank, ending.attempt, ending.pid = hello["rank"], hello["attempt"], hello["pid"]
        with self._change:
            self._change.notify_all()
        process = next((p for p in active_children() if p.pid == hello["pid"]), None)
        self._on_start(ending.attempt)
        last = json.loads(_last_line(lines) or "{}")
        ending.time = time.monotonic()
        if not last:
            ending.code = _exit_code(process)
        for key, value in last.items():
            setattr(ending, key, value)
        self.endings.append(ending)
        self._on_end(ending)


class MonitoredRank:
    """A rank's side: it ends with its launcher, and sends a message when it ends."""

    def __init__(self, address: str, rank: int, attempt: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(address)
        except OSError:
            _end()
        self._send(rank=rank, attempt=attempt, pid=os.getpid())
        threading.Thread(target=self._watch, name="weft-monitored", daemon=True).start()

    def done(self) -> None:
        """All went well."""
        self._send(done=True)

    def failed(self, message: str, *, follows: bool, refused: bool) -> None:
        """This rank fails: because another one did, or because weft refused something."""
        self._send(message=message, follows=follows, refused=refused)

    def _send(self, **label: object) -> None:
        self._socket.sendall(json.dumps(label).encode() + b"\n")

    def _watch(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.recv(1)  # the launcher sends nothing, so this returns when it ends
        _end()


def _last_line(lines: Iterable[bytes]) -> bytes:
    """The last line before the connection closes."""
    last = b""
    with contextlib.suppress(OSError):  # reset
        for line in lines:
            last = line
    return last


def _exit_code(process: BaseProcess | None) -> int | None:
    """The exit code of a process that is ending, or None if it cannot be known."""
    until = time.monotonic() + 2.0
    while process is not None and process.exitcode is None and time.monotonic() < until:
        time.sleep(0.002)
    return None if process is None else process.exitcode


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
