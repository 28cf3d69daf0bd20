"""Cross-entropy and log-probabilities of tokens, from hidden states and the weight of a head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import handle_torch_function, has_torch_function_unary

from weft._uploads import uploaded
from weft.errors import DeclarationError, ShapeError, UnsupportedError, did_you_mean
from weft.layout import Layout
from weft.masks import Documents
from weft.move import collectives
from weft.runtime.autocast import as_autocast

from .call import Options, agreed
from .head import LossHead, LossNumbers, numbers
from .labels import IGNORED, as_documents

#: Tokens whose logits exist at one time, by default: 0.6 GB of fp32 for 150,000 words.
CHUNK = 1024


def cross_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    layout: Layout,
    *,
    vocab_dims: str | Sequence[str] = (),
    chunk: int = CHUNK,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Cross-entropy of `hidden @ head_weight.T` in nats, the mean over all ranks' labelled tokens.

    As `F.cross_entropy` of all ranks' logits, without them: logits of `chunk` tokens exist at one
    time, in the forward pass and, made again, in the backward pass. With z the logits of a token,
    y its label, V words and e the smoothing, a token's loss is

        (1 - e) (lse(z) - z_y) + e (lse(z) - mean(z)) + z_loss lse(z)^2

    The type is that of `layout.mean` (P -> I): all ranks get one value, and each has the gradient
    of its own tokens; `sync_gradients`, or any other sum over ranks, completes that of
    a whole weight.

    `head_weight` may be cut over its words: each rank along `vocab_dims` has some rows, in the
    order of the ranks. Memory is then `chunk x words / ranks`. Two kinds of mesh dims serve:

        heads: tp=4       ranks have the same tokens: `hidden` as all of them have it, and its
                          gradient is complete on all
        tokens: ring=4    ranks have other tokens: hidden states of a chunk go to all of them, and
                          each row's gradient comes from all tokens of these ranks: it is complete
                          over `vocab_dims`, and not to be summed there again

    Args:
        hidden: of this rank's tokens, (..., E); or a `weft.Field`, such as the hidden states of a
            parallelized model, and then whole labels.
        head_weight: (V, E), the same on all ranks; or this rank's rows of it; or a DTensor that
            is cut on dim 0 over mesh dims of the layout, which are then `vocab_dims`.
        labels: of the same tokens, (...,), whole numbers below V or `ignore_index`. Next tokens'
            are shifted before they are sharded (`shift_labels`).
        layout: a bound layout.
        vocab_dims: mesh dims whose ranks have other rows of `head_weight`.
        chunk: tokens whose logits exist at one time, of all ranks of `vocab_dims` together.
        ignore_index: the label of tokens that count nothing.
        label_smoothing: how much of the label's weight is spread over all words, 0 to 1.
        z_loss: weight of the squared logsumexp, which keeps logits small.
        softcap: logits are `softcap * tanh(logits / softcap)` before all else.
        num_items: the divisor, instead of the number of labelled tokens of all ranks; for
            micro-batches, `num_items` of all of them.

    Returns:
        A scalar, fp32 at least, the same on all ranks. NaN where no rank has a labelled token, as
        torch's own mean is; with `num_items` 0.

    Raises:
        ShapeError: on every rank: shapes or dtypes that do not fit; options that differ between
            ranks, or are out of range.
        IndexError: on every rank: a label that is no word.
        DeclarationError: `vocab_dims` that the layout's mesh does not have, or in another order.
        UnsupportedError: a DTensor that is cut otherwise.

    >>> hidden, weight = torch.zeros(1, 3, 4), torch.zeros(5, 4)
    >>> cross_entropy(hidden, weight, torch.tensor([[1, 2, -100]]), Layout.single())  # log 5
    tensor(1.6094)
    """
    if has_torch_function_unary(hidden):  # a weft.Field: its rule comes here again
        named: dict[str, Any] = {"chunk": chunk, "ignore_index": ignore_index}
        named |= {"label_smoothing": label_smoothing}
        named |= {"z_loss": z_loss, "softcap": softcap, "num_items": num_items}
        given = hidden, head_weight, labels, layout
        return handle_torch_function(
            cross_entropy, (hidden,), *given, vocab_dims=vocab_dims, **named
        )
    items = None if num_items is None else float(num_items)
    options = Options(chunk, ignore_index, softcap, label_smoothing, z_loss, items)
    tensors = hidden, head_weight, labels
    z, counted, words = _numbers(tensors, layout, vocab_dims, options, layout.data_dims)
    loss = z.lse - z.label
    if label_smoothing:
        loss = (1.0 - label_smoothing) * loss + label_smoothing * (z.lse - z.total / words)
    if z_loss:
        loss = loss + z_loss * z.lse.square()
    total = loss.where(counted, 0.0).sum()
    if items is None:
        return layout.mean(total, counted.sum())
    return collectives.partial_to_invariant(total, layout.data_dims, layout.bound) / items


