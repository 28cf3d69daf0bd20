"""The two token streams of a diffusers transformer, text and image: which this rank holds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from weft.errors import ShapeError
from weft.layout import Layout

from ..common import joined, tokens_per_chunk
from .plans import SplitPlan, TokenSplit


@dataclass
class Streams:
    """The tokens of one rank in the calls of a transformer.

    Attributes:
        text, image: tokens of both streams in the running call, once they are known.
        whole_text: whether every rank computes with all of the text.
    """

    layout: Layout
    axis: str
    plan: SplitPlan
    whole_text: bool
    text: int = 0
    image: int | None = None

    def counts(self, length: int) -> list[int]:
        """Tokens per chunk of a sequence of some length, as the layout splits it."""
        return tokens_per_chunk(self.layout, self.axis, length)

    def own(self, stream: str, length: int) -> tuple[int, int]:
        """First position and number of this rank's tokens of a stream.

        A rank's tokens of both streams together are its chunk of the joined sequence.
        """
        counts = self._of_image(length) if stream == "image" else self.counts(length)
        if min(counts) < (stream == "image" or not self.whole_text):
            self._refuse(stream, length, counts)
        chunk = self.layout.chunk(self.axis)
        return sum(counts[:chunk]), counts[chunk]

    def _of_image(self, length: int) -> list[int]:
        """Image tokens per chunk of the sequence of text and image."""
        text, joined = self.counts(self.text), self.counts(self.text + length)
        return [n - t for n, t in zip(joined, text)]

    def _refuse(self, stream: str, length: int, counts: list[int]) -> NoReturn:
        where = f"over mesh {dict(self.layout.mesh)}"
        if stream == "text":
            raise ShapeError(
                f"{length} text tokens are cut into {counts} {where}, and every rank needs one; "
                "use text='whole', or fewer ranks"
            )
        cut = f"{length} image tokens are cut into {counts} {where}"
        if self.text:
            joined = self.text + length
            cut += f", as with {self.text} of text they are {joined}: {self.counts(joined)}"
        enough = next(n for n in itertools.count(length) if min(self._of_image(n)) > 0)
        raise ShapeError(
            f"{cut}; every rank needs one: {enough} image tokens would do, or fewer ranks"
        )

    def split(self, x: Tensor, split: TokenSplit, label: str) -> Tensor:
        """This rank's part of a full tensor."""
        if split.ndim is not None and x.dim() != split.ndim:
            if split.optional:
                return x
            raise ShapeError(f"{label} must have {split.ndim} dims, found shape {tuple(x.shape)}")
        length = x.shape[split.dim]
        lengths = {"text": self.text}
        if "image" in split.streams:
            image = length - self.text * ("text" in split.streams)
            self.image = image if self.image is None else self.image
            lengths["image"] = self.image
        if length != sum(lengths[s] for s in split.streams):
            raise ShapeError(
                f"{label} of shape {tuple(x.shape)} does not have the tokens of "
                f"{'+'.join(split.streams)}: expected {lengths}"
            )
        parts = x.split([lengths[s] for s in split.streams], split.dim)
        unsplit = {"text"} if self.whole_text else set()
        local = [
            part if s in unsplit else part.narrow(split.dim, *self.own(s, lengths[s]))
            for s, part in zip(split.streams, parts)
        ]
        return local[0] if len(local) == 1 else torch.cat(local, split.dim)

    def joined(self, x: Tensor, stream: str, length: int, dim: int) -> Tensor:
        """All tokens of a stream on every rank; backward gives each rank the sum for its own."""
        start, n = self.own(stream, length)
        index = torch.arange(start, start + n, device=x.device)
        return joined(x, index, length, dim, self.layout, self.axis)
