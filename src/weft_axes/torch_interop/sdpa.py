"""`weft.sdpa`: a region in which `F.scaled_dot_product_attention` runs on a layout.

The call is caught by a torch function mode, as `torch.device("cuda")` catches factory functions;
nothing is patched, and the region ends with the `with` block.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from weft._torch import (
    HigherOrderOperator,
    constant_in_graphs,
    other_attention,
    read_by_checkpoints,
    reentrant_checkpoints,
    sdpa_forms,
)
from weft.attention import attention
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout
from weft.masks import And, Causal, Full, Mask, describe
from weft.plan.call import Call
from weft.plan.lengths import Length, read_length

from .equal_masks import kept

_SDPA = F.scaled_dot_product_attention


class sdpa(TorchFunctionMode):
    """Inside the `with` block, `F.scaled_dot_product_attention` attends the layout's whole axis.

    Each rank calls with its own shard, (..., heads, tokens, dim), and gets its own shard of the
    output. The function's `scale`, `is_causal` and `enable_gqa` mean what they always mean, at
    global positions; so do torch's `causal_upper_left` and `causal_lower_right` as `attn_mask`,
    made for this rank's lengths or for all tokens. The region belongs to one thread. All other
    functions are untouched, but for torch's other ways to attend, which are refused. Attention of
    matrix products, or by another library's operators, is of this rank's tokens only.

    A checkpointed block calls the function again in the backward pass, which torch runs outside
    all function modes: give `checkpoint` the region as `context_fn=region.recompute`. (Without
    it, torch notices that other tensors were saved and raises `CheckpointError`.) With
    `use_reentrant=True`, which takes no `context_fn`, the region opens itself again.

    Compiled modules are caught as well, whole graphs (`torch.compile(fullgraph=True)`) too: open
    the region around the compiled call. A graph belongs to the layout, mask and length it was
    traced with; under a region with others the function is compiled anew.

    Code around the function sees this rank's tokens only. A scale that
    grows with the number of keys (SSMax, log-length scaling), or position ids counted from 0, are
    wrong on a shard, and nothing here can see that: give such code the global number of tokens and
    `layout.positions`.

    Args:
        layout: a built layout.
        axis: the attended axis, or several attended jointly.
        mask: who sees whom, for calls that pass no `is_causal`; with `is_causal=True` the mask
            must be causal already. Default: `is_causal` decides between `Full` and `Causal`.
        length: as for `weft.attention`, where chunks are uneven.
        replace_attn_mask: `mask` stands for the `attn_mask` that calls pass, which is not looked
            at. Only who wrote the mask can know that it does.

    Raises:
        UnsupportedError: any other `attn_mask` (without `replace_attn_mask`), `dropout_p > 0`,
            `is_causal=True` with a mask that is not causal; `nn.MultiheadAttention`,
            `flex_attention` and torch's operators for one kernel, which
            attend inside themselves; `torch.vmap`.
        DeclarationError: `replace_attn_mask` without `mask`.
        ShapeError: heads that differ without `enable_gqa`, and as `weft.attention` raises.

    >>> layout = Layout.single()
    >>> q, k, v = torch.randn(3, 1, 2, 5, 4).unbind(0)
    >>> with sdpa(layout, "tokens"):
    ...     F.scaled_dot_product_attention(q, k, v, is_causal=True).shape
    torch.Size([1, 2, 5, 4])
    """

    def __init__(
        self,
        layout: Layout,
        axis: str | Sequence[str],
        mask: Mask | None = None,
        *,
        length: Length | None = None,
        replace_attn_mask: bool = False,
    ) -> None:
        super().__init__()
        if replace_attn_mask and mask is None:
            raise DeclarationError(
                "replace_attn_mask=True under weft.sdpa without mask=: say who sees whom instead, "
                "mask=weft.Full() for everybody"
            )
        self.layout, self.axis, self.length = layout, axis, length
        self.mask = None if mask is None else kept(mask)
        self.replace_attn_mask = replace_attn_mask
        self._outside: list[list] = []

    def recompute(self) -> tuple[contextlib.AbstractContextManager, sdpa]:
        """For `checkpoint(..., context_fn=region.recompute)`: this region, opened once more."""
        again = copy.copy(self)
        again._outside = []
        return contextlib.nullcontext(), again

    def __enter__(self) -> sdpa:
        # A block that opens the region itself opens it again when it is computed again.
        self._outside.append(reentrant_checkpoints())
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._outside.pop()
        super().__exit__(*raised)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        in_graph = torch.compiler.is_dynamo_compiling()
        if not (in_graph or torch.is_grad_enabled()) and func == read_by_checkpoints:
            self._follow_checkpoints()
        if func is _SDPA or func in sdpa_forms:
            return self._attend(*args, **kwargs)
        if func in other_attention:
            _refuse_other(other_attention[func])
        if func is F.multi_head_attention_forward:
            raise UnsupportedError(
                "nn.MultiheadAttention under weft.sdpa: it computes attention inside itself, over "
                "this rank's tokens only; use weft.MultiAxisAttention, or project and call "
                "F.scaled_dot_product_attention"
            )
        if isinstance(func, HigherOrderOperator) and any(map(callable, args)):
            _refuse_calling_back()
        # torch.compile cannot trace the method's own super().unflatten() (torch 2.13)
        return (torch.unflatten if func is Tensor.unflatten else func)(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        aligned = attn_mask if isinstance(attn_mask, CausalBias) else None
        if attn_mask is not None and aligned is None and not self.replace_attn_mask:
            raise UnsupportedError(
                f"attn_mask of shape {tuple(attn_mask.shape)} under weft.sdpa: a tensor does not "
                "say which positions it is about; pass mask= to weft.sdpa, such as weft.Causal() "
                "or weft.MaskMod(fn), and replace_attn_mask=True"
            )
        if dropout_p:
            raise UnsupportedError(
                f"dropout_p={dropout_p} under weft.sdpa: weft has no dropout inside attention; "
                "set it to 0 (or call model.eval())"
            )
        q, k, v, batch = canonical(query, key, value, enable_gqa)
        if aligned is None or self.replace_attn_mask:
            mask = self._mask(is_causal)
        else:
            mask = self._aligned(aligned, q.shape[2], k.shape[2], is_causal)
        out = attention(q, k, v, self.layout, self.axis, mask, scale, self.length)
        if len(batch) != 1 or max(query.dim(), key.dim(), value.dim()) < 4:
            out = out.reshape(*batch, *out.shape[1:])
        return out if max(query.dim(), key.dim(), value.dim()) > 3 else out.squeeze(-3)

    def _follow_checkpoints(self) -> None:
        """Makes reentrant checkpoints in this region compute their blocks again in this region."""
        for checkpoint in reentrant_checkpoints():
            outside = any(checkpoint is other for other in self._outside[-1])
            if not outside and not isinstance(checkpoint.run_function, _Reopened):
                checkpoint.run_function = _Reopened(self, checkpoint.run_function)

    def _aligned(self, bias: CausalBias, n: int, m: int, is_causal: bool) -> Mask:
        """The mask of torch's causal bias, for n queries and m keys on this rank."""
        if is_causal or self.mask is not None:
            other = "is_causal=True" if is_causal else "mask= of weft.sdpa"
            raise UnsupportedError(
                f"attn_mask={bias.variant.name} with {other}: both say who sees whom; pass one of"
                " them (replace_attn_mask=True lets mask= stand for attn_mask)"
            )
        axes = (self.axis,) if isinstance(self.axis, str) else tuple(self.axis)
        call = Call(axes, length=read_length(axes, self.length))
        pairs = call.lengths(self.layout.unbound, n, m)
        full = tuple(math.prod(lengths) for lengths in zip(*pairs))
        made_for = (bias.seq_len_q, bias.seq_len_kv)
        if made_for not in ((n, m), full):
            raise ShapeError(
                f"attn_mask={bias.variant.name} is for {made_for} queries and keys, but there are "
                f"{full}, of which this rank has {(n, m)}"
            )
        lower = bias.variant == CausalVariant.LOWER_RIGHT
        return Causal(offset=full[1] - full[0] if lower else 0)

    def _mask(self, is_causal: bool) -> Mask:
        if self.mask is None:
            return Causal(offset=0) if is_causal else Full()  # upper left, as torch has it
        if is_causal and not hides_future(self.mask):
            raise UnsupportedError(
                f"is_causal=True under weft.sdpa(mask={describe(self.mask)}): the two contradict; "
                f"open it with mask={describe(self.mask)} & Causal(), or call with is_causal=False"
            )
        return self.mask


