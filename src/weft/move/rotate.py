"""Rotate: chunks, and what is made of them, packed, on their way around a ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..comm import P2PBatch
from ..comm.transport import Messages
from ..plan.steps import Form


class TransferBatch:
    """Transfers of one payload along one mesh dim that begin and end together: one launch."""

    def __init__(self, mesh_dim: str, label: str, step: int) -> None:
        self.sends: list[tuple[int, Tensor]] = []
        self.receives: list[tuple[int, Tensor]] = []
        self._p2p = P2PBatch(mesh_dim, label, self.sends, self.receives, step)
        self._wait: Callable[[], None] | None = None

    def start(self, transport: Messages) -> None:
        """Begin to move all of them."""
        self._wait = transport.start(self._p2p)

    def wait(self) -> None:
        """Wait for all of them, the first time; then release the buffers that were sent."""
        if self._wait is not None:
            self._wait()
            self._wait = None
            self.sends.clear()
            self.receives.clear()


def pack(tensors: Sequence[Tensor], form: Form) -> Tensor:
    """Tensors as one flat buffer, in the dtypes of its form; one alone is copied only if need be.

    Each begins where the form says, so that kernels can read it in place.
    """
    if len(tensors) == 1:
        # `reshape` alone may leave a view with gaps.
        return tensors[0].to(form.places[0].dtype).reshape(-1).contiguous()
    buffer = tensors[0].new_empty(form.numel, dtype=form.dtype)
    for place, t in zip(unpack(buffer, form), tensors):
        place.copy_(t)
    return buffer


def unpack(buffer: Tensor, form: Form) -> tuple[Tensor, ...]:
    """The inverse of `pack`, as views of the buffer."""
    begin = buffer.storage_offset()
    return tuple(
        buffer.as_strided(shape, strides, begin + low)
        if dtype == form.dtype
        else buffer[low:high].view(dtype).view(shape)
        for low, high, shape, strides, dtype in form.places
    )
