"""Triton's interpreter, which truncates where it casts to bf16, rounds to nearest as GPUs do.

Import it after TRITON_INTERPRET=1 is set, and before a kernel runs.
"""

from __future__ import annotations

import numpy
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

HALVES = {tl.bfloat16: torch.bfloat16, tl.float16: torch.float16}


def rounded_as_on_gpus(self, given, dtype):
    """The interpreter's cast between float types, by torch."""
    types = [HALVES.get(t.scalar, torch.float32) for t in (given.dtype, dtype)]
    made = torch.from_numpy(numpy.ascontiguousarray(given.data)).view(types[0]).to(types[1])
    data = made.view(torch.uint16).numpy() if types[1] == torch.bfloat16 else made.numpy()
    return interpreter.TensorHandle(data, dtype.scalar)


interpreter.InterpreterBuilder.create_fp_ext = rounded_as_on_gpus
interpreter.InterpreterBuilder.create_fp_trunc = rounded_as_on_gpus
interpreter.InterpreterBuilder.create_fp_to_fp = rounded_as_on_gpus
