"""The op behind `weft.attention`, and its backward: reshard, run the tile program, reshard back.

The op takes a call by its handle (`move.handles`). After its results it returns what its
backward pass needs: the numbers that ranks agreed on, by which it finds the plan, and,
where a rule trades one split for another (Ulysses, axial), the tensors in their compute placement.
So a policy of activation checkpointing that keeps this op's outputs repeats no communication. Fake
kernels tell `torch.compile` the shapes.

Graphs, profilers, and modes that look at ops get the ops; any other call runs the same functions
without them (`attend_eagerly`). In a call without communication that is exactly one kernel call, of
which torch differentiates the kernel itself and nobody asks for the logsumexp, torch's own node
does the backward pass, and Python only looks on (`attend_alone`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .._torch import dispatched, memory_of, profiling
from ..comm.channel import refused_everywhere
from ..comm.once_differentiable import final, once
from ..kernels import accumulate_dtype
from ..move import handles
from ..move.handles import differentiable, op, shapes_of
from ..plan.choices import NUMBER, row_moves
from ..plan.plan import Plan
from . import calls, checks, choices, executor, resharding
from .expand import Expander
from .merging import as_kept, by_token, empty_as_kept, empty_by_token, empty_like_query, like_query

Tensors = TypeVar("Tensors", bound=tuple[Tensor, ...])


def _agreed(bound: calls.BoundCall) -> Tensor:
    """The shape of the numbers saved for the backward pass; see `BoundCall.begin`."""
    ranks = bound.transport.size if bound.asks_batches else 0
    numbers = bool(bound.mesh_dims) + ranks + bound.has_functions
    return torch.empty(numbers, dtype=torch.int64, device="cpu")


@op("weft::attention")
def _attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    chosen: Tensor | None,
    scale: float | None,
    softcap: float | None,
    call: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, logsumexp, agreed numbers; q, k, v, output and logsumexp while computing; choices.

    What is kept is empty where it would be an input or an output, and the logsumexp at rest if it
    is resharded and nobody asked for it.
    """
    bound = handles.get(call).with_floats(scale, softcap)
    out, lse, agreed, entry, moved = _forward(bound, q, k, v, bias, chosen)
    kept = q.new_empty(0) if moved is None else moved
    q_inside, k_inside, v_inside, out_inside, lse_inside = entry
    if not bound.reach.reshards:
        empty, out_kept, lse_kept = _none(q, 3)
        if k_inside is k:
            k_kept, v_kept = _none(q, 2)
        else:
            k_kept, v_kept = _unaliased((k_inside, v_inside), (q, k, v, out, lse))
        return out, lse, agreed, empty, k_kept, v_kept, out_kept, lse_kept, kept
    q_inside, k_inside, v_inside = map(as_kept, (q_inside, k_inside, v_inside))
    out_inside = like_query(out_inside, q_inside)
    results = (out, lse, agreed, q_inside, k_inside, v_inside, out_inside, lse_inside, kept)
    return _unaliased(results, (q, k, v))


def _forward(
    bound: calls.BoundCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    chosen: Tensor | None,
    expander: Expander | None = None,
) -> tuple[Tensor, Tensor, Tensor, executor.Entry, Tensor | None]:
    """Output and logsumexp at rest, then what a backward pass needs.

    That is: the agreed numbers; q, k, v, output and logsumexp while computing; and the numbers of
    chosen keys of the rank's tile, None where they are those that rest here.
    """
    parameters = () if expander is None else expander.parameters
    plan, channel, agreed = bound.begin(q, k, v, bias, chosen, parameters)
    moved = None if chosen is None else choices.to_tile(plan, channel, chosen)
    chosen = chosen if moved is None else moved
    moves = bound.reach.reshards or plan.seen is not None
    if q.requires_grad or k.requires_grad or v.requires_grad:
        channel.sent = []  # else what is kept for the backward pass would split their memory
    inside = resharding.to_compute(plan, channel, q, k, v) if moves else (q, k, v)
    out, lse = executor.forward(plan, channel, bound.call, *inside, bias, chosen, expander)
    if bound.reach.reshards:
        out, lse = like_query(out, inside[0]), lse.contiguous()
        rest = resharding.to_rest(plan, channel, out, lse)
        channel.finish()
        rest_out, rest_lse = (_apart(t.contiguous(), (q, k, v, out, lse)) for t in rest)
        return rest_out, rest_lse, agreed, (*inside, out, lse), moved
    channel.finish()
    if not plan.forward.whole or plan.replicated.query or moves:
        out, lse = (_apart(t, (q, k, v)) for t in (out, lse))
    out, lse = like_query(out, q), lse.contiguous()
    return out, lse, agreed, (*inside, out, lse), moved


