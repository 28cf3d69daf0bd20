"""Builds the tutorials: each `NN_name.py` becomes the notebook `NN_name.ipynb`, run top to bottom.

A script is in percent format: `# %% [markdown]` opens a cell of text (comment lines), `# %%` a
cell of code. Cells run in order in one namespace; what they print, the value of a last expression
and every open figure are kept in the notebook, as Jupyter does. Any exception ends the build.

    python tutorials/build.py              all of them
    python tutorials/build.py 01 05        those whose names begin so
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import linecache
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

HERE = Path(__file__).parent
_MARK = re.compile(r"^# %%(?P<text> \[markdown\])?\s*$", re.MULTILINE)

#: Notebooks stay small enough to be read in a browser and kept under version control.
LARGEST = 150_000


@dataclass(frozen=True)
class Cell:
    """One cell of a tutorial: text in Markdown, or code."""

    is_code: bool
    source: str


def scripts() -> list[Path]:
    """The tutorials' sources, in reading order."""
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


def split(script: str) -> list[Cell]:
    """The cells of a percent-format script.

    >>> split("# %% [markdown]\\n# # Hello\\n# %%\\n1 + 1\\n")
    [Cell(is_code=False, source='# Hello'), Cell(is_code=True, source='1 + 1')]
    """
    marks = list(_MARK.finditer(script))
    ends = [mark.start() for mark in marks[1:]] + [len(script)]
    cells = []
    for mark, end in zip(marks, ends, strict=True):
        body = script[mark.end() : end].strip("\n")
        if mark["text"]:
            body = "\n".join(re.sub(r"^# ?", "", line) for line in body.splitlines())
        cells.append(Cell(not mark["text"], body.strip("\n")))
    return [cell for cell in cells if cell.source]


def run(cells: list[Cell], name: str) -> list[list[dict[str, Any]]]:
    """Run the code cells in order; the outputs of every cell, in the notebook format."""
    plt.switch_backend("agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    return [_run_cell(cell, f"{name} cell {i}", namespace) for i, cell in enumerate(cells)]


def _run_cell(cell: Cell, title: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    if not cell.is_code:
        return []
    lines = cell.source.splitlines(keepends=True)
    linecache.cache[title] = (len(cell.source), None, lines, title)  # for tracebacks
    tree = ast.parse(cell.source, title)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, title, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), title, "eval"), namespace)
    return [*_text(printed.getvalue(), value), *_figures(value)]


def _text(printed: str, value: Any) -> list[dict[str, Any]]:
    outputs = []
    if printed:
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(printed)})
    if value is not None and not isinstance(value, Figure):
        data = {"text/plain": _lines(repr(value))}
        outputs.append(
            {
                "output_type": "execute_result",
                "data": data,
                "metadata": {},
                "execution_count": None,
            }
        )
    return outputs


def _figures(value: Any) -> list[dict[str, Any]]:
    figures = [plt.figure(number) for number in plt.get_fignums()]
    if isinstance(value, Figure) and value not in figures:
        figures.append(value)
    outputs = []
    for figure in figures:
        text = base64.b64encode(_small_png(figure)).decode()
        outputs.append({"output_type": "display_data", "data": {"image/png": text}, "metadata": {}})
    plt.close("all")
    return outputs


def _small_png(figure: Any) -> bytes:
    """A figure as a PNG of at most 256 colors, less than half of the usual size."""
    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=80, bbox_inches="tight")
    Image.open(full).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, "png")
    return small.getvalue()


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def notebook(cells: list[Cell], outputs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Cells and their outputs as the content of an .ipynb file (nbformat 4.5)."""
    python = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {
        "cells": [
            _notebook_cell(i, cell, out)
            for i, (cell, out) in enumerate(zip(cells, outputs, strict=True))
        ],
        "metadata": {"kernelspec": python, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _notebook_cell(index: int, cell: Cell, outputs: list[dict[str, Any]]) -> dict[str, Any]:
    common = {"id": f"cell-{index}", "metadata": {}, "source": _lines(cell.source)}
    if not cell.is_code:
        return {"cell_type": "markdown", **common}
    return {"cell_type": "code", **common, "execution_count": None, "outputs": outputs}


def read(path: Path) -> list[Cell]:
    """The cells of a notebook file."""
    content = json.loads(path.read_text())
    return [Cell(c["cell_type"] == "code", "".join(c["source"])) for c in content["cells"]]


def build(script: Path) -> Path:
    """Run one tutorial and write its notebook. Raises what a cell raises, or if it is too large."""
    cells = split(script.read_text())
    text = json.dumps(notebook(cells, run(cells, script.stem)), indent=1, ensure_ascii=False)
    if len(text) > LARGEST:
        raise ValueError(f"{script.stem}: the notebook has {len(text)} bytes, above {LARGEST}")
    target = script.with_suffix(".ipynb")
    target.write_text(text + "\n")
    return target


def main(wanted: list[str]) -> None:
    """Build the tutorials whose names begin as given, or all."""
    for script in scripts():
        if not wanted or script.name.startswith(tuple(wanted)):
            start = time.monotonic()
            path = build(script)
            kilobytes = path.stat().st_size / 1000
            print(f"{path.name}: {time.monotonic() - start:.1f} s, {kilobytes:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
