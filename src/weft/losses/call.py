"""What all ranks of a loss must ask for, and have: checked before anything else is sent."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..comm import coordinates
from ..errors import ShapeError
from ..layout import Layout


@dataclass(frozen=True)
class Options:
    """What all ranks must ask for, as `cross_entropy` and `log_probs` have it."""

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


def agreed(
    tensors: tuple[Tensor, Tensor, Tensor],
    layout: Layout,
    vocab_dims: tuple[str, ...],
    along: tuple[str, ...],
    options: Options,
) -> tuple[dict[int, int], dict[int, int]]:
    """How many tokens and words each rank along `vocab_dims` has.

    Args:
        tensors: hidden states, this rank's rows of the head's weight, and labels.
        layout: bound.
        vocab_dims: mesh dims whose ranks have other words.
        along: mesh dims whose ranks take part.
        options: what this rank asks for.

    Raises:
        ShapeError: on every rank along `along`: tensors or options of one do not fit, or differ.
        IndexError: likewise: a label that is no word.
    """
    hidden, weight, labels = tensors
    error, mine = None, (0, 0, 0, -1)
    try:
        options.check()
        _check_shapes(hidden, weight, labels)
        mine = (labels.numel(), len(weight), *_range(labels, options.ignore_index))
    except ShapeError as raised:
        error = raised
    width = hidden.shape[-1] if hidden.dim() else 0
    detail = f"{options}, hidden {hidden.dtype} of {width}, vocab_dims {vocab_dims}"
    if not vocab_dims:
        detail += f", {mine[1]} words"
    text = json.dumps([None if error is None else str(error), detail, mine])
    texts = layout.bound.all_gather_text(text, along)
    ranks = {rank: json.loads(text) for rank, text in texts.items()}
    if error is not None:
        raise error
    for rank, (wrong, _, _) in ranks.items():
        if wrong is not None:
            raise ShapeError(f"rank {layout.bound.world_ranks[rank]}: {wrong}")
    if len({detail for _, detail, _ in ranks.values()}) > 1:
        details = {rank: detail for rank, (_, detail, _) in ranks.items()}
        raise layout.bound.disagreement("a loss", details)
    group = layout.bound.ranks_along(vocab_dims)
    words = {rank: ranks[rank][2][1] for rank in group}
    count = sum(words.values())
    for rank, (_, _, (_, _, lowest, highest)) in ranks.items():
        if lowest < 0 or highest >= count:
            raise IndexError(
                f"rank {layout.bound.world_ranks[rank]}: labels from {lowest} to {highest}, but"
                f" there are {count} words, and {options.ignore_index} counts nothing"
            )
    tokens = {rank: ranks[rank][2][0] for rank in group}
    _check_tokens(tokens, layout, vocab_dims)
    return tokens, words


def _check_tokens(tokens: dict[int, int], layout: Layout, vocab_dims: tuple[str, ...]) -> None:
    """Ranks that have other words of the same tokens have equally many."""
    same = [d for d in vocab_dims if d not in layout.data_dims]
    for rank in tokens:
        at = coordinates(layout.bound.sizes, rank) | dict.fromkeys(same, 0)
        first = next(r for r in tokens if coordinates(layout.bound.sizes, r) == at)
        if tokens[first] != tokens[rank]:
            raise layout.bound.disagreement(
                f"the number of tokens along mesh dims {tuple(same)}, which do not split them,",
                {r: str(tokens[r]) for r in (first, rank)},
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
    """The lowest and the highest label; (0, -1) where there is none."""
    taken = labels[labels != ignore_index]
    return (int(taken.min()), int(taken.max())) if taken.numel() else (0, -1)
