"""Rows of a table over ranks: which rows attend to which, and how rows are split and joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ...comm.collectives import partial_to_replicate
from ...layout import Layout
from ...masks import EVERYTHING, FAR, NOTHING, Interval, Mask
from ..common import check_rows


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

    Attributes:
        n: position of the first of them.

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


def take_rows(blocks: Sequence[nn.Module], layout: Layout, axis: str) -> list[Callable[[], None]]:
    """Hooks of blocks called as `block(x, n, ...)`: the first takes this rank's rows of the whole.

    x (tables, R, ...) comes as a tensor or as a list of one. Every block gets the number of rows
    over all ranks. Returns functions that remove the hooks.
    """
    rows = [0]  # of the running call

    def hook(module: nn.Module, args: tuple) -> tuple:
        x, n, *more = args
        if module is blocks[0]:
            table = x.pop(0) if isinstance(x, list) else x
            rows[0], x = table.shape[1], own_rows(table, layout, axis)
        return x, TrainRows(n, rows[0]), *more

    return [block.register_forward_pre_hook(hook).remove for block in blocks]


def own_rows(table: Tensor, layout: Layout, axis: str, noun: str = "rows") -> Tensor:
    """This rank's rows of a table (tables, R, ...); refuses tables that leave a rank without."""
    check_rows(layout, axis, table.shape[1], noun)
    return layout.shard(table, {axis: 1})


def gather_rows(x: Tensor, layout: Layout, axis: str, rows: int) -> Tensor:
    """All rows on every rank, b R c e; backward sums the ranks' gradients and keeps own rows.

    before  rank 0: x0        rank 1: x1
    after   both:   [x0 | x1]            backward: rank i gets (g0 + g1)'s part i
    """
    gathered = x.new_zeros(x.shape[0], rows, *x.shape[2:])
    index = layout.positions(axis, rows, x.device)
    gathered = gathered.index_copy(1, index, x)
    return partial_to_replicate(gathered, layout.shard_dims(axis), layout.bound)
