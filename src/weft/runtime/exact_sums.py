"""Sums over the tokens of all ranks whose bits depend on no order: gradients of weights, losses.

Summands are rounded to a grid so coarse that fp64 adds its multiples exactly, as `fixed_order` does
with gradients of attention. Of a product of two matrices both factors are:

    dW = dy^T x        x = i gx,  dy = j gy, with whole i and j        dW = gx gy (j^T i)
    gx = 2^-26 |x|     of the norm of each column over all tokens, so that every partial sum of
    gy = 2^-26 |dy|    j^T i is below 2^53 (Cauchy-Schwarz): one product in fp64, exact in any order

So a rank multiplies whatever tokens it has at once. The error, at most 2^-26 |x| |dy|, is no more
than fp32 has when it adds one token after the other. Splitting operands so that products are exact
is the idea of Ozaki et al. (doi:10.1007/s11075-011-9478-1).

The rank that comes first has the sum, rounded once, and the others have zeros: whatever adds
gradients over ranks (`sync_gradients`) adds exactly, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..comm import Shuffle, Transport
from ..comm.channel import Channel
from ..comm.once_differentiable import once

#: Bits of a factor: the norm of a column has so many.
FACTOR_BITS = 26
#: Bits by which the size of a number is rounded up where a norm is bounded.
NORM_BITS = 12
#: Rows and columns of a matrix product are multiples of these: others may take another routine for
#: the last ones, or for all.
ROWS, COLUMNS = 32, 16


def largest(transport: Transport | Channel, mesh_dim: str, values: Tensor) -> Tensor:
    """The largest of each number among the ranks along a mesh dim."""
    ranks, each = transport.sizes[mesh_dim], values.numel()
    sent = values.flatten().repeat(ranks)
    came = transport.all_to_all(Shuffle(mesh_dim, "bounds", sent, [each] * ranks, [each] * ranks))
    return came.view(ranks, *values.shape).amax(0)


@dataclass(frozen=True)
class ExactSums:
    """Sums over the ranks along mesh dims that split tokens.

    Args:
        transport: this rank's.
        dims: along which ranks have other tokens.

    >>> from weft.comm import Alone
    >>> ExactSums(Alone(), ()).of_rows(torch.tensor([[1.0], [2.0]]))
    tensor([3.], dtype=torch.float64)
    """

    transport: Transport
    dims: tuple[str, ...]

    @property
    def moving(self) -> tuple[str, ...]:
        """Those of the mesh dims that have several ranks."""
        return tuple(d for d in self.dims if self.transport.sizes[d] > 1)

    def of_rows(self, rows: Tensor, into: tuple[Tensor, int] | None = None) -> Tensor:
        """The sum of the rows (n, ...) of all ranks, in fp64; the same on every rank.

        Args:
            into: to which row of a table each is added (n,), and how many rows that has.
        """
        most = self._most(rows)
        count = self._sum(_counts(rows).sum(dtype=torch.float64))
        exponent = torch.frexp(most * count).exponent
        exact = _rounded(rows, exponent, torch.isfinite(most), 51)
        if into is None:
            return self._sum(exact.sum(0))
        ids, length = into
        table = exact.new_zeros((length, *rows.shape[1:]))
        return self._sum(table.index_add_(0, ids, exact))

    def of_products(self, a: Tensor, b: Tensor) -> Tensor:
        """a^T b of the rows (n, i) and (n, j) of all ranks, in fp64; the same on every rank."""
        # Rows that several ranks have count once: all but one of these have gradients of zero.
        both = torch.cat([a, b], 1) * (_counts(a) & _counts(b))[:, None]
        most = self._most(both)
        exponent, width = torch.frexp(most).exponent, a.shape[1]
        units = torch.ldexp(both.abs().to(torch.float64), NORM_BITS - exponent).ceil_()
        norm = self._sum(units.square_().sum(0)).sqrt()
        exponent = exponent - NORM_BITS + torch.frexp(norm).exponent
        exact = _rounded(both, exponent, torch.isfinite(most), FACTOR_BITS)
        return self._sum(exact[:, :width].t() @ exact[:, width:])

    def on_first(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """A sum on the first of the ranks, and zeros on the others."""
        first = all(self.transport.coords[d] == 0 for d in self.dims)
        return total.to(dtype) if first else torch.zeros_like(total, dtype=dtype)

    def _most(self, rows: Tensor) -> Tensor:
        """The size of the largest of all ranks' rows, number by number, in fp64."""
        shape = rows.shape[1:]
        sizes = rows.abs().amax(0) if len(rows) else rows.new_zeros(shape)
        sizes = sizes.to(torch.float64)
        for mesh_dim in self.moving:
            sizes = largest(self.transport, mesh_dim, sizes)
        return sizes

    def _sum(self, total: Tensor) -> Tensor:
        dims = self.moving
        return self.transport.all_reduce(total.contiguous(), dims, "exact") if dims else total


