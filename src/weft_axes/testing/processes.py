"""Ranks as processes joined by torch.distributed's gloo, restarted after a case that failed."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cases import Case


#: Seconds more for the first case, which may import a large package, and for new processes later.
START, AGAIN = 120.0, 20.0


class Processes:
    """A group of ranks that run cases one after another; use it in a `with` statement."""

    def __init__(self, job: Any, ranks: int, timeout: float) -> None:
        self.job, self.ranks, self.timeout = job, ranks, timeout
        self.warm, self.start = False, START
        self.children: list = []
        self.pipes: list = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, case: Case) -> list:
        """Every rank's result of a case; of ranks that gave none, a text that says why.

        Where only some gave one, only some raised, or gloo broke, the next case gets new processes.
        """
        if not self.children:
            self._start()
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(case)
        until = time.monotonic() + self.timeout + (0 if self.warm else self.start)
        results = [_received(pipe, until) for pipe in self.pipes]
        self.warm, self.start = True, AGAIN
        for i, child in enumerate(self.children):
            if results[i] is None:
                results[i] = _ended(child) or f"no answer in {self.timeout:.0f} s"
        if (
            not all(_whole(result) for result in results)
            or len({bool(r.raised) for r in results}) > 1
        ):
            self._stop()
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["weft"])  # so that ranks start quickly
        self.folder = tempfile.TemporaryDirectory(prefix="weft-testing-")
        for rank in range(self.ranks):
            here, there = context.Pipe()
            args = (there, self.job, rank, self.ranks, self.folder.name, self.timeout)
            child = context.Process(target=_serve, args=args, daemon=True)
            child.start()
            there.close()
            self.children.append(child)
            self.pipes.append(here)
        for pipe in self.pipes:
            if not pipe.poll(120) or pipe.recv() != "ready":
                raise RuntimeError("a rank of the conformance run did not start")

    def _stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for child in self.children:
            child.kill()
            child.join()
        if self.children:
            self.folder.cleanup()
        self.children, self.pipes, self.warm = [], [], False


def _received(pipe: Any, until: float) -> Any:
    try:
        return pipe.recv() if pipe.poll(max(0.0, until - time.monotonic())) else None
    except (EOFError, OSError):
        return None


def follows(raised: str) -> bool:
    """True if a rank's exception only follows from another rank's failure."""
    return raised.startswith("RankError") or any(sign in raised for sign in _BROKEN)


#: Parts of gloo's messages when another rank is gone or silent, or sends an unexpected message.
_BROKEN = ("gloo/transport", "pair closure", "Timed out")


def _whole(result: Any) -> bool:
    """True if the process groups can be used again after this result of a rank."""
    return not isinstance(result, str) and not follows(result.raised)


def _ended(child: Any) -> str:
    """The end of a process in words, empty while it runs."""
    child.join(1.0)  # its pipe closes a moment before it is gone
    if child.exitcode is None:
        return ""
    code = child.exitcode
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _serve(pipe: Any, job: Any, rank: int, ranks: int, folder: str, timeout: float) -> None:
    """One rank: joins the others, then runs the cases that come through the pipe."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    store = dist.FileStore(f"{folder}/store", ranks)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    pipe.send("ready")
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(_plain(job.run(case, rank)))
        except Exception:
            traceback.print_exc()
            return


def _plain(result: Any) -> Any:
    """The result with tensors that own their memory, so that none is shared between processes."""
    from dataclasses import replace

    tensors = [{n: t.detach().contiguous().clone() for n, t in found.items()}
               for found in result.tensors]  # fmt: skip
    return replace(result, tensors=tensors)
