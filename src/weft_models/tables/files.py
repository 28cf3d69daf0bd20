"""Two CSV files as a training table and a test table, with warnings about their contents."""

from __future__ import annotations

import itertools
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.errors import WeftError, did_you_mean, printable, shown

from .columns import listed, tidy_column
from .progress import progress
from .unpack import open_table, read_start

if TYPE_CHECKING:
    import pandas as pd

SEPARATORS = (",", ";", "\t", "|")
#: The second is that of Excel on Windows.
ENCODINGS = ("utf-8-sig", "cp1252")
#: Files of other programs that are often meant, and are no text.
OTHERS = (".xlsx", ".xls", ".ods", ".parquet", ".feather")
#: First bytes of files that are no CSV, whatever their name.
FIRST_BYTES = {
    rb"PK\x03\x04.{26}(\[content_types]|_rels/|xl/|docprops/)": "an Excel workbook",
    rb"PK\x03\x04.{26}mimetype": "a workbook of LibreOffice",
    rb"\xd0\xcf\x11\xe0": "an Excel workbook",
    rb"PAR1": "a Parquet file",
    rb"(\xef\xbb\xbf)?\s*<(!doctype|html)": "a web page",
}
#: More different numbers than this are a quantity, and no classes.
MOST_NUMBERS = 100
MOST_FRACTIONS = 20
#: A column behind the last one of the header, empty where a separator ends the lines.
MORE = "more fields than names"
#: Cells, and columns, of a file: they are read in a minute, as text in some GB of memory.
MOST_CELLS = 20_000_000
MOST_COLUMNS = 2_000


@dataclass(frozen=True, eq=False)
class Pair:
    """A training table and a test table with the same columns.

    Classes are text; of the test table "" where unknown, None where its file lacks the column.
    `ids` is the column that names the test rows, or None; `notes` are warnings about how the files
    were read.
    """

    x_train: pd.DataFrame
    y_train: np.ndarray
    x_test: pd.DataFrame
    y_test: np.ndarray | None
    ids: pd.Series | None
    notes: tuple[str, ...]


def read_pair(
    train: Path,
    test: Path,
    target: str,
    name: str | None = None,
    drop: Sequence[str] = (),
    shows: bool = False,
) -> Pair:
    """Reads two CSV files with headers and brings them to the same columns.

    `target` has the classes; `name` names the rows and, like the columns in `drop`, is no feature.
    """
    target, name = _name(target), None if name is None else _name(name)
    drop = list(map(_name, drop))
    _check_choice(target, name, drop)
    known, separator = _read(train, shows=shows)
    unknown, other = _read(test, separator, shows)
    _check_column(known, train, target, "--target")
    for column in drop:
        _check_column(known, train, column, "--drop")
    if name is not None:
        _check_column(unknown, test, name, "--id")
    labels = known[target].to_numpy(str)
    _check_labels(labels, train, target)
    notes = _repeated_headers(known, train)
    apart = {target, *drop} | ({name} if name else set())
    unnamed = [c for c in known.columns if c.startswith("Unnamed: ") and c not in apart]
    if unnamed:
        notes.append(f"{train.name}: a column without a name is left out")
    features = [c for c in known.columns if c not in {*apart, *unnamed}]
    if not features:
        raise WeftError(
            f"{train} has no column other than {', '.join(sorted(apart))} to predict from"
        )
    _check_alike(features, unknown, train, test)
    extra = [c for c in unknown.columns if c not in {*features, *apart, *unnamed}]
    if extra:
        notes.append(f"{test.name}: columns that {train.name} lacks are left out: {listed(extra)}")
    commas = separator != ",", other != ","
    x_train, x_test = known[features].copy(), unknown[features].copy()
    for column in features:
        notes += tidy_column(x_train, x_test, column, (train.name, test.name), commas)
    given = _spelled_alike(unknown[target].to_numpy(str), labels) if target in unknown else None
    ids = None if name is None else unknown[name]
    return Pair(x_train, labels, x_test, given, ids, tuple(notes))


# -- one file --------------------------------------------------------------------------------------


def _read(
    path: Path, separator: str = SEPARATORS[0], shows: bool = False
) -> tuple[pd.DataFrame, str]:
    """The cells of a CSV file with a header and rows, as text, and what separates them.

    Text, as the meaning of a cell must not depend on the other cells of its file.
    """
    import pandas as pd

    _check_file(path)
    try:
        frame, separator = _decoded(path, separator, shows)
    except pd.errors.EmptyDataError:
        raise WeftError(f"{path} is empty; it needs a header and rows") from None
    except pd.errors.ParserError as error:
        why = str(error).removeprefix("Error tokenizing data. C error: ").strip()
        raise WeftError(f"{path} is no table: {why}") from None
    except pd.errors.ParserWarning:
        raise _more_fields(path) from None
    if not len(frame):
        raise WeftError(f"{path} has a header, and no rows")
    return frame, separator


def _decoded(path: Path, separator: str, shows: bool) -> tuple[pd.DataFrame, str]:
    _check_kind(path)
    with open_table(path) as (file, _):
        wide = file.read(2) in (b"\xff\xfe", b"\xfe\xff")
    _check_width(path)
    for encoding in ("utf-16",) if wide else ENCODINGS:
        try:
            return _parse(path, separator, encoding, shows)
        except UnicodeError:
            continue
    raise WeftError(f"{path} is no text; save the table as CSV, in UTF-8")


