"""Planted long-range retrieval: half of a sequence's chunks query keys that the others state."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .data import EXAMPLES, Stream, TrainingBatch

CHUNKS = 8
FACTS = 4  # stated by a chunk that states
QUESTIONS = 3  # asked by a chunk that asks


class FactStream(Stream):
    """Sequences of 8 chunks: 4 state 4 facts each, 4 ask 3 questions each.

    Which chunks ask is random, and so is whom: each asks one of those that state, no two the same.
    A fact is a key with a random value, no key is stated twice. Facts and questions are among
    tokens that say nothing of interest. Only questions are targets, so guessing is right once in
    `sizes.classes` times.
    """

    def batch(self, step: int, part: int = 0) -> TrainingBatch:
        (axis,) = self.spec.axes[1:-1]
        length = self._lengths(self._rng(0, step))[axis]
        drawn = [self._draw(self._rng(EXAMPLES, i), length) for i in self._examples(step, part)]
        facts = torch.from_numpy(np.stack([facts for facts, _, _ in drawn]))  # b n 2
        targets = self._shard(torch.from_numpy(np.stack([answers for _, answers, _ in drawn])))
        return TrainingBatch(
            inputs=self._shard(facts),
            targets=targets.clamp_min(0),
            counted=targets >= 0,
            given={"lengths": {axis: length}},
            tokens=self.size * length,
        )

    def sources(self, step: int, part: int = 0) -> Tensor:
        """The chunk that answers each chunk, -1 where it asks nothing: (local b, chunks)."""
        (axis,) = self.spec.axes[1:-1]
        length = self._lengths(self._rng(0, step))[axis]
        drawn = [self._draw(self._rng(EXAMPLES, i), length) for i in self._examples(step, part)]
        return torch.from_numpy(np.stack([sources for _, _, sources in drawn]))

    def _draw(
        self, rng: np.random.Generator, length: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Facts (n, 2), the answer of every token, -1 for none (n,), and the sources (chunks,)."""
        vocabulary, classes = self.spec.sizes.vocabulary, self.spec.sizes.classes
        assert vocabulary is not None  # a file with this head has both
        assert classes is not None
        roles = rng.permutation(CHUNKS)  # the first half states, the second half asks
        pairs = list(zip(*roles.reshape(2, -1)))
        keys = rng.permutation(vocabulary)[: len(pairs) * FACTS].reshape(-1, FACTS)
        values = rng.integers(classes, size=keys.shape)
        sources = np.full(CHUNKS, -1)
        facts, answers = np.full((length, 2), -1), np.full(length, -1)
        facts[:, 1] = rng.integers(classes, size=length)
        chunks = np.array_split(np.arange(length), CHUNKS)
        for i, (states, asks) in enumerate(pairs):
            sources[asks] = states
            stated = rng.permutation(chunks[states])[:FACTS]
            facts[stated] = np.stack([keys[i], values[i]], -1)
            asked = rng.permutation(chunks[asks])[:QUESTIONS]
            which = rng.permutation(FACTS)[:QUESTIONS]
            facts[asked, 0], facts[asked, 1] = keys[i, which], -1
            answers[asked] = values[i, which]
        return facts, answers, sources
