"""The models of `benchmarks.fields` on torch's own DTensor: what becomes of them, by model.

    python -m benchmarks.fields_dtensor                   all models, as a table
    python -m benchmarks.fields_dtensor swin resnet

Two processes; weights are replicated DTensors, the input is split along height. `exact` has the
error of output and gradients beside one device; `collectives` are those of the forward pass.
"""

from __future__ import annotations

import copy
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from .fields import CASES, InDouble, seeded

RANKS = 2


def outcome(name: str) -> tuple[str, str]:
    """The result of a model on two ranks in words, and the collectives of its forward pass."""
    case = CASES[name]
    model = seeded(case.make())
    x = torch.randn(case.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    height = -2 if case.dims is None else case.dims["height"]
    with InDouble():
        whole = x.clone().requires_grad_()
        expected = case.call(model, whole)
    w = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).double()
    (expected * w).sum().backward()
    mesh = init_device_mesh("cpu", (RANKS,))
    split_model = distribute_module(copy.deepcopy(model), mesh)
    split_model.zero_grad()
    leaf = distribute_tensor(x, mesh, [Shard(height % x.dim())]).requires_grad_()
    count = CommDebugMode()
    try:
        with count, InDouble():
            out = case.call(split_model, leaf)
        collectives = str(count.get_total_counts())
        if not isinstance(out, DTensor):
            return f"silently wrong: a plain tensor of {tuple(out.shape)}", collectives
        found = out.full_tensor()
        if found.shape != expected.shape:
            shapes = f"{tuple(found.shape)} for {tuple(expected.shape)}"
            return f"silently wrong: shape {shapes}", collectives
        (found * w).sum().backward()
        pairs = [(found, expected), (leaf.grad.full_tensor(), whole.grad)]
        parameters = zip(split_model.parameters(), model.parameters())
        pairs += [(p.grad.full_tensor(), q.grad) for p, q in parameters if q.grad is not None]
        worst = max(error(a, b) for a, b in pairs)
        return f"{'exact' if worst < 1e-9 else 'silently wrong'}: {worst:.1e}", collectives
    except Exception as failure:
        lines = str(failure).strip().splitlines() or [""]
        return f"raises {type(failure).__name__}: {lines[0][:110]}", ""


def error(found: Tensor, right: Tensor) -> float:
    """The largest error, relative to the largest entry, or to 1e-6 where entries are smaller."""
    return float((found - right).abs().max() / right.abs().max().clamp(min=1e-6))


def _rank(rank: int, folder: str, names: list[str]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    for name in names:
        result, collectives = outcome(name)
        if rank == 0:
            print(f"| {name} | {result.replace('|', '/')} | {collectives} |", flush=True)
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    names = [name for name in CASES if name in sys.argv[1:] or not sys.argv[1:]]
    print("| model | result | collectives |\n| --- | --- | ---: |", flush=True)
    with TemporaryDirectory() as folder:
        processes.spawn(_rank, (folder, names), nprocs=RANKS)


if __name__ == "__main__":
    main()
