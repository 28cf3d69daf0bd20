"""Fused Triton kernels do what torch's own operations do, under Triton's interpreter on CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = {
    "merge_interpreted": ["merged", "together", "attended"],
    "surrogate_interpreted": ["equal"],
}


@pytest.mark.sample
@pytest.mark.parametrize("script", SCRIPTS)
def test_fused_kernels_under_the_interpreter(triton, script) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / f"{script}.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == SCRIPTS[script], done.stdout


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


@pytest.mark.parametrize(
    "capability",
    [
        *(pytest.param(c, marks=pytest.mark.slow) for c in (80, 100)),
        pytest.param(90, marks=pytest.mark.sample),
    ],
)
def test_fused_surrogate_compiles_for_gpus(triton, capability: int) -> None:
    """To machine code in which no product and sum are rounded as one."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from weft.kernels.surrogate_triton import _surrogate

    types = {"dout": "*bf16", "delta": "*fp32", "out": "*bf16"}
    sizes = {"ROWS": 16, "WIDTH": 128, "CARRIERS": 3}
    signature = {
        name: "constexpr" if name in sizes else types.get(name, "i32")
        for name in _surrogate.arg_names
    }
    compiled = compile(
        ASTSource(_surrogate, signature, constexprs=sizes),
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": False},
    )
    assert compiled.asm["cubin"]
    assert "div.rn.f32" in compiled.asm["ptx"]
    assert "fma" not in compiled.asm["ptx"]
