"""Evaluates a table model against others on the real tables that scikit-learn ships."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from rich import box
from rich.table import Table
from torch import nn

from .ensemble import Settings
from .many_classes import Hierarchy
from .scores import auc
from .source import Source

TABLES = ("breast_cancer", "wine", "iris", "digits")
MEMBERS = 4
#: The model that is asked about.
THIS = "this run"


@dataclass(frozen=True)
class Split:
    """A real table cut into training and test rows, as numpy arrays.

    Attributes:
        name: of the table.
        x_train: features, (rows, features).
        y_train: classes from 0, (rows,).
        x_test: features, (rows, features).
        y_test: classes from 0, (rows,).

    >>> x, y = np.zeros((4, 2)), np.array([0, 1, 2, 0])
    >>> Split("mine", x, y, x, y).classes
    3
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @property
    def classes(self) -> int:
        """Number of classes of the training rows."""
        return int(self.y_train.max()) + 1


@dataclass(frozen=True)
class Score:
    """Scores of predicted classes, a mean over splits.

    Attributes:
        accuracy: share of the test rows whose most probable class is theirs.
        auc: area under the ROC curve; of several classes the mean of each against the rest.

    >>> Score(0.95, 0.99).auc
    0.99
    """

    accuracy: float
    auc: float


@dataclass(frozen=True)
class Result:
    """Scores on one table.

    Attributes:
        name: of the table.
        rows: training and test rows of a split.
        features: columns without the class.
        classes: how many there are.
        scores: by who predicted: `this run`, `shipped` for the weights that ship with weft,
            `logistic` regression, random `forest`. On ranks other than 0 this run's alone.

    >>> Result("iris", 150, 4, 3, {"this run": Score(0.95, 0.99)}).classes
    3
    """

    name: str
    rows: int
    features: int
    classes: int
    scores: dict[str, Score]


def real_splits(
    name: str, *, splits: int = 3, train_rows: int = 200, test_rows: int = 200
) -> Iterator[Split]:
    """Stratified random splits of one of `TABLES`, the same on every rank.

    Args:
        name: one of `TABLES`.
        splits: how many.
        train_rows: rows for training at most; never more than half of the table.
        test_rows: rows for testing at most.

    Yields:
        A `Split` of numpy arrays.

    Raises:
        ImportError: scikit-learn is missing (`pip install weft-attention[tables]`).

    >>> [len(split.x_train) for split in real_splits("iris", splits=2)]
    [75, 75]
    """
    try:
        from sklearn import datasets
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise ImportError(
            "real tables need scikit-learn: pip install 'weft-attention[tables]'"
        ) from None
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    for seed in range(splits):
        size = min(len(x) // 2, train_rows)
        a, b, ya, yb = train_test_split(x, y, train_size=size, stratify=y, random_state=seed)
        yield Split(name, a, ya, b[:test_rows], yb[:test_rows])


def _silent(label: str) -> None:
    pass


def evaluate(
    model: nn.Module,
    *,
    splits: int = 3,
    seed: int = 0,
    others: bool = True,
    begins: Callable[[str], None] = _silent,
) -> list[Result]:
    """Scores of a table model and of baselines on every table of `TABLES`.

    All ranks of the model's layout take part in its predictions. Rank 0 alone runs the others: the
    weights that ship with weft, logistic regression and a random forest, which get the
    standardised features.

    Args:
        model: a table model, as `weft.compose` makes it.
        splits: random splits per table.
        seed: of the views of a table, whose predictions are averaged.
        others: whether to run them, too.
        begins: called with the next part's name, `len(TABLES)` times for the model and as often
            for the others.

    Returns:
        One result per table.

    >>> import weft
    >>> model = weft.compose("tabular")
    >>> [result.name for result in evaluate(model, splits=1, others=False)]
    ['breast_cancer', 'wine', 'iris', 'digits']
    """
    drawn = {name: list(real_splits(name, splits=splits)) for name in TABLES}
    scores = {}
    for name, of_table in drawn.items():
        begins(name)
        scores[name] = {
            THIS: _mean([_score(s, _predict(Source(model), s, seed)) for s in of_table])
        }
    for name, of_table in drawn.items() if others and cast(Any, model).layout.rank == 0 else ():
        begins(f"{name}, others")  # last: no rank waits for it
        scores[name] |= _of_others(of_table, seed)
    return [
        Result(
            name=name,
            rows=len(of_table[0].x_train) + len(of_table[0].x_test),
            features=of_table[0].x_train.shape[1],
            classes=of_table[0].classes,
            scores=scores[name],
        )
        for name, of_table in drawn.items()
    ]


def curves(results: list[Result]) -> dict[str, float]:
    """A model's scores by the names of their curves.

    >>> curves([Result("iris", 150, 4, 3, {"this run": Score(0.95, 0.99)})])
    {'accuracy/iris': 0.95, 'accuracy/mean': 0.95, 'AUC/iris': 0.99, 'AUC/mean': 0.99}
    """
    named: dict[str, float] = {}
    for label, field in (("accuracy", "accuracy"), ("AUC", "auc")):
        of_tables = {r.name: getattr(r.scores[THIS], field) for r in results}
        of_tables["mean"] = sum(of_tables.values()) / len(of_tables)
        named |= {f"{label}/{name}": value for name, value in of_tables.items()}
    return named


def results_table(results: list[Result]) -> Table:
    """The results as a rich table: rows by features, then accuracy in percent, and AUC.

    Args:
        results: of `evaluate`, a row each.

    >>> results_table([Result("iris", 150, 4, 3, {"this run": Score(0.95, 0.99)})]).row_count
    2
    """
    table = Table(
        title="real tables: accuracy on test rows in percent, AUC",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("table", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    sides = list(results[0].scores)
    for who in sides:
        style = "bold" if who == THIS else None
        table.add_column(who, justify="right", style=style, no_wrap=True)
    for r in results:
        shown = [_shown(r.scores[who]) for who in sides]
        table.add_row(r.name, f"{r.rows}×{r.features}", *shown)
    means = [_mean([r.scores[who] for r in results]) for who in sides]
    table.add_row("mean", "", *map(_shown, means))
    return table


def _shown(score: Score) -> str:
    return f"{100 * score.accuracy:.1f} {score.auc:.3f}"


def _mean(scores: list[Score]) -> Score:
    both = np.mean([(s.accuracy, s.auc) for s in scores], axis=0)
    return Score(*map(float, both))


def _predict(source: Source, split: Split, seed: int) -> np.ndarray:
    """Class probabilities of the test rows, the same on every rank."""
    settings = Settings(n_estimators=MEMBERS, seed=seed)
    ensembles = Hierarchy(source, split.x_train, split.y_train, split.classes, settings)
    return ensembles.predict(split.x_test)


def _score(split: Split, probabilities: np.ndarray) -> Score:
    y = split.y_test
    return Score(float((probabilities.argmax(-1) == y).mean()), auc(y, probabilities))


def _of_others(drawn: list[Split], seed: int) -> dict[str, Score]:
    """Scores of the weights that ship, and of scikit-learn's classifiers."""
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    source = Source()
    shipped = [_score(split, _predict(source, split, seed)) for split in drawn]
    classifiers = {
        "logistic": make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)),
        "forest": RandomForestClassifier(n_estimators=100, random_state=0),
    }
    scored = {
        name: [_score(s, one.fit(s.x_train, s.y_train).predict_proba(s.x_test)) for s in drawn]
        for name, one in classifiers.items()
    }
    return {who: _mean(each) for who, each in {"shipped": shipped, **scored}.items()}
