"""Calibrated probabilities, per table, from training rows held out of the context.

    held out    training rows predicted from the others, by few views; no test row, no test label
    fitted      one temperature, by the log loss of those rows
    applied     to the probabilities of all views together, whatever number of classes they are of

Temperature scaling is after Guo et al. (ICML 2017). Here it sharpens the evidence of a row beyond
the class frequencies, and leaves these as they are: f (p / f)^(1 / T).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .ensemble import Settings, _silent
from .many_classes import Hierarchy
from .source import Source

#: So many held-out rows are enough.
ENOUGH = 400
#: Fewer held-out rows than this say nothing.
FEWEST = 20
#: Views that predict held-out rows: one has features as they are, the other as normal scores.
VIEWS = 2
#: A grid rather than a descent: every layout chooses the same numbers, whatever its rounding.
TEMPERATURES = tuple(2.0 ** (k / 8) for k in range(-28, 9))
#: What a temperature of e costs in log loss over all held-out rows: a few rows change little.
CAUTION = 1.0
SMALLEST = 1e-30


@dataclass(frozen=True)
class Calibration:
    """Probabilities f (p / f)^(1 / temperature), where f are the class frequencies.

    A temperature below 1 makes probabilities more certain, above 1 less. `rows` is the number of
    held-out rows that it was fitted to; 0 where there were too few.

    >>> Calibration(0.5)(np.array([[0.8, 0.2]]), np.array([0.5, 0.5])).round(3).tolist()
    [[0.941, 0.059]]
    >>> Calibration(0.5)(np.array([[0.8, 0.2]]), np.array([0.8, 0.2])).round(3).tolist()
    [[0.8, 0.2]]
    """

    temperature: float = 1.0
    rows: int = 0

    def __call__(self, probabilities: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
        """Calibrated probabilities, (rows, classes), from probabilities of that shape.

        `frequencies` (classes,) are those among the training rows, above 0.
        """
        if self.temperature == 1.0:
            return probabilities
        usual = np.log(frequencies)
        scores = usual + (np.log(np.maximum(probabilities, SMALLEST)) - usual) / self.temperature
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)


def fit_calibration(
    probabilities: np.ndarray, y: np.ndarray, frequencies: np.ndarray
) -> Calibration:
    """The calibration of a grid with the least log loss on held-out rows.

    `probabilities` (rows, classes) and `y` (rows,), classes from 0, are of the held-out rows;
    `frequencies` of all training rows.

    >>> unsure = np.array([[0.6, 0.4]] * 40)
    >>> fit_calibration(unsure, np.zeros(40, int), np.array([0.5, 0.5])).temperature < 0.5
    True
    """
    if len(y) < FEWEST:
        return Calibration()

    def loss(temperature: float) -> float:
        found = Calibration(temperature)(probabilities, frequencies)
        assigned = np.maximum(found[np.arange(len(y)), y], SMALLEST)
        return float(CAUTION * np.log(temperature) ** 2 - np.log(assigned).sum())

    return Calibration(min(TEMPERATURES, key=loss), rows=len(y))


def held_out_rows(y: np.ndarray, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Row numbers of contexts, and of the rows held out of them: stratified, `ENOUGH` in all.

    Up to `ENOUGH` rows each is held out once, a fifth at a time. Of more rows two fifths are held
    out at a time, of many no more than about `ENOUGH`, so that few contexts are encoded. No row is
    held out whose class would be missing from the context. `y` (rows,) are classes from 0.

    >>> y = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2])
    >>> [len(held) for _, held in held_out_rows(y, seed=0)]
    [2, 2, 2, 2, 2]
    """
    rng, rows = np.random.default_rng(seed), len(y)
    parts = max(5, rows // ENOUGH)
    together = 2 if ENOUGH < rows < 5 * ENOUGH else 1
    part = np.full(rows, -1)
    for number in np.unique(y):
        of_class = rng.permutation(np.flatnonzero(y == number))
        if len(of_class) > 1:
            part[of_class] = (np.arange(len(of_class)) + number) % parts
    done = 0
    for first in range(0, parts - together + 1, together):
        held = (part >= first) & (part < first + together)
        held &= np.isin(y, y[~held])
        if held.any() and done < 0.95 * ENOUGH:
            done += held.sum()
            yield np.flatnonzero(~held), np.flatnonzero(held)


def calibrate(
    source: Source,
    x: np.ndarray,
    y: np.ndarray,
    classes: int,
    settings: Settings,
    unordered: Sequence[int] = (),
    advance: Callable[[int], None] = _silent,
) -> Calibration:
    """The calibration of a table; all ranks of the model's layout call this.

    `x` (rows, columns) are training rows, NaN for missing values; `y` (rows,) their classes from 0,
    each of them present; `unordered` as for `Features`. `advance` is called with a number of rows
    whenever they are done.

    >>> x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 2
    >>> calibrate(Source(weft.compose("tabular")), x, y, 2, Settings()).rows
    60
    """
    views = min(VIEWS, settings.n_estimators)
    few = dataclasses.replace(settings, n_estimators=views, cache_bytes=0)
    frequencies = np.bincount(y, minlength=classes) / len(y)
    predicted, true = [np.empty((0, classes))], [y[:0]]
    for context, held in held_out_rows(y, settings.seed):
        one = Hierarchy(source, x[context], y[context], classes, few, unordered)
        predicted.append(one.predict(x[held]))
        true.append(y[held])
        advance(len(held))
    return fit_calibration(np.concatenate(predicted), np.concatenate(true), frequencies)
