"""Stand-ins that leave a part of weft's work out, so that the same program shows the other part.

    Still    a transport that moves nothing: what is left is the compute
    Instant  a kernel that computes nothing: what is left is the traffic
    Paced    a kernel that takes its time but no core, like a device next to the host

The results are no attention; they only have its shapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import weft.kernels
from weft.comm import P2PBatch, Shuffle, Transport
from weft.kernels import Kernel, Request, TileView


class Still(Transport):
    """One rank that sends nothing; what it receives is there at once.

    Receive buffers share storage that is filled once, with what the first message of its kind held,
    so that kernels see ordinary numbers and nothing is copied.
    """

    def __init__(self, like: Transport) -> None:
        super().__init__(like.sizes, like.rank)
        self._filled: dict[tuple, Tensor] = {}

    def _start(self, p2p: P2PBatch, tag: int) -> Callable[[], None]:
        for (_, buffer), (_, own) in zip(p2p.receives, p2p.sends):
            key = (p2p.label, buffer.shape, buffer.dtype)
            if key not in self._filled:
                self._filled[key] = own.detach().clone().view(buffer.shape)
            buffer.set_(self._filled[key])
        return lambda: None

    def _all_to_all(self, shuffle: Shuffle, tag: int) -> None:
        shuffle.incoming.zero_()

    def _all_reduce(self, tensor: Tensor, mesh_dims: tuple[str, ...]) -> None:
        pass

    def _vote(
        self, mesh_dims: tuple[str, ...], digest: int, names: tuple[int, int]
    ) -> Callable[[], bool]:
        return lambda: True

    def _all_gather_text(self, text: str, mesh_dims: tuple[str, ...]) -> dict[int, str]:
        return dict.fromkeys(self.ranks_along(mesh_dims), text)


class Instant(Kernel):
    """Zeros of the right shapes, whose memory is made once."""

    name, about = "instant", "computes nothing"
    takes_out = True

    def __init__(self) -> None:
        self._made: dict[tuple, Tensor] = {}

    def refuses(self, request: Request) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: TileView) -> tuple[Tensor, Tensor]:
        return self._zeros("out", (*q.shape[:3], v.shape[-1])), self._zeros("lse", q.shape[:3])

    def backward(self, dout, q, k, v, out, lse, delta, view):
        return *(self._zeros(n, t.shape) for n, t in zip(("dq", "dk", "dv"), (q, k, v))), None

    def _zeros(self, name: str, shape: Sequence[int]) -> Tensor:
        key = (name, *shape)  # results of one call must not share memory
        if key not in self._made:
            self._made[key] = torch.zeros(shape)
        return self._made[key].detach()  # a tensor of its own, as autograd marks what ops return


class Paced(Instant):
    """`Instant` after as long as a device of `flops` operations per second would take."""

    name, about = "paced", "waits as long as a device would compute"

    def __init__(self, flops: float) -> None:
        super().__init__()
        self.flops = flops

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: TileView) -> tuple[Tensor, Tensor]:
        time.sleep(work(q, k, v) / self.flops)
        return super().forward(q, k, v, view)

    def backward(self, dout, q, k, v, out, lse, delta, view):
        time.sleep(2.5 * work(q, k, v) / self.flops)
        return super().backward(dout, q, k, v, out, lse, delta, view)


def work(q: Tensor, k: Tensor, v: Tensor) -> float:
    """Floating-point operations of one forward call, as weft's planner counts them."""
    b, h, n, d = q.shape
    return 2.0 * b * h * n * k.shape[2] * (d + v.shape[-1])


def install(flops: float) -> None:
    """Make the stand-ins known by name to `weft.attention(kernel=...)`, in this process."""
    weft.kernels.KERNELS += (Instant(), Paced(flops))
