"""Tables drawn from random structural causal models."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

Nodes = np.ndarray  # (rows, nodes)

ACTIVATIONS: tuple[Callable[[Nodes], Nodes], ...] = (
    np.tanh,
    np.sin,
    np.abs,
    lambda h: np.maximum(h, 0.0),
    lambda h: h,
    lambda h: np.exp(-(h**2)),
    lambda h: np.round(2.0 * h) / 2.0,
)


def draw_table(
    rng: Generator, rows: int, features: int, max_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """One classification table from a random structural causal model.

    A network of random depth, width, activations and noise computes every node from its parents;
    the features are some of its nodes. The class is a cause (a root that moves the other roots),
    an effect (a node cut at random quantiles) or a choice (the largest of several nodes).

    Args:
        rng: the only source of randomness; the same state gives the same table.
        rows: number of rows.
        features: number of feature columns.
        max_classes: the table has between 2 and this many classes.

    Returns:
        Features (rows, features) in float32, missing values as NaN, and classes (rows,) in int64.

    >>> x, y = draw_table(np.random.default_rng(0), rows=32, features=5, max_classes=4)
    >>> x.shape, y.shape, int(y.max()) < 4
    ((32, 5), (32,), True)
    """
    classes = 2 + int((max_classes - 1) * rng.beta(1.0, 1.6))
    roots = _draw_roots(rng, rows, int(rng.integers(2, 9)))
    y = None
    if rng.random() < 0.6:
        y = rng.choice(classes, size=rows, p=rng.dirichlet(np.full(classes, 5.0)))
        spread = np.exp(rng.normal(0.8, 0.4))
        roots = roots + spread * rng.normal(size=(classes, roots.shape[1]))[y]
    nodes = _propagate(rng, roots, features)
    if y is None:
        y, nodes = _class_from_nodes(rng, nodes, classes)
    y = rng.permutation(classes)[y]
    chosen = rng.choice(nodes.shape[1], size=features, replace=nodes.shape[1] < features)
    x = _measure(rng, nodes[:, chosen])
    return x.astype(np.float32), y.astype(np.int64)


def _draw_roots(rng: Generator, rows: int, count: int) -> Nodes:
    roots = rng.normal(size=(rows, count))
    kind = rng.random(count)
    return np.where(kind < 0.25, np.sqrt(3.0) * np.tanh(roots), roots)


def _propagate(rng: Generator, roots: Nodes, features: int) -> Nodes:
    width = features + int(rng.integers(2, 12))
    noise = np.exp(rng.normal(-3.0, 1.0))
    same = ACTIVATIONS[rng.integers(len(ACTIVATIONS))] if rng.random() < 0.5 else None
    hidden, layers = _standardise(roots), []
    for _ in range(int(rng.integers(1, 4))):
        weights = rng.normal(size=(hidden.shape[1], width))
        weights *= rng.random(weights.shape) < rng.uniform(0.3, 1.0)
        hidden = hidden @ weights / np.sqrt(np.maximum((weights**2).sum(0), 1e-6))
        act = same or ACTIVATIONS[rng.integers(len(ACTIVATIONS))]
        hidden = act(hidden + 0.5 * rng.normal(size=width))
        hidden = _standardise(hidden) + noise * rng.normal(size=hidden.shape)
        layers.append(hidden)
    return np.concatenate(layers, axis=1) if rng.random() < 0.5 else layers[-1]


def _class_from_nodes(rng: Generator, nodes: Nodes, classes: int) -> tuple[np.ndarray, Nodes]:
    order = rng.permutation(nodes.shape[1])
    if classes > 2 and rng.random() < 0.5:
        scores = nodes[:, order] @ rng.normal(size=(nodes.shape[1], classes))
        return scores.argmax(axis=1), nodes
    target, rest = nodes[:, order[0]], nodes[:, order[1:]]
    shares = np.cumsum(rng.dirichlet(np.full(classes, 4.0)))[:-1]
    cut = np.digitize(target, np.quantile(target, shares))
    return rng.permutation(classes)[cut], rest


def _measure(rng: Generator, x: np.ndarray) -> np.ndarray:
    """What an observer writes down: other units, skewed scales, categories, gaps."""
    features = x.shape[1]
    kind = rng.random(features)
    for j in range(features):
        if kind[j] < 0.15:
            levels = int(rng.integers(2, 8))
            cuts = np.quantile(x[:, j], np.sort(rng.random(levels - 1)))
            codes = np.digitize(x[:, j], cuts)
            x[:, j] = rng.permutation(levels)[codes] if kind[j] < 0.05 else codes
        elif kind[j] < 0.3:
            x[:, j] = np.exp(rng.uniform(0.2, 1.0) * x[:, j])
    x = x * np.exp(rng.normal(size=features)) + rng.normal(size=features)
    if rng.random() < 0.1:
        x[rng.random(x.shape) < rng.uniform(0.0, 0.2)] = np.nan
    return x


def _standardise(h: Nodes) -> Nodes:
    return (h - h.mean(0)) / (h.std(0) + 1e-6)