def _parse(path: Path, separator: str, encoding: str, shows: bool) -> tuple[pd.DataFrame, str]:
    import pandas as pd

    read: dict[str, Any] = {"encoding": encoding, "index_col": False, "skipinitialspace": True}
    headers = {
        sep: _read_csv(path, sep=sep, nrows=0, **read).columns for sep in (separator, *SEPARATORS)
    }
    separator = max(headers, key=lambda sep: len(headers[sep]))
    header = headers[separator]
    # pandas renames a second column "a" to "a.1" where it knows the first line as a header.
    names = _read_csv(
        path, sep=separator, header=None, nrows=1, dtype=str, keep_default_na=False, **read
    )
    _check_header(names.iloc[0].tolist(), path)
    most = MOST_CELLS // len(header)
    read |= {"sep": separator, "dtype": str, "nrows": most + 1}
    read |= {"keep_default_na": False, "low_memory": False}
    with warnings.catch_warnings(), progress(f"reading {printable(path.name)}", None, shows):
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            frame = _read_csv(path, **read)
        except pd.errors.ParserWarning:
            extra = MORE
            while extra in header:
                extra += " "
            frame = _read_csv(path, names=[*header, extra], header=0, **read)
            _check_more(frame.pop(extra), path)
        _check_size(len(frame), most, path)
        frame = frame.apply(lambda cells: cells.str.strip()).rename(columns=_name)
    return frame, separator


def _name(column: str) -> str:
    """A column's name without spaces around it, of the letters that other files write it with.

    >>> _name(" o\u0308l") == "\u00f6l"
    True
    """
    return unicodedata.normalize("NFC", column.strip())


def _repeated_headers(frame: pd.DataFrame, path: Path) -> list[str]:
    """A note on rows that have the names of the columns, as of files that were joined."""
    names = np.array(frame.columns, dtype=object)
    rows = np.flatnonzero((frame.to_numpy(object) == names).all(axis=1))
    lines = listed([str(row + 2) for row in rows])
    return [f"{path.name}: the header stands again in line {lines}; delete it"] if len(rows) else []


def _read_csv(path: Path, **options: Any) -> pd.DataFrame:
    import pandas as pd

    with open_table(path) as (file, stream):
        try:
            return pd.read_csv(file, **options)
        except Exception:
            if stream.refused:  # which pandas says in other words
                raise WeftError(stream.refused) from None
            raise


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


def _check_kind(path: Path) -> None:
    first = read_start(path)
    for pattern, kind in FIRST_BYTES.items():
        if re.match(pattern, first, re.DOTALL | re.IGNORECASE):
            raise WeftError(f"{path} is no CSV file but {kind}; save or export the table as CSV")


def _check_width(path: Path) -> None:
    """Refuse a header of too many columns before it is parsed, once for every separator."""
    with open_table(path) as (file, _):
        lines = itertools.islice(file, 100)
        header = next((line for line in lines if line.strip()), b"")
    unquoted = re.sub(rb'"[^"]*"', b"", header)
    _check_columns(1 + max(unquoted.count(sep.encode()) for sep in SEPARATORS), path)


def _check_columns(count: int, path: Path) -> None:
    if count > MOST_COLUMNS:
        raise WeftError(
            f"{path} has {count:,} columns, and weft predict reads at most {MOST_COLUMNS:,}; write"
            " a file with those that matter most: each view of a table sees some 24 features"
        )


def _check_header(columns: Sequence[str], path: Path) -> None:
    if columns[0].lower().startswith("sep="):
        raise WeftError(
            f"{path}: line 1 tells Excel which separator the file has, and is no header: delete it"
        )
    counts = Counter(map(_name, columns))
    twice = [name for name, count in counts.items() if name and count > 1]
    if twice:
        raise WeftError(
            f"{path} has two columns {shown(twice[0])}; spaces around a name do not count: rename"
            " one of them"
        )
    _check_columns(len(columns), path)


def _check_size(rows: int, most: int, path: Path) -> None:
    if rows > most:
        raise WeftError(
            f"{path} has more than {most:,} rows, which are {MOST_CELLS:,} cells, the most that"
            " weft predict reads: train on a stratified sample of the rows, and cut a test file"
            " into several; weft.TabularClassifier has no such limit"
        )


def _check_more(cells: pd.Series, path: Path) -> None:
    if not cells.fillna("").str.strip().eq("").all():
        raise _more_fields(path)


def _more_fields(path: Path) -> WeftError:
    return WeftError(
        f"{path} has rows with more fields than its header, line 1, has names; if line 1 is a"
        " comment, delete it; if the first field names the row, as write.table of R has it, give"
        " that column a name in the header"
    )


def _check_choice(target: str, name: str | None, drop: Sequence[str]) -> None:
    if target == name or target in drop:
        raise WeftError(f"--target {shown(target)} is to be predicted; it cannot be left out too")


def _check_column(frame: pd.DataFrame, path: Path, column: str, option: str) -> None:
    if column not in frame:
        raise WeftError(
            f"{option} {shown(column)}: {path} has no such column"
            f"{did_you_mean(column, map(printable, frame.columns))}"
        )


def _check_labels(labels: np.ndarray, path: Path, target: str) -> None:
    gaps = np.flatnonzero(labels == "")
    if len(gaps):
        lines = listed([str(i + 2) for i in gaps])
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
            f"{test} lacks columns of {train}: {listed(missing)}{near}; --drop leaves a column out"
        )


# -- labels ----------------------------------------------------------------------------------------


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
