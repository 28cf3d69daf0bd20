"""The custom ops behind `weft.attention`: enter -> attention -> leave, each with its backward op.

enter and leave are there only where a rule trades one split for another (Ulysses, axial), and each
is the other's transpose. Ops take a call by its handle (`engine.calls`); their fake kernels tell
`torch.compile` the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ShapeError
from ..kernels import accumulate_dtype
from ..plan.plan import Plan
from ..private import traced
from . import calls, executor
from . import resharding as boundary


def _op(name: str):
    """A custom op that keeps its body, for `_shapes`."""

    def define(body):
        op = torch.library.custom_op(name, mutates_args=())(body)
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


@_op("weft::attention")
def _attention_op(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, call: str, rest: list[int]
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp in tile position, from tensors in tile position."""
    registered = calls.get(call)
    plan = registered.plan_of(rest, q) if registered.exchanged else registered.plan(q, k, v)
    _check_bias(plan, q, bias)
    result = executor.forward(plan, registered.transport, q, k, v, bias)
    if plan.forward.whole and not plan.replicated_q:  # as the kernel made them
        return tuple(map(Tensor.contiguous, result))
    return tuple(_unaliased(result, (q, k, v)))


@_shapes(_attention_op)
def _(q, k, v, bias, call, rest):
    b, h, n, _ = q.shape
    return q.new_empty((b, h, n, v.shape[3])), q.new_empty(
        (b, h, n), dtype=accumulate_dtype(q.dtype)
    )


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
    call: str,
    rest: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, and dbias (empty without a bias tensor)."""
    registered = calls.get(call)
    plan = registered.plan_of(rest, q)
    entry = (q, k, v, out, lse)
    *grads, dbias = executor.backward(plan, registered.transport, dout, dlse, entry, bias)
    grads.append(q.new_empty(0) if dbias is None else dbias)
    if plan.backward.whole and not plan.replicated_q and not plan.replicated_kv:
        return tuple(map(Tensor.contiguous, grads))
    return tuple(_unaliased(grads, (dout, *entry)))


@_shapes(_backward_op)
def _(dout, dlse, q, k, v, out, lse, bias, call, rest):
    dbias = q.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


def _setup_attention(ctx, inputs, output) -> None:
    q, k, v, bias, call, rest = inputs
    ctx.call, ctx.keep, ctx.rest = call, calls.get(call), rest
    ctx.save_for_backward(q, k, v, *output, bias)
    ctx.set_materialize_grads(False)


def _attention_gradient(ctx, dout, dlse):
    q, k, v, out, lse, bias = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    calls.keep(ctx.call, ctx.keep)
    op = torch.ops.weft.attention_backward
    *grads, dbias = op(dout, dlse, q, k, v, out, lse, bias, ctx.call, ctx.rest)
    return (*grads, None if bias is None else dbias, None, None)


_attention_op.register_autograd(_attention_gradient, setup_context=_setup_attention)


def _check_bias(plan: Plan, q: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        return
    rows, columns = plan.tile_shape()
    fits = bias.dim() == 4 and tuple(bias.shape[2:]) == (rows, columns)
    if not (fits and bias.shape[0] in (1, q.shape[0]) and bias.shape[1] in (1, q.shape[1])):
        raise ShapeError(
            f"the bias must be ({q.shape[0]} or 1, {q.shape[1]} or 1, {rows}, {columns}), the tile "
            f"of scores that the rank at {plan.coords} computes, found {tuple(bias.shape)}; cut it "
            "with weft.bias_tile"
        )


@_op("weft::enter")
def _enter_op(q: Tensor, k: Tensor, v: Tensor, call: str) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value from rest into tile position."""
    registered = calls.get(call)
    entered = boundary.enter(registered.plan(q, k, v), registered.transport, q, k, v)
    return tuple(_unaliased(entered, (q, k, v)))


