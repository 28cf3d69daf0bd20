"""Traffic and memory of a model's training step on a layout, counted without ranks or numbers.

The model's own code runs on one rank of torch's fake process group, on meta tensors: whatever it
sends is counted, whatever autograd keeps has its size. So nothing here knows how a block talks:

    forward, backward   attention, resharding between blocks, sums around split projections
    gradients           their sums over the ranks that split data; DDP's and FSDP2's in closed form
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from weft._torch import fake_ranks, memory_of
from weft.comm.consistency import local_tensor
from weft.errors import DeclarationError, UnsupportedError
from weft.inspect.traffic import TrafficReport, traffic
from weft.layout import Layout
from weft.plan.plan import Plan
from weft_axes.fetching.rules import fetches
from weft_models.declare.model_file import ModelSpec

from .live import Live
from .work import model_work

#: What sums gradients over ranks; FSDP2 shards weights and optimizer states as well.
WAYS = ("sync", "ddp", "fsdp")
PASSES = ("forward", "backward", "gradients")
#: Ranks that are counted each, and of more, how many.
MOST_COUNTED, SOME = 8, 4


@dataclass(frozen=True)
class Moved:
    """Bytes of one kind that a rank receives in a step."""

    when: str  # "forward", "backward" or "gradients"
    mesh_dim: str  # along which; several joined by "+", where they take part together
    what: str  # the label of its messages
    nbytes: int
    messages: int  # sent
    attention: bool  # whether it is part of an attention call's plan, and so on its clock
    mesh: tuple[tuple[str, int], ...] = ()  # sizes of the mesh that the mesh dim is of


@dataclass(frozen=True)
class StepCount:
    """One rank's step."""

    rank: int
    moved: tuple[Moved, ...]
    #: bytes by part: weights, gradients, optimizer (two moments of AdamW), activations (what
    #: autograd keeps), and chunks that attention holds for others at one time
    memory: Mapping[str, int]
    flops: tuple[int, int]  # of matrix products, forward and backward, attention left out
    plans: Mapping[tuple[Plan, bool], int]  # of attention, (plan, backward) -> how often it runs
    #: most bytes that are alive at one time beside weights and optimizer: what autograd keeps,
    #: temporaries, and the gradients made so far, before any is sharded
    peak: int = 0

    @property
    def nbytes(self) -> int:
        """All that the rank receives."""
        return sum(each.nbytes for each in self.moved)


def count_steps(
    layout: Layout,
    spec: ModelSpec,
    batch: int,
    lengths: Mapping[str, int],
    dtype: torch.dtype = torch.float32,
    gradients: str = "sync",
    ranks: Sequence[int] | None = None,
) -> list[StepCount]:
    """A step of a model on some ranks of a layout, none of which is there.

    >>> spec = ModelSpec.load("causal_lm")
    >>> layout = Layout.parse("heads: tp=2; tokens: ulysses=2")
    >>> count, *_ = count_steps(layout, spec, 2, {"tokens": 64}, ranks=[0])
    >>> sorted({(each.mesh_dim, each.what) for each in count.moved if each.when == "forward"})
    [('tp', 'sum'), ('ulysses', 'out'), ('ulysses', 'qkv')]
    """
    if gradients not in WAYS:
        raise DeclarationError(f"gradients={gradients!r}: known are {', '.join(WAYS)}")
    for axis in layout.attend:
        if fetches(layout, tuple(axis.split("+"))):
            raise UnsupportedError(
                f"{layout.source}: of axis {axis!r} only those keys travel that a router or the"
                " model chooses, R(top_k); `weft explain call LAYOUT` bounds their bytes"
            )
    if ranks is None:
        ranks = some_ranks(layout.world_size)
    sizes = (spec, batch, lengths, dtype, gradients)
    return [_count(layout, *sizes, rank) for rank in ranks]


