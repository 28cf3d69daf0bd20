"""Calls on one rank's own tokens that are one kernel call, given to autograd without the ops.

An op costs the CPU about 0.1 ms in each pass, which shows where a call is short: attention over the
columns of a table. What is computed is the same, by the same executor. Graphs, and modes that look
at ops, get the ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..private import dispatched
from . import calls, executor
from .merging import like_query


def attend_alone(
    bound: calls.BoundCall, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Output and logsumexp of a call that is one kernel call; None for any other call.

    Raises what `BoundCall.begin` raises. Calls with functions of the user's are not for here.
    """
    if bound.mesh_dims or not bound.plain or dispatched(q, k, v):
        return None
    plan = bound.plan_alone(q, k, v)
    if not (plan.forward.whole and plan.backward.whole) or plan.replicated_q or plan.replicated_kv:
        return None
    return _Alone.apply(q, k, v, bound, plan)


class _Alone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bound, plan):
        out, lse = executor.forward(plan, bound.transport, bound.call, q, k, v)
        out, lse = like_query(out, q), lse.contiguous()
        ctx.bound, ctx.plan = bound, plan
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        entry = q, k, v, out, _ = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        if torch.is_grad_enabled():  # a second derivative may be asked for, which the op refuses
            call = ctx.bound.call.scale, ctx.bound.call.softcap, calls.handle_of(ctx.bound)
            none = torch.empty(0, dtype=torch.int64)
            op = torch.ops.weft.attention_backward
            *grads, _ = op(dout, dlse, *entry, None, none, *call, calls.rest_shape(q, k, v))
        else:
            transport, call = ctx.bound.transport, ctx.bound.call
            *grads, _ = executor.backward(ctx.plan, transport, call, dout, dlse, entry)
        return *grads, None, None
