"""Planted long-range retrieval: every chunk of a sequence asks what one other chunk states."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .data import EXAMPLES, Batch, Stream

CHUNKS = 8
FACTS = 4  # stated per chunk
QUESTIONS = 2  # asked per chunk


class FactStream(Stream):
    """Sequences of 8 chunks; each states 4 facts and asks for 2 that one other chunk states.

    A fact is a key with a random value; no key is stated twice. Facts, questions and tokens that
    say nothing of interest are mixed within a chunk. Only questions are targets, so guessing is
    right once in `sizes.classes` times.
    """

    def batch(self, step: int) -> Batch:
        (axis,) = self.spec.axes[1:-1]
        length = self._lengths(self._rng(0, step))[axis]
        drawn = [self._draw(self._rng(EXAMPLES, i), length) for i in self._examples(step)]
        facts = torch.from_numpy(np.stack([facts for facts, _, _ in drawn]))  # b n 2
        targets = self._shard(torch.from_numpy(np.stack([answers for _, answers, _ in drawn])))
        return Batch(
            inputs=self._shard(facts),
            targets=targets.clamp_min(0),
            counted=targets >= 0,
            given={"lengths": {axis: length}},
            tokens=self.size * length,
        )

    def sources(self, step: int) -> Tensor:
        """Which chunk holds the answers of each chunk's questions: (local batch, chunks)."""
        (axis,) = self.spec.axes[1:-1]
        length = self._lengths(self._rng(0, step))[axis]
        drawn = [self._draw(self._rng(EXAMPLES, i), length) for i in self._examples(step)]
        return torch.from_numpy(np.stack([sources for _, _, sources in drawn]))

    def _draw(
        self, rng: np.random.Generator, length: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Facts (n, 2), the answer of every token, -1 for none (n,), and the sources (chunks,)."""
        sizes = self.spec.sizes
        keys = rng.permutation(sizes.vocabulary)[: CHUNKS * FACTS].reshape(CHUNKS, FACTS)
        values = rng.integers(sizes.classes, size=(CHUNKS, FACTS))
        sources = (np.arange(CHUNKS) + rng.integers(1, CHUNKS, size=CHUNKS)) % CHUNKS
        facts, answers = np.full((length, 2), -1), np.full(length, -1)
        facts[:, 1] = rng.integers(sizes.classes, size=length)
        for chunk, rows in enumerate(np.array_split(np.arange(length), CHUNKS)):
            places = rng.permutation(rows)[: FACTS + QUESTIONS]
            facts[places[:FACTS]] = np.stack([keys[chunk], values[chunk]], -1)
            asked = rng.permutation(FACTS)[:QUESTIONS]
            facts[places[FACTS:], 0] = keys[sources[chunk], asked]
            facts[places[FACTS:], 1] = -1
            answers[places[FACTS:]] = values[sources[chunk], asked]
        return facts, answers, sources
