"""Attention within a diffusers transformer: of this rank's tokens, over those of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from weft.attention import attention
from weft.errors import UnsupportedError
from weft.masks import FULL, Mask, MaskMod

from .streams import Streams

_SDPA = F.scaled_dot_product_attention


class Region(TorchFunctionMode):
    """Inside, `F.scaled_dot_product_attention` of this rank's tokens is that of all tokens."""

    def __init__(self, state: Streams) -> None:
        super().__init__()
        self.state, self.caught = state, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is not _SDPA:
            return func(*args, **(kwargs or {}))
        self.caught += 1
        return self._attend(*args, **(kwargs or {}))

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
        if dropout_p or is_causal or enable_gqa:
            raise UnsupportedError(
                f"dropout_p={dropout_p}, is_causal={is_causal}, enable_gqa={enable_gqa} in "
                "attention: weft honours none of them in a diffusers transformer"
            )
        state = self.state
        assert state.image is not None  # known since the model's input was split
        length, keys = state.text + state.image, key.shape[2]
        if state.whole_text:
            query, key, value = (self._own_text(t, 2) for t in (query, key, value))
        mask = FULL if attn_mask is None else self._mask(attn_mask, keys, length)
        out = attention(query, key, value, state.layout, state.axis, mask, scale, length)
        return self._all_text(out) if state.whole_text else out

    def _own_text(self, t: Tensor, dim: int) -> Tensor:
        """This rank's tokens of both, from the full text and its image tokens."""
        state = self.state
        sizes = [state.text, t.shape[dim] - state.text]
        if state.plan.family.text_first:
            text, image = t.split(sizes, dim)
        else:
            image, text = t.split(sizes[::-1], dim)
        return torch.cat([text.narrow(dim, *state.own("text", state.text)), image], dim)

    def _all_text(self, out: Tensor) -> Tensor:
        """The output (b h n d) for the whole text and this rank's image tokens, in their order."""
        state = self.state
        n = state.own("text", state.text)[1]
        text, image = out[:, :, :n], out[:, :, n:]
        parts = [state.joined(text, "text", state.text, 2), image]
        return torch.cat(parts if state.plan.family.text_first else parts[::-1], 2)

    def _mask(self, attn_mask: Tensor, keys: int, length: int) -> Mask:
        """The padding mask over all ranks, of this rank's (b or 1, 1, 1, keys)."""
        shape = tuple(attn_mask.shape)
        if attn_mask.dtype != torch.bool or len(shape) != 4 or shape[1:] != (1, 1, keys):
            raise UnsupportedError(
                f"attn_mask of shape {shape} and {attn_mask.dtype}: weft takes padding masks of "
                f"keys, bool and (batch, 1, 1, {keys})"
            )
        state = self.state
        local = attn_mask[:, 0, 0]
        local = self._own_text(local, 1) if state.whole_text else local
        present = state.layout.gather(local.to(torch.uint8), {state.axis: 1}).bool()
        return FULL if bool(present.all()) else MaskMod(_Keys(present))


@dataclass(frozen=True, eq=False)
class _Keys:
    """True for keys that are no padding: (batch or 1, keys)."""

    there: Tensor

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.there[b if len(self.there) > 1 else b * 0, k] & (q >= 0)
