"""What the package imports when it is loaded is what it declares."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "weft").rglob("*.py"))
#: modules of optional packages, loaded only by those who have them
OPTIONAL = {
    "integrations/transformers/": {"transformers"},
    "integrations/tabular/tabpfn": {"tabpfn"},
    "kernels/merge_triton": {"triton"},
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
    allowed, undeclared = {*sys.stdlib_module_names, *declared(), "weft"}, {}
    for source in SOURCES:
        name = str(source.relative_to(ROOT / "src" / "weft"))
        extra = set().union(*(OPTIONAL[prefix] for prefix in OPTIONAL if name.startswith(prefix)))
        undeclared[name] = loaded(source) - allowed - extra
    assert not {name: packages for name, packages in undeclared.items() if packages}


#: What takes long to load and is needed by some calls and commands only.
HEAVY = (
    "matplotlib",
    "rich",
    "safetensors",
    "tensorboard",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.onnx",
    "transformers",
    "triton",
    "typer",
)


def test_importing_weft_loads_no_compiler_and_nothing_that_draws() -> None:
    """Nor does training, until there is something to draw."""
    code = (
        f"import sys, weft; print(*({{*sys.modules}} & {{*{HEAVY}}})); "
        "import weft.train; print('matplotlib' in sys.modules)"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (made.returncode, made.stdout.split()) == (0, ["False"]), made.stderr
