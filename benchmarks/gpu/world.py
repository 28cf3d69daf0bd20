"""A world of one rank: groups are made, ranks vote while NCCL moves, sums, and a second start."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

import weft

from .messages import to_itself
from .parts import Where, rows

#: Bytes that are on their way while ranks vote.
NBYTES = 64 << 20
ROUNDS = 2


def run(where: Where) -> Iterator[str]:
    """Seconds of every step of a run's life, twice: a process may end torch and start it again."""
    yield from rows(["round", "step", "ms"], _steps(where))


def _steps(where: Where) -> Iterator[tuple]:
    for number in range(1, ROUNDS + 1):
        for name, step in _life(where):
            start = time.perf_counter()
            step()
            if where.device == "cuda":
                torch.cuda.synchronize()
            yield number, name, 1e3 * (time.perf_counter() - start)


def _life(where: Where) -> Iterator[tuple]:
    """(name, what to time), in order."""
    bound: list[weft.Layout] = []
    layout = weft.Layout.parse("tokens: ring=1")
    yield "build, with warm-up", lambda: bound.append(layout.build(where.device))
    yield "build the same again", lambda: bound.append(layout.build(where.device))
    on = bound[0]
    x = torch.randn(1, 2, 64, 64, device=where.device, dtype=where.dtype, requires_grad=True)

    def attend() -> None:
        weft.attention(x, x, x, on, "tokens").sum().backward()

    yield "attention, forward and backward", attend
    yield "attention, again", attend

    def vote() -> None:
        agreed = on.bound._vote(("ring",), 12345, 0)
        assert agreed()

    yield "a vote", vote
    yield "a vote while a message travels", lambda: _beside(where, vote)
    group = on.device_mesh.get_group("ring")
    one = torch.ones(1 << 20, device=where.device)
    yield "a sum on the mesh dim's group", lambda: dist.all_reduce(one, group=group)
    yield "texts of all ranks", lambda: on.bound._all_gather_text("text", ("ring",))
    yield "a mean", lambda: on.mean(x.detach().sum(), 4)
    yield "end", dist.destroy_process_group


def _beside(where: Where, vote) -> None:
    if where.device == "cpu":
        vote()
        return
    source, target = (torch.empty(NBYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    works = to_itself([source], [target])
    vote()
    for work in works:
        work.wait()
