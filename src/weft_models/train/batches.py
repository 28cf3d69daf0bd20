"""Packed batches of which every rank reads only its own tokens.

    documents, in an order that the seed says    | d5 | d2 |      d9      | d1 |   d7   | ...
    rows of a step, `length` tokens each         |     row 0     |     row 1    |
    a rank's fragments of its rows (layout.pack)      [d2] [of d9]

What a step consists of depends on the documents' lengths, the seed, `rows` and `length`; not on the
layout. So a run goes on with the next sample on any other.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from weft._opening import open_to_read
from weft.errors import DeclarationError, ShapeError
from weft.layout import Layout
from weft.masks import Mask
from weft.masks.base import whole_number
from weft.packing.assignment import Assignment, Fragment

#: Labels that count for nothing, as everywhere in torch.
IGNORED = -100
#: How many blocks of how many bytes of a file of tokens ranks compare.
_BLOCKS, _BLOCK = 1024, 4096


class TokenSource(Protocol):
    """Tokens of documents, by number: a `TokenFile`, a `TokenDataset`, or one of yours."""

    lengths: Sequence[int]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a document."""


def _lengths(values: Sequence[int]) -> tuple[int, ...]:
    """Lengths of documents as plain numbers."""
    lengths = tuple(whole_number(x, "a document's length") for x in values)
    for number, length in enumerate(lengths):
        if length < 1:
            raise ShapeError(
                f"document {number} has a length of {length}; a document holds at least 1 token, so"
                " leave empty ones out"
            )
    return lengths


class TokenFile:
    """Documents one after another in a file of plain numbers, mapped into memory.

    Args:
        path: of the file, without a header.
        lengths: of the documents, in tokens.
        dtype: of a token.

    Attributes:
        bytes_read: how many bytes of it were asked for.

    Raises:
        ShapeError: a length below 1, or the file cannot be read, is empty, or holds another number
            of tokens.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/tokens.bin"
    >>> np.array([5, 6, 7, 8, 9], "uint16").tofile(path)
    >>> TokenFile(path, [3, 2]).read(1, 0, 2).tolist()
    [8, 9]
    """

    def __init__(
        self, path: str | Path, lengths: Sequence[int], dtype: np.typing.DTypeLike = "uint16"
    ) -> None:
        self.lengths, self.bytes_read = _lengths(lengths), 0
        self._starts = np.cumsum([0, *self.lengths])
        try:
            with open_to_read(path, links=True) as file:
                if not os.fstat(file.fileno()).st_size:
                    raise ShapeError(f"{path} is empty; it should have the tokens of the documents")
                self._tokens: np.memmap = np.memmap(file, dtype, mode="r")
        except OSError as error:
            raise ShapeError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:  # half a token
            if isinstance(error, ShapeError):
                raise
            raise ShapeError(f"{path} is no file of {np.dtype(dtype)}: {error}") from None
        if len(self._tokens) != self._starts[-1]:
            raise ShapeError(
                f"{path}: {len(self._tokens)} tokens of {self._tokens.dtype}, but the documents'"
                f" lengths add up to {self._starts[-1]}"
            )

    def digest(self) -> str:
        """A digest by which ranks compare the files that they read: 4 MB of it, spread evenly."""
        blocks = self._tokens.view(np.uint8)
        starts = np.linspace(0, max(0, len(blocks) - _BLOCK), _BLOCKS, dtype=np.int64)
        found = hashlib.sha256(f"{self._tokens.dtype} {len(blocks)}".encode())
        for start in np.unique(starts):
            found.update(blocks[start : start + _BLOCK].tobytes())
        return found.hexdigest()[:16]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a document; nothing else is read.

        Args:
            document: its number.
            start: the first of its tokens.
            stop: the token after the last.
        """
        first = self._starts[document]
        part = self._tokens[first + start : first + stop]
        self.bytes_read += part.nbytes
        return part


class TokenDataset:
    """A map-style dataset of documents: item i has the tokens of document i.

    A dataset hands out items whole, so a rank reads every document of which it has a fragment.

    Args:
        dataset: of items that are tokens, or mappings that have them.
        lengths: of the documents; default: every item is read once to know.
        column: under which name an item that is a mapping has them.

    Raises:
        ShapeError: a length below 1, or another number of lengths than documents; when a document
            is read, one of another length.
        TypeError: a dataset that is only iterated.

    >>> TokenDataset([[5, 6, 7], [8, 9]]).read(0, 1, 3)
    array([6, 7])
    """

    def __init__(
        self, dataset: Any, lengths: Sequence[int] | None = None, column: str = "input_ids"
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"{type(dataset).__name__} has no items by number, as ranks need that read other"
                " documents than each other: give a map-style dataset, such as"
                " list(dataset), or datasets.Dataset.from_generator"
            )
        self._dataset, self._column = dataset, column
        if lengths is None:
            lengths = [len(self._item(i)) for i in range(len(dataset))]
        self.lengths = _lengths(lengths)
        if len(self.lengths) != len(dataset):
            raise ShapeError(f"{len(self.lengths)} lengths for {len(dataset)} documents")

    def _item(self, document: int) -> np.ndarray:
        item = self._dataset[document]
        return np.asarray(item[self._column] if isinstance(item, Mapping) else item)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a document.

        Args:
            document: its number.
            start: the first of its tokens.
            stop: the token after the last.
        """
        tokens = self._item(document)
        if len(tokens) != self.lengths[document]:
            raise ShapeError(
                f"document {document} has {len(tokens)} tokens, but its length is given as "
                f"{self.lengths[document]}"
            )
        return tokens[start:stop]


