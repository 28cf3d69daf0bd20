"""The report of `benchmarks.accuracy`: intervals, ranks, tables."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
from scipy import stats

#: Sides as people call them, in the order of the tables.
NAMES = {
    "weft": "weft",
    "weft_calibrated": "weft, calibrated",
    "logistic": "logistic regression",
    "logistic_cv": "logistic regression (chosen)",
    "knn": "k-nearest neighbours (chosen)",
    "forest": "random forest",
    "boosting": "gradient boosting",
    "boosting_cv": "gradient boosting (chosen)",
}
METRICS = {
    "auc": "AUC",
    "accuracy": "accuracy",
    "log_loss": "log loss",
    "calibration_error": "calibration error",
}
#: Of these a small number is good.
LOSSES = ("log_loss", "calibration_error")
#: Differences of fold means below this are ties.
TIE = 0.001
RESAMPLES = 10_000


def fold_interval(values: list[float]) -> tuple[float, float]:
    """Mean over folds, and half its 95 % interval by Student's t; NaN of one number.

    Folds share training rows, so the interval is a little too narrow.
    """
    if len(values) < 2:
        return float(np.mean(values)), float("nan")
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return float(np.mean(values)), float(half)


def table_interval(
    values: np.ndarray, statistic: Callable[..., np.ndarray] = np.mean
) -> tuple[float, float]:
    """95 % bootstrap interval over tables of the mean (or median) of a number per table."""
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(statistic(np.asarray(values)[drawn], axis=1), (0.025, 0.975))
    return float(low), float(high)


def means(results: dict, metric: str) -> tuple[list[str], list[str], np.ndarray]:
    """(sides, tables, means over folds) of the tables that every side has measured.

    The means are (tables, sides). A side without any of the tables is left out.
    """
    wanted = results["tables"]
    sides = [side for side in NAMES if wanted.keys() & results["sides"].get(side, {}).keys()]
    tables = [
        t for t in wanted if sides and all(metric in results["sides"][s].get(t, {}) for s in sides)
    ]
    values = [[np.mean(results["sides"][s][t][metric]) for s in sides] for t in tables]
    return sides, tables, np.array(values).reshape(len(tables), len(sides))


def ranks(values: np.ndarray, metric: str) -> np.ndarray:
    """Rank of every side on every table, 1 the best; equal sides share the mean rank."""
    return stats.rankdata(values if metric in LOSSES else -values, axis=1)


def duels(values: np.ndarray, metric: str, side: int, other: int) -> tuple[int, int, int]:
    """Tables on which a side is ahead of another, as good, and behind."""
    ahead = values[:, side] - values[:, other]
    ahead = -ahead if metric in LOSSES else ahead
    return int((ahead >= TIE).sum()), int((abs(ahead) < TIE).sum()), int((ahead <= -TIE).sum())


def summary(results: dict) -> str:
    """The summary as a Markdown table: means over tables with intervals, ranks, seconds."""
    sides, tables, auc = means(results, "auc")
    if not tables:
        return "No table has been measured by every side."
    ranked = ranks(auc, "auc")
    lines = [
        "| side | " + " | ".join(METRICS.values()) + " | mean rank (AUC) | best on | CPU seconds |",
        "|---" + "|---:" * (len(METRICS) + 3) + "|",
    ]
    best = auc >= auc.max(axis=1, keepdims=True) - TIE
    for i, side in enumerate(sides):
        cells = [_between(means(results, metric)[2][:, i], ".3f") for metric in METRICS]
        cells += [_between(ranked[:, i], ".2f"), str(int(best[:, i].sum()))]
        cells.append(f"{np.median(means(results, 'cpu_seconds')[2][:, i]):.2f}")
        name = f"**{NAMES[side]}**" if side == "weft" else NAMES[side]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def comparisons(results: dict) -> str:
    """Ours against every other side: differences with intervals, wins, ties and losses."""
    sides, _, _ = means(results, "auc")
    if "weft" not in sides:
        return "weft: not yet run."
    lines = [
        "| weft against | " + " | ".join(METRICS.values()) + " |",
        "|---" * (1 + len(METRICS)) + "|",
    ]
    sentences = []
    for i, side in enumerate(sides):
        if side == "weft":
            continue
        cells = []
        for metric in METRICS:
            values = means(results, metric)[2]
            difference = values[:, sides.index("weft")] - values[:, i]
            counts = "/".join(map(str, duels(values, metric, sides.index("weft"), i)))
            cells.append(_between(difference, "+.3f") + (f"; {counts}" if len(values) else ""))
            if metric == "auc":
                sentences.append(_sentence(NAMES[side], difference, counts))
        lines.append(f"| {NAMES[side]} | " + " | ".join(cells) + " |")
    return "\n".join([*sentences, "", *lines])


def _sentence(name: str, difference: np.ndarray, counts: str) -> str:
    low, high = table_interval(difference)
    if low > 0:
        verdict = f"weft is ahead of {name}"
    elif high < 0:
        verdict = f"**{name} is ahead of weft**"
    else:
        verdict = f"the tables do not tell weft and {name} apart"
    return (
        f"- Mean AUC: {verdict} ({difference.mean():+.3f}, {low:+.3f} to {high:+.3f}; "
        f"wins/ties/losses {counts})."
    )


def _between(values: np.ndarray, how: str) -> str:
    if not len(values):
        return "not measured"
    low, high = table_interval(values)
    return f"{format(values.mean(), how)} ({format(low, how)} to {format(high, how)})"


def per_table(results: dict, metric: str) -> str:
    """A Markdown table of a metric: a row for each table, a column for each side."""
    sides = [side for side in NAMES if results["sides"].get(side)]
    lines = [
        "| table | rows | features | classes | " + " | ".join(NAMES[s] for s in sides) + " |",
        "|---" + "|---:" * (3 + len(sides)) + "|",
    ]
    for name, facts in results["tables"].items():
        measured = {s: results["sides"][s].get(name) for s in sides}
        found = {s: fold_interval(m[metric]) for s, m in measured.items() if m and metric in m}
        sign = -1 if metric in LOSSES else 1
        top = max((sign * mean for mean, _ in found.values()), default=0)
        cells = []
        for side in sides:
            if side not in found:
                cells.append("")
                continue
            mean, half = found[side]
            text = f"{mean:.3f}" if np.isnan(half) else f"{mean:.3f} ± {half:.3f}"
            cells.append(f"**{text}**" if sign * mean >= top - TIE else text)
        sizes = (facts["rows"], facts["features"], facts["classes"])
        lines.append(f"| {name} | " + " | ".join([*map(str, sizes), *cells]) + " |")
    return "\n".join(lines)


def page(results: dict, protocol: str) -> str:
    """results/accuracy.md."""
    versions = ", ".join(f"{name} {value}" for name, value in results["environment"].items())
    parts = [
        "# Accuracy on real tables",
        "A summary is over the tables that every side has been measured on. Means and ranks "
        "have 95 % bootstrap intervals over tables, in brackets. *Best on*: tables on which no "
        f"side's AUC is more than {TIE} higher. *CPU seconds*: fit and prediction of a fold, "
        "the median over tables of the mean over folds.",
    ]
    parts += _of_weft(results)
    parts += ["## How it was measured", protocol, f"Made with: {versions}."]
    for metric, name in METRICS.items():
        parts += [f"## {name[0].upper()}{name[1:]} per table", per_table(results, metric)]
    parts.append(
        "Means over 5 folds ± half of a 95 % t interval; calibration error is of all folds "
        "together. Folds share training rows, so these intervals are a little too narrow. Bold: "
        "the best, and what ties with it."
    )
    return "\n\n".join(parts) + "\n"


def _of_weft(results: dict) -> list[str]:
    """The summary, and our results against the others."""
    _, tables, _ = means(results, "auc")
    measured = [results["sides"].get("weft", {}).get(name) for name in results["tables"]]
    ours = {entry["made_by"] for entry in measured if entry}
    return [
        f"{len(tables)} of {len(results['tables'])} tables. Weft as measured:"
        f" {'; '.join(sorted(ours)) or 'not yet run'}.",
        summary(results),
        "Differences are weft's number less the other's, so a negative loss or error is good; then "
        f"wins/ties/losses, where a tie is a difference below {TIE}.",
        comparisons(results),
    ]


def as_json(results: dict) -> str:
    """The results with a line for each table, and a line for each table of a side."""

    def lines(entries: dict, indent: str) -> str:
        body = ",\n".join(f"{indent}{json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items())
        return "{\n" + body + "\n" + indent[:-1] + "}"

    sides = ",\n".join(
        f"  {json.dumps(side)}: {lines(measured, '   ')}"
        for side, measured in results["sides"].items()
    )
    return (
        f'{{\n "environment": {json.dumps(results["environment"])},\n'
        f' "tables": {lines(results["tables"], "  ")},\n'
        f' "sides": {{\n{sides}\n }}\n}}\n'
    )
