"""What this machine's releases are, and which kernel computes what on it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

import torch

from weft.errors import UnsupportedError
from weft.kernels import KERNELS, Request, TileView, choose_kernel, named

from .parts import Where, rows

PACKAGES = ("triton", "transformers", "flash-attn", "flash-attn-3", "flash-attn-4", "pydantic")


def run(where: Where) -> Iterator[str]:
    """Versions, a row per kernel, and how torch hands on cuDNN's logsumexp."""
    for name in PACKAGES:
        try:
            yield f"- {name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"- no {name}"
    yield ""
    yield from rows(["kernel", "bf16, head dim 128"], _kernels(where))
    if where.device == "cuda" and _refused(where, "cudnn") is None:
        yield f"\n{_logsumexp()}"


def _refused(where: Where, name: str) -> str | None:
    try:
        choose_kernel(Request(where.device, torch.bfloat16, 128, 128), name)
    except UnsupportedError as error:
        return str(error).split(": ", 1)[-1]
    return None


def _kernels(where: Where) -> Iterator[tuple]:
    for kernel in KERNELS:
        yield kernel.name, _refused(where, kernel.name) or "yes"


def _logsumexp() -> str:
    """Asserts that cuDNN's backward pass takes the logsumexp that its forward pass returned."""
    q = torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
    kernel, view = named("cudnn"), TileView(64**-0.5)
    out, lse = kernel.forward(q, q, q, view)
    grads = kernel.backward((q, q, q, q, out, lse, None), view)[:3]
    plain = [t.float().requires_grad_() for t in (q, q, q)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*plain)
    wanted = torch.autograd.grad(wanted, plain, q.float())
    gap = max((a.float() - b).abs().max().item() for a, b in zip(grads, wanted))
    dims = kernel.lse_dims
    assert gap < 0.1, f"cuDNN's gradients are off by {gap:.3g}; its logsumexp has {dims} dims"
    return f"cuDNN returns a logsumexp of {dims} dims, and its gradients are right to {gap:.2g}."
