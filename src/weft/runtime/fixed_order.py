"""Partial results of reproducible attention: the same bits for every split of the work.

Outputs merge in one binary tree over the key blocks (`plan.leaves`), whoever merges. Gradients are
sums, whose order can be made not to matter: each part is rounded to a grid so coarse that fp64 adds
its multiples exactly (arXiv:1506.03997 reviews such sums), and so fine, 2^-52 of a bound on the
sum, that nothing is lost which fp32 would keep, as long as numbers of a head differ in size by less
than about 1e8 in all (`gradient_bounds`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.transport import Messages
from ..plan.leaves import Node, depth
from ..plan.sides import Sides
from ..same_bits.sums import largest
from .merging import Tensors, empty_like_query, empty_rows


class Part(NamedTuple):
    """Output (b h n e) and logsumexp (b h n) over some keys of rows [low, low + n)."""

    low: int
    out: Tensor
    lse: Tensor

    @property
    def high(self) -> int:
        return self.low + self.out.shape[2]


class OutputTree:
    """Rows of outputs and their logsumexp; parts merge once both children of a node are there.

    The output has `shape` (b h n e); the leaves of the tree are `blocks` blocks of keys.
    """

    def __init__(
        self, shape: tuple[int, ...], like: Tensor, accum_dtype: torch.dtype, blocks: int
    ) -> None:
        self.shape, self.like, self.accum_dtype, self.blocks = shape, like, accum_dtype, blocks
        self.nodes: dict[Node, Part | None] = {}  # None: no row of it sees a key

    def leaf(
        self, key_block: int, parts: Iterable[tuple[int, Tensor, Tensor, tuple[int, int] | None]]
    ) -> None:
        """Results of a leaf's calls: (first row, output, logsumexp, sequences)."""
        result: Part | None = None
        for low, out, lse, samples in parts:
            part = Part(low, out.to(self.accum_dtype), lse.to(self.accum_dtype))
            if samples is not None:
                part = self._among_all(part, samples)
            result = part if result is None else self._merged(result, part)
        self.put((0, key_block), result)

    def put(self, node: Node, part: Part | None) -> None:
        """A node that is whole."""
        level, place = node
        while level < depth(self.blocks):
            sibling = level, place ^ 1
            if (place ^ 1) << level < self.blocks:
                if sibling not in self.nodes:
                    break
                part = self._merged(part, self.nodes.pop(sibling))
            level, place = level + 1, place >> 1
        self.nodes[level, place] = part

    def leave(self, roots: tuple[Node, ...]) -> tuple[Tensor, Tensor]:
        """Logsumexp (b h r*n) and output (b h r*n e) of the r nodes that are here, one by one."""
        parts = [self._whole(self._of(root)) for root in roots]
        return torch.cat([p.lse for p in parts], 2), torch.cat([p.out for p in parts], 2)

    def come(self, roots: tuple[Node, ...], low: int, lse: Tensor, out: Tensor) -> None:
        """Results of `leave` on another rank, of the rows from `low`."""
        parts = zip(out.chunk(len(roots), 2), lse.chunk(len(roots), 2))
        for root, part in zip(roots, parts):
            self.put(root, Part(low, *(t.clone() for t in part)))

    def tensors(self) -> tuple[Tensor, ...]:
        """Retained tensors."""
        return tuple(t for part in self.nodes.values() if part is not None for t in part[1:])

    def result(self) -> tuple[Tensor, Tensor]:
        """Output in the input's dtype, logsumexp in the accumulated one."""
        whole = self._whole(self._of((depth(self.blocks), 0)))
        out = empty_like_query(self.like, self.shape, self.like.dtype)
        return out.copy_(whole.out), whole.lse

    def _of(self, node: Node) -> Part | None:
        """A node; None where no row sees a key of it."""
        level, place = node
        if node in self.nodes or not level:
            return self.nodes.get(node)
        return self._merged(self._of((level - 1, 2 * place)), self._of((level - 1, 2 * place + 1)))

    def _merged(self, a: Part | None, b: Part | None) -> Part | None:
        if a is None or b is None:
            return a if b is None else b
        low, high = min(a.low, b.low), max(a.high, b.high)
        if (a.low, a.high) != (low, high):
            a, b = (b, a) if (b.low, b.high) == (low, high) else (self._spread(a, low, high), b)
        rows = slice(b.low - low, b.high - low)
        _, lse = merged(a.out[:, :, rows], a.lse[:, :, rows], b.out, b.lse)
        a.lse[:, :, rows] = lse
        return a

    def _spread(self, part: Part, low: int, high: int) -> Part:
        """A part with rows [low, high), of which the others see no key."""
        shape = (*part.lse.shape[:2], high - low)
        out = part.out.new_zeros((*shape, part.out.shape[3]))
        lse = part.lse.new_full(shape, float("-inf"))
        rows = slice(part.low - low, part.high - low)
        out[:, :, rows], lse[:, :, rows] = part.out, part.lse
        return Part(low, out, lse)

    def _whole(self, part: Part | None) -> Part:
        if part is None:
            out = self.like.new_zeros(self.shape, dtype=self.accum_dtype)
            lse = self.like.new_full(self.shape[:3], float("-inf"), dtype=self.accum_dtype)
            return Part(0, out, lse)
        whole = (part.low, part.high) == (0, self.shape[2])
        return part if whole else self._spread(part, 0, self.shape[2])

    def _among_all(self, part: Part, samples: tuple[int, int]) -> Part:
        """A part of some sequences, of which the others see no key."""
        b, h, _, e = self.shape
        rows = part.out.shape[2]
        out = part.out.new_zeros((b, h, rows, e))
        lse = part.lse.new_full((b, h, rows), float("-inf"))
        out[slice(*samples)], lse[slice(*samples)] = part.out, part.lse
        return Part(part.low, out, lse)


def merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial outputs as one, in the memory of the first, and scaling the second.

    By functions whose bits do not depend on an element's place.

    `torch.logaddexp` and fused multiplications are not such functions: a vector's last elements
    are computed by other instructions.
    """
    most = torch.maximum(lse, other_lse)
    base = most.masked_fill(torch.isneginf(most), 0.0)
    total = base + torch.log(torch.exp(lse - base) + torch.exp(other_lse - base))
    base = total.masked_fill(torch.isneginf(total), 0.0)
    out.mul_(torch.exp(lse - base).unsqueeze(-1))
    return out.add_(other.mul_(torch.exp(other_lse - base).unsqueeze(-1))), total


class GridSum:
    """Rows of gradients, (b h n d): parts are rounded to a grid and added exactly, in any order.

    `bounds` are those of the sums of the parts' sizes, (b, h, 1, 1) fp64, the same on every rank.
    """

    def __init__(self, rows: int, likes: Tensors, bounds: Tensors) -> None:
        self.rows, self.likes = rows, likes
        # Between 2 and 4 times the bound: parts leave the exponent, and so the grid, as it is.
        self.offsets = [
            torch.ldexp(torch.full_like(bound, 1.5), torch.frexp(bound).exponent + 1)
            for bound in bounds
        ]
        self._sums: Tensors = ()

    def add(
        self, low: int, high: int, parts: Tensors, samples: tuple[int, int] | None = None
    ) -> None:
        """Add parts that cover rows [low, high), of some sequences or of all."""
        those = slice(None) if samples is None else slice(*samples)
        for total, part, offset in zip(self.total(), parts, self.offsets):
            offset = offset[those]
            rounded = part.to(torch.float64, copy=True).add_(offset).sub_(offset)
            total[those, :, low:high].add_(rounded)

    def put(self, low: int, high: int, parts: Tensors) -> None:
        """Add another rank's sums, which are on the grid already."""
        for total, part in zip(self.total(), parts):
            total[:, :, low:high].add_(part)

    def tensors(self) -> Tensors:
        """Retained tensors."""
        return self._sums

    def total(self) -> Tensors:
        """The sums so far, in fp64."""
        if not self._sums:
            held = empty_rows(self.likes, self.rows, torch.float64)
            self._sums = tuple(t.zero_() for t in held)
        return self._sums

    def result(self) -> Tensors:
        """The sums in the inputs' dtype."""
        return tuple(t.to(like.dtype) for t, like in zip(self.total(), self.likes))


def gradient_bounds(
    transport: Messages,
    mesh_dims: Iterable[str],
    scale: float,
    tokens: tuple[int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Sides[Tensors]:
    """Bounds of dq (b, h, 1, 1), and of dk and dv (b, g, 1, 1), the same on every rank; fp64.

    With ds = p (dout v^T - delta) and rows of p that sum to at most 1, |dq| <= scale max|ds / p|
    max|k|, and of n rows |dk| <= n scale max|ds / p| max|q| and |dv| <= n max|dout|.

    Largest entries are those of all tokens of a head, also of keys that no query sees: a key or a
    value that is 1e4 times as large as the others, in padding too, costs dq four digits each.
    Queries or keys travel along `mesh_dims`; `tokens` counts both over all ranks.
    """
    groups = k.shape[1]

    def most(t: Tensor) -> Tensor:
        sizes = t.abs().amax((-2, -1)) if t.numel() else t.new_zeros(t.shape[:2])
        return sizes.unflatten(1, (groups, -1)).amax(-1).to(torch.float32)

    local = [most(t) for t in (q, k, v, dout)]
    local.append(torch.zeros_like(local[0]) if dlse is None else most(dlse.unsqueeze(-1)))
    sizes = torch.stack(local)
    for mesh_dim in mesh_dims:
        sizes = largest(transport, mesh_dim, sizes)
    most_q, most_k, most_v, most_dout, most_dlse = sizes.to(torch.float64)[..., None, None]
    n, per_group = tokens[0], q.shape[1] // groups
    ds = 2 * v.shape[-1] * most_dout * most_v + most_dlse
    dq = abs(scale) * ds * most_k
    rows = max(1, n * per_group)
    dk, dv = rows * abs(scale) * ds * most_q, rows * most_dout
    return Sides((dq.repeat_interleave(per_group, 1),), (dk, dv))
