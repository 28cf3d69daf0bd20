"""Attention calls by handle: checked, agreed on by all ranks, and planned once per shape.

A custom op takes tensors and plain values, so a call is given to it by name, as torch gives
process groups by name. Plans are made, and ranks compare notes, when the op really runs; so a
compiled graph checks the same as eager code.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import Shard

from ..bias import Bias
from ..comm import Transport, coordinates
from ..declare.placements import SEQ
from ..errors import ShapeError, UnsupportedError, WeftError
from ..layout import Layout
from ..masks import Mask, describe
from ..plan.plan import Plan
from ..plan.problem import Problem

#: how a rank says that it has no kernel for its part of a call
_UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class Call:
    """What is the same for every use of one attention call, whatever the tensors' shapes."""

    axes: tuple[str, ...]
    mask: Mask
    scale: float | None
    length: object  # None, int, pair, or ((axis, int or pair), ...)
    return_lse: bool
    softcap: float | None
    kernel: str | None
    bias: Bias | None = None
    bias_tensor: bool = False
    routed: str = ""  # for learned routing: its options, which ranks agree on too


class Registered:
    """A call on a layout, with its plans by local shape."""

    LIMIT = 1024

    def __init__(self, layout: Layout, call: Call) -> None:
        _refuse_routed(layout, call)
        describe(call.mask)
        if call.bias is not None:
            call.bias.check()
        self.layout, self.call = layout, call
        self.transport: Transport = layout.bound
        self.per_sample = call.mask.per_sample or call.bias is not None
        # Which of all sequences lie here is only known from the other ranks.
        split = any(layout.mesh[d] > 1 for d in layout.batch_dims(call.axes))
        self.talks = layout.moves(call.axes) or (self.per_sample and split)
        self.exchanged = layout.exchanges(call.axes)
        self.asks_batches = split and (self.per_sample or self.exchanged)
        self._plans: OrderedDict[tuple, Plan] = OrderedDict()

    def plan(self, q: Tensor, k: Tensor, v: Tensor, agree: bool = True) -> Plan:
        """The plan for these local tensors, after every rank agreed on the call.

        Ranks compare notes on every call that communicates, over the CPU: were it only when a
        shape is new, a data-parallel rank with a smaller last batch would ask ranks that do not.
        """
        key = _key(q, k, v)
        plan = self._plans.get(key)
        if self.talks and agree:
            plan = self._agreed(q, k, v, plan)
        elif plan is None:
            _check_tensors(q, k, v)
            plan = self._make(q, k, v, self._lengths(q.shape[2], k.shape[2]))
            self.call.mask.check(plan.problem.n, plan.problem.m, len(q))
        self._plans[key] = plan
        if len(self._plans) > self.LIMIT:
            self._plans.popitem(last=False)
        return plan

    def plan_of(self, rest: Sequence[int], like: Tensor) -> Plan:
        """The plan made in the forward pass for a rest shape (b, h, n, g, m, d, e)."""
        plan = self._plans.get((*rest, like.dtype, like.device.type))
        if plan is None:
            raise ShapeError(f"no forward pass of shape {tuple(rest)} came before this one")
        return plan

    def _agreed(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan | None) -> Plan:
        failure: WeftError | None = None
        detail = ""
        try:
            _check_tensors(q, k, v)
            lengths = self._lengths(q.shape[2], k.shape[2])
            plan = plan or self._make(q, k, v, lengths)
            detail = self._describe(q, k, v, lengths)
        except WeftError as error:
            said = _UNSUPPORTED if isinstance(error, UnsupportedError) else "refused"
            failure, detail = error, f"{said}: {error}"
        rows = self._collect(detail, len(q))
        if failure is not None:
            raise failure
        batches = tuple(row[0] for row in rows)
        whole = self._whole_batch(batches)
        if self.per_sample:
            self.call.mask.check(plan.problem.n, plan.problem.m, whole)
        if self.asks_batches and plan.problem.batches != batches:
            plan = self._make(q, k, v, lengths, batches)
        return plan

    def _collect(self, detail: str, batch: int) -> list[tuple[int, ...]]:
        """Compare notes; what one rank's kernels cannot compute is unsupported on every rank."""
        try:
            return self.transport.collect("an attention call", detail, (batch,))
        except ShapeError as error:
            if f"{_UNSUPPORTED}: " in str(error):
                raise UnsupportedError(str(error)) from None
            raise

    def _whole_batch(self, batches: tuple[int, ...]) -> int:
        """How many sequences there are in all; ranks that share sequences must agree on theirs."""
        sizes, split = self.transport.sizes, self.layout.batch_dims(self.call.axes)
        said: dict[tuple[int, ...], int] = {}
        for rank, batch in enumerate(batches):
            coords = coordinates(sizes, rank)
            place = tuple(coords[d] for d in split)
            if said.setdefault(place, batch) != batch:
                raise ShapeError(
                    "ranks that attend the same sequences must hold equally many, but the batch "
                    f"sizes by rank are {list(batches)} on mesh {sizes}, split over {split}"
                )
        return sum(said.values())

    def _describe(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple) -> str:
        c = self.call
        return (
            f"axes {'+'.join(c.axes)}, lengths (queries, keys) {lengths}, heads {q.shape[1]} and "
            f"{k.shape[1]}, dims {q.shape[3]} and {v.shape[3]}, {q.dtype}, {q.device.type}, mask "
            f"{describe(c.mask)}, scale {c.scale}, softcap {c.softcap}, lse {c.return_lse}, "
            f"kernel {c.kernel}, bias {c.bias or c.bias_tensor}, routing {c.routed or 'none'}"
        )

    def _make(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple, batches=()) -> Plan:
        c = self.call
        problem = Problem(
            axes=c.axes,
            lengths=lengths,
            batch=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[3],
            value_dim=v.shape[3],
            dtype=q.dtype,
            device=q.device.type,
            mask=c.mask,
            scale=c.scale,
            softcap=c.softcap,
            return_lse=c.return_lse,
            kernel=c.kernel,
            batches=batches,
            bias=c.bias,
            bias_tensor=c.bias_tensor,
        )
        plan = Plan(self.layout, problem, self.transport.coords)
        if not self.per_sample:  # else it is checked against the batch of all ranks
            c.mask.check(problem.n, problem.m, q.shape[0])
        _check_lengths(plan, q.shape[2], k.shape[2])
        plan.check_kernels()
        return plan

    def _lengths(self, n: int, m: int) -> tuple[tuple[int, int], ...]:
        """(queries, keys) per attended axis; without a length, equal chunks on all ranks."""
        axes, length = self.call.axes, self.call.length
        if length is not None or len(axes) > 1:
            return named_lengths(axes, length)
        rules, split = self.layout.rules(axes), self.layout.shard_dims(axes[0])
        keys = [d for d in split if rules[d].key.rest == Shard(SEQ)]
        mesh = self.layout.mesh
        return ((n * _ways(mesh, split), m * _ways(mesh, keys)),)


