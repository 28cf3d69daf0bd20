"""All ranks of a mesh as threads of one process: exhaustive tests in milliseconds.

The same programs run as on process groups. Buffers are handed over through mailboxes; every wait
has a limit, and when one rank raises, the others end with a message that names it.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import RankError
from .grid import rank_at
from .transport import P2PBatch, Shuffle, Transport


class Post:
    """The mailboxes that the ranks of one mesh share."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.changed = threading.Condition()
        self.boxes: defaultdict[tuple, deque] = defaultdict(deque)
        self.failure: str | None = None

    def put(self, key: tuple, item: Any) -> None:
        with self.changed:
            self.boxes[key].append(item)
            self.changed.notify_all()

    def take(self, key: tuple, who: str) -> Any:
        with self.changed:
            ready = self.changed.wait_for(lambda: self.boxes[key] or self.failure, self.timeout)
            if self.boxes[key]:
                return self.boxes[key].popleft()
        if ready:
            raise RankError(f"{self.failure} (while waiting for {who})")
        raise RankError(f"{who} sent nothing within {self.timeout:g} s")

    def fail(self, message: str) -> None:
        with self.changed:
            self.failure = self.failure or message
            self.changed.notify_all()


class ThreadTransport(Transport):
    """One rank of a mesh whose ranks are threads."""

    def __init__(self, sizes: Mapping[str, int], rank: int, post: Post) -> None:
        super().__init__(sizes, rank)
        self.post = post
        self._numbers: Counter[tuple] = Counter()

    def _start(self, p2p: P2PBatch) -> Callable[[], None]:
        for coord, buffer in p2p.sends:
            to = self.peer_rank(p2p.mesh_dim, coord)
            self.post.put(self._key(self.rank, to, p2p.mesh_dim), buffer.clone())
        sources = [self.peer_rank(p2p.mesh_dim, coord) for coord, _ in p2p.receives]
        keys = [self._key(source, self.rank, p2p.mesh_dim) for source in sources]

        def wait() -> None:
            for source, key, (_, buffer) in zip(sources, keys, p2p.receives):
                who = f"rank {source} ({p2p.label} along mesh dim {p2p.mesh_dim!r})"
                got = self.post.take(key, who)
                if got.shape != buffer.shape or got.dtype != buffer.dtype:
                    raise RankError(
                        f"{who} sent {tuple(got.shape)}, expected {tuple(buffer.shape)}"
                    )
                buffer.copy_(got)

        return wait

    def _key(self, source: int, target: int, mesh_dim: str) -> tuple:
        """Messages between two ranks match in the order in which both sides began them."""
        self._numbers[source, target, mesh_dim] += 1
        return source, target, mesh_dim, self._numbers[source, target, mesh_dim]

    def _all_to_all(self, shuffle: Shuffle) -> None:
        own, size = self.coords[shuffle.mesh_dim], self.sizes[shuffle.mesh_dim]
        away = shuffle.outgoing.split(list(shuffle.sends))
        home = shuffle.incoming.split(list(shuffle.receives))
        peers = [p for p in range(size) if p != own]
        gone, come = ([(p, parts[p]) for p in peers] for parts in (away, home))
        wait = self._start(P2PBatch(shuffle.mesh_dim, shuffle.label, gone, come))
        home[own].copy_(away[own])
        wait()

    def _everyone(self, item: Any, group: Sequence[int]) -> list[Any]:
        """The items of all ranks in `group`, in its order."""
        for to in group:
            self.post.put((self.rank, to, "everyone"), item)
        return [
            self.post.take((source, self.rank, "everyone"), f"rank {source}") for source in group
        ]

    def _group(self, mesh_dims: Sequence[str]) -> list[int]:
        coords = [dict(self.coords)]
        for name in mesh_dims:
            coords = [{**c, name: i} for c in coords for i in range(self.sizes[name])]
        return [rank_at(self.sizes, c) for c in coords]

    def _all_reduce(self, tensor: Tensor, mesh_dims: tuple[str, ...]) -> None:
        parts = self._everyone(tensor.detach().clone(), self._group(mesh_dims))
        tensor.copy_(torch.stack(parts).sum(0))

    def _all_gather_ints(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        return self._everyone(numbers, range(self.size))

    def _all_gather_text(self, text: str) -> list[str]:
        return self._everyone(text, range(self.size))


def run_threads(
    sizes: Mapping[str, int], fn: Callable[[Transport], Any], timeout: float = 60.0
) -> list[Any]:
    """Call `fn(transport)` once per rank of a mesh, each on a thread; the results in rank order.

    The first rank that raises names itself to the others, which stop waiting; its exception is
    raised here.

    >>> run_threads({"ring": 2}, lambda t: t.coords["ring"])
    [0, 1]
    """
    size = math.prod(sizes.values())
    post = Post(size, timeout)
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        try:
            results[rank] = fn(ThreadTransport(sizes, rank, post))
        except BaseException as error:
            errors.append((rank, error))
            post.fail(f"rank {rank} failed: {error}")

    threads = [threading.Thread(target=work, args=(r,), name=f"rank{r}") for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0][1]
    return results