@constant_in_graphs  # what a graph raises of a class with bases of its own, torch cannot trace
def _refuse_other(name: str) -> None:
    raise UnsupportedError(
        f"{name} under weft.sdpa attends this rank's tokens only; call "
        "F.scaled_dot_product_attention, or weft.attention"
    )


@constant_in_graphs
def _refuse_calling_back() -> None:
    raise UnsupportedError(
        "weft.sdpa does not see attention inside functions that torch.cond, scan, map and the like"
        " call, nor inside a checkpoint in a compiled function: use Python's own control flow, and"
        " checkpoint compiled functions in one that is not compiled"
    )


@dataclass(frozen=True)
class _Reopened:
    """A checkpointed function, called in its region again."""

    region: sdpa
    function: Callable

    def __call__(self, *args: Any) -> Any:
        with self.region.recompute()[1]:
            return self.function(*args)


def hides_future(mask: Mask) -> bool:
    """True if a mask surely shows no query a later key, where query 0 is at key 0.

    >>> hides_future(Causal(3)), hides_future(Full()), hides_future(Causal(offset=1))
    (True, False, False)
    """
    if isinstance(mask, And):
        return hides_future(mask.left) or hides_future(mask.right)
    return isinstance(mask, Causal) and (mask.offset or 0) <= 0


def canonical(
    q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
    """(..., heads, tokens, dim) as (b, h, n, d), and the leading dims that b stands for.

    Leading dims broadcast and flatten into b; three dims or fewer have no heads, as torch has it.
    """
    shapes = f"query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}"
    if min(q.dim(), k.dim(), v.dim()) < 2:
        raise ShapeError(f"query, key and value need tokens and dim, found {shapes}")
    if max(q.dim(), k.dim(), v.dim()) < 4:
        q, k, v = (t.unsqueeze(-3) for t in (q, k, v))
    q, k, v = (t if t.dim() > 2 else t[None] for t in (q, k, v))
    g = k.shape[-3]
    if v.shape[-3] != g:
        raise ShapeError(f"key and value need as many heads as each other: {shapes}")
    if q.shape[-3] != g and g != 1 and not enable_gqa:
        raise ShapeError(f"heads differ; pass enable_gqa=True to share them: {shapes}")
    if q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0]:
        return q, k, v, torch.Size(q.shape[:1])
    try:
        batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except RuntimeError:
        raise ShapeError(f"leading dims do not broadcast: {shapes}") from None
    q, k, v = (
        t.expand(*batch, *t.shape[-3:]).reshape(batch.numel(), *t.shape[-3:]) for t in (q, k, v)
    )
    return q, k, v, batch