@_shapes(_enter_op)
def _(q, k, v, call):
    plan = calls.get(call).plan(q, k, v, agree=False)
    rows, keys = plan.compute_q, plan.compute_kv
    shapes = ([s.size(i) for i in range(3)] for s in (rows, keys, keys))
    return tuple(t.new_empty((*shape, t.shape[3])) for t, shape in zip((q, k, v), shapes))


@_op("weft::enter_backward")
def _enter_backward_op(
    dq: Tensor, dk: Tensor, dv: Tensor, call: str, rest: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    registered = calls.get(call)
    grads = boundary.unenter(registered.plan_of(rest, dq), registered.transport, dq, dk, dv)
    return tuple(_unaliased(grads, (dq, dk, dv)))


@_shapes(_enter_backward_op)
def _(dq, dk, dv, call, rest):
    b, h, n, g, m, d, e = rest
    return dq.new_empty((b, h, n, d)), dk.new_empty((b, g, m, d)), dv.new_empty((b, g, m, e))


def _setup_enter(ctx, inputs, output) -> None:
    *tensors, call = inputs
    ctx.call, ctx.keep, ctx.rest = call, calls.get(call), calls.rest_shape(*tensors)


def _enter_gradient(ctx, dq, dk, dv):
    calls.keep(ctx.call, ctx.keep)
    return (*torch.ops.weft.enter_backward(dq, dk, dv, ctx.call, ctx.rest), None)


_enter_op.register_autograd(_enter_gradient, setup_context=_setup_enter)


@_op("weft::leave")
def _leave_op(out: Tensor, lse: Tensor, call: str, rest: list[int]) -> tuple[Tensor, Tensor]:
    """Output from tile position back to rest; the logsumexp too if it was asked for, else empty."""
    registered = calls.get(call)
    left = boundary.leave(registered.plan_of(rest, out), registered.transport, out, lse)
    return tuple(_unaliased(left, (out, lse)))


@_shapes(_leave_op)
def _(out, lse, call, rest):
    b, h, n, *_ = rest
    shape = (b, h, n) if calls.get(call).call.return_lse else (0,)
    return out.new_empty((b, h, n, out.shape[3])), lse.new_empty(shape)


@_op("weft::leave_backward")
def _leave_backward_op(
    dout: Tensor, dlse: Tensor, call: str, rest: list[int], entry: list[int]
) -> tuple[Tensor, Tensor]:
    registered = calls.get(call)
    plan = registered.plan_of(rest, dout)
    grads = boundary.unleave(plan, registered.transport, dout, dlse)
    return tuple(_unaliased(grads, (dout, dlse)))


@_shapes(_leave_backward_op)
def _(dout, dlse, call, rest, entry):
    lse = entry if calls.get(call).call.return_lse else [0]
    return dout.new_empty((*entry, dout.shape[3])), dlse.new_empty(lse)


def _setup_leave(ctx, inputs, output) -> None:
    out, _, call, rest = inputs
    ctx.call, ctx.keep, ctx.rest, ctx.entry = call, calls.get(call), rest, [*out.shape[:3]]


def _leave_gradient(ctx, dout, dlse):
    calls.keep(ctx.call, ctx.keep)
    op = torch.ops.weft.leave_backward
    dout, dlse = op(dout, dlse, ctx.call, ctx.rest, ctx.entry)
    return dout, dlse if ctx.keep.call.return_lse else None, None, None


_leave_op.register_autograd(_leave_gradient, setup_context=_setup_leave)


def _unaliased(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous outputs that share no memory with inputs or each other, as ops must return."""
    taken, own = {t.untyped_storage().data_ptr() for t in inputs}, []
    for t in map(Tensor.contiguous, outputs):
        if t.untyped_storage().data_ptr() in taken:
            t = t.clone(memory_format=torch.contiguous_format)
        taken.add(t.untyped_storage().data_ptr())
        own.append(t)
    return own
