"""A Pairformer block: a pair tensor, and one vector per object that attends with a pair bias.

Algorithm 17 of AlphaFold 3's supplement (doi:10.1038/s41586-024-07487-w). The pair tensor is split
into boxes, rows over some mesh dims and columns over others. The single vectors are split like the
rows and replicated over the mesh dims that split columns: so a rank has the queries of its box,
needs the keys of its columns, and its own box of the pair tensor is the bias of its scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from weft._caching import cached
from weft.attention import attention
from weft.declare.layout import LayoutDeclaration
from weft.declare.mesh import rank_at
from weft.layout import Layout
from weft.move import collectives
from weft.move.plan import Placed, Redistribution, plan_redistribution
from weft_axes.nn.parameters import LayerNorm, linear, replicate

from .plan import pair_at_rest, pair_mesh
from .product import boxed
from .triangle import PAIR_AXES, TriangleAttention, TriangleMultiplication, pair_axes, square_length

_AXIS = "objects"


class PairBiasedAttention(nn.Module):
    """`softmax_j(q_i k_j / sqrt(d) + b_ij) v_j`, gated, with the bias projected from a pair tensor.

        rows over r, columns over c
        r    query S(seq), key R, out S(seq)              the rows' objects ask
        c    query R, key S(seq), out P(softmax) -> R     the columns' objects answer

    Args:
        embed_dim: width of the single vectors.
        num_heads: query heads.
        pair_dim: width of the pair tensor.
        axes: names of the pair tensor's dims.
        layout: how the pair axes are split, bound. Default: one device.
        generator: the source of the initial weights.

    >>> attend = PairBiasedAttention(16, 2, pair_dim=8)
    >>> attend(torch.randn(1, 5, 16), torch.randn(1, 5, 5, 8)).shape
    torch.Size([1, 5, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        pair_dim: int,
        axes: Sequence[str] = PAIR_AXES,
        layout: Layout | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout = Layout.single() if layout is None else layout
        self.axes, self.heads = tuple(axes), num_heads
        make = generator or torch.Generator().manual_seed(torch.initial_seed())
        self.query = linear(embed_dim, embed_dim, make)
        self.key_value = linear(embed_dim, 2 * embed_dim, make, bias=False)
        self.gate = linear(embed_dim, embed_dim, make, bias=False)
        self.norm = LayerNorm(pair_dim)
        self.bias = linear(pair_dim, num_heads, make, bias=False)
        self.out = linear(embed_dim, embed_dim, make, bias=False)

    def forward(
        self, single: Tensor, pair: Tensor, lengths: Mapping[str, int] | None = None
    ) -> Tensor:
        """The update of single, without the residual.

        Args:
            single: local (batch, objects, embed): those of this rank's rows.
            pair: local (batch, rows, columns, embed).
            lengths: global lengths of both pair axes, needed where the mesh does not divide them.

        Returns:
            A tensor shaped like single. Over the mesh dims that split columns it is the same on
            all ranks, and its gradients there are shares that add up, as those of `layout.mean`.

        Raises:
            ShapeError: on every rank that takes part, tensors that are not this rank's.
        """
        wrong = self._wrong(single, pair)
        shared = f", single vectors of {self.query.in_features} channels of {single.dtype}"
        length = square_length(self.layout, self.axes, pair, lengths, wrong, shared)
        q = self.query(single)
        k, v = self.key_value(self._of_columns(single, length)).chunk(2, -1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in (q, k, v))
        tile = rearrange(self.bias(self.norm(pair)), "b n m h -> b h n m").contiguous()
        one = Layout.single()
        out = self._merged(*attention(q, k, v, one, _AXIS, return_lse=True, bias=tile))
        out = rearrange(out, "b h n d -> b n (h d)")
        return self.out(out * torch.sigmoid(self.gate(single)))

    def _wrong(self, single: Tensor, pair: Tensor) -> str:
        """The error in single vectors next to a pair tensor, or an empty text."""
        expected = (*pair.shape[:2], self.query.in_features)
        if tuple(single.shape) == expected:
            return ""
        return (
            f"single must have the samples and rows of the pair tensor {tuple(pair.shape)} and"
            f" embed_dim, {expected}, found {tuple(single.shape)}"
        )

    def _merged(self, out: Tensor, lse: Tensor) -> Tensor:
        """P(softmax) -> R over the ranks that split columns: the output over all their keys."""
        dims = self.layout.shard_dims(pair_axes(self.axes)[1])
        if not dims:
            return out
        parts = lse.detach()[None]
        for mesh_dim in dims:
            parts = collectives.varying_to_invariant(parts, 0, mesh_dim, self.layout.bound)
        weight = torch.exp(lse - parts.logsumexp(0)).unsqueeze(-1)
        both = torch.cat([out.to(lse.dtype) * weight, weight], -1)
        both = collectives.partial_to_replicate(both, dims, self.layout.bound)
        return (both[..., :-1] / both[..., -1:]).to(out.dtype)

    def _of_columns(self, single: Tensor, length: int) -> Tensor:
        """The single vectors of this rank's columns, from ranks whose rows they are."""
        pair, place = pair_axes(self.axes), tuple(self.layout.coords.items())
        if not pair_mesh(self.layout.unbound, pair):
            return single
        plan = _rows_to_columns(self.layout.unbound, pair, length, place)
        columns = single.unsqueeze(2)  # b rows 1 e
        return boxed(columns, plan, (single.shape[1], 1), self.layout.bound).squeeze(2)


class PairformerBlock(nn.Module):
    """One block of a Pairformer: the pair tensor along triangles, then the single vectors.

    Args:
        single_dim, pair_dim: widths.
        single_heads, pair_heads: query heads of both kinds of attention.
        hidden: channels of the triangle multiplications, default `pair_dim`.
        axes: names of the pair tensor's dims.
        layout: how the pair axes are split and attended, bound. Default: one device.
        generator: the source of the initial weights.

    >>> block = PairformerBlock(16, 8, single_heads=2, pair_heads=2)
    >>> single, pair = block(torch.randn(1, 5, 16), torch.randn(1, 5, 5, 8))
    >>> single.shape, pair.shape
    (torch.Size([1, 5, 16]), torch.Size([1, 5, 5, 8]))
    """

    def __init__(
        self,
        single_dim: int,
        pair_dim: int,
        *,
        single_heads: int = 16,
        pair_heads: int = 4,
        hidden: int | None = None,
        axes: Sequence[str] = PAIR_AXES,
        layout: Layout | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        make = generator or torch.Generator().manual_seed(torch.initial_seed())
        options: dict[str, Any] = {"axes": axes, "layout": layout, "generator": make}
        rows, columns = pair_axes(axes)
        self.norms = nn.ModuleList(LayerNorm(pair_dim) for _ in range(4))
        self.outgoing = TriangleMultiplication(pair_dim, "outgoing", hidden=hidden, **options)
        self.incoming = TriangleMultiplication(pair_dim, "incoming", hidden=hidden, **options)
        self.starting = TriangleAttention(pair_dim, pair_heads, axis=columns, **options)
        self.ending = TriangleAttention(pair_dim, pair_heads, axis=rows, **options)
        self.pair_transition = Transition(pair_dim, make)
        self.single_norm = LayerNorm(single_dim)
        self.attend = PairBiasedAttention(single_dim, single_heads, pair_dim=pair_dim, **options)
        self.single_transition = Transition(single_dim, make)
        replicate(self, self.outgoing.layout)

    def forward(
        self, single: Tensor, pair: Tensor, lengths: Mapping[str, int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The updated single vectors and pair tensor.

        Args:
            single: local (batch, objects, embed): those of this rank's rows.
            pair: local (batch, rows, columns, embed).
            lengths: global lengths of both pair axes, needed where the mesh does not divide them.
        """
        first, second, third, fourth = self.norms
        pair = pair + self.outgoing(first(pair), lengths)
        pair = pair + self.incoming(second(pair), lengths)
        pair = pair + self.starting(third(pair), lengths=lengths)
        pair = pair + self.ending(fourth(pair), lengths=lengths)
        pair = pair + self.pair_transition(pair)
        single = single + self.attend(self.single_norm(single), pair, lengths)
        return single + self.single_transition(single), pair


class Transition(nn.Module):
    """`W3 (silu(W1 y) * W2 y)` of the normalised y, four times as wide inside.

    >>> Transition(4, torch.Generator())(torch.zeros(2, 4)).shape
    torch.Size([2, 4])
    """

    def __init__(self, embed_dim: int, generator: torch.Generator, factor: int = 4) -> None:
        super().__init__()
        self.norm = LayerNorm(embed_dim)
        self.up = linear(embed_dim, 2 * factor * embed_dim, generator, bias=False)
        self.down = linear(factor * embed_dim, embed_dim, generator, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x as a local tensor."""
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


@cached(64)
def _rows_to_columns(
    layout: LayoutDeclaration, pair: tuple[str, str], length: int, place: tuple
) -> Redistribution:
    """From one vector per row of a rank's box to one per column of it."""
    at_rest = pair_at_rest(layout, pair)
    one = ("one", (), "contiguous")
    before, after = (Placed(at_rest.mesh, (split, one)) for split in at_rest.splits)
    coords = dict(place)
    rank = rank_at(dict(at_rest.mesh), {d: coords[d] for d, _ in at_rest.mesh})
    return plan_redistribution(before, after, (length, 1), rank)
