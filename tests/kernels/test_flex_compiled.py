"""Flex's kernels are compiled for an H100, and fit into its shared memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "flex_compiled.py"
#: Bytes of shared memory that a program may have, by capability.
SHARED = {90: 232_448}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "dtype", "which"),
    [
        (64, "bfloat16", "forward"),
        (128, "bfloat16", "backward"),
        (256, "bfloat16", "backward"),
        (256, "float32", "forward"),
        (256, "float32", "backward"),
    ],
)
def test_flex_compiles_for_hopper(triton, dim: int, dtype: str, which: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "90", str(dim), dtype, which],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    shared = [int(line.split()[-1]) for line in done.stdout.splitlines() if "_tem_" in line]
    assert shared, done.stdout
    assert max(shared) <= SHARED[90]
