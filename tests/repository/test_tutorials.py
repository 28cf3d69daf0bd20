"""Every tutorial runs top to bottom, as committed; notebooks are what their scripts say."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch

TUTORIALS = Path(__file__).parents[2] / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))

spec = importlib.util.spec_from_file_location("build", TUTORIALS / "build.py")
build = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = build
spec.loader.exec_module(build)


#: Those that run in every run of the tests: short ones, which together use most of the library.
SAMPLE = ("01_first_ring", "02_strategies")


def by_name(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda p: p.stem)


def in_turn(path):
    marks = () if path.stem in SAMPLE else pytest.mark.slow
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.parametrize("path", map(in_turn, NOTEBOOKS))
def test_a_tutorial_runs_top_to_bottom(path, tmp_path, monkeypatch):
    """Its own asserts hold, and a reader sees a picture."""
    monkeypatch.chdir(tmp_path)
    outputs = build.run(build.read(path), path.stem)
    assert any("image/png" in out.get("data", {}) for cell in outputs for out in cell)
    assert torch.get_default_dtype() == torch.float32


@by_name(NOTEBOOKS)
def test_notebook_has_the_cells_of_its_script_and_its_outputs(path):
    assert build.read(path) == build.split(path.with_suffix(".py").read_text())
    assert path.stat().st_size <= build.LARGEST
    cells = json.loads(path.read_text())["cells"]
    assert any(cell.get("outputs") for cell in cells)


def test_every_script_has_a_notebook():
    assert [s.stem for s in build.scripts()] == [n.stem for n in NOTEBOOKS]


def test_the_readme_lists_every_tutorial_in_order():
    listed = re.findall(r"\]\((\w+)\.ipynb\)", (TUTORIALS / "README.md").read_text())
    assert listed == [n.stem for n in NOTEBOOKS]
