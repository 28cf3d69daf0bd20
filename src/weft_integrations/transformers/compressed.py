"""Compressed keys of DeepSeek V4, over tokens that are split over ranks.

An entry is pooled from a window of m tokens, and with overlap from the window before it, too:

    entry = "S(seq) + left(2m - 1) -> R"      m = 2: entry 1 of 0 1 2 3, on the rank that has 3

    rank 0: 0 1 2      rank 1: [0 1 2] 3 4 5      windows that close here, and their columns left
    both:   e0 e1 e2                              entries of all ranks, in order of their windows

What the model's cache holds of earlier calls, other ranks hold of this one: the stock compressor is
called with a cache that answers so, once per piece of this rank for its entries, then a few rows at
a time for what each query sees of all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from weft.attention import attention
from weft.choice import ChosenKeys
from weft.layout import Layout
from weft_axes.carry.pieces import LocalPieces, Piece
from weft_axes.decode.attend import merged_parts

from .. import Foreign
from ..common import chunk_places, of_all_ranks
from .running import ModelCall, now, over_chunks


@dataclass
class Entries:
    """Entries of one kind, `compressor` or `indexer`, on their way to every rank."""

    kv: Tensor  # projections (b, n, 2d or d) of this rank's tokens
    gate: Tensor
    left: list[Tensor]  # per piece, those of the tokens to its left
    made: list[Tensor] = field(default_factory=list)  # of this rank's pieces
    whole: Tensor | None = None  # of all ranks, in the order of windows


class OfEachLayer:
    """A cache that is that of each layer."""

    @property
    def layers(self) -> Self:
        """The cache of each layer: this one."""
        return self

    def __getitem__(self, layer_idx: int) -> Self:
        return self


@dataclass
class OfRanks(OfEachLayer):
    """A cache to a compressor: its earlier tokens, and its earlier entries, are those of others.

    Attributes:
        call: that the compressor is in.
        ratio: tokens of a window.
        overlap: whether an entry has tokens of the window before, too.
        piece: of this rank, whose entries are made; None: they are captured, or read.
    """

    call: ModelCall
    ratio: int
    overlap: bool
    piece: int | None = None
    kinds: dict[str, Entries] = field(default_factory=dict)

    def __post_init__(self) -> None:
        call = self.call
        self.pieces = LocalPieces(call.layout, call.axis, call.length)

    @property
    def columns(self) -> int:
        """The number of tokens to its left that an entry of a piece may have."""
        return (2 if self.overlap else 1) * self.ratio - 1

    def windows(self, piece: Piece) -> range:
        """The windows whose last token a piece holds."""
        return range(piece.start // self.ratio, (piece.start + piece.count) // self.ratio)

    def _extra(self, windows: range) -> int:
        """Windows before those of a piece whose tokens its first entry has."""
        return int(self.overlap and windows.start > 0)

    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """The projections of a piece's windows, and the place of the first; at first of none."""
        if name not in self.kinds:
            kv, gate = (kv, gate) if name == "compressor" else (kv.detach(), gate.detach())
            left = self.pieces.left(torch.cat([kv, gate], -1), self.columns, 1)
            self.kinds[name] = Entries(kv, gate, left)
        kind = self.kinds[name]
        if self.piece is None:
            return kv[:, :0], gate[:, :0], 0
        piece, both = self.pieces.pieces[self.piece], torch.cat([kind.kv, kind.gate], -1)
        ((part,),) = self.pieces.split(1, both)[self.piece : self.piece + 1]
        wide = torch.cat([kind.left[self.piece], part], 1)  # from `columns` before the piece on
        windows = self.windows(piece)
        first = windows.start - self._extra(windows)
        low = first * self.ratio - piece.start + self.columns
        kv, gate = wide[:, low : low + (windows.stop - first) * self.ratio].chunk(2, -1)
        return kv, gate, first * self.ratio

    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[None, None]:
        """No state: the window before is one of the piece's windows."""
        return None, None

    def update_compressor_states(self, name: str, entries: Tensor) -> Tensor:
        """The entries of all ranks, once they are made; before, none."""
        kind = self.kinds[name]
        if kind.whole is not None:
            return kind.whole
        if self.piece is not None:
            extra = self._extra(self.windows(self.pieces.pieces[self.piece]))
            kind.made.append(entries[:, extra:])
        else:
            kind.made.append(entries)  # none of them, with their graph
        return entries[:, :0]

    def gather(self) -> None:
        """Bring the entries of all ranks to every rank; their gradients come back and add up."""
        layout, axis = self.call.layout, self.call.axis
        places = [self.closing(each) for each in chunk_places(layout, axis, self.call.length)]
        for name, kind in self.kinds.items():
            dim = kind.made[0].shape[-1]
            none = (kind.kv[:, :0, :dim] + kind.gate[:, :0, :dim]).to(kind.made[0].dtype)
            entries = self.pieces.join(1, [none, *kind.made], kind.left)
            counted_as = "entries" if name == "compressor" else "index"
            kind.whole = of_all_ranks(entries, 1, places, layout, axis, counted_as)

    def closing(self, positions: Tensor) -> Tensor:
        """The windows whose last token is at one of some positions."""
        last = positions[(positions + 1) % self.ratio == 0]
        return torch.div(last, self.ratio, rounding_mode="floor")


