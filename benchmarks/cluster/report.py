"""The cluster's results as markdown, JSON and a plot."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

ABOUT = """# A cluster on one machine

Forward + backward of full attention, 8 heads, head dim 64, fp32, batch 1: seconds (median), and
how many times faster than weft's ring. Hosts are processes with one thread in network namespaces,
joined by links that `tc tbf` limits both ways; a node's uplink is shared by its hosts. Contestants
take turns within each repeat. Each output and gradient was compared with an fp64 reference; where
one differs by more than 1e-4 of its largest entry the table says which.

"""


def scene(scene, results) -> str:
    """One scene as a markdown table."""
    ring = next((r.median for r in results if r.what == "ring" and not r.peer), math.nan)
    lines = [
        f"## {scene.title}",
        "",
        "| | what | s | min to max | x ring | result |",
        "|---|---|---:|---|---:|---|",
    ]
    for r in sorted(results, key=lambda r: (not r.seconds, r.median)):
        if not r.seconds:
            lines.append(f"| {r.name} | {r.what} | | | | {r.problem} |")
            continue
        range_ = f"{min(r.seconds):.2f} to {max(r.seconds):.2f}"
        verdict = "exact" if not r.wrong else wrong(r)
        lines.append(
            f"| {r.name} | {r.what} | {r.median:.2f} | {range_} | {ring / r.median:.2f} | "
            f"{verdict} |"
        )
    return "\n".join(lines) + "\n"


def wrong(result) -> str:
    """Which tensors are wrong, and by how much."""
    found = [f"{name} by {result.errors[name]:.2g}" for name in result.wrong]
    return "**wrong**: " + ", ".join(found)


def write(folder: Path, played, data, seconds: float) -> None:
    """cluster.md, cluster.json, cluster.png."""
    folder.mkdir(parents=True, exist_ok=True)
    repeats = max(len(r.seconds) for _, results in played for r in results)
    foot = f"Medians of {repeats}; {os.cpu_count()} cores; the whole run took {seconds:.0f} s.\n"
    text = ABOUT + "\n".join(scene(*pair) for pair in played) + "\n" + foot
    (folder / "cluster.md").write_text(text)
    (folder / "cluster.json").write_text(json.dumps(data, indent=1) + "\n")
    plot(folder / "cluster.png", played)
    print(foot)


def plot(path: Path, played) -> None:
    """A bar per contestant, a panel per scene; peers hatched, wrong results grey."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = 2
    rows = -(-len(played) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(13, 3.6 * rows), squeeze=False)
    for ax in axes.flat[len(played) :]:
        ax.axis("off")
    for ax, (where, results) in zip(axes.flat, played):
        shown = sorted((r for r in results if r.seconds), key=lambda r: -r.median)
        for i, r in enumerate(shown):
            color = "0.75" if r.wrong else ("#c98" if r.peer else "#468")
            ax.barh(i, r.median, color=color, hatch="//" if r.peer else None, edgecolor="white")
            ax.text(r.median, i, f" {r.median:.2f}" + (" wrong" if r.wrong else ""), va="center")
        ax.set_yticks(range(len(shown)), [r.name for r in shown], fontsize=8)
        ax.set_title(where.title, fontsize=9)
        ax.set_xlabel("seconds, forward + backward")
        ax.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
