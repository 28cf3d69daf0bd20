"""Starts the ranks of a command, by torch's elastic launcher, or joins torchrun's and SLURM's.

Three ways to the same ranks:

- from a plain shell a command starts one process per rank itself (`elastic_launch`, spawned, on
  this machine);
- under torchrun (RANK and WORLD_SIZE are set) this process is a rank already;
- under srun (SLURM_PROCID and SLURM_STEP_NUM_TASKS are set) likewise, after SLURM's variables are
  translated to torch's.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import multiprocessing
import os
import secrets
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

import torch

from ..errors import RankError, WeftError
from . import peers, trace
from .environment import already_launched, number, tell_torch
from .monitor import Ending, LauncherMonitor, MonitoredRank

#: How long stopped ranks may take to end before they are killed, in seconds; 30 in torch 2.11,
#: which gives no choice. Only a rank that catches SIGTERM takes any time.
GRACE = 5


class LaunchError(RankError):
    """A rank failed; the message is its own, after its rank.

    Attributes:
        rank: which.
        refused: whether weft refused what it was asked for, as it would again.
    """

    def __init__(self, ending: Ending) -> None:
        super().__init__(str(ending))
        self.rank, self.refused = ending.rank, ending.refused


def cores() -> int:
    """CPU cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """Threads each of `ranks` on this machine computes with: cores // ranks, at least 1."""
    return max(1, cores() // ranks)


def run(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int,
    restarts: int = 0,
    on_restart: Callable[[str], None] = lambda text: None,
    fewest: int | None = None,
) -> Any:
    """Call `fn(*args)` on every rank; returns rank 0's result (None on torchrun's other ranks).

    Ranks are the processes that torchrun or SLURM started, or else new ones on this machine, which
    end with this process, however it ends.

    Args:
        fn: a function of a module, as ranks import it by name; what it takes and returns is
            pickled.
        args: of the function.
        ranks: how many. One is called right here, unless there are restarts.
        restarts: how often all ranks are started again after one died or did not answer. What weft
            refuses is not tried again.
        on_restart: called with the reason when all ranks are started again.
        fewest: where it is below `ranks`, a rank that dies twice in a row is left out of the next
            start, with its GPU, as long as so many are left.

    Raises:
        LaunchError: a rank failed; the message is its own, or says how it was killed.
        WeftError: a launcher started another number of ranks.

    >>> run(sorted, [3, 1, 2], ranks=1)
    [1, 2, 3]
    """
    place = already_launched()
    if place is not None:
        tell_torch()
        if place.world_size != ranks:
            raise WeftError(
                f"this takes {ranks} ranks, but {place.launcher} started {place.world_size}; start "
                f"{ranks}, or choose another layout (a mesh size of -1 takes all that are left)"
            )
        result = fn(*args)
        return result if place.rank == 0 else None
    if ranks == 1 and not restarts:
        return fn(*args)
    if fewest is None or fewest >= ranks:
        return _elastic(fn, args, ranks, restarts, on_restart)
    return _shrinking(fn, args, ranks, restarts, on_restart, fewest)


def _shrinking(
    fn: Callable[..., Any],
    args: tuple,
    ranks: int,
    restarts: int,
    on_restart: Callable[[str], None],
    fewest: int,
) -> Any:
    """Starts of one run, one after another: torch's launcher keeps the number of its processes."""
    last: int | None = None
    name = f"weft-{secrets.token_hex(8)}"
    for attempt in itertools.count(1):
        try:
            return _elastic(fn, args, ranks, 0, on_restart, name)
        except LaunchError as error:
            if attempt > restarts or error.refused:
                raise
            twice = error.rank is not None and error.rank == last
            last = error.rank
            if twice and ranks > fewest:
                ranks, last = ranks - 1, None
                _leave_out_gpu(int(error.rank or 0), ranks + 1)
            on_restart(f"{error}; {ranks} ranks start again ({attempt} of {restarts})")


def _leave_out_gpu(local: int, ranks: int) -> None:
    """Show later ranks all GPUs but that of a rank, if there was one for each of `ranks`."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count >= ranks:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        devices = shown.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[:local] + devices[local + 1 :])


def _elastic(
    fn: Callable[..., Any],
    args: tuple,
    ranks: int,
    restarts: int,
    on_restart: Callable[[str], None],
    name: str | None = None,
) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
    _silence()
    endings = _Endings(restarts, on_restart)
    options = {field.name for field in fields(LaunchConfig)}
    grace: dict[str, Any] = {"shutdown_timeout": GRACE} if "shutdown_timeout" in options else {}
    with tempfile.TemporaryDirectory(prefix="weft-") as folder, _interruptible() as interrupted:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=name or os.path.basename(folder),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=restarts,
            start_method="spawn",
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            **grace,
        )
        try:
            return elastic_launch(config, _rank)(endings.monitor.address, fn, args)[0]
        except ChildFailedError as error:
            raise LaunchError(endings.cause(error)) from None
        except SignalException as error:
            if endings.refused:
                raise LaunchError(endings.refused) from None
            if interrupted:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
        finally:
            endings.monitor.close()
            trace.remove_traces(endings.monitor.pids)


class _Endings:
    """The launcher's side of a run: how its ranks ended, and whether they start again."""

    def __init__(self, restarts: int, on_restart: Callable[[str], None]) -> None:
        self.restarts, self.on_restart = restarts, on_restart
        self.attempt, self.lock = 0, threading.Lock()
        self.refused: Ending | None = None
        self.monitor = LauncherMonitor(self._started, self._ended)

    def cause(self, error: Any) -> Ending:
        """Why the ranks ended: the report of a rank, else that of torch."""
        ending = self.monitor.cause()
        if ending is None or (ending.silent and ending.code is None):
            rank, failure = error.get_first_failure()
            ending = Ending(rank, 0, code=failure.exitcode)
        return ending

    def _started(self, attempt: int) -> None:
        with self.lock:
            again, self.attempt = attempt > self.attempt, max(attempt, self.attempt)
        if again:
            cause = self.monitor.cause(before=attempt) or "a rank ended while it was starting"
            self.on_restart(f"{cause}; all ranks start again ({attempt} of {self.restarts})")

    def _ended(self, ending: Ending) -> None:
        """Ranks that were refused something would be refused it again: end them all.

        All ranks end where one fails. torch asks them to, and one that is stopped (SIGSTOP) does
        not hear it, for which torch waits 30 s.
        """
        if ending.silent and trace.why_killed(ending.pid):
            ending.stopped = True
        for other in () if ending.done else self.monitor.running(ending.attempt):
            if trace.state_of(other.pid) == "stopped":
                other.stopped = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other.pid, signal.SIGKILL)
        if self.restarts and ending.refused and not self.refused:
            self.refused = ending
            os.kill(os.getpid(), signal.SIGTERM)  # which the launcher passes on to every rank


