"""Time of the CPU per attention call, with kernels, messages and votes that do nothing.

    python -m benchmarks.host
    python -m benchmarks.host "tokens(zigzag): ring=8" --profile

What the GPU waits for where a call is short. One rank of 8, 64 tokens each, bf16, on one thread:
best of 200 calls, forward and backward, and the calls of Python functions in one. Beside it, in the
same run and with the same stubs, torch's `context_parallel` (two-chunk round robin), and
ring-flash-attention's zigzag ring where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import importlib
import pstats
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import weft
import weft.kernels
from weft.comm import Transport
from weft.kernels import Kernel
from weft.runtime import merging

LAYOUTS = (
    "tokens(zigzag): ring=8",
    "tokens: ulysses=8",
    "tokens(zigzag): gather=8",
    "tokens(zigzag): tile=2x4",
    "tokens(zigzag): burst=8",
    "tokens(zigzag): ulysses=2 x ring=4",
    "tokens(zigzag): ring=2 x ulysses=4",
)
TOKENS, HEADS, DIM = 64, 8, 8


class NoMessages(Transport):
    """The transport of one rank whose messages arrive at once, with any content."""

    def _start(self, p2p: Any, tag: int) -> Callable[[], None]:
        return _done

    def _all_to_all(self, shuffle: Any, tag: int) -> None:
        pass

    def _all_reduce(self, tensor: Tensor, mesh_dims: tuple[str, ...]) -> None:
        pass

    def _vote(
        self, mesh_dims: tuple[str, ...], digest: int, names: tuple[int, int]
    ) -> Callable[[], bool]:
        return lambda: True

    def _all_gather_text(self, text: str, mesh_dims: tuple[str, ...]) -> dict[int, str]:
        return dict.fromkeys(self.ranks_along(mesh_dims), text)


def _done() -> None:
    pass


class NoKernel(Kernel):
    """Results of the right shape, as kernels lay them, with any content."""

    name, about, takes_out = "none", "", True

    def refuses(self, request: weft.kernels.Request) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: Any) -> tuple[Tensor, Tensor]:
        b, h, n, _ = q.shape
        out = q.new_empty(b, n, h, v.shape[-1]).transpose(1, 2)
        return out, q.new_empty(b, h, n, dtype=torch.float32)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Any,
        lse: Any,
        delta: Any,
        view: Any,
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Calls with `kernel="none"` compute nothing."""
    before = weft.kernels.KERNELS, merging._kernel
    weft.kernels.KERNELS = (*before[0], NoKernel())
    merging._kernel = lambda *_: _nothing  # parts become one by kernels, on a GPU
    try:
        yield
    finally:
        weft.kernels.KERNELS, merging._kernel = before
        weft.clear_caches()


def _nothing(*_: Any) -> None:
    pass


Pass = tuple[Callable[[], Tensor], Callable[[Tensor], None]]


def passes(line: str, tokens: int = TOKENS, mask: weft.Mask | None = None) -> Pass:
    """The forward and the backward pass of one rank, the last, of a layout."""
    layout = weft.Layout.parse(line)
    on = layout.on(NoMessages(layout.mesh, layout.world_size - 1))
    leaves = [_by_token().requires_grad_() for _ in range(3)]
    above = _by_token()
    mask = weft.Causal() if mask is None else mask
    length = tokens * layout.world_size

    def forward() -> Tensor:
        return weft.attention(*leaves, on, "tokens", mask, length=length, kernel="none")

    def backward(out: Tensor) -> None:
        out.backward(above)
        for leaf in leaves:
            leaf.grad = None

    return forward, backward


def _by_token() -> Tensor:
    return torch.zeros(1, TOKENS, HEADS, DIM, dtype=torch.bfloat16).transpose(1, 2)


# -- measured --------------------------------------------------------------------------------------


