"""Times the forward and backward pass of several layouts on the same ranks, in turns.

    round 0     a a'  b b'  c c'        a: forward of the first layout, a': its backward pass
    round 1     b b'  c c'  a a'        another one begins, so that none always follows another
    ...

So other load on the machine slows all of them equally. All ranks begin a pass together, and it
ends with the slowest one.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from weft._torch import memory_of
from weft.attention import attention
from weft.comm.consistency import local_tensor
from weft.inspect.traffic import traffic
from weft.layout import Layout
from weft_axes.testing.cases import Case
from weft_axes.testing.check import local_part
from weft_planner.work import Work


@dataclass(frozen=True)
class TimedPasses:
    """Seconds and bytes of the passes of one layout, on the slowest or busiest rank."""

    forward: tuple[float, ...]  # seconds of every round
    whole: tuple[float, ...]  # likewise, of both passes
    received: tuple[int, int]  # bytes of each pass, as the transports counted them
    kept: int  # bytes that a forward pass keeps for its backward pass, weights left out
    held: int  # the most bytes of other ranks at one time
    allocated: int = 0  # the most bytes of a GPU in both passes, 0 on CPUs, which do not count them

    @property
    def medians(self) -> tuple[float, float, float]:
        """Seconds of the forward, of the backward, and of both passes: medians over the rounds.

        >>> TimedPasses((1.0, 2.0, 2.0), (4.0, 6.0, 5.0), (0, 0), 0, 0).medians
        (2.0, 3.0, 5.0)
        """
        backward = [whole - forward for forward, whole in zip(self.forward, self.whole)]
        f, b, w = (statistics.median(s) for s in (self.forward, backward, self.whole))
        return f, b, w


def side_by_side(
    works: Sequence[tuple[Layout, Work]], rounds: int, device: str
) -> list[TimedPasses]:
    """Times works of layouts that are bound to the same ranks, which all call this.

    Each is timed `rounds` times, after one pass whose bytes are counted.

    >>> q = torch.randn(1, 2, 8, 4, requires_grad=True)
    >>> work = Work(lambda: attention(q, q, q, Layout.single(), "tokens"), [q])
    >>> len(side_by_side([(Layout.single(), work)], 3, "cpu")[0].whole)
    3
    """
    counted = [_counted(layout, work, device) for layout, work in works]
    seconds: list[list[tuple[float, float]]] = [[] for _ in works]
    for number in range(rounds):
        for place in range(len(works)):
            turn = (place + number) % len(works)
            seconds[turn].append(_timed(*works[turn], device))
    return [
        _over_ranks(layout, mine, took) for (layout, _), mine, took in zip(works, counted, seconds)
    ]


def _timed(layout: Layout, work: Work, device: str) -> tuple[float, float]:
    """Seconds of this rank from the common start to the end of the forward and of both passes."""
    _clear(work)
    _together(layout, device)
    start = time.perf_counter()
    out = work.forward()
    grad = torch.ones_like(out)
    _wait(device)
    between = time.perf_counter()
    out.backward(grad)
    work.finish()
    _wait(device)
    return between - start, time.perf_counter() - start


def _counted(layout: Layout, work: Work, device: str) -> dict[str, int]:
    """Bytes of one forward and backward pass of this rank, which also warm up."""
    _clear(work)
    weights = [leaf for leaf in work.leaves if isinstance(leaf, torch.nn.Parameter)]
    memory_of_weights = {memory_of(local_tensor(weight))[0] for weight in weights}
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        memory, nbytes = memory_of(saved)
        if memory not in memory_of_weights:  # a linear layer saves a view of its weight
            kept[memory] = nbytes
        return saved

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with traffic(layout) as forward, saved_tensors_hooks(keep, lambda saved: saved):
        out = work.forward()
    with traffic(layout) as backward:
        out.backward(torch.ones_like(out))
        work.finish()
    return {
        "forward": forward.bytes,
        "backward": backward.bytes,
        "kept": sum(kept.values()),
        "held": max(forward.peak_bytes, backward.peak_bytes),
        "allocated": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
    }


def _over_ranks(
    layout: Layout, counted: Mapping[str, int], took: Sequence[tuple[float, float]]
) -> TimedPasses:
    """All ranks' measurements as one: of the slowest in each round, and of the busiest."""
    mine = json.dumps([counted, took])
    every = [json.loads(text) for text in layout.bound.share("passes", mine).values()]
    most = {name: max(bytes_of[name] for bytes_of, _ in every) for name in counted}
    rounds = zip(*(rows for _, rows in every))
    slowest = [tuple(map(max, zip(*ranks))) for ranks in rounds]
    forward, whole = zip(*slowest)
    received = most.pop("forward"), most.pop("backward")
    return TimedPasses(forward, whole, received, **most)


def _clear(work: Work) -> None:
    for leaf in work.leaves:
        leaf.grad = None


def _together(layout: Layout, device: str) -> None:
    _wait(device)
    layout.bound.share("a round", "")


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# -- attention calls ------------------------------------------------------------------------------


def call_work(layout: Layout, case: Case, device: str) -> Work:
    """An attention call on random tensors, as they rest on this rank of a bound layout."""
    full = {name: torch.empty(shape, device="meta") for name, shape in case.shapes.items()}
    shapes = (local_part(layout, case, full[name], name).shape for name in "qkv")
    q, k, v = (
        torch.randn(shape, dtype=case.dtype, device=device, requires_grad=True) for shape in shapes
    )
    return Work(
        lambda: attention(q, k, v, layout, case.axes, case.mask, length=case.length), (q, k, v)
    )
