"""Stand-ins for the flash-attn packages: their releases' signatures, computed in plain torch.

The signatures are those of 2.8, 3.0, of 3 in the tag 2.8.3, which has no defaults, and of 4.0.0b,
with what weft never uses left out of 3.0 and 4.
Tensors (b n h d) and lse (b h n), as in every generation; packed ones (total h d) and (h total).
Every stand-in module counts the calls of its functions in `calls`, by the number of sequences.
"""

from __future__ import annotations

import itertools
import sys
from types import ModuleType

import torch
from torch import Tensor

import weft
from weft import kernels
from weft.kernels import View, accumulate_dtype, flash_attn, named

MATH = named("math")
FORWARD, BACKWARD = "forward", "backward"


def check_strides(*tensors: Tensor) -> None:
    """What the packages read: rows of one block of memory that begin at multiples of 16 bytes."""
    for t in tensors:
        assert t.stride(-1) == 1
        steps = [s for s, size in zip(t.stride()[:-1], t.shape) if size > 1]
        assert all(x % 16 == 0 for x in (t.data_ptr(), *(s * t.itemsize for s in steps)))


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    check_strides(q, k, v)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    out, lse = MATH.forward(*(t.transpose(1, 2) for t in (q, k, v)), View(scale, causal))
    return out.transpose(1, 2).contiguous(), lse


def backward(dout, q, k, v, out, lse, scale: float, causal: bool, dlse=None) -> list[Tensor]:
    """As the packages do: delta from the rows of dout and out, probabilities from lse."""
    assert not torch.isneginf(lse).any()
    check_strides(dout, q, k, v, out)
    dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    dtype = accumulate_dtype(q.dtype)
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    delta = delta if dlse is None else delta - dlse
    grads = MATH.backward(dout, q, k, v, None, lse, delta, View(scale, causal))[:3]
    return [t.transpose(1, 2) for t in grads]


def _sequences(q: Tensor, k: Tensor, starts_q, starts_k, longest_q: int, longest_k: int):
    """Slices of every sequence's rows and columns, after checks of what the packages demand."""
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert starts_q.shape == starts_k.shape
    pairs = []
    for tensor, starts, longest in ((q, starts_q, longest_q), (k, starts_k, longest_k)):
        assert tensor.dim() == 3
        ends = starts.tolist()
        assert ends[0] == 0
        assert ends[-1] == len(tensor)
        assert longest == max(b - a for a, b in itertools.pairwise(ends))
        pairs.append([slice(a, b) for a, b in itertools.pairwise(ends)])
    return list(zip(*pairs))


