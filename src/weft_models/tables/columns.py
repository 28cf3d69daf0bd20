"""Columns of text cells as numbers, booleans, dates or text, by the types of the training rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from weft.errors import printable

if TYPE_CHECKING:
    import pandas as pd

#: Cells without a value, except in the columns with the class and with the rows' names.
MISSING = ("", "?", "NA", "N/A", "n/a", "<NA>", "#N/A", "NaN", "nan", "NULL", "null", "None")
#: A column of so many numbers, or dates, is one of them; its other cells count as missing.
MOSTLY = 0.9
TRUTH = {"true": 1.0, "false": 0.0}
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_LOCAL_DATE = re.compile(r"(\d\d?)([/.-])(\d\d?)\2\d{4}\b")
#: What may follow such a date: pandas takes other text for times.
_TIME = r"(?:[T ]+\d\d?:\d\d(?::\d\d(?:\.\d+)?)?(?: ?[AaPp]\.?[Mm]\.?)?)?"
_NEARLY = r"\W{0,3}\d{1,3}(?:[.,' ]?\d{3})*(?:[.,]\d*)?\W{0,3}"


def tidy_column(
    x_train: pd.DataFrame,
    x_test: pd.DataFrame,
    column: str,
    names: Sequence[str],
    commas: Sequence[bool],
) -> list[str]:
    """Brings a column, in place, to the kind that it has in the training table; returns notes.

    Cells are text. `names` are those of the two files; `commas` says of each whether commas in it
    may be decimal signs.
    """
    notes = []
    for frame in (x_train, x_test):
        frame[column] = frame[column].mask(frame[column].isin(MISSING))
    values = x_train[column].dropna()
    kind, read = _reader(values, commas)
    if read is None:
        return [f"column {column!r} is text{why}" for why in _doubts(values)]
    for frame, name in zip((x_train, x_test), names):
        found = read(frame[column])
        odd = frame[column][found.isna() & frame[column].notna()]
        frame[column] = found
        if len(odd):
            notes.append(
                f"{name}: column {column!r}: cells other than a {kind} are missing:"
                f" {len(odd)} of {len(frame)} cells ({listed(list(map(repr, odd.unique())))})"
            )
    return notes


def _reader(
    values: pd.Series, commas: Sequence[bool]
) -> tuple[str, Callable[[pd.Series], pd.Series] | None]:
    """The kind of training cells, and a function that reads such cells; None for text.

    >>> import pandas as pd
    >>> kind, read = _reader(pd.Series(["1,5", "2"]), (True, True))
    >>> kind, read(pd.Series(["3,5", "many"])).tolist()
    ('number', [3.5, nan])
    """
    import pandas as pd

    def mostly(read: Callable[[pd.Series], pd.Series]) -> bool:
        return not len(values) or read(values).notna().mean() >= MOSTLY

    signs = _decimal_signs(values, commas)
    if mostly(lambda cells: _numbers(cells, signs)):
        return "number", lambda cells: _numbers(cells, signs)
    if values.str.lower().isin(list(TRUTH)).all():
        return "truth value", lambda cells: cells.str.lower().map(TRUTH)
    form = _date_form(values)

    def dates(cells: pd.Series) -> pd.Series:
        if "dayfirst" in form:
            cells = cells.where(cells.str.fullmatch(_LOCAL_DATE.pattern + _TIME, na=False))
        return pd.to_datetime(cells, errors="coerce", utc=True, **form)

    if not form or form.get("dayfirst", False) is None or not mostly(dates):
        return "text", None
    return "date", dates


def _decimal_signs(values: pd.Series, commas: Sequence[bool]) -> str:
    """The decimal signs of a column's numbers; `commas`: those of the two files may be."""
    ours, theirs = commas
    if not ours:
        return ".," if theirs else "."
    numbers = values[_numbers(values, ".,").notna()]
    if numbers.str.contains(".", regex=False).any():
        return "."
    return "," if theirs and numbers.str.contains(",", regex=False).any() else ".,"


def _numbers(cells: pd.Series, signs: str) -> pd.Series:
    import pandas as pd

    if "." not in signs:
        cells = cells.mask(cells.str.contains(".", regex=False, na=False))
    if "," in signs:
        cells = cells.str.replace(",", ".", regex=False)
    return pd.to_numeric(cells, errors="coerce")


def _doubts(values: pd.Series) -> list[str]:
    """Doubts about a column of text, as notes to the user."""
    form = _date_form(values)
    if values.str.fullmatch(_NEARLY).mean() >= MOSTLY:
        return [
            f", though it looks like numbers ({values.iloc[0]!r}); plain numbers, such as 1234.5,"
            " would say more"
        ]
    if form and form.get("dayfirst", False) is None:
        return [
            f": whether the day or the month of {values.iloc[0]!r} is first cannot be told; dates"
            " such as 2024-01-31 would say more"
        ]
    if form:
        return [
            f", though it begins like dates ({values.iloc[0]!r}); dates such as 2024-01-31, or"
            " 2024-01-31 13:00, would say more"
        ]
    if len(values) > 20 and values.nunique() > len(values) // 2:
        return [" that differs in most rows; if it names rows, --drop or --id"]
    return []


def _date_form(values: pd.Series) -> dict[str, Any]:
    """Arguments with which pandas reads values that mostly begin like dates; empty if they do not.

    `dayfirst` is None where dates such as 1/2/2024 leave open which it is.

    >>> import pandas as pd
    >>> _date_form(pd.Series(["1/2/2024", "1/31/2024"]))
    {'format': 'mixed', 'dayfirst': False}
    """
    enough = max(1, MOSTLY * len(values))
    if sum(map(bool, map(_DATE.match, values))) >= enough:
        return {"format": "ISO8601"}
    dates = [date for date in map(_LOCAL_DATE.match, values) if date]
    if len(dates) < enough:
        return {}
    first, second = (max(int(date[group]) for date in dates) for group in (1, 3))
    if (first > 12) == (second > 12):
        return {"format": "mixed", "dayfirst": None}
    return {"format": "mixed", "dayfirst": first > 12}


def listed(items: Sequence[str], most: int = 5) -> str:
    """The first of some items, and how many more there are.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = len(items) - most
    return ", ".join(map(printable, items[:most])) + (f" and {more} more" if more > 0 else "")
