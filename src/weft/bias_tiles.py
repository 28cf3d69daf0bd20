"""The tile of a learned bias whose scores a rank computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._compile import flattened, restored
from ._torch import constant_in_graphs
from .layout import Layout
from .plan.call import axis_names
from .plan.lengths import Length, read_length
from .plan.order import Spans, positions
from .plan.plan import score_tile
from .plan.problem import shard_batches


def bias_tile(
    bias: Tensor,
    layout: Layout,
    axis: str | Sequence[str],
    length: Length | None = None,
) -> Tensor:
    """This rank's tile of a whole bias (B or 1, H or 1, N, M): what `attention(bias=...)` takes.

    Rows are the queries and columns the keys whose scores the rank computes, in its own order;
    batch and heads are those it computes with.

    Args:
        bias: the whole bias, the same on every rank.
        layout: a bound layout.
        axis: the attended axis, or several attended jointly.
        length: global length of the axis, as in `attention`; default the bias's own.

    Returns:
        The tile. Differentiable: each rank's gradient is what its own scores contribute, so that
        of a bias which ranks share is the sum of theirs (`layout.sync_gradients`, and
        `layout.enter(bias, "heads")` over head-parallel mesh dims). Where a mesh dim splits keys
        and has queries whole (`kv_parallel`), `sync_gradients` sums nothing and refuses the ranks'
        parts: sum them over that mesh dim yourself before.

    >>> bias_tile(torch.zeros(1, 2, 5, 5), Layout.single(), "tokens").shape
    torch.Size([1, 2, 5, 5])
    """
    axes = axis_names(axis)
    batches = shard_batches(layout, axes, bias.shape[0]) if bias.shape[0] > 1 else ()
    return tile_of_bias(bias, layout, axes, length, batches)


def tile_of_bias(
    bias: Tensor,
    layout: Layout,
    axes: tuple[str, ...],
    length: Length | None,
    batches: tuple[int, ...],
) -> Tensor:
    """`bias_tile` of a bias per sequence; `batches` is the local batch of every rank."""
    if length is None:
        length = bias.shape[2], bias.shape[3]
    for dim, spans in _tile(bias, layout, axes, length, batches):
        if dim > 1 or bias.shape[dim] > 1:
            bias = bias.index_select(dim, positions(spans, bias.device))
    return bias


def _tile(
    bias: Tensor,
    layout: Layout,
    axes: tuple[str, ...],
    length: Length,
    batches: tuple[int, ...] = (),
) -> tuple[tuple[int, Spans], ...]:
    """The dims of a bias (b, h, ...), each with the positions of this rank's scores."""
    heads = (bias.shape[1] if bias.shape[1] > 1 else layout.world_size) // layout.size("heads")
    kind = bias.dtype, bias.device.type
    return _tile_of(flattened(layout), axes, read_length(axes, length) or (), heads, batches, *kind)


@constant_in_graphs
def _tile_of(
    layout: tuple,
    axes: tuple[str, ...],
    lengths: tuple[tuple[int, int], ...],
    heads: int,
    batches: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
) -> tuple[tuple[int, Spans], ...]:
    """The dims of a bias, each with the positions of the scores that this rank computes."""
    bound = restored(layout)
    tile = score_tile(bound.unbound, axes, lengths, bound.coords, heads, batches, dtype, device)
    return (2, tile.rows), (3, tile.columns), (1, tile.heads), (0, tile.batch)


def tile_of_distances(table: Tensor, layout: Layout, axis: str) -> Tensor:
    """This rank's tile (1, h, rows, columns) of a bias of distances, without the whole bias.

    `table` (H or 1, 2 n - 1) has the bias of keys that are n - 1 before a query, ..., n - 1 behind
    it, for an axis of n tokens; gradients are as those of `bias_tile`.

    >>> tile_of_distances(torch.arange(5.0)[None], Layout.single(), "tokens")
    tensor([[[[2., 3., 4.],
              [1., 2., 3.],
              [0., 1., 2.]]]])
    """
    length = (table.shape[1] + 1) // 2
    tile = dict(_tile(table[None], layout, (axis,), length))
    heads, rows, columns = (positions(tile[dim], table.device) for dim in (1, 2, 3))
    if table.shape[0] > 1:
        table = table.index_select(0, heads)
    distances = columns[None, :] - rows[:, None] + (length - 1)
    return table.index_select(1, distances.flatten()).view(1, -1, *distances.shape)
