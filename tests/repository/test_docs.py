"""The site builds without warnings, docstring examples run, and pages name real things."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import weft
import weft.checkpoint
import weft.losses
import weft.models
import weft.nn
import weft.pair
import weft.routing
import weft.testing
import weft.train
from weft._doors import PACKAGES

ROOT = Path(__file__).parents[2]
PUBLIC = (
    weft,
    weft.checkpoint,
    weft.losses,
    weft.models,
    weft.nn,
    weft.pair,
    weft.routing,
    weft.testing,
    weft.train,
)

#: module -> the package of an optional extra that it needs, or its examples
OPTIONAL = {
    "weft_integrations.transformers": "transformers",
    "weft_integrations.transformers.calls": "transformers",
    "weft_integrations.transformers.hooks": "transformers",
    "weft_integrations.transformers.losses": "transformers",
    "weft_integrations.transformers.masks": "transformers",
    **{
        f"weft_integrations.transformers.{name}": "transformers"
        for name in ("consistency", "defaults", "interface", "lazy", "noise", "replicated", "rows")
    },
    **{
        f"weft_integrations.transformers.{name}": "transformers"
        for name in ("cache", "cache_layers", "decoding", "generation")
    },
    "weft_integrations.transformers.exactness": "transformers",
    "weft_integrations.transformers.whole": "transformers",
    "weft_integrations.trainers.accelerators": "accelerate",
    "weft_integrations.trainers.subclass": "transformers",
    "weft_integrations.diffusers": "diffusers",
    "weft_integrations.tabular": "tabpfn",
    "weft_planner.hf_config": "transformers",
}


def modules() -> list[str]:
    found = [
        module.name
        for name in PACKAGES
        for module in pkgutil.walk_packages([str(ROOT / "src" / name)], f"{name}.")
    ]
    return [*PACKAGES, *(name for name in found if not name.endswith("__main__"))]


@pytest.mark.parametrize("name", modules())
def test_every_example_in_a_docstring_runs(name):
    if name in OPTIONAL:
        pytest.importorskip(OPTIONAL[name])
    torch.manual_seed(0)
    if torch.distributed.is_initialized():  # left by another example
        torch.distributed.destroy_process_group()
    module = importlib.import_module(name)
    names = {"torch": torch, "weft": weft} | vars(module)
    failed, _ = doctest.testmod(
        module, globs=names, optionflags=doctest.NORMALIZE_WHITESPACE, report=True
    )
    assert failed == 0


@pytest.mark.sample
def test_the_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "docs/build.py", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    home = (tmp_path / "index.html").read_text()
    assert "DTensor" in home
    for stem in ("01_first_ring", "05_what_moves"):
        page = (tmp_path / "tutorials" / stem / "index.html").read_text()
        assert f'src="../{stem}_0.png"' in page
        assert (tmp_path / "tutorials" / f"{stem}_0.png").stat().st_size > 1000
    strategies = (tmp_path / "strategies" / "index.html").read_text()
    for name in weft.declare.catalog.names("strategies"):
        assert f'id="{name}"' in strategies
    assert 'src="../page.html#' in (tmp_path / "planning" / "index.html").read_text()
    live = (tmp_path / "page.html").read_text()
    assert "ring=2 x ulysses=4" in live
    assert re.findall(r"https?://[^\"'\s]*", live) == ["http://www.w3.org/2000/svg"]
    layout = (tmp_path / "api" / "layout" / "index.html").read_text()
    assert "sync_gradients" in layout


def test_every_public_name_has_an_api_page():
    named = {
        line.rsplit(".", 1)[-1]
        for page in (ROOT / "docs" / "api").glob("*.md")
        for line in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)
    }
    public = {name for m in PUBLIC for name in m.__all__}
    errors = {name for name in public if name.endswith("Error")}  # the page of the module
    assert public - named - errors == set()


def test_every_tutorial_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for notebook in (ROOT / "tutorials").glob("*.ipynb"):
        assert f"tutorials/{notebook.stem}.md" in navigation
