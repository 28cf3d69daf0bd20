"""Two CSV files as a training table and a test table, and in plain words what is odd in them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import WeftError, did_you_mean, shown

if TYPE_CHECKING:
    import pandas as pd

SEPARATORS = (",", ";", "\t", "|")
#: The second is that of Excel on Windows.
ENCODINGS = ("utf-8-sig", "cp1252")
#: Files of other programs that are often meant, and are no text.
OTHERS = (".xlsx", ".xls", ".ods", ".parquet", ".feather")
#: Cells without a value, except in the columns with the class and with the rows' names.
MISSING = ("", "?", "NA", "N/A", "n/a", "<NA>", "#N/A", "NaN", "nan", "NULL", "null", "None")
#: A column of so many numbers is one of numbers; its other cells count as missing.
MOSTLY = 0.9
#: More different numbers than this are a quantity, and no classes.
MOST_NUMBERS = 100
MOST_FRACTIONS = 20
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_LOCAL_DATE = re.compile(r"(\d\d?)([/.-])(\d\d?)\2\d{4}\b")
_NEARLY = r"\W{0,3}\d{1,3}(?:[.,' ]?\d{3})*(?:[.,]\d*)?\W{0,3}"
_COMMA = re.compile(r"-?\d+,\d+")


@dataclass(frozen=True, eq=False)
class Pair:
    """A training table and a test table with the same columns.

    Attributes:
        x_train: features, a DataFrame.
        y_train: the class of every row, as text.
        x_test: features, with the columns of `x_train`.
        y_test: as `y_train`, "" where unknown; None where the test file lacks the column.
        ids: the column that names the test rows, or None.
        notes: what a user should know of how the files were read.
    """

    x_train: pd.DataFrame
    y_train: np.ndarray
    x_test: pd.DataFrame
    y_test: np.ndarray | None
    ids: pd.Series | None
    notes: tuple[str, ...]


def read_pair(
    train: Path, test: Path, target: str, name: str | None = None, drop: Sequence[str] = ()
) -> Pair:
    """Reads both files and brings them to the same columns.

    Args:
        train: a CSV file with a header.
        test: another one.
        target: the column with the classes.
        name: a column that names the rows, and is no feature.
        drop: columns that are no features.

    Raises:
        WeftError: says which file and column, what was found, and what to do.
    """
    _check_choice(target, name, drop)
    text = [target] if name is None else [target, name]
    known, unknown = _read(train, text), _read(test, text)
    _check_column(known, train, target, "--target")
    for column in drop:
        _check_column(known, train, column, "--drop")
    if name is not None:
        _check_column(unknown, test, name, "--id")
    labels = known[target].to_numpy(str)
    _check_labels(labels, train, target)
    notes: list[str] = []
    apart = {target, *drop} | ({name} if name else set())
    unnamed = [c for c in known.columns if c.startswith("Unnamed: ") and c not in apart]
    if unnamed:
        notes.append(f"{train.name}: a column without a name is left out")
    features = [c for c in known.columns if c not in {*apart, *unnamed}]
    if not features:
        raise WeftError(f"{train} has no column beside {', '.join(sorted(apart))} to predict from")
    _check_alike(features, unknown, train, test)
    more = [c for c in unknown.columns if c not in {*features, *apart, *unnamed}]
    if more:
        notes.append(f"{test.name}: columns that {train.name} lacks are left out: {_list(more)}")
    x_train, x_test = known[features].copy(), unknown[features].copy()
    for column in features:
        notes += _tidy(x_train, x_test, column, (train.name, test.name))
    given = _spelled_alike(unknown[target].to_numpy(str), labels) if target in unknown else None
    ids = None if name is None else unknown[name]
    return Pair(x_train, labels, x_test, given, ids, tuple(notes))


# -- one file --------------------------------------------------------------------------------------


def _read(path: Path, text: Collection[str]) -> pd.DataFrame:
    """A CSV file with a header and rows; columns of `text` as they are written, "" where empty."""
    import pandas as pd

    _check_file(path)
    try:
        frame = _decoded(path, text)
    except pd.errors.EmptyDataError:
        raise WeftError(f"{path} is empty; it needs a header and rows") from None
    except pd.errors.ParserError as error:
        why = str(error).removeprefix("Error tokenizing data. C error: ").strip()
        raise WeftError(f"{path} is no table: {why}") from None
    except OSError as error:
        raise WeftError(f"{path} cannot be read: {error.strerror or error}") from None
    if not len(frame):
        raise WeftError(f"{path} has a header, and no rows")
    return frame


def _decoded(path: Path, text: Collection[str]) -> pd.DataFrame:
    with path.open("rb") as file:
        wide = file.read(2) in (b"\xff\xfe", b"\xfe\xff")
    for encoding in ("utf-16",) if wide else ENCODINGS:
        try:
            return _parse(path, text, encoding)
        except UnicodeError:
            continue
    raise WeftError(f"{path} is no text; save the table as CSV, in UTF-8")


def _parse(path: Path, text: Collection[str], encoding: str) -> pd.DataFrame:
    import pandas as pd

    headers = {
        sep: pd.read_csv(path, sep=sep, nrows=0, encoding=encoding, index_col=False).columns
        for sep in SEPARATORS
    }
    sep = max(SEPARATORS, key=lambda s: len(headers[s]))
    as_written = [column for column in headers[sep] if column.strip() in text]

    def parsed(decimal: str) -> pd.DataFrame:
        return pd.read_csv(
            path,
            sep=sep,
            decimal=decimal,
            encoding=encoding,
            dtype=dict.fromkeys(as_written, str),
            keep_default_na=False,
            na_values={c: MISSING for c in headers[sep] if c not in as_written},
            index_col=False,
            skipinitialspace=True,
            low_memory=False,
        )

    frame = parsed(".")
    if sep != "," and any(_has_commas(frame[c]) for c in frame.columns if c not in as_written):
        frame = parsed(",")
    for column in frame.columns:
        if pd.api.types.is_string_dtype(frame[column]):
            frame[column] = frame[column].str.strip()
    return frame.rename(columns=str.strip)


def _has_commas(column: pd.Series) -> bool:
    """Whether all values of a column are numbers with decimal commas."""
    values = column.dropna()
    if not len(values) or column.dtype.kind in "biufc":
        return False
    return all(_COMMA.fullmatch(str(v)) or str(v).isdigit() for v in values)


# -- refusals --------------------------------------------------------------------------------------


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise WeftError(f"{shown(str(path))} is a folder; give a CSV file")
    if path.suffix.lower() in OTHERS:
        raise WeftError(f"{shown(str(path))} is no CSV file; save or export the table as CSV")
    if not path.is_file():
        near = [p.name for p in path.parent.glob("*.csv")] if path.parent.is_dir() else []
        meant = did_you_mean(path.name, near)
        raise WeftError(f"there is no file {shown(str(path))}{meant if 'mean' in meant else ''}")


def _check_choice(target: str, name: str | None, drop: Sequence[str]) -> None:
    if target == name or target in drop:
        raise WeftError(f"--target {shown(target)} is to be predicted; it cannot be left out too")


def _check_column(frame: pd.DataFrame, path: Path, column: str, option: str) -> None:
    if column not in frame:
        raise WeftError(
            f"{option} {shown(column)}: {path} has no such column"
            f"{did_you_mean(column, frame.columns)}"
        )


def _check_labels(labels: np.ndarray, path: Path, target: str) -> None:
    gaps = np.flatnonzero(labels == "")
    if len(gaps):
        lines = _list([str(i + 2) for i in gaps])
        raise WeftError(
            f"{path}: column {target!r} is empty in {len(gaps)} of {len(labels)} rows (lines"
            f" {lines}); training rows need a class: move these rows to the test file"
        )
    different = np.unique(labels)
    numbers = _as_numbers(different)
    most = MOST_NUMBERS
    if numbers is not None and (numbers != np.round(numbers)).any():
        most = MOST_FRACTIONS
    if numbers is not None and len(different) > most:
        raise WeftError(
            f"{path}: column {target!r} has {len(different)} different numbers, so it is a"
            " quantity; weft predict tells classes apart: cut it into ranges, such as low and high"
        )
    if len(different) > 20 and len(different) > len(labels) // 2:
        raise WeftError(
            f"{path}: column {target!r} has {len(different)} different values in {len(labels)}"
            " rows; a class needs several rows: is it another column?"
        )


def _check_alike(features: Sequence[str], frame: pd.DataFrame, train: Path, test: Path) -> None:
    missing = [c for c in features if c not in frame]
    if missing:
        near = did_you_mean(missing[0], [c for c in frame.columns if c not in features])
        near = near if "mean" in near else ""
        raise WeftError(
            f"{test} lacks columns of {train}: {_list(missing)}{near}; --drop leaves a column out"
        )


# -- columns ---------------------------------------------------------------------------------------


def _tidy(x_train: pd.DataFrame, x_test: pd.DataFrame, column: str, names: Sequence) -> list[str]:
    """Brings a column to one kind in both tables; returns notes."""
    import pandas as pd

    notes = []
    if pd.api.types.is_numeric_dtype(x_train[column]) or _mostly_numbers(x_train[column]):
        for frame, name in zip((x_train, x_test), names):
            numbers = pd.to_numeric(frame[column], errors="coerce")
            odd = frame[column][numbers.isna() & frame[column].notna()]
            frame[column] = numbers
            if len(odd):
                notes.append(
                    f"{name}: column {column!r}: what is no number counts as missing:"
                    f" {len(odd)} of {len(frame)} cells ({_list(list(map(repr, odd.unique())))})"
                )
        return notes
    values = x_train[column].dropna().astype(str)
    if len(values) and values.str.fullmatch(_NEARLY).mean() >= MOSTLY:
        notes.append(
            f"column {column!r} is text, though it looks like numbers ({values.iloc[0]!r}); plain"
            " numbers, such as 1234.5, would say more"
        )
    elif form := _date_form(values):
        if form.get("dayfirst", False) is None:
            notes.append(
                f"column {column!r} is text: whether the day or the month of {values.iloc[0]!r} is"
                " first cannot be told; dates such as 2024-01-31 would say more"
            )
            return notes
        for frame in (x_train, x_test):
            frame[column] = pd.to_datetime(frame[column], errors="coerce", utc=True, **form)
    elif len(values) > 20 and values.nunique() > len(values) // 2:
        notes.append(
            f"column {column!r} is text that differs in most rows; if it names rows, --drop or --id"
        )
    return notes


def _date_form(values: pd.Series) -> dict[str, Any]:
    """How pandas is to read values that are all dates; empty if they are not.

    `dayfirst` is None where dates such as 1/2/2024 leave open which it is.

    >>> import pandas as pd
    >>> _date_form(pd.Series(["1/2/2024", "1/31/2024"]))
    {'format': 'mixed', 'dayfirst': False}
    """
    if len(values) and all(map(_DATE.match, values)):
        return {"format": "ISO8601"}
    dates = [_LOCAL_DATE.match(v) for v in values]
    if not dates or None in dates:
        return {}
    first, second = (max(int(date[group]) for date in dates if date) for group in (1, 3))
    if (first > 12) == (second > 12):
        return {"format": "mixed", "dayfirst": None}
    return {"format": "mixed", "dayfirst": first > 12}


def _mostly_numbers(column: pd.Series) -> bool:
    import pandas as pd

    values = column.dropna()
    return len(values) > 0 and pd.to_numeric(values, errors="coerce").notna().mean() >= MOSTLY


def _spelled_alike(given: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Test labels as training labels write them: a gap among integers makes 2 a 2.0.

    >>> _spelled_alike(np.array(["2.0", "", "7"]), np.array(["1", "2"])).tolist()
    ['2', '', '7']
    """
    known = np.unique(labels)
    numbers = _as_numbers(known)
    if numbers is None or len(np.unique(numbers)) < len(known):
        return given
    spelled = dict(zip(numbers, known))

    def spell(label: str) -> str:
        number = None if label in known else _as_numbers(np.array([label]))
        return label if number is None else spelled.get(number[0], label)

    return np.array([spell(label) for label in given], dtype=str)


def _as_numbers(labels: np.ndarray) -> np.ndarray | None:
    try:
        return labels.astype(np.float64)
    except ValueError:
        return None


def _list(items: Sequence[str], most: int = 5) -> str:
    """The first of some items, and how many more there are.

    >>> _list(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = len(items) - most
    return ", ".join(items[:most]) + (f" and {more} more" if more > 0 else "")
