"""The ops behind `weft.attention`: to_compute -> attention -> to_rest, each with its backward.

to_compute and to_rest are there only where a rule trades one split for another (Ulysses, axial),
and each is the other's adjoint. Ops take a call by its handle (`run.calls`); what a pass learned
from other ranks goes from op to op as a tensor, so that a backward pass finds the plan of its
own forward pass. Fake kernels tell `torch.compile` the shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .._torch import traced
from ..comm.once_differentiable import second_derivative
from ..kernels import accumulate_dtype
from . import calls, executor, resharding
from .merging import by_token, empty_by_token, empty_like_query, like_query

#: Ranks vote on the CPU in every pass, which a replayed CUDA graph would leave out.
_TAGS = tuple(tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None)


def _op(name: str):
    """A custom op that keeps its body, for `_shapes`."""

    def define(body):
        op = torch.library.custom_op(name, mutates_args=(), tags=_TAGS)(body)
        op.body = body
        return op

    return define


def _shapes(op):
    """Registers what tracing and meta tensors get of an op: empty tensors of the right shapes.

    Meta tensors on torch's fake process group go through the op itself, so that it is counted.
    """

    def register(shapes):
        @op.register_fake
        def fake(*args):
            handle = next(arg for arg in args if isinstance(arg, str))
            counted = args[0].is_meta and not traced(args[0]) and calls.get(handle).transport.fake
            return (op.body if counted else shapes)(*args)

    return register


def _once(op) -> None:
    """A backward op has no derivative of its own."""

    def refuse(ctx, *_):
        raise second_derivative("weft.attention")

    op.register_autograd(refuse, setup_context=lambda ctx, inputs, output: None)


def _agreed(bound: calls.BoundCall) -> Tensor:
    """What a forward pass hands on to its backward pass, in shape; see `BoundCall.begin`."""
    ranks = bound.transport.size if bound.asks_batches else 0
    numbers = bool(bound.mesh_dims) + ranks + bound.has_functions
    return torch.empty(numbers, dtype=torch.int64, device="cpu")


@_op("weft::attention")
def _attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    agreed: Tensor | None,
    scale: float | None,
    softcap: float | None,
    call: str,
    rest: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, logsumexp and what ranks agreed on, from tensors in their compute placement.

    Args:
        agreed: what `to_compute` returned, if it ran.
    """
    bound = calls.get(call).with_floats(scale, softcap)
    if agreed is None:
        plan, channel, found = bound.begin(q, k, v, bias)
    else:
        plan, found = bound.plan_of(rest, q, agreed), agreed.new_empty(0)
        channel = bound.resume("attention", agreed)
    result = executor.forward(plan, channel, bound.call, q, k, v, bias)
    channel.finish()
    if not plan.forward.whole or plan.replicated_q:
        result = _unaliased(result, (q, k, v))
    return like_query(result[0], q), result[1].contiguous(), found


@_shapes(_attention_op)
def _(q, k, v, bias, agreed, scale, softcap, call, rest):
    b, h, n, _ = q.shape
    lse = q.new_empty((b, h, n), dtype=accumulate_dtype(q.dtype))
    found = _agreed(calls.get(call)) if agreed is None else agreed.new_empty(0)
    return empty_like_query(q, (b, h, n, v.shape[3])), lse, found