def log_probs(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    layout: Layout,
    *,
    vocab_dims: str | Sequence[str] = (),
    chunk: int = CHUNK,
    ignore_index: int = IGNORED,
    softcap: float | None = None,
    entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens' labels in nats, and the entropy of the prediction.

    Of `hidden @ head_weight.T`, whose logits exist a chunk at a time, as for `cross_entropy`;
    the backward pass computes them again. For DPO, GRPO, distillation. Divide `hidden` by
    a temperature for that of `logits / temperature`. Nothing is sent, unless `vocab_dims` says so.

    Args:
        hidden: as for `cross_entropy`.
        head_weight: as for `cross_entropy`.
        labels: as for `cross_entropy`.
        layout: as for `cross_entropy`.
        vocab_dims: as for `cross_entropy`.
        chunk: as for `cross_entropy`.
        ignore_index: the label of tokens whose log-probability is 0.
        softcap: as for `cross_entropy`.
        entropy: whether to return that of every token too, labelled or not.

    Returns:
        This rank's log-probabilities, of the shape of `labels`, fp32 at least; with `entropy`, a
        pair. They vary between ranks as the tokens do (V): `sequence_sums` adds them up.

    Raises:
        ShapeError: shapes, dtypes or options that do not fit; on every rank of `vocab_dims`.
        IndexError: a label that is no word, likewise.
        DeclarationError: `vocab_dims` that the layout's mesh does not have, or in another order.
        UnsupportedError: a DTensor that is cut otherwise.

    >>> hidden, weight = torch.zeros(1, 3, 4), torch.zeros(5, 4)
    >>> log_probs(hidden, weight, torch.tensor([[1, 2, -100]]), Layout.single())
    tensor([[-1.6094, -1.6094,  0.0000]])
    """
    options = Options(chunk, ignore_index, softcap, entropy=entropy)
    tensors = hidden, head_weight, labels
    z, counted, _ = _numbers(tensors, layout, vocab_dims, options)
    taken = (z.label - z.lse).where(counted, 0.0).view(labels.shape)
    return (taken, (z.lse - z.mean).view(labels.shape)) if entropy else taken


def sequence_sums(
    values: Tensor,
    layout: Layout,
    axis: str = "tokens",
    documents: Documents | Iterable[int] | None = None,
) -> Tensor:
    """Sums over the tokens of each sequence, on whatever ranks they are (V -> I).

        before    rank 0: (b, n0)        rank 1: (b, n1)
        after     both:   (b,)
        backward  both:   d (b,)    ->   each: d at every token of its own

    For a loss that all ranks of the tokens compute: of log-probabilities (DPO), of their means
    (GSPO). Ranks that split the batch have other sequences: `layout.mean(..., axis="batch")`.

    Args:
        values: of this rank's tokens, (b, n).
        layout: a bound layout.
        axis: its name for the tokens.
        documents: lengths of the documents that are packed in every row: one sum for each.

    Returns:
        (b,), or (b, documents).

    Raises:
        ShapeError: values of another length than the documents' on this rank.

    >>> sequence_sums(torch.tensor([[1.0, 2.0, 4.0]]), Layout.single())
    tensor([7.])
    >>> sequence_sums(torch.tensor([[1.0, 2.0, 4.0]]), Layout.single(), documents=(1, 2))
    tensor([[1., 6.]])
    """
    if documents is None:
        return layout.sum(values.sum(1), axis)
    documents = as_documents(documents)
    total = int(torch.tensor(documents.lengths, device="cpu").sum())
    place = layout.positions(axis, total, values.device)
    if values.dim() != 2 or values.shape[1] != len(place):
        raise ShapeError(
            f"values {tuple(values.shape)} are not (b, {len(place)}), this rank's tokens of"
            f" documents of {total}"
        )
    lengths = uploaded(documents.lengths, values.device)
    number = torch.bucketize(place, lengths.cumsum(0), right=True)
    sums = values.new_zeros(len(values), len(lengths)).index_add(1, number, values)
    return layout.sum(sums, axis)


def _numbers(
    tensors: tuple[Tensor, Tensor, Tensor],
    layout: Layout,
    vocab_dims: str | Sequence[str],
    options: Options,
    also_along: Sequence[str] = (),
) -> tuple[LossNumbers, Tensor, int]:
    """The numbers of every token's logits, which tokens are labelled, and how many words there are.

    Ranks along `vocab_dims` and `also_along` learn here of an error on any of them.
    """
    hidden, weight, labels = tensors
    dims = layout.bound.moving(_vocab_dims(weight, layout, vocab_dims))
    if isinstance(weight, DTensor):
        weight = weight.to_local()
    hidden, weight = as_autocast(hidden, weight)
    along = layout.bound.moving((*dims, *also_along))
    ranks = agreed((hidden, weight, labels), layout, dims, along, options)
    other = tuple(d for d in dims if d in layout.data_dims)
    head = LossHead(
        chunk=options.chunk,
        longest=max(share.tokens for share in ranks.values()),
        first=sum(share.words for rank, share in ranks.items() if rank < layout.rank),
        softcap=options.softcap,
        same=tuple(d for d in dims if d not in other),
        other=other,
        transport=layout.bound,
        total=options.label_smoothing > 0,
        mean=options.entropy,
    )
    flat = labels.reshape(-1)
    counted = flat != options.ignore_index
    target = flat.long().where(counted, -1)
    z = numbers(hidden.reshape(-1, hidden.shape[-1]), weight, target, head)
    return z, counted, sum(share.words for share in ranks.values())


def _vocab_dims(weight: Tensor, layout: Layout, vocab_dims: str | Sequence[str]) -> tuple[str, ...]:
    """Mesh dims of the layout over which the rows of a head's weight are cut."""
    named = (vocab_dims,) if isinstance(vocab_dims, str) else tuple(vocab_dims)
    for name in named:
        if name not in layout.mesh:
            raise DeclarationError(
                f"{layout.source}: vocab_dims has {name!r}, which is no mesh dim of the layout"
                f" {dict(layout.mesh)}{did_you_mean(name, layout.mesh)}"
            )
    ordered = tuple(d for d in layout.mesh if d in named)
    if named != ordered:
        raise DeclarationError(
            f"{layout.source}: vocab_dims={named}: rows of head_weight are in the order of the"
            f" ranks, which is that of mesh dims {ordered}; cut them so, and name them so"
        )
    if not isinstance(weight, DTensor):
        return named
    of_mesh = dict(zip(layout.device_dims(layout.mesh), layout.mesh))
    cut_dims = []
    for name, placement in zip(weight.device_mesh.mesh_dim_names or (), weight.placements):
        if type(placement) is Shard and placement.dim == 0 and name in of_mesh:
            cut_dims.append(of_mesh[name])
        elif not placement.is_replicate():
            raise UnsupportedError(
                f"head_weight is a DTensor of {weight.placements} over {weight.device_mesh}: its"
                f" words (dim 0) may be cut over mesh dims {tuple(of_mesh)} of the layout, and"
                " nothing else; pass head_weight.full_tensor()"
            )
    if named and set(named) != set(cut_dims):
        raise DeclarationError(
            f"vocab_dims={named}, but head_weight is a DTensor that is cut over {tuple(cut_dims)}"
        )
    return tuple(cut_dims)
