"""The functions that transformers' recurrent layers call, over tokens that are split over ranks.

A recurrence over a piece of tokens is an affine map of its incoming state, `S_out = A S_in + b`,
with outputs `o = o0 + R S_in`. Each function here calls the stock one on this rank's pieces, brings
their maps to the ranks after it, and completes the outputs by the state that came in:

    function                    state S               A                     how A and R are had
    gated delta rule, KDA       (b, h, K, V)          (b, h, K, K)          the value widened by K
    Mamba-2                     (b, h, P, N)          a scalar per head     exp of the summed decay
    Mamba-1                     (b, d, N)             elementwise           the same
    short convolution           -                     -                     columns to the left

Where `[carry]` names Ulysses, the scan (not the convolution) runs over more of the axis with fewer
heads. Where it names a strategy that hands states on, `state_chain`, there are no maps: the stock
function begins with the true state. Mamba-1 takes none, so a chain of it is refused. A call that
fills a cache runs by maps on every layout, as they give the state after the last token, too.

The stock function may be the torch fallback, fla's, mamba-ssm's or a kernel of the hub. Where it
rounds its outputs to half precision, `o0 + R S_in` would be rounded twice: it is called again, from
the state that came in.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.errors import UnsupportedError
from weft.layout import Layout
from weft_axes.carry.by_heads import traded
from weft_axes.carry.pieces import Apply, LocalPieces

from ..chunked import on_chunks
from .running import now, running
from .shapes import SHAPES

#: Numbers of Mamba-1's states, one per token, that exist at once.
_STATES = 1 << 22


def recurrence(label: str) -> LocalPieces | None:
    """The recurrence of the call that this thread is in; None if it is not split."""
    call = now(label)
    return None if call.whole else call.state


def of_chunks(make: Callable[[Callable], Callable]) -> Callable:
    """The same stand-in of a function, which takes fields and gives some."""

    def on_fields(stock: Callable) -> Callable:
        run = make(stock)

        @functools.wraps(run)
        def over(*args: Any, **kwargs: Any) -> Any:
            call = running()
            if call is None or call.whole:
                return run(*args, **kwargs)
            return on_chunks(run, call.axis, args, kwargs)

        return over

    return on_fields


def of_device(stock: Callable) -> Callable:
    """A function of transformers, on a CPU its own code whatever is installed.

    transformers 5.24 takes fla's kernels wherever fla is installed, and Triton runs on no CPU. On
    meta tensors, which have shapes alone, a loop over tokens gives way to its shapes.
    """
    local = inspect.unwrap(stock)
    shapes = SHAPES.get(getattr(local, "__name__", ""))
    if local is stock and shapes is None:
        return stock
    names = inspect.signature(local).parameters

    @functools.wraps(stock)
    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.is_meta and shapes is not None:
            return shapes(x, *args, **kwargs)
        if x.device.type != "cpu" or local is stock:
            return stock(x, *args, **kwargs)
        return local(x, *args, **{name: v for name, v in kwargs.items() if name in names})

    return run


def completed(
    pieces: LocalPieces,
    dim: int,
    parts: Sequence[Any],
    outs: Sequence[Tensor],
    maps: Sequence[tuple[Tensor, Tensor]],
    apply: Apply,
    complete: Callable[[Any, Tensor, Tensor], Tensor],
    last: bool = False,
) -> Any:
    """Outputs along `dim`, with what the states that enter this rank's pieces add to them.

    `outs` are those of pieces from no state, and `maps` their maps (A, b). `complete(part, out, S)`
    is the output of a piece whose entering state is S. With `last` also the state after the row's
    last token, on the rank that has this token, and zeros on the others.
    """
    states = pieces.states(maps, apply)
    result = [
        out if piece.begins else complete(part, out, state)
        for piece, part, out, state in zip(pieces.pieces, parts, outs, states)
    ]
    joined = pieces.join(dim, result, states)
    return (joined, _last_state(pieces, maps, states, apply)) if last else joined


def _last_state(
    pieces: LocalPieces,
    maps: Sequence[tuple[Tensor, Tensor]],
    states: Sequence[Tensor],
    apply: Apply,
) -> Tensor:
    for piece, (a, b), state in zip(pieces.pieces, maps, states):
        if piece.count and piece.start + piece.count == pieces.length:
            return b if piece.begins else apply(a, state) + b
    return torch.zeros_like(maps[0][1])


def over_heads(
    state: LocalPieces,
    carried: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    per_head: Sequence[Tensor] = (),
    **extra: Any,
) -> Tensor:
    """`carried(pieces, *inputs, *per_head)`, by heads where the layout trades tokens for them.

    See `runtime.by_heads`.
    """

    def run(layout: Layout, *tensors: Tensor) -> Tensor:
        same = layout is state.layout
        pieces = state if same else LocalPieces(layout, state.axis, state.length, state.documents)
        return carried(pieces, *tensors, **extra)

    return traded(state.layout, state.axis, state.length, run, inputs, per_head)


def convolution(stock: Callable) -> Callable:
    """`causal_conv1d_fn` on (b, c, t): the columns to the left go in, and their outputs are cut."""

    def run(
        hidden_states: Any, weight: Any, bias: Any = None, activation: Any = None, **kwargs: Any
    ) -> Any:
        state = recurrence("causal_conv1d_fn")
        if state is None:
            return stock(hidden_states, weight, bias, activation=activation, **kwargs)
        kwargs = _without(kwargs, "seq_idx", "initial_states", "return_final_states")
        columns = weight.shape[-1] - 1
        cached, left, result = _cached_columns(), state.left(hidden_states, columns, -1), []
        for piece, halo, (x,) in zip(state.pieces, left, state.split(-1, hidden_states)):
            if piece.begins and cached is not None:
                halo = cached[..., cached.shape[-1] - columns :]
            wide = torch.cat([halo, x], -1)
            y = stock(wide, weight, bias, activation=activation, **kwargs)
            result.append(y[..., columns:])
        return state.join(-1, result, left)

    return run


def _cached_columns() -> Tensor | None:
    """The columns that a cache keeps before the row, on every rank."""
    call = running()
    if call is None or call.cache is None:
        return None
    cached, call.cache.shards.columns = call.cache.shards.columns, None
    return cached


def delta_rule(stock: Callable) -> Callable:
    """Gated DeltaNet and KDA on (b, t, h, ...), the state (b, h, K, V) in fp32."""

    def run(query: Any, key: Any, value: Any, g: Any, beta: Any, **kw: Any) -> Any:
        state = recurrence(getattr(stock, "__name__", "the delta rule"))
        if state is None:
            return stock(query, key, value, g=g, beta=beta, **kw)
        last, before = _asked(kw, "output_final_state", "initial_state")
        kw = _without(kw, "cu_seqlens", "initial_state", "output_final_state")
        if last:
            options = {"options": kw, "last": True, "before": before}
            return carried(state, query, key, value, g, beta, **options)
        return over_heads(state, carried, (query, key, value, g, beta), options=kw), None

    def carried(
        state: Any, *inputs: Tensor, options: Any, last: Any = False, before: Any = None
    ) -> Any:
        query, key, value, *_ = inputs
        kw, (b, _, _, K), (H, V) = options, key.shape, value.shape[2:]
        if not last and state.in_chain():

            def step(q: Any, k: Any, v: Any, decay: Any, rate: Any, entering: Any) -> Any:
                extra = {"initial_state": entering, "output_final_state": True}
                return stock(q, k, v, g=decay, beta=rate, **extra, **kw)

            zero = value.new_zeros(b, H, K, V, dtype=torch.float32)
            return state.chain_heads(step, inputs, zero)
        exact = query.dtype not in (torch.float16, torch.bfloat16)
        eye = torch.eye(K, dtype=torch.float32, device=key.device).expand(b, H, K, K)
        none = eye.new_zeros(b, H, K, V)
        parts, outs, maps = state.split(1, *inputs), [], []
        for piece, (q, k, v, decay, rate) in zip(state.pieces, parts):
            if piece.begins:
                extra = {"initial_state": before, "output_final_state": True}
                o, end = stock(q, k, v, g=decay, beta=rate, **extra, **kw)
                outs.append(o)
                maps.append((torch.zeros_like(eye), end))
                continue
            wide = torch.cat([v, v.new_zeros(*v.shape[:-1], K)], -1)
            extra = {"initial_state": torch.cat([none, eye], -1), "output_final_state": True}
            o, end = stock(q, k, wide, g=decay, beta=rate, **extra, **kw)
            outs.append(o)
            maps.append((end[..., V:], end[..., :V]))

        def complete(part: Any, o: Tensor, s: Tensor) -> Tensor:
            if exact:
                read = torch.einsum("bthk,bhkv->bthv", o[..., V:].to(s.dtype), s)
                return (o[..., :V] + read).to(o.dtype)
            q, k, v, decay, rate = part
            return stock(q, k, v, g=decay, beta=rate, initial_state=s, **kw)[0]

        return completed(state, 1, parts, outs, maps, torch.matmul, complete, last)

    return run


def mamba2(stock: Callable) -> Callable:
    """`mamba2_chunk_scan` on (b, t, h, p), the state (b, h, P, N): A is exp of the summed decay."""

    def run(x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: Any, **kw: Any) -> Any:
        state = recurrence("mamba2_chunk_scan")
        if state is None:
            return stock(x, dt, A, B, C, chunk_size, **kw)
        last, before = _asked(kw, "return_final_states", "initial_states")
        kw = _without(kw, "z", "seq_idx", "cu_seqlens", "initial_states", "return_final_states")
        names = [n for n in ("D", "dt_bias") if kw.get(n) is not None]
        options = {"kw": kw, "names": names, "chunk_size": chunk_size}
        per_head = [A, *(kw[name] for name in names)]
        if last:
            extra = {"options": options, "last": True, "before": before}
            return carried(state, x, dt, B, C, *per_head, **extra)
        return over_heads(state, carried, (x, dt, B, C), per_head, options=options)

    def carried(
        state: Any, *inputs: Tensor, options: Any, last: Any = False, before: Any = None
    ) -> Any:
        x, dt, B, C, A, *per_head = inputs
        names, chunk_size = options["names"], options["chunk_size"]
        kw = options["kw"] | dict(zip(names, per_head))
        shape = len(x), *x.shape[2:], B.shape[-1]
        if not last and state.in_chain():

            def step(x: Any, dt: Any, B: Any, C: Any, A: Any, *rest: Any) -> Any:
                extra = kw | dict(zip(names, rest)) | {"return_final_states": True}
                return stock(x, dt, A, B, C, chunk_size, initial_states=rest[-1], **extra)

            zero = x.new_zeros(shape, dtype=torch.float32)
            return state.chain_heads(step, (x, dt, B, C), zero, (A, *per_head))
        decay = _mamba2_decay(dt, A, kw)
        parts, outs, maps = state.split(1, x, dt, B, C, decay), [], []
        for piece, (x, dt, B, C, decay) in zip(state.pieces, parts):
            extra = kw | {"initial_states": before if piece.begins else None}
            o, end = stock(x, dt, A, B, C, chunk_size, return_final_states=True, **extra)
            outs.append(o)
            maps.append((decay.sum(1).exp()[..., None, None], end.float()))

        def complete(part: Any, o: Tensor, s: Tensor) -> Tensor:
            x, dt, B, C, decay = part
            if o.dtype in (torch.float16, torch.bfloat16):
                return stock(x, dt, A, B, C, chunk_size, initial_states=s, **kw)
            read = C.float().repeat_interleave(x.shape[2] // C.shape[2], 2)
            read = read * decay.cumsum(1).exp()[..., None]
            return o + torch.einsum("bthn,bhpn->bthp", read, s).to(o.dtype)

        return completed(state, 1, parts, outs, maps, torch.mul, complete, last)

    return run


def _mamba2_decay(dt: Tensor, A: Tensor, options: dict[str, Any]) -> Tensor:
    """The logarithm of each token's decay (b, t, h)."""
    bias, limit = options.get("dt_bias"), options.get("dt_limit", (0.0, math.inf))
    step = dt if bias is None else dt + bias.to(dt.dtype)
    step = F.softplus(step) if options.get("dt_softplus") else step
    return A.float() * step.clamp(*limit).float()


