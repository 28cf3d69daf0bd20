"""Rows of a table over ranks: which rows attend to which, and how rows are split and joined.

Shapes: b tables x columns, r rows of this rank, R rows of all ranks, n training rows, h heads,
d head dim, e embed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from einops import rearrange
from torch import Tensor, nn

from weft.attention import attention
from weft.errors import UnsupportedError
from weft.layout import Layout
from weft.masks import EVERYTHING, FAR, NOTHING, Documents, FirstKeys, Interval, Mask

from .. import Foreign
from ..common import check_rows, joined


class TrainRows(int):
    """The number of thinking and training rows, n, which also knows the number of all rows."""

    rows: int

    def __new__(cls, n: int, rows: int) -> TrainRows:
        count = super().__new__(cls, n)
        count.rows = rows
        return count


@dataclass(frozen=True)
class QueriesFrom(Mask):
    """Only queries from position `n` on see anything: the test rows of a table.

    >>> QueriesFrom(4).queries((0, 9))[0]
    4
    """

    n: int

    per_sample = False

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


def heads(attn: Foreign, part: str, x: Tensor) -> Tensor:
    """Queries ("q"), keys ("k") or values ("v"), (b n h d), normalised where the model does."""
    projected = getattr(attn, f"{part}_projection")(x)
    split = rearrange(projected, "b n (h d) -> b n h d", d=attn.head_dim)
    norm = getattr(attn, f"{part}_norm", None)
    return split if norm is None else norm(split)


class Attends(nn.Module):
    """A module that replaces one of the model, with its parameters under their names."""

    def __init__(self, original: Foreign, layout: Layout, axis: str) -> None:
        super().__init__()
        self.layout, self.axis = layout, axis
        for name, child in original.named_children():
            self.add_module(name, child)
        for name, parameter in original.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    def over_rows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        length: tuple[int, int],
    ) -> Tensor:
        """Attention (b n h d) whose keys are rows of all ranks."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = attention(q, k, v, self.layout, self.axis, mask, length=length)
        return out.transpose(1, 2)


class ContextRows(Attends):
    """Attention of a table's rows on a layout: all see the training rows.

    Training rows see every head's own keys and values. Test rows may use the first heads' only
    (`test_heads`); both are then weft attention, each giving 0 to the other's rows, so that the
    outputs add up. In place of v3's `ICLAttention`, and of v2's `AlongColumnAttention`, whose test
    rows use one.
    """

    out_projection: Foreign

    def __init__(
        self, original: Foreign, layout: Layout, axis: str, test_heads: int | None
    ) -> None:
        super().__init__(original, layout, axis)
        self.head_dim, self.test_heads = original.head_dim, test_heads

    def forward(
        self,
        x: Tensor,
        single_eval_pos: TrainRows,
        *,
        cached_kv: object = None,
        return_kv: bool = False,
    ) -> tuple[Tensor, None]:
        """x (b r e) to (b r e), as the original, for this rank's rows."""
        if cached_kv is not None or return_kv:
            raise UnsupportedError("return_kv_cache and kv_cache: weft keeps no cache of keys")
        n, rows = int(single_eval_pos), single_eval_pos.rows
        q, k, v = (heads(self, part, x) for part in "qkv")
        scaling = getattr(self, "softmax_scaling_layer", None)
        q = q if scaling is None else scaling(q, n)
        length = (rows, rows)
        if self.test_heads is None or n == rows:
            out = self.over_rows(q, k, v, FirstKeys(n), length)
        else:
            parts = tuple(size for size in (n, rows - n) if size)
            out = self.over_rows(q, k, v, Documents(parts) & FirstKeys(n), length)
            k, v = (t[:, :, : self.test_heads].contiguous() for t in (k, v))
            out = out + self.over_rows(q, k, v, QueriesFrom(n) & FirstKeys(n), length)
        return self.out_projection(out.flatten(2)), None


def take_rows(blocks: Sequence[nn.Module], layout: Layout, axis: str) -> list[Callable[[], None]]:
    """Hooks of blocks called as `block(x, n, ...)`: the first takes this rank's rows of the whole.

    x (tables, R, ...) comes as a tensor or as a list of one. Every block gets the number of rows
    over all ranks. Returns functions that remove the hooks.
    """
    rows = [0]  # of the running call

    def hook(module: nn.Module, args: tuple) -> tuple:
        x, n, *extra = args
        if module is blocks[0]:
            table = x.pop(0) if isinstance(x, list) else x
            rows[0], x = table.shape[1], own_rows(table, layout, axis)
        return x, TrainRows(n, rows[0]), *extra

    return [block.register_forward_pre_hook(hook).remove for block in blocks]


def own_rows(table: Tensor, layout: Layout, axis: str, noun: str = "rows") -> Tensor:
    """This rank's rows of a table (tables, R, ...); refuses tables that leave a rank without."""
    check_rows(layout, axis, table.shape[1], noun)
    return layout.shard(table, {axis: 1})


def gather_rows(x: Tensor, layout: Layout, axis: str, rows: int) -> Tensor:
    """All rows on every rank, b R c e; backward sums the ranks' gradients and keeps own rows."""
    return joined(x, layout.positions(axis, rows, x.device), rows, 1, layout, axis)
