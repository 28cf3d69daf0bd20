"""What the package imports when it is loaded is what it declares."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from world import cli

import weft
from weft import _doors
from weft._doors import PACKAGES
from weft.errors import _EXTRAS
from weft_cli.cli import COMMANDS, function_of

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
#: Packages of the extra `cli`, which every command has.
DRAWN = {"typer", "rich", "matplotlib"}
#: Modules of optional packages, loaded only by those who have them.
OPTIONAL = {
    "weft/_terminal": {"rich"},
    "weft_cli/": DRAWN,
    "weft/kernels/by_rows": {"triton"},
    "weft/kernels/merge_triton": {"triton"},
    "weft/kernels/sum_triton": {"triton"},
    "weft/kernels/surrogate_triton": {"triton"},
    "weft_integrations/transformers/": {"transformers"},
    "weft_integrations/tabular": {"tabpfn"},
}


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = (re.split(r"[<>=~!;\[ ]", need)[0] for need in project["dependencies"])
    return {name.replace("-", "_") for name in names}


def loaded(source: Path) -> set[str]:
    """Top packages imported at module level, outside functions, try blocks and type checking."""
    found = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def test_modules_load_declared_packages_only() -> None:
    allowed, undeclared = {*sys.stdlib_module_names, *declared(), *PACKAGES}, {}
    for source in SOURCES:
        name = str(source.relative_to(ROOT / "src"))
        extra = set().union(*(OPTIONAL[prefix] for prefix in OPTIONAL if name.startswith(prefix)))
        undeclared[name] = loaded(source) - allowed - extra
    assert not {name: packages for name, packages in undeclared.items() if packages}


#: Packages of commands and pictures, which no call of attention needs.
DRAWING = ("matplotlib", "pandas", "rich", "tensorboard", "typer")
#: What takes long to load and is needed by some calls and commands only.
HEAVY = (
    *DRAWING,
    "safetensors",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.onnx",
    "transformers",
    "triton",
)


def test_importing_weft_loads_no_compiler_and_nothing_that_draws() -> None:
    """Nor does a call or a plan, nor training until there is something to draw."""
    code = (
        "import sys, torch, weft\n"
        "def found(names): return {n for n in sys.modules if n in names or n[:5] == 'weft_'}\n"
        f"print('imported', *found({HEAVY}))\n"
        "layout = weft.Layout.parse('tokens: ring=2')\n"
        "rank = lambda on: weft.attention(*torch.ones(3, 1, 1, 2, 4), on, 'tokens')\n"
        "weft.on_threads(layout, rank)\n"
        "layout.plan('tokens', length=8, heads=1, head_dim=4)\n"
        f"print('called', *found({DRAWING}))\n"
        "import weft.train\n"
        "print('matplotlib' in sys.modules)\n"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (made.returncode, made.stdout.split()) == (0, ["imported", "called", "False"]), (
        made.stdout + made.stderr
    )


def test_doors_lead_to_the_modules_behind_them() -> None:
    """By attribute, by import, and to modules within: one object, imported once."""
    for name, behind in _doors.MODULES.items():
        module = importlib.import_module(behind)
        assert getattr(weft, name) is importlib.import_module(f"weft.{name}") is module
        assert module.__spec__.name == behind
    within = importlib.import_module("weft.tables.classifier")
    assert within is importlib.import_module("weft_models.tables.classifier")
    for name, behind in _doors.NAMES.items():
        assert getattr(weft, name) is getattr(importlib.import_module(behind), name)
    with pytest.raises(ModuleNotFoundError, match=r"weft_models\.train\.nothing"):
        importlib.import_module("weft.train.nothing")


def test_help_is_shown_without_torch() -> None:
    """And lists what the functions behind the commands say of themselves."""
    code = (
        "import sys\nfrom weft_cli.cli import app\n"
        "for words in ([], ['plan'], ['explain'], ['trian']):\n"
        "    try: app(words)\n    except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert made.stdout.split()[-1] == "False", made.stderr
    for name, said in COMMANDS.items():
        assert f" {name.split()[-1]} " in made.stdout
        first = " ".join(inspect.getdoc(function_of(name)).split("\n\n")[0].split())
        assert first.removesuffix(" Starts nothing.") == said


def test_a_command_names_the_extra_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str) -> None:
        raise ModuleNotFoundError(name="transformers.utils")

    monkeypatch.setattr("weft_cli.cli.function_of", lacking)
    shown = cli("verify", "llama", code=1)
    assert "weft verify needs transformers: in the clone of weft, pip install -e '.[trans" in shown


def test_errors_know_the_extras() -> None:
    """Those of pyproject.toml; without typer the command line says so, too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    brought = {"sklearn": "scikit-learn"}
    for package, extra in _EXTRAS.items():
        listed = " ".join(project["optional-dependencies"][extra])
        assert brought.get(package, package) in listed
    code = "import sys; sys.modules['typer'] = None; import weft_cli.__main__"
    lone = [sys.executable, "-c", code]
    made = subprocess.run(lone, capture_output=True, text=True, timeout=60)
    assert "the command line of weft needs typer: in the clone of weft" in made.stderr


def test_what_benchmarks_and_tutorials_import_is_there() -> None:
    """Read from the sources: most of them need packages, ranks or hours to run."""
    sources = {".".join(_parts(path.relative_to(ROOT / "src"))): path for path in SOURCES}
    missing = []
    for folder in ("benchmarks", "tutorials", "docs", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and not node.level:
                    package, *inner = (node.module or "").split(".")
                    if package not in PACKAGES:
                        continue
                    if package == "weft" and inner and inner[0] in _doors.MODULES:
                        package, inner = _doors.MODULES[inner[0]], inner[1:]
                    module = ".".join((package, *inner))
                    for alias in node.names:
                        if f"{module}.{alias.name}" in sources:
                            continue
                        text = sources[module].read_text() if module in sources else ""
                        if alias.name not in (*dir(weft),) * (module == "weft") and not re.search(
                            rf"\b{alias.name}\b", text
                        ):
                            missing.append(f"{path.relative_to(ROOT)}: {module}.{alias.name}")
    assert not missing


def _parts(path: Path) -> tuple[str, ...]:
    parts = path.with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts
