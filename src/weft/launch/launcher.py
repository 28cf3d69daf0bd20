"""Starts the ranks of a command as processes of this machine, or joins torchrun's and SLURM's.

Three ways to the same ranks:

- from a plain shell a command starts one process per rank itself; they meet in a file of a folder
  that is closed to other users: a store on a port would be open to all of them;
- under torchrun (RANK and WORLD_SIZE are set) this process is a rank already;
- under srun (SLURM_PROCID and SLURM_STEP_NUM_TASKS are set) likewise, after SLURM's variables are
  translated to torch's.

A rank tells its launcher by a pipe how it ended, and the pipe's end tells if it cannot. It ends
with its launcher, too.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import multiprocessing
import os
import pickle
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from ..errors import RankError, WeftError
from . import peers, trace
from .environment import STORE, already_launched, tell_torch

#: Seconds that ranks which are asked to end may take, and for which the failure that others follow
#: from may come after the news of it.
GRACE, NEWS = 5.0, 1.0


class Ending(NamedTuple):
    """What a rank says as it ends: its result, or its error, and whether another's caused that."""

    result: Any = None
    message: str = ""
    follows: bool = False
    refused: bool = False


class LaunchError(RankError):
    """A rank failed; the message is its own, after its rank."""

    def __init__(self, rank: int, message: str, refused: bool = False) -> None:
        super().__init__(f"rank {rank}{message}")
        self.rank, self.refused = rank, refused  # by weft, which would refuse it again


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
    name, last = f"weft-{secrets.token_hex(8)}", None
    for attempt in itertools.count(1):
        try:
            return _start(fn, args, ranks, name, attempt - 1)
        except LaunchError as error:
            if attempt > restarts or error.refused:
                raise
            if error.rank == last and ranks > (fewest or ranks):
                ranks, last = ranks - 1, None
                _leave_out_gpu(error.rank, ranks + 1)
            else:
                last = error.rank
            on_restart(f"{error}; {ranks} ranks start again ({attempt} of {restarts})")


def _leave_out_gpu(local: int, ranks: int) -> None:
    """Show later ranks all GPUs but that of a rank, if there was one for each of `ranks`."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count >= ranks:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        devices = shown.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[:local] + devices[local + 1 :])


def _start(fn: Callable[..., Any], args: tuple, ranks: int, name: str, attempt: int) -> Any:
    """One start of all ranks, under the name that all starts share: rank 0's result."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
    spawn = multiprocessing.get_context("spawn")
    started: list[tuple[BaseProcess, Connection]] = []
    with tempfile.TemporaryDirectory(prefix="weft-") as folder, _ended_by_signals():
        environ = {STORE: f"{folder}/store", "WORLD_SIZE": str(ranks)}
        environ |= {"LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
        environ |= {"TORCHELASTIC_RUN_ID": name, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        try:
            with _without_sigint():
                for rank in range(ranks):
                    receiver, sender = spawn.Pipe(duplex=False)
                    placed = environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    process = spawn.Process(target=_rank, args=(sender, fn, args))
                    with _environment(placed):  # from the start: others find a process by it
                        process.start()
                    sender.close()
                    started.append((process, receiver))
            return _result(started)
        finally:
            _end([process for process, _ in started])
            trace.remove_traces({process.pid or -1 for process, _ in started})


def _result(started: Sequence[tuple[BaseProcess, Connection]]) -> Any:
    """Rank 0's result once all ranks have ended; else the error that the others' follow from."""
    left, result = {*range(len(started))}, None
    first, end = None, math.inf
    while left and (now := time.monotonic()) < end:
        ready = wait([started[rank][1] for rank in left], None if first is None else end - now)
        ended = [rank for rank in sorted(left) if started[rank][1] in ready]
        left -= {*ended}
        endings = [(rank, _last_words(started[rank][1])) for rank in ended]
        for rank, ending in sorted(endings, key=lambda found: found[1] is not None):
            if ending is None:
                raise LaunchError(rank, _how_it_ended(started[rank][0]))
            if ending.message:
                error = LaunchError(rank, f": {ending.message}", ending.refused)
                if not ending.follows:
                    raise error
                first = first or error
                end = min(end, time.monotonic() + NEWS)
            elif rank == 0:
                result = ending.result
    if first is not None:
        raise first
    for process, _ in started:
        process.join()
    return result


def _last_words(pipe: Connection) -> Ending | None:
    """What a rank says as it ends; None if it ended silently."""
    try:
        return Ending(*pickle.loads(pipe.recv_bytes()))
    except (EOFError, OSError):
        return None


def _how_it_ended(process: BaseProcess) -> str:
    """Words for the end of a rank that said nothing."""
    process.join(GRACE)
    code = process.exitcode
    if why := trace.why_killed(process.pid or -1):
        return f" {why}"
    if code is None:
        return " closed its pipe to the launcher, and runs"
    return f" ended with exit code {code}" if code >= 0 else f" was killed by {_signal(-code)}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of real time
        return f"signal {number}"


def _end(processes: Sequence[BaseProcess]) -> None:
    """End processes: those that do not hear it, as they are stopped, by force."""
    for process in processes:
        process.terminate()
    end = time.monotonic() + GRACE
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()
        process.join()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Within, what ends this process ends its ranks, too: signals raise `SystemExit`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    named = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, leave) for number in named}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _without_sigint() -> Iterator[None]:
    """Processes that start within never see Ctrl-C, which is for their launcher, and comes later.

    A terminal sends it to all of them, and each would print where it was.
    """
    resource_tracker.ensure_running()  # else it starts with the first rank, and unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Within, processes start with these variables."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _rank(pipe: Connection, fn: Callable[..., Any], args: tuple) -> None:
    """One started rank: calls `fn`, and tells the launcher how it ended."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    gc.freeze()  # else Python looks through all modules for garbage when the rank ends: a second
    peers.silence()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        result = fn(*args)
        ending = Ending(result if os.environ["RANK"] == "0" else None)
    except Exception as error:
        is_weft, is_of_others = isinstance(error, WeftError), isinstance(error, RankError)
        is_of_others |= bool(peers.add_lost(error)) and not is_weft
        message = f"{type(error).__name__}: {error}" if is_weft else traceback.format_exc()
        if not is_of_others:  # the rank that noticed the failure has written
            trace.failed(f"{type(error).__name__}: {error}")
        ending = Ending(None, message, is_of_others, is_weft and not is_of_others)
    pipe.send_bytes(pickle.dumps(tuple(ending)))  # by value, of tensors as well
    pipe.close()
    if ending.message:
        sys.exit(1)


def _end_with_launcher() -> None:
    """Kill this process when the one that started it has ended, however it ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)
