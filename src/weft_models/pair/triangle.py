"""Pair stacks over a sharded pair tensor: triangle multiplication and triangle attention.

A pair tensor z (batch rows columns embed) has a vector for every pair of objects (i, j). Structure
prediction updates it along triangles (i, j), (i, k), (j, k) (AlphaFold 2, supplementary algorithms
11 to 14, doi:10.1038/s41586-021-03819-2; Pairformer, doi:10.1038/s41586-024-07487-w).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from weft._caching import cached
from weft._digest import number_of
from weft._torch import outside_graphs
from weft.bias import Bias
from weft.comm.channel import Channel
from weft.declare.layout import LayoutDeclaration
from weft.declare.layout_file import HEADS
from weft.declare.mesh import index_at, places
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout
from weft.masks import Mask
from weft.masks.part import Renumbered
from weft.plan.lengths import wrong_lengths
from weft.plan.order import Spans, count, positions
from weft.plan.plan import score_tile
from weft_axes.nn.attention import MultiAxisAttention
from weft_axes.nn.parameters import HeadWeight, LayerNorm, linear, replicate
from weft_axes.nn.sequences import sequence_order

from .plan import ProductRule, pair_mesh, plan_boxes, plan_product
from .product import boxed, sharded_product

#: kind -> which axes of the factors and of the product are which objects
EQUATIONS = {"outgoing": "ik,jk->ij", "incoming": "ki,kj->ij"}
OF_RANKS = "ranks compare their calls of a module of pair tensors: compile without fullgraph=True"
PAIR_AXES = ("batch", "rows", "columns", "embed")


class TriangleMultiplication(nn.Module):
    """`sum_k a_ik * b_jk` (outgoing) or `sum_k a_ki * b_kj` (incoming), gated, per channel.

    a and b are gated projections of x, and the sum is normalised, projected and gated. Every rank
    holds its box of the pair tensor, before and after. While computing, a mesh dim that splits the
    contracted axis has partial sums, which go to their owners; one that splits the other axis
    brings the factor that lacks it:

        outgoing, rows over r, columns over c
        r    left S(i), right S(j) -> R, out S(i)
        c    left S(k), right S(k), out P(sum) -> S(j)

    Args:
        embed_dim: size of the last axis of input and output.
        kind: "outgoing" or "incoming" edges.
        axes: names of the input's dims: batch, both pair axes, and the embedding.
        layout: how the pair axes are split, bound. Default: one device.
        hidden: channels of a and b, default `embed_dim`.
        generator: the source of the initial weights.
        device: of the parameters.
        dtype: of the parameters, default torch's.

    Raises:
        DeclarationError: an unknown kind, or axes that are not four.

    >>> TriangleMultiplication(16, "outgoing")(torch.randn(1, 5, 5, 16)).shape
    torch.Size([1, 5, 5, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        kind: Literal["outgoing", "incoming"],
        *,
        axes: Sequence[str] = PAIR_AXES,
        layout: Layout | None = None,
        hidden: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kind not in EQUATIONS:
            raise DeclarationError(f"kind={kind!r}: a triangle is 'outgoing' or 'incoming'")
        self.kind, self.axes = kind, tuple(axes)
        self.layout = layout = Layout.single() if layout is None else layout
        self.pair = pair_axes(axes)
        hidden = embed_dim if hidden is None else hidden
        generator = generator or torch.Generator().manual_seed(torch.initial_seed())
        self.factors = linear(embed_dim, 2 * hidden, generator, bias=False)
        self.factor_gates = linear(embed_dim, 2 * hidden, generator, bias=False)
        self.norm = LayerNorm(hidden)
        self.out = linear(hidden, embed_dim, generator, bias=False)
        self.gate = linear(embed_dim, embed_dim, generator, bias=False)
        self.to(device=device, dtype=dtype)
        replicate(self, layout)

    def rules(self) -> dict[str, ProductRule]:
        """The role of every mesh dim that splits a pair axis, by its name.

        >>> layout = Layout.load("pair-2x2")
        >>> rules = TriangleMultiplication(8, "incoming", layout=layout).rules()
        >>> {name: rule.describe() for name, rule in rules.items()}["r"]
        'left S(k), right S(k), out P(sum) -> S(i)'
        """
        equation = EQUATIONS[self.kind]
        return {
            dim: ProductRule(equation, i)
            for i, axis in enumerate(self.pair)
            for dim in self.layout.shard_dims(axis)
        }

    def forward(self, x: Tensor, lengths: Mapping[str, int] | None = None) -> Tensor:
        """The update of x, without the residual.

        Args:
            x: local tensor with the dims `axes` names.
            lengths: global lengths of both pair axes, which are equal; needed where the mesh does
                not divide them.

        Raises:
            ShapeError: on every rank that takes part, if x is not this rank's box of a square.
        """
        length = square_length(self.layout, self.axes, x, lengths)
        left, right = (self.factors(x) * torch.sigmoid(self.factor_gates(x))).chunk(2, -1)
        equation, place = EQUATIONS[self.kind], tuple(self.layout.coords.items())
        plan = plan_product(self.layout.unbound, self.pair, equation, length, place)
        summed = sharded_product(left, right, equation, plan, self.layout.bound)
        return self.out(self.norm(summed)) * torch.sigmoid(self.gate(x))


class TriangleAttention(MultiAxisAttention):
    """Gated attention along one axis of a pair tensor, biased by a projection of the tensor itself.

    `softmax_k(q_ij k_ik / sqrt(d) + b_jk) v_ik` for `axis="columns"` (around the starting node),
    and the same with both axes swapped for `axis="rows"` (around the ending node). The bias of
    query and key is made of x where the other axis is the query and the attended one the key.
    Ranks make it for the pairs that they hold, and fetch what their scores need.

    Args:
        embed_dim, num_heads, axes, layout, generator: as for `MultiAxisAttention`.
        axis: the attended one of the two pair axes.
        options: others of `MultiAxisAttention`; `gate` is True by default.

    Raises:
        DeclarationError: as `MultiAxisAttention`, and if `axis` is no pair axis.

    >>> TriangleAttention(16, 2, axis="columns", axes=PAIR_AXES)(torch.randn(1, 5, 5, 16)).shape
    torch.Size([1, 5, 5, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        axis: str,
        axes: Sequence[str] = PAIR_AXES,
        layout: Layout | None = None,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        pair = pair_axes(axes)
        if axis not in pair:
            raise DeclarationError(f"axis={axis!r} is none of the pair axes {pair}")
        options = {"gate": True, **options}
        super().__init__(
            embed_dim,
            num_heads,
            axis=axis,
            axes=axes,
            layout=layout,
            generator=generator,
            **options,
        )
        self.pair = pair if axis == pair[1] else (pair[1], pair[0])  # queries, then keys
        self.heads = num_heads
        weight = torch.empty(num_heads, 1, embed_dim)
        weight.uniform_(-(embed_dim**-0.5), embed_dim**-0.5, generator=generator)
        device, dtype = self.query.weight.device, self.query.weight.dtype
        self.pair_bias = HeadWeight(weight, self.layout, device, dtype)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Any = None,
        lengths: Mapping[str, int] | None = None,
        context_lengths: Mapping[str, int] | None = None,
        *,
        bias: None = None,  # type: ignore[override]  # it makes its own
    ) -> Tensor:
        """As `MultiAxisAttention.forward`, without a context or another bias.

        Args:
            x: local tensor with the dims `axes` names.
            context: refused.
            mask: used instead of the module's mask.
            lengths: global lengths of both pair axes, needed where the mesh does not divide them.
            context_lengths: not read.
            bias: refused.

        Raises:
            UnsupportedError: a context or a bias.
        """
        if context is not None or bias is not None:
            raise UnsupportedError("triangle attention takes keys and its bias from x alone")
        self._check(x, None)
        length = square_length(self.layout, self.axes, x, lengths)
        tiles = self._bias_tiles(x, length)
        pair_lengths = dict.fromkeys(self.pair, length)
        masks = self._masks(
            self.mask if mask is None else mask, x, {**(lengths or {}), **pair_lengths}
        )
        rows = [
            super(TriangleAttention, self).forward(one, None, of_one, pair_lengths, None, bias=tile)
            for one, of_one, tile in zip(x.split(1), masks, tiles)
        ]
        return torch.cat(rows) if rows else x

    def _masks(self, mask: Mask, x: Tensor, lengths: Mapping[str, int]) -> list[Mask]:
        """The mask as the call for each sample sees it."""
        if not mask.per_sample:
            return [mask] * len(x)
        sequence_lengths = self.geometry.sequence_lengths(x.shape, lengths)
        subject = (
            self.layout.unbound,
            self.geometry.attended,
            sequence_lengths,
            self.geometry.sequences,
        )
        total = math.prod(length for _, length in sequence_lengths)
        orders = (sequence_order(*subject, sample) for sample in range(len(x)))
        return [Renumbered(mask, order, total) for order in orders]

    def _of_sequences(
        self, mask: Mask, bias: Bias | Tensor | None, *_: object
    ) -> tuple[Mask, Bias | Tensor | None]:
        return mask, bias  # are those of one sample already

    def _tile(self, bias: Bias | Tensor | None, *_: object) -> Bias | Tensor | None:
        return bias  # is a tile already

    def _bias_tiles(self, x: Tensor, length: int) -> list[Tensor]:
        """Per sample, the biases of the scores that this rank computes: (1 h queries keys)."""
        layout, unbound = self.layout, self.layout.unbound
        values = self.pair_bias.split(layout.enter(x, "heads"))  # b rows columns h
        values = values if self.pair[1] == self.axes[2] else values.transpose(1, 2)
        heads, mesh = values.shape[-1], pair_mesh(unbound, self.pair)
        coords = layout.coords
        if mesh:  # every rank has its part of them
            boxes = _boxes(unbound, self.pair, length, heads, tuple(coords.items()))
            plan = plan_boxes(unbound, self.pair, length, tuple(coords.items()), boxes)
            values = boxed(values, plan, (values.shape[1], values.shape[2]), layout.bound)
        *_, spans = _box(unbound, self.pair[1], length, heads, tuple(coords.items()))
        if count(spans) != heads:  # those that this rank computes with
            first = heads * index_at(layout.mesh, layout.shard_dims(HEADS), coords)
            values = values.index_select(-1, positions(spans, values.device) - first)
        return list(rearrange(values, "b n m h -> b h n m").contiguous().split(1))


@cached(256)
def _box(
    layout: LayoutDeclaration, axis: str, length: int, heads: int, place: tuple
) -> tuple[Spans, Spans, Spans]:
    """Positions of the queries and keys of the scores that a rank computes, and its heads."""
    tile = score_tile(layout, (axis,), ((length, length),), dict(place), heads)
    return tile.rows, tile.columns, tile.heads


@cached(64)
def _boxes(
    layout: LayoutDeclaration, pair: tuple[str, str], length: int, heads: int, place: tuple
) -> tuple[tuple[Spans, Spans], ...]:
    """The same of every rank along the mesh dims that split a pair axis."""
    mesh = dict(pair_mesh(layout, pair))
    rest = (dict(place) | at for at in places(mesh, mesh, dict.fromkeys(mesh, 0)))
    return tuple(_box(layout, pair[1], length, heads, tuple(at.items()))[:2] for at in rest)


def pair_axes(axes: Sequence[str]) -> tuple[str, str]:
    """The two pair axes among the names of a pair tensor's dims.

    >>> pair_axes(("batch", "i", "j", "embed"))
    ('i', 'j')
    """
    if len(axes) != 4 or len(set(axes)) != 4:
        raise DeclarationError(
            f"axes={tuple(axes)}: a pair tensor has four, batch, two pair axes and the embedding"
        )
    return axes[1], axes[2]


@functools.partial(outside_graphs, reason=OF_RANKS)
def square_length(
    layout: Layout,
    axes: Sequence[str],
    x: Tensor,
    lengths: Mapping[str, int] | None,
    wrong: str = "",
    shared: str = "",
) -> int:
    """The number of objects of a pair tensor, after a check that all ranks hold their box of it.

    `wrong` is a fault that the caller met on this rank, for which the call is refused too; `shared`
    is further text that ranks must have in common.
    """
    length, unknown = 0, wrong_lengths(lengths, axes[:-1])
    if unknown:
        wrong = unknown
    elif x.dim() != 4:
        wrong = f"a pair tensor has the dims {tuple(axes)}, found shape {tuple(x.shape)}"
    else:
        local = dict(zip(pair_axes(axes), x.shape[1:3]))
        whole = {a: int((lengths or {}).get(a, n * layout.size(a))) for a, n in local.items()}
        mine = {a: layout.local_length(a, n) for a, n in whole.items()}
        length = next(iter(whole.values()))
        if len(set(whole.values())) > 1:
            wrong = f"both axes of a pair tensor are about the same objects, found {whole}"
        elif local != mine:
            wrong = (
                f"this rank's box of {whole} is {mine}, found {local}; pass lengths= where the mesh"
                " does not divide them"
            )
    described = wrong or (
        f"{length} objects, {len(x)} samples, {x.shape[-1]} channels of {x.dtype}{shared}"
    )
    mesh_dims = [d for d, _ in pair_mesh(layout.unbound, pair_axes(axes))]
    if mesh_dims:
        label, digest = "a pair tensor", number_of(f"{layout.digest} {described}")
        kind = digest if x.is_cuda and not wrong else None
        given = layout.bound, mesh_dims, digest, label, lambda: described
        Channel(*given, kind=kind, subject=label).finish()
    if wrong:
        raise ShapeError(wrong)
    return length
