"""The fused Triton merge does what torch's own operations do, under Triton's interpreter on CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "merge_interpreted.py"


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


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_fused_merge_compiles_for_gpus(triton, capability: int) -> None:
    """To machine code, with the assembler that Triton brings; no GPU is needed for that."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from weft.kernels.merge_triton import _merge
    from weft.kernels.sum_triton import _row_sums, _sum

    rows = dict.fromkeys(("first", "second", "third", "dout"), "*bf16")
    types = rows | dict.fromkeys(("out", "total", "lse", "delta"), "*fp32")
    types |= dict.fromkeys(("first_lse", "second_lse", "third_lse"), "*fp32")
    sizes = {"ROWS": 64, "WIDTH": 64, "COUNT": 3}
    for kernel in (_merge, _sum, _row_sums):
        constants = {name: sizes[name] for name in kernel.arg_names if name in sizes}
        signature = {
            name: "constexpr" if name in constants else types.get(name, "i32")
            for name in kernel.arg_names
        }
        target = GPUTarget("cuda", capability, 32)
        compiled = compile(ASTSource(kernel, signature, constexprs=constants), target=target)
        assert compiled.asm["cubin"]