def _counts(rows: Tensor) -> Tensor:
    """Which rows are no zeros, (n,)."""
    return (rows != 0).flatten(1).any(1) if rows.dim() > 1 else rows != 0


def _rounded(rows: Tensor, exponent: Tensor, finite: Tensor, bits: int) -> Tensor:
    """Rows in fp64, as multiples of 2^(exponent - bits); not finite where a number is not."""
    one = torch.where(finite, 1.5, torch.nan).to(torch.float64)
    offset = torch.ldexp(one, exponent + 52 - bits)
    return rows.to(torch.float64, copy=True).add_(offset).sub_(offset)


def exact_linear(x: Tensor, weight: Tensor, sums: ExactSums) -> Tensor:
    """x weight^T, (..., k) and (n, k) -> (..., n), row by row the same in any company.

    Within `torch.autocast` both are cast as torch casts them.

    Args:
        x: this rank's tokens.
        weight: the same on every rank.
        sums: over the tokens.
    """
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return _Linear.apply(x, weight, sums)
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return _Linear.apply(x.to(dtype), weight.to(dtype), sums)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sums: ExactSums) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums = sums
        return _rows_times(x, weight)

    @staticmethod
    @once("a reproducible product", linear=False)
    def backward(ctx: Any, saved: tuple, above: Tensor) -> tuple:
        x, weight = saved
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _rows_times(above, weight.t())
        if ctx.needs_input_grad[1]:
            total = ctx.sums.of_products(above.flatten(0, -2), x.flatten(0, -2))
            dw = ctx.sums.on_first(total, weight.dtype)
        return dx, dw, None


def _rows_times(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T in one call, both padded and in contiguous memory."""
    rows = x.flatten(0, -2)
    made = F.linear(_padded(rows, ROWS), _padded(weight, COLUMNS))
    return made[: len(rows), : len(weight)].reshape(*x.shape[:-1], len(weight))


def _padded(x: Tensor, unit: int) -> Tensor:
    """x with rows of zeros up to a multiple of `unit`."""
    length = max(1, -(-len(x) // unit)) * unit
    if length == len(x):
        return x.contiguous()
    padded = x.new_zeros((length, x.shape[1]))
    padded[: len(x)] = x
    return padded


def spread(weight: Tensor, shape: Sequence[int], sums: ExactSums) -> Tensor:
    """A weight broadcast to the shape of tokens; its gradient is summed over those of all ranks."""
    return _Spread.apply(weight, tuple(shape), sums)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, shape: tuple[int, ...], sums: ExactSums) -> Tensor:
        ctx.shape, ctx.dtype, ctx.sums = weight.shape, weight.dtype, sums
        return weight.expand(shape).clone()

    @staticmethod
    @once("a reproducible sum")
    def backward(ctx: Any, above: Tensor) -> tuple:
        lead = above.dim() - len(ctx.shape)
        inner = [i for i, n in enumerate(ctx.shape) if n == 1 and above.shape[lead + i] != 1]
        front = [*range(lead), *(lead + i for i in inner)]
        back = [i for i in range(above.dim()) if i not in front]
        rows = above.permute(*front, *back)
        rows = rows.reshape(-1, *(above.shape[i] for i in back))
        total = ctx.sums.of_rows(rows).reshape(ctx.shape)
        return ctx.sums.on_first(total, ctx.dtype), None, None


def lookup(ids: Tensor, weight: Tensor, sums: ExactSums, padding: int | None = None) -> Tensor:
    """Rows of a table; the gradient is summed over the tokens of all ranks.

    Args:
        ids: of this rank's tokens.
        weight: the table, the same on every rank.
        sums: over the tokens.
        padding: a row that gets no gradient.
    """
    return _Lookup.apply(ids, weight, sums, padding)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, sums: ExactSums, padding: int | None
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype, ctx.sums, ctx.padding = weight.shape, weight.dtype, sums, padding
        return F.embedding(ids, weight)

    @staticmethod
    @once("a reproducible sum", linear=False)
    def backward(ctx: Any, saved: tuple, above: Tensor) -> tuple:
        (ids,) = saved
        rows = above.reshape(-1, *ctx.shape[1:])
        total = ctx.sums.of_rows(rows, (ids.flatten(), ctx.shape[0]))
        if ctx.padding is not None:
            total[ctx.padding] = 0.0
        return None, ctx.sums.on_first(total, ctx.dtype), None, None


def total(values: Tensor, sums: ExactSums) -> Tensor:
    """The sum of all ranks' numbers (n,), in fp64: the same on every rank, for one loss (P -> I).

    Args:
        values: this rank's.
        sums: over the ranks.
    """
    return _Total.apply(values, sums)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, sums: ExactSums) -> Tensor:
        ctx.shape, ctx.dtype = values.shape, values.dtype
        return sums.of_rows(values)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple:
        return above.to(ctx.dtype).expand(ctx.shape), None