def some_ranks(ranks: int) -> list[int]:
    """All ranks, or some of many, spread evenly, the first and the last among them."""
    if ranks <= MOST_COUNTED:
        return list(range(ranks))
    return sorted({i * (ranks - 1) // (SOME - 1) for i in range(SOME)})


def _count(
    declared: Layout,
    spec: ModelSpec,
    batch: int,
    lengths: Mapping[str, int],
    dtype: torch.dtype,
    gradients: str,
    rank: int,
) -> StepCount:
    with fake_ranks(rank, declared.world_size):
        layout = declared.build("cpu")
        work = model_work(layout, spec, batch, lengths, dtype, "meta")
        weights = [leaf for leaf in work.leaves if isinstance(leaf, torch.nn.Parameter)]
        of_weights = {memory_of(local_tensor(weight))[0] for weight in weights}
        kept: dict[int, int] = {}

        def keep(saved: torch.Tensor) -> torch.Tensor:
            memory, nbytes = memory_of(saved)
            if memory not in of_weights:
                kept[memory] = nbytes
            return saved

        watch = layout.bound.watches.begin()
        with (
            traffic(layout) as forward,
            saved_tensors_hooks(keep, lambda saved: saved),
            Live(weights) as live,
        ):
            out = work.forward()
        ahead = live.flops
        with traffic(layout) as backward, live:
            out.backward(torch.ones_like(out))
        reports = {"forward": forward, "backward": backward}
        if gradients == "sync":
            with traffic(layout) as sums:
                work.finish()
            reports["gradients"] = sums
        layout.bound.watches.end(watch)
    nbytes = sum(local_tensor(weight).nbytes for weight in weights)
    mesh = tuple(layout.mesh.items())
    moved = [each for when, report in reports.items() for each in _moved(when, report, mesh)]
    if gradients != "sync":
        moved += _sharded(declared, gradients, nbytes)
    shards = data_ranks(declared) if gradients == "fsdp" else 1
    held = max(forward.peak_bound, backward.peak_bound)
    memory = {
        "weights": nbytes // shards,
        "gradients": nbytes // shards,
        "optimizer": 2 * nbytes // shards,
        "activations": sum(kept.values()),
        "held for others": held,
    }
    plans = {key: times for key, times in watch.items() if isinstance(key[0], Plan)}
    flops = ahead, live.flops - ahead
    return StepCount(rank, tuple(moved), memory, flops, plans, live.peak)


def _moved(when: str, report: TrafficReport, mesh: tuple[tuple[str, int], ...]) -> Iterator[Moved]:
    """Counted traffic, and the part that attention's plans predicted."""
    for key, nbytes in sorted(report.received.items()):
        planned, (dim, label) = report.predicted.received[key], key
        calls = report.calls[key], report.predicted.calls[key]
        if planned:
            yield Moved(when, dim, label, planned, calls[1], True, mesh)
        if nbytes > planned:
            yield Moved(when, dim, label, nbytes - planned, calls[0] - calls[1], False, mesh)


def _sharded(layout: Layout, way: str, nbytes: int) -> list[Moved]:
    """DDP's all-reduce, or FSDP2's two all-gathers of weights and reduce-scatter of gradients.

    Of P ranks a rank receives (P - 1) / P of all weights in each, in a ring.
    """
    ranks = data_ranks(layout)
    if ranks == 1:
        return []
    share, dims = nbytes * (ranks - 1) // ranks, "+".join(layout.data_dims)
    kinds = [("gradients", "gradients (ddp)", 2)]
    if way == "fsdp":
        kinds = [(when, "weights (fsdp)", 1) for when in PASSES[:2]]
        kinds.append(("gradients", "gradients (fsdp)", 1))
    mesh = tuple(layout.mesh.items())
    return [
        Moved(when, dims, label, times * share, times * (ranks - 1), False, mesh)
        for when, label, times in kinds
    ]


def data_ranks(layout: Layout) -> int:
    """Over how many ranks data is split."""
    return math.prod(layout.mesh[d] for d in layout.data_dims)


def busiest(counts: Sequence[StepCount]) -> StepCount:
    """The rank that receives most."""
    return max(counts, key=lambda count: count.nbytes)


def by_part(count: StepCount) -> Counter[str]:
    """Bytes that a rank receives, by what they are for."""
    parts: Counter[str] = Counter()
    for each in count.moved:
        parts[part_of(each)] += each.nbytes
    return parts


def part_of(moved: Moved) -> str:
    """Purpose of some bytes, in a word or two.

    >>> part_of(Moved("forward", "tp", "sum", 8, 1, False))
    'sums'
    """
    if moved.attention:
        return "attention"
    if moved.when == "gradients":
        return "gradients"
    named = {"sum": "sums", "redistribute": "resharding", "weights (fsdp)": "weights"}
    return named.get(moved.what, moved.what)
