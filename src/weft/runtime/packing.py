"""All-to-alls of whole tensors, and packing of tensors into flat buffers."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .._torch import memory_of
from ..comm import Shuffle, Transport
from ..plan.memory import ALIGNMENT
from ..plan.resharding import AllToAll

Shape = tuple[tuple[int, ...], torch.dtype]


def pack(tensors: Sequence[Tensor], alignment: int = ALIGNMENT) -> Tensor:
    """Tensors as one flat buffer: in their dtype if they share it, else as bytes.

    Each begins at a multiple of `alignment` bytes, so that kernels can read it where it lies.
    """
    if len(tensors) == 1:
        return flat(tensors[0])
    shapes = [(tuple(t.shape), t.dtype) for t in tensors]
    buffer = buffer_for(shapes, tensors[0].device, alignment)
    for place, t in zip(unpack(buffer, shapes, alignment), tensors):
        place.copy_(t)
    return buffer


def flat(t: Tensor) -> Tensor:
    """A tensor's numbers in order, contiguous: `reshape` alone may leave a view with gaps."""
    return t.reshape(-1).contiguous()


def buffer_for(shapes: Sequence[Shape], device, alignment: int = ALIGNMENT) -> Tensor:
    """An empty buffer that `pack` would fill with tensors of these shapes and dtypes."""
    numel, dtype = size_of(shapes, alignment)
    return torch.empty(numel, dtype=dtype, device=device)


def size_of(shapes: Sequence[Shape], alignment: int = ALIGNMENT) -> tuple[int, torch.dtype]:
    """How many numbers, of which dtype, the buffer of tensors of these shapes and dtypes holds."""
    *_, (_, nbytes) = _places(shapes, alignment)
    dtypes = {dtype for _, dtype in shapes}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    return nbytes // dtype.itemsize, dtype


class Buffers:
    """Buffers to receive into, each used again as soon as its content is no longer needed.

    On a GPU the CPU runs ahead: memory that is freed while a message or a kernel still uses it
    cannot be given out again at once. The same buffer can: what is received into it waits, on the
    GPU, for what was launched before.

    Args:
        device: where they are.
        expected: what is going to be received in each step, in order. A buffer that the next step
            does not need is freed, so that no more is held than without keeping any.
    """

    def __init__(self, device: torch.device, expected: Iterable[list[Sequence[Shape]]]) -> None:
        self.device = device
        self._steps = deque([size_of(shapes) for shapes in step] for step in expected)
        self._step: list[tuple[int, torch.dtype]] = []
        self._spare: list[Tensor] = []
        self._retired: list[Tensor] = []

    def step(self) -> None:
        """The next step begins."""
        self._step = self._steps.popleft()

    def take(self) -> Tensor:
        """The buffer for what is received next in this step."""
        size = self._step.pop(0)
        for i, t in enumerate(self._spare):
            if (t.numel(), t.dtype) == size:
                return self._spare.pop(i)
        return torch.empty(size[0], dtype=size[1], device=self.device)

    def retire(self, buffer: Tensor) -> None:
        """What a buffer holds is no longer needed here; it may still be on its way out."""
        self._retired.append(buffer)

    def settle(self, sending: Iterable[Tensor]) -> None:
        """A step ends: buffers of which nothing is on its way out are for the next, or freed."""
        out = {memory_of(t)[0] for t in sending}
        free = [t for t in self._retired if memory_of(t)[0] not in out]
        self._retired = [t for t in self._retired if memory_of(t)[0] in out]
        wanted = Counter(self._steps[0]) if self._steps else Counter()
        self._spare = []
        for t in free:
            if wanted[t.numel(), t.dtype]:
                wanted[t.numel(), t.dtype] -= 1
                self._spare.append(t)

    def kept(self) -> list[Tensor]:
        """All that wait to be taken again."""
        return [*self._spare, *self._retired]


def unpack(buffer: Tensor, shapes: Sequence[Shape], alignment: int = ALIGNMENT) -> list[Tensor]:
    """The inverse of `pack`, as views of the buffer."""
    return [
        buffer[low // buffer.itemsize : high // buffer.itemsize].view(dtype).view(shape)
        for (shape, dtype), (low, high) in zip(shapes, _places(shapes, alignment))
    ]


def _places(shapes: Sequence[Shape], alignment: int) -> list[tuple[int, int]]:
    """Where each tensor begins and ends in a packed buffer, in bytes."""
    places, end = [], 0
    for shape, dtype in shapes:
        begin = -(-end // alignment) * alignment
        end = begin + math.prod(shape) * dtype.itemsize
        places.append((begin, end))
    return places


def all_to_all(
    transport: Transport, label: str, items: list[tuple[Tensor, AllToAll]], reverse: bool = False
) -> list[Tensor]:
    """Several all-to-alls along one mesh dim, one after another; see `AllToAll`.

    `reverse` undoes it: parts go back to where they came from (and slices are gathered). One at a
    time keeps messages short: on slow links several at once would leave some ranks idle.
    """
    results = []
    for t, e in items:
        own, size = transport.coords[e.mesh_dim], transport.sizes[e.mesh_dim]
        if not reverse and e.cat_dim is None:
            results.append(t.split(e.split_sizes, e.split_dim)[own])
            continue
        parts = _cut(t, e, reverse, size)
        shapes = [_shape(t, e, own, p, reverse) for p in range(size)]
        counts = [math.prod(shape) for shape, _ in shapes]
        sent = [part.numel() for part in parts]
        shuffle = Shuffle(e.mesh_dim, label, pack(parts, 1), sent, counts)
        incoming = transport.all_to_all(shuffle)
        parts = unpack(incoming, shapes, 1)
        results.append(torch.cat(parts, e.split_dim if reverse else e.cat_dim))
    return results


def _cut(t: Tensor, e: AllToAll, reverse: bool, size: int) -> Sequence[Tensor]:
    if not reverse:
        return t.split(e.split_sizes, e.split_dim)
    if e.cat_dim is None:
        return [t] * size
    return t.split(e.cat_sizes, e.cat_dim)


def _shape(t: Tensor, e: AllToAll, own: int, peer: int, reverse: bool):
    shape = list(t.shape)
    if reverse:
        shape[e.split_dim] = e.split_sizes[peer]
        if e.cat_dim is not None:
            shape[e.cat_dim] = e.cat_sizes[own]
    else:
        shape[e.split_dim] = e.split_sizes[own]
        shape[e.cat_dim] = e.cat_sizes[peer]
    return tuple(shape), t.dtype