@functools.partial(over_chunks, results=0)
def compress(
    self: Foreign,
    hidden_states: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
    cache: Any,
    layer_idx: int,
) -> tuple[Tensor, Tensor | None]:
    """`forward` of DeepSeek V4's compressors: all entries (b, 1, T, d), and what queries see.

    The second is kept for attention, which gets no tensor as a mask: `ModelCall.entries`.
    """
    stock: Callable = functools.partial(type(self).forward, self)
    call = now(type(self).__name__)
    if call.whole:
        return stock(hidden_states, q_residual, position_ids, cache, layer_idx)
    ranks_cache = OfRanks(call, self.compress_rate, hasattr(self, "indexer"))
    positions = call.layout.positions(call.axis, call.length, hidden_states.device)
    places = positions.expand(len(hidden_states), -1)

    def run(rows: Any) -> tuple[Tensor, Tensor | None]:
        inputs = hidden_states[:, rows], q_residual[:, rows], places[:, rows]
        return stock(*inputs, ranks_cache, layer_idx)

    run(slice(None))  # no window yet: the projections are captured
    for number, piece in enumerate(ranks_cache.pieces.pieces):
        if len(ranks_cache.windows(piece)):
            ranks_cache.piece = number
            run(slice(0, 1))
    ranks_cache.piece = None
    ranks_cache.gather()
    entries = ranks_cache.kinds["compressor"].whole
    assert entries is not None
    indexer, number = getattr(self, "indexer", None), entries.shape[1]
    count = number if indexer is None else min(indexer.index_topk, number)
    scores = number if indexer is None else number * indexer.num_heads
    seen: list[Tensor] = []
    with torch.no_grad():
        for part, queries in call.rows_at_once(hidden_states.device, len(places) * scores):
            # The stock code takes one row for a step of decoding, which sees every entry.
            rows = [part.start] * 2 if len(queries) == 1 else part
            bias = run(rows)[1]
            if bias is not None:
                seen.append(_numbers(bias, count, len(queries)))
    entries = entries.unsqueeze(1)
    if seen:
        call.entries = entries, ChosenKeys(torch.cat(seen, 2), check=False)
    return entries, None


def _numbers(bias: Tensor, count: int, rows: int) -> Tensor:
    """The entries that rows see (b, 1, n, K), -1 for none, from a bias of 0 or -inf."""
    kept, places = (bias[:, :, :rows] == 0).to(torch.uint8).topk(count, -1)
    return places.int().masked_fill(kept == 0, -1)


def attend_with_entries(
    query: Tensor,
    near_keys: Tensor,
    entries: Tensor,
    place: tuple[Layout, str, Any, float | None, tuple[int, int]],
    softcap: float | None,
    seen: ChosenKeys,
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp over this rank's queries' own window, and over the entries behind it.

    Values are the keys; `entries` (b, 1, T, d) are those of all ranks.
    """
    n, (_, axis, _, scale, _) = query.shape[2], place
    near = attention(query, near_keys, near_keys, *place, return_lse=True, softcap=softcap)
    length = n, entries.shape[2]
    whole_place = Layout.single(), axis, None, scale, length
    named: dict[str, Any] = {"softcap": softcap, "choice": seen}
    far = attention(query, entries, entries, *whole_place, return_lse=True, **named)
    return merged_parts([near, far])


#: Classes of compressors, and of the indexer in one of them.
COMPRESSORS = frozenset({"DeepseekV4HCACompressor", "DeepseekV4CSACompressor"})
WITHIN = frozenset({"DeepseekV4Indexer"})

__all__ = ["COMPRESSORS", "WITHIN", "attend_with_entries", "compress"]
