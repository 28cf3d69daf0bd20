"""transformers' mask functions, read back as weft masks.

transformers describes a mask as a function of (batch, head, query, key) indices, made of a few
known pieces. On a shard indices are not positions, so the function cannot be called; but its
pieces can be recognised, and each means something at global positions. Unknown pieces are refused.
"""

from __future__ import annotations

import bisect
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils as hf

from weft._caching import cached
from weft._uploads import upload
from weft.errors import ShapeError, UnsupportedError
from weft.masks import (
    FAR,
    NOTHING,
    And,
    Causal,
    Documents,
    Full,
    Indexed,
    Interval,
    Mask,
    Or,
    Window,
    describe,
)


@dataclass(frozen=True)
class Blocks(Mask):
    """Tokens of a block, such as an image, see each other, and no others; most are in no block.

    `spans[b]` are the first and last positions of the blocks of sequence b, in order.

    >>> blocks = Blocks((((2, 4), (7, 9)),))
    >>> blocks.keys((0, 3)), blocks.keys((3, 8)), blocks.is_full((2, 3), (3, 4))
    ((2, 4), (2, 9), True)
    """

    spans: tuple[tuple[Interval, ...], ...]

    @classmethod
    def of_ids(cls, ids: Tensor) -> Blocks:
        """The blocks of ids (b, n), negative where a token is in none; a block is in one piece.

        >>> Blocks.of_ids(torch.tensor([[-1, 0, 0, 1, -1]]))
        Blocks(spans=(((1, 2), (3, 3)),))
        """
        rows = []
        for row in ids.cpu():
            numbers, counts = row.unique_consecutive(return_counts=True)
            stops, inside = counts.cumsum(0), numbers >= 0
            if len(numbers[inside].unique()) < len(numbers[inside]):
                raise UnsupportedError("tokens that see each other are in several pieces of a row")
            starts, last = (stops - counts)[inside].tolist(), (stops - 1)[inside].tolist()
            rows.append(tuple(zip(starts, last)))
        return cls(tuple(rows))

    def of_sequences(self, numbers: tuple[int, ...]) -> Mask:
        if not numbers or not 0 <= min(numbers) <= max(numbers) < len(self.spans):
            return self
        return Blocks(tuple(dict.fromkeys(self.spans[b] for b in numbers)))

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.prepared(k.device)(b, h, q, k)

    def prepared(self, device: torch.device) -> Indexed:
        # Looked up, not searched: a kernel's compiler takes indices and no searches.
        table = _block_numbers(self.spans, device)
        last, rows = table.shape[1] - 1, table.shape[0]

        def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            row = b * 0 if rows == 1 else b  # one row is that of any sequence
            of_q, of_k = (table[row, x.clamp(max=last)] for x in (q, k))
            return (of_q == of_k) & (of_q > 0) & (h >= 0)

        return seen

    def keys(self, q: Interval) -> Interval:
        touched = [span for row in self.spans for span in _touched(row, q)]
        if not touched:
            return NOTHING
        return min(first for first, _ in touched), max(last for _, last in touched)

    def queries(self, k: Interval) -> Interval:
        return self.keys(k)

    def is_full(self, q: Interval, k: Interval) -> bool:
        low, high = min(q[0], k[0]), max(q[1], k[1])
        return all(
            any(first <= low and high <= last for first, last in _touched(row, (low, high)))
            for row in self.spans
        )

    def check(self, n: int, m: int, batch: int) -> None:
        if len(self.spans) != batch:
            raise ShapeError(f"blocks of {len(self.spans)} rows for a batch of {batch} sequences")
        last = max((row[-1][1] for row in self.spans if row), default=-1)
        if n != m or last >= m:
            raise ShapeError(f"blocks up to position {last} for {n} queries and {m} keys")


@cached(16)
def _block_numbers(spans: tuple[tuple[Interval, ...], ...], device: torch.device) -> Tensor:
    """Number of the block at each position, from 1, and 0 outside blocks: (rows, last + 2).

    >>> _block_numbers((((1, 2), (3, 3)),), torch.device("cpu"))
    tensor([[0, 1, 1, 2, 0]], dtype=torch.int32)
    """
    end = 2 + max((last for row in spans for _, last in row), default=-1)
    table = torch.zeros(len(spans), end, dtype=torch.int32, device="cpu")
    for numbers, row in zip(table, spans):
        for i, (first, last) in enumerate(row, 1):
            numbers[first : last + 1] = i
    return upload(table, device)


def _touched(row: Sequence[Interval], positions: Interval) -> Sequence[Interval]:
    """The first and the last block of a row that hold some of the positions."""
    start = bisect.bisect_left(row, positions[0], key=lambda span: span[1])
    stop = bisect.bisect_right(row, positions[1], key=lambda span: span[0])
    return [row[start], row[stop - 1]] if start < stop else []


