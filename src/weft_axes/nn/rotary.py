"""Rotary positions: queries and keys turned by angles in proportion to their global positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.errors import DeclarationError


def rotated_axes(
    rope: bool | Sequence[str], attended: Sequence[str], head_dim: int
) -> tuple[str, ...]:
    """The attended axes whose positions rotate queries and keys.

    >>> rotated_axes(True, ("lat", "lon"), 8)
    ('lat', 'lon')
    """
    if isinstance(rope, str):
        rope = (rope,)
    axes = tuple(attended) if rope is True else tuple(rope or ())
    if rope and not axes:
        raise DeclarationError("rope needs an attended axis that x and its context both have")
    unknown = [a for a in axes if a not in attended]
    if unknown or len(set(axes)) != len(axes):
        raise DeclarationError(
            f"rope = {list(axes)}: name attended axes, each once; this attention has"
            f" {list(attended)}"
        )
    if axes and head_dim % (2 * len(axes)):
        raise DeclarationError(
            f"rope over {len(axes)} axes shares the head dim in even parts: it must be a multiple"
            f" of {2 * len(axes)}, found {head_dim}"
        )
    return axes


def angles(
    positions: Sequence[tuple[Tensor, bool]], head_dim: int, base: float = 10000.0
) -> Tensor:
    """Angles (n, d/2) of a sequence that joins several axes, the first one outermost.

    `positions` has, per attended axis, those of its local tokens, and whether they rotate.

    >>> angles([(torch.arange(3), True), (torch.arange(2), False)], 8).shape
    torch.Size([6, 4])
    """
    share = head_dim // 2 // sum(rotated for _, rotated in positions)
    device = positions[0][0].device
    steps = base ** -(torch.arange(share, dtype=torch.float64, device=device) / share)
    grid = torch.meshgrid(*(p for p, _ in positions), indexing="ij")
    parts = [
        whole.reshape(-1, 1) * steps for whole, (_, rotated) in zip(grid, positions) if rotated
    ]
    return torch.cat(parts, dim=-1)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Turns each pair of dims of x (..., n, d) by an angle (n, d/2)."""
    cos, sin = (t.to(x.device, x.dtype) for t in (angle.cos(), angle.sin()))
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
