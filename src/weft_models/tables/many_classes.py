"""More classes than a model supports, exactly by the chain rule: class groups, then classes.

    P(class) = P(group of the class) P(class | its group)

The first factor is a prediction with groups for classes, from all training rows. The second is one
from the rows of the group alone. As in TabICL (Qu et al., ICML 2025), groups are as few and as
equal as the model allows, so probabilities sum to 1 whatever the number of classes. Classes whose
rows are near each other are in one group: groups that are easily told apart make a good first
factor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from .ensemble import DEFAULTS, Budget, Ensemble, Settings, _silent
from .source import Source


def groups_of(classes: int, most: int) -> list[range]:
    """Neighbouring classes in at most `most` groups, as few and as equal as their number allows.

    `most` is the number of classes that the model knows; up to that many each is a group.

    >>> groups_of(3, most=10)
    [range(0, 1), range(1, 2), range(2, 3)]
    >>> groups_of(12, most=10)
    [range(0, 6), range(6, 12)]
    """
    count = classes if classes <= most else min(most, -(-classes // most))
    ends = [classes * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def classes_in_order(x: np.ndarray, y: np.ndarray, classes: int) -> np.ndarray:
    """Classes so that similar ones are neighbours: by the first principal component of their means.

    `x` (rows, columns) are training rows, NaN for missing values; `y` (rows,) their classes from 0,
    each of them present.

    >>> classes_in_order(np.array([[0.0], [9.0], [1.0]]), np.array([0, 1, 2]), 3).tolist()
    [0, 2, 1]
    """
    gaps = np.isnan(x)
    count = np.maximum((~gaps).sum(axis=0), 1)
    mean = np.where(gaps, 0.0, x).sum(axis=0) / count
    centred = np.where(gaps, 0.0, x - mean)
    spread = np.sqrt(np.square(centred).mean(axis=0))
    scaled = centred / np.where(spread > 0, spread, 1.0)
    means = np.stack([scaled[y == number].mean(axis=0) for number in range(classes)])
    component = np.linalg.svd(means - means.mean(axis=0), full_matrices=False)[2][0]
    component *= np.sign(component[np.abs(component).argmax()]) or 1.0
    return np.argsort((means @ component).round(9), kind="stable")


class Hierarchy:
    """Probabilities of any number of classes, from ensembles of as many as the model knows.

    Arguments are those of `Ensemble`, with each class present in `y`; one class needs no model, and
    all ensembles share the `budget`.

    >>> x, y = np.random.default_rng(0).normal(size=(48, 4)), np.arange(48) % 12
    >>> probabilities = Hierarchy(Source(weft.compose("tabular")), x, y, 12).predict(x[:5])
    >>> probabilities.shape, bool(np.allclose(probabilities.sum(1), 1))
    ((5, 12), True)
    """

    def __init__(
        self,
        source: Source,
        x: np.ndarray,
        y: np.ndarray,
        classes: int,
        settings: Settings = DEFAULTS,
        unordered: Sequence[int] = (),
        budget: Budget | None = None,
    ) -> None:
        self.classes, self.top = classes, None
        self.order = np.arange(classes)
        self.groups: Sequence[range] = [range(classes)]
        self.below: list[Hierarchy] = []
        if classes < 2:
            return
        budget = budget or Budget(settings.cache_bytes)
        self.groups = groups_of(classes, cast(int, source.model.spec.sizes.classes))
        if len(self.groups) < classes:
            self.order = classes_in_order(x, y, classes)
            y = np.argsort(self.order)[y]
        group = np.repeat(np.arange(len(self.groups)), [len(g) for g in self.groups])[y]
        shared = (settings, unordered, budget)
        self.top = Ensemble(source, x, group, len(self.groups), *shared)
        if len(self.groups) < classes:
            for i, members in enumerate(self.groups):
                rows = group == i
                one = Hierarchy(source, x[rows], y[rows] - members.start, len(members), *shared)
                self.below.append(one)

    @property
    def ensembles(self) -> list[Ensemble]:
        """All of them, the first of the widest groups."""
        top = [] if self.top is None else [self.top]
        return top + [ensemble for one in self.below for ensemble in one.ensembles]

    def encode(self, advance: Callable[[int], None] = _silent) -> None:
        """As `Ensemble.encode`."""
        for ensemble in self.ensembles:
            ensemble.encode(advance)

    def predict(self, x: np.ndarray, advance: Callable[[int], None] = _silent) -> np.ndarray:
        """As `Ensemble.predict`."""
        if self.top is None:
            return np.ones((len(x), self.classes))
        found = self.top.predict(x, advance)
        if not self.below:
            return found
        parts = [found[:, i : i + 1] * one.predict(x, advance) for i, one in enumerate(self.below)]
        return np.concatenate(parts, axis=1)[:, np.argsort(self.order)]
