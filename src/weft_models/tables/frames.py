"""Columns of numbers and categories as numbers: NaN for a missing value, a code per category."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd


class Numbers:
    """Turns tables into float64 arrays, as it was fitted on training rows.

    Numbers and booleans stay as they are, infinite ones count as missing; other cells are
    categories: a code each, in the order of a pandas category, else sorted. A category that no
    training row has is missing.

    `names` are the columns', for messages; `kinds` the pandas type of each column's categories,
    None of numbers; `unordered` how many codes without an order it has, 0 for none.

    >>> import pandas as pd
    >>> table = pd.DataFrame({"size": [1, 2, None], "colour": ["red", "blue", "red"]})
    >>> Numbers(table)(table).tolist()
    [[1.0, 1.0], [2.0, 0.0], [nan, 1.0]]
    """

    def __init__(self, table: Any) -> None:
        frame = _frame(table)
        self.names = [str(name) for name in frame.columns]
        self.kinds = [_categories(frame.iloc[:, j]) for j in range(frame.shape[1])]
        self.unordered = [
            0 if kind is None or kind.ordered else len(kind.categories) for kind in self.kinds
        ]

    def __call__(self, table: Any) -> np.ndarray:
        """The numbers of a DataFrame or 2-d array with the fitted columns: (rows, columns)."""
        frame = _frame(table)
        columns = [self._read(frame.iloc[:, j], j) for j in range(len(self.kinds))]
        found = np.stack(columns, axis=1)
        found[~np.isfinite(found)] = np.nan
        return found

    def _read(self, column: pd.Series, j: int) -> np.ndarray:
        kind = self.kinds[j]
        if kind is not None:
            codes = kind.categories.get_indexer(column.astype(object))
            return np.where(codes < 0, np.nan, codes)
        if not column.notna().any():
            return np.full(len(column), np.nan)
        if _categories(column) is not None:
            raise ValueError(
                f"column {self.names[j]!r} held numbers in the rows that were fitted, and here"
                f" {column[column.notna()].iloc[0]!r} ({column.dtype}); give numbers, or None for a"
                " missing value"
            )
        return column.to_numpy(dtype=np.float64, na_value=np.nan)


def _frame(table: Any) -> pd.DataFrame:
    """A table whose columns of objects have the type of their cells."""
    import pandas as pd

    return pd.DataFrame(table).infer_objects()


def _categories(column: pd.Series) -> pd.CategoricalDtype | None:
    """The categories of a column; None of numbers."""
    import pandas as pd
    from pandas.api import types

    if types.is_complex_dtype(column.dtype):
        raise ValueError(f"Complex data not supported, found in column {column.name!r}")
    if not column.notna().any():
        return pd.CategoricalDtype([])
    if types.is_bool_dtype(column.dtype) or types.is_numeric_dtype(column.dtype):
        return None
    if column.dtype.kind in "mM" or isinstance(column.dtype, pd.PeriodDtype):
        raise ValueError(
            f"column {column.name!r} holds {column.dtype}; give numbers or categories, as skrub's"
            " TableVectorizer makes them of dates"
        )
    if isinstance(column.dtype, pd.CategoricalDtype):
        return column.dtype
    try:
        return column.astype("category").dtype
    except TypeError as error:
        raise TypeError(
            f"column {column.name!r}: argument must be a string or a number ({error})"
        ) from None
