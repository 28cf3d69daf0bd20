"""The wheel has everything, and works in a directory that is not the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from weft._doors import PACKAGES

ROOT = Path(__file__).parents[2]
KINDS = ("strategies", "layouts", "models", "hardware")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, made from the checkout by the backend itself: nothing is fetched."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    code = f"from hatchling.build import build_wheel; build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_holds_the_package_and_its_declarations(wheel: Path) -> None:
    assert wheel.name.startswith("weft_attention-")
    kept = set(zipfile.ZipFile(wheel).namelist())
    package = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*.py")}
    declared = {f"weft/declarations/{k}/{p.name}" for k in KINDS for p in (ROOT / k).glob("*.toml")}
    weights = "weft/declarations/models/table_classifier.safetensors"
    declared.add(weights)
    typed = {f"{package}/py.typed" for package in PACKAGES}
    assert package | declared | typed <= kept
    assert (ROOT / "models" / Path(weights).name).stat().st_size < 10_000_000
    rest = {name for name in kept - package - declared if ".dist-info/" not in name}
    assert rest == typed | {"weft_planner/ledger.json", "weft_cli/inspect/page.html"}


@pytest.mark.sample
def test_commands_run_where_there_is_no_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = (
        "import runpy, sys, weft; print(weft.__file__); sys.argv = ['weft', 'list']; "
        "runpy.run_module('weft', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(str(tmp_path / "site"))
    for kind in KINDS:
        for declared in (ROOT / kind).glob("*.toml"):
            assert declared.stem in done.stdout
