"""Fast path: calls without communication that are exactly one kernel call.

An op costs the CPU about 0.1 ms in each pass, which shows where a call is short: attention over the
columns of a table. What is computed is the same, by the same kernel. Where torch differentiates
the kernel itself and nobody asks for the logsumexp, its own node does the backward pass, and Python
only looks on. Graphs, and modes that look at ops, get the ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import dispatched, profiling
from ..comm.once_differentiable import final, once
from ..plan.plan import Plan
from . import calls, executor
from .merging import like_query


def attend_alone(
    bound: calls.BoundCall, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Output and logsumexp of a call that is one kernel call; None for any other call.

    The logsumexp can be differentiated if the call wants it.

    Raises as `BoundCall.begin` does. Calls with the user's functions take the op.
    """
    if bound.mesh_dims or not bound.plain or dispatched(q, k, v):
        return None
    plan = bound.plan_alone(q, k, v)
    if not (plan.forward.whole and plan.backward.whole) or any(plan.replicated):
        return None
    if not (bound.call.return_lse or profiling()):
        view = executor.view_of(plan, plan.forward.whole)
        both = plan.kernel(False).differentiable(q, k, v, view)
        if both is not None:
            return like_query(_observed(both[0], bound, plan), q), both[1]
    return _Alone.apply(q, k, v, bound, plan)


def _observed(out: Tensor, bound: calls.BoundCall, plan: Plan) -> Tensor:
    """An output that torch differentiates: its passes are noted, and its gradients are final."""
    transport = bound.transport
    transport.watches.note(plan, False)

    def after(gradients: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...] | None:
        transport.watches.note(plan, True)
        if not torch.is_grad_enabled():
            return None
        return final("weft.attention", gradients, gradients)

    if out.grad_fn is not None:
        out.grad_fn.register_hook(after)
    return out


class _Alone(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bound: calls.BoundCall, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        out, lse = executor.forward(plan, bound.transport, bound.call, q, k, v)
        out, lse = like_query(out, q), lse.contiguous()
        ctx.bound, ctx.plan = bound, plan
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once("weft.attention", linear=False)
    def backward(
        ctx: Any, entry: executor.Entry, dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        bound = ctx.bound
        dout = torch.zeros_like(entry[3]) if dout is None else dout
        *grads, _ = executor.backward(ctx.plan, bound.transport, bound.call, dout, dlse, entry)
        return *grads, None, None
