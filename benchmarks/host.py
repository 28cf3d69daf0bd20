"""Time of the CPU per attention call, with kernels, messages and votes that do nothing.

    python -m benchmarks.host
    python -m benchmarks.host "tokens(zigzag): ring=8" --profile

What the GPU waits for where a call is short. One rank of 8, 64 tokens each, bf16, on one thread:
best of 200 calls, forward and backward, and the calls of Python functions in one.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
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

    def backward(self, given: Any, view: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        _, q, k, v, *_ = given
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


if __name__ == "__main__":
    main()
