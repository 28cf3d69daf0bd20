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

from .engine import executor
from .engine.plan import Plan, Problem
from .errors import ShapeError
from .kernels import accumulate_dtype
from .layout import Layout
from .masks import Full, Mask
from .placements import BATCH, HEAD, SEQ, show
from .transport import Transport

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
    _check_local(q, k, v)
    lengths = _lengths(layout, axes, q.shape[2], k.shape[2], length)
    problem = Problem(
        axes,
        lengths,
        q.shape[0],
        q.shape[1],
        k.shape[1],
        q.shape[3],
        v.shape[3],
        q.dtype,
        q.device.type,
        mask,
        scale,
        softcap,
        return_lse or sinks is not None,
        kernel,
    )
    handle = _PLANS.handle(layout, problem, (q.shape[2], k.shape[2]))
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


# -- checks ---------------------------------------------------------------------------------------


def _check_local(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if isinstance(t, DTensor):
            raise ShapeError(f"{name} is a DTensor and q is not: pass all three as one kind")
        if t.dim() != 4:
            raise ShapeError(f"{name} must be (batch, heads, tokens, dim), found {tuple(t.shape)}")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ShapeError(f"q, k, v need one floating dtype, found {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ShapeError(f"q, k, v need one device, found {q.device}, {k.device}, {v.device}")
    if k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3] or q.shape[0] != k.shape[0]:
        raise ShapeError(f"q (b h n d), k (b g m d), v (b g m e) do not fit together: {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(f"query heads must be a multiple of key/value heads: {shapes}")


def _lengths(
    layout: Layout, axes: tuple[str, ...], n: int, m: int, length: Length | None
) -> tuple[tuple[int, int], ...]:
    """(queries, keys) per attended axis; without `length`, equal chunks on all ranks."""
    if isinstance(length, Mapping):
        missing = [a for a in axes if a not in length]
        if missing:
            raise ShapeError(f"length has no entry for axis {missing[0]!r}: {dict(length)}")
        return tuple(_pair(length[a]) for a in axes)
    if len(axes) > 1:
        raise ShapeError(f"axes {axes} attended jointly need length={{axis: length, ...}}")
    if length is not None:
        return (_pair(length),)
    rules = layout.rules(axes)
    split = [d for d in layout.shard_dims(axes[0])]
    keys = [d for d in split if rules[d].key.rest == Shard(SEQ)]
    return ((n * _ways(layout, split), m * _ways(layout, keys)),)


def _pair(length: int | tuple[int, int]) -> tuple[int, int]:
    return (length, length) if isinstance(length, int) else (int(length[0]), int(length[1]))


def _ways(layout: Layout, dims: Sequence[str]) -> int:
    ways = 1
    for d in dims:
        ways *= layout.mesh[d]
    return ways


def _check_lengths(plan: Plan, n: int, m: int) -> None:
    expected_n = plan.q_flow.state(0, plan.coords).size(SEQ)
    expected_m = plan.kv_flow.state(0, plan.coords).size(SEQ)
    for what, found, expected in (("queries", n, expected_n), ("keys", m, expected_m)):
        if found != expected:
            whole = plan.problem.n if what == "queries" else plan.problem.m
            raise ShapeError(
                f"rank at {plan.coords} has {found} local {what} of axis "
                f"{'+'.join(plan.problem.axes)}, but its chunk of a length of {whole} holds "
                f"{expected}; shard with layout.shard, and pass length= where chunks are uneven"
            )


# -- plans by handle ------------------------------------------------------------------------------


class _Plans:
    """Plans by handle. A custom op takes tensors and plain values, so it is given a name.

    (torch names process groups the same way.) The least recently used plans are dropped, and an
    op keeps the plan of its own backward alive through its context.
    """

    LIMIT = 512

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: OrderedDict[tuple, str] = OrderedDict()
        self._plans: OrderedDict[str, tuple[Plan, Transport]] = OrderedDict()
        self._count = itertools.count()

    def handle(self, layout: Layout, problem: Problem, local: tuple[int, int]) -> str:
        transport = layout.bound
        key = (id(transport), problem, local)
        with self._lock:
            handle = self._handles.get(key)
            if handle is not None and self._plans[handle][1] is transport:
                self._plans.move_to_end(handle)
                return handle
        plan = Plan(layout, problem, transport.coords)
        problem.mask.check(problem.n, problem.m, problem.batch)
        _check_lengths(plan, *local)
        with self._lock:
            handle = f"plan{next(self._count)}"
            self._handles[key] = handle
            self._plans[handle] = (plan, transport)
            if len(self._plans) > self.LIMIT:
                old, _ = self._plans.popitem(last=False)
                self._handles = OrderedDict((k, h) for k, h in self._handles.items() if h != old)
        return handle

    def get(self, handle: str) -> tuple[Plan, Transport]:
        return self._plans[handle]


_PLANS = _Plans()


# -- the op ---------------------------------------------------------------------------------------


@torch.library.custom_op("weft::attention", mutates_args=())
def _attention_op(q: Tensor, k: Tensor, v: Tensor, plan: str) -> list[Tensor]:
    """out, lse, and where tensors were exchanged also q, k, v, out, lse in tile position."""
    made, transport = _PLANS.get(plan)
    out, lse, entry = executor.forward(made, transport, q, k, v)
    exchanged = made.exchanges["q"] or made.exchanges["kv"]
    return _unaliased([out, lse, *(entry if exchanged else ())], (q, k, v))


def _unaliased(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs that share no memory with inputs or with each other, as custom ops must return."""
    taken, own = {t.untyped_storage().data_ptr() for t in inputs}, []
    for t in outputs:
        if t.untyped_storage().data_ptr() in taken:
            t = t.clone(memory_format=torch.contiguous_format)
        taken.add(t.untyped_storage().data_ptr())
        own.append(t)
    return own


@_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, plan: str) -> list[Tensor]:
    made, _ = _PLANS.get(plan)
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
    plan: str,
) -> tuple[Tensor, Tensor, Tensor]:
    made, transport = _PLANS.get(plan)
    grads = executor.backward(made, transport, dout, dlse, (q, k, v, out, lse))
    return tuple(_unaliased([t.contiguous() for t in grads], (dout, q, k, v, out, lse)))


@_backward_op.register_fake
def _(dout, dlse, q, k, v, out, lse, plan):
    made, _ = _PLANS.get(plan)
    qs, ks = (f.state(0, made.coords) for f in (made.q_flow, made.kv_flow))
    heads = ks.heads // made.kv_repeat
    return (
        q.new_empty((qs.batch, qs.heads, qs.size(SEQ), q.shape[3])),
        k.new_empty((ks.batch, heads, ks.size(SEQ), k.shape[3])),
        v.new_empty((ks.batch, heads, ks.size(SEQ), v.shape[3])),
    )


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, plan = inputs
    ctx.plan, ctx.kept = plan, _PLANS.get(plan)
    out, lse, *entry = output
    ctx.save_for_backward(*(entry or (q, k, v, out, lse)))
    ctx.set_materialize_grads(False)


def _backward(ctx, grads):
    dout, dlse = grads[0], grads[1]
    q, k, v, out, lse = ctx.saved_tensors
    made = ctx.kept[0]
    if dout is None:
        rest = made.q_flow.state(0, made.coords)
        dout = out.new_zeros((rest.batch, rest.heads, rest.size(SEQ), out.shape[3]))
    _PLANS._plans.setdefault(ctx.plan, ctx.kept)
    return (*torch.ops.weft.attention_backward(dout, dlse, q, k, v, out, lse, ctx.plan), None)


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