def _silence() -> None:
    """The launcher's own report of a failure is a page long; ours is the rank's message."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Ctrl-C ends all ranks, quietly: it is for this process only, which then ends the others.

    A terminal sends SIGINT to the ranks too, and they would each print where they were. So the
    main thread, from which they inherit it, blocks the signal; another thread takes it. Yields a
    list that holds the signal once it came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _starts_a_process(frame):  # which would find no task, and say so; nobody knows it yet
            threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
            return
        received.append(number)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            raise KeyboardInterrupt  # the launcher has not begun
        signal.raise_signal(signal.SIGTERM)  # which the launcher passes on to every rank

    done = threading.Event()
    before = set(multiprocessing.active_children())
    resource_tracker.ensure_running()  # else it starts with the first rank, and unblocks SIGINT
    old = signal.signal(signal.SIGINT, interrupt)
    destination = threading.Thread(target=done.wait, name="takes-sigint", daemon=True)
    destination.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield received
    finally:
        for child in set(multiprocessing.active_children()) - before:
            child.kill()  # one that was starting just then
        done.set()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, old)


def _starts_a_process(frame: FrameType | None) -> bool:
    """True if a frame is within the start of one of Python's processes."""
    while frame is not None and frame.f_code is not multiprocessing.Process.start.__code__:
        frame = frame.f_back
    return frame is not None


def _rank(address: str, fn: Callable[..., Any], args: tuple) -> Any:
    """One started rank: calls `fn`, and reports to the launcher how it ended."""
    gc.freeze()  # else Python looks through all modules for garbage when the rank ends: a second
    # Blocked while it was starting; from here on torch takes it quietly.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    attempt = number(os.environ, "TORCHELASTIC_RESTART_COUNT", 0)
    peers.silence()
    monitored = MonitoredRank(address, int(os.environ["RANK"]), attempt)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        result = fn(*args)
    except Exception as error:
        is_weft, is_of_others = isinstance(error, WeftError), isinstance(error, RankError)
        is_of_others |= bool(peers.add_lost(error)) and not is_weft
        message = f"{type(error).__name__}: {error}" if is_weft else traceback.format_exc()
        if not is_of_others:  # the rank that noticed the failure has written
            trace.failed(f"{type(error).__name__}: {error}")
        monitored.failed(message, follows=is_of_others, refused=is_weft and not is_of_others)
        raise
    monitored.done()
    return result
