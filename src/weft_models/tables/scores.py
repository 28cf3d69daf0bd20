"""The ranking metric of class probabilities."""

from __future__ import annotations

import numpy as np


def auc(y: np.ndarray, probabilities: np.ndarray) -> float:
    """Area under the ROC curve, 0 to 1; of several classes the mean of each against the rest.

    `y` (rows,) are classes from 0, `probabilities` (rows, classes). A class that no row has, or
    every row, has no curve and is left out; NaN where no class has one.

    >>> auc(np.array([0, 1, 1]), np.array([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]]))
    1.0
    """
    from sklearn.metrics import roc_auc_score

    is_class = (y == c for c in range(probabilities.shape[1]))
    areas = [roc_auc_score(is_c, p) for is_c, p in zip(is_class, probabilities.T) if _both(is_c)]
    return float(np.mean(areas)) if areas else float("nan")


def _both(is_class: np.ndarray) -> bool:
    return bool(is_class.any() and not is_class.all())
