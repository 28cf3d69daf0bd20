"""The error of predicted times on named hardware: measured rows against the clock.

`benchmarks/results/ledger.md` has the rows; `python -m benchmarks.ledger --write` makes both.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

from weft.declare.hardware import Hardware


@dataclass(frozen=True)
class Checked:
    """A set of measured rows, and by how much predictions miss them."""

    name: str  # of the set in the ledger
    hardware: str  # the name of the hardware file that predicted them
    devices: tuple[int, int]  # the fewest and the most of a row
    tokens: tuple[int, int]  # likewise
    rows: int  # how many were predicted, without those that numbers were fitted on
    mean: float  # of the errors' sizes, predicted over measured less 1
    worst: float  # of them
    bias: float  # the mean error; below 0 where predictions are too quick (of times)
    #: "call": attention calls and what was fitted beside them; "step": whole steps of transformers
    #: models, with nothing fitted
    what: str = "call"

    def __str__(self) -> str:
        said = {"call": "time of attention", "step": "time of a step", "memory": "memory"}
        devices, tokens = (
            f"{low:,}" if low == high else f"{low:,} to {high:,}"
            for low, high in (self.devices, self.tokens)
        )
        rows = f"{self.rows} row{'s' * (self.rows > 1)}"
        return (
            f"checked on {self.hardware}, {devices} devices, {tokens} tokens ({self.name}): "
            f"{said[self.what]}, {rows}, mean error {self.mean:.0%}, worst {self.worst:.0%}"
        )


def nearest(hardware: str, ranks: int, label: str = "call") -> Checked | None:
    """The set of measured rows nearest to a case, or None where nothing like it was measured.

    A set is near where its hardware file is the same and its ranks reach as far, as rows inside one
    node say nothing about several, or are from fewer to more.

    >>> print(nearest("b200-8", 8).name, nearest("ethernet-laptops", 8))
    simumax None
    """
    near = [each for each in _sets() if each.hardware == hardware and each.what == label]
    if not near:
        return None
    machine = Hardware.load(hardware)
    level = machine.between(0, ranks - 1)

    def reaches(each: Checked) -> bool:
        low, high = each.devices
        return low <= ranks <= high or machine.between(0, high - 1) == level

    near = list(filter(reaches, near))
    return min(near, key=lambda each: _distance(each, ranks), default=None)


def _distance(checked: Checked, ranks: int) -> tuple[float, int]:
    low, high = checked.devices
    return abs(math.log(min(max(ranks, low), high) / ranks)), -checked.rows


@functools.cache
def _sets() -> tuple[Checked, ...]:
    text = (Path(__file__).parent / "ledger.json").read_text()
    pairs = ("devices", "tokens")
    return tuple(Checked(**row | {k: tuple(row[k]) for k in pairs}) for row in json.loads(text))
