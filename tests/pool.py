"""Real processes joined by gloo, started once and used by many tests.

One launcher imports torch and forks the ranks, so that the import is paid once. Each rank answers
over a socket: it gets a function and arguments, and sends back what the function returned or
raised. A test that takes too long ends with the whole process group killed and the end of its
standard error in the message; the next test starts a fresh group.
"""

from __future__ import annotations

import contextlib
import datetime
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

# The launcher imports this file as a module, so that what it pickles has the same name here.
_START = """
import sys
from pathlib import Path
folder, state, address, size, timeout, *preload = sys.argv[1:]
sys.path.insert(0, folder)
import pool
pool._launch(Path(state), address, int(size), float(timeout), preload)
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

    `preload` names modules that are imported once, before ranks are forked.
    """

    def __init__(
        self, size: int, gloo_timeout: float = 60.0, preload: tuple[str, ...] = ()
    ) -> None:
        self.size, self.gloo_timeout, self.preload = size, gloo_timeout, preload
        self._launcher: subprocess.Popen | None = None
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
        if self._launcher is None:
            self._start(time.monotonic() + 60.0)
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
        """Kill the launcher and every rank."""
        if self._launcher is None:
            return
        for connection in self._ranks.values():
            connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._launcher.pid, signal.SIGKILL)
        self._launcher.wait()
        self._launcher, self._ranks = None, {}
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, deadline: float) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="weft-pool-"))
        address = tempfile.mktemp(prefix="weft-pool-socket-")  # outlives the folder on failure
        with mpc.Listener(address, "AF_UNIX") as listener:
            listener._listener._socket.settimeout(60.0)
            with open(self._folder / "stderr", "wb") as log:
                self._launcher = subprocess.Popen(
                    [sys.executable, "-c", _START, str(HERE), str(self._folder), address]
                    + [str(self.size), str(self.gloo_timeout), *self.preload],
                    stderr=log,
                    start_new_session=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
            try:
                connections = [listener.accept() for _ in range(self.size)]
            except TimeoutError:
                self._fail("the ranks did not start")
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


def _launch(
    folder: Path, address: str, size: int, gloo_timeout: float, preload: Sequence[str]
) -> None:
    import weft

    assert weft.attention  # torch and weft are imported once, for every rank to inherit
    for name in preload:
        importlib.import_module(name)
    gc.freeze()  # and are no garbage: no rank looks through them

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