def python_calls(function: Callable, *args: Any) -> int:
    """Calls of functions, of Python and of C, that a call makes on this thread."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return count - 2  # the function itself, and the end of the count


def best(made: Pass, repeats: int = 200) -> tuple[float, float]:
    """Microseconds of the CPU in both passes, the best of many."""
    forward, backward = made
    for _ in range(3):
        backward(forward())
    least = [float("inf")] * 2
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            start = time.thread_time()  # which others' work disturbs less than the time of day
            out = forward()
            between = time.thread_time()
            backward(out)
            times = between - start, time.thread_time() - between
            least = list(map(min, least, times))
    finally:
        gc.enable()
    return 1e6 * least[0], 1e6 * least[1]


def context_parallel() -> Pass:
    """The same of torch's `context_parallel` on rank 7 of a fake process group of 8."""
    ring = importlib.import_module(
        "torch.distributed.tensor.experimental._context_parallel._attention"
    )

    class Rotater:
        def __init__(self, *_: Any) -> None:
            pass

        def exchange_buffers(self, buffer: Tensor) -> None:
            self.buffer = buffer

        def next_buffer(self) -> Tensor:
            return torch.empty_like(self.buffer)

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **_: Any) -> tuple:
        return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32), None

    def attend_back(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple:
        return tuple(t.new_empty(t.shape) for t in (query, key, value))

    ring._cp_options.enable_load_balance = True
    ring._create_rotater = lambda *_, **__: Rotater()
    q, k, v, above, out = (_by_token() for _ in range(5))
    lse = torch.zeros(q.shape[:3])
    group = dist.group.WORLD

    def forward() -> Tensor:
        ring._templated_ring_attention(group, 2, attend, q, k, v, is_causal=True)
        return out

    def backward(_: Tensor) -> None:
        ring._templated_ring_attention_backward(
            group, 2, attend_back, above, "grad_out", q, k, v, out, lse, True
        )

    return forward, backward


def ring_flash_attention() -> Pass | None:
    """The same of ring-flash-attention, None where it is not installed."""
    flash = types.ModuleType("flash_attn.flash_attn_interface")

    def attend(*_: Any, q: Tensor, **__: Any) -> tuple:
        b, n, h, _ = q.shape
        return torch.empty_like(q), q.new_empty(b, h, n, dtype=torch.float32), None, None

    flash._flash_attn_forward = attend  # type: ignore[attr-defined]
    flash._flash_attn_backward = lambda *_, **__: None  # type: ignore[attr-defined]
    stubs = {"flash_attn": types.ModuleType("flash_attn"), flash.__name__: flash}
    missing = {name: module for name, module in stubs.items() if name not in sys.modules}
    sys.modules.update(missing)
    try:
        ring = importlib.import_module("ring_flash_attn.zigzag_ring_flash_attn")
    except ImportError:
        return None
    finally:
        for name in missing:
            sys.modules.pop(name, None)

    class Comm(ring.RingComm):  # type: ignore[misc, name-defined]
        def commit(self) -> None:
            self._reqs: list = []

    ring.RingComm = Comm
    q, k, v, above, out = (_by_token().transpose(1, 2) for _ in range(5))
    lse = torch.zeros(1, HEADS, TOKENS)
    group = dist.group.WORLD

    def forward() -> Tensor:
        ring.zigzag_ring_flash_attn_forward(group, q, k, v, 1.0)
        return out

    def backward(_: Tensor) -> None:
        ring.zigzag_ring_flash_attn_backward(group, above, q, k, v, out, lse, 1.0)

    return forward, backward


def _row(name: str, made: Pass, repeats: int) -> str:
    forward, backward = made
    us = best(made, repeats)
    calls = python_calls(forward), python_calls(backward, forward())
    return f"{name:40s} {us[0]:8.0f} {us[1]:8.0f} {calls[0]:8d} {calls[1]:8d}"


def _profile(made: Pass) -> None:
    forward, backward = made
    for which in ("forward", "backward"):
        profile = cProfile.Profile()
        for _ in range(100):
            if which == "forward":
                out = profile.runcall(forward)
                backward(out)
            else:
                profile.runcall(backward, forward())
        print(which)
        pstats.Stats(profile).sort_stats("cumulative").print_stats(40)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table, or a profile of a layout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="where the time of the first goes")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    with without_kernels():
        if given.profile:
            _profile(passes(given.layouts[0]))
            return
        print(f"{'':40s} {'fwd us':>8s} {'bwd us':>8s} {'calls':>8s} {'calls':>8s}")
        for line in given.layouts:
            print(_row(line, passes(line), given.repeats), flush=True)
    store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    dist.init_process_group("fake", store=store, rank=7, world_size=8)
    peers = {
        "torch context_parallel, 8": context_parallel(),
        "ring-flash-attention zigzag, 8": ring_flash_attention(),
    }
    for name, made in peers.items():
        print(f"{name:40s} not installed" if made is None else _row(name, made, given.repeats))


if __name__ == "__main__":
    main()