class ReaderPlace(NamedTuple):
    """Place in the documents at which a step begins: plain numbers, for a checkpoint."""

    epoch: int = 0
    document: int = 0  # in the order of the epoch
    token: int = 0  # of that document


@dataclass(frozen=True)
class PackedBatch:
    """A rank's share of one step.

    Attributes:
        tokens: (1, n) int64.
        positions: of the tokens within their documents, (1, n).
        labels: the next token of each within its document, or -100, (1, n).
        assignment: of which documents on which ranks; has the mask and the order of the axis.
        targets: labels of the step over all ranks: divide the sum of losses by it.
        state: of the reader after this step.

    >>> source = TokenDataset([[5, 6, 7], [8, 9]])
    >>> next(iter(PackedReader(source, weft.Layout.single(), 4, seed=None))).positions.shape
    torch.Size([1, 4])
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    assignment: Assignment
    targets: int
    state: Mapping[str, int]

    @property
    def mask(self) -> Mask:
        """Causal attention within each document."""
        return self.assignment.mask

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with its tensors on a device.

        Args:
            device: where to.
        """
        moved = {n: getattr(self, n).to(device) for n in ("tokens", "positions", "labels")}
        return replace(self, **moved)


class PackedReader(IterableDataset):
    """Packed batches without end, of which this rank reads its own tokens, and one more a fragment.

    A step is `rows` rows of `length` tokens. Documents follow each other in an order that the seed
    and the epoch give; one that does not fit a row goes on in the next, as a new document.
    The rows of a rank that splits the batch are packed into one, and `layout.pack` balances it over
    the ranks that split the tokens. Ranks compare the documents' lengths, and the digest of a
    `TokenFile`, when a reader is made: all of them make it. Steps need no message.

    Args:
        source: the documents.
        layout: bound.
        length: tokens of a row.
        rows: rows of a step, over all ranks.
        seed: of the documents' order; None: as they are.
        axis: the layout's name for the tokens.
        window: of sliding-window attention, as for `layout.pack`.

    Raises:
        DeclarationError: rows that the ranks which split the batch do not divide, an axis that
            `layout.pack` refuses, or a `DataLoader` of several workers.
        ShapeError: there are no documents, one is empty, or `length` or `rows` is below 1; on every
            rank, if documents or settings differ between ranks.

    >>> reader = PackedReader(TokenDataset([[5, 6, 7], [8, 9]]), weft.Layout.single(), 4, seed=None)
    >>> batch = next(iter(reader))
    >>> batch.tokens.tolist(), batch.labels.tolist(), batch.targets
    ([[5, 6, 7, 8]], [[6, 7, -100, 9]], 3)
    """

    def __init__(
        self,
        source: TokenSource,
        layout: Layout,
        length: int,
        rows: int = 1,
        seed: int | None = 0,
        axis: str = "tokens",
        window: int | None = None,
    ) -> None:
        self.length, self.rows = whole_number(length, "length"), whole_number(rows, "rows")
        if self.length < 1 or self.rows < 1:
            raise ShapeError(f"a step has at least 1 row of 1 token, found {rows} of {length}")
        self.source, self.seed, self._lengths = source, seed, _lengths(source.lengths)
        self.layout, self.axis, self.window = layout, axis, window
        self.place = ReaderPlace()
        if rows % layout.size("batch"):
            raise DeclarationError(
                f"{layout.source}: {rows} rows do not divide over the {layout.size('batch')} ranks "
                "that split the batch"
            )
        if not self._lengths:
            raise ShapeError("a reader needs at least one document")
        layout.pack([1], axis, window)  # raises here, and not at the first step
        # Here, as a worker of a DataLoader gets the layout without its place.
        self._own_rows = set(layout.positions("batch", rows).tolist())
        self._chunk = layout.chunk(axis)
        self._order: tuple[int, np.ndarray] | None = None
        layout.bound.agree("the documents of a reader", self._described())

    def _described(self) -> str:
        """Documents and settings in words, for a comparison between ranks."""
        numbers = hashlib.sha256(np.array(self._lengths, np.int64).tobytes()).hexdigest()[:8]
        digest = getattr(self.source, "digest", None)
        content = f", sha256 {digest()}" if callable(digest) else ""
        return (
            f"{len(self._lengths)} documents of {sum(self._lengths)} tokens, lengths [{numbers}]"
            f"{content}, {self.rows} rows of {self.length}, seed {self.seed}, window {self.window}"
        )

    def state_dict(self) -> dict[str, int]:
        """Place at which the next step begins: the same on every rank, fit for any layout."""
        return self.place._asdict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where another reader of the same documents, rows, length and seed was.

        Args:
            state: its `state_dict`, or the `state` of the last batch that was trained on.

        Raises:
            ShapeError: no state of a reader, or one of other documents.
        """
        if set(state) != set(ReaderPlace._fields):
            raise ShapeError(
                f"a reader's state has {list(ReaderPlace._fields)}, found {list(state)}"
            )
        place = ReaderPlace(
            **{name: whole_number(state[name], name) for name in ReaderPlace._fields}
        )
        count = len(self._lengths)
        if min(place) < 0 or place.document >= count:
            raise ShapeError(f"{place}: this reader has {count} documents; load it with the same")
        document = int(self._documents(place.epoch)[place.document])
        if place.token >= self._lengths[document]:
            raise ShapeError(
                f"{place}: that document has {self._lengths[document]} tokens here; load it with "
                "the same documents and seed"
            )
        self.place = place

    def __iter__(self) -> Iterator[PackedBatch]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise DeclarationError(
                f"{worker.num_workers} workers would each read every step; use one"
            )
        while True:
            yield self._step()

    def _step(self) -> PackedBatch:
        rows = [self._row() for _ in range(self.rows)]
        local = [part for i, row in enumerate(rows) if i in self._own_rows for part in row]
        assignment = self.layout.pack([p.stop - p.start for p in local], self.axis, self.window)
        lengths = self._lengths
        targets = sum(p.stop - p.start - (p.stop == lengths[p.document]) for r in rows for p in r)
        read = [self._read(local[f.document], f) for f in assignment.fragments[self._chunk]]
        tokens, labels = (
            torch.from_numpy(np.concatenate([np.empty(0, np.int64), *side]))[None]
            for side in (zip(*read) if read else ((), ()))
        )
        positions = assignment.positions(self._chunk)[None]
        return PackedBatch(tokens, positions, labels, assignment, targets, self.state_dict())

    def _row(self) -> list[Fragment]:
        """The parts of documents that the next row consists of."""
        parts, left = [], self.length
        while left:
            epoch, number, token = self.place
            document = self._documents(epoch)[number]
            whole = self._lengths[document]
            end = min(whole, token + left)
            parts.append(Fragment(int(document), token, end))
            left -= end - token
            self.place = ReaderPlace(epoch, number, end)
            if end == whole:
                last = number + 1 == len(self._lengths)
                self.place = ReaderPlace(epoch + last, 0 if last else number + 1)
        return parts

    def _documents(self, epoch: int) -> Sequence[int] | np.ndarray:
        """The documents in the order of an epoch."""
        count = len(self._lengths)
        if self.seed is None:
            return range(count)
        if self._order is None or self._order[0] != epoch:
            draw = np.random.default_rng([self.seed, epoch])
            self._order = epoch, draw.permutation(count)
        return self._order[1]

    def _read(self, part: Fragment, fragment: Fragment) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a fragment of a part of a document, and the labels of each."""
        start, stop = part.start + fragment.start, part.start + fragment.stop
        end = min(stop + 1, self._lengths[part.document])
        read = np.asarray(self.source.read(part.document, start, end), dtype=np.int64)
        ends = np.full(stop + 1 - end, IGNORED)  # of the document
        return read[: stop - start], np.concatenate([read[1:], ends])