def translate(fn: Callable, length: int | None, packed: bool = False) -> Mask:
    """The weft mask of a mask function; raises `UnsupportedError` for one it does not know.

    `length` is that of the whole axis. The mask of `packed` documents is added by the caller, from
    their lengths.

    >>> translate(hf.sliding_window_causal_mask_function(4), 16)
    Causal(window=4, offset=None)
    """
    if fn is hf.causal_mask_function:
        return Causal()
    if fn is hf.bidirectional_mask_function:
        return Full()
    made_by, values = _origin(fn)
    if made_by == "or_masks":
        return functools.reduce(Or, _joined(values["mask_functions"], length, packed))
    if made_by == "and_masks":
        # Which packed sequence a token is in, they read off local position ids, where a shard of
        # one sequence looks packed too; the documents' lengths replace that.
        pieces = values["mask_functions"]
        rest = [f for f in pieces if _origin(f)[0] != "packed_sequence_mask_function"]
        return _meet([translate(f, length, packed) for f in rest])
    if made_by == "remap_positions_for_packed_sequence":
        return translate(values["mask_function"], length, packed)
    if made_by.startswith("sliding_window") and values["sliding_window"] < 1:
        raise UnsupportedError(
            f"sliding_window={values['sliding_window']}: no token would see any, itself included; "
            "set sliding_window=None in the configuration for a layer without a window"
        )
    if made_by == "sliding_window_overlay":
        return Window(values["sliding_window"] - 1, FAR)
    if made_by == "sliding_window_bidirectional_overlay":
        return Window(values["sliding_window"], values["sliding_window"])
    if made_by == "chunked_overlay":
        return _chunks(values, length, packed)
    raise UnsupportedError(
        f"the model asks for a mask that weft does not know, {made_by or fn!r}; known are causal, "
        "bidirectional, sliding windows, chunks, blocks and packed documents"
    )


def is_known(fn: Callable) -> bool:
    """True if a mask function is made of transformers' own pieces, functions of plain indices.

    >>> is_known(hf.sliding_window_causal_mask_function(4)), is_known(lambda b, h, q, k: q >= k)
    (True, False)
    """
    made_by, values = _origin(fn)
    pieces = [*values.get("mask_functions", ()), values.get("mask_function")]
    plain = made_by in _PIECES or fn in (hf.causal_mask_function, hf.bidirectional_mask_function)
    return plain and all(is_known(piece) for piece in pieces if piece is not None)


def behind(mask: Mask, past: int) -> Mask:
    """The mask of tokens behind others, among themselves; refuses one of positions from the start.

    >>> behind(Causal(), 7)
    Causal(window=None, offset=None)
    """
    text = describe(mask) if past else ""
    for kind, name in (("Documents", "chunked attention"), ("Blocks", "blocks of tokens")):
        if kind in text:
            raise UnsupportedError(f"{name} behind {past} cached tokens")
    return mask


def _origin(fn: Callable) -> tuple[str, dict[str, Any]]:
    """The function of transformers that made a closure, and the captured variables."""
    outer, _, inner = getattr(fn, "__qualname__", "").partition(".<locals>.")
    if not inner or getattr(fn, "__module__", "") != hf.__name__:
        return "", {}
    return outer, dict(inspect.getclosurevars(fn).nonlocals)


#: Functions of transformers that make mask functions, or combine them.
_PIECES = (
    *("and_masks", "or_masks", "blockwise_overlay", "chunked_overlay", "sliding_window_overlay"),
    *("sliding_window_bidirectional_overlay", "remap_positions_for_packed_sequence"),
    *("packed_sequence_mask_function", "padding_mask_function"),
)


def _joined(pieces: Sequence[Callable], length: int | None, packed: bool) -> Iterator[Mask]:
    """The masks of which a pair is visible in any; blocks of no token add nothing."""
    for piece in pieces:
        made_by, values = _origin(piece)
        if made_by != "blockwise_overlay":
            yield translate(piece, length, packed)
        elif (values["block_sequence_ids"] >= 0).any():
            yield _blocks(values["block_sequence_ids"], length)


def _blocks(ids: Tensor, length: int | None) -> Mask:
    """The blocks of whole rows that see themselves."""
    if ids.shape[-1] != length:
        raise UnsupportedError(f"blocks of {ids.shape[-1]} tokens, of rows that have {length}")
    return Blocks.of_ids(ids)


def _meet(masks: list[Mask]) -> Mask:
    """All masks at once; a window that is open to the future and a causal mask are one."""
    masks = [m for m in masks if m != Full()] or [Full()]
    ahead = next((m for m in masks if isinstance(m, Window) and m.right == FAR), None)
    if ahead is not None and Causal() in masks:
        masks = [m for m in masks if m not in (ahead, Causal())]
        masks.append(Causal(window=ahead.left + 1))
    result = masks[0]
    for mask in masks[1:]:
        result = And(result, mask)
    return result


def _chunks(values: dict[str, Any], length: int | None, packed: bool) -> Mask:
    """Chunked attention: chunks of equal size from the sequence's start are documents."""
    if packed or values["left_padding"].any() or length is None:
        raise UnsupportedError("chunked attention over packed documents or padded rows")
    size = values["chunk_size"]
    rest = (length % size,) if length % size else ()
    return Documents((size,) * (length // size) + rest)
