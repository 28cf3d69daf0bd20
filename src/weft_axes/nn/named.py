"""Masks with parameters and biases of scores, as blocks name them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from weft.bias import Bias, alibi
from weft.errors import DeclarationError, ShapeError
from weft.masks import (
    Boxes,
    Causal,
    Documents,
    FirstKeys,
    Full,
    KeyPadding,
    Mask,
    Near,
    Window,
    prefix_lm,
)

from .parameters import linear, local

MADE: dict[str, Callable[..., Mask]] = {
    "first-keys": FirstKeys,
    "prefix": prefix_lm,
    "documents": Documents,
    "padding": KeyPadding,
}

GRIDS: dict[str, Callable[..., Mask]] = {"near": Near, "boxes": Boxes}


def build_mask(
    parts: Sequence[tuple[str, Any]],
    given: Mapping[str, Any],
    lengths: Mapping[str, int] | None = None,
) -> Mask:
    """The mask that a block names; parameters that it leaves open come from the call.

    `given` has parameters by the mask's name, or a full `weft.Mask`; `DeclarationError` for one
    that neither the file nor the call has. `lengths`: of the attended axes, for masks of a grid.

    >>> build_mask([("window", (4, 0)), ("documents", None)], {"documents": (5, 7)})
    And(left=Window(left=4, right=0, offset=None), right=Documents(lengths=(5, 7), offset=None))
    """
    masks = [
        _on_grid(name, dict(value), lengths or {}) if name in GRIDS else _one(name, value, given)
        for name, value in parts
    ]
    whole = masks[0] if masks else Full()
    for mask in masks[1:]:
        whole = whole & mask
    return whole


def _on_grid(name: str, options: dict[str, Any], lengths: Mapping[str, int]) -> Mask:
    ends = set(options.pop("circular", ()))
    circular = tuple(axis in ends for axis in lengths)
    sizes = options.pop(name)
    return GRIDS[name](tuple(lengths.values()), sizes, circular=circular, **options)


def _one(name: str, value: Any, given: Mapping[str, Any]) -> Mask:
    if name == "causal":
        return Causal(dict(value)["window"]) if isinstance(value, tuple) else Causal()
    if name == "window":
        return Window(*value)
    key = value if name == "given" else name
    found = given.get(key) if value is None or name == "given" else value
    if found is None:
        raise DeclarationError(
            f"a block has mask = {name!r} without parameters: give them in the call,"
            f" masks={{{key!r}: ...}}"
        )
    if isinstance(found, Mask):
        return found
    if name == "given":
        raise DeclarationError(f"masks[{key!r}] must be a weft.Mask, found {found!r}")
    return MADE[name](found)


def build_bias(
    kind: tuple[str, Any] | None, heads: int, axes: int, generator: torch.Generator
) -> nn.Module | None:
    """The module of a bias that a block names, or None.

    `heads` are those of queries over all ranks, `axes` the number of axes attended jointly.
    """
    name, value = kind or ("triangle", None)
    if name == "triangle":  # which is part of the attention itself
        return None
    if name == "alibi":
        return Alibi(heads)
    assert value is not None
    return RelativeBias(heads, axes, value) if name == "relative" else PairBias(heads, *value)


class Alibi(nn.Module):
    """`weft.alibi` of the block's heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.bias = alibi(heads)

    def forward(self, n: Sequence[int], m: Sequence[int], given: Mapping[str, Tensor]) -> Bias:
        return self.bias


class RelativeBias(nn.Module):
    """A learned number per head and distance, up to `reach` on either side; axes add up.

    bias_h(q, k) = sum over axes of table_h[clip(q_a - k_a, -reach, reach)] (Shaw et al.,
    arXiv:1803.02155, per head as in T5). It starts at zero.

    >>> RelativeBias(2, 1, 3)([5], [5], {}).shape
    torch.Size([1, 2, 5, 5])
    """

    def __init__(self, heads: int, axes: int, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.table = nn.Parameter(torch.zeros(axes, heads, 2 * reach + 1))

    def forward(self, n: Sequence[int], m: Sequence[int], given: Mapping[str, Tensor]) -> Tensor:
        """The whole bias (1, heads, queries, keys) for global lengths per attended axis."""
        table = local(self.table)
        total: Tensor | None = None
        for i, (queries, keys) in enumerate(zip(n, m)):
            far = torch.arange(queries)[:, None] - torch.arange(keys)
            one: Tensor = table[i][:, far.clamp(-self.reach, self.reach) + self.reach]  # h q k
            shape = [len(one)] + [1] * (2 * len(n))
            shape[1 + i], shape[1 + len(n) + i] = queries, keys
            one = one.reshape(shape)
            total = one if total is None else total + one
        assert total is not None  # some axis is attended
        return total.reshape(1, table.shape[1], math.prod(n), math.prod(m))


class PairBias(nn.Module):
    """A learned projection of a tensor over pairs of positions: (B or 1, N, M, width) -> heads.

    The tensor is given in the call, whole on every rank. It starts at zero.

    >>> PairBias(2, "z", 8)([5], [5], {"z": torch.zeros(5, 5, 8)}).shape
    torch.Size([1, 2, 5, 5])
    """

    def __init__(self, heads: int, name: str, width: int) -> None:
        super().__init__()
        self.name = name
        self.project = linear(width, heads, torch.Generator(), bias=False)
        nn.init.zeros_(self.project.weight)

    def forward(self, n: Sequence[int], m: Sequence[int], given: Mapping[str, Tensor]) -> Tensor:
        """The whole bias (B or 1, heads, queries, keys)."""
        pairs = given.get(self.name)
        if pairs is None:
            raise DeclarationError(
                f"a block has bias = {{ pair = {self.name!r} }}: give the tensor in the call,"
                f" biases={{{self.name!r}: ...}}"
            )
        wanted = (math.prod(n), math.prod(m), self.project.in_features)
        if pairs.dim() not in (3, 4) or tuple(pairs.shape[-3:]) != wanted:
            raise ShapeError(
                f"biases[{self.name!r}] must be {wanted}, with a batch in front or without, found"
                f" {tuple(pairs.shape)}"
            )
        pairs = pairs if pairs.dim() == 4 else pairs[None]
        return rearrange(self.project(pairs), "b n m h -> b h n m")
