"""The placement grammar of rules, and `P(softmax)`, `P(affine)`, `P(top_k)` as DTensor placements.

    placement := "S(batch)" | "S(head)" | "S(seq)" | "R" | "R(top_k)" | "P(softmax)"
               | "S(seq) + seen"
    arrow     := placement | placement "->" placement

`S(seq) + seen` is a rank's own keys and those of others that some query of its tile sees.

Rules of recurrences have two words more: `P(affine) -> S(seq)` and `S(seq) + left(k - 1)`; rules of
choices of keys one: `P(top_k) -> S(seq)`.

Attention's canonical tensors are (batch, head, seq, dim), so S(batch), S(head) and S(seq) are
DTensor's Shard(0), Shard(1) and Shard(2).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from .._torch import all_gather_stacked
from ..errors import DeclarationError, ShapeError

BATCH, HEAD, SEQ = 0, 1, 2
SIDES = {"batch": BATCH, "head": HEAD, "seq": SEQ}


def merge_softmax(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partial attention results stacked along dim 0.

    The whole output is sum_i w_i out_i with w = softmax_i(lse_i) (the "online softmax" of
    arXiv:1805.02867); a row that no part sees has lse -inf and gives 0 and -inf.
    """
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.softmax(lses, dim=0).masked_fill(torch.isneginf(lse), 0.0)
    return (weights.unsqueeze(-1) * outs).sum(0), lse


class _Merged(Partial):
    """Partial results with another merge than a sum; torch names it by `reduce_op`."""

    def __repr__(self) -> str:
        return f"P({self.reduce_op})"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(repr(self))

    def _reduce_shard_value(
        self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, shard_spec: Any
    ) -> Tensor:
        return _own_chunk(self._reduce_value(tensor, mesh, mesh_dim), mesh, mesh_dim, shard_spec)


class SoftmaxPartial(_Merged):
    """`P(softmax)`: each rank attended to some of the keys; merging makes the whole.

    The local tensor packs output and logsumexp along the last dim: (..., d + 1).

        before (mesh of 2)   rank 0: [out0 | lse0]   rank 1: [out1 | lse1]   over the same rows
        -> Replicate()       both:   [out  | lse ]   out = sum_i exp(lse_i - lse) out_i
        -> Shard(seq)        rank 0: its rows of [out | lse], rank 1: its rows

    `DTensor.redistribute` does both. Replicate -> P(softmax) keeps the value on the first rank and
    gives the others lse -inf, the neutral element.

    >>> SoftmaxPartial()
    P(softmax)
    >>> outs, lses = torch.tensor([[[1.0]], [[3.0]]]), torch.zeros(2, 1)
    >>> merge_softmax(outs, lses)  # two ranks of equal weight: the mean, and lse = log 2
    (tensor([[2.]]), tensor([0.6931]))
    """

    def __init__(self) -> None:
        super().__init__("softmax")

    def _reduce_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        packed = all_gather_stacked(tensor, mesh.get_group(mesh_dim))
        out, lse = merge_softmax(packed[..., :-1], packed[..., -1])
        return torch.cat([out, lse.unsqueeze(-1)], dim=-1)

    def _partition_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        if mesh.get_local_rank(mesh_dim) == 0:
            return tensor
        neutral = torch.zeros_like(tensor)
        neutral[..., -1] = float("-inf")
        return neutral


def merge_affine(maps: Tensor) -> Tensor:
    """Compose affine maps `S -> A S + b` that are stacked along dim 0 in their order.

    `(A2, b2) after (A1, b1) = (A2 A1, A2 b1 + b2)`: associative, so any grouping gives the same,
    and not commutative; the neutral map is (I, 0).

    >>> merge_affine(torch.tensor([[[2.0, 1.0]], [[3.0, 1.0]]]))  # 3 (2 S + 1) + 1
    tensor([[6., 4.]])
    """
    k, total = maps.shape[-2], maps[0]
    for part in maps[1:]:
        moved = part[..., :k] @ total
        total = torch.cat([moved[..., :k], moved[..., k:] + part[..., k:]], dim=-1)
    return total


