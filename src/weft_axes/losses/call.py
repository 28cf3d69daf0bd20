"""Checks that all ranks of a loss make the same call, before anything else is sent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft._digest import number_of
from weft.declare.mesh import coordinates
from weft.errors import ShapeError
from weft.layout import Layout


@dataclass(frozen=True)
class Options:
    """Options that all ranks must share, those of `cross_entropy` and `log_probs`."""

    chunk: int
    ignore_index: int
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    num_items: float | None = None
    entropy: bool = False

    def check(self) -> None:
        """Raises `ShapeError` for numbers out of range."""
        if self.chunk < 1:
            raise ShapeError(f"chunk={self.chunk}: logits are made of 1 or more tokens at a time")
        if self.softcap is not None and not self.softcap > 0:
            raise ShapeError(f"softcap={self.softcap}: a positive number, or None")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ShapeError(f"label_smoothing={self.label_smoothing}: a share from 0 to 1")
        if not self.z_loss >= 0.0:
            raise ShapeError(f"z_loss={self.z_loss}: a weight, 0 or more")


class Share(NamedTuple):
    """A rank's numbers of tokens and of words, and its lowest and highest label."""

    tokens: int
    words: int
    lowest: int
    highest: int


def agreed(
    tensors: tuple[Tensor, Tensor, Tensor],
    layout: Layout,
    vocab_dims: tuple[str, ...],
    along: tuple[str, ...],
    options: Options,
) -> dict[int, Share]:
    """The share of each rank along `vocab_dims`, whose ranks have other words.

    Tensors are hidden states, this rank's rows of the head's weight, and labels.
    """
    hidden, weight, labels = tensors
    error: ShapeError | IndexError | None = None
    local = 0, 0, 0, -1
    try:
        options.check()
        _check_shapes(hidden, weight, labels)
        local = (labels.numel(), len(weight), *_range(labels, options.ignore_index))
    except ShapeError as raised:
        error = raised
    texts = layout.bound.share("a loss", json.dumps(local), vocab_dims)
    ranks = {rank: Share(*json.loads(text)) for rank, text in texts.items()}
    try:
        _check_shares(ranks, layout, vocab_dims, options.ignore_index)
    except (ShapeError, IndexError) as raised:
        error = error or raised
    width = hidden.shape[-1] if hidden.dim() else 0
    words = sum(share.words for share in ranks.values())
    detail = f"{options}, vocab_dims {vocab_dims}, {words} words, hidden {hidden.dtype} of {width}"
    _check_same(detail, error, layout, along)
    return ranks


def _check_same(
    detail: str, error: Exception | None, layout: Layout, along: tuple[str, ...]
) -> None:
    """Raises where any rank has an error, or another detail: a vote, and texts if it fails."""
    text = detail if error is None else f"{type(error).__name__}: {error}"
    same = layout.bound.vote(along, number_of(text))()
    texts = {} if same else layout.bound.all_gather_text(text, along)
    if error is not None:
        raise error
    for rank, other in texts.items():
        for kind in (IndexError, ShapeError):
            if other.startswith(f"{kind.__name__}: "):
                message = other.removeprefix(f"{kind.__name__}: ")
                raise kind(f"rank {layout.bound.world_ranks[rank]}: {message}")
    if texts:
        raise layout.bound.disagreement("a loss", texts)


def _check_shares(
    ranks: dict[int, Share], layout: Layout, vocab_dims: tuple[str, ...], ignore_index: int
) -> None:
    """Raises unless labels are words, and ranks that have the same tokens have equally many."""
    words = sum(share.words for share in ranks.values())
    for share in ranks.values():
        if share.lowest < 0 or share.highest >= words:
            raise IndexError(
                f"labels from {share.lowest} to {share.highest}, but there are {words} words, and"
                f" {ignore_index} counts nothing"
            )
    same = [d for d in vocab_dims if d not in layout.data_dims]
    for rank in ranks:
        at = coordinates(layout.bound.sizes, rank) | dict.fromkeys(same, 0)
        first = next(r for r in ranks if coordinates(layout.bound.sizes, r) == at)
        if ranks[first].tokens != ranks[rank].tokens:
            raise layout.bound.disagreement(
                f"the number of tokens along mesh dims {tuple(same)}, which do not split them,",
                {r: str(ranks[r].tokens) for r in (first, rank)},
            )


def _check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    if isinstance(hidden, DTensor) or isinstance(labels, DTensor):
        raise ShapeError("hidden and labels are a rank's own tensors: pass their .to_local()")
    if weight.dim() != 2 or not hidden.dim() or hidden.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"hidden {tuple(hidden.shape)} and head_weight {tuple(weight.shape)} are not (..., E)"
            " and (words, E)"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ShapeError(
            f"labels {tuple(labels.shape)} for hidden {tuple(hidden.shape)}: every token has one"
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ShapeError(
            f"hidden is {hidden.dtype} and head_weight {weight.dtype}: they have one real dtype, or"
            " are under torch.autocast"
        )
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise ShapeError(f"labels are whole numbers, found {labels.dtype}")


def _range(labels: Tensor, ignore_index: int) -> tuple[int, int]:
    """The lowest and the highest label; (0, -1) where there is none, or no numbers (meta)."""
    if labels.is_meta:
        return 0, -1
    taken = labels[labels != ignore_index]
    return (int(taken.min()), int(taken.max())) if taken.numel() else (0, -1)
