"""Peers of this machine: a rank that is killed or frozen is named, whoever waits for it, and where.

Each rank looks at the processes of the others by their traces (`launch.trace`), on a thread of its
own. The operating system says at once when one ends, so its name is printed before a launcher ends
this rank, too, and whether this rank waits in weft, in torch's own collectives, or not at all.

    frozen    the state of its process is "stopped" (SIGSTOP) for `FROZEN` seconds, while this rank
              waits: it is killed, so that every wait for it ends here and on other machines
    killed    its process is gone, and its trace is not: printed, and added to the error on the way
              out of this process

A rank that a debugger holds is not frozen.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import WeftError
from . import failures
from .trace import FROZEN, Trace

#: Seconds from one look at the peers to the next, and the share of it in which who waits may work.
_TICK, _IDLE = 1.0, 0.01


class PeerWatch:
    """Watches the other ranks of this machine until it is closed."""

    def __init__(self, trace: Trace, say: Callable[[str], None]) -> None:
        self.trace, self.say = trace, say
        self._handles: dict[int, int] = {}  # a process -> a descriptor that is readable at its end
        self._named: set[int] = set()  # ranks
        self._stopped: dict[int, int] = {}  # a rank -> looks at which it was stopped and awaited
        self._place: tuple[int, int] | None = None  # of the main thread: a frame, an instruction
        self._worked = 0.0  # seconds of CPU time of the main thread
        self._wake, self._woken = os.pipe()
        self._main = threading.main_thread().ident or 0
        self._thread = threading.Thread(target=self._run, name="weft peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        with contextlib.suppress(OSError):
            os.write(self._woken, b"x")
        self._thread.join(2 * _TICK)

    def _run(self) -> None:
        try:
            while not self._look():
                pass
        except (AttributeError, OSError):  # a system that does not tell: errors say what they can
            return
        finally:
            for handle in self._handles.values():
                os.close(handle)

    def _look(self) -> bool:
        """Wait for an end or a tick, and see to it; True once the watch is closed."""
        for head in self.trace.peers().values():
            if head["pid"] not in self._handles and head["rank"] not in self._named:
                with contextlib.suppress(OSError):
                    self._handles[head["pid"]] = os.pidfd_open(head["pid"])
        watched = {handle: pid for pid, handle in self._handles.items()}
        poll = select.poll()  # `select.select` takes no descriptor above 1,023
        for handle in (self._wake, *watched):
            poll.register(handle, select.POLLIN)
        ready = {handle for handle, _ in poll.poll(1000 * _TICK)}
        if self._wake in ready:
            return True
        ended = {watched[handle] for handle in ready}
        for pid in ended:
            os.close(self._handles.pop(pid))
        if ended:
            self._name(ended)
        self._end_frozen()
        return False

    def _name(self, ended: set[int]) -> None:
        """Say which ranks ended first without removing their traces, before anything else is done.

        A launcher ends the others at once, which are no cause.
        """
        heads = self.trace.peers().items()
        ranks = sorted(rank for rank, head in heads if head["pid"] in ended)
        ranks = [] if self._named else [r for r in ranks if not self.trace.has_failed(r)]
        if ranks:
            self._named.update(ranks)
            self.say(f"weft: {self.trace.in_words(ranks)}; {self.trace.hint}")
            self.trace.copy_all()

    def _end_frozen(self) -> None:
        """Kill ranks that were stopped at `FROZEN` looks in a row at which this one waited."""
        stopped = self.trace.frozen() if self._waits() else {}
        looks = {rank: self._stopped.get(rank, 0) + 1 for rank in stopped}
        for rank, looked in looks.items():
            if looked >= FROZEN / _TICK:
                handle = self._handles.get(stopped[rank])  # of this very process, not of its number
                if handle is not None:
                    self.trace.note_frozen(rank)
                    with contextlib.suppress(OSError):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
        self._stopped = looks

    def _waits(self) -> bool:
        """True if the main thread has done nothing since the last look, and is where it was."""
        frame = sys._current_frames().get(self._main)
        place = None if frame is None else (id(frame), frame.f_lasti)
        try:
            worked = time.clock_gettime(time.pthread_getcpuclockid(self._main))
        except OSError:
            return False
        idle = worked - self._worked < _IDLE * _TICK
        still, self._place, self._worked = place == self._place, place, worked
        return idle and still


# -- of this process ------------------------------------------------------------------------------

_watch: PeerWatch | None = None
_says = True


def begin(trace: Trace | None) -> None:
    """Watch the peers of this process by its trace, if it has one, until the process ends."""
    global _watch
    if trace is None or (_watch is not None and _watch.trace is trace):
        return
    if _watch is None:
        atexit.register(_end)
        os.register_at_fork(after_in_child=_forget)
        _explain_errors()
    else:
        _watch.close()
    _watch = PeerWatch(trace, _print if _says else lambda text: None)


def silence() -> None:
    """Say nothing of lost ranks: their launcher does."""
    global _says
    _says = False


def _explain_errors() -> None:
    """Let an error that ends this process name the ranks of this machine that were lost before."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        with contextlib.suppress(Exception):
            add_lost(error)
            if _watch is not None:  # now: whoever waits for this rank reads it
                _watch.trace.failed(f"{kind.__name__}: {error}")
        before(kind, error, traceback)

    sys.excepthook = hook


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())  # a lock of `sys.stderr` may be another thread's


def _forget() -> None:
    """A forked child is no rank."""
    global _watch
    _watch = None


def _end() -> None:
    if _watch is not None:
        _watch.close()


def add_lost(error: BaseException) -> list[int]:
    """Add a note about ranks that were lost, or failed first, to an error that does not name them.

    Of another machine those are known whose trace is in a folder that both share.
    """
    if _watch is None:
        return []
    trace = _watch.trace
    lost, named = failures.lost(trace.lost, str(error)), ""
    if lost:
        named = trace.in_words(lost)
    elif failures.is_broken(str(error)) and (first := trace.failed_first()):
        lost, named = [first[0]], f"rank {first[0]} failed first: {first[1]}"
    if named and not isinstance(error, WeftError):
        error.add_note(f"weft: {named}, from which this error may follow; {trace.hint}")
    return lost
