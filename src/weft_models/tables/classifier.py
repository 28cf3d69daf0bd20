"""`weft.TabularClassifier`: a table transformer behind scikit-learn's interface."""

from __future__ import annotations

import numbers
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from weft.errors import lacks

try:
    import pandas as pd
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import assert_all_finite, check_consistent_length, check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise ImportError(lacks("weft.TabularClassifier", error)) from None

from weft.layout import Layout

from .ensemble import DEFAULTS, Ensemble, Settings
from .frames import Numbers
from .source import Source

#: Training rows up to which `benchmarks/accuracy.py` has measured the weights that ship.
MEASURED_ROWS = 1000
DTYPES = ("float32", "float64", "bfloat16")


class TabularClassifier(ClassifierMixin, BaseEstimator):
    """Classes of the rows of a table, from a transformer that was trained on other tables.

    Nothing is trained here: `fit` encodes the training rows, and `predict` lets test rows attend to
    them. Columns may hold numbers, booleans and categories, with gaps.

    Scores are means over `n_estimators` views of the table. With a layout of several ranks the keys
    and values of the training rows are sharded over them, and the result is that of one device.
    Every rank then calls the same methods with the same rows, under torchrun or SLURM; all get all
    results.

    Args:
        n_estimators: how many views of the table are averaged.
        checkpoint: weights to use: None for those that ship, a name, a file, or a table model made
            elsewhere.
        layout: None for one device; or a `Layout`, or the name, the path or the line of one, such
            as `"rows: ring=4"`.
        device: "cpu" or "cuda"; None for cuda where there is one.
        dtype: of weights and computation: "float32", "float64" or "bfloat16".
        softmax_temperature: larger for less certain probabilities, smaller for more certain ones.
        batch_rows: test rows that are computed with at once; None for as many as fit well.
        cache_bytes: the most bytes of keys and values of encoded rows on a rank. Members for which
            there is no room are encoded again in every prediction, with the same result.
        random_state: seed of the views.

    Attributes:
        classes_: the labels, sorted.
        n_features_in_: how many columns there are.
        feature_names_in_: their names, where the training rows are a DataFrame with text for names.

    >>> import pandas as pd
    >>> flowers = pd.DataFrame({"petal": [1.4, 1.3, 4.7, 4.5, None], "colour": list("wwbbw")})
    >>> classifier = weft.TabularClassifier(n_estimators=2, checkpoint=weft.compose("tabular"))
    >>> classifier = classifier.fit(flowers[:4], ["setosa", "setosa", "other", "other"])
    >>> classifier.predict_proba(flowers).shape, classifier.classes_.tolist()
    ((5, 2), ['other', 'setosa'])
    """

    def __init__(
        self,
        n_estimators: int = 4,
        *,
        checkpoint: str | Path | nn.Module | None = None,
        layout: Layout | str | None = None,
        device: str | None = None,
        dtype: str = "float32",
        softmax_temperature: float = DEFAULTS.temperature,
        batch_rows: int | None = None,
        cache_bytes: int = 4 << 30,
        random_state: Any = 0,
    ) -> None:
        self.n_estimators = n_estimators
        self.checkpoint = checkpoint
        self.layout = layout
        self.device = device
        self.dtype = dtype
        self.softmax_temperature = softmax_temperature
        self.batch_rows = batch_rows
        self.cache_bytes = cache_bytes
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> TabularClassifier:
        """Encodes the training rows.

        Args:
            X: (rows, columns), a DataFrame or an array, with gaps or without.
            y: the label of every row: text, numbers or booleans.

        Returns:
            The classifier itself.

        Raises:
            ValueError: rows without a label, labels that are quantities and no classes, one class
                or more of them than the model knows, or a parameter that makes no sense.
            DeclarationError: a layout of several ranks that nobody started, or that the model
                cannot run on.
            FloatingPointError: the model's scores are not finite.

        Warns:
            UserWarning: many more rows than the model was trained on.
        """
        settings = self._settings()
        table, labels = self._checked(X, reset=True), _checked_labels(y, type(self).__name__)
        check_consistent_length(table, labels)
        self.classes_, ids = np.unique(labels, return_inverse=True)
        source = Source(self.checkpoint, self.layout, self.device, self.dtype)
        _check_table(source, self.classes_, len(labels))
        self._numbers = Numbers(table)
        rows, kinds = self._numbers(table), self._numbers.unordered
        self._ensemble = Ensemble(source, rows, ids, len(self.classes_), settings, kinds)
        self._ensemble.encode()
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of the classes, (rows, classes) float64, in the order of `classes_`.

        A row's probabilities do not depend on the other rows of X.

        Args:
            X: (rows, columns), with the columns of the training rows in their order.

        Raises:
            ValueError: other columns, or text where the training rows have numbers.
            FloatingPointError: the model's scores are not finite.
        """
        check_is_fitted(self)
        return self._ensemble.predict(self._numbers(self._checked(X, reset=False)))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of every row.

        Args:
            X: as for `predict_proba`.
        """
        best = self.predict_proba(X).argmax(axis=1)
        return self.classes_[best]

    @property
    def nbytes_(self) -> int:
        """Bytes of keys and values that this rank keeps."""
        check_is_fitted(self)
        return self._ensemble.nbytes

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_ensemble")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        return tags

    # -- users' inputs -----------------------------------------------------------------------------

    def _checked(self, X: Any, reset: bool) -> Any:
        """X as a DataFrame or a 2-d array, its columns counted and their names compared."""
        if hasattr(X, "to_pandas"):
            X = X.to_pandas()
        if isinstance(X, pd.DataFrame) and X.columns.has_duplicates:
            twice = X.columns[X.columns.duplicated()][0]
            raise ValueError(f"X has several columns {twice!r}; rename or drop all but one")
        if not isinstance(X, pd.DataFrame):
            if isinstance(X, list | tuple) and np.asarray(X).dtype.kind in "US":
                X = np.array(X, dtype=object)  # numbers among text stay numbers
            return validate_data(self, X, reset=reset, dtype=None, ensure_all_finite=False)
        validate_data(self, X, reset=reset, skip_check_array=True)
        for count, label in zip(X.shape, ("sample", "feature")):
            if not count:
                raise ValueError(
                    f"Found array with 0 {label}(s) (shape={X.shape}) while a minimum of 1 is"
                    f" required by {type(self).__name__}."
                )
        return X

    def _settings(self) -> Settings:
        counts = {"n_estimators": self.n_estimators, "cache_bytes": self.cache_bytes}
        if self.batch_rows is not None:
            counts["batch_rows"] = self.batch_rows
        for name, value in counts.items():
            least = 0 if name == "cache_bytes" else 1
            if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r}: give a whole number, at least {least}")
        temperature = self.softmax_temperature
        if not isinstance(temperature, numbers.Real) or not 0 < temperature < np.inf:
            raise ValueError(f"softmax_temperature={temperature!r}: give a number above 0")
        if str(self.dtype).removeprefix("torch.") not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: known are {', '.join(DTYPES)}")
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        rows = None if self.batch_rows is None else int(self.batch_rows)
        return Settings(
            int(self.n_estimators), float(temperature), rows, int(self.cache_bytes), int(seed)
        )