def varlen_forward(q, k, v, starts, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(total h d) and (h total)."""
    check_strides(q, k, v)
    outs, lses = [], []
    for rows, columns in _sequences(q, k, *starts):
        out, lse = forward(q[None, rows], k[None, columns], v[None, columns], scale, causal)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def varlen_backward(
    dout, q, k, v, out, lse, starts, scale: float, causal: bool, dlse=None
) -> list[Tensor]:
    assert lse.is_contiguous()
    assert lse.shape == (q.shape[1], len(q))
    parts = []
    for rows, columns in _sequences(q, k, *starts):
        mine = (dout[None, rows], q[None, rows], k[None, columns], v[None, columns])
        own = None if dlse is None else dlse[None, :, rows]
        grads = backward(*mine, out[None, rows], lse[None, :, rows], scale, causal, own)
        parts.append([grad[0] for grad in grads])
    return [torch.cat(side) for side in zip(*parts)]


def _fill(targets, grads) -> None:
    for target, grad in zip(targets, grads):
        target.copy_(grad)


def _module(name: str) -> ModuleType:
    made = ModuleType(name)
    made.calls = {FORWARD: [], BACKWARD: []}
    made.margins, made.deterministic = [], []
    return made


def generation_2() -> ModuleType:
    """flash_attn 2.8: torch custom ops; packed sequences have functions of their own."""
    made = _module("flash_attn.flash_attn_interface")

    @torch.library.custom_op("weft_test_flash2::forward", mutates_args=())
    def _flash_attn_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        return_softmax: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0, -1, -1, 0)
        assert (alibi_slopes, return_softmax) == (None, False)
        made.calls[FORWARD].append(1)
        return *forward(q, k, v, softmax_scale, causal), torch.empty(0), torch.empty(2)

    @torch.library.custom_op("weft_test_flash2::varlen_forward", mutates_args=())
    def _flash_attn_varlen_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
        block_table: Tensor | None = None,
        leftpad_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0, -1, -1, 0)
        made.calls[FORWARD].append(len(cu_seqlens_q) - 1)
        starts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        found = varlen_forward(q, k, v, starts, softmax_scale, causal)
        return *found, torch.empty(0), torch.empty(2)

    @torch.library.custom_op("weft_test_flash2::backward", mutates_args=("dq", "dk", "dv"))
    def _flash_attn_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        made.calls[BACKWARD].append(1)
        grads = backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal)
        _fill((dq, dk, dv), grads)
        return torch.empty(0)

    @torch.library.custom_op("weft_test_flash2::varlen_backward", mutates_args=("dq", "dk", "dv"))
    def _flash_attn_varlen_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0, -1, -1, 0)
        made.calls[BACKWARD].append(len(cu_seqlens_q) - 1)
        starts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        tensors = (dout, q, k, v, out, softmax_lse)
        _fill((dq, dk, dv), varlen_backward(*tensors, starts, softmax_scale, causal))
        return torch.empty(0)

    made._flash_attn_forward, made._flash_attn_backward = _flash_attn_forward, _flash_attn_backward
    made._flash_attn_varlen_forward = _flash_attn_varlen_forward
    made._flash_attn_varlen_backward = _flash_attn_varlen_backward
    return made


def generation_3() -> ModuleType:
    """flash_attn_interface 3.0 (Hopper): one pair of functions for both forms."""
    made = _module("flash_attn_interface")

    def _flash_attn_forward(
        q,
        k,
        v,
        k_new=None,
        out_=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        softmax_scale=None,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        num_splits=1,
        sm_margin=0,
    ):
        made.margins.append(sm_margin)
        if cu_seqlens_q is None:
            made.calls[FORWARD].append(1)
            found = forward(q, k, v, softmax_scale, causal)
        else:
            made.calls[FORWARD].append(len(cu_seqlens_q) - 1)
            starts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            found = varlen_forward(q, k, v, starts, softmax_scale, causal)
        return *found, torch.empty(0), torch.empty(0)

    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        sequed_q=None,
        sequed_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        dq=None,
        dk=None,
        dv=None,
        softmax_scale=None,
        is_causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        deterministic=False,
        sm_margin=0,
    ):
        made.margins.append(sm_margin)
        made.deterministic.append(deterministic)
        tensors = (dout, q, k, v, out, softmax_lse)
        if cu_seqlens_q is None:
            made.calls[BACKWARD].append(1)
            grads = backward(*tensors, softmax_scale, is_causal)
        else:
            made.calls[BACKWARD].append(len(cu_seqlens_q) - 1)
            starts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            grads = varlen_backward(*tensors, starts, softmax_scale, is_causal)
        _fill((dq, dk, dv), grads)

    made._flash_attn_forward, made._flash_attn_backward = _flash_attn_forward, _flash_attn_backward
    return made


def generation_3_of_283() -> ModuleType:
    """flash_attn_interface as the tag 2.8.3 has it: nearly nothing has a default."""
    made = _module("flash_attn_interface")

    def _flash_attn_forward(
        q,
        k,
        v,
        k_new,
        v_new,
        qv,
        out,
        cu_seqlens_q,
        cu_seqlens_k,
        cu_seqlens_k_new,
        seqused_q,
        seqused_k,
        max_seqlen_q,
        max_seqlen_k,
        page_table,
        kv_batch_idx,
        leftpad_k,
        rotary_cos,
        rotary_sin,
        seqlens_rotary,
        q_descale,
        k_descale,
        v_descale,
        softmax_scale,
        causal,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=1,
        pack_gqa=None,
        sm_margin=0,
    ):
        assert (k_new, qv, out, seqused_q, page_table, q_descale) == (None,) * 6
        starts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        made.calls[FORWARD].append(1 if cu_seqlens_q is None else len(cu_seqlens_q) - 1)
        if cu_seqlens_q is None:
            return *forward(q, k, v, softmax_scale, causal), None, None
        return *varlen_forward(q, k, v, starts, softmax_scale, causal), None, None

    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q,
        cu_seqlens_k,
        sequed_q,
        sequed_k,
        max_seqlen_q,
        max_seqlen_k,
        dq,
        dk,
        dv,
        softmax_scale,
        causal,
        window_size=(-1, -1),
        softcap=0.0,
        deterministic=False,
        sm_margin=0,
    ):
        starts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        made.calls[BACKWARD].append(1 if cu_seqlens_q is None else len(cu_seqlens_q) - 1)
        tensors = (dout, q, k, v, out, softmax_lse)
        if cu_seqlens_q is None:
            grads = backward(*tensors, softmax_scale, causal)
        else:
            grads = varlen_backward(*tensors, starts, softmax_scale, causal)
        _fill((dq, dk, dv), grads)

    made._flash_attn_forward, made._flash_attn_backward = _flash_attn_forward, _flash_attn_backward
    return made


def generation_4() -> ModuleType:
    """flash_attn.cute 4.0.0b: lse on demand, gradients returned, `out` and `lse` are buffers."""
    made = _module("flash_attn.cute.interface")

    def _flash_attn_fwd(
        q,
        k,
        v,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        page_table=None,
        softmax_scale=None,
        causal=False,
        softcap=None,
        window_size_left=None,
        window_size_right=None,
        return_lse=False,
        out=None,
        lse=None,
    ):
        assert (out, lse) == (None, None)
        if cu_seqlens_q is None:
            made.calls[FORWARD].append(1)
            found, own_lse = forward(q, k, v, softmax_scale, causal)
        else:
            made.calls[FORWARD].append(len(cu_seqlens_q) - 1)
            starts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            found, own_lse = varlen_forward(q, k, v, starts, softmax_scale, causal)
        return found, own_lse if return_lse else None

    def _flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=None,
        causal=False,
        softcap=0.0,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        deterministic=False,
        dq=None,
        dk=None,
        dv=None,
        dlse=None,
    ):
        assert (dq, dk, dv) == (None, None, None)
        assert dlse is None or (dlse.shape == lse.shape and dlse.is_contiguous())
        tensors = (dout, q, k, v, out, lse)
        made.dlse.append(dlse is not None)
        if cu_seqlens_q is None:
            made.calls[BACKWARD].append(1)
            return tuple(backward(*tensors, softmax_scale, causal, dlse))
        made.calls[BACKWARD].append(len(cu_seqlens_q) - 1)
        starts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return tuple(varlen_backward(*tensors, starts, softmax_scale, causal, dlse))

    made._flash_attn_fwd, made._flash_attn_bwd = _flash_attn_fwd, _flash_attn_bwd
    made._tile_size_bwd_sm90, made.dlse = None, []
    return made


#: 3.0 and the other releases stand in under the number of their generation.
STAND_INS = {2: generation_2, 3: generation_3, 4: generation_4}


def install(monkeypatch, *modules: ModuleType, capability: int = 9) -> None:
    """Make stand-in modules importable, on a GPU of some compute capability."""
    for made in modules:
        parts = made.__name__.split(".")
        for i in range(1, len(parts)):
            name = ".".join(parts[:i])
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name, ModuleType(name)))
        monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(flash_attn, "_capability", lambda: capability)
    weft.clear_caches()


def prefer_on_cpu(monkeypatch) -> None:
    """Let weft choose flash-attn for plain calls of any dtype on the CPU, where stand-ins run."""

    def refuses(self, request):
        return self.refuses_dims(request) or flash_attn.plain_only(request)

    monkeypatch.setattr(flash_attn.FlashAttn, "refuses", refuses)
    order = ("flash-attn", *kernels._BY_DEVICE["cpu"])
    monkeypatch.setitem(kernels._BY_DEVICE, "cpu", order)
    weft.clear_caches()
