"""All ranks of a mesh as threads of one process: exhaustive tests in milliseconds.

The same programs run as on process groups. Buffers are handed over through mailboxes; every wait
has a limit, and when one rank raises, the others end with a message that names it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import trace_on_threads
from ..errors import RankError
from ..launch.environment import wait_limit
from .origin import together
from .transport import P2PBatch, Shuffle, Transport, rank_of_thread


class Post:
    """The mailboxes that the ranks of one mesh share; an empty one is thrown away."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.changed = threading.Condition()
        self.boxes: dict[tuple, deque] = {}
        self.failure: str | None = None

    def put(self, key: tuple, item: Any) -> None:
        with self.changed:
            self.boxes.setdefault(key, deque()).append(item)
            self.changed.notify_all()

    def take(self, key: tuple, who: str) -> Any:
        with self.changed:
            ready = self.changed.wait_for(lambda: key in self.boxes or self.failure, self.timeout)
            if key in self.boxes:
                box = self.boxes[key]
                item = box.popleft()
                if not box:
                    del self.boxes[key]
                return item
        if ready:
            raise RankError(f"{self.failure} (while waiting for {who})")
        raise RankError(f"{who} sent nothing within {self.timeout:g} s")

    def fail(self, message: str) -> None:
        with self.changed:
            self.failure = self.failure or message
            self.changed.notify_all()


class ThreadTransport(Transport):
    """One rank of a mesh whose ranks are threads."""

    of_thread = True

    def __init__(self, sizes: Mapping[str, int], rank: int, post: Post) -> None:
        super().__init__(sizes, rank)
        self.post = post

    def _start(self, p2p: P2PBatch, tag: int) -> Callable[[], None]:
        for coord, buffer in p2p.sends:
            to = self.peer_rank(p2p.mesh_dim, coord)
            self.post.put(self._key(self.rank, to, p2p.mesh_dim, tag), buffer.clone())
        sources = [self.peer_rank(p2p.mesh_dim, coord) for coord, _ in p2p.receives]
        keys = [self._key(source, self.rank, p2p.mesh_dim, tag) for source in sources]

        def wait() -> None:
            for source, key, (_, buffer) in zip(sources, keys, p2p.receives):
                who = f"rank {source} ({p2p.label} along mesh dim {p2p.mesh_dim!r})"
                received = self.post.take(key, who)
                if received.shape != buffer.shape or received.dtype != buffer.dtype:
                    raise RankError(
                        f"{who} sent {tuple(received.shape)}, expected {tuple(buffer.shape)}"
                    )
                buffer.copy_(received)

        return wait

    def _key(self, source: int, target: int, mesh_dim: str, tag: int) -> tuple:
        """Messages of one tag between two ranks match in the order in which both began them."""
        return source, target, mesh_dim, tag

    def _all_to_all(self, shuffle: Shuffle, tag: int) -> None:
        self._shuffle(shuffle, tag)

    def _everyone(self, item: Any, mesh_dims: Sequence[str], label: str) -> Callable[[], dict]:
        """The items of all ranks along mesh dims, by rank; the returned function waits for them."""
        group = self.ranks_along(mesh_dims)
        for to in group:
            self.post.put((self.rank, to, label, *group), item)

        def wait() -> dict[int, Any]:
            return {r: self.post.take((r, self.rank, label, *group), f"rank {r}") for r in group}

        return wait

    def _all_reduce(self, tensor: Tensor, mesh_dims: tuple[str, ...]) -> None:
        parts = [*self._everyone(tensor.detach().clone(), mesh_dims, "sum")().values()]
        if tensor.element_size() < 4:  # rounded once
            tensor.copy_(torch.stack(parts).sum(0))
            return
        tensor.copy_(parts[0])
        for part in parts[1:]:
            tensor.add_(part)

    def _vote(self, mesh_dims: tuple[str, ...], digest: int, name: int) -> Callable[[], bool]:
        votes = self._everyone((digest, name), mesh_dims, "vote")
        return lambda: together(votes().values()) is not None

    def _all_gather_text(self, text: str, mesh_dims: tuple[str, ...]) -> dict[int, str]:
        return self._everyone(text, mesh_dims, "text")()


def run_threads(
    sizes: Mapping[str, int], fn: Callable[[Transport], Any], timeout: float | None = None
) -> list[Any]:
    """Call `fn(transport)` once per rank of a mesh, each on a thread; the results in rank order.

    The first rank that raises names itself to the others, which stop waiting; its exception is
    raised here.

    >>> run_threads({"ring": 2}, lambda t: t.coords["ring"])
    [0, 1]
    """
    trace_on_threads()
    size, limit = math.prod(sizes.values()), wait_limit(timeout)
    post = Post(size, limit)
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        transport = ThreadTransport(sizes, rank, post)
        try:
            with rank_of_thread(transport):
                results[rank] = fn(transport)
        except BaseException as error:
            errors.append((rank, error))
            post.fail(f"rank {rank} failed: {error}")

    threads = [
        threading.Thread(target=work, args=(r,), name=f"rank{r}", daemon=True) for r in range(size)
    ]
    for thread in threads:
        thread.start()
    _join(threads, errors, limit)
    if errors:
        raise errors[0][1]
    return results


def _join(threads: list[threading.Thread], errors: list, timeout: float) -> None:
    """Wait for all threads; after a failure no longer than one waits for another."""
    end = math.inf
    for thread in threads:
        while thread.is_alive():
            if errors and end == math.inf:
                end = time.monotonic() + timeout + 1.0
            if time.monotonic() > end:
                return  # a rank that computes on and on is left behind
            thread.join(0.05)
