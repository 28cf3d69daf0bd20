"""Recurrences by their shapes: matrix products of chunks in place of a loop over tokens.

On device "meta" there are no numbers, so a step is counted by the shapes that a kernel works on.
These are those of the chunked gated delta rule, as flash-linear-attention computes it; chunks of 64
tokens, `n` of them in all sequences and heads:

    kernel                          products of a chunk                 kept for backward
    W, U = T K, T V                 C C K, C C K, C C V                 q, k, v, g, beta, T
    states, and outputs from them   3 C K V, C C K, C C V               recomputed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHUNK = 64


def _chunks(x: Tensor) -> Tensor:
    """(b, t, h, d) as (n, C, d), padded to whole chunks."""
    b, t, h, d = x.shape
    n = -(-t // CHUNK)
    return x.new_empty(b * h * n, CHUNK, d)


class _DeltaRule(torch.autograd.Function):
    """Outputs like `value` in the dtype of `query`, and the last state in fp32."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value, decay, rate, state = tensors
        inverse = _forward_products(query, key, value)
        ctx.save_for_backward(query, key, value, decay, rate, inverse, state)
        return value.new_empty(value.shape, dtype=query.dtype), torch.empty_like(state)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, decay, rate, _, state = ctx.saved_tensors
        _forward_products(query, key, value)  # W, U and the states are recomputed
        for _ in range(2):  # each product has two gradients
            _forward_products(query, key, value)
        return tuple(torch.empty_like(t) for t in (query, key, value, decay, rate, state))


def _forward_products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The products of a forward pass; returns T, which is kept."""
    heads = value.shape[2]
    q, k = (_chunks(x.new_empty(*x.shape[:2], heads, x.shape[3])) for x in (query, key))
    v = _chunks(value.to(query.dtype))
    inverse = q.new_empty(len(q), CHUNK, CHUNK)
    torch.bmm(k, k.transpose(1, 2))
    w, u = torch.bmm(inverse, k), torch.bmm(inverse, v)
    states = torch.bmm(k.transpose(1, 2), v)
    torch.bmm(w, states)
    torch.bmm(q, states)
    torch.bmm(torch.bmm(q, k.transpose(1, 2)), u)
    return inverse


def chunked_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Shapes of the chunked gated delta rule on (b, t, h, ...), with its products and memory.

    >>> q = torch.empty(2, 1, 100, 2, 16, device="meta")
    >>> v = torch.empty(1, 100, 4, 8, device="meta")
    >>> out, _ = chunked_delta_rule(*q, v, g=v[..., 0], beta=v[..., 0])
    >>> out.shape
    torch.Size([1, 100, 4, 8])
    """
    if initial_state is None:
        sizes = len(value), value.shape[2], key.shape[3], value.shape[3]
        initial_state = value.new_empty(sizes, dtype=torch.float32)
    out, end = _DeltaRule.apply(query, key, value, g, beta, initial_state)
    return out, end if output_final_state else None


#: Functions of transformers that loop over tokens or chunks, and their shapes.
SHAPES: dict[str, Callable[..., Any]] = dict.fromkeys(
    ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule"), chunked_delta_rule
)

__all__ = ["SHAPES", "chunked_delta_rule"]
