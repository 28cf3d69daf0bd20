"""Training tables from random structural causal models.

Every distribution is after one of two papers, and says which where it is drawn:

[P] TabPFN v2, Hollmann et al., Nature 637 (2025), doi:10.1038/s41586-024-08328-6, "Details on the
    causal generative process" and "Training details".
[I] TabICL, Qu et al., arXiv:2502.05564, and the configuration that its authors published.

Where neither gives a number, the choice is ours and is marked [ours]. A node of the graph is a
vector per row, (rows, d); edges map vectors to vectors; features and the class are read off nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from .mechanisms import EDGES, Nodes, nearest_prototype, standardise

#: [I] draws MLPs and trees 7 to 3; [P] has categories on edges, too.
EDGE_WEIGHTS = {"neural": 0.7, "tree": 0.3, "category": 0.2}


@dataclass(frozen=True)
class TrainingTable:
    """A classification table, and how it was made.

    Attributes:
        x: features, (rows, features) in float32, missing values as NaN.
        y: classes from 0, (rows,) in int64; every class below the largest occurs.
        categorical: bool per feature, whether its numbers are codes of categories.
        irrelevant: bool per feature, whether it is independent of the class.
        redundant: bool per feature, whether it repeats another feature, with noise.

    >>> table = draw_training_table(np.random.default_rng(0), 32, 5, 4)
    >>> table.x.shape, table.categorical.shape
    ((32, 5), (5,))
    """

    x: np.ndarray
    y: np.ndarray
    categorical: np.ndarray
    irrelevant: np.ndarray
    redundant: np.ndarray


@dataclass(frozen=True)
class Graph:
    """A random DAG: the parents of every node, in order, and the component it belongs to."""

    parents: tuple[tuple[int, ...], ...]
    component: tuple[int, ...]


def draw_training_table(
    rng: Generator, rows: int, features: int, max_classes: int
) -> TrainingTable:
    """One classification table from a random structural causal model.

    Args:
        rng: the only source of randomness; the same state gives the same table on every rank.
        rows: number of rows, 2 or more.
        features: number of feature columns.
        max_classes: the table has between 2 and this many classes.

    >>> one, same = (draw_training_table(np.random.default_rng(7), 20, 3, 10) for _ in range(2))
    >>> bool((one.y == same.y).all()), 2 <= int(one.y.max()) + 1 <= 10
    (True, True)
    """
    graph = draw_graph(rng, features)
    nodes = propagate(rng, graph, rows)
    effects = [i for i, parents in enumerate(graph.parents) if parents and not graph.component[i]]
    target = int(rng.choice(effects)) if effects and rng.random() < 0.7 else 0  # [I] effect, cause
    y = _draw_classes(rng, nodes[target], max_classes)
    x, categorical, origin = _observe(rng, nodes, target, features)
    component = np.array(graph.component)
    irrelevant = component[origin] != component[target]
    x = _post_process(rng, x, categorical)
    _shuffle_some(rng, x, irrelevant)
    redundant = _repeat(rng, x, categorical, irrelevant)
    x = x * np.where(categorical, 1.0, np.exp(rng.normal(size=features)))  # [ours] other units
    _hide(rng, x)
    order = rng.permutation(features)  # [I] permutes features and labels
    table = (x.astype(np.float32), categorical, irrelevant, redundant)
    x, categorical, irrelevant, redundant = (t[..., order] for t in table)
    return TrainingTable(x, y, categorical, irrelevant, redundant)


# -- the causal model ------------------------------------------------------------------------------


def draw_graph(rng: Generator, features: int) -> Graph:
    """A growing network with redirection [P]: a node attaches to an earlier one, or to its parent.

    The number of nodes is log-uniform [P], from 2/3 to 2 times the features [ours]. The chance of
    redirection is Gamma(2, 5) [P, parameters ours], and a node attaches 1 + Poisson(0.7) times
    [ours]. In 3 of 10 tables [ours] there are 2 or 3 disjoint graphs, the first with most of the
    nodes and the class: features of the others are independent of it [P].
    """
    low, high = max(4.0, features / 1.5), 2.0 * features + 4.0
    count = round(np.exp(rng.uniform(np.log(low), np.log(high))))
    redirect = min(0.95, rng.gamma(2.0, 1 / 5.0))
    components = int(rng.integers(2, 4)) if rng.random() < 0.3 else 1
    component = [int(rng.integers(components)) if rng.random() < 0.6 else 0 for _ in range(count)]
    component[0] = 0
    parents: list[tuple[int, ...]] = []
    for i in range(count):
        earlier = [j for j in range(i) if component[j] == component[i]]
        chosen = set()
        for _ in range(1 + rng.poisson(0.7) if earlier else 0):
            parent = earlier[rng.integers(len(earlier))]
            if parents[parent] and rng.random() < redirect:
                parent = parents[parent][rng.integers(len(parents[parent]))]
            chosen.add(parent)
        parents.append(tuple(sorted(chosen)))
    return Graph(tuple(parents), tuple(component))


def propagate(rng: Generator, graph: Graph, rows: int) -> list[Nodes]:
    """Values of every node: causes at the roots, then sums over edges, with noise at each edge.

    The standard deviation of the noise is log-uniform between 1e-4 and 0.3 [I]; d is between 1 and
    3 [ours]. A table leans to some kinds of edges: their weights are Dirichlet around [I]'s [ours].
    """
    d, noise = int(rng.integers(1, 4)), np.exp(rng.uniform(np.log(1e-4), np.log(0.3)))
    kinds = list(EDGE_WEIGHTS)
    weights = rng.dirichlet([2.0 * w for w in EDGE_WEIGHTS.values()])
    causes = Causes(rng, rows, d)
    nodes: list[Nodes] = []
    for parents in graph.parents:
        if not parents:
            nodes.append(causes.draw())
            continue
        total = np.zeros((rows, d))
        for parent in parents:
            kind = kinds[rng.choice(len(kinds), p=weights)]
            total += standardise(EDGES[kind](rng, nodes[parent]))
            total += noise * rng.normal(size=total.shape)
        nodes.append(standardise(total))
    return nodes


class Causes:
    """Values at the roots of the graph: normal, uniform, or for each root one of them [P].

    In 15 of 100 tables [ours] rows are not independent [P]: they are mixtures of 3 out of a share
    of 5 to 50 % of the rows, their prototypes, with weights Dirichlet(beta), beta log-uniform
    between 0.1 and 3 [ours].
    """

    def __init__(self, rng: Generator, rows: int, d: int) -> None:
        self.rng, self.shape = rng, (rows, d)
        self.kind = rng.choice(["normal", "uniform", "mixed"])
        self.mixture: tuple[np.ndarray, np.ndarray] | None = None
        if rng.random() < 0.15:
            beta = np.exp(rng.uniform(np.log(0.1), np.log(3.0)))
            prototypes = max(3, round(rows * rng.uniform(0.05, 0.5)))
            chosen = rng.integers(prototypes, size=(rows, 3))
            self.mixture = chosen, rng.dirichlet([beta] * 3, size=rows)

    def draw(self) -> Nodes:
        """One root."""
        rng, kind = self.rng, self.kind
        if kind == "mixed":
            kind = rng.choice(["normal", "uniform"])
        drawn = rng.normal(size=self.shape)
        if kind == "uniform":
            drawn = rng.uniform(-np.sqrt(3.0), np.sqrt(3.0), size=self.shape)
        if self.mixture is not None:
            chosen, weights = self.mixture
            drawn = np.einsum("rm,rmd->rd", weights, drawn[chosen % len(drawn)])
        return drawn


def _draw_classes(rng: Generator, node: Nodes, max_classes: int) -> np.ndarray:
    """Classes of the rows: the nearest of some prototypes [P], or a cut of one number [I].

    Their number is 2 + Gamma(1, 1.5) rounded down [P, parameters ours], in 1 of 5 tables any, all
    equally likely [ours]. A cut is at random values,
    or at ranks [I] with shares Dirichlet(alpha), alpha log-uniform from 0.8 to 8 [ours]: a small
    one leaves classes rare. In 2 of 10 tables [ours] up to a tenth of the classes are wrong.
    """
    rows, count = len(node), min(max_classes, 2 + int(rng.gamma(1.0, 1.5)))
    if rng.random() < 0.2:
        count = int(rng.integers(2, max_classes, endpoint=True))
    way = rng.random()
    score = node[:, rng.integers(node.shape[1])]
    if way < 0.5:
        y = nearest_prototype(node, node[rng.choice(rows, size=min(count, rows), replace=False)])
    elif way < 0.75:
        y = np.digitize(score, np.sort(rng.choice(score, size=count - 1)))
    else:
        alpha = np.exp(rng.uniform(np.log(0.8), np.log(8.0)))
        shares = np.cumsum(rng.dirichlet([alpha] * count))[:-1]
        y = np.digitize(score, np.quantile(score, shares))
    if rng.random() < 0.2:
        wrong = rng.random(rows) < rng.uniform(0.0, 0.1)
        y = np.where(wrong, rng.integers(count, size=rows), y)
    if len(np.unique(y)) < 2:  # a constant node: the first half by its order, in any order of rows
        y = (np.argsort(np.argsort(score + 1e-9 * rng.normal(size=rows))) * 2 >= rows).astype(int)
    names, y = np.unique(y, return_inverse=True)
    return rng.permutation(len(names))[y].astype(np.int64)


# -- observed columns -----------------------------------------------------------------------------


def _observe(
    rng: Generator, nodes: list[Nodes], target: int, features: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, whether each is a category, and the node that each is read off.

    Nodes other than the class's are taken in turn, so two features of a node depend on each other.
    In half of the tables, 1 of 5 features [I] is the nearest of 2 + Gamma(1.5, 2) prototypes [P,
    parameters ours]; the others are a number of the node.
    """
    rest = [i for i in range(len(nodes)) if i != target]
    origin = np.resize(rng.permutation(rest), features)
    categories = 0.2 * 2 if rng.random() < 0.5 else 0.0
    categorical = rng.random(features) < categories
    columns = []
    for i, is_category in zip(origin, categorical):
        node = nodes[i]
        if is_category:
            count = min(len(node), 2 + int(rng.gamma(1.5, 2.0)))
            chosen = rng.choice(len(node), size=count, replace=False)
            columns.append(nearest_prototype(node, node[chosen]).astype(float))
        else:
            columns.append(node[:, rng.integers(node.shape[1])])
    return np.stack(columns, axis=1), categorical, origin


