"""The sizes of one attention call, over all ranks or of one rank, and the cost of its passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch

from .._caching import cached
from ..choice import ChoiceKind
from ..declare.layout import LayoutDeclaration
from ..declare.layout_file import HEADS
from ..declare.mesh import coordinates, index_at
from ..errors import ShapeError
from ..kernels import accumulate_dtype
from ..masks import FULL, Mask
from .call import Expanded, reach
from .lengths import Length, read_length
from .order import shard_sizes
from .program import Payload
from .shifts import Shifts
from .sides import Side
from .timing import Costs, launches


@dataclass(frozen=True)
class AnyProblem:
    """Sizes and options of a call: batch and heads of all ranks, or of one; see its subclasses."""

    axes: tuple[str, ...]
    lengths: tuple[tuple[int, int], ...]  # per attended axis, queries and keys over all ranks
    batch: int
    heads: int
    kv_heads: int  # of what rests and travels: latents, if `expanded`
    head_dim: int  # of kernels
    value_dim: int  # of kernels
    dtype: torch.dtype
    device: str
    mask: Mask = FULL
    scale: float | None = None
    softcap: float | None = None
    return_lse: bool = False
    kernel: str | None = None
    bias: bool = False
    bias_tensor: bool = False
    choice: ChoiceKind | None = None
    expanded: Expanded | None = None

    @property
    def n(self) -> int:
        """Global number of queries."""
        return math.prod(n for n, _ in self.lengths)

    @property
    def m(self) -> int:
        """Global number of keys."""
        return math.prod(m for _, m in self.lengths)

    def dims(self, side: Side) -> tuple[int, int]:
        """Head dims of the two tensors of a side that travel: queries and outputs, keys and values.

        >>> from weft.plan.call import Expanded
        >>> latent = Expanded(heads=8, head_dim=24, value_dim=16, carried=(32, 8))
        >>> mla = Problem.of("tokens", 64, heads=8, kv_heads=1, head_dim=24, expanded=latent)
        >>> mla.dims(Side.QUERY), mla.dims(Side.KEY), mla.row_bytes(Payload.KV, False)
        ((24, 16), (32, 8), 160)
        """
        if side is Side.KEY and self.expanded is not None:
            return self.expanded.carried
        return self.head_dim, self.value_dim

    def row_bytes(self, payload: Payload, backward: bool) -> int:
        """Bytes of a payload per row and head."""
        return payload.row_bytes(backward, *self.dims(payload.side), self.dtype)


@dataclass(frozen=True)
class Problem(AnyProblem):
    """A call over all ranks: `batch` and `heads` are of all together.

    >>> problem = Problem.of("tokens", 64, heads=8, batch=2)
    >>> problem.kv_heads, problem.on(LayoutDeclaration.load("tp-x-ring"), rank=0).heads
    (8, 4)
    """

    @classmethod
    def of(
        cls,
        axis: str | Sequence[str],
        length: Length,
        *,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int = 64,
        value_dim: int | None = None,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        mask: Mask = FULL,
        expanded: Expanded | None = None,
    ) -> Self:
        """A call by its sizes: as many key/value heads as heads, values as wide as keys."""
        axes = tuple(axis.split("+")) if isinstance(axis, str) else tuple(axis)
        lengths = read_length(axes, length)
        if lengths is None:
            raise ShapeError("a plan without tensors needs length=...")
        kv_heads = heads if kv_heads is None else kv_heads
        if expanded is not None:
            value_dim = expanded.value_dim
        value_dim = head_dim if value_dim is None else value_dim
        sizes = batch, heads, kv_heads, head_dim, value_dim
        return cls(axes, lengths, *sizes, dtype, device, mask, expanded=expanded)

    def on(self, layout: LayoutDeclaration, rank: int) -> LocalProblem:
        """The part of one rank: batch and heads are cut over the mesh as tensors at rest are."""
        layout.check_heads("query heads", self.heads)
        layout.check_heads("key/value heads", self.kv_heads)
        batches = shard_batches(layout, self.axes, self.batch)
        shards = layout.size(HEADS)
        local = {
            "batch": batches[rank],
            "heads": self.heads // shards,
            "kv_heads": self.kv_heads // shards,
            "batches": batches,
            "asks_batches": reach(layout, self.axes).asks_batches(self.mask.per_sample),
        }
        return LocalProblem(**{f.name: getattr(self, f.name) for f in fields(self)} | local)


@dataclass(frozen=True)
class LocalProblem(AnyProblem):
    """A call as one rank sees it: `batch` and `heads` are its own; plans are of these.

    `batches` has the local batch of every rank, where they are not all equal; `asks_batches` is
    whether ranks of the call know them all, as `Reach.asks_batches` says, or each its own alone.
    """

    batch_offset: int = 0
    batches: tuple[int, ...] = ()
    asks_batches: bool = True

    @property
    def program_batch(self) -> int:
        """The local batch by which a program is chosen: the largest of those that ranks know."""
        return max(self.batches, default=self.batch) if self.asks_batches else self.batch


def pass_costs(
    problem: LocalProblem,
    ways: int,  # in which the sequence and its heads are cut
    blocks: int,  # that a rank computes
    expansions: int,  # parts of the tokens; latents are expanded for every block, one part
    backward: bool,
    shifts: Shifts,
) -> Costs:
    """Seconds per block and per chunk of each payload, from sizes and hardware.

    A block of n queries by m keys takes 2 b h n m (d + e) floating-point operations forward and 2.5
    times as many backward; chunks are taken to be equal, so that all ranks find the same costs.
    """
    p = problem
    batch = p.program_batch
    work = 2 * batch * p.heads * p.n * p.m * (p.head_dim + p.value_dim) / ways
    n = batch * p.heads * p.n / ways  # queries x heads of a chunk
    m = batch * p.kv_heads * p.m / ways
    uniform, slowest = shifts.uniform, shifts.slowest

    def seconds(payload: Payload, rows: float) -> float:
        return rows * p.row_bytes(payload, backward) * slowest

    # Of a block's share of the queries and of the keys.
    device = shifts.hardware.device
    flops = device.rate(p.n * p.m / ways / blocks, backward)
    expansion = 0.0
    if p.expanded is not None:
        tokens = batch * p.m / expansions
        # Backward again, with two products of that size for the gradients.
        expansion = (3 if backward else 1) * tokens * p.expanded.work / flops
    # An output, or dq, dk and dv, is read as the kernel wrote it; the sum is read and written.
    merged = p.dtype.itemsize + 2 * accumulate_dtype(p.dtype).itemsize
    merge_q = merge_kv = launch = 0.0
    if blocks > 1:
        launch = launches(backward) * device.host.launch
        if device.memory_rate:
            merge_q = n * (p.head_dim if backward else p.value_dim) * merged / device.memory_rate
            dkv = m * (p.head_dim + p.value_dim) * merged / device.memory_rate
            merge_kv = dkv if backward else 0.0
    kernel = (2.5 if backward else 1.0) * work / blocks / flops + expansion
    return Costs(
        block=kernel + launch + merge_q + merge_kv,
        launch=launch,
        merge_q=merge_q,
        merge_kv=merge_kv,
        q=seconds(Payload.Q, n),
        kv=seconds(Payload.KV, m),
        back_q=seconds(Payload.DQ if backward else Payload.OUT, n),
        back_kv=seconds(Payload.DKV, m),
        latency=uniform.latency if uniform else 0.0,
        shifts=None if uniform else shifts,
        slowest=slowest,
    )


@cached(256)
def shard_batches(layout: LayoutDeclaration, axes: tuple[str, ...], batch: int) -> tuple[int, ...]:
    """Local batch of every rank at rest, in rank order."""
    dims = layout.batch_dims(axes)
    sizes = shard_sizes(batch, layout.parts(dims))
    ranks = range(layout.world_size)
    return tuple(sizes[index_at(layout.mesh, dims, coordinates(layout.mesh, r))] for r in ranks)
