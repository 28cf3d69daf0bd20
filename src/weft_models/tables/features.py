"""Feature views of an ensemble's members: unchanged, or as normal scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

#: Training rows that quantiles are found from, at most.
SAMPLE = 100_000
#: Standard deviations from the mean: the model tells nothing beyond some ten of them apart.
FURTHEST = 1e6


class Features:
    """Features as a table model reads them, fitted on training rows.

    Columns of one value are left out. The others get zero mean and unit variance in float64, so
    that no digits are lost where a small deviation is added to a large mean.

    Of a table with more columns than `widest`, the most that the model was trained on, each member
    sees `width`, as many as that: half of them the first principal components, missing values at
    their column's mean, and the rest the table's own columns, which members take in turn.

    `x` are training rows, (rows, columns) float64, NaN for missing values; `seed` chooses the rows
    that quantiles are found from. `unordered` has, per column, how many codes without an order it
    has, 0 for none; they stay codes. `codes` maps a feature to that number, where it is three or
    more.

    >>> features = Features(np.array([[1e9, 5.0], [1e9 + 1, 5.0]]), widest=10)
    >>> plain, normal = features(np.array([[1e9 + 2, 7.0]]))
    >>> plain.tolist(), features.width
    ([[3.0]], 1)
    """

    def __init__(
        self, x: np.ndarray, widest: int, seed: int = 0, unordered: Sequence[int] = ()
    ) -> None:
        from sklearn.decomposition import PCA
        from sklearn.preprocessing import QuantileTransformer, StandardScaler

        self.columns = np.flatnonzero([_varies(x[:, j]) for j in range(x.shape[1])])
        self.own, self.width = max(1, len(self.columns)), max(1, min(len(self.columns), widest))
        codes = {
            j: unordered[column] for j, column in enumerate(self.columns.tolist()) if unordered
        }
        self.codes = {j: count for j, count in codes.items() if count > 2}
        self.components = None
        if not len(self.columns):
            return
        self.scaler = _plain(StandardScaler()).fit(x[:, self.columns])
        plain = self.scaler.transform(x[:, self.columns])
        count = min(widest // 2, *plain.shape) if self.own > widest else 0
        if count:
            pca = _plain(PCA(count, random_state=seed))
            self.components = pca.fit(np.nan_to_num(plain))
        quantiles = QuantileTransformer(
            n_quantiles=min(1000, len(x)),
            output_distribution="normal",
            subsample=SAMPLE,
            random_state=seed,
        )
        self.quantiles = _plain(quantiles).fit(plain)

    def __call__(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The features of rows as they are, and as normal scores: (rows, features) float32 each.

        `x` has the columns of the training rows.
        """
        if not len(self.columns) or not len(x):
            nothing = np.zeros((len(x), self.own + self._count), np.float32)
            return nothing, nothing
        plain = self.scaler.transform(x[:, self.columns])
        both = [plain.copy(), self.quantiles.transform(plain)]
        for one in both:
            one[:, list(self.codes)] = x[:, self.columns[list(self.codes)]]
        if self.components is not None:
            found = self.components.transform(np.nan_to_num(plain))
            both = [np.concatenate([local, found], axis=1) for local in both]
        return tuple(one.clip(-FURTHEST, FURTHEST).astype(np.float32) for one in both)

    def deal(self, members: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Features of each member, in random order."""
        order, local = rng.permutation(self.own), self.width - self._count
        found = self.own + np.arange(self._count)
        dealt = [order[(i * local + np.arange(local)) % self.own] for i in range(members)]
        return [rng.permutation(np.concatenate([one, found])) for one in dealt]

    @property
    def _count(self) -> int:
        return 0 if self.components is None else self.components.n_components_


def _plain(transformer: Any) -> Any:
    """A transformer that gives arrays, whatever `sklearn.set_config` asks of the user's own."""
    return transformer.set_output(transform="default")


def _varies(column: np.ndarray) -> bool:
    """True if a column has several values; a missing one counts as another."""
    gaps = np.isnan(column)
    values = column[~gaps]
    return bool(len(values)) and (bool(gaps.any()) or values.min() < values.max())
