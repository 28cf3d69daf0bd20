"""`weft.attention`: exact attention of tensors that lie on a mesh as a layout says.

Shapes, here and everywhere below: b batch, h query heads, g key/value heads, n queries, m keys,
d head dim, e value dim. Queries (b h n d), keys (b g m d), values (b g m e), outputs (b h n e),
logsumexp (b h n).
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from .engine import calls, executor
from .engine.calls import Call
from .errors import ShapeError
from .kernels import accumulate_dtype
from .layout import Layout
from .masks import Full, Mask
from .placements import BATCH, HEAD, SEQ, show

Length = int | tuple[int, int] | Mapping[str, int | tuple[int, int]]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    axis: str | Sequence[str],
    mask: Mask = Full(),  # noqa: B008 (frozen)
    scale: float | None = None,
    length: Length | None = None,
    return_lse: bool = False,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T + mask) v over the whole axis, wherever its tokens lie.

    q: (b, h, n, d); k: (b, g, m, d); v: (b, g, m, e), with h a multiple of g: local tensors or
    DTensors, as the layout says they rest. `axis` is the attended axis, or several attended
    jointly (flattened, the first one major). The batch holds everything that is not attended.
    scale: default d ** -0.5. softcap: logits become softcap * tanh(logits / softcap).
    sinks: (h,) logits of a key that every query sees and whose value is 0 (local heads).
    length: global length of the axis, where the ranks' chunks are not equal: an int, a pair
    (queries, keys), or a dict of these per axis. DTensors carry it.

    Returns the output, (b, h, n, e), lying like q; with `return_lse` also the logsumexp of every
    row, (b, h, n). A row that sees no key gives 0 and -inf. Differentiable, also through the
    logsumexp.

    Raises, on every rank and before anything is sent, `ShapeError` if shapes, dtypes, placements
    or masks do not fit or differ between ranks, `UnsupportedError` if no kernel is exact here.

    >>> q, k, v = torch.randn(3, 1, 2, 5, 4).unbind(0)
    >>> attention(q, k, v, Layout.single(), "tokens").shape
    torch.Size([1, 2, 5, 4])
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    if isinstance(q, DTensor):
        if length is not None:
            raise ShapeError("length is for local tensors; DTensors carry their global shape")
        return _attend_dtensors(
            q, k, v, layout, axes, mask, scale, return_lse, softcap, sinks, kernel
        )
    want_lse = return_lse or sinks is not None
    handle = _handle(layout, axes, mask, scale, _hashable(length), want_lse, softcap, kernel)
    out, lse, *_ = torch.ops.weft.attention(q, k, v, handle)
    if sinks is not None:
        out, lse = _add_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """One more key per head, of logit `sinks` and value 0: out * exp(lse - logaddexp(lse, s))."""
    if sinks.shape != lse.shape[1:2]:
        raise ShapeError(f"sinks must be ({lse.shape[1]},), one per local head: {sinks.shape}")
    logit = sinks.to(lse.dtype)[None, :, None]
    share = torch.sigmoid(lse - logit).unsqueeze(-1)
    return (out.to(lse.dtype) * share).to(out.dtype), torch.logaddexp(lse, logit)


@torch.compiler.assume_constant_result
def _handle(layout: Layout, axes, mask, scale, length, return_lse, softcap, kernel) -> str:
    return calls.register(layout, Call(axes, mask, scale, length, return_lse, softcap, kernel))


def _hashable(length: Length | None):
    return tuple(length.items()) if isinstance(length, Mapping) else length


# -- the op ---------------------------------------------------------------------------------------


@torch.library.custom_op("weft::attention", mutates_args=())
def _attention_op(q: Tensor, k: Tensor, v: Tensor, call: str) -> list[Tensor]:
    """out, lse, and where tensors were exchanged also q, k, v, out, lse in tile position."""
    made = calls.get(call).plan(q, k, v)
    out, lse, entry = executor.forward(made, calls.get(call).transport, q, k, v)
    exchanged = made.exchanges["q"] or made.exchanges["kv"]
    return _unaliased([out, lse, *(entry if exchanged else ())], (q, k, v))


def _unaliased(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous outputs that share no memory with inputs or each other, as ops must return."""
    taken, own = {t.untyped_storage().data_ptr() for t in inputs}, []
    for t in map(Tensor.contiguous, outputs):
        if t.untyped_storage().data_ptr() in taken:
            t = t.clone(memory_format=torch.contiguous_format)
        taken.add(t.untyped_storage().data_ptr())
        own.append(t)
    return own