@shapes_of(_attention_op)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: object,
    chosen: Tensor | None,
    scale: object,
    softcap: object,
    call: str,
) -> tuple[Tensor, ...]:
    bound = handles.get(call)
    kept = q.new_empty(0) if chosen is None else _moved_shape(bound, q, k, v, chosen)
    (b, h, n, _), e = q.shape, v.shape[3]
    dtype = accumulate_dtype(q.dtype)
    inside: list[Tensor] = []
    if bound.reach.reshards or bound.reach.seen:
        plan = bound.shapes(q, k, v)
        sides = (plan.compute.query, plan.compute.key, plan.compute.key)
        shapes = ([s.size(i) for i in range(3)] for s in sides)
        if bound.reach.reshards or plan.seen is not None:
            make = empty_as_kept if bound.reach.reshards else Tensor.new_empty
            inside = [make(t, (*shape, t.shape[3])) for t, shape in zip((q, k, v), shapes)]
    if not bound.reach.reshards:
        out, lse = empty_like_query(q, (b, h, n, e)), q.new_empty((b, h, n), dtype=dtype)
        came = inside[1:] or _none(q, 2)
        return out, lse, _agreed(bound), q.new_empty(0), *came, *_none(q, 2), kept
    out = empty_like_query(inside[0], (*inside[0].shape[:3], e))
    lse = q.new_empty(out.shape[:3], dtype=dtype)
    rest = q.new_empty((b, h, n) if bound.call.return_lse else (0,), dtype=dtype)
    return q.new_empty((b, h, n, e)), rest, _agreed(bound), *inside, out, lse, kept


