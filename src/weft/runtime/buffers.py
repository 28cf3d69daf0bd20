"""All-to-alls of full tensors, and packing of tensors into flat buffers."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import compress

import torch
from torch import Tensor

from .._torch import memory_of
from ..comm import Shuffle
from ..comm.transport import Messages
from ..plan.memory import ALIGNMENT
from ..plan.resharding import AllToAll

Shape = tuple[tuple[int, ...], torch.dtype]


def pack(tensors: Sequence[Tensor], alignment: int = ALIGNMENT) -> Tensor:
    """Tensors as one flat buffer: in their dtype if they share it, else as bytes.

    Each begins at a multiple of `alignment` bytes, so that kernels can read it in place.
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


def buffer_for(shapes: Sequence[Shape], device: torch.device, alignment: int = ALIGNMENT) -> Tensor:
    """An empty buffer that `pack` would fill with tensors of these shapes and dtypes."""
    numel, dtype = size_of(shapes, alignment)
    return torch.empty(numel, dtype=dtype, device=device)


def size_of(shapes: Sequence[Shape], alignment: int = ALIGNMENT) -> tuple[int, torch.dtype]:
    """The length and dtype of a buffer for tensors of these shapes and dtypes."""
    *_, (_, nbytes) = _places(shapes, alignment)
    dtypes = {dtype for _, dtype in shapes}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    return nbytes // dtype.itemsize, dtype


class Buffers:
    """Buffers to receive into, each used again as soon as its content is no longer needed.

    On a GPU the CPU runs ahead: memory that is freed while a message or a kernel still uses it
    cannot be given out again at once. The same buffer can: what is received into it waits, on the
    GPU, for what was launched before.

    `expected` lists the shapes to be received in each step, in order. A buffer that the next
    step does not need is freed, so that no more is held than without keeping any.
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
        """Releases a buffer that this rank no longer needs; it may still be in flight."""
        self._retired.append(buffer)

    def recycle(self, sending: Iterable[Tensor]) -> None:
        """A step ends: buffers of which nothing is on its way out are for the next, or freed."""
        out = {memory_of(t)[0] for t in sending}
        free = [t for t in self._retired if memory_of(t)[0] not in out]
        self._retired = [t for t in self._retired if memory_of(t)[0] in out]
        needed = Counter(self._steps[0]) if self._steps else Counter()
        self._spare = []
        for t in free:
            if needed[t.numel(), t.dtype]:
                needed[t.numel(), t.dtype] -= 1
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
    """The byte range of each tensor in a packed buffer."""
    places, end = [], 0
    for shape, dtype in shapes:
        begin = -(-end // alignment) * alignment
        end = begin + math.prod(shape) * dtype.itemsize
        places.append((begin, end))
    return places


def all_to_all(
    transport: Messages,
    label: str,
    items: list[tuple[Tensor, AllToAll]],
    reverse: bool = False,
) -> list[Tensor]:
    """Several all-to-alls along one mesh dim in one exchange; see `AllToAll`.

    `reverse` undoes it: parts go back to where they came from (and slices are gathered).

    outgoing  q for rank 0, k for rank 0, q for rank 1, k for rank 1
    """
    moving = [reverse or e.cat_dim is not None for _, e in items]
    own = transport.coords[items[0][1].mesh_dim]
    arrived = iter(_exchange(transport, label, [*compress(items, moving)], reverse))
    return [
        next(arrived) if moves else t.split(e.split_sizes, e.split_dim)[own]
        for moves, (t, e) in zip(moving, items)
    ]


def _exchange(
    transport: Messages, label: str, items: list[tuple[Tensor, AllToAll]], reverse: bool
) -> list[Tensor]:
    if not items:
        return []
    mesh_dim = items[0][1].mesh_dim
    own, size = transport.coords[mesh_dim], transport.sizes[mesh_dim]
    dtypes = [t.dtype for t, _ in items]
    # A logsumexp next to a half-precision output goes as pairs of its numbers: without padding.
    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
    items = [(t.view(narrow), e) for t, e in items]
    cuts = [_cut(t, e, reverse, size) for t, e in items]
    shapes = [_shape(t, e, own, peer, reverse) for peer in range(size) for t, e in items]
    counts = [math.prod(shape) for shape, _ in shapes]
    equal = all(len({*(e.cat_sizes if reverse else e.split_sizes)}) <= 1 for _, e in items)
    shuffle = Shuffle(
        mesh_dim,
        label,
        _equal_parts(items, reverse, size)
        if equal
        else pack([parts[peer] for peer in range(size) for parts in cuts], 1),
        [sum(parts[peer].numel() for parts in cuts) for peer in range(size)],
        [sum(counts[i : i + len(items)]) for i in range(0, len(counts), len(items))],
        all(e.even for _, e in items),
    )
    incoming = transport.all_to_all(shuffle)
    del shuffle, cuts  # frees the sent buffer while parts are joined
    parts = unpack(incoming, shapes, 1)
    return [
        torch.cat(parts[i :: len(items)], e.split_dim if reverse else _joined_along(e)).view(dtype)
        for i, ((_, e), dtype) in enumerate(zip(items, dtypes))
    ]


def _joined_along(e: AllToAll) -> int:
    assert e.cat_dim is not None  # a slice, which joins nothing, is no all-to-all
    return e.cat_dim


def _cut(t: Tensor, e: AllToAll, reverse: bool, size: int) -> Sequence[Tensor]:
    if not reverse:
        return t.split(e.split_sizes, e.split_dim)
    if e.cat_dim is None:
        return [t] * size
    return t.split(e.cat_sizes, e.cat_dim)


def _equal_parts(items: list[tuple[Tensor, AllToAll]], reverse: bool, size: int) -> Tensor:
    """Parts of one size, by rank: one copy per tensor, however many ranks there are."""
    by_rank = []
    for t, e in items:
        dim = e.cat_dim if reverse else e.split_dim
        by_rank.append(
            t.expand(size, *t.shape)
            if dim is None
            else t.unflatten(dim, (size, t.shape[dim] // size)).movedim(dim, 0)
        )
    if len(by_rank) == 1:
        return flat(by_rank[0])
    widths = [t.numel() // size for t in by_rank]
    buffer = by_rank[0].new_empty(size, sum(widths))
    for place, t in zip(buffer.split(widths, 1), by_rank):
        place.view(t.shape).copy_(t)
    return buffer.view(-1)


def _shape(t: Tensor, e: AllToAll, own: int, peer: int, reverse: bool) -> Shape:
    shape = list(t.shape)
    if reverse:
        shape[e.split_dim] = e.split_sizes[peer]
        if e.cat_dim is not None:
            shape[e.cat_dim] = e.cat_sizes[own]
    else:
        shape[e.split_dim] = e.split_sizes[own]
        shape[_joined_along(e)] = e.cat_sizes[peer]
    return tuple(shape), t.dtype