def _check_table(source: Source, classes: np.ndarray, rows: int) -> None:
    """Refuses classes that the model cannot tell apart, and warns of more rows than it has seen."""
    spec = source.model.spec
    known = spec.sizes.classes or 0
    if not 1 < len(classes) <= known:
        raise ValueError(
            f"y has {len(classes)} class(es), and model {spec.name!r} tells 2 to {known} apart; of"
            " more, scikit-learn's OneVsRestClassifier(TabularClassifier()) makes several problems"
        )
    trained = spec.train.length.get(spec.axes[1])
    if trained and rows > max(trained[1], MEASURED_ROWS):
        warnings.warn(
            f"{rows:,} training rows: model {spec.name!r} was trained on tables of {trained[0]} to"
            f" {trained[1]} rows, and beyond {MEASURED_ROWS:,} nobody has measured how good it is;"
            " compare it with other classifiers on held-out rows, or fit a stratified sample",
            UserWarning,
            stacklevel=3,
        )


def _checked_labels(y: Any, who: str) -> np.ndarray:
    """Labels as an array of one dim; refuses gaps, and numbers that are no classes."""
    if y is None:
        raise ValueError(f"This {who} estimator requires y to be passed, but the target y is None.")
    labels = column_or_1d(y, warn=True)
    if pd.isna(labels).any():
        raise ValueError(
            f"Input y contains NaN: {int(pd.isna(labels).sum())} of {len(labels)} rows have no"
            " label; leave them out"
        )
    if labels.dtype.kind == "f":
        assert_all_finite(labels, input_name="y")
    check_classification_targets(labels)
    return labels
