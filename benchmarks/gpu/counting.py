"""Launches, bytes of device memory and messages of one rank's passes, counted without a GPU.

The real program runs on fake CUDA tensors: kernels by their shape functions, messages to nobody.
Every operation of a pass is one launch, but views and what torch leaves out; its tensors are read
and written once each. Bytes within attention kernels are not counted. `pytest` and `g++` are
needed, as in tests/fake_gpu.py, and the process keeps its fake device: count in one apart.

    >>> from benchmarks.gpu.counting import count_passes                      # doctest: +SKIP
    >>> passes = count_passes("tokens(zigzag): ring=8", 32_768)               # doctest: +SKIP
    >>> passes["forward"].launches.total(), passes["backward"].nbytes         # doctest: +SKIP
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import weft
from tests import fake_gpu
from weft.comm import channel
from weft.kernels import cudnn, fused
from weft.masks import Mask
from weft.plan.call import Call
from weft.runtime import ops
from weft.runtime.calls import BoundCall

#: Operations that launch nothing.
VIEWS = {
    *("_unsafe_view", "alias", "as_strided", "detach", "device", "empty", "empty_like"),
    *("empty_strided", "expand", "movedim", "narrow", "new_empty", "new_empty_strided", "permute"),
    *("select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind"),
    *("unflatten", "unsqueeze", "view"),
}
#: Operations that launch nothing where their result is the memory they were given.
SOMETIMES = {"contiguous", "expand_as", "flatten", "reshape", "to", "type_as"}
KINDS = {
    "copy": ("_to_copy", "clone", "contiguous", "copy_", "flatten", "reshape", "to"),
    "fill": ("fill_", "full", "new_full", "new_zeros", "ones_like", "zero_", "zeros", "zeros_like"),
    "add": ("add", "add_"),
}
_KIND = {name: kind for kind, names in KINDS.items() for name in names}


@dataclass
class Counted:
    """One rank's pass.

    Attributes:
        launches: kernels by kind; "attention" are those of attention.
        device_bytes: read and written in device memory, by kind, beside attention kernels.
        batches: of point-to-point messages that begin together, and all-to-alls.
        received: bytes from other ranks.
        reads: operations that wait for the GPU.
    """

    launches: Counter[str] = field(default_factory=Counter)
    device_bytes: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    received: int = 0
    reads: list[str] = field(default_factory=list)

    @property
    def beside(self) -> int:
        """Launches beside those of attention."""
        return self.launches.total() - self.launches["attention"]

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that move beside attention."""
        return self.device_bytes.total()

    def add(self, kind: str, *tensors: Tensor) -> None:
        """One launch that reads or writes each of these tensors; one that is both comes twice."""
        self.launches[kind] += 1
        if kind != "attention":
            self.device_bytes[kind] += sum(t.numel() * t.itemsize for t in tensors if t.is_cuda)


