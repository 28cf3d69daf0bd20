"""The balance benchmark's results as markdown, JSON and a plot."""

from __future__ import annotations

import json
import os
from pathlib import Path

ABOUT = """# How much traffic attention hides

Forward and backward of full attention, 8 heads, head dim 64, fp32, batch 1, on hosts that are
processes in network namespaces joined by links which `tc tbf` limits both ways. The same program
runs *whole*; as *compute* alone, on a transport that moves nothing; and as *traffic* alone, with a
kernel that computes nothing (merges of partial results run in all three). The three take turns, and
the table has medians of {repeats}, in seconds of forward + backward. **Wall / larger** is 1
where the smaller part is hidden whole. Links are as quick as makes traffic alone about half of,
equal to and twice compute alone, and the layout has these rates as its `[rates]`. In brackets:
what the program's own timeline says at these rates. The bound for both passes together is the
larger of the two sums; *repeats* has the least and the largest ratio of one repeat.

Traffic alone varies, and often takes longer than its bytes at the calibrated rate, which raises the
bound; so a ratio can even come out below 1. *Strict* takes these bytes at that rate instead of the
measured traffic alone: a bound that messages alone do not reach either.

A ring of P hosts computes P blocks and receives P - 1 chunks. Of two hosts each waits for a single
chunk, which takes 2.3 forward blocks where the sums are equal, and has one own block to hide it
behind: no order of whole chunks gets below 1.5 there. So chunks travel in two halves where the
planner finds that quicker; *cut* says in how many sub_chunks queries x keys do, forward and
backward.

Where cores compute, every host has one core, or half of one, and its messages cost time on it too:
behind traffic alone stand the seconds that a host's process uses of a core for it.
Where kernels wait like a device, they sleep as long as a device of that speed would compute and use
no core, so that more hosts than cores can be shown.

"""

HEAD = (
    "| layout | Mbit/s | cut | compute | traffic (core) | whole "
    "| wall/larger: forward | back | both | repeats | strict |",
    "|---|---:|---|---:|---:|---:|---:|---:|---:|---|---:|",
)
#: the bound that wall / larger is held against where the parts are equal
GOAL = 1.25


def table(scene, cases, load: float) -> str:
    """One scene as a markdown table."""
    lines = [f"## {scene.title}", "", *HEAD]
    for c in cases:
        compute, traffic, whole = (c.median(side, 2) for side in ("compute", "traffic", "whole"))
        parts = f"{compute:.2f} | {traffic:.2f} ({c.core('traffic'):.2f}) | {whole:.2f}"
        ratios = " | ".join(f"{c.ratio(i):.2f} ({c.planned(i):.2f})" for i in range(3))
        range_ = f"{min(c.ratios()):.2f} to {max(c.ratios()):.2f}"
        cut = ", ".join("x".join(map(str, f.sub_chunks)) for f in c.facts)
        row = (c.line, f"{c.rate:.0f}", cut, parts, ratios, range_, f"{c.strict():.2f}")
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", f"Load average of the machine before the scene: {load:.1f}."]
    return "\n".join(lines) + "\n"


def write(folder: Path, played, data, args, seconds: float) -> None:
    """balance.md, balance.json, balance.png."""
    folder.mkdir(parents=True, exist_ok=True)
    foot = f"{os.cpu_count()} cores, hosts at nice {args.nice}; all took {seconds:.0f} s.\n"
    tables = "\n".join(table(*entry) for entry in played)
    (folder / "balance.md").write_text(ABOUT.format(repeats=args.repeats) + tables + "\n" + foot)
    (folder / "balance.json").write_text(json.dumps(data, indent=1) + "\n")
    plot(folder / "balance.png", played)
    print(foot)


def plot(path: Path, played) -> None:
    """wall / larger over traffic / compute, a panel per scene; a rhomb is both passes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(2, len(played))
    rows = -(-len(played) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(6.5 * columns, 3.6 * rows), squeeze=False, sharey=True
    )
    for ax in axes.flat[len(played) :]:
        ax.axis("off")
    for ax, (scene, cases, _) in zip(axes.flat, played):
        for color, line in enumerate(dict.fromkeys(c.line for c in cases)):
            for which, marker in enumerate("^vD"):
                mine = [c for c in cases if c.line == line]
                x = [c.median("traffic", which) / c.median("compute", which) for c in mine]
                y = [c.ratio(which) for c in mine]
                both = which == 2
                style = {"ls": "-" if both else "", "ms": 6 if both else 4}
                label = line if both else None
                ax.plot(x, y, color=f"C{color}", marker=marker, label=label, **style)
        ax.axhline(GOAL, color="0.5", ls="--", lw=1)
        ax.axhline(1.0, color="0.8", lw=1)
        ax.set_xscale("log", base=2)
        ax.set_title(scene.title, fontsize=9)
        ax.set_xlabel("traffic alone / compute alone")
        ax.set_ylabel("wall / larger of the two")
        ax.legend(fontsize=8)
    figure.suptitle("up: forward, down: backward, rhomb: both", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