@_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, call: str) -> list[Tensor]:
    made = calls.get(call).plan(q, k, v, agree=False)
    b, h, n, _ = q.shape
    wide = accumulate_dtype(q.dtype)
    out = q.new_empty((b, h, n, v.shape[3]))
    if not (made.exchanges["q"] or made.exchanges["kv"]):
        return [out, q.new_empty((b, h, n), dtype=wide)]
    rows, keys = made.entry_q, made.entry_kv
    eb, eh, en = (rows.size(i) for i in range(3))
    kb, kg, km = (keys.size(i) for i in range(3))
    lse_shape = (b, h, n) if made.problem.return_lse or not made.exchanges["q"] else (0,)
    return [
        out,
        q.new_empty(lse_shape, dtype=wide),
        q.new_empty((eb, eh, en, q.shape[3])),
        k.new_empty((kb, kg, km, k.shape[3])),
        v.new_empty((kb, kg, km, v.shape[3])),
        q.new_empty((eb, eh, en, v.shape[3])),
        q.new_empty((eb, eh, en), dtype=wide),
    ]


@torch.library.custom_op("weft::attention_backward", mutates_args=())
def _backward_op(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: str,
    rest: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    made = calls.get(call).plan_of(rest, q)
    transport = calls.get(call).transport
    grads = executor.backward(made, transport, dout, dlse, (q, k, v, out, lse))
    return tuple(_unaliased(grads, (dout, q, k, v, out, lse)))


@_backward_op.register_fake
def _(dout, dlse, q, k, v, out, lse, call, rest):
    b, h, n, g, m = rest
    d, e = q.shape[3], v.shape[3]
    return q.new_empty((b, h, n, d)), k.new_empty((b, g, m, d)), v.new_empty((b, g, m, e))


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, call = inputs
    ctx.call, ctx.keep = call, calls.get(call)
    ctx.rest = [*q.shape[:3], *k.shape[1:3]]
    out, lse, *entry = output
    ctx.save_for_backward(*(entry or (q, k, v, out, lse)))
    ctx.set_materialize_grads(False)


def _backward(ctx, grads):
    dout, dlse = grads[0], grads[1]
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None:
        dout = out.new_zeros((*ctx.rest[:3], out.shape[3]))
    calls.keep(ctx.call, ctx.keep)
    backward = torch.ops.weft.attention_backward
    return (*backward(dout, dlse, q, k, v, out, lse, ctx.call, ctx.rest), None)


_attention_op.register_autograd(_backward, setup_context=_setup_context)


# -- DTensors -------------------------------------------------------------------------------------


def rest_placements(layout: Layout, axes: Sequence[str], side: str) -> tuple:
    """DTensor placements of query ("query") or key and value ("key") at rest, per mesh dim."""
    return tuple(getattr(rule, side).rest for rule in layout.rules(tuple(axes)).values())


def _attend_dtensors(q, k, v, layout, axes, mask, scale, return_lse, softcap, sinks, kernel):
    if len(axes) > 1:
        raise ShapeError("DTensors of several axes attended jointly are ambiguous; pass local ones")
    wanted = {"q": rest_placements(layout, axes, "query"), "k": rest_placements(layout, axes, "key")}
    wanted["v"] = wanted["k"]
    for name, t in (("q", q), ("k", k), ("v", v)):
        _check_dtensor(layout, axes, name, t, wanted[name])
    locals_ = [
        t.to_local(grad_placements=wanted[name]) for name, t in (("q", q), ("k", k), ("v", v))
    ]
    result = attention(
        *locals_,
        layout,
        axes,
        mask,
        scale,
        {axes[0]: (q.shape[SEQ], k.shape[SEQ])},
        return_lse,
        softcap=softcap,
        sinks=sinks,
        kernel=kernel,
    )
    mesh, lie = layout.device_mesh, wanted["q"]
    out_shape = torch.Size((*q.shape[:3], v.shape[3]))
    if not return_lse:
        return _from_local(result, mesh, lie, out_shape)
    out, lse = result
    return _from_local(out, mesh, lie, out_shape), _from_local(lse, mesh, lie, q.shape[:3])


def _from_local(t: Tensor, mesh, placements, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(t, mesh, placements, run_check=False, shape=shape, stride=stride)


def _check_dtensor(layout: Layout, axes, name: str, t: Tensor, wanted: tuple) -> None:
    if not isinstance(t, DTensor):
        raise ShapeError(f"q is a DTensor and {name} is not: pass all three as one kind")
    if t.device_mesh != layout.device_mesh:
        raise ShapeError(f"{name} lies on {t.device_mesh}, but the layout on {layout.device_mesh}")
    if tuple(t.placements) != wanted:
        found, want = (", ".join(_say(p) for p in ps) for ps in (t.placements, wanted))
        raise ShapeError(
            f"{name} lies as ({found}) on mesh dims {tuple(layout.mesh)}, but attention over "
            f"{'+'.join(axes)} takes ({want}); redistribute it or change the layout"
        )


def _say(placement) -> str:
    known = isinstance(placement, Replicate) or placement in map(Shard, (BATCH, HEAD, SEQ))
    return show(placement) if known else str(placement)
