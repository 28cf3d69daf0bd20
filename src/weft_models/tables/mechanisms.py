"""Mechanisms on the edges of a structural causal model: maps of one vector per row, (rows, d).

After TabPFN v2, "Computational edge mappings" (doi:10.1038/s41586-024-08328-6): small neural
networks, decision trees, and categories with an embedding. Parameters are drawn anew per edge.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

Nodes = np.ndarray  # (rows, d)
Edge = Callable[[Generator, Nodes], Nodes]


def _rank(h: Nodes) -> Nodes:
    return np.argsort(np.argsort(h, axis=0), axis=0) / len(h)


#: The activations that the paper lists; powers and periods are ours.
ACTIVATIONS: tuple[Callable[[Nodes], Nodes], ...] = (
    lambda h: h,
    lambda h: np.log(np.abs(h) + 1e-3),
    lambda h: 1.0 / (1.0 + np.exp(-h)),
    np.abs,
    np.sin,
    np.tanh,
    _rank,
    np.square,
    lambda h: np.sign(h) * np.abs(h) ** 1.5,
    lambda h: np.logaddexp(h, 0.0),
    lambda h: (h > 0.0).astype(float),
    lambda h: np.mod(h, 1.0),
)


def standardise(h: Nodes) -> Nodes:
    """Zero mean and unit variance per column over the rows; a constant column becomes 0.

    >>> standardise(np.array([[1.0, 5.0], [3.0, 5.0]])).round(6).tolist()
    [[-1.0, 0.0], [1.0, 0.0]]
    """
    return (h - h.mean(0)) / (h.std(0) + 1e-9)


def nearest_prototype(h: Nodes, prototypes: np.ndarray) -> np.ndarray:
    """The index of the prototype, out of (k, d), that is nearest to each row: (rows,).

    >>> nearest_prototype(np.array([[0.1], [0.9]]), np.array([[1.0], [0.0]])).tolist()
    [1, 0]
    """
    return ((h[:, None] - prototypes) ** 2).sum(-1).argmin(1)


def neural(rng: Generator, h: Nodes) -> Nodes:
    """An activation of a linear map with Xavier's weights."""
    d = h.shape[1]
    weights, bias = rng.normal(size=(d, d)) / np.sqrt(d), rng.normal(size=d)
    return ACTIVATIONS[rng.integers(len(ACTIVATIONS))](h @ weights + bias)


def tree(rng: Generator, h: Nodes) -> Nodes:
    """A sum of decision trees: each split of a random number at the value of a random row.

    1 + Exponential trees of depth 2 + Exponential, both of mean 2 and 4 at most, as TabICL has
    them (arXiv:2502.05564 and its code).
    """
    rows, d = h.shape
    total, all_rows = np.zeros((rows, d)), np.arange(rows)
    for _ in range(min(4, 1 + int(rng.exponential(2.0)))):
        depth = min(4, 2 + int(rng.exponential(2.0)))
        splits = rng.integers(d, size=2**depth)
        thresholds = h[rng.integers(rows, size=2**depth), splits]
        at = np.ones(rows, dtype=np.int64)
        for _ in range(depth):
            at = 2 * at + (h[all_rows, splits[at]] > thresholds[at])
        total += rng.normal(size=(2**depth, d))[at - 2**depth]
    return total


def category(rng: Generator, h: Nodes) -> Nodes:
    """The embedding of the nearest of 2 + Gamma(1.5, 2) prototypes."""
    count = min(len(h), 2 + int(rng.gamma(1.5, 2.0)))
    chosen = nearest_prototype(h, h[rng.choice(len(h), size=count, replace=False)])
    return rng.normal(size=(count, h.shape[1]))[chosen]


EDGES: dict[str, Edge] = {"neural": neural, "tree": tree, "category": category}
