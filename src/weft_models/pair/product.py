"""Runs plans of `weft_models.pair.plan`: products and boxes of pair tensors, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft._torch import outside_graphs
from weft.comm import Transport
from weft.comm.once_differentiable import once
from weft.kernels import accumulate_dtype
from weft.move.fetch import collect, fetch
from weft.move.plan import Redistribution

from .plan import ProductPlan, factors

_PAIR = (1, 2)  # the dims of a pair tensor (b x y c) that are placed


@outside_graphs
def sharded_product(
    left: Tensor, right: Tensor, equation: str, plan: ProductPlan, transport: Transport
) -> Tensor:
    """`out_ij = sum_k left_ik right_jk` of local pair tensors (b x y c), channel by channel.

    Channels go in as many groups as there are ranks, so what is held of other ranks at one time
    stays as small as what a rank holds itself. Nothing of other ranks is kept for the backward
    pass, which fetches it again.
    """
    return _Product.apply(left, right, equation, plan, transport)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        left: Tensor,
        right: Tensor,
        equation: str,
        plan: ProductPlan,
        transport: Transport,
    ) -> Any:
        ctx.save_for_backward(left, right)
        ctx.equation, ctx.plan, ctx.transport = equation, plan, transport
        exchange, parts = _There(plan, transport, left.dtype), []
        for a, b in zip(*(_groups(t, plan.ranks) for t in (left, right))):
            part = _einsum(equation, exchange.get(a, plan.left), exchange.get(b, plan.right))
            parts.append(exchange.give(part, plan.out))
        return torch.cat(parts, -1)

    @staticmethod
    @once("a product of pairs", linear=False)
    def backward(ctx: Any, saved: tuple[Tensor, Tensor], grad: Tensor) -> Any:
        plan, exchange = ctx.plan, _There(ctx.plan, ctx.transport, grad.dtype)
        x, y, z = factors(ctx.equation)
        lefts, rights = [], []
        for a, b, g in zip(*(_groups(t, plan.ranks) for t in (*saved, grad))):
            g = exchange.get(g, plan.out)
            if ctx.needs_input_grad[0]:
                part = _einsum(f"{z},{y}->{x}", g, exchange.get(b, plan.right))
                lefts.append(exchange.give(part, plan.left))
            if ctx.needs_input_grad[1]:
                part = _einsum(f"{z},{x}->{y}", g, exchange.get(a, plan.left))
                rights.append(exchange.give(part, plan.right))
        return (*(torch.cat(p, -1) if p else None for p in (lefts, rights)), None, None, None)


class _There:
    """Moves factors to the ranks that compute with them, and products back."""

    def __init__(self, plan: ProductPlan, transport: Transport, dtype: torch.dtype) -> None:
        self.plan, self.transport = plan, transport
        self.accum = accumulate_dtype(dtype)

    def get(self, x: Tensor, move: Redistribution | None) -> Tensor:
        return x if move is None else fetch(x, _PAIR, move, self.transport)

    def give(self, x: Tensor, move: Redistribution | None) -> Tensor:
        if move is None:
            return x
        return collect(x, _PAIR, move, self.transport, self.plan.shape, self.accum)


def _groups(x: Tensor, count: int) -> tuple[Tensor, ...]:
    return x.chunk(min(count, x.shape[-1]), -1)


def _einsum(equation: str, left: Tensor, right: Tensor) -> Tensor:
    x, y, z = factors(equation)
    return torch.einsum(f"Z{x}C,Z{y}C->Z{z}C", left, right)


@outside_graphs
def boxed(x: Tensor, plan: Redistribution, shape: tuple[int, int], transport: Transport) -> Tensor:
    """This rank's box of a pair tensor (b x y c); backward adds all gradients of its entries.

    before  rank 0: rows 0-1      rank 1: rows 2-3
    after   both:   all rows               backward: rank 0 gets the sum of both ranks'
                                            gradients of rows 0-1, rank 1 that of rows 2-3
    """
    return _Boxed.apply(x, plan, shape, transport)


class _Boxed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: Redistribution, shape: tuple, transport: Transport
    ) -> Any:
        ctx.plan, ctx.shape, ctx.transport = plan, shape, transport
        return fetch(x, _PAIR, plan, transport)

    @staticmethod
    @once("a box of pairs")
    def backward(ctx: Any, grad: Tensor) -> Any:
        accum = accumulate_dtype(grad.dtype)
        collected = collect(grad, _PAIR, ctx.plan, ctx.transport, ctx.shape, accum)
        return collected, None, None, None
