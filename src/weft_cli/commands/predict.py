"""`weft predict`: classes of the rows of one CSV file, from those of another."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.markup import escape
from typer.models import OptionInfo

from weft._terminal import Terminal
from weft.errors import WeftError, shown
from weft.inspect.picture import writable_file, writing
from weft.launch import launcher as launch
from weft.launch.environment import Place, already_launched
from weft.layout import Layout
from weft_models.tables.files import Pair, read_pair
from weft_models.tables.source import check_axes

from . import options

if TYPE_CHECKING:
    import pandas as pd

#: `--out -`, as other programs have it.
STDOUT = Path("-")
#: The column of the most probable class.
PREDICTION = "prediction"
#: Endings of files that pandas unpacks, after that of the table itself.
PACKED = (".gz", ".bz2", ".zip", ".xz", ".zst", ".tar")


def _of_tables(label: str, *names: str, **extra: Any) -> OptionInfo:
    return typer.Option(*names, help=label, rich_help_panel="The tables", **extra)


def _of_model(label: str, **extra: Any) -> OptionInfo:
    return typer.Option(help=label, rich_help_panel="The model", **extra)


def predict(
    train: Annotated[
        Path, typer.Argument(metavar="TRAIN.csv", help="Rows whose class is known; a header first.")
    ],
    test: Annotated[
        Path, typer.Argument(metavar="TEST.csv", help="Rows to predict, with the same columns.")
    ],
    target: Annotated[str, _of_tables("The column with the class.", "--target", "-t")],
    out: Annotated[
        Path | None,
        _of_tables(
            "The CSV to write; - for stdout.", "--out", "-o", show_default="TEST-predicted.csv"
        ),
    ] = None,
    name: Annotated[
        str | None,
        _of_tables(
            "A column that names the rows: copied, and no feature.", "--id", show_default=False
        ),
    ] = None,
    drop: Annotated[
        list[str] | None,
        _of_tables("A column to leave out; may be repeated.", "--drop", show_default=False),
    ] = None,
    force: Annotated[
        bool, _of_tables("Replace the file to write, if there is one.", "--force")
    ] = False,
    n_estimators: Annotated[
        int, _of_model("Views of the table that are averaged: more take longer.", min=1)
    ] = 4,
    checkpoint: Annotated[
        str | None, _of_model("Weights: a .safetensors file.", show_default="those that ship")
    ] = None,
    seed: Annotated[int, _of_model("Of the views.", min=0, max=2**32 - 1)] = 0,
    layout: Annotated[
        str | None,
        options.of_run(
            "Shards the training rows: a layout's name, a .toml, or a line such as 'rows: ring=4'.",
            show_default="one device",
        ),
    ] = None,
    nproc: options.Nproc = None,
    device: options.Device = "auto",
    timeout: options.Timeout = None,
) -> None:
    r"""Predict the classes of rows from rows whose class is known.

    Nothing is trained and nothing is downloaded: a transformer that was trained
    on other tables reads the known rows, and the others attend to them. Columns
    may hold numbers, text and dates, with gaps. Writes a CSV with the most
    probable class and the probability of every class. If the test file has the
    target too, prints how good the predictions are.

    Needs scikit-learn and pandas: pip install 'weft-attention\[tables]'

    Examples:

        weft predict train.csv test.csv --target species

        weft predict train.csv test.csv --target churned --id customer --drop phone --out -

        weft predict big.csv test.csv --target y --layout "rows: ring=4"
    """
    _check_packages()
    columns = (target, name, tuple(drop or ()))
    out = _destination(out, train, test, force)
    if layout is not None:
        check_axes(checkpoint, layout)
    first = (already_launched() or Place(0, 1, 0, "")).rank == 0
    tables = read_pair(train, test, *columns, shows=first)
    _check_name(name, tables.y_train)
    chosen = Layout.single() if layout is None else options.layout_named(layout)
    ranks = options.ranks_of(chosen, nproc) if layout is not None else nproc or 1
    if layout is None and ranks > 1:
        raise typer.BadParameter('--nproc needs --layout, such as --layout "rows: ring=-1"')
    place = options.device_for(device, ranks)
    console = Terminal(stderr=True, quiet=not first)
    _announce(console, tables, chosen, ranks, place)
    begin = time.monotonic()
    job = Job(train, test, columns, layout, place, timeout, n_estimators, checkpoint, seed)
    here = ranks == 1 or already_launched() is not None
    found = launch.run(_rank, job, tables if here else None, ranks=ranks)
    if found is None:
        return
    classes, probabilities, warned = found
    _note(console, warned)
    _write(out, tables, classes, probabilities, force)
    seconds = f"[dim]({time.monotonic() - begin:.1f} s)[/]"
    where = "" if out == STDOUT else f"wrote {escape(str(out))} "
    console.print(f"{where}{seconds}", highlight=False, soft_wrap=True)
    if tables.y_test is not None:
        console.print(
            scores_in_words(tables.y_test, classes, probabilities), highlight=False, soft_wrap=True
        )


@dataclass(frozen=True)
class Job:
    """Values that every rank needs."""

    train: Path
    test: Path
    columns: tuple[str, str | None, tuple[str, ...]]
    layout: str | None
    device: str
    timeout: float | None
    n_estimators: int
    checkpoint: str | None
    seed: int


def _rank(job: Job, tables: Pair | None) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """One rank: the classes, their probabilities for every test row, and the warnings."""
    from weft.checkpoint.same_files import agree_on_file
    from weft_models.tables.classifier import TabularClassifier

    tables = tables or read_pair(job.train, job.test, *job.columns)
    bound = None
    if job.layout is not None:
        bound = options.layout_named(job.layout).build(job.device, timeout=job.timeout)
        for path in (job.train, job.test):
            agree_on_file(bound, path)
    classifier = TabularClassifier(
        job.n_estimators,
        checkpoint=job.checkpoint,
        layout=bound,
        device=job.device,
        random_state=job.seed,
        verbose=True,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        classifier.fit(tables.x_train, tables.y_train)
        probabilities = classifier.predict_proba(tables.x_test)
    warned = list(dict.fromkeys(str(one.message) for one in caught))
    return classifier.classes_, probabilities, warned


# -- input and output ------------------------------------------------------------------------------


def _check_packages() -> None:
    for package in ("sklearn", "pandas"):
        if importlib.util.find_spec(package) is None:
            raise WeftError(
                "weft predict needs scikit-learn and pandas: pip install 'weft-attention[tables]'"
            )


def _destination(out: Path | None, train: Path, test: Path, force: bool) -> Path:
    if out == STDOUT:
        return out
    plain = test.with_suffix("") if test.suffix in PACKED else test
    out = writable_file(out or test.with_name(f"{plain.stem}-predicted.csv"))
    if out.exists() and any(path.exists() and out.samefile(path) for path in (train, test)):
        raise WeftError(f"--out {shown(str(out))} would replace an input; give another name")
    if out.is_symlink():
        raise WeftError(
            f"{shown(str(out))} is a link to {shown(os.readlink(out))}, which is not written"
            " through; --out gives another name"
        )
    if out.exists() and not force:
        raise WeftError(f"{shown(str(out))} exists; --force replaces it, --out gives another name")
    return out


def _check_name(name: str | None, labels: np.ndarray) -> None:
    written = {PREDICTION, *map(_probability, np.unique(labels))}
    if name in written:
        raise WeftError(
            f"--id {shown(name)}: a column of the predictions has this name; rename it in the"
            " test file"
        )


def _note(console: Terminal, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False, soft_wrap=True)


def _announce(console: Terminal, tables: Pair, layout: Layout, ranks: int, place: str) -> None:
    _note(console, tables.notes)
    rows, columns = tables.x_train.shape
    where = f"[bold]{escape(layout.name)}[/]: {ranks} ranks on {place}" if layout.mesh else place
    console.print(
        f"{_counted(len(tables.x_test), 'row')} from {rows:,} with {_counted(columns, 'column')}"
        f" and {_counted(len(np.unique(tables.y_train)), 'class', 'classes')}, on {where}",
        highlight=False,
        soft_wrap=True,
    )


def _counted(count: int, one: str, several: str = "") -> str:
    """A number of things.

    >>> _counted(1, "row"), _counted(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def prediction_table(tables: Pair, classes: np.ndarray, probabilities: np.ndarray) -> pd.DataFrame:
    """The written table: rows' names, the most probable class, the probability of every class."""
    import pandas as pd

    columns = {} if tables.ids is None else {tables.ids.name: tables.ids.to_numpy()}
    columns[PREDICTION] = classes[probabilities.argmax(axis=1)]
    for label, column in zip(classes, probabilities.T):
        columns[_probability(label)] = column.round(6)
    return pd.DataFrame(columns)


def _probability(label: str) -> str:
    return f"probability_{label}"


def _write(
    out: Path, tables: Pair, classes: np.ndarray, probabilities: np.ndarray, force: bool
) -> None:
    table = prediction_table(tables, classes, probabilities).map(inert)
    table.columns = [inert(name) for name in table.columns]
    if out == STDOUT:
        table.to_csv(sys.stdout, index=False)
        return
    # Without --force, another program's file of this moment is no leftover of ours.
    with writing(out, new=not force) as partial:
        inside = {"archive_name": out.stem} if out.suffix in (".zip", ".tar") else {}
        table.to_csv(partial, index=False, compression={"method": "infer", **inside})


def inert(cell: Any) -> Any:
    """A cell of a CSV that no spreadsheet takes for a formula: a quote before what begins as one.

    >>> inert("=cmd|' /C calc'!A0"), inert("-1.5"), inert("plain")
    ("'=cmd|' /C calc'!A0", '-1.5', 'plain')
    """
    if not isinstance(cell, str) or cell[:1] not in {*"=+-@\t\r"}:
        return cell
    with contextlib.suppress(ValueError):
        float(cell)
        return cell
    return f"'{cell}"


def scores_in_words(wanted: np.ndarray, classes: np.ndarray, probabilities: np.ndarray) -> str:
    """Accuracy, AUC (mean of one class against the rest) and log loss on test rows with a class.

    AUC and log loss are of rows whose class the training rows have.

    >>> wanted, p = np.array(["a", "b", ""]), np.array([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]])
    >>> scores_in_words(wanted, np.array(["a", "b"]), p)
    'on 2 test rows whose class is given: accuracy 100.0 %, AUC 1.000, log loss 0.164'
    """
    from sklearn.metrics import log_loss

    from weft_models.tables.scores import auc

    given = wanted != ""
    wanted, probabilities = wanted[given], probabilities[given]
    if not len(wanted):
        return "no test row has a class to compare with"
    right = classes[probabilities.argmax(axis=1)] == wanted
    parts = [f"accuracy {right.mean():.1%}".replace("%", " %")]
    known = np.isin(wanted, classes)
    wanted, probabilities = wanted[known], probabilities[known]
    area = auc(np.searchsorted(classes, wanted), probabilities)
    if not math.isnan(area):
        parts.append(f"AUC {area:.3f}")
    if len(wanted) and len(classes) > 1:
        parts.append(f"log loss {log_loss(wanted, probabilities, labels=classes):.3f}")
    unseen = f" ({(~known).sum()} of them of classes that no training row has)"
    count = f"{_counted(len(right), 'test row')} whose class is given"
    count += "" if known.all() else unseen
    return f"on {count}: {', '.join(parts)}"