class Counting(TorchDispatchMode):
    """Counts the operations of fake CUDA tensors, in the bodies of weft's own ops too."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counted()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in fake_gpu.BODIES:
            with self:
                return fake_gpu.BODIES[op](*args)
        if fake_gpu._of_the_cpu(args, kwargs):
            with unset_fake_temporarily():
                return op(*args, **(kwargs or {}))
        result = op(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        name = op.overloadpacket.__name__
        if any(t.is_cuda for t in (*given, *made)) and not _launches_nothing(name, given, made):
            self._add(name, given, made)
        return result

    def _add(self, name: str, given: list[Tensor], made: list[Tensor]) -> None:
        if name == "_local_scalar_dense" or (name == "_to_copy" and not made[0].is_cuda):
            self.counted.reads.append(name)
        kind = "attention" if "attention" in name else _KIND.get(name, name)
        if _KIND.get(name) == "fill":  # of a tensor that is at most looked like
            given = []
        elif name == "copy_":  # its target is written alone
            given = given[1:]
        self.counted.add(kind, *given, *made)


def _launches_nothing(name: str, given: list[Tensor], made: list[Tensor]) -> bool:
    if name == "copy_":  # of `x[i] += y`: torch leaves it out
        return _same(given[0], given[1])
    return name in VIEWS or (name in SOMETIMES and _storage(made[0]) == _storage(given[0]))


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _same(a: Tensor, b: Tensor) -> bool:
    return (
        _storage(a) == _storage(b)
        and a.storage_offset() == b.storage_offset()
        and (a.stride(), a.shape) == (b.stride(), b.shape)
    )


class CountedRank(fake_gpu.OneOf):
    """One rank whose batches of messages are counted."""

    batches = 0

    def _start(self, p2p, tag: int) -> Callable[[], None]:
        self.batches += 1
        return super()._start(p2p, tag)

    def _all_to_all(self, shuffle, tag: int) -> None:
        self.batches += 1
        super()._all_to_all(shuffle, tag)


def count_passes(
    line: str,
    tokens: int,
    *,
    mask: Mask | None = None,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    rank: int | None = None,
    torch_alone: tuple[str, ...] = (),
) -> dict[str, Counted]:
    """The second forward and backward pass of one layer's attention: bf16, cuDNN, batch 1.

    Args:
        line: a layout on one line.
        tokens: of the sequence.
        mask: default causal.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: of both.
        rank: default the last, the busiest of a zigzag order.
        torch_alone: Triton kernels (`fused.FUSED`) that are taken to be missing.
    """
    layout = weft.Layout.parse(line)
    transport = CountedRank(layout.mesh, layout.world_size - 1 if rank is None else rank)
    on = layout.on(transport)
    local = on.local_length("tokens", tokens)
    bound = BoundCall(on, Call(("tokens",), mask or weft.Causal(), length=((tokens, tokens),)))

    def chunk(h: int) -> Tensor:
        shape = 1, local, h // layout.size("heads"), head_dim
        return torch.empty(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    passes: dict[str, Counted] = {}
    with counting(torch_alone) as new:
        q, k, v = chunk(heads), chunk(kv_heads), chunk(kv_heads)
        for _ in range(2):  # the first makes plans, and uploads what they need

            def measured(name: str, run: Callable, *args) -> Any:
                transport.batches, before = 0, transport.received.total()
                with new() as counted:
                    results = run(bound, *args)
                counted.batches = transport.batches
                counted.received = transport.received.total() - before
                passes[name] = counted
                return results

            _, kept = measured("forward", fake_gpu.forward_pass, q, k, v)
            measured("backward", fake_gpu.backward_pass, (q, k, v), chunk(heads), kept)
    return passes


@contextmanager
def counting(torch_alone: tuple[str, ...] = ()) -> Iterator[Callable]:
    """Fake CUDA tensors of a Hopper GPU; gives a context manager that counts what is in it.

    torch_alone: Triton kernels that are taken to be missing.
    """
    fake_gpu.guard_device()
    weft.clear_caches()
    active: list[Counted] = []

    def merge_into(total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        active[-1].add("merge", *(total, total_lse) * 2, part, part_lse)

    def merge_several(out: Tensor, lse: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        active[-1].add("merge", out, lse, *(t for part in parts for t in part))

    def sum_several(total: Tensor, parts: Sequence[Tensor]) -> None:
        active[-1].add("add", total, *parts)

    def fused_row_sums(dout: Tensor, out: Tensor, delta: Tensor) -> None:
        active[-1].add("sum", dout, out, delta)

    def fused_surrogate_out(dout: Tensor, delta: Tensor, carriers: int) -> Tensor:
        out = torch.empty_like(dout)
        active[-1].add("surrogate", dout, delta, out)
        return out

    stand_ins = merge_into, merge_several, sum_several, fused_row_sums, fused_surrogate_out
    launchers = {stand_in.__name__: stand_in for stand_in in stand_ins}
    assert launchers.keys() == fused.FUSED.keys()

    @contextmanager
    def new() -> Iterator[Counted]:
        with Counting() as mode:
            active.append(mode.counted)
            try:
                yield mode.counted
            finally:
                active.pop()

    def launcher(name: str) -> Callable | None:
        return None if name in torch_alone else launchers[name]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Tensor, "pin_memory", lambda t: t)
        patched.setattr(channel, "_is_captured", lambda: False)
        patched.setattr(fused, "launcher", launcher)
        patched.setattr(cudnn, "_missing", lambda: None)
        patched.setattr(ops, "_unaliased", _unaliased)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                yield new
        finally:
            weft.clear_caches()


def _unaliased(outputs, inputs):
    """`ops._unaliased` by storages: the addresses of fake ones are all 0."""
    taken = {_storage(t) for t in inputs if t is not None}
    apart = []
    for t in outputs:
        if t is not None and _storage(t) in taken:
            t = t.clone()
        taken |= set() if t is None else {_storage(t)}
        apart.append(t)
    return tuple(apart)


def visible_pairs(tokens: int) -> int:
    """Pairs of a causal mask."""
    return math.comb(tokens + 1, 2)