@op("weft::attention_backward")
def _backward_op(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    chosen: Tensor | None,
    agreed: Tensor,
    scale: float | None,
    softcap: float | None,
    call: str,
    rest: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv at rest, and dbias (empty without a bias tensor).

    `dout` and `dlse` are at rest; all other tensors in their compute placement.
    """
    bound = handles.get(call).with_floats(scale, softcap)
    entry = (q, k, v, out, lse)
    dq, dk, dv, learned = _backward(bound, dout, dlse, entry, bias, chosen, agreed, rest)
    if bound.reach.reshards:
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    dbias = q.new_empty(0) if learned is None else learned
    return _unaliased((dq, dk, dv, dbias), (dout, *entry))


def _backward(
    bound: calls.BoundCall,
    dout: Tensor | None,
    dlse: Tensor | None,
    entry: executor.Entry,
    bias: Tensor | None,
    chosen: Tensor | None,
    agreed: Tensor,
    rest: list[int],
    expander: Expander | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv at rest, and dbias; gradients above that are None are 0."""
    q, reshards = entry[0], bound.reach.reshards
    b, h, n, *_, e = rest
    dout = q.new_zeros((b, h, n, e)) if dout is None else dout
    if dlse is None and reshards and bound.call.return_lse:
        dlse = entry[4].new_zeros((b, h, n))  # it moves on every rank, whoever uses it
    if expander is not None:
        with refused_everywhere(bound.refuse):
            expander.begin_backward()
    plan = bound.plan_of(rest, q, agreed)
    channel = bound.begin_backward(plan, agreed)
    above: tuple[Tensor, Tensor | None] = dout, dlse
    if reshards:
        above = resharding.to_rest_adjoint(plan, channel, dout, dlse)
    dq, dk, dv, dbias = executor.backward(
        plan, channel, bound.call, *above, entry, bias, chosen, expander
    )
    dbias = None if dbias is None else dbias.contiguous()
    moves = reshards or plan.seen is not None
    if moves:
        dq, dk, dv = resharding.to_compute_adjoint(plan, channel, dq, dk, dv)
    channel.finish()
    if not plan.backward.whole or any(plan.replicated) or moves:
        dq, dk, dv = (_apart(t, (dout, *entry)) for t in (dq, dk, dv))
    if not reshards:
        dq, dk, dv = map(by_token, (dq, dk, dv))
    return dq, dk, dv, dbias


@shapes_of(_backward_op)
def _(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    chosen: Tensor | None,
    agreed: Tensor,
    scale: float | None,
    softcap: float | None,
    call: str,
    rest: list[int],
) -> tuple[Tensor, ...]:
    dbias = q.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    b, h, n, g, m, d, e = rest
    shapes = ((b, h, n, d), (b, g, m, d), (b, g, m, e))
    if handles.get(call).reach.reshards:
        return (*(q.new_empty(shape) for shape in shapes), dbias)
    return (*(empty_by_token(q, shape) for shape in shapes), dbias)


def _setup_attention(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    q, k, v, bias, chosen, *ctx.call = inputs
    out, lse, agreed, *kept, moved = output
    ctx.keep, ctx.rest = handles.get(ctx.call[-1]), calls.rest_shape(q, k, v)
    # Where a tensor is computed with as it rests, an empty one stands for it.
    entry = (t if t.dim() > 1 else rest for t, rest in zip(kept, (q, k, v, out, lse)))
    ctx.save_for_backward(*entry, bias, moved if moved.dim() == 4 else chosen, agreed)
    ctx.set_materialize_grads(False)


def _attention_gradient(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    *entry, bias, chosen, agreed = ctx.saved_tensors
    b, h, n, *_, e = ctx.rest
    if dout is None:
        dout = entry[0].new_zeros((b, h, n, e))
    handles.keep(ctx.call[-1], ctx.keep)
    op = torch.ops.weft.attention_backward
    *grads, dbias = op(dout, dlse, *entry, bias, chosen, agreed, *ctx.call, ctx.rest)
    return (*grads, None if bias is None else dbias, None, None, None, None)


differentiable(_attention_op, _backward_op, _setup_attention, _attention_gradient, "weft.attention")


class _Attention(torch.autograd.Function):
    """The same without the ops, which cost the CPU about 0.1 ms; latents are expanded within it."""

    @staticmethod
    def forward(
        ctx: Any,
        bound: calls.BoundCall,
        expander: Expander | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        chosen: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        out, lse, agreed, entry, moved = _forward(bound, q, k, v, bias, chosen, expander)
        ctx.bound, ctx.expander, ctx.rest = bound, expander, bound.rest_shape(q, k, v)
        ctx.save_for_backward(*entry, bias, chosen if moved is None else moved, agreed)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once("weft.attention", linear=False)
    def backward(
        ctx: Any, saved: tuple, dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *entry, bias, chosen, agreed = saved
        kept = cast(executor.Entry, tuple(entry)), bias, chosen, agreed
        gradients = _backward(ctx.bound, dout, dlse, *kept, ctx.rest, ctx.expander)
        of_parameters = () if ctx.expander is None else ctx.expander.gradients
        return None, None, *gradients, None, *of_parameters


def attend_eagerly(
    bound: calls.BoundCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    chosen: Tensor | None,
    expander: Expander | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of a call that is not in a graph.

    With an `expander` k and v are latents, expanded where they arrive, which no op does.
    """
    tensors = q, k, v, bias, chosen
    if expander is not None:
        return _Attention.apply(bound, expander, *tensors, *expander.parameters)
    alone = attend_alone(bound, q, k, v)
    if alone is not None:
        return alone
    if profiling() or dispatched(*(t for t in tensors if t is not None)):
        with refused_everywhere(bound.refuse):
            bound.rest_shape(q, k, v)  # an op with a tensor on "meta" makes shapes alone
            checks.check_place("the bias", bias, q)
            checks.check_place("the choice", chosen, q)
        given = bound.call.scale, bound.call.softcap, calls.handle_of(bound)
        return torch.ops.weft.attention(*tensors, *given)[:2]
    return _Attention.apply(bound, None, *tensors)


def _moved_shape(bound: calls.BoundCall, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
    """The numbers of chosen keys of the rank's tile, by their shape."""
    plan = bound.shapes(q, k, v)
    if not row_moves(plan):
        return q.new_empty(0)
    b, r, _, count = chosen.shape
    return chosen.new_empty((b, r, plan.tile_shape()[0], count), dtype=NUMBER)


def _none(like: Tensor, count: int) -> Sequence[Tensor]:
    return [like.new_empty(0) for _ in range(count)]


def _unaliased(outputs: Tensors, inputs: Sequence[Tensor]) -> Tensors:
    """Outputs that share no memory with inputs or each other, as ops must return."""
    taken = {memory_of(t)[0] for t in inputs}
    local = []
    for t in outputs:
        t = t.clone() if memory_of(t)[0] in taken else t
        taken.add(memory_of(t)[0])
        local.append(t)
    return cast(Tensors, tuple(local))


def _apart(t: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """A tensor that shares no memory with inputs."""
    return t.clone() if memory_of(t)[0] in {memory_of(x)[0] for x in inputs} else t


def attend_alone(
    bound: calls.BoundCall, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Output and logsumexp of a call that is one kernel call, which torch differentiates itself.

    None for any other call.
    """
    if bound.mesh_dims or not bound.plain or dispatched(q, k, v):
        return None
    if bound.call.return_lse or profiling():
        return None
    plan = bound.plan_alone(q, k, v)
    whole = plan.forward.whole
    if whole is None or plan.backward.whole is None or any(plan.replicated):
        return None
    both = plan.kernel(whole.kind).differentiable(q, k, v, executor.view_of(plan, whole))
    return None if both is None else (like_query(_observed(both[0], bound, plan), q), both[1])


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
