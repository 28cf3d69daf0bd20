"""TabPFN on a layout: the `tabpfn` package's v2.5 and v2.6 with their rows split over ranks.

Every rank embeds the whole table (a linear map per cell), keeps its own rows through all blocks,
where the time and the memory go, and the target column's rows come together again for the output.

Shapes: b tables x columns, r rows of this rank, R rows of all ranks, c columns, h heads, d head
dim, e embed. The first n rows are thinking and training rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..attention import attention
from ..errors import DeclarationError, UnsupportedError
from ..layout import Layout
from ..masks import EVERYTHING, FAR, NOTHING, Context, Documents, Interval, Mask


class TrainRows(int):
    """The number of thinking and training rows, n, which also knows the number of all rows."""

    rows: int

    def __new__(cls, n: int, rows: int) -> TrainRows:
        made = super().__new__(cls, n)
        made.rows = rows
        return made


@dataclass(frozen=True)
class QueriesFrom(Mask):
    """Only queries from position `n` on see anything: the test rows of a table."""

    n: int

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= self.n) & (k >= 0)

    def keys(self, q: Interval) -> Interval:
        return EVERYTHING if q[1] >= self.n else NOTHING

    def queries(self, k: Interval) -> Interval:
        return self.n, FAR

    def is_full(self, q: Interval, k: Interval) -> bool:
        return q[0] >= self.n

    def cuts(self, length: int) -> tuple[int, ...]:
        return (self.n,)


class RowAttention(nn.Module):
    """`AlongColumnAttention` on a layout, with the same parameters under the same names.

    Training rows see training rows with every head's own keys and values. Test rows see training
    rows too, but all their heads use the first head's keys and values. Both are weft attention;
    each gives 0 to the other's rows, so the outputs add up.
    """

    def __init__(self, original: nn.Module, layout: Layout, axis: str) -> None:
        super().__init__()
        self.num_heads, self.head_dim = original.num_heads, original.head_dim
        self.layout, self.axis = layout, axis
        for name, projection in original.named_children():
            self.add_module(name, projection)

    def forward(
        self, x: Tensor, single_eval_pos: TrainRows, *, cached_kv=None, return_kv: bool = False
    ) -> tuple[Tensor, None]:
        """x (b r e) to (b r e), as the original, for this rank's rows."""
        if cached_kv is not None or return_kv:
            raise UnsupportedError("return_kv_cache and kv_cache: weft keeps no cache of keys")
        n, rows = int(single_eval_pos), single_eval_pos.rows
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_projection, self.k_projection, self.v_projection)
        )
        where = self.layout, self.axis
        parts = tuple(size for size in (n, rows - n) if size)
        out = attention(q, k, v, *where, Documents(parts) & Context(n), length=rows)
        if n < rows:
            first = k[:, :1].contiguous(), v[:, :1].contiguous()
            out = out + attention(q, *first, *where, QueriesFrom(n) & Context(n), length=rows)
        return self.out_projection(out.transpose(1, 2).flatten(2)), None


def parallelize(model: nn.Module, layout: Layout, axis: str = "rows") -> nn.Module:
    """Split the rows of a TabPFN architecture over a layout; returns the model.

    The model is called as before, with the whole table on every rank, and returns the whole
    output on every rank. After `backward`, which every rank calls on the same loss, call
    `layout.sync_gradients(model)`: the gradients are those of one process.

    Raises `UnsupportedError` for an architecture that is not TabPFN v2.5 or v2.6, and in calls
    for key/value caches.
    """
    if not hasattr(model, "add_thinking_rows") or not hasattr(model, "blocks"):
        raise UnsupportedError(
            f"{type(model).__name__} is not TabPFN v2.5 or v2.6: it has no add_thinking_rows"
        )
    if set(layout.data_dims) != set(layout.shard_dims(axis)):
        raise DeclarationError(
            f"{layout.source}: the rows may be split, over {layout.shard_dims(axis)}, but nothing "
            f"else; found {layout.data_dims}"
        )
    _ = layout.bound
    for block in model.blocks:
        own = block.per_column_attention_between_cells
        block.per_column_attention_between_cells = RowAttention(own, layout, axis)

    def split(module, args, output):
        x, n = output  # b R c e
        return layout.shard(x, {axis: 1}), TrainRows(n, x.shape[1])

    def join(module, args, output):
        x, _ = output  # b r c e; only the last column, the target's, is read from here on
        return _gather(x[:, :, -1:], layout, axis, args[1].rows), None

    def share(module, args, output):
        return _scale_gradient(output, 1.0 / layout.size(axis))

    model.add_thinking_rows.register_forward_hook(split)
    model.blocks[-1].register_forward_hook(join)
    # What follows the blocks runs on every rank alike, and sync_gradients sums over the ranks.
    model.output_projection.register_forward_hook(share)
    return model


def _gather(x: Tensor, layout: Layout, axis: str, rows: int) -> Tensor:
    """All rows on every rank, b R c e; backward sums the ranks' gradients and keeps own rows.

    before  rank 0: x0        rank 1: x1
    after   both:   [x0 | x1]            backward: rank i gets (g0 + g1)'s part i
    """
    whole = x.new_zeros(x.shape[0], rows, *x.shape[2:])
    index = layout.positions(axis, rows, x.device)
    return layout.sum(whole.index_copy(1, index, x), axis)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def _scale_gradient(x: Tensor, factor: float) -> Tensor:
    """The same tensor, whose gradient is multiplied by a factor."""
    return _ScaleGradient.apply(x, factor)
