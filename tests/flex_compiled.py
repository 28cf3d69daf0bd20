"""Run by `test_flex_compiled`: flex's kernels lowered by Inductor and compiled for a GPU.

    python flex_compiled.py CAPABILITY HEAD_DIM DTYPE PASS

There is no GPU: Inductor is shown the properties of an H100, its code is caught before it is run,
and Triton with the assembler that it brings compiles it. Mods are weft's, of a causal mask by
positions that are looked up. Prints the bytes of shared memory of each kernel.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
import types
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import fake_gpu
import torch._inductor.compile_fx as compile_fx
import triton
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._dynamo.device_interface import CudaInterface
from torch._higher_order_ops.flex_attention import (
    create_fw_bw_graph,
    flex_attention,
    flex_attention_backward,
)
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_heuristics
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import weft
from weft.kernels import TileView, flex_mods
from weft.kernels.base import MaskContext

HEADS, KV_HEADS, N, BLOCK = 8, 2, 1024, 128
OPTIONS = {
    "BACKEND": "AUTO",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}


class Caught(BaseException):
    """The code is there; it is not to be run."""


def show_a_gpu(capability: int) -> GPUTarget:
    """An H100 for Inductor's and Triton's eyes, of this capability."""
    properties = types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=132,
        total_memory=80 << 30,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 << 20,
        gcnArchName="",
        uuid="",
    )
    stream = types.SimpleNamespace(cuda_stream=0, device=torch.device("cuda", 0))
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": (properties.major, properties.minor),
        "get_device_name": properties.name,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "current_stream": stream,
        "_lazy_init": None,
        "synchronize": None,
        "set_device": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "set_rng_state": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *a, answer=answer, **k: answer)
    torch.cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.random.current_device = torch.cuda.current_device
    asked = {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_properties": properties,
        "get_compute_capability": capability,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "is_bf16_supported": True,
    }
    for name, answer in asked.items():
        setattr(CudaInterface, name, staticmethod(lambda *a, answer=answer, **k: answer))
    CudaInterface.Worker.get_device_properties = staticmethod(lambda *a: properties)
    CudaInterface.Worker.current_device = staticmethod(lambda: 0)
    target = GPUTarget("cuda", capability, 32)
    limits = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}
    limits |= {"max_num_regs": 65536}
    driver = types.SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_current_stream=lambda *a: 0,
        is_active=lambda: True,
        map_python_to_cpp_type=lambda ty: ty,
        get_benchmarker=lambda: None,
        utils=types.SimpleNamespace(get_device_properties=lambda *a: limits),
        launcher_cls=None,
    )
    triton.runtime.driver.set_active(driver)
    return target


def inductors_code(dim: int, dtype: torch.dtype, backward: bool) -> str:
    """Inductor's code for one pass of a call with weft's mods."""

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        at = MaskContext(rows, columns, b[None], h[None])
        return flex_mods.mask_mod(weft.Causal(), at)(b, h, i, j)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, scale: Tensor) -> Tensor:
        flex_mods.constant = lambda value, device: scale
        return flex_mods.score_mod(TileView(0.5), s.device)(s, b, h, i, j)

    table = select_decomp_table()
    at = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    scale, zero = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=dtype)
    with torch.enable_grad():
        leaf = zero.clone().requires_grad_()
        one_way, joint = create_fw_bw_graph(score, (leaf, *at), (scale,))
    scores = make_fx(score, decomposition_table=table)(torch.zeros(()), *at, scale)
    positions = torch.zeros(N, dtype=torch.int64)
    with TransformGetItemToIndex():
        seen = make_fx(mask, decomposition_table=table)(*at, positions, positions)
    one_way = make_fx(one_way, decomposition_table=table)(zero, *at, scale)
    joint = make_fx(joint, decomposition_table=table)(zero, *at, scale, zero)

    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with fakes:

        def chunk(heads: int, *dims: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(1, heads, N, *dims, device="cuda:0", dtype=dtype)

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, device="cuda:0", dtype=dtype)

        q, k, v = chunk(HEADS, dim), chunk(KV_HEADS, dim), chunk(KV_HEADS, dim)
        rows = [chunk(HEADS, dtype=torch.float32) for _ in range(2)]
        captured = [numbers(dtype=torch.float64), *(numbers(N, dtype=torch.int64) for _ in "qk")]
        blocks = [
            t
            for _ in range(4)
            for t in (numbers(1, 1, N // BLOCK), numbers(1, 1, N // BLOCK, N // BLOCK))
        ]

    def whole_mask(blocks: tuple) -> tuple:
        return (N, N, *blocks, None, None, None, None, BLOCK, BLOCK, seen)

    def forward(q, k, v, scale, rows, columns, *blocks):
        mask, more = whole_mask(blocks), ((scale,), (rows, columns))
        return flex_attention(q, k, v, scores, mask, 1.0, OPTIONS, *more)

    def back(q, k, v, out, lse, dout, dlse, scale, rows, columns, *blocks):
        mask, more = whole_mask(blocks), ((scale,), (rows, columns))
        given = q, k, v, out, lse, dout, dlse, one_way, joint, mask, 1.0, OPTIONS
        return flex_attention_backward(*given, *more)[:3]

    results = (q, rows[0], q.clone(), rows[1]) if backward else ()
    args = (q, k, v, *results, *captured, *blocks)
    code: list[str] = []

    def caught(self) -> None:
        text = self.codegen()[0]
        code.append(str(getattr(text, "value", text)))
        raise Caught

    GraphLowering.compile_to_module = GraphLowering._compile_to_module = caught
    config.compile_threads, config.fx_graph_cache = 1, False
    with torch.no_grad(), fakes:
        graph = make_fx(back if backward else forward, tracing_mode="real")(*args)
        context = torch._guards.TracingContext(fakes)
        try:
            with V.set_fake_mode(fakes), torch._guards.tracing(context):
                compile_fx.compile_fx_inner(graph, list(args), is_backward=backward)
        except BaseException:
            if not code:
                raise
    return code[0]


def compiled(code: str, target: GPUTarget) -> None:
    """Compile every Triton kernel in Inductor's code; print its shared memory."""
    for name, source in re.findall(r"async_compile\.triton\('([^']+)', '''(.*?)'''", code, re.S):
        if "_tem_" not in name:  # sums beside the template, which ask for a driver
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{name}.py")
            path.write_text(source)
            spec = importlib.util.spec_from_file_location(name, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            (tuner,) = (
                v
                for v in vars(module).values()
                if isinstance(v, triton_heuristics.CachingAutotuner)
            )
            for choice in tuner.configs:
                meta = tuner.triton_meta
                sizes = {**meta.get("constants", {}), **choice.kwargs}
                signature = dict.fromkeys(choice.kwargs, "constexpr") | meta["signature"]
                attrs = meta["configs"][0] if isinstance(meta["configs"][0], dict) else {}
                made = triton.compile(
                    ASTSource(tuner.fn, signature, sizes, attrs),
                    target=target,
                    options={"num_warps": choice.num_warps, "num_stages": choice.num_stages},
                )
                assert made.asm["cubin"]
                print(name, made.metadata.shared, flush=True)


if __name__ == "__main__":
    torch._C._ensureCUDADeviceGuardSet()
    architecture = show_a_gpu(int(sys.argv[1]))
    fake_gpu.guard_device()
    dtype = getattr(torch, sys.argv[3])
    compiled(inductors_code(int(sys.argv[2]), dtype, sys.argv[4] == "backward"), architecture)
