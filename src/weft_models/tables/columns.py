"""Kinds of columns of text, by their training cells: numbers, truth values, dates or words.

One rule for the cells of DataFrames and of arrays.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.errors import printable

if TYPE_CHECKING:
    import pandas as pd

#: Cells without a value among numbers, truth values and dates. Among words only the empty cell is
#: one: NA may be Namibia, and None an answer.
MISSING = ("", "?", "NA", "N/A", "n/a", "<NA>", "#N/A", "NaN", "nan", "NULL", "null", "None")
#: A column of so many numbers, or dates, is one of them; its other cells count as missing.
MOSTLY = 0.9
TRUTH = {"true": 1.0, "false": 0.0}
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_LOCAL_DATE = re.compile(r"(\d\d?)([/.-])(\d\d?)\2\d{4}\b")
#: What may follow such a date: pandas takes other text for times.
_TIME = r"(?:[T ]+\d\d?:\d\d(?::\d\d(?:\.\d+)?)?(?: ?[AaPp]\.?[Mm]\.?)?)?"


@dataclass(frozen=True)
class Reader:
    """Reads text cells as a number, truth value, date or duration, the `kind`; others are NaN.

    `form` is how pandas reads the dates.

    >>> import pandas as pd
    >>> Reader("number")(pd.Series(["1.5", "NA"])).tolist()
    [1.5, nan]
    """

    kind: str
    form: tuple[tuple[str, Any], ...] = (("format", "ISO8601"),)

    def __call__(self, cells: pd.Series) -> pd.Series:
        import pandas as pd

        cells = cells.mask(cells.isin(MISSING))
        if self.kind == "number":
            return pd.to_numeric(cells, errors="coerce")
        if self.kind == "truth value":
            return cells.str.lower().map(TRUTH).fillna(pd.to_numeric(cells, errors="coerce"))
        if self.kind == "duration":
            return pd.to_timedelta(cells, errors="coerce")
        form = dict(self.form)
        if "dayfirst" in form:
            cells = cells.where(cells.str.fullmatch(_LOCAL_DATE.pattern + _TIME, na=False))
        return pd.to_datetime(cells, errors="coerce", utc=True, **form)


def other_cells(column: str, kind: str, odd: pd.Series, count: int) -> str:
    """A sentence on the cells of a column of `count` that are of no use to its reader."""
    cells = listed(list(map(repr, odd.unique())))
    return (
        f"column {column!r}: cells other than a {kind} are missing: {len(odd)} of {count} cells"
        f" ({cells})"
    )


def reader_of(cells: pd.Series) -> Reader | None:
    """The reader of training cells and of all others of their column; None for words.

    >>> import pandas as pd
    >>> read = reader_of(pd.Series(["1.5", "2", "NA"]))
    >>> read.kind, read(pd.Series(["3.5", "many"])).tolist()
    ('number', [3.5, nan])
    >>> reader_of(pd.Series(["NA", "DE"])) is None
    True
    """
    values = cells[cells.notna() & ~cells.isin(MISSING)]

    def mostly(read: Reader) -> bool:
        return not len(values) or read(values).notna().mean() >= MOSTLY

    numbers = Reader("number")
    if mostly(numbers):
        return numbers
    if values.str.lower().isin(list(TRUTH)).all():
        return Reader("truth value")
    form = _date_form(values)
    dates = Reader("date", form=tuple(form.items()))
    if not form or form.get("dayfirst", False) is None or not mostly(dates):
        return None
    return dates


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
    extra = len(items) - most
    return ", ".join(map(printable, items[:most])) + (f" and {extra} more" if extra > 0 else "")
