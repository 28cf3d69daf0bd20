"""torch's CPU flash kernel: fp64, fp32, bf16, fp16; grouped heads without copies."""

from __future__ import annotations

from torch import Tensor

from ..private import cpu_flash_backward, cpu_flash_forward
from .base import Kernel, Request, View, additive, finite_lse, seen_rows, surrogate_out


class CpuFlash(Kernel):
    """aten's `_scaled_dot_product_flash_attention_for_cpu`."""

    name = "cpu-flash"
    about = "CPU; fp64, fp32, bf16, fp16; any mask or bias; keys and values of one head dim"

    def refuses(self, request: Request) -> str | None:
        if request.device != "cpu":
            return f"runs on the CPU, not on {request.device}"
        if request.head_dim != request.value_dim:
            return f"needs values of the keys' head dim {request.head_dim}, not {request.value_dim}"
        if request.softcap:
            return "has no soft cap"
        if request.lse_grad:
            return "has no gradient through the logsumexp"
        if request.bias_grad:
            return "has no gradient of the bias"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> tuple[Tensor, Tensor]:
        mask = additive(view, q.dtype)
        out, lse = cpu_flash_forward(q, k, v, 0.0, view.causal, attn_mask=mask, scale=view.scale)
        seen = seen_rows(view)
        if seen is not None:  # the kernel reports 0 for rows that see nothing
            lse = lse.masked_fill(~seen, float("-inf"))
            out = out.masked_fill(~seen.unsqueeze(-1), 0.0)
        return out, lse

    def backward(self, dout, q, k, v, out, lse, delta, view):
        out = surrogate_out(dout, delta) if out is None else out
        grads = cpu_flash_backward(
            dout,
            q,
            k,
            v,
            out,
            finite_lse(lse),
            0.0,
            view.causal,
            attn_mask=additive(view, q.dtype),
            scale=view.scale,
        )
        return (*grads, None)
