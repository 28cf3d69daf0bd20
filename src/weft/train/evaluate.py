"""Real tables that scikit-learn ships, next to logistic regression and a random forest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.table import Table
from torch import nn

from ..tables.ensemble import Settings
from ..tables.hierarchy import Hierarchy
from ..tables.source import Source

TABLES = ("breast_cancer", "wine", "iris", "digits")
MEMBERS = 4


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
        """How many classes the training rows have."""
        return int(self.y_train.max()) + 1


@dataclass(frozen=True)
class Result:
    """Accuracies on one table, 0 to 1, each the mean over its splits.

    Attributes:
        name: of the table.
        rows: training and test rows of a split.
        features: columns without the class.
        classes: how many there are.
        guess: accuracy of always naming the commonest class.
        model: of the model.
        logistic: of logistic regression; NaN on ranks other than 0.
        forest: of a random forest; NaN on ranks other than 0.

    >>> Result("iris", 150, 4, 3, guess=0.33, model=0.95, logistic=0.96, forest=0.95).classes
    3
    """

    name: str
    rows: int
    features: int
    classes: int
    guess: float
    model: float
    logistic: float
    forest: float


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


def evaluate(
    model: nn.Module, *, splits: int = 3, seed: int = 0, baselines: bool = True
) -> list[Result]:
    """Test accuracy of a table model and of two baselines on every table of `TABLES`.

    All ranks of the model's layout take part in its predictions; the baselines run on rank 0, and
    on other ranks their accuracies are NaN. Baselines get the standardised features, all of them.

    Args:
        model: a table model, as `weft.compose` makes it.
        splits: random splits per table.
        seed: of the views of a table, whose predictions are averaged.
        baselines: whether to run them, too.

    Returns:
        One result per table.

    >>> import weft
    >>> [result.name for result in evaluate(weft.compose("tabular"), splits=1)]
    ['breast_cancer', 'wine', 'iris', 'digits']
    """
    results = []
    for name in TABLES:
        drawn = list(real_splits(name, splits=splits))
        ours = [accuracy(_predict(model, split, seed), split) for split in drawn]
        first = baselines and model.layout.rank == 0
        theirs = [_baselines(split) for split in drawn] if first else []
        logistic, forest = np.mean(theirs, axis=0) if theirs else (float("nan"),) * 2
        first = drawn[0]
        results.append(
            Result(
                name=name,
                rows=len(first.x_train) + len(first.x_test),
                features=first.x_train.shape[1],
                classes=first.classes,
                guess=float(np.mean([_guess(split) for split in drawn])),
                model=float(np.mean(ours)),
                logistic=float(logistic),
                forest=float(forest),
            )
        )
    return results


def scores(results: list[Result]) -> dict[str, float]:
    """Accuracies of a model by the names that its curves have.

    >>> scores([Result("iris", 150, 4, 3, 0.33, 0.95, 0.96, 0.95)])
    {'real tables/iris': 0.95, 'real tables/mean': 0.95}
    """
    named = {f"real tables/{r.name}": r.model for r in results}
    return {**named, "real tables/mean": sum(named.values()) / len(named)}


def _predict(model: nn.Module, split: Split, seed: int) -> np.ndarray:
    """Class probabilities of the test rows, the same on every rank."""
    settings = Settings(members=MEMBERS, seed=seed)
    ensembles = Hierarchy(Source(model), split.x_train, split.y_train, split.classes, settings)
    return ensembles.predict(split.x_test)


def accuracy(probabilities: np.ndarray, split: Split) -> float:
    """Share of the test rows whose most probable class is theirs."""
    return float((probabilities.argmax(-1) == split.y_test).mean())


def results_table(results: list[Result]) -> Table:
    """The results as a rich table, accuracies in percent.

    Args:
        results: of `evaluate`, a row each.

    >>> results_table([Result("iris", 150, 4, 3, 0.33, 0.95, 0.96, 0.95)]).row_count
    1
    """
    table = Table(
        title="accuracy on test rows of real tables, in percent",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in (
        "table",
        "rows",
        "features",
        "classes",
        "guess",
        "weft",
        "logistic",
        "forest",
    ):
        justify = "left" if column == "table" else "right"
        style = "bold" if column == "weft" else None
        table.add_column(column, justify=justify, style=style, no_wrap=column == "table")
    for r in results:
        scores = (r.guess, r.model, r.logistic, r.forest)
        table.add_row(
            r.name,
            str(r.rows),
            str(r.features),
            str(r.classes),
            *(f"{100 * s:.1f}" for s in scores),
        )
    return table


def _guess(split: Split) -> float:
    return float((split.y_test == np.bincount(split.y_train).argmax()).mean())


def _baselines(split: Split) -> tuple[float, float]:
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    models = (
        make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)),
        RandomForestClassifier(n_estimators=100, random_state=0),
    )
    return tuple(
        m.fit(split.x_train, split.y_train).score(split.x_test, split.y_test) for m in models
    )