def mamba1(stock: Callable) -> Callable:
    """`mamba_selective_scan` on (b, d, t), the state (b, d, N); it takes none, so R S is added."""

    def run(
        hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, **kw: Any
    ) -> Any:
        state = recurrence("mamba_selective_scan")
        if state is None:
            return stock(hidden_states, dt, A, B, C, D=D, z=z, **kw)
        asked, _ = _asked(kw, "return_last_state")
        kw = _without(kw, "return_last_state")
        bias = kw.pop("delta_bias", None)
        tokens = [x.transpose(1, 2) for x in (hidden_states, dt)]
        shared = [x.transpose(1, 2)[:, :, None] for x in (B, C)]  # by all channels
        per_head = [A] if bias is None else [A, bias]
        if asked:
            out, end = carried(state, *tokens, *shared, *per_head, options=kw, last=True)
        else:
            out = over_heads(state, carried, (*tokens, *shared), per_head, options=kw)
        out = out.transpose(1, 2)
        out = out if D is None else out + hidden_states * D[None, :, None]
        out = out if z is None else out * F.silu(z)
        return (out, end) if asked else out

    def carried(
        state: Any,
        hidden_states: Any,
        dt: Any,
        B: Any,
        C: Any,
        A: Any,
        bias: Any = None,
        *,
        options: Any,
        last: Any = False,
    ) -> Any:
        hidden_states, dt = (x.transpose(1, 2) for x in (hidden_states, dt))
        B, C = (x[:, :, 0].transpose(1, 2) for x in (B, C))
        kw = options | {"delta_bias": bias}
        step = dt if bias is None else dt + bias.to(dt.dtype)[..., None]
        step = (F.softplus(step) if kw.get("delta_softplus") else step).float()
        parts, outs, maps = state.split(-1, hidden_states, dt, B, C, step), [], []
        for x, dt, B, C, step in parts:
            o, end = stock(x, dt, A, B, C, return_last_state=True, **kw)
            outs.append(o)
            maps.append(((A * step.sum(-1, keepdim=True)).exp(), end.float()))

        def complete(part: Any, o: Tensor, s: Tensor) -> Tensor:
            *_, C, step = part
            return o + _read_mamba1(A, step, C, s).to(o.dtype)

        result = completed(state, -1, parts, outs, maps, torch.mul, complete, last)
        return (result[0].transpose(1, 2), result[1]) if last else result.transpose(1, 2)

    return run