@_op("weft::attention_backward")
def _backward_op(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    agreed: Tensor,
    scale: float | None,
    softcap: float | None,
    call: str,
    rest: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, and dbias (empty without a bias tensor)."""
    bound = calls.get(call).with_floats(scale, softcap)
    plan = bound.plan_of(rest, q, agreed)
    if bound.reach.reshards:
        channel = bound.resume("attention", agreed, backward=True)
    else:
        channel = bound.begin_backward(q, rest, agreed)
    entry = (q, k, v, out, lse)
    *grads, dbias = executor.backward(plan, channel, bound.call, dout, dlse, entry, bias)
    channel.finish()
    dbias = q.new_empty(0) if dbias is None else dbias.contiguous()
    if not plan.backward.whole or plan.replicated_q or plan.replicated_kv:
        *grads, dbias = _unaliased((*grads, dbias), (dout, *entry))
    return (*map(by_token, grads), dbias)


@_shapes(_backward_op)
def _(dout, dlse, q, k, v, out, lse, bias, agreed, scale, softcap, call, rest):
    dbias = q.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return (*(empty_by_token(t, t.shape) for t in (q, k, v)), dbias)


def _setup_attention(ctx, inputs, output) -> None:
    q, k, v, bias, agreed, *ctx.call, ctx.rest = inputs
    out, lse, found = output
    ctx.keep = calls.get(ctx.call[-1])
    ctx.save_for_backward(q, k, v, out, lse, bias, found if agreed is None else agreed)
    ctx.set_materialize_grads(False)


def _attention_gradient(ctx, dout, dlse, _):
    q, k, v, out, lse, bias, agreed = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    calls.keep(ctx.call[-1], ctx.keep)
    op = torch.ops.weft.attention_backward
    *grads, dbias = op(dout, dlse, q, k, v, out, lse, bias, agreed, *ctx.call, ctx.rest)
    return (*grads, None if bias is None else dbias, None, None, None, None, None)


_attention_op.register_autograd(_attention_gradient, setup_context=_setup_attention)


@_op("weft::to_compute")
def _to_compute_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float | None,
    softcap: float | None,
    call: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key and value from rest into their compute placement, and what ranks agreed on.

    Args:
        bias: only looked at, so that a wrong one is refused before anything is sent.
    """
    bound = calls.get(call).with_floats(scale, softcap)
    plan, channel, agreed = bound.begin(q, k, v, bias)
    moved = resharding.to_compute(plan, channel, q, k, v)
    channel.finish()
    return (*_unaliased(map(Tensor.contiguous, moved), (q, k, v)), agreed)


@_shapes(_to_compute_op)
def _(q, k, v, bias, scale, softcap, call):
    bound = calls.get(call)
    plan = bound.shapes(q, k, v)
    sides = (plan.compute_q, plan.compute_kv, plan.compute_kv)
    shapes = ([s.size(i) for i in range(3)] for s in sides)
    moved = (t.new_empty((*shape, t.shape[3])) for t, shape in zip((q, k, v), shapes))
    return (*moved, _agreed(bound))


@_op("weft::to_compute_backward")
def _to_compute_backward_op(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    agreed: Tensor,
    scale: float | None,
    softcap: float | None,
    call: str,
    rest: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    bound = calls.get(call).with_floats(scale, softcap)
    plan, channel = bound.plan_of(rest, dq, agreed), bound.resume("to rest", agreed, backward=True)
    grads = resharding.to_compute_adjoint(plan, channel, dq, dk, dv)
    return tuple(_unaliased(map(Tensor.contiguous, grads), (dq, dk, dv)))


@_shapes(_to_compute_backward_op)
def _(dq, dk, dv, agreed, scale, softcap, call, rest):
    b, h, n, g, m, d, e = rest
    return dq.new_empty((b, h, n, d)), dk.new_empty((b, g, m, d)), dv.new_empty((b, g, m, e))


def _setup_to_compute(ctx, inputs, output) -> None:
    q, k, v, _, *ctx.call = inputs
    ctx.keep, ctx.rest = calls.get(ctx.call[-1]), calls.rest_shape(q, k, v)
    ctx.save_for_backward(output[3])


def _to_compute_gradient(ctx, dq, dk, dv, _):
    calls.keep(ctx.call[-1], ctx.keep)
    (agreed,) = ctx.saved_tensors
    op = torch.ops.weft.to_compute_backward
    return (*op(dq, dk, dv, agreed, *ctx.call, ctx.rest), None, None, None, None)


_to_compute_op.register_autograd(_to_compute_gradient, setup_context=_setup_to_compute)


@_op("weft::to_rest")
def _to_rest_op(
    out: Tensor,
    lse: Tensor,
    agreed: Tensor,
    scale: float | None,
    softcap: float | None,
    call: str,
    rest: list[int],
) -> tuple[Tensor, Tensor]:
    """Output from its compute placement back to rest; the logsumexp if asked for, else empty."""
    bound = calls.get(call).with_floats(scale, softcap)
    plan, channel = bound.plan_of(rest, out, agreed), bound.resume("to rest", agreed)
    moved = resharding.to_rest(plan, channel, out, lse)
    return tuple(_unaliased(map(Tensor.contiguous, moved), (out, lse)))


@_shapes(_to_rest_op)
def _(out, lse, agreed, scale, softcap, call, rest):
    b, h, n, *_ = rest
    shape = (b, h, n) if calls.get(call).call.return_lse else (0,)
    return out.new_empty((b, h, n, out.shape[3])), lse.new_empty(shape)


@_op("weft::to_rest_backward")
def _to_rest_backward_op(
    dout: Tensor,
    dlse: Tensor,
    agreed: Tensor,
    scale: float | None,
    softcap: float | None,
    call: str,
    rest: list[int],
    entry: list[int],
) -> tuple[Tensor, Tensor]:
    bound = calls.get(call).with_floats(scale, softcap)
    plan, channel = bound.plan_of(rest, dout, agreed), bound.begin_backward(dout, rest, agreed)
    grads = resharding.to_rest_adjoint(plan, channel, dout, dlse)
    channel.finish()
    return tuple(_unaliased(map(Tensor.contiguous, grads), (dout, dlse)))


@_shapes(_to_rest_backward_op)
def _(dout, dlse, agreed, scale, softcap, call, rest, entry):
    lse = entry if calls.get(call).call.return_lse else [0]
    return dout.new_empty((*entry, dout.shape[3])), dlse.new_empty(lse)


def _setup_to_rest(ctx, inputs, output) -> None:
    out, _, agreed, *ctx.call, ctx.rest = inputs
    ctx.keep, ctx.entry = calls.get(ctx.call[-1]), [*out.shape[:3]]
    ctx.save_for_backward(agreed)


def _to_rest_gradient(ctx, dout, dlse):
    calls.keep(ctx.call[-1], ctx.keep)
    (agreed,) = ctx.saved_tensors
    op = torch.ops.weft.to_rest_backward
    dout, dlse = op(dout, dlse, agreed, *ctx.call, ctx.rest, ctx.entry)
    dlse = dlse if ctx.keep.call.return_lse else None
    return dout, dlse, None, None, None, None, None


_to_rest_op.register_autograd(_to_rest_gradient, setup_context=_setup_to_rest)

for _backward in (_backward_op, _to_compute_backward_op, _to_rest_backward_op):
    _once(_backward)


def _unaliased(outputs: Iterable[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs that share no memory with inputs or each other, as ops must return."""
    taken, own = {t.untyped_storage().data_ptr() for t in inputs}, []
    for t in outputs:
        if t.untyped_storage().data_ptr() in taken:
            t = t.clone()
        taken.add(t.untyped_storage().data_ptr())
        own.append(t)
    return own