class AffinePartial(_Merged):
    """`P(affine)`: each rank has the map that its tokens are to the state of a recurrence.

    The local tensor packs a map as [A | b] along the last dim: (..., k, k + v).

        before (mesh of 2)   rank 0: [A0 | b0]   rank 1: [A1 | b1]   of tokens in the order of ranks
        -> Replicate()       both:   [A1 A0 | A1 b0 + b1]            of all tokens, whose b is the
                                                                     state that a sequence ends in

    `DTensor.redistribute` does that. In a rule, `P(affine) -> S(seq)` hands every rank the part of
    it that comes before its own tokens: the state that enters them (`weft.scan`).
    Replicate -> P(affine) keeps the value on the first rank and gives the others the neutral map.

    >>> AffinePartial()
    P(affine)
    """

    def __init__(self) -> None:
        super().__init__("affine")

    def _reduce_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        return merge_affine(
            all_gather_stacked(tensor[None], mesh.get_group(mesh_dim)).flatten(0, 1)
        )

    def _partition_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        if mesh.get_local_rank(mesh_dim) == 0:
            return tensor
        return torch.eye(*tensor.shape[-2:], dtype=tensor.dtype, device=tensor.device).expand_as(
            tensor
        )


def merge_top_k(scores: Tensor, positions: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best of lists of (score, position), as many as `count`: highest score, then lowest place.

    Any grouping of merges gives the list that a stable sort of all scores begins with; -inf is no
    key and comes last with position -1, a NaN comes first, so that whoever gets it can refuse.

    >>> scores = torch.tensor([1.0, 3.0, 0.0, 3.0, -0.0])
    >>> merge_top_k(scores, torch.tensor([0, 9, 5, 2, 3]), 4)[1].tolist()
    [2, 9, 0, 3]
    """
    scores = scores + 0.0  # -0.0 becomes 0.0
    positions = positions.masked_fill(scores.isneginf(), -1)
    missing = count - scores.shape[-1]
    if missing > 0:
        shape = (*scores.shape[:-1], missing)
        scores = torch.cat([scores, scores.new_full(shape, -torch.inf)], -1)
        positions = torch.cat([positions, positions.new_full(shape, -1)], -1)
    by_position = positions.argsort(dim=-1, stable=True)
    scores, positions = (t.gather(-1, by_position) for t in (scores, positions))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return scores.gather(-1, best), positions.gather(-1, best)


class TopKPartial(_Merged):
    """`P(top_k)`: each rank has a list of the best of its keys; merging makes that of all keys.

    The local tensor packs k scores and their k positions along the last dim, (..., 2 k), in
    float64, which holds positions up to 2^53; (-inf, -1) is no key.

        before (mesh of 2)   rank 0: [scores0 | places0]   rank 1: [scores1 | places1]
        -> Replicate()       both:   the k entries of highest score, of equal ones the lowest places
        -> Shard(seq)        rank 0: its rows of them, rank 1: its rows

    `DTensor.redistribute` does both. Replicate -> P(top_k) keeps the value on the first rank and
    gives the others empty lists, the neutral element.

    >>> TopKPartial()
    P(top_k)
    """

    def __init__(self) -> None:
        super().__init__("top_k")

    def _reduce_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        count = self._count(tensor)
        lists = all_gather_stacked(tensor, mesh.get_group(mesh_dim))
        scores, places = (t.movedim(0, -2).flatten(-2) for t in lists.split(count, -1))
        if scores.isnan().any():
            raise ShapeError("P(top_k): a score is NaN, which no key is better or worse than")
        return torch.cat(merge_top_k(scores, places, count), -1)

    def _partition_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        count = self._count(tensor)
        if mesh.get_local_rank(mesh_dim) == 0:
            return tensor
        neutral = torch.full_like(tensor, -1)
        neutral[..., :count] = -torch.inf
        return neutral

    def _count(self, tensor: Tensor) -> int:
        """The entries of a list."""
        if tensor.dtype != torch.float64 or tensor.shape[-1] % 2:
            raise ShapeError(
                "P(top_k) packs scores and positions side by side, (..., 2 k) in float64, found"
                f" {tuple(tensor.shape)} of {tensor.dtype}"
            )
        return tensor.shape[-1] // 2


def _own_chunk(tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, shard_spec: Any) -> Tensor:
    """This rank's chunk of a reduced value; nothing where there are more ranks than rows."""
    chunks = torch.chunk(tensor, mesh.size(mesh_dim), dim=shard_spec.dim)
    rank = mesh.get_local_rank(mesh_dim)
    if rank >= len(chunks):
        return tensor.narrow(shard_spec.dim, 0, 0)
    return chunks[rank].contiguous()


@dataclass(frozen=True)
class Arrow:
    """A tensor's placements at rest and while computing, on one mesh dim."""

    rest: Placement
    compute: Placement
    top_k: bool = False
    seen: bool = False


def entry_placement(arrow: Arrow) -> Placement:
    """The placement in which a tensor enters the tile program.

    A side that will travel (R while computing) enters as chunks, unless every rank has it whole.
    """
    if isinstance(arrow.compute, Shard):
        return arrow.compute
    return arrow.rest if isinstance(arrow.rest, Replicate) else Shard(SEQ)


#: The chunk of a rank's own keys, and of the others' what its queries see.
SEEN = "S(seq) + seen"
_TOKEN = re.compile(r"^(S)\((\w+)\)(\+seen)?$|^(R)(?:\((top_k)\))?$|^(P)\((softmax)\)$")


def _parse_placement(text: str) -> tuple[Placement, str]:
    """A placement, and the word that says which part of a whole it is: "top_k", "seen" or ""."""
    match = _TOKEN.match(text.replace(" ", ""))
    if not match:
        raise DeclarationError(
            f"placement {text!r} is not one of S(batch), S(head), S(seq), R, R(top_k), P(softmax),"
            f" {SEEN}"
        )
    shard, side, seen, replicate, top_k, _, _ = match.groups()
    if shard:
        if side not in SIDES:
            raise DeclarationError(f"placement {text!r}: S(...) takes batch, head or seq")
        if seen and SIDES[side] != SEQ:
            raise DeclarationError(f"placement {text!r}: only keys are seen: {SEEN!r}")
        return (Replicate(), "seen") if seen else (Shard(SIDES[side]), "")
    if replicate:
        return Replicate(), top_k or ""
    return SoftmaxPartial(), ""


def parse_arrow(text: str, *, reverse: bool = False) -> Arrow:
    """`"S(seq) -> R"` as an `Arrow`; `reverse` for outputs, written compute -> rest.

    >>> parse_arrow("S(seq) -> R").compute
    Replicate()
    """
    if not isinstance(text, str):
        raise DeclarationError(f"a placement is text such as 'S(seq) -> R', found {text!r}")
    parts = [part.strip() for part in text.split("->")]
    if len(parts) > 2:
        raise DeclarationError(f"{text!r}: one arrow at most")
    parsed = [_parse_placement(part) for part in parts]
    first, last = parsed[0], parsed[-1]
    if first[1] == "top_k" and len(parts) == 2:
        raise DeclarationError(f"{text!r}: R(top_k) is where chosen keys go, not where they rest")
    if first[1] == "seen" or (last[1] == "seen" and first[0] != Shard(SEQ)):
        raise DeclarationError(
            f"{text!r}: seen keys come to those that a rank has: 'S(seq) -> {SEEN}'"
        )
    rest, compute = (last, first) if reverse else (first, last)
    return Arrow(rest[0], compute[0], top_k=compute[1] == "top_k", seen=compute[1] == "seen")


def show(placement: Placement) -> str:
    """A placement in the grammar's own words: Shard(2) is `S(seq)`."""
    if isinstance(placement, Shard):
        return f"S({next(name for name, dim in SIDES.items() if dim == placement.dim)})"
    return "P(softmax)" if isinstance(placement, SoftmaxPartial) else "R"
