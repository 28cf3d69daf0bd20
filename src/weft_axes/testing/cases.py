"""One attention call over all ranks: its sizes, its tensors, its results in fp64, its shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from weft.choice import ChoiceKind
from weft.declare.mesh import index_at
from weft.declare.placements import SEQ
from weft.layout import Layout
from weft.masks import Causal, Full, KeyPadding, Mask, MaskMod
from weft.plan.held import Held
from weft.plan.order import chunk_sizes, positions
from weft.plan.problem import Problem

from .reference import reference

#: Which side of attention a tensor is sharded like.
SIDES = {"q": "query", "k": "key", "v": "key", "dout": "query", "out": "query", "lse": "query",
         "dq": "query", "dk": "key", "dv": "key"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One attention call: its sizes over all ranks, its mask, and the placement of the tensors.

    Attributes:
        name: its row in a report.
        n: queries; a number per axis, where several axes are attended jointly.
        m: keys, likewise; None for as many as queries.
        batch: sequences.
        heads: query heads.
        kv_heads: heads of keys and values.
        dim: head dim.
        mask: which query sees which key.
        strided: queries, keys, values and the output's gradient are transposes of (b, n, h, d).
        twice: two calls are made before the first one's backward pass.
        seed: of the random tensors.
        axis: the attended axis; "rows+features" attends two jointly.
        dtype: of the tensors.
        spread: standard deviation of queries and keys.
        backward: gradients are compared, too.
        choose: keys that each query chooses, drawn at random; None: it sees all that the mask says.

    >>> case = Case("causal", n=6, m=6, mask=Causal())
    >>> case.draw(torch.float64)["q"].shape
    torch.Size([2, 8, 6, 4])
    """

    name: str
    n: int | tuple[int, ...]
    m: int | tuple[int, ...] | None = None
    batch: int = 2
    heads: int = 8
    kv_heads: int = 8
    dim: int = 4
    mask: Mask = field(default_factory=Full)
    strided: bool = False
    twice: bool = False
    seed: int = 0
    axis: str = "tokens"
    dtype: torch.dtype = torch.float64
    spread: float = 1.0
    backward: bool = True
    choose: int | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The attended axes."""
        return tuple(self.axis.split("+"))

    @property
    def length(self) -> dict[str, tuple[int, int]]:
        """Axis -> (queries, keys), as `weft.attention` takes it."""
        return dict(zip(self.axes, self.lengths))

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys of each attended axis."""
        queries = self.n if isinstance(self.n, tuple) else (self.n,)
        m = queries if self.m is None else self.m
        keys = m if isinstance(m, tuple) else (m,)
        return tuple(zip(queries, keys, strict=True))

    @property
    def queries(self) -> int:
        """Queries of all attended axes together."""
        return math.prod(n for n, _ in self.lengths)

    @property
    def keys(self) -> int:
        """Keys of all attended axes together."""
        return math.prod(m for _, m in self.lengths)

    @property
    def problem(self) -> Problem:
        """The engine's `Problem`, with the batch and the heads of all ranks together."""
        problem = Problem.of(
            self.axes,
            dict(zip(self.axes, self.lengths)),
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.dim,
            batch=self.batch,
            dtype=self.dtype,
            mask=self.mask,
        )
        numbers = self.chosen()
        if numbers is None:
            return problem
        return replace(problem, choice=ChoiceKind(1, numbers.shape[-1]))

    def chosen(self) -> Tensor | None:
        """Random numbers of the keys that each query chooses, over all ranks (b, 1, n, K)."""
        if self.choose is None:
            return None
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.rand(self.batch, 1, self.queries, self.keys, generator=generator).argsort(-1)
        return order[..., : self.choose].int()

    @property
    def seen(self) -> Mask:
        """The mask, with the choice in it."""
        numbers = self.chosen()
        if numbers is None:
            return self.mask
        bits = torch.zeros(self.batch, self.queries, self.keys, dtype=torch.bool)
        bits.scatter_(-1, numbers[:, 0].long(), True)
        return self.mask & MaskMod(lambda b, h, q, k: bits[b, q, k])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of q, k, v and the output's gradient, over all ranks."""
        q = (self.batch, self.heads, self.queries, self.dim)
        k = (self.batch, self.kv_heads, self.keys, self.dim)
        return {"q": q, "k": k, "v": k, "dout": q}

    def draw(self, dtype: torch.dtype | None = None, seed: int = 0) -> dict[str, Tensor]:
        """Random tensors of all ranks: q, k, v (b h n d) and the gradient of the output.

        Args:
            dtype: of all four, default `self.dtype`.
            seed: which call of the case: 0, or 1 for the second of two.

        Returns:
            The tensors by name: q, k, v, dout.
        """
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * seed)
        full = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64)
            for name, shape in self.shapes.items()
        }
        for name in "qk":
            full[name] *= self.spread
        return {name: t.to(dtype or self.dtype) for name, t in full.items()}

    def wanted(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Output, logsumexp and gradients on one device, by dense softmax attention in fp64.

        Args:
            whole: tensors of all ranks, as `draw` returns them.

        Returns:
            The tensors by name: out, lse, and dq, dk, dv where `backward`.
        """
        q, k, v = (whole[name].double().clone().requires_grad_() for name in "qkv")
        out, lse = reference(q, k, v, self.seen)
        results = {"out": out.detach(), "lse": lse.detach()}
        if self.backward:
            grads = torch.autograd.grad(out, (q, k, v), whole["dout"].double())
            results |= dict(zip(("dq", "dk", "dv"), grads))
        return results


@dataclass(frozen=True)
class RankCall:
    """The inputs of one rank: its shards, and the sizes and mask of the whole call.

    Attributes:
        q: this rank's queries, of (b h n d).
        k: this rank's keys, of (b g m d).
        v: this rank's values, of (b g m d).
        rank: this rank's number.
        ranks: the number of ranks.
        n: queries over all ranks.
        m: keys over all ranks.
        mask: which query sees which key, by global positions.
        layout: bound to this rank, where the ranks are those of a weft layout; else None.

    >>> x = torch.zeros(1, 2, 4, 8)
    >>> RankCall(x, x, x, rank=0, ranks=1, n=4, m=4, mask=Causal()).causal
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
        """True if a query sees itself and the keys before it; False if it sees all keys.

        Raises `NotImplementedError` for masks that are neither causal nor full.
        """
        if isinstance(self.mask, Full):
            return False
        if self.mask == Causal():
            return True
        raise NotImplementedError(f"no mask {self.mask}")


def standard_cases(ranks: int) -> list[Case]:
    """The cases on which every attention over `ranks` ranks is compared.

    Args:
        ranks: the number of ranks; sizes grow with it, and some cases leave ranks without tokens.

    >>> [case.name for case in standard_cases(4)][:3]
    ['equal lengths', 'grouped heads', 'one key/value head']
    """
    n, h = 8 * ranks, 2 * ranks
    same: dict[str, Any] = {"heads": h, "kv_heads": h}
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


def shard(
    layout: Layout,
    axes: Sequence[str],
    lengths: Sequence[tuple[int, int]],
    x: Tensor,
    side: str,
    coords: Mapping[str, int] | None = None,
) -> Tensor:
    """The part of a full (b, heads, tokens, ...) tensor that a rank holds at rest.

    It follows from the rest placements of the rules alone, and shares no code with the engine.
    """
    coords = layout.coords if coords is None else coords
    rest = {d: getattr(rule, side).rest for d, rule in layout.rules(axes).items()}
    for dim in (0, 1):
        for mesh_dim, size in layout.mesh.items():
            if rest[mesh_dim] == Shard(dim):
                x = x.split(chunk_sizes(x.shape[dim], size), dim)[coords[mesh_dim]]
    sizes = [pair[side == "key"] for pair in lengths]
    x = x.unflatten(2, sizes)
    for i, (axis, size) in enumerate(zip(axes, sizes)):
        splitting = {*layout.shard_dims(axis), *(layout.replicate if i == 0 else ())}
        dims = [d for d in layout.mesh if d in splitting and rest[d] == Shard(SEQ)]
        own = Held.of(layout, axis, size, dims).spans[index_at(layout.mesh, dims, coords)]
        x = x.index_select(2 + i, positions(own, x.device))
    return x.flatten(2, 1 + len(sizes))
