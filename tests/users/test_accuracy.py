"""The benchmark of accuracy: rows of folds, scores and intervals against values found by hand."""

import math

import numpy as np
import pandas as pd
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin

from benchmarks import accuracy, accuracy_report
from benchmarks.real_tables import RealTable


def test_scores_of_two_classes_are_those_found_by_hand():
    y = np.array([0, 0, 1, 1])
    p = np.array([0.1, 0.6, 0.4, 0.9])  # of class 1: three of four pairs are in order
    found = accuracy.scores(y, np.stack([1 - p, p], axis=1))
    assert found["accuracy"] == 0.5
    assert found["auc"] == 0.75
    assert found["log_loss"] == pytest.approx(-np.log([0.9, 0.4, 0.4, 0.9]).mean())


def test_scores_of_three_classes_average_one_against_rest():
    y = np.array([0, 1, 2, 2])
    p = np.array([[0.8, 0.1, 0.1], [0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.6, 0.4, 0.0]])
    found = accuracy.scores(y, p)
    assert found["accuracy"] == 0.5  # rows 0 and 2
    # class 0: 0.8 over all; class 1: 0.3 over two of three; class 2: 2 + 0 pairs of 4
    assert found["auc"] == pytest.approx((1 + 2 / 3 + 2 / 4) / 3)
    assert found["log_loss"] == pytest.approx(-np.log([0.8, 0.3, 0.6, 1e-4]).mean())


def test_intervals_are_those_found_by_hand():
    mean, half = accuracy_report.fold_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3
    assert half == pytest.approx(2.7764451 * math.sqrt(2.5) / math.sqrt(5))
    assert accuracy_report.table_interval(np.full(7, 0.5)) == (0.5, 0.5)
    low, high = accuracy_report.table_interval(np.array([0.0, 1.0] * 200))
    # the mean of 400 coins has a standard deviation of 0.025
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.004)
    assert high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.004)


def test_ranks_and_duels_are_those_found_by_hand():
    values = np.array([[0.9, 0.8, 0.9], [0.5, 0.5005, 0.7]])
    assert accuracy_report.ranks(values, "auc").tolist() == [[1.5, 3, 1.5], [3, 2, 1]]
    assert accuracy_report.ranks(values, "log_loss").tolist() == [[2.5, 1, 2.5], [1, 2, 3]]
    assert accuracy_report.duels(values, "auc", 0, 1) == (1, 1, 0)
    assert accuracy_report.duels(values, "log_loss", 0, 2) == (1, 1, 0)


def test_folds_cover_a_table_once_and_keep_the_classes():
    y = np.repeat([0, 1, 2], [100, 60, 20])
    cut = accuracy.folds(y)
    assert sorted(np.concatenate([test for _, test in cut])) == list(range(180))
    for train, test in cut:
        assert not set(train) & set(test)
        assert np.bincount(y[test]).tolist() == [20, 12, 4]
    again = accuracy.folds(y.copy())
    assert all(np.array_equal(a, b) for f, g in zip(cut, again) for a, b in zip(f, g))


def test_folds_of_large_tables_are_bounded_as_the_page_says():
    y = np.repeat([0, 1], [9000, 1000])
    for train, test in accuracy.folds(y):
        assert np.bincount(y[train]).tolist() == [900, 100]
        assert np.bincount(y[test]).tolist() == [450, 50]
        assert not set(train) & set(test)


class Noting(ClassifierMixin, BaseEstimator):
    """Notes the rows that it trains on and predicts; answers the training shares."""

    def __init__(self, notes: list) -> None:
        self.notes = notes

    def fit(self, x, y):
        self.shares_ = np.bincount(y) / len(y)
        self.notes.append((x.index.tolist(), y.tolist()))
        return self

    def predict_proba(self, x):
        self.notes.append(x.index.tolist())
        return np.tile(self.shares_, (len(x), 1))


@pytest.fixture
def frogs(monkeypatch):
    x = pd.DataFrame({"a": np.arange(150.0)})
    monkeypatch.setattr(
        accuracy.real_tables, "load", lambda name: RealTable(name, x, np.arange(150) % 3)
    )


def test_every_side_gets_the_same_rows(frogs):
    one, other, empty = [], [], {"tables": {}, "sides": {}}
    sides = {"weft": (lambda x: Noting(one), "1"), "knn": (lambda x: Noting(other), "1")}
    accuracy.run(sides, ["frogs"], empty)
    assert one == other
    assert len(one) == 2 * accuracy.FOLDS


def test_probabilities_that_are_not_of_all_classes_are_refused():
    x = pd.DataFrame({"a": np.arange(40.0)})
    table = RealTable("frogs", x, np.arange(40) % 3)

    class Short(Noting):
        def predict_proba(self, x):
            return super().predict_proba(x)[:, :2]

    with pytest.raises(ValueError, match=r"frogs: probabilities are \(8, 2\)"):
        accuracy.measure(lambda x: Short([]), table)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", accuracy.BASELINES)
def test_baselines_take_missing_values_and_categories(name):
    rng = np.random.default_rng(0)
    y = np.arange(200) % 2
    number = np.where(rng.random(200) < 0.1, np.nan, y + rng.normal(size=200))
    word = pd.Series(rng.choice(["p", "q"], 200)).where(rng.random(200) > 0.1).astype("category")
    x = pd.DataFrame({"number": number, "word": word})
    model = accuracy.BASELINES[name](x).fit(x[:150], y[:150])
    assert accuracy.scores(y[150:], model.predict_proba(x[150:]))["auc"] > 0.6


def test_calibration_error_is_that_found_by_hand(frogs):
    y = np.array([0, 0, 1, 1, 0])
    p = np.array([0.95, 0.95, 0.95, 0.62, 0.41])  # of class 0; the last says class 1 with 0.59
    gaps = abs(2 / 3 - 0.95) * 3 + abs(0 - 0.62) + abs(0 - 0.59)
    found = accuracy.calibration_error(y, np.stack([p, 1 - p], axis=1))
    assert found == pytest.approx(gaps / 5)
    sides = {"weft": (lambda x: Noting([]), "1")}
    results = accuracy.run(sides, ["frogs"], {"tables": {}, "sides": {}})
    (error,) = results["sides"]["weft"]["frogs"]["calibration_error"]
    assert error == pytest.approx(0, abs=1e-6)  # shares of the classes, over all folds
