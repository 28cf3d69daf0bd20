"""Statistics of a token's logits, computed and consumed one chunk of tokens at a time.

    T tokens of this rank (t of a chunk), E numbers of a hidden state, V words (v of this rank)

Forward, logits (t v) become a few numbers per token and are dropped; backward makes them again. So
the most that exists at one time is a chunk's, whatever T. Where ranks have other words each
(vocab-parallel), their numbers of a token are merged by their logsumexps; where they have other
tokens each, too, chunks of hidden states go round and their gradients come back:

    ranks have            forward, per chunk                   backward, per chunk
    the same tokens       numbers: V -> R                      gradient of hidden: P -> R
    other tokens          hidden: V -> R, numbers: V -> R      gradient of hidden: P -> V
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.comm import Transport
from weft.comm.once_differentiable import once
from weft.declare.mesh import index_at
from weft.move.gather import gather_flat, spread_flat
from weft.runtime.autocast import without_autocast


@dataclass(frozen=True)
class LossHead:
    """The making of logits, and the ranks that take part."""

    chunk: int  # tokens of all ranks together whose logits exist at one time
    longest: int  # tokens of the rank that has most: all make as many chunks as that one
    first: int  # the number of this rank's first word
    softcap: float | None  # logits are `softcap * tanh(logits / softcap)`
    same: tuple[str, ...]  # mesh dims whose ranks have other words and the same tokens
    other: tuple[str, ...]  # mesh dims whose ranks have other words and other tokens
    transport: Transport
    total: bool = False  # whether `LossNumbers.total` is wanted
    mean: bool = False  # whether `LossNumbers.mean` is, which takes another chunk of memory

    @property
    def ranks(self) -> int:
        """Over how many ranks the tokens of a chunk are spread."""
        return math.prod(self.transport.sizes[d] for d in self.other)

    @property
    def own(self) -> int:
        """Tokens of a chunk that are this rank's, where it has as many left."""
        return max(1, self.chunk // self.ranks)

    def spans(self, tokens: int) -> Iterator[slice]:
        """This rank's tokens of every chunk; those after its last are empty."""
        for start in range(0, self.longest, self.own):
            yield slice(min(tokens, start), min(tokens, start + self.own))

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """(t v), in fp32 at least."""
        logits = hidden @ weight.T
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def enter(self, local: Tensor) -> Tensor:
        """The chunk's rows of all ranks that have other tokens, from this rank's (V -> R)."""
        if not self.other:
            return local
        rows = local.new_zeros(self.own, *local.shape[1:])
        rows[: len(local)] = local
        return _stacked(rows, self.other, self.transport, "loss").flatten(0, 1)

    def leave(self, partial: Tensor, tokens: int) -> Tensor:
        """This rank's rows of sums over all ranks (P -> R or V)."""
        if self.other:
            parts, tail = [*partial.view(self.ranks, -1)], partial.shape[1:]
            flat = spread_flat(parts, self.other, self.transport, "loss", _added)
            partial = flat.view(-1, *tail)
        if self.same:
            partial = self.transport.all_reduce(partial.contiguous(), self.same, "loss")
        return partial[:tokens]

    def take(self, chunk: Tensor, tokens: int) -> Tensor:
        """This rank's columns of the chunk's (k, t)."""
        if not self.other:
            return chunk
        index = index_at(self.transport.sizes, self.other, self.transport.coords)
        return chunk[:, index * self.own :][:, :tokens]

    def label_columns(self, labels: Tensor, words: int) -> tuple[Tensor, Tensor]:
        """Index of each label among this rank's words, and a mask of the labels that are there."""
        column = labels - self.first
        return column.clamp(0, max(0, words - 1)), (column >= 0) & (column < words)


class LossNumbers(NamedTuple):
    """Sums over every token's logits z, (T,) each, in fp32 at least."""

    lse: Tensor  # log sum exp z
    label: Tensor  # z of the label
    total: Tensor  # sum of all z, or 0
    mean: Tensor  # sum of softmax(z) z, or 0; lse - mean is the entropy


def numbers(hidden: Tensor, weight: Tensor, labels: Tensor, head: LossHead) -> LossNumbers:
    """The numbers of logits `hidden @ weight.T`, differentiable by both.

    Of hidden states (T, E), this rank's words (v, E), and labels (T,) from 0 to V - 1, or any other
    number for none.
    """
    return LossNumbers(*_Numbers.apply(hidden, weight, labels, head))


class _Numbers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: LossHead
    ) -> tuple[Tensor, ...]:
        local, *of_chunks = _forward(hidden, weight, labels, head)
        ctx.save_for_backward(hidden, weight, *of_chunks)
        ctx.head = head
        return local

    @staticmethod
    @once("weft.losses", linear=False)
    def backward(ctx: Any, saved: tuple[Tensor, ...], *above: Tensor) -> tuple:
        hidden, weight, labels, kept = saved
        needs = ctx.needs_input_grad[:2]
        grads = _backward(hidden, weight, labels, kept, torch.stack(above, 1), ctx.head, needs)
        return *grads, None, None


