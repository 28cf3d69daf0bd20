"""One process per host, forked after the imports, each in its own network namespace.

The parent asks through pipes: `Hosts.ask(fn name, arguments)` runs a function of `Host` (or of
another kind of host) on every host at once and returns the answers in rank order.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing.connection as mpc
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe

import torch
import torch.distributed as dist

from . import reference
from .contestants import Links, contestants
from .network import address, enter


class Lost(RuntimeError):
    """A host died, or did not answer in time."""


class Host:
    """The worker of one host: it holds its shard and times functions on request."""

    def __init__(self, rank: int, hosts: int, whole: reference.Problem) -> None:
        self.rank, self.hosts = rank, hosts
        self.cut = slice(*self._bounds(whole.q.shape[2]))
        self.local = [t[:, :, self.cut].contiguous() for t in (whole.q, whole.k, whole.v)]
        self.dout = whole.dout[:, :, self.cut].contiguous()
        self.wanted = [t[:, :, self.cut] for t in whole.wanted]
        heads = whole.q.shape[1]
        self.entries = contestants(hosts, heads)
        self.made: dict = {}

    def _bounds(self, tokens: int) -> tuple[int, int]:
        share = tokens // self.hosts
        return self.rank * share, (self.rank + 1) * share

    def make(self, number: int, links: Links) -> str:
        """Build a contestant for such links; why it cannot be, or nothing."""
        try:
            self.made[number] = self.entries[number].make(links)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return ""

    def check(self, number: int) -> dict[str, float] | str:
        """Largest relative error of the output and each gradient on this host, or why none."""
        try:
            found = self._once(number)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        pairs = zip(reference.NAMES, found, self.wanted)
        return {name: reference.error(f, w) for name, f, w in pairs}

    def measure(self, number: int) -> tuple[float, float]:
        """Forward + backward once: when it began and ended on this host, on the common clock."""
        dist.barrier()
        start = time.monotonic()
        self._once(number)
        return start, time.monotonic()

    def _once(self, number: int) -> tuple[torch.Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in self.local]
        out = self.made[number](*leaves)
        out.backward(self.dout)
        return out.detach(), *(leaf.grad for leaf in leaves)


class Hosts:
    """The processes of all hosts. Use as a context manager."""

    def __init__(
        self,
        hosts: int,
        whole: reference.Problem,
        timeout: float = 120.0,
        kind: Callable[[int, int, reference.Problem], object] = Host,
    ) -> None:
        self.hosts, self.whole, self.timeout, self.kind = hosts, whole, timeout, kind
        self.pids: list[int] = []
        self.pipes: list[mpc.Connection] = []

    def __enter__(self) -> Hosts:
        try:
            for rank in range(self.hosts):
                self._start(rank)
            self._answers("the start")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, function: str, *arguments: object) -> list:
        """Call `Host.<function>` on every host; the answers by rank."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        return self._answers(function)

    def stop(self) -> None:
        """Kill every host."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.pids.clear()

    def _answers(self, what: str) -> list:
        deadline, answers = time.monotonic() + self.timeout, []
        for rank, pipe in enumerate(self.pipes):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise Lost(f"host {rank} did not answer {what} within {self.timeout:g} s")
                ok, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                raise Lost(f"host {rank} died during {what}") from None
            if not ok:
                raise Lost(f"host {rank}: {value}")
            answers.append(value)
        return answers

    def _start(self, rank: int) -> None:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid:
            theirs.close()
            self.pids.append(pid)
            self.pipes.append(ours)
            return
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        try:
            _serve(rank, self.hosts, self.kind, self.whole, theirs)
        except (EOFError, BrokenPipeError):
            pass
        except BaseException:
            with contextlib.suppress(OSError):
                theirs.send((False, traceback.format_exc()))
        os._exit(0)


def _serve(rank: int, hosts: int, kind, whole: reference.Problem, pipe: mpc.Connection) -> None:
    enter(rank)
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(hosts),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    host = kind(rank, hosts, whole)
    pipe.send((True, rank))
    while True:
        function, arguments = pipe.recv()
        pipe.send((True, getattr(host, function)(*arguments)))