def _post_process(rng: Generator, x: np.ndarray, categorical: np.ndarray) -> np.ndarray:
    """Warps and buckets of numeric features [P], and outliers.

    In 4 of 10 tables features are warped by Kumaraswamy's distribution, 1 - (1 - u^a)^b, each with
    a and b log-uniform from 0.2 to 5; in 3 of 10, half of the features fall into 2 to 20 buckets
    with edges among their values; in 1 of 10, 1 in 100 values is ten times as far off [all ours].
    """
    warps, buckets, outliers = rng.random(3) < (0.4, 0.3, 0.1)
    for j in np.flatnonzero(~categorical):
        column = x[:, j]
        low, high = column.min(), column.max()
        if warps and high > low:
            a, b = np.exp(rng.uniform(np.log(0.2), np.log(5.0), size=2))
            column = 1.0 - (1.0 - ((column - low) / (high - low)) ** a) ** b
        if buckets and rng.random() < 0.5:
            edges = np.sort(rng.choice(column, size=int(rng.integers(1, 20))))
            column = np.digitize(column, edges).astype(float)
        if outliers:
            column = np.where(rng.random(len(column)) < 0.01, 10.0 * column, column)
        x[:, j] = column
    return x


def _repeat(
    rng: Generator, x: np.ndarray, categorical: np.ndarray, irrelevant: np.ndarray
) -> np.ndarray:
    """Makes up to half of the numeric features of 3 in 10 tables noisy copies of others [ours]."""
    redundant = np.zeros(x.shape[1], dtype=bool)
    numeric = rng.permutation(np.flatnonzero(~categorical))
    if len(numeric) < 2 or rng.random() >= 0.3:
        return redundant
    half = len(numeric) // 2
    copies = numeric[: int(rng.integers(1, half, endpoint=True))]
    for j, source in zip(copies, rng.choice(numeric[half:], size=len(copies))):
        noise = x[:, source].std() * np.exp(rng.uniform(np.log(1e-3), 0.0))
        x[:, j] = rng.choice([-1.0, 1.0]) * x[:, source] + noise * rng.normal(size=len(x))
        redundant[j], irrelevant[j] = True, irrelevant[source]
    return redundant


def _shuffle_some(rng: Generator, x: np.ndarray, irrelevant: np.ndarray) -> None:
    """Shuffles the rows of up to half of the features of 2 in 10 tables: noise of any shape [ours].

    One feature at least stays as it is.
    """
    if x.shape[1] < 2 or rng.random() >= 0.2:
        return
    count = int(rng.integers(1, x.shape[1] // 2, endpoint=True))
    for j in rng.choice(x.shape[1], size=count, replace=False):
        x[:, j] = x[rng.permutation(len(x)), j]
        irrelevant[j] = True


def _hide(rng: Generator, x: np.ndarray) -> None:
    """Values missing completely at random [P], in 1 of 4 tables up to 3 in 10 of them [ours].

    In half of these tables only half of the columns have gaps [ours].
    """
    if rng.random() >= 0.25:
        return
    gaps = rng.random(x.shape) < rng.uniform(0.0, 0.3)
    if rng.random() < 0.5:
        gaps &= rng.random(x.shape[1]) < 0.5
    x[gaps] = np.nan
