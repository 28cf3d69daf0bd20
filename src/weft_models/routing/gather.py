"""All-gather of numbers per block of keys: summaries, routing weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.comm import Transport
from weft.comm.collectives import gather_slices, spread_flat
from weft.comm.once_differentiable import once
from weft_axes.fetching.fetch import Partition


class GatherBlocks(torch.autograd.Function):
    """All-gather of every rank's own blocks: (..., blocks, s) -> (..., P blocks, s).

    before  rank 0: x0       rank 1: x1
    after   both:   [x0 | x1]            backward: gradients return to their owner and are added
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, partition: Partition, transport: Transport, label: str) -> Any:
        ctx.dims, ctx.transport, ctx.label = partition.dims, transport, label
        ctx.ranks = math.prod(transport.sizes[d] for d in partition.dims)
        rows = [x.shape[-2]] * ctx.ranks
        return gather_slices(x, -2, rows, partition.dims, transport, label).contiguous()

    @staticmethod
    @once("weft.routing.RoutedAttention")
    def backward(ctx: Any, grad: Tensor) -> Any:
        blocks = grad.shape[-2] // ctx.ranks
        parts = [part.reshape(-1) for part in grad.split(blocks, -2)]
        label = f"d{ctx.label}"
        own = spread_flat(
            parts, ctx.dims, ctx.transport, label, lambda parts: sum(parts[1:], parts[0])
        )
        return own.view(*grad.shape[:-2], blocks, grad.shape[-1]), None, None, None


__all__ = ["GatherBlocks"]
