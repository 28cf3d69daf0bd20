"""The tests that need a GPU: `pytest -m gpu`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .parts import Where


def run(where: Where) -> str:
    """What pytest says at the end."""
    where.only_cuda("pytest -m gpu")
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", "tests/test_gpu.py"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    verdict = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-500:]
    return "\n".join([*(f"- **WRONG** {line}" for line in lines), verdict])
