"""Columns of any kind as numbers: NaN for a missing value, a code per category."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .categories import meanings
from .columns import MISSING, Reader, listed, other_cells, reader_of

if TYPE_CHECKING:
    import pandas as pd

#: Kinds of typed columns, by what pandas finds in a column of objects.
KINDS = {
    "number": ("integer", "floating", "mixed-integer-float", "decimal"),
    "truth value": ("boolean",),
    "date": ("datetime64", "datetime", "date", "period"),
    "duration": ("timedelta64", "timedelta"),
    "nothing": ("empty",),
}
#: What a training column of a kind takes from a typed one: truth values count as 0 and 1.
ALIKE = {"number": ("number", "truth value"), "truth value": ("number", "truth value")}


class Numbers:
    """Turns tables into float64 arrays, as it was fitted on training rows.

        numbers, booleans   as they are; infinite ones count as missing
        dates, durations    seconds; of a period, those of its beginning
        text                numbers, truth values or dates, if nine of ten cells are (`columns`)
        categories, words   a code per category, in the order of a pandas category, else sorted;
                            one that no training row has counts as missing

    The training rows alone decide how a cell is read. A category is met by its text or, where that
    is unknown, by what it spells: 1 and "1.0" meet "01", True meets "TRUE", "YES" meets "yes".
    Programs that guess the type of a column write one cell in several ways.

    `names` are the columns', for messages. Per column, `categories` has their text in the order of
    the codes, None for numbers; `unordered` how many codes without an order it has, 0 for none.

    >>> import pandas as pd
    >>> table = pd.DataFrame({"size": [1, 2, None], "colour": ["red", "blue", "red"]})
    >>> numbers = Numbers(table)
    >>> numbers(table).tolist()
    [[1.0, 1.0], [2.0, 0.0], [nan, 1.0]]
    >>> numbers(pd.DataFrame({"size": ["5"], "colour": ["Red"]})).tolist()
    [[5.0, 1.0]]
    """

    def __init__(self, table: Any) -> None:
        frame = _frame(table)
        self.columns = [_fitted(frame.iloc[:, j]) for j in range(frame.shape[1])]

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    @property
    def categories(self) -> list[list[str] | None]:
        return [column.categories for column in self.columns]

    @property
    def unordered(self) -> list[int]:
        return [
            0 if column.ordered or column.categories is None else len(column.categories)
            for column in self.columns
        ]

    def __call__(self, table: Any) -> np.ndarray:
        """The numbers of a table with the columns of the fitted one: (rows, columns) float64.

        From a pandas DataFrame or a 2-d array.
        """
        plain = isinstance(table, np.ndarray) and table.dtype.kind in "biuf"
        if plain and all(column.kind in ALIKE for column in self.columns):
            found = table.astype(np.float64)
        else:
            frame = _frame(table)
            found = np.empty((len(frame), len(self.columns)))
            for j, column in enumerate(self.columns):
                found[:, j] = column(frame.iloc[:, j])
        found[~np.isfinite(found)] = np.nan
        return found


@dataclass(frozen=True)
class _Column:
    """Reading of one column's cells as numbers, decided by the training cells.

    `kind` is one of `KINDS` or "text". A `reader` reads cells of text, strictly where the training
    column was typed.
    """

    name: str
    kind: str
    categories: list[str] | None = None
    ordered: bool = False
    reader: Reader | None = None
    strict: bool = True

    def __call__(self, column: pd.Series) -> np.ndarray:
        kind = _kind(column)
        if self.kind == "nothing":
            return np.full(len(column), np.nan)
        if self.categories is not None:
            return self._codes(column, self.categories)
        if kind == "text":
            return self._read(column)
        if kind in ALIKE.get(self.kind, (self.kind,)):
            return _typed(column, kind)
        given = column[column.notna()]
        if len(given):
            raise self._other(given.iloc[0])
        return np.full(len(column), np.nan)

    def _read(self, column: pd.Series) -> np.ndarray:
        texts = _texts(column)
        reader = self.reader or Reader(self.kind)
        found = reader(texts)
        odd = texts[found.isna() & texts.notna() & ~texts.isin(MISSING)]
        if len(odd) and self.strict:
            raise self._other(odd.iloc[0])
        if len(odd):
            _warn(other_cells(self.name, self.kind, odd, len(column)))
        return _typed(found, self.kind)

    def _other(self, cell: Any) -> ValueError:
        return ValueError(
            f"column {self.name!r} held {self.kind}s in the rows that were fitted, and here"
            f" {cell!r}; replace it by a {self.kind} or by None, for a missing value"
        )

    def _codes(self, column: pd.Series, known: list[str]) -> np.ndarray:
        import pandas as pd

        values, uniques = pd.factorize(_texts(column))  # -1: missing
        index = {category: float(code) for code, category in enumerate(known)}
        find = meanings(known)
        met = [find(text) for text in uniques]
        if len(met) and not any(text is not None for text in met) and known:
            _warn(
                f"column {self.name!r}: no training row has any of its categories, so that all its"
                f" {int((values >= 0).sum())} cells count as missing:"
                f" {listed(list(map(repr, uniques)))}; the training rows have"
                f" {listed(list(map(repr, known)))}"
            )
        codes = [np.nan if text is None else index[text] for text in met]
        return np.array([*codes, np.nan])[values]


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=6)  # the line that asks for a prediction


def _fitted(column: pd.Series) -> _Column:
    """Reading of a training column, and of any other of its name."""
    import pandas as pd

    name, kind = str(column.name), _kind(column)
    if kind == "nothing" or not column.notna().any():
        return _Column(name, "nothing")
    if kind != "text":
        return _Column(name, kind)
    if isinstance(column.dtype, pd.CategoricalDtype):
        known = list(dict.fromkeys(map(_text, column.cat.categories)))
        return _Column(name, "text", known, bool(column.dtype.ordered))
    texts = _texts(column)
    reader = reader_of(texts)
    if reader is None:
        return _Column(name, "text", sorted(texts.dropna().unique()))
    return _Column(name, reader.kind, reader=reader, strict=False)


def _frame(table: Any) -> pd.DataFrame:
    import pandas as pd

    if isinstance(table, pd.DataFrame):
        return table
    table = np.asarray(table)
    if table.dtype.kind in "biufc":
        return pd.DataFrame(table)
    return pd.DataFrame(table.astype(object))


def _kind(column: pd.Series) -> str:
    """Kind of a column by its type: one of `KINDS`, or text."""
    import pandas as pd
    from pandas.api import types

    dtype = column.dtype
    if types.is_complex_dtype(dtype):
        raise ValueError(f"Complex data not supported, found in column {column.name!r}")
    if isinstance(dtype, pd.CategoricalDtype):
        return "text"
    if types.is_bool_dtype(dtype):
        return "truth value"
    if types.is_numeric_dtype(dtype):
        return "number"
    if types.is_datetime64_any_dtype(dtype) or isinstance(dtype, pd.PeriodDtype):
        return "date"
    if types.is_timedelta64_dtype(dtype):
        return "duration"
    found = types.infer_dtype(column, skipna=True)
    if found.startswith("mixed"):
        _check_scalars(column)
    return next((kind for kind, names in KINDS.items() if found in names), "text")


def _check_scalars(column: pd.Series) -> None:
    from pandas.api import types

    for value in column:
        if not types.is_scalar(value):
            raise TypeError(
                f"column {column.name!r}: argument must be a string or a number, found a"
                f" {type(value).__name__}"
            )


def _texts(column: pd.Series) -> pd.Series:
    """Cells by their text, which tells True from the 1 that it equals; gaps stay gaps.

    An empty cell is a gap.
    """
    texts = column.astype(object).map(_text, na_action="ignore").astype(object)
    return texts.mask(texts.eq(""))


def _text(value: Any) -> str:
    """A category's name: 1 and 1.0 are one, as a gap among integers makes them floats."""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)


def _typed(column: pd.Series, kind: str) -> np.ndarray:
    """The numbers of a typed column; seconds of dates and durations."""
    import pandas as pd

    if kind == "date":
        if isinstance(column.dtype, pd.PeriodDtype) or _has_periods(column):
            column = pd.Series(pd.PeriodIndex(column).to_timestamp())
        # In the column's own unit: nanoseconds end in 2262, and databases write 9999-12-31.
        values = pd.to_datetime(column, utc=True).dt.tz_localize(None).to_numpy()
        return (values - np.datetime64(0, "s").astype(values.dtype)) / np.timedelta64(1, "s")
    if kind == "duration":
        return pd.to_timedelta(column).dt.total_seconds().to_numpy(np.float64)
    if column.dtype == object:
        column = column.where(column.notna(), np.nan).astype(np.float64)
    return column.to_numpy(dtype=np.float64, na_value=np.nan)


def _has_periods(column: pd.Series) -> bool:
    from pandas.api import types

    return column.dtype == object and types.infer_dtype(column, skipna=True) == "period"
