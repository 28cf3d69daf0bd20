"""The tests that need a GPU, `pytest -m gpu`, without those that are parts of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .parts import Where


def run(where: Where) -> Iterator[str]:
    """What pytest says at the end."""
    where.only_cuda("pytest -m gpu")
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-m", "pytest", "-v", "-n", "0", "-m", "gpu"]
    command += ["tests/gpu/test_gpu.py", "-k", "not kernel_is_within and not many_kinds"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    last = ""
    with subprocess.Popen(command, cwd=root, **options) as process:
        for line in process.stdout or ():
            last = line.strip() or last
            if " PASSED" in line or " FAILED" in line or " ERROR" in line:
                wrong = "" if " PASSED" in line else "**WRONG** "
                yield f"- {wrong}{line.strip()}"
    yield f"\n{last}"