def _refuse_routed(layout: Layout, call: Call) -> None:
    routed = [d for d, rule in layout.rules(call.axes).items() if rule.top_k]
    if routed and not call.routed:
        raise UnsupportedError(
            f"{layout.source}: mesh dim {routed[0]!r} routes keys, R(top_k), by learned weights "
            f"that plain attention over {'+'.join(call.axes)} does not have; use "
            "weft.nn.RoutedAttention, or a strategy with key 'S(seq) -> R'"
        )


def named_lengths(axes: tuple[str, ...], length: object) -> tuple[tuple[int, int], ...]:
    """(queries, keys) per attended axis, from an int, a pair, or items of axis and either."""
    if isinstance(length, tuple) and length and isinstance(length[0], tuple):
        named = dict(length)
        missing = [a for a in axes if a not in named]
        if missing:
            raise ShapeError(f"length has no entry for axis {missing[0]!r}: {named}")
        return tuple(_pair(named[a]) for a in axes)
    if len(axes) > 1:
        raise ShapeError(f"axes {axes} attended jointly need length={{axis: length, ...}}")
    return (_pair(length),)


def rest_shape(q: Tensor, k: Tensor, v: Tensor) -> list[int]:
    """(b, h, n, g, m, d, e) of tensors as they rest."""
    return [*q.shape[:3], *k.shape[1:3], *q.shape[3:4], *v.shape[3:4]]


def _key(q: Tensor, k: Tensor, v: Tensor) -> tuple:
    return (*rest_shape(q, k, v), q.dtype, q.device.type)


def _pair(length) -> tuple[int, int]:
    return (length, length) if isinstance(length, int) else (int(length[0]), int(length[1]))


def _ways(mesh, dims: Sequence[str]) -> int:
    ways = 1
    for d in dims:
        ways *= mesh[d]
    return ways


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise ShapeError(f"{name} must be (batch, heads, tokens, dim), found {tuple(t.shape)}")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ShapeError(f"q, k, v need one floating dtype, found {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ShapeError(f"q, k, v need one device, found {q.device}, {k.device}, {v.device}")
    if k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3] or q.shape[0] != k.shape[0]:
        raise ShapeError(f"q (b h n d), k (b g m d), v (b g m e) do not fit together: {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(f"query heads must be a multiple of key/value heads: {shapes}")


def _check_lengths(plan: Plan, n: int, m: int) -> None:
    reshardings = {
        "queries": (n, plan.q_resharding, plan.problem.n),
        "keys": (m, plan.kv_resharding, plan.problem.m),
    }
    for what, (found, resharding, whole) in reshardings.items():
        expected = resharding.state(0, plan.coords).size(SEQ)
        if found != expected:
            raise ShapeError(
                f"the rank at {plan.coords} has {found} local {what} of axis "
                f"{'+'.join(plan.problem.axes)}, but its chunk of a length of {whole} holds "
                f"{expected}; shard with layout.shard, and pass length= where chunks are uneven"
            )


# -- by handle ------------------------------------------------------------------------------------

_LIMIT = 1024
_lock = threading.Lock()
_numbers = itertools.count()
_handles: dict[tuple, str] = {}
_registered: OrderedDict[str, Registered] = OrderedDict()


def register(layout: Layout, *call: object) -> tuple[str, bool]:
    """The handle of a `Call` on a layout, and whether tensors are exchanged before and after.

    The least recently used handles are dropped.
    """
    key = (id(layout), call)
    handle = _handles.get(key)
    made = _registered.get(handle)
    if made is not None and made.layout is layout and made.transport is layout.transport:
        return handle, made.exchanged
    made = Registered(layout, Call(*call))
    with _lock:
        handle = _handles[key] = f"weft{next(_numbers)}"
        _registered[handle] = made
        while len(_registered) > _LIMIT:
            dropped, _ = _registered.popitem(last=False)
            for old in [k for k, h in _handles.items() if h == dropped]:
                del _handles[old]
    return handle, made.exchanged


def get(handle: str) -> Registered:
    """The call behind a handle."""
    with _lock:
        _registered.move_to_end(handle)
        return _registered[handle]


def keep(handle: str, made: Registered) -> None:
    """Bring back a call that was dropped between its forward and its backward pass."""
    with _lock:
        _registered.setdefault(handle, made)


__all__ = ["Call", "Registered", "get", "keep", "register", "rest_shape"]
