"""Columns of any kind as numbers: NaN for a missing value, a code per category."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

#: What pandas finds in a column of objects that are all numbers, or all dates.
NUMBERS = ("integer", "floating", "mixed-integer-float", "decimal", "boolean", "empty")
DATES = ("datetime64", "datetime", "date")
DURATIONS = ("timedelta64", "timedelta")


class Numbers:
    """Turns tables into float64 arrays, as it was fitted on training rows.

        numbers, booleans   as they are; infinite ones count as missing
        dates, durations    seconds
        categories, text    a code per category, in the order of a pandas category, else sorted;
                            one that no training row has counts as missing

    The training rows alone decide how a cell is read. A category is met by its text or, where that
    is unknown, by its meaning: 1 and "1.0" meet "01", True meets "TRUE". Programs that guess the
    type of a column write one cell in several ways.

    `names` are the columns', for messages. Per column, `categories` has their text in the order of
    the codes, None for numbers; `unordered` how many codes without an order it has, 0 for none.

    >>> import pandas as pd
    >>> table = pd.DataFrame({"size": [1, 2, None], "colour": ["red", "blue", "red"]})
    >>> numbers = Numbers(table)
    >>> numbers(table).tolist()
    [[1.0, 1.0], [2.0, 0.0], [nan, 1.0]]
    >>> numbers(pd.DataFrame({"size": [5], "colour": ["green"]})).tolist()
    [[5.0, nan]]
    """

    def __init__(self, table: Any) -> None:
        import pandas as pd

        frame = _frame(table)
        if not isinstance(table, pd.DataFrame):
            frame = frame.apply(_plain)
        self.names = [str(name) for name in frame.columns]
        columns = [frame.iloc[:, j] for j in range(len(self.names))]
        self.categories = [_categories(column) for column in columns]
        self.unordered = [
            0 if known is None or getattr(column.dtype, "ordered", False) else len(known)
            for column, known in zip(columns, self.categories)
        ]

    def __call__(self, table: Any) -> np.ndarray:
        """The numbers of a table with the columns of the fitted one: (rows, columns) float64.

        From a pandas DataFrame or a 2-d array. Raises `ValueError` for text in a column of numbers.
        """
        if isinstance(table, np.ndarray) and table.dtype.kind in "biuf" and not any(self._coded):
            found = table.astype(np.float64)
        else:
            frame = _frame(table)
            columns = [
                _numbers(frame.iloc[:, j], name)
                if known is None
                else _codes(frame.iloc[:, j], known)
                for j, (name, known) in enumerate(zip(self.names, self.categories))
            ]
            found = np.column_stack(columns) if columns else np.empty((len(frame), 0))
        found[~np.isfinite(found)] = np.nan
        return found

    @property
    def _coded(self) -> list[bool]:
        return [known is not None for known in self.categories]


def _frame(table: Any) -> pd.DataFrame:
    import pandas as pd

    if isinstance(table, pd.DataFrame):
        return table
    table = np.asarray(table)
    if table.dtype.kind in "biufc":
        return pd.DataFrame(table)
    return pd.DataFrame(table.astype(object))


def _plain(column: pd.Series) -> pd.Series:
    """A column of an array of objects as numbers if it has nothing else, whatever their type."""
    import pandas as pd

    try:
        return pd.to_numeric(column)
    except (ValueError, TypeError):
        return column


def _kind(column: pd.Series) -> str:
    """Kind of a column: numbers, dates, durations or text."""
    import pandas as pd
    from pandas.api import types

    dtype = column.dtype
    if types.is_complex_dtype(dtype):
        raise ValueError(f"Complex data not supported, found in column {column.name!r}")
    if isinstance(dtype, pd.CategoricalDtype):
        return "text"
    if types.is_bool_dtype(dtype) or types.is_numeric_dtype(dtype):
        return "numbers"
    if types.is_datetime64_any_dtype(dtype):
        return "dates"
    if types.is_timedelta64_dtype(dtype):
        return "durations"
    found = types.infer_dtype(column, skipna=True)
    if found.startswith("mixed"):
        _check_scalars(column)
    kinds = {"numbers": NUMBERS, "dates": DATES, "durations": DURATIONS}
    return next((kind for kind, names in kinds.items() if found in names), "text")


def _check_scalars(column: pd.Series) -> None:
    from pandas.api import types

    for value in column:
        if not types.is_scalar(value):
            raise TypeError(
                f"column {column.name!r}: argument must be a string or a number, found a"
                f" {type(value).__name__}"
            )


def _categories(column: pd.Series) -> list[str] | None:
    """The categories of a column as text in the order of their codes, or None for numbers."""
    import pandas as pd

    if _kind(column) != "text":
        return None
    if isinstance(column.dtype, pd.CategoricalDtype):
        return list(dict.fromkeys(map(_text, column.cat.categories)))
    return sorted(_texts(column).dropna().unique())


def _texts(column: pd.Series) -> pd.Series:
    """Cells by their text, which tells True from the 1 that it equals; gaps stay gaps."""
    return column.astype(object).map(_text, na_action="ignore")


def _text(value: Any) -> str:
    """A category's name: 1 and 1.0 are one, as a gap among integers makes them floats."""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)


def _codes(column: pd.Series, known: list[str]) -> np.ndarray:
    import pandas as pd

    values, uniques = pd.factorize(_texts(column))  # -1: missing
    index = {category: float(code) for code, category in enumerate(known)}
    spelled = Counter(map(_meaning, known))
    alike = {_meaning(c): code for c, code in index.items() if spelled[_meaning(c)] == 1}

    def code(text: str) -> float:
        return index[text] if text in index else alike.get(_meaning(text), np.nan)

    return np.array([*map(code, uniques), np.nan])[values]


def _meaning(text: str) -> Decimal | str:
    """Common form of all spellings of one number, to the last digit, or of one truth value.

    >>> _meaning("01") == _meaning("1.0"), _meaning("TRUE"), _meaning("Red")
    (True, 'true', 'Red')
    """
    try:
        number = Decimal(text)
    except InvalidOperation:
        return text.lower() if text.lower() in ("true", "false") else text
    return number if number.is_finite() else text


def _numbers(column: pd.Series, name: str) -> np.ndarray:
    import pandas as pd

    kind = _kind(column)
    if kind == "dates":
        # In the column's own unit: nanoseconds end in 2262, and databases write 9999-12-31.
        values = pd.to_datetime(column, utc=True).dt.tz_localize(None).to_numpy()
        return (values - np.datetime64(0, "s").astype(values.dtype)) / np.timedelta64(1, "s")
    if kind == "durations":
        return pd.to_timedelta(column).dt.total_seconds().to_numpy(np.float64)
    if kind == "text":
        return _parsed(column, name)
    if column.dtype == object:
        column = column.where(column.notna(), np.nan).astype(np.float64)
    return column.to_numpy(dtype=np.float64, na_value=np.nan)


def _parsed(column: pd.Series, name: str) -> np.ndarray:
    """Numbers that are written as text."""
    import pandas as pd

    found = pd.to_numeric(column.astype(object), errors="coerce").to_numpy(np.float64)
    wrong = column.notna().to_numpy() & np.isnan(found)
    if wrong.any():
        raise ValueError(
            f"column {name!r} held numbers in the rows that were fitted, and here"
            f" {column[wrong].iloc[0]!r}; replace it by a number or by None, for a missing value"
        )
    return found
