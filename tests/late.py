"""Messages as NCCL has them, between ranks that are threads: none is copied when it begins.

    late     what is sent is read, and what is received written, when the first of both ranks waits
    early    both as soon as both ranks have begun

Buffers to receive into are NaN until then, and so are buffers that a pass lets go of. A pass that
computes before it waits, writes to a tensor that is being sent, or takes a buffer that is still on
its way out, is not exact.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from weft.comm import P2PBatch, threads
from weft.errors import RankError
from weft.runtime.tile_run import TileRun


class Message:
    """What one rank sends another, once both have named their buffers."""

    def __init__(self) -> None:
        self.source: Tensor | None = None
        self.target: Tensor | None = None
        self.delivered = False

    @property
    def begun(self) -> bool:
        """Whether both ranks have begun it."""
        return self.source is not None and self.target is not None

    def deliver(self) -> None:
        """Copy it as bytes, once."""
        if self.begun and not self.delivered:
            assert self.source.nbytes == self.target.nbytes
            self.target.view(-1).view(torch.uint8).copy_(self.source.view(-1).view(torch.uint8))
            self.delivered = True


class LateTransport(threads.ThreadTransport):
    """Ranks as threads whose messages are delivered late, or early."""

    early = False
    messages = itertools.count()

    def _message(self, key: tuple, side: str) -> Message:
        """The message of the n-th send, or receive, of a key: both have one."""
        boxes = self.post.boxes.setdefault(("late", *key), {"send": deque(), "receive": deque()})
        other = boxes["receive" if side == "send" else "send"]
        if other:
            return other.popleft()
        boxes[side].append(Message())
        return boxes[side][-1]

    def _start(self, p2p: P2PBatch, tag: int) -> Callable[[], None]:
        begun: list[tuple[Message, int]] = []
        with self.post.changed:
            for coord, buffer in p2p.receives:
                if buffer.numel():
                    poison(buffer)
                    source = self.peer_rank(p2p.mesh_dim, coord)
                    key = self._key(source, self.rank, p2p.mesh_dim, tag)
                    begun.append((self._message(key, "receive"), source))
                    begun[-1][0].target = buffer
            for coord, buffer in p2p.sends:
                if buffer.numel():
                    to = self.peer_rank(p2p.mesh_dim, coord)
                    key = self._key(self.rank, to, p2p.mesh_dim, tag)
                    begun.append((self._message(key, "send"), to))
                    begun[-1][0].source = buffer
            for message, _ in begun:
                next(LateTransport.messages)
                if self.early:
                    message.deliver()
            self.post.changed.notify_all()

        def wait() -> None:
            with self.post.changed:
                for message, peer in begun:
                    self.post.changed.wait_for(
                        lambda m=message: m.begun or self.post.failure, self.post.timeout
                    )
                    if not message.begun:
                        raise RankError(self.post.failure or f"rank {peer} did not begin")
                    message.deliver()

        return wait


def poison(t: Tensor) -> None:
    """Numbers that no result survives."""
    t.fill_(float("nan") if t.is_floating_point() else 255 if t.dtype == torch.uint8 else 77)


@contextmanager
def late_messages(early: bool = False) -> Iterator[None]:
    """Inside the block, `run_threads` has such messages, and buffers that are let go are NaN."""
    free = TileRun._free

    def poisoned(run, numbers) -> None:
        if any(numbers is step.frees for step in run.flat.steps):  # what came, and no result
            for number in numbers:
                poison(run.buffers[number])
        free(run, numbers)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LateTransport, "early", early)
        patched.setattr(threads, "ThreadTransport", LateTransport)
        patched.setattr(TileRun, "_free", poisoned)
        yield
