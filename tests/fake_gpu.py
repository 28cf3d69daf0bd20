"""One rank on a GPU that is not there: fake tensors of device "cuda", and what crosses to it.

Everything of weft runs but the kernels and NCCL: tensors have shapes, strides, dtypes and devices,
and no numbers. `Crossings` sees every operation, also in the bodies of weft's custom ops.

torch's CPU builds cannot slice a CUDA tensor, nor record it for autograd, without a guard of the
device, which is a few lines of C++. It stays in the process: call all this in one apart.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import weft
import weft.move.take
from weft._torch import trace_on_threads
from weft.comm import P2PBatch, Shuffle, Transport, channel
from weft.kernels import fused
from weft.runtime import calls
from weft_axes.carry import ops as state_ops  # noqa: F401, whose ops are named below

#: weft's custom ops by name: under a mode their bodies run in place of their fakes.
BODIES = {
    getattr(torch.ops.weft, name + suffix).default: OPDEFS[f"weft::{name}{suffix}"].body
    for name in ("attention", "redistribute", "states", "take")
    for suffix in ("", "_backward")
}


class Crossings(TorchDispatchMode):
    """Notes operations that take data from the CPU to the GPU or back.

    A CPU tensor of one number among CUDA tensors is an argument of a kernel, and no copy. What is
    on the CPU alone has its numbers: plans are made of them.

    Attributes:
        found: the operations.
        number: the one number of a CUDA tensor of some dtype that the CPU asks for.
        read: makes the numbers of a CUDA tensor of some shape that comes to the CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.number: Callable[[torch.dtype], bool | int | float] | None = None
        self.read: Callable[[torch.Size], Tensor] | None = None

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in BODIES:
            with self:
                return BODIES[op](*args)
        if _of_the_cpu(args, kwargs):
            with unset_fake_temporarily():
                return op(*args, **(kwargs or {}))
        if self.number and op is torch.ops.aten._local_scalar_dense.default and args[0].is_cuda:
            self.found.append(f"{op}")
            return self.number(args[0].dtype)
        result = op(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        large = {t.device.type for t in given if t.dim() or len(given) == 1}
        if {"cpu", "cuda"} <= large | {t.device.type for t in made} and "cpu" in large:
            self.found.append(f"{op} of {[(str(t.device), tuple(t.shape)) for t in given]}")
        if op is torch.ops.aten._local_scalar_dense.default and given[0].is_cuda:
            self.found.append(f"{op}")
        came = [t for t in made if t.device.type == "cpu"]
        if op is torch.ops.aten._to_copy.default and came and given[0].is_cuda:
            self.found.append(f"{op} to the CPU of {tuple(given[0].shape)}")
        if self.read and came and len(given) == 1 and given[0].is_cuda:
            with unset_fake_temporarily():
                return self.read(given[0].shape)
        return result


def _of_the_cpu(args: tuple, kwargs: dict | None) -> bool:
    """Whether an operation takes tensors with numbers alone, and makes none on the GPU."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    device = torch.device((kwargs or {}).get("device") or "cpu")
    return device.type == "cpu" and not any(isinstance(t, FakeTensor) for t in tensors)


class OneOf(Transport):
    """One rank of a mesh; the others agree with it and send what nobody looks at."""

    def __init__(self, sizes, rank: int, order: list | None = None) -> None:
        super().__init__(sizes, rank)
        self.order = [] if order is None else order
        self.asked = 0  # how often texts were exchanged: each waits for gloo

    def _start(self, p2p: P2PBatch, tag: int) -> Callable[[], None]:
        assert all(t.is_cuda for _, t in (*p2p.sends, *p2p.receives))
        assert all(t.is_contiguous() for _, t in (*p2p.sends, *p2p.receives))
        return lambda: None

    def _all_to_all(self, shuffle: Shuffle, tag: int) -> None:
        assert shuffle.outgoing.is_cuda
        assert shuffle.outgoing.is_contiguous()
        assert shuffle.incoming.is_cuda

    def _all_reduce(self, tensor: Tensor, mesh_dims) -> None:
        assert tensor.is_cuda

    def _vote(self, mesh_dims, digest: int, name) -> Callable[[], bool]:
        return lambda: True

    def _all_gather_text(self, text: str, mesh_dims) -> dict[int, str]:
        self.asked += 1
        return dict.fromkeys(self.ranks_along(mesh_dims), text)


GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""


@functools.cache
def guard_device() -> None:
    """Let this process have CUDA tensors without numbers."""
    if torch.version.cuda:
        trace_on_threads()
        return
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        paths = [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10"]
        options = ["-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run(["g++", *options, *paths], check=True, timeout=120)
        ctypes.CDLL(str(library))


@contextmanager
def fake_gpu(capturing: bool = False) -> Iterator[Crossings]:
    """Inside the block tensors may be made on device "cuda"; what is kept of it goes at the end.

    capturing: whether a CUDA graph is captured.
    """
    guard_device()
    weft.clear_caches()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Tensor, "pin_memory", lambda t: t)
        patched.setattr(channel, "_is_captured", lambda: capturing)
        patched.setattr(fused, "launcher", lambda name: None)  # Triton compiles for a GPU there is
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), Crossings() as crossings:
                yield crossings
        finally:
            weft.clear_caches()


def both_passes(bound: calls.BoundCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of a call, op by op: autograd on CUDA needs torch's CUDA build."""
    out, kept = forward_pass(bound, q, k, v)
    return out, *backward_pass(bound, (q, k, v), torch.empty_like(out), kept)


def forward_pass(
    bound: calls.BoundCall, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output of a call, and what its backward pass is given."""
    call = (None, None, calls.handle_of(bound))
    out, lse, agreed, *kept, _ = torch.ops.weft.attention(q, k, v, None, None, *call)
    entry = kept if bound.reach.reshards else (q, k, v, out, lse)
    return out, (*entry, None, None, agreed)


def backward_pass(
    bound: calls.BoundCall,
    qkv: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    kept: tuple[Tensor, ...],
) -> list[Tensor]:
    """dq, dk and dv of a call."""
    call = (None, None, calls.handle_of(bound), calls.rest_shape(*qkv))
    *grads, _ = torch.ops.weft.attention_backward(dout, None, *kept, *call)
    return grads


def backward(result: Tensor, gradient: Tensor) -> dict[int, Tensor]:
    """Gradients of leaves by `id`: autograd's graph walked here, for torch's engine wants a GPU."""
    waits: dict = defaultdict(int)
    todo, seen = [result.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for other, _ in node.next_functions:
            if other is not None:
                waits[other] += 1
                todo.append(other)
    arrived: dict = defaultdict(dict)
    arrived[result.grad_fn][result.output_nr] = gradient
    ready, leaves = [result.grad_fn], {}
    while ready:
        node = ready.pop()
        grads = arrived.pop(node, {})
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = grads.get(0)
            continue
        count = len(node._input_metadata)
        step = node if callable(node) else node.apply  # of torch, or of a `Function`
        made = step(*(grads.get(i) for i in range(count))) if grads else None
        made = made if isinstance(made, tuple) else (made,) * len(node.next_functions)
        for (other, place), grad in zip(node.next_functions, made):
            if other is None:
                continue
            if grad is not None:
                before = arrived[other].get(place)
                arrived[other][place] = grad if before is None else before + grad
            waits[other] -= 1
            if not waits[other]:
                ready.append(other)
    return leaves
