"""The calls of a conformance run, and their results on one device in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from ..comm import index_at
from ..declare.placements import SEQ
from ..errors import ShapeError
from ..layout import Layout
from ..masks import Causal, Full, KeyPadding, Mask
from ..plan.order import chunk_sizes, positions, shard_spans
from .check import reference

#: The name of the attended axis.
AXIS = "tokens"


@dataclass(frozen=True)
class Case:
    """One attention call: its sizes over all ranks, its mask, and the placement of the tensors.

    Attributes:
        name: what the report calls it.
        n: queries.
        m: keys.
        batch: sequences.
        heads: query heads.
        kv_heads: heads of keys and values.
        dim: head dim.
        mask: who sees whom.
        strided: queries, keys, values and the output's gradient are transposes of (b, n, h, d).
        twice: two calls are made before the first one's backward pass.
        seed: of the random tensors.

    >>> case = Case("causal", n=6, m=6, mask=Causal())
    >>> case.draw(torch.float64)["q"].shape
    torch.Size([2, 8, 6, 4])
    """

    name: str
    n: int
    m: int
    batch: int = 2
    heads: int = 8
    kv_heads: int = 8
    dim: int = 4
    mask: Mask = field(default_factory=Full)
    strided: bool = False
    twice: bool = False
    seed: int = 0

    def draw(self, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
        """Whole random tensors q, k, v (b h n d) and the gradient of the output.

        Args:
            dtype: of all four.
            seed: which call of the case: 0, or 1 for the second of two.

        Returns:
            The tensors by name: q, k, v, dout.
        """
        make = torch.Generator().manual_seed(self.seed * 1000 + seed)
        shapes = {"q": (self.heads, self.n), "k": (self.kv_heads, self.m)}
        shapes |= {"v": shapes["k"], "dout": shapes["q"]}
        return {
            name: torch.randn(self.batch, *shape, self.dim, generator=make, dtype=dtype)
            for name, shape in shapes.items()
        }

    def wanted(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Output and gradients of the whole, by plain softmax attention in fp64.

        Args:
            whole: what `draw` made.

        Returns:
            The tensors by name: out, dq, dk, dv.
        """
        leaves = [whole[name].double().clone().requires_grad_() for name in "qkv"]
        out, _ = reference(*leaves, self.mask)
        grads = torch.autograd.grad(out, leaves, whole["dout"].double())
        return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads)))


@dataclass(frozen=True)
class Call:
    """The inputs of one rank: its shards, and the sizes and mask of the whole call.

    Attributes:
        q: this rank's queries, of (b h n d).
        k: this rank's keys, of (b g m d).
        v: this rank's values, of (b g m d).
        rank: which rank this is.
        ranks: how many there are.
        n: queries over all ranks.
        m: keys over all ranks.
        mask: who sees whom, by global positions.
        layout: bound to this rank, where the ranks are those of a weft layout; else None.

    >>> x = torch.zeros(1, 2, 4, 8)
    >>> Call(x, x, x, rank=0, ranks=1, n=4, m=4, mask=Causal()).causal
    True
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rank: int
    ranks: int
    n: int
    m: int
    mask: Mask
    layout: Layout | None = None

    @property
    def causal(self) -> bool:
        """Whether a query sees itself and what comes before.

        Raises `NotImplementedError` for masks that are neither causal nor full.
        """
        if isinstance(self.mask, Full):
            return False
        if self.mask == Causal():
            return True
        raise NotImplementedError(f"no mask {self.mask}")


def standard_cases(ranks: int) -> list[Case]:
    """What every attention over `ranks` ranks is asked: the rows of the exactness table.

    Args:
        ranks: how many; sizes grow with them, and some cases leave ranks without tokens.

    >>> [case.name for case in standard_cases(4)][:3]
    ['equal lengths', 'grouped heads', 'one key/value head']
    """
    n, h = 8 * ranks, 2 * ranks
    same = {"heads": h, "kv_heads": h}
    return [
        Case("equal lengths", n, n, **same),
        Case("grouped heads", n, n, heads=h, kv_heads=ranks),
        Case("one key/value head", n, n, heads=h, kv_heads=1),
        Case("causal", n, n, mask=Causal(), **same),
        Case("more keys than queries", n, n + 4 * ranks, **same),
        Case("uneven lengths", n - 3, n - 3, **same),
        Case("uneven lengths, causal", n - 3, n - 3, mask=Causal(), **same),
        Case("ranks without tokens", max(1, ranks - 1), max(1, ranks - 1), **same),
        Case("padded keys", n, n, mask=KeyPadding((n, n - 5)), **same),
        Case("fully masked rows", n, n, mask=KeyPadding((n, 0)), **same),
        Case("any strides", n, n, strided=True, **same),
        Case("two calls in flight", n, n, twice=True, **same),
    ]


def shard(x: Tensor, side: str, rank: int, ranks: int, order: str, layout: Layout | None) -> Tensor:
    """One rank's part of a whole (b h n d): of the queries' side, or of the keys' ("k")."""
    if layout is None:
        spans = shard_spans(x.shape[2], (ranks,), order)[rank]
        return x.index_select(2, positions(spans))
    rules = layout.rules(AXIS)
    arrows = {d: rule.key if side == "k" else rule.query for d, rule in rules.items()}
    for mesh_dim, arrow in arrows.items():
        if isinstance(arrow.rest, Shard) and arrow.rest.dim != SEQ:
            dim, size = arrow.rest.dim, layout.mesh[mesh_dim]
            if x.shape[dim] < size:  # known to every rank, also to those that would have some
                raise ShapeError(f"{x.shape[dim]} heads cannot be split over {mesh_dim}={size}")
            sizes = chunk_sizes(x.shape[dim], size)
            x = x.split(sizes, dim)[layout.coords[mesh_dim]]
    dims = layout.key_dims(AXIS) if side == "k" else layout.shard_dims(AXIS)
    index = index_at(layout.mesh, dims, layout.coords)
    parts = tuple(layout.mesh[d] for d in dims)
    spans = shard_spans(x.shape[2], parts, layout.order.get(AXIS, "contiguous"))[index]
    return x.index_select(2, positions(spans))