@without_autocast
def _forward(
    hidden: Tensor, weight: Tensor, labels: Tensor, head: LossHead
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Numbers of this rank's tokens, 4 x (T,); the labels and (lse, mean) of all chunks' tokens."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    local = tuple(
        torch.empty(len(hidden), dtype=wide, device=hidden.device) for _ in LossNumbers._fields
    )
    targets, saved = [labels[:0]], [local[0].new_empty(2, 0)]
    for span in head.spans(len(hidden)):
        target = head.enter(labels[span])
        result = _merged(_of_logits(head.enter(hidden[span]), weight, target, head), head)
        for number, rows in zip(local, head.take(result, span.stop - span.start)):
            number[span] = rows
        targets.append(target)
        saved.append(result[[0, 3]])
    return local, torch.cat(targets), torch.cat(saved, 1)


def _of_logits(hidden: Tensor, weight: Tensor, labels: Tensor, head: LossHead) -> Tensor:
    """lse, label, total and mean of this rank's words: (4, t)."""
    z = head.logits(hidden, weight)
    out = z.new_zeros(4, len(z))
    if not weight.shape[0]:  # more ranks than words
        out[0] = -torch.inf
        return out
    column, is_own = head.label_columns(labels, len(weight))
    out[1] = z.gather(1, column[:, None]).squeeze(1).masked_fill(~is_own, 0.0)
    if head.total:
        out[2] = z.sum(1)
    peak = z.amax(1)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    if head.mean:
        weights = (z - peak[:, None]).exp_()
        share = weights.sum(1)
        out[3] = weights.mul_(z).sum(1) / share
    else:
        share = z.sub_(peak[:, None]).exp_().sum(1)
    out[0] = peak + share.log()
    return out


def _merged(part: Tensor, head: LossHead) -> Tensor:
    """Numbers of all ranks' words from each rank's (4, t): P -> R."""
    dims = tuple(d for d in head.transport.sizes if d in (*head.same, *head.other))
    if not dims:
        return part
    parts = _stacked(part, dims, head.transport, "loss")  # ranks 4 t
    lse = parts[:, 0].logsumexp(0)
    weights = (parts[:, 0] - lse).exp()
    return torch.stack(
        [lse, parts[:, 1].sum(0), parts[:, 2].sum(0), (weights * parts[:, 3]).sum(0)]
    )


@without_autocast
def _backward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    saved: Tensor,
    above: Tensor,
    head: LossHead,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden and of this rank's words, from those of its tokens' numbers (T, 4)."""
    d_hidden = torch.zeros_like(hidden) if needs[0] else None
    wide = torch.promote_types(weight.dtype, torch.float32)
    d_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
    begin = 0
    for span in head.spans(len(hidden)):
        rows = head.enter(hidden[span])
        chunk = slice(begin, begin := begin + len(rows))
        of_chunk = labels[chunk], saved[:, chunk], head.enter(above[span])
        d_logits = _of_logits_backward(rows, weight, *of_chunk, head).to(rows.dtype)
        if d_hidden is not None:
            partial = (d_logits @ weight).to(wide)
            d_hidden[span] = head.leave(partial, span.stop - span.start).to(hidden.dtype)
        if d_weight is not None and d_weight.dtype == rows.dtype:
            d_weight.addmm_(d_logits.T, rows)
        elif d_weight is not None:  # sums of many chunks are no numbers for half precision
            d_weight += d_logits.T @ rows
        del d_logits  # or it would still exist while the next chunk's is made
    return d_hidden, None if d_weight is None else d_weight.to(weight.dtype)


def _of_logits_backward(
    hidden: Tensor, weight: Tensor, labels: Tensor, saved: Tensor, above: Tensor, head: LossHead
) -> Tensor:
    """The gradient of logits (t v), before the softcap.

    With p = softmax(z): of lse it is p, of label 1 at the label, of total 1, and of mean
    p (1 + z - mean).
    """
    z = head.logits(hidden, weight)
    lse, mean = saved[:, :, None]
    d_lse, d_label, d_total, d_mean = above.unbind(1)
    inside = None if head.softcap is None else z.div(head.softcap).square_().neg_().add_(1.0)
    if head.mean:
        slope = (z - mean).add_(1.0).mul_(d_mean[:, None]).add_(d_lse[:, None])
        z = z.sub_(lse).exp_().mul_(slope)
    else:
        z = z.sub_(lse).exp_().mul_(d_lse[:, None])
    if head.total:
        z += d_total[:, None]
    if len(weight):
        column, is_own = head.label_columns(labels, len(weight))
        z.scatter_add_(1, column[:, None], d_label.masked_fill(~is_own, 0.0)[:, None])
    return z if inside is None else z.mul_(inside)


# -- tensors of one shape on all ranks -------------------------------------------------------------


def _stacked(x: Tensor, dims: tuple[str, ...], transport: Transport, label: str) -> Tensor:
    """The tensors of all ranks along mesh dims, in their order: (ranks, *shape)."""
    ranks = math.prod(transport.sizes[d] for d in dims)
    parts = gather_flat(x.contiguous().view(-1), [x.numel()] * ranks, dims, transport, label)
    return torch.stack(parts).view(-1, *x.shape)


def _added(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)
