"""What members of an ensemble see of a table's features: as they are, or as normal scores."""

from __future__ import annotations

import numpy as np

#: Training rows that quantiles are found from, at most.
SAMPLE = 100_000


class Features:
    """Features as a table model reads them, fitted on training rows.

    Columns of one value are left out. The others get zero mean and unit variance in float64, so
    that no digits are lost where a small spread lies on a large mean. A table with more columns
    than the model was trained on becomes its principal components, missing values at their
    column's mean.

    Args:
        x: training rows, (rows, columns) float64, NaN for missing values.
        widest: the most features that the model was trained on.
        seed: of the rows that quantiles are found from.

    Attributes:
        width: how many features members see.

    >>> features = Features(np.array([[1e9, 5.0], [1e9 + 1, 5.0]]), widest=10)
    >>> plain, normal = features(np.array([[1e9 + 2, 7.0]]))
    >>> plain.tolist(), features.width
    ([[3.0]], 1)
    """

    def __init__(self, x: np.ndarray, widest: int, seed: int = 0) -> None:
        from sklearn.decomposition import PCA
        from sklearn.preprocessing import QuantileTransformer, StandardScaler

        self.columns = np.flatnonzero([_varies(x[:, j]) for j in range(x.shape[1])])
        self.width = max(1, min(len(self.columns), widest))
        if not len(self.columns):
            return
        self.scaler = StandardScaler().fit(x[:, self.columns])
        plain = self.scaler.transform(x[:, self.columns])
        self.components = None
        if len(self.columns) > widest:
            self.width = min(widest, *plain.shape)
            self.components = PCA(self.width, random_state=seed).fit(np.nan_to_num(plain))
            plain = self.components.transform(np.nan_to_num(plain))
        self.quantiles = QuantileTransformer(
            n_quantiles=min(1000, len(x)),
            output_distribution="normal",
            subsample=SAMPLE,
            random_state=seed,
        ).fit(plain)

    def __call__(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The features of rows as they are, and as normal scores: (rows, width) float32 each.

        Args:
            x: rows with the columns of the training rows.
        """
        if not len(self.columns):
            nothing = np.zeros((len(x), 1), np.float32)
            return nothing, nothing
        if not len(x):
            nothing = np.zeros((0, self.width), np.float32)
            return nothing, nothing
        plain = self.scaler.transform(x[:, self.columns])
        if self.components is not None:
            plain = self.components.transform(np.nan_to_num(plain))
        return plain.astype(np.float32), self.quantiles.transform(plain).astype(np.float32)


def _varies(column: np.ndarray) -> bool:
    """Whether a column tells rows apart; a gap beside values does."""
    gaps = np.isnan(column)
    values = column[~gaps]
    return bool(len(values)) and (bool(gaps.any()) or values.min() < values.max())
