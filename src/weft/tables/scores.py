"""Ranking and calibration metrics of class probabilities."""

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


def calibration_error(y: np.ndarray, probabilities: np.ndarray, bins: int = 15) -> float:
    """Expected calibration error of the most probable class (Guo et al., ICML 2017).

    Rows are put in bins of equal width by the probability of their most probable class; the mean
    over rows of |share of the bin that is right - its mean probability|: from 0, as sure as right,
    to 1. Few rows have an error by chance. `y` (rows,) are classes from 0, `probabilities` (rows,
    classes).

    >>> y, sure = np.array([0, 0, 0, 1]), np.array([[0.75, 0.25]] * 4)
    >>> calibration_error(y, sure), calibration_error(y, 1 - sure)
    (0.0, 0.5)
    """
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == y
    number = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = np.bincount(number, right.astype(float) - confidence, minlength=bins)
    return float(np.abs(gaps).sum() / len(y))


def _both(is_class: np.ndarray) -> bool:
    return bool(is_class.any() and not is_class.all())
