"""`weft.sdpa`: a region in which `F.scaled_dot_product_attention` runs on a layout.

The call is caught by a torch function mode, as `torch.device("cuda")` catches factory functions;
nothing is patched, and the region ends with the `with` block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..attention import Length, attention
from ..errors import ShapeError, UnsupportedError
from ..layout import Layout
from ..masks import And, Causal, Full, Mask, describe
from .compiling import kept

_SDPA = F.scaled_dot_product_attention


class sdpa(TorchFunctionMode):
    """Inside the `with` block, `F.scaled_dot_product_attention` attends the layout's whole axis.

    Each rank calls with its own shard, (..., heads, tokens, dim), and gets its own shard of the
    output. The function's `scale`, `is_causal` and `enable_gqa` mean what they always mean, at
    global positions. All other functions are untouched. The region belongs to one thread.

    A checkpointed block calls the function again in the backward pass, which torch runs outside
    all function modes: give `checkpoint` the region as `context_fn=region.recompute`. (Without
    it, torch notices that other tensors were saved and raises `CheckpointError`.)

    Compiled modules are caught as well, whole graphs (`torch.compile(fullgraph=True)`) too: open
    the region around the compiled call. A graph belongs to the layout, mask and length it was
    traced with; under a region with others the function is compiled anew.

    Args:
        layout: a built layout.
        axis: the attended axis, or several attended jointly.
        mask: who sees whom, for calls that pass no `is_causal`; with `is_causal=True` the mask
            must be causal already. Default: `is_causal` decides between `Full` and `Causal`.
        length: as for `weft.attention`, where chunks are uneven.

    Raises:
        UnsupportedError: `attn_mask`, `dropout_p > 0`, `is_causal=True` beside a mask that is not
            causal, and `nn.MultiheadAttention`, whose attention cannot be caught from outside.
        ShapeError: heads that differ without `enable_gqa`, and what `weft.attention` refuses.

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
    ) -> None:
        super().__init__()
        self.layout, self.axis, self.length = layout, axis, length
        self.mask = None if mask is None else kept(mask)

    def recompute(self) -> tuple[contextlib.AbstractContextManager, sdpa]:
        """For `checkpoint(..., context_fn=region.recompute)`: this region, opened once more."""
        again = sdpa(self.layout, self.axis, self.mask, length=self.length)
        return contextlib.nullcontext(), again

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _SDPA:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            raise UnsupportedError(
                "nn.MultiheadAttention under weft.sdpa: it computes attention inside itself, over "
                "this rank's tokens only; use weft.MultiAxisAttention, or project and call "
                "F.scaled_dot_product_attention"
            )
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
        if attn_mask is not None:
            raise UnsupportedError(
                f"attn_mask of shape {tuple(attn_mask.shape)} under weft.sdpa: a tensor does not "
                "say which positions it is about; pass mask= to weft.sdpa, such as weft.Causal() "
                "or weft.MaskMod(fn)"
            )
        if dropout_p:
            raise UnsupportedError(
                f"dropout_p={dropout_p} under weft.sdpa: weft has no dropout inside attention; "
                "set it to 0 (or call model.eval())"
            )
        q, k, v, batch = canonical(query, key, value, enable_gqa)
        mask = self._mask(is_causal)
        out = attention(q, k, v, self.layout, self.axis, mask, scale, self.length)
        if len(batch) != 1 or max(query.dim(), key.dim(), value.dim()) < 4:
            out = out.reshape(*batch, *out.shape[1:])
        return out if max(query.dim(), key.dim(), value.dim()) > 3 else out.squeeze(-3)

    def _mask(self, is_causal: bool) -> Mask:
        if self.mask is None:
            return Causal() if is_causal else Full()
        if is_causal and not hides_future(self.mask):
            raise UnsupportedError(
                f"is_causal=True under weft.sdpa(mask={describe(self.mask)}): the two contradict; "
                f"open it with mask={describe(self.mask)} & Causal(), or call with is_causal=False"
            )
        return self.mask


def hides_future(mask: Mask) -> bool:
    """Whether a mask surely shows no query a later key.

    >>> hides_future(Causal(3)), hides_future(Full())
    (True, False)
    """
    if isinstance(mask, And):
        return hides_future(mask.left) or hides_future(mask.right)
    return isinstance(mask, Causal)


def canonical(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[Tensor, ...]:
    """(..., heads, tokens, dim) as (b, h, n, d), and the leading dims that b stands for.

    Leading dims broadcast and flatten into b. Three dims or fewer have no heads, as torch has it.
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
        return q, k, v, q.shape[:1]
    try:
        batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except RuntimeError:
        raise ShapeError(f"leading dims do not broadcast: {shapes}") from None
    flat = (t.expand(*batch, *t.shape[-3:]) for t in (q, k, v))
    return *(t.reshape(batch.numel(), *t.shape[-3:]) for t in flat), batch
