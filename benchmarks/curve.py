"""The curves of a training run, from its folder: `python -m benchmarks.curve RUN [--out PICTURE]`.

    python -m benchmarks.curve runs/table_classifier-one-device
    python -m benchmarks.curve RUN --out benchmarks/results/table_classifier.png

Loss and accuracy of the steps (running means over 50), and AUC on real tables where the run tried
itself on some. Steps that a resumed run repeated count once, as it repeated them. Prints the hours
between its steps, without those in which it stood still for over a minute.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

MEAN_OVER, PAUSE = 50, 60.0


def read(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """(step, value, wall time) of every curve; of a step that was repeated, the later."""
    curves: dict[str, dict[int, tuple[float, float]]] = {}
    for file in sorted(folder.glob("events*")):
        events = EventAccumulator(str(file), {"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            for e in events.Scalars(tag):
                curves.setdefault(tag, {})[e.step] = (e.value, e.wall_time)
    return {tag: [(s, *curve[s]) for s in sorted(curve)] for tag, curve in curves.items()}


def hours(curve: list[tuple[int, float, float]]) -> float:
    """Hours of training, pauses left out."""
    gaps = np.diff(sorted(wall for _, _, wall in curve))
    return float(gaps[gaps < PAUSE].sum() / 3600)


def draw(curves: dict[str, list[tuple[int, float, float]]]) -> Figure:
    """Loss, accuracy and AUC over steps."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    for axes, tag, label in zip(
        figure.subplots(1, 2), ("loss", "accuracy"), ("cross entropy", "accuracy, AUC")
    ):
        steps, values, _ = map(np.array, zip(*curves[tag]))
        kernel = np.ones(MEAN_OVER) / MEAN_OVER
        axes.plot(steps, values, color="0.85", linewidth=0.7)
        mean = np.convolve(values, kernel, "valid")
        axes.plot(steps[MEAN_OVER - 1 :], mean, label=f"{tag} on drawn tables")
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.3)
    for tag, label in (("accuracy/mean", "accuracy"), ("AUC/mean", "AUC")):
        if tag in curves:
            steps, values, _ = zip(*curves[tag])
            axes.plot(steps, values, "o-", label=f"{label} on real tables")
    for one in figure.axes:
        one.legend()
    return figure


def main() -> None:
    """Draw, and print what the run was."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of a run of weft train")
    parser.add_argument("--out", type=Path, help="default: curve.png in the folder")
    given = parser.parse_args()
    curves = read(given.run)
    out = given.out or given.run / "curve.png"
    draw(curves).savefig(out, dpi=120)
    loss = [value for _, value, _ in curves["loss"][-200:]]
    print(
        f"{len(curves['loss']):,} steps, {hours(curves['loss']):.2f} hours; loss of the last"
        f" {len(loss)} steps {np.mean(loss):.3f}; {out}"
    )


if __name__ == "__main__":
    main()