def _read_mamba1(A: Tensor, step: Tensor, C: Tensor, state: Tensor) -> Tensor:
    """C_t . (exp(A cumsum(step)) * S) as (b, d, t), of so many tokens at once as fit."""
    each = max(1, _STATES // max(1, state.numel()))
    result = []
    for total, read in zip(step.cumsum(-1).split(each, -1), C.float().split(each, -1)):
        moved = (A[:, None] * total[..., None]).exp() * state[:, :, None]  # (b, d, t, N)
        result.append(torch.einsum("bdtn,bnt->bdt", moved, read))
    return torch.cat(result, -1)


def fused(stock: Callable) -> Callable:
    """Convolution and scan in one kernel: None has the layer call them one after the other."""

    def run(*args: Any, **kwargs: Any) -> Any:
        call = running()
        return stock(*args, **kwargs) if call is None or call.whole else None

    return run


#: What stands for each function of a recurrent layer's module.
FUNCTIONS: dict[str, Callable[[Callable], Callable]] = {
    "causal_conv1d_fn": of_chunks(convolution),
    "torch_chunk_gated_delta_rule": of_chunks(delta_rule),
    "chunk_gated_delta_rule": of_chunks(delta_rule),
    "chunk_kimi_delta_attention": of_chunks(delta_rule),
    "mamba2_chunk_scan": of_chunks(mamba2),
    "mamba_selective_scan": of_chunks(mamba1),
    "mamba2_split_conv1d_scan_combined": fused,
    "mamba_inner_fn": fused,
    # one decoding step: every rank holds the full recurrent state
    "torch_recurrent_gated_delta_rule": lambda stock: stock,
    "recurrent_kimi_delta_attention": lambda stock: stock,
}


#: Functions that take no state that enters.
WITHOUT_STATE = ("mamba_selective_scan",)


def _asked(
    options: dict[str, Any], last: str, before: str | None = None
) -> tuple[bool, Tensor | None]:
    """A layer's request for its last state, for a cache of a split row, and the cached one."""
    call = running()
    if call is None or call.cache is None or not options.pop(last, False):
        return False, None
    return True, None if before is None else options.pop(before, None)


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Options of a call without some that must not be set."""
    for name in names:
        if options.get(name) is not None and options.get(name) is not False:
            raise UnsupportedError(
                f"{name}: the kernel of a recurrent layer needs all of it, and no rank holds"
                " that; call the model without a cache, and give packed documents as `documents=`"
            )
    return {name: value for name, value in options.items() if name not in names}


__all__ = [
    "FUNCTIONS",
    "WITHOUT_STATE",
    "completed",
    "convolution",
    "delta_rule",
    "mamba1",
    "mamba2",
    "of_chunks",
    "of_device",
    "over_heads",
    "recurrence",
]
