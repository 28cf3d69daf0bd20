"""weft on one GPU against F.scaled_dot_product_attention alone, and the merge against a copy.

Several ranks run as threads of this process on one GPU, so together they do the work of one call:
what they take longer is what splitting, merging and launching cost; transfers are free. They call
`weft.runtime.executor` directly, since autograd would run the backward passes of all threads on one
device thread, where each waits for the others.

TFLOP/s count 4 b h n m d operations forward and 10 backward, half of them with a causal mask.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from weft.comm import Transport, run_threads
from weft.kernels import accumulate_dtype
from weft.plan.call import Call
from weft.runtime import executor
from weft.runtime.calls import BoundCall

from .parts import Where, table

LENGTHS = (32768, 131072)
HEAD_DIMS = (64, 128)
LAYOUTS = ("single", "ring-4", "ring-zigzag-4", "tile-2x2", "tile-striped-2x2")
HEADS = 16
#: Scores above which fewer heads are taken, so that a run ends.
MOST_SCORES = 1 << 39
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Case:
    """One attention call."""

    tokens: int
    head_dim: int
    causal: bool

    @property
    def heads(self) -> int:
        """As many as leave a run short enough."""
        return max(1, min(HEADS, MOST_SCORES // self.tokens**2))

    def operations(self, which: str) -> float:
        """Floating-point operations of the forward or the backward pass."""
        whole = 4 * self.heads * self.tokens**2 * self.head_dim
        return whole * (2.5 if which == "backward" else 1.0) * (0.5 if self.causal else 1.0)


@dataclass(frozen=True)
class Row:
    """Seconds of one pass of one case: SDPA alone and weft on a layout."""

    tokens: int
    heads: int
    head_dim: int
    mask: str
    which: str
    layout: str
    kernel: str
    seconds: float
    sdpa_seconds: float
    tflops: float
    share: float  # of SDPA's own speed


class Machine:
    """Where it runs and how long things take there."""

    def __init__(self, device: str, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self.dtype = torch.bfloat16

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object]) -> float:
        """Median time of a call, after one that does not count."""
        times = []
        for _ in range(self.repeats + 1):
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def tensors(self, case: Case, count: int) -> list[Tensor]:
        shape = (1, case.heads, case.tokens, case.head_dim)
        return [torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(count)]


def sdpa(machine: Machine, case: Case) -> dict[str, float]:
    """Seconds of torch's own attention, by pass."""
    q, k, v, dout = machine.tensors(case, 4)
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(*leaves, is_causal=case.causal)

    out = forward()
    return {
        "forward": machine.seconds(forward),
        "backward": machine.seconds(
            lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
        ),
    }


def woven(machine: Machine, case: Case, layout: weft.Layout) -> tuple[dict[str, float], str]:
    """Seconds of weft on all ranks of a layout, by pass, and the kernel it took."""
    whole = machine.tensors(case, 4)
    barrier = threading.Barrier(layout.world_size, timeout=600)
    mask = weft.Causal() if case.causal else weft.Full()
    call = Call(("tokens",), mask, length=((case.tokens, case.tokens),))

    def rank(transport: Transport) -> tuple[dict[str, float], str]:
        on = layout.on(transport)
        q, k, v, dout = (on.shard(t, {"tokens": 2}).contiguous() for t in whole)
        plan = BoundCall(on, call).begin(q, k, v)[0]
        times: dict[str, list[float]] = {which: [] for which in PASSES}
        for _ in range(machine.repeats + 1):
            out, lse = executor.forward(plan, transport, call, q, k, v)
            steps = {
                "forward": lambda: executor.forward(plan, transport, call, q, k, v),
                "backward": lambda out=out, lse=lse: executor.backward(
                    plan, transport, call, dout, None, (q, k, v, out, lse)
                ),
            }
            for which, step in steps.items():
                times[which].append(_together(machine, barrier, step))
        seconds = {which: statistics.median(taken[1:]) for which, taken in times.items()}
        return seconds, plan.kernel(False).name

    return run_threads(layout.mesh, rank, timeout=600.0)[0]


def _together(machine: Machine, barrier: threading.Barrier, step: Callable[[], object]) -> float:
    """From when all ranks start to when all have ended, on the device too."""
    machine.synchronize()
    barrier.wait()
    start = time.perf_counter()
    step()
    barrier.wait()
    machine.synchronize()
    return time.perf_counter() - start


def attention_rows(machine: Machine, cases: list[Case]) -> Iterator[Row]:
    """Every case on every layout, as it is measured."""
    for case in cases:
        alone = sdpa(machine, case)
        for name in LAYOUTS:
            layout = weft.Layout.single() if name == "single" else weft.Layout.load(name)
            taken, kernel = woven(machine, case, layout)
            for which in PASSES:
                yield Row(
                    case.tokens,
                    case.heads,
                    case.head_dim,
                    "causal" if case.causal else "full",
                    which,
                    name,
                    kernel,
                    taken[which],
                    alone[which],
                    case.operations(which) / taken[which] / 1e12,
                    alone[which] / taken[which],
                )
        if machine.device == "cuda":
            torch.cuda.empty_cache()


def merge_rows(machine: Machine, rows: int, dims: tuple[int, ...]) -> list[dict]:
    """GB/s of merging a bf16 part into an fp32 accumulator, and of copying as many bytes."""
    from weft.kernels.merge_triton import merge_into

    found = []
    for dim in dims:
        own = torch.randn(1, HEADS, rows, dim, device=machine.device)
        own_lse = torch.randn(1, HEADS, rows, device=machine.device)
        part = torch.randn_like(own).to(machine.dtype)
        part_lse = torch.randn_like(own_lse)
        moved = 2 * own.nbytes + part.nbytes + 2 * own_lse.nbytes + part_lse.nbytes
        source = torch.empty(moved // 2, dtype=torch.uint8, device=machine.device)
        target = torch.empty_like(source)
        taken = machine.seconds(lambda t=(own, own_lse, part, part_lse): merge_into(*t))
        copied = machine.seconds(lambda a=target, b=source: a.copy_(b))
        rate, copy_rate = moved / taken / 1e9, moved / copied / 1e9
        found.append(
            {
                "head_dim": dim,
                "rows": HEADS * rows,
                "gb_per_s": rate,
                "copy_gb_per_s": copy_rate,
                "share": rate / copy_rate,
            }
        )
    return found


def run(where: Where) -> str:
    """Virtual ranks on one device: TFLOP/s of all of them together, as a share of SDPA's."""
    machine = Machine(where.device, 1 if where.rehearsal else 3)
    assert accumulate_dtype(machine.dtype) == torch.float32
    lengths = (64,) if where.rehearsal else LENGTHS
    cases = [Case(n, d, c) for n in lengths for d in HEAD_DIMS for c in (False, True)]
    rows = [
        (r.tokens, r.heads, r.head_dim, r.mask, r.which, r.layout, r.kernel, r.tflops, r.share)
        for r in attention_rows(machine, cases)
    ]
    header = ["tokens", "heads", "dim", "mask", "pass", "layout", "kernel", "TFLOP/s", "share"]
    return table(header, rows) + (
        "\n\nRanks are threads on one device; share is the time of F.scaled_dot_product_attention "
        "on the whole sequence over weft's on all ranks together."
    )
