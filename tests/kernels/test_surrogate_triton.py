"""The fused surrogate output has the formula's bits, under Triton's interpreter on CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "surrogate_interpreted.py"


@pytest.mark.sample
def test_fused_surrogate_has_the_formulas_bits(triton) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["equal"], done.stdout


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
