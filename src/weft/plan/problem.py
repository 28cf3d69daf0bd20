"""One attention call from one rank's view, and the cost of its passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..masks import FULL, Mask
from .program import Payload
from .shifts import Shifts
from .timing import Costs


@dataclass(frozen=True)
class Problem:
    """One attention call as this rank sees it. Batch and heads are local, lengths are global.

    `lengths` has, per attended axis, the number of queries and of keys. `batches` has the local
    batch of every rank, where they are not all equal; `asks_batches` is whether ranks of the call
    know them all, as `Reach.asks_batches` says, or each its own alone.
    """

    axes: tuple[str, ...]
    lengths: tuple[tuple[int, int], ...]
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str
    mask: Mask = FULL
    scale: float | None = None
    softcap: float | None = None
    return_lse: bool = False
    kernel: str | None = None
    batch_offset: int = 0
    batches: tuple[int, ...] = ()
    asks_batches: bool = True
    bias: bool = False
    bias_tensor: bool = False

    @property
    def n(self) -> int:
        """Global number of queries."""
        return math.prod(n for n, _ in self.lengths)

    @property
    def m(self) -> int:
        """Global number of keys."""
        return math.prod(m for _, m in self.lengths)

    def row_bytes(self, payload: Payload, backward: bool) -> int:
        """Bytes of a payload per row and head."""
        return payload.row_bytes(backward, self.head_dim, self.value_dim, self.dtype)

    @property
    def program_batch(self) -> int:
        """The local batch by which a program is chosen: the largest of those that ranks know."""
        return max(self.batches, default=self.batch) if self.asks_batches else self.batch


def pass_costs(
    problem: Problem,
    ways: int,
    blocks: int,
    backward: bool,
    shifts: Shifts,
) -> Costs:
    """Seconds per block and per chunk of each payload, from sizes and hardware.

    A block of n queries by m keys takes 2 b h n m (d + e) floating-point operations forward and
    2.5 times as many backward. The sequence and its heads are cut `ways` ways, and a rank computes
    `blocks` blocks; chunks are taken to be equal, so that all ranks find the same costs.
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
    flops = shifts.hardware.device.rate(p.n * p.m / ways / blocks, backward)
    return Costs(
        block=(2.5 if backward else 1.0) * work / blocks / flops,
        q=seconds(Payload.Q, n),
        kv=seconds(Payload.KV, m),
        back_q=seconds(Payload.DQ if backward else Payload.OUT, n),
        back_kv=seconds(Payload.DKV, m),
        latency=uniform.latency if uniform else 0.0,
        shifts=None if uniform else shifts,
        slowest=slowest,
    )
