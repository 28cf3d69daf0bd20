"""What a hop of a ring costs its host: seconds of a core, with messages to nobody.

    python -m benchmarks.hop

One rank of `tokens(zigzag): ring=16` less one of `ring=8`, over the eight steps between, on
tensors so small that kernels and merges take what their calls take: `host.step` of hardware/*.toml.
NCCL's own share of a message is not in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import weft
from tests import fake_gpu

ROWS, REPEATS = 16, 300


class Nobody(fake_gpu.OneOf):
    """A rank whose messages go nowhere and are there at once."""

    def _start(self, p2p, tag: int) -> Callable[[], None]:
        return lambda: None


def seconds(ranks: int) -> float:
    """The forward pass of the last rank, the best quarter's worst."""
    layout = weft.Layout.parse(f"tokens(zigzag): ring={ranks}")
    layout = layout.on(Nobody(layout.mesh, ranks - 1))
    q, k, v = (torch.randn(1, 8, ROWS, 32) for _ in range(3))
    times = []
    for _ in range(REPEATS):
        begin = time.thread_time()
        weft.attention(q, k, v, layout=layout, axis="tokens", mask=weft.Full())
        times.append(time.thread_time() - begin)
    return statistics.quantiles(times, n=4)[0]


if __name__ == "__main__":
    print(f"{(seconds(16) - seconds(8)) / 8 * 1e6:.0f} us a hop")
