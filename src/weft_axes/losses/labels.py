"""Labels of next tokens, and how many of them count."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.errors import ShapeError
from weft.layout import Layout
from weft.masks import Documents
from weft.move import collectives

#: Labels that count for nothing, as everywhere in torch and transformers.
IGNORED = -100


def shift_labels(
    labels: Tensor,
    documents: Documents | Iterable[int] | None = None,
    by: int = 1,
    *,
    ignore_index: int = IGNORED,
) -> Tensor:
    """The label of each token is that of the token `by` places later in its document.

    The last `by` tokens of a document have none. Shift whole labels, before they are sharded:
    neighbours in the text may be on different ranks, and zigzag chunks join different places.

        documents (3, 4)   a0 a1 a2 | b0 b1 b2 b3
        by=1               a1 a2 -- | b1 b2 b3 --        next-token prediction
        by=2               a2 -- -- | b2 b3 -- --        a second head (multi-token prediction)

    Args:
        labels: of full rows, (..., n).
        documents: lengths of the documents that are packed in every row; default one.
        by: how many tokens ahead, at least 1.
        ignore_index: the label of tokens without one.

    Raises:
        ShapeError: lengths that do not add up to n; `by` below 1.

    >>> shift_labels(torch.tensor([[5, 6, 7, 8]]), (1, 3))
    tensor([[-100,    7,    8, -100]])
    >>> shift_labels(torch.tensor([[5, 6, 7, 8]]), by=2)
    tensor([[   7,    8, -100, -100]])
    """
    n = labels.shape[-1]
    if by < 1:
        raise ShapeError(f"by={by}: labels are shifted by 1 or more tokens")
    step = min(int(by), n)
    shifted = F.pad(labels[..., step:], (0, step), value=ignore_index)
    if documents is not None:
        rows = labels.shape[:-1]
        masks = as_documents(documents)
        masks.check(n, n, rows.numel())
        row = torch.arange(rows.numel(), device=labels.device).view(*rows, 1)
        token = torch.arange(n - step, device=labels.device)
        same = masks.allowed(row, torch.zeros_like(row), token, token + step)
        shifted[..., : n - step].masked_fill_(~same, ignore_index)
    return shifted


def as_documents(documents: Documents | Iterable[int]) -> Documents:
    """Documents, of lengths in any sequence, array or tensor too."""
    if isinstance(documents, Documents):
        return documents
    tolist = getattr(documents, "tolist", None)
    return Documents(documents if tolist is None else tolist())  # type: ignore[arg-type]


def num_items(
    labels: Tensor | Iterable[Tensor], layout: Layout, *, ignore_index: int = IGNORED
) -> Tensor:
    """Number of labelled tokens over all ranks: the normaliser of a step of micro-batches.

        before    rank 0: n0        rank 1: n1
        after     both:   n0 + n1

    A mean of the micro-batches' means weighs tokens of a batch with few labels more; the loss of
    each over the number of all adds up to one mean (transformers' `num_items_in_batch`).

    Args:
        labels: this rank's, shifted; of every micro-batch of the step.
        layout: a bound layout.
        ignore_index: the label of tokens without one.

    >>> num_items([torch.tensor([3, -100]), torch.tensor([1, 2])], Layout.single())
    tensor(3)
    """
    batches = [labels] if isinstance(labels, Tensor) else list(labels)
    count = torch.stack([(t != ignore_index).sum() for t in batches]).sum()
    return collectives.partial_to_invariant(count, layout.data_dims, layout.bound)
