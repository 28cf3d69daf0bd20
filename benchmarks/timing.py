"""Timing of several sides that take turns, so that other load affects all of them."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def interleaved(sides: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every side, one call each per repeat, after one call each to warm up."""
    for side in sides.values():
        side()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: Mapping[str, list[float]], side: str, yardstick: str) -> float:
    """The median over repeats of side / yardstick, each pair measured one after the other."""
    return statistics.median(a / b for a, b in zip(seconds[side], seconds[yardstick]))


def save(name: str, data: object) -> None:
    """Write results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
