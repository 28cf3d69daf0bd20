"""The fused Triton merge does what torch's own operations do, under Triton's interpreter on CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "merge_interpreted.py"


@pytest.mark.sample
def test_fused_merge_under_the_interpreter(triton) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["merged", "together", "attended"], done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.sample), 100])
def test_every_launch_compiles_and_loads_whole_vectors(triton, capability: int) -> None:
    """To machine code, with the assembler that Triton brings; no GPU is needed for that.

    16 bytes at once, 8 of a head dim of 20, which 8 does not divide; never a number of 2 bytes.
    """
    script = Path(__file__).parents[1] / "triton_compiled.py"
    done = subprocess.run(
        [sys.executable, str(script), str(capability)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [line.split(" | ") for line in done.stdout.splitlines()]
    assert len(lines) > 150
    for registers, spilled, widest, narrow, _, name in lines:
        assert int(widest) == (8 if name.endswith("dim 20") and "float32" not in name else 16), name
        assert int(narrow) == 0, name
        assert int(registers) <= 192, name
        assert int(spilled) <= 8, name
