"""Blocks of a score matrix that are equal up to symmetry, so that one kernel call fits both.

A part of queries and a part of keys, each an evenly spaced run of positions, are related as the
mask sees them: nothing is seen (0), everything is seen (1), or it depends on their exact positions,
which get a number from 2 on: their distance for a causal mask and a window, the ends of documents
in both for packed documents. Of other masks nothing is known to be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..masks import And, Causal, Documents, Full, Mask, Window
from ..plan.order import Spans

HIDDEN, SEEN, EXACT = 0, 1, 2
#: Codes are made small again before they could overflow.
LARGEST = 1 << 62


@dataclass(frozen=True)
class Parts:
    """First and last positions of the parts of chunks: of all queries, or of all keys."""

    first: np.ndarray
    last: np.ndarray


def block_kinds(mask: Mask, q_chunks: Sequence[Spans], k_chunks: Sequence[Spans]) -> np.ndarray:
    """A number per pair of a query and a key chunk, equal for blocks that are the same.

    >>> from weft.plan.order import Span
    >>> chunks = [(Span(4 * i, 4),) for i in range(3)]
    >>> block_kinds(Causal(), chunks, chunks).tolist()
    [[2, 0, 0], [1, 2, 0], [1, 1, 2]]
    """
    shapes: dict[tuple, int] = {}

    def shape(spans: Spans) -> int:
        return shapes.setdefault(tuple((s.count, s.step) for s in spans), len(shapes))

    sizes = [np.array([shape(s) for s in chunks]) for chunks in (q_chunks, k_chunks)]
    code = _numbered(sizes[0][:, None] * len(shapes) + sizes[1][None])
    if not _known(mask):
        return np.arange(code.size).reshape(code.shape)  # nothing is known to be the same
    for q in _parts(q_chunks):
        for k in _parts(k_chunks):
            relation, kinds = _relation(mask, q, k)
            if int(code.max(initial=0)) + 1 > LARGEST // kinds:
                code = _numbered(code)
            code = code * kinds + relation
    return _numbered(code)


def _known(mask: Mask) -> bool:
    if isinstance(mask, And):
        return _known(mask.left) and _known(mask.right)
    return isinstance(mask, Full | Causal | Window | Documents) and not mask.per_sample


def _parts(chunks: Sequence[Spans]) -> list[Parts]:
    """The first part of every chunk, the second, and so on; (0, 0) where a chunk has fewer."""
    made = []
    for x in range(max(map(len, chunks), default=0)):
        ends = [(c[x].start, c[x].last) if x < len(c) else (0, 0) for c in chunks]
        made.append(Parts(*np.array(ends).T))
    return made


def _relation(mask: Mask, q: Parts, k: Parts) -> tuple[np.ndarray, int]:
    """The relation of each part of queries to each part of keys, and the number of relations."""
    if isinstance(mask, And):
        return _both(_relation(mask.left, q, k), _relation(mask.right, q, k))
    if isinstance(mask, Documents | Causal | Window) and mask.offset:
        q = Parts(q.first + mask.offset, q.last + mask.offset)
    if isinstance(mask, Documents):
        return _documents(np.cumsum(mask.lengths), q, k)
    if isinstance(mask, Causal):
        return _band(None if mask.window is None else mask.window - 1, 0, q, k)
    if isinstance(mask, Window):
        return _band(mask.left, mask.right, q, k)
    return np.full((len(q.first), len(k.first)), SEEN), EXACT


def _both(left: tuple[np.ndarray, int], right: tuple[np.ndarray, int]) -> tuple[np.ndarray, int]:
    """The relations of parts where two masks must both allow a score."""
    (a, of_a), (b, of_b) = left, right
    code = a * of_b + b + EXACT
    code[(a == SEEN) & (b == SEEN)] = SEEN
    code[(a == HIDDEN) | (b == HIDDEN)] = HIDDEN
    return code, of_a * of_b + EXACT


def _band(left: int | None, right: int, q: Parts, k: Parts) -> tuple[np.ndarray, int]:
    """A query sees `left` keys before its position (None: all) and `right` behind it."""
    q0, q1, k0, k1 = q.first[:, None], q.last[:, None], k.first[None], k.last[None]
    hidden, seen = k0 > q1 + right, k1 <= q0 + right
    if left is not None:
        hidden |= k1 < q0 - left
        seen &= k0 >= q1 - left
    return _coded(hidden, seen, k0 - q0)


def _documents(ends: np.ndarray, q: Parts, k: Parts) -> tuple[np.ndarray, int]:
    """A query sees the keys of its document."""
    known: dict[tuple, int] = {}
    first, last, inside = [], [], []
    for part in (q, k):
        low, high = (np.searchsorted(ends, x, side="right") for x in (part.first, part.last))
        cuts = [tuple(ends[a:b] - p) for a, b, p in zip(low, high, part.first)]
        first.append(low)
        last.append(high)
        inside.append(np.array([known.setdefault(c, len(known)) for c in cuts]))
    apart = first[1][None] - first[0][:, None]
    hidden = (first[1][None] > last[0][:, None]) | (last[1][None] < first[0][:, None])
    whole = [low == high for low, high in zip(first, last)]
    seen = whole[0][:, None] & whole[1][None] & (apart == 0)
    cut = inside[0][:, None] * len(known) + inside[1][None]
    return _coded(hidden, seen, _numbered(cut) * (2 * len(ends) + 3) + apart)


def _coded(hidden: np.ndarray, seen: np.ndarray, exact: np.ndarray) -> tuple[np.ndarray, int]:
    code = np.where(seen, SEEN, HIDDEN)
    partly = ~(hidden | seen)
    different, which = np.unique(exact[partly], return_inverse=True)
    code[partly] = which + EXACT
    return code, len(different) + EXACT


def _numbered(code: np.ndarray) -> np.ndarray:
    return np.unique(code, return_inverse=True)[1].reshape(code.shape)


__all__ = ["block_kinds"]
