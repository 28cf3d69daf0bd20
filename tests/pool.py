"""Real processes joined by gloo, started once and used by many tests.

One launcher, which stays, imports torch and weft. For each group of ranks it forks a leader, which
imports the file of the first test and forks the ranks, so that every import is paid once. Each rank
answers over a socket: it gets a function and arguments, and sends back what the function returned
or raised. A test that takes too long ends with the whole process group killed and the end of its
standard error in the message; the next test starts a fresh group.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import importlib
import multiprocessing.connection as mpc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOLDERS = (HERE, *sorted(path for path in HERE.iterdir() if path.is_dir()))

#: Seconds that processes may take to start; three on an idle machine.
PATIENCE = 240.0

# The launcher imports this file as a module, so that what it pickles has the same name here.
_START = """
import sys
folders, address = sys.argv[1:]
sys.path[:0] = folders.split(":")
import pool
pool._launch(address)
"""


@dataclass(frozen=True)
class Raised:
    """What a rank raised: the exception's type name, its message and where."""

    kind: str
    message: str
    where: str


class PoolError(AssertionError):
    """A rank died, did not answer in time, or raised where nothing should."""


class Pool:
    """`size` ranks of one gloo process group. Use as a context manager.

    `preload` names modules that are imported once, before ranks are forked, besides that of the
    first function.
    """

    def __init__(
        self, size: int, gloo_timeout: float = 60.0, preload: tuple[str, ...] = ()
    ) -> None:
        self.size, self.gloo_timeout, self.preload = size, gloo_timeout, preload
        self._leader: int | None = None
        self._ranks: dict[int, mpc.Connection] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, fn: Callable, *args: Any, timeout: float = 100.0) -> list[Any]:
        """`fn(rank, *args)` on every rank, results in rank order; no rank may raise."""
        results = self.attempt(fn, *args, timeout=timeout)
        for rank, result in enumerate(results):
            if isinstance(result, Raised):
                self.stop()  # the ranks may be out of step: the next test gets fresh ones
                raise PoolError(f"rank {rank}: {result.kind}: {result.message}\n{result.where}")
        return results

    def attempt(
        self, fn: Callable, *args: Any, timeout: float = 100.0, dying: tuple[int, ...] = ()
    ) -> list[Any]:
        """Like `run`, but a rank that raises answers `Raised`, and a rank in `dying` None."""
        if self._leader is None:
            self._start((*self.preload, fn.__module__))
        deadline = time.monotonic() + timeout
        for connection in self._ranks.values():
            connection.send((fn, args))
        results: list[Any] = [None] * self.size
        for rank, connection in self._ranks.items():
            if rank not in dying:
                results[rank] = self._answer(rank, connection, deadline)
        if dying:
            self.stop()
        return results

    def stop(self) -> None:
        """Kill every rank."""
        if self._leader is None:
            return
        for connection in self._ranks.values():
            connection.close()
        _ask_launcher(self._leader)
        self._leader, self._ranks = None, {}
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, preload: Sequence[str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="weft-pool-"))
        address = tempfile.mktemp(prefix="weft-pool-socket-")  # outlives the folder on failure
        with mpc.Listener(address, "AF_UNIX") as listener:
            listener._listener._socket.settimeout(PATIENCE)
            given = (self._folder, address, self.size, self.gloo_timeout, preload)
            self._leader = _ask_launcher((*given, dict(os.environ)))
            try:
                connections = [listener.accept() for _ in range(self.size)]
            except TimeoutError:
                self._fail("the ranks did not start")
        deadline = time.monotonic() + PATIENCE
        ranks = {self._answer(-1, connection, deadline): connection for connection in connections}
        self._ranks = dict(sorted(ranks.items()))

    def _answer(self, rank: int, connection: mpc.Connection, deadline: float) -> Any:
        try:
            if connection.poll(max(0.0, deadline - time.monotonic())):
                return connection.recv()
        except (EOFError, ConnectionResetError):
            self._fail(f"rank {rank} died")
        self._fail(f"rank {rank} did not answer in time")

    def _fail(self, what: str) -> None:
        tail = (self._folder / "stderr").read_text(errors="replace")[-3000:]
        self.stop()
        raise PoolError(f"{what}; the end of standard error:\n{tail}")


@functools.cache
def _launcher() -> mpc.Connection:
    """To the launcher of this process, which ends with it."""
    address = tempfile.mktemp(prefix="weft-pool-socket-")
    with mpc.Listener(address, "AF_UNIX") as listener:
        listener._listener._socket.settimeout(PATIENCE)
        subprocess.Popen(
            [sys.executable, "-c", _START, ":".join(map(str, FOLDERS)), address],
            start_new_session=True,
            cwd=HERE.parent,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        return listener.accept()


def _ask_launcher(wish: Any) -> Any:
    """The process id of a new group's leader; or None when the group of a leader has ended."""
    _launcher().send(wish)
    return _launcher().recv()


def _launch(address: str) -> None:
    for name in ("weft", "torch._dynamo", "torch._functorch.aot_autograd"):
        importlib.import_module(name)  # once, for every rank to inherit
    gc.freeze()  # and are no garbage: no rank looks through them
    connection = mpc.Client(address, "AF_UNIX")
    while True:
        try:
            wish = connection.recv()
        except EOFError:
            return
        if isinstance(wish, int):
            os.killpg(wish, signal.SIGKILL)
            os.waitpid(wish, 0)
            connection.send(None)
            continue
        leader = os.fork()
        if leader == 0:
            try:
                os.setpgid(0, 0)
                connection.close()
                _lead(*wish)
            except BaseException:
                traceback.print_exc()
                with contextlib.suppress(OSError):  # those who wait for ranks need not
                    [mpc.Client(wish[1], "AF_UNIX").close() for _ in range(wish[2])]
            os._exit(0)
        with contextlib.suppress(PermissionError):  # it did so itself
            os.setpgid(leader, leader)
        connection.send(leader)


def _lead(
    folder: Path,
    address: str,
    size: int,
    gloo_timeout: float,
    preload: Sequence[str],
    environment: dict[str, str],
) -> None:
    with open(folder / "stderr", "wb") as log:
        os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment | {"OMP_NUM_THREADS": "1"})
    for name in preload:
        importlib.import_module(name)
    gc.freeze()

    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                _serve(folder, address, rank, size, gloo_timeout)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def _serve(folder: Path, address: str, rank: int, size: int, gloo_timeout: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    connection = mpc.Client(address, "AF_UNIX")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=gloo_timeout),
    )
    connection.send(rank)
    while True:
        try:
            fn, args = connection.recv()
        except EOFError:
            return
        try:
            result = fn(rank, *args)
        except BaseException as error:
            result = Raised(type(error).__name__, str(error), traceback.format_exc())
        connection.send(result)
