"""Sums over the tokens of all ranks whose bits depend on no order: gradients of weights, losses.

Summands are rounded to a grid so coarse that fp64 adds its multiples exactly, as `fixed_order` does
with gradients of attention. Of a product of two matrices both factors are:

    dW = dy^T x        x = i gx,  dy = j gy, with whole i and j        dW = gx gy (j^T i)
    gx = 2^-26 |x|     of the norm of each column over all tokens, so that every partial sum of
    gy = 2^-26 |dy|    j^T i is below 2^53 (Cauchy-Schwarz): one product in fp64, exact in any order

So a rank multiplies whatever tokens it has, in any order, a chunk that stays in a core's cache at a
time. The error, at most 2^-26 |x| |dy|, is no more than fp32 has when it adds one token after the
other. Splitting operands so that products are exact is the idea of Ozaki et al.
(doi:10.1007/s11075-011-9478-1).

The rank that comes first has the sum, rounded once, and the others have zeros: whatever adds
gradients over ranks (`sync_gradients`) adds exactly, in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..comm import Shuffle, Transport
from ..comm.once_differentiable import once
from ..comm.transport import Messages

#: Bits of a factor: the norm of a column has so many.
FACTOR_BITS = 26
#: Rows that are rounded and multiplied at once.
CHUNK = 256
#: Bits of a number's square, rounded up, of which fp32 adds a chunk exactly. An even number.
SQUARE_BITS = 24 - CHUNK.bit_length() + 1
#: Rows and columns of a matrix product are multiples of these: others may take another routine for
#: the last ones, or for all.
ROWS, COLUMNS = 32, 16


def largest(transport: Messages, mesh_dim: str, values: Tensor) -> Tensor:
    """The largest of each number among the ranks along a mesh dim."""
    ranks, each = transport.sizes[mesh_dim], values.numel()
    sent = values.flatten().repeat(ranks)
    received = transport.all_to_all(
        Shuffle(mesh_dim, "bounds", sent, [each] * ranks, [each] * ranks, even=True)
    )
    return received.view(ranks, *values.shape).amax(0)


@dataclass(frozen=True)
class ExactSums:
    """Sums over the ranks along `dims`, the mesh dims along which ranks have other tokens.

    >>> from weft.comm import Alone
    >>> ExactSums(Alone(), ()).of_rows(torch.tensor([[1.0], [2.0]]))
    tensor([3.], dtype=torch.float64)
    """

    transport: Transport
    dims: tuple[str, ...]

    @property
    def moving(self) -> tuple[str, ...]:
        """Mesh dims that have several ranks."""
        return tuple(d for d in self.dims if self.transport.sizes[d] > 1)

    def of_rows(self, rows: Tensor, into: tuple[Tensor, int] | None = None) -> Tensor:
        """The sum of the rows (n, ...) of all ranks, in fp64; the same on every rank.

        `into` names the row (n,) of a table that each is added to, and how many rows that has.
        """
        most = self._most(_sizes(rows))
        count = self._sum(_counts(rows).sum(dtype=torch.float64))
        exponent = torch.frexp(most * count).exponent
        offset = _offset(exponent, torch.isfinite(most), 51)
        chunks = (
            part.to(torch.float64, copy=True).add_(offset).sub_(offset)
            for part in rows.split(CHUNK)
        )
        if into is None:
            return self._sum(functools.reduce(torch.add, (part.sum(0) for part in chunks)))
        ids, length = into
        table = offset.new_zeros((length, *rows.shape[1:]))
        for where, part in zip(ids.split(CHUNK), chunks):
            table.index_add_(0, where, part)
        return self._sum(table)

    def of_products(self, above: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weight and bias gradients of a linear layer over all rows: above^T x and above.sum(0).

        In fp64, (i, j) and (i,), the same on every rank. Rows of gradients that several ranks have
        are zeros on all but one of these.
        """
        counts = _counts(above)  # rows of zeros must not count in the norm of x
        if not bool(counts.all()):
            above, x = (t * counts[:, None] for t in (above, x))
        most = self._most(torch.cat([_sizes(above), _sizes(x)]))
        # 2^127 is fp32's largest scale: of columns below 2^-119 the grid is as of 2^-119.
        exponent = torch.frexp(most).exponent.clamp(min=SQUARE_BITS // 2 - 127)
        norm = self._sum(_squares(above, x, SQUARE_BITS // 2 - exponent)).sqrt()
        exponent += torch.frexp(norm).exponent - SQUARE_BITS // 2
        offset = _offset(exponent, torch.isfinite(most), FACTOR_BITS)
        return self._products(above, x, offset)

    def _products(self, above: Tensor, x: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        i, j = above.shape[1], x.shape[1]
        result = offset.new_zeros((i, j + 1))
        rounded = offset.new_ones((CHUNK, i + j + 1))
        for a, b in zip(above.split(CHUNK), x.split(CHUNK)):
            rows = rounded[: len(a)]
            rows[:, :i].copy_(a)
            rows[:, i:-1].copy_(b)
            rows[:, :-1].add_(offset).sub_(offset)
            result.addmm_(rows[:, :i].t(), rows[:, i:])
        result = self._sum(result)
        return result[:, :-1], result[:, -1]

    def on_first(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """A sum on the first of the ranks, and zeros on the others."""
        first = all(self.transport.coords[d] == 0 for d in self.dims)
        return total.to(dtype) if first else torch.zeros_like(total, dtype=dtype)

    def _most(self, sizes: Tensor) -> Tensor:
        """The largest of all ranks, number by number, in fp64."""
        sizes = sizes.to(torch.float64)
        for mesh_dim in self.moving:
            sizes = largest(self.transport, mesh_dim, sizes)
        return sizes

    def _sum(self, total: Tensor) -> Tensor:
        dims = self.moving
        return self.transport.all_reduce(total.contiguous(), dims, "exact") if dims else total


def _sizes(rows: Tensor) -> Tensor:
    """The size of the largest row, number by number."""
    if not len(rows):
        return rows.new_zeros(rows.shape[1:])
    return torch.maximum(rows.amax(0), -rows.amin(0))


def _counts(rows: Tensor) -> Tensor:
    """Mask of the rows that are not zero, (n,)."""
    if rows.dim() == 1:
        return rows != 0
    if not rows.numel():
        return rows.new_zeros(len(rows), dtype=torch.bool)
    rows = rows.flatten(1)
    return (rows.amax(1) != 0) | (rows.amin(1) != 0)


def _squares(above: Tensor, x: Tensor, exponent: Tensor) -> Tensor:
    """Sums of squares of columns times 2^exponent, each rounded up to a whole number; fp64."""
    i, dtype = above.shape[1], torch.promote_types(above.dtype, torch.float32)
    scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent).to(dtype)
    result = torch.zeros_like(scale, dtype=torch.float64)
    held = scale.new_empty((CHUNK, len(scale)))
    for a, b in zip(above.split(CHUNK), x.split(CHUNK)):
        rows = held[: len(a)]
        rows[:, :i].copy_(a)
        rows[:, i:].copy_(b)
        result += rows.mul_(scale).square_().ceil_().sum(0)
    return result


def _offset(exponent: Tensor, finite: Tensor, bits: int) -> Tensor:
    """The number to add and take away again that rounds to multiples of 2^(exponent - bits).

    Not finite where a number is not.
    """
    one = torch.where(finite, 1.5, torch.nan).to(torch.float64)
    return torch.ldexp(one, exponent + 52 - bits)


def exact_linear(x: Tensor, weight: Tensor, sums: ExactSums, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, (..., k) and (n, k) -> (..., n), row by row the same in any company.

    Tokens are this rank's, weight and bias (n,) the same on every rank. Within `torch.autocast` all
    are cast as torch casts them.
    """
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return _Linear.apply(x, weight, bias, sums)
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return _Linear.apply(
            x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), sums
        )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sums: ExactSums
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums = sums
        result = _rows_times(x, weight)
        return result if bias is None else result.add_(bias)

    @staticmethod
    @once("a reproducible product", linear=False)
    def backward(ctx: Any, saved: tuple, above: Tensor) -> tuple:
        x, weight = saved
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = _rows_times(above, weight.t())
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            result = ctx.sums.of_products(above.flatten(0, -2), x.flatten(0, -2))
            dw, db = (
                ctx.sums.on_first(total, weight.dtype) if needed else None
                for total, needed in zip(result, ctx.needs_input_grad[1:])
            )
        return dx, dw, db, None


def _rows_times(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T in one call, both padded and in contiguous memory."""
    rows = x.flatten(0, -2)
    result = F.linear(_padded(rows, ROWS), _padded(weight, COLUMNS))
    return result[: len(rows), : len(weight)].reshape(*x.shape[:-1], len(weight))


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
        return weight.expand(shape)

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

    `ids` are of this rank's tokens, the table is the same on every rank, and row `padding` gets no
    gradient.
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
    """The sum of all ranks' numbers (n,) in fp64: the same on every rank, for one loss (P -> I)."""
    return _Total.apply(values, sums)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, sums: ExactSums) -> Tensor:
        ctx.shape, ctx.dtype = values.shape, values.dtype
        return sums.of_rows(values)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple:
        return above.to(ctx.dtype).expand(ctx.shape), None
