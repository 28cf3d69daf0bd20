"""Run by `test_merge_triton`: every launch of weft's Triton kernels, compiled for a GPU not there.

    python triton_compiled.py CAPABILITY

Triton's driver is a stand-in that names a target; its own binder specialises the arguments of real
launches, on CPU tensors. Per launch a line: registers, bytes spilled, the widest and narrowest load
of rows in bytes, and the number of its kind.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

CAPABILITY = int(sys.argv[1])
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
B, H, F = torch.bfloat16, torch.float16, torch.float32
DIMS = (16, 20, 72, 128, 256)


def compiled() -> list:
    """The kernels of the launches from now on, compiled and not run."""
    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", CAPABILITY, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda *_: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
        is_active=lambda: True,
        map_python_to_cpp_type=lambda t: t,
        get_benchmarker=lambda: None,
        launcher_cls=None,
        utils=types.SimpleNamespace(
            get_device_properties=lambda *_: {"max_shared_mem": 232448, "warpSize": 32}
        ),
    )
    triton.runtime.driver.set_active(driver)
    made: list = []
    run = JITFunction.run

    def noted(self, *args, grid, warmup, **options):
        made.append(run(self, *args, grid=grid, warmup=True, **options))
        return made[-1]

    JITFunction.run = noted
    return made


def rows(h: int, n: int, d: int, dtype: torch.dtype, by_token: bool = True) -> Tensor:
    shape = (1, n, h, d) if by_token else (1, h, n, d)
    made = torch.empty(shape, dtype=dtype)
    return made.transpose(1, 2) if by_token else made


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """As the runtime makes them: by token, one to three parts, the first an accumulator or not."""
    from weft.kernels import merge_triton, sum_triton, surrogate_triton

    def merge(to: Tensor, parts: list[Tensor]) -> object:
        lse = torch.empty(to.shape[:3])
        return merge_triton.merge_several(to, lse, [(part, lse) for part in parts])

    for d, count, dtype in itertools.product(DIMS, (1, 2, 3), (B, F)):
        for to, first in itertools.product({dtype, F}, {dtype, F}):
            parts = [rows(32, 4096, d, first), *[rows(32, 4096, d, dtype)] * (count - 1)]
            text = f"{count} {first} {dtype} to {to}, dim {d}".replace("torch.", "")
            into = rows(32, 4096, d, to)
            yield f"merge {text}", lambda to=into, parts=parts: merge(to, parts)
            yield f"sum {text}", lambda to=into, parts=parts: sum_triton.sum_several(to, parts)
    for d, dtype in itertools.product(DIMS, (B, H, F)):
        t, lse = rows(32, 4096, d, dtype), torch.empty(1, 32, 4096)
        text = f"{dtype}, dim {d}".replace("torch.", "")
        yield f"row sums {text}", lambda t=t, lse=lse: sum_triton.fused_row_sums(t, t, lse)
        if d != 16:
            run = surrogate_triton.fused_surrogate_out
            yield f"surrogate {text}", lambda t=t, lse=lse, run=run: run(t, lse, 3)
    for text, t in (
        ("odd rows", rows(32, 1001, 128, B)),
        ("a slice of rows", rows(32, 1001, 128, B)[:, :, 1:]),
        ("by head", rows(32, 4096, 128, B, by_token=False)),
        ("one token of one head", rows(1, 1, 128, B)),
    ):
        yield f"merge {text}, dim 128", lambda t=t: merge(t, [t, t, t])


def spilled(kernel) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills, as the assembler reports them."""
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(kernel.asm["ptx"])
        tool = TOOLS / "ptxas-blackwell"  # the newer one, for every target
        arch = f"--gpu-name=sm_{CAPABILITY}" + ("a" if CAPABILITY >= 90 else "")
        command = [str(tool), "-v", arch, str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True)
    assert not said.returncode, said.stderr
    registers = int(re.search(r"Used (\d+) registers", said.stderr)[1])
    return registers, int(re.search(r"(\d+) bytes spill stores", said.stderr)[1])


def main() -> None:
    made, known = compiled(), {}
    for name, launch in launches():
        launch()
        kernel = made[-1]
        assert kernel.asm["cubin"], name
        if kernel.hash not in known:
            moves = r"(?:ld|st)\.global[\w.:]*?(?:\.v(\d))?\.b(\d+) "
            found = re.findall(moves, kernel.asm["ptx"])
            wide = [int(vector or 1) * int(bits) // 8 for vector, bits in found]
            known[kernel.hash] = (*spilled(kernel), max(wide), wide.count(2))
        print(*known[kernel.hash], len({*known}), name, sep=" | ")


main()
