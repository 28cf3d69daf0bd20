"""Calls on bound layouts: planned, agreed on by the ranks that communicate, found by handle.

A custom op takes tensors and plain values, so a call is given to it by name, as torch gives
process groups by name. Lifetime: an eager call lives until its backward pass; a traced call
lives for the process, because its graph holds only its name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _caching as caching
from .._digest import is_plain, number_of
from ..comm.channel import Channel, refuse, refused_everywhere
from ..comm.origin import origin
from ..declare.layout_file import HEADS
from ..declare.mesh import coordinates
from ..errors import ShapeError, UnsupportedError, WeftError
from ..masks.grid import check_grids
from ..masks.slices import Slices, knows_nothing, varies
from ..move import handles
from ..plan.cache import plan_for_rank
from ..plan.call import Call, reach, refuse_routed
from ..plan.plan import Plan
from ..plan.problem import LocalProblem
from ..plan.travel import Travel, choose_travel
from . import checks
from .asking import slices_of

if TYPE_CHECKING:
    from ..layout import Layout

#: How many calls a layout keeps, and plans a call: with those of the last few shapes.
_KEPT_CALLS, _KEPT_PLANS = 16, 4
#: Of how many shapes a rank remembers the batches of all ranks.
_KEPT_BATCHES = 64
_FORWARD, _BACKWARD = "an attention call", "the backward pass of an attention call"


class BoundCall:
    """A call on a bound layout."""

    def __init__(self, layout: Layout, call: Call) -> None:
        refuse_routed(layout.unbound, call)
        self.layout, self.call, self.transport = layout, call, layout.bound
        self.has_functions = call.has_functions
        #: nothing but data: no functions, and no tensors of the user's
        self.plain = not (self.has_functions or call.learned_bias or call.choice)
        self.reach = reach(layout.unbound, call.axes)
        #: whether the mask is asked about every pair of positions, as it says nothing of intervals
        self.asks = knows_nothing(call.mask)
        per_sample = call.bias is not None and call.bias.per_sample
        per_sample |= bool(self.reach.batch) and varies(call.mask, 0, torch.device("cpu"))
        # The indices of this rank's sequences are only known from the other ranks.
        self.asks_batches = self.reach.asks_batches(per_sample)
        #: Which gradients a graph wants that makes the call: its tensors do not say it as it runs.
        self.gradients: str | None = None
        #: The module that makes the call, "" in a graph; None: read as the call is made.
        self.origin: str | None = None
        self.generation = caching.generation
        #: Its name, by which ops get it.
        self.handle = handles.new_name()
        self._plans: dict[tuple, Plan] = {}
        self._slices: dict[tuple, Slices] = {}
        self._content = ""
        dims = {*self.reach.moving, *(self.reach.batch if self.asks_batches else ())}
        self.mesh_dims = tuple(d for d in layout.mesh if d in dims)

    @classmethod
    def kept(cls, layout: Layout, key: tuple) -> BoundCall | None:
        """The call that a layout keeps for these options, by value."""
        bound = layout.calls.pop(key, None)  # threads may share a layout: one of them gets it
        if bound is None or bound.generation != caching.generation:
            return None
        layout.calls[key] = bound
        return bound

    @classmethod
    def keep(cls, layout: Layout, key: tuple, call: Call) -> BoundCall:
        """The call on this layout, which keeps a few calls of plain data."""
        bound = layout.calls[key] = cls(layout, call)
        if len(layout.calls) > _KEPT_CALLS:
            layout.calls.popitem(last=False)
        return bound

    def with_floats(self, scale: float | None, softcap: float | None) -> BoundCall:
        """The same call with another scale and soft cap: a graph passes them as it runs."""
        if (scale, softcap) == (self.call.scale, self.call.softcap):
            return self
        result = BoundCall(self.layout, replace(self.call, scale=scale, softcap=softcap))
        result.gradients, result.origin = self.gradients, self.origin
        return result

    # -- planning ------------------------------------------------------------------------------

    def plan(
        self, rest: Sequence[int], dtype: torch.dtype, device: str, batches: tuple[int, ...] = ()
    ) -> Plan:
        """The plan for tensors of a rest shape, (b, h, n, g, m, d, e); `batches` of all ranks."""
        problem = self.problem(rest, dtype, device, batches)
        return plan_for_rank(self.layout.unbound, problem, self.layout.rank)

    def problem(
        self, rest: Sequence[int], dtype: torch.dtype, device: str, batches: tuple[int, ...] = ()
    ) -> LocalProblem:
        """The sizes and options of the call for a rest shape."""
        b, h, n, g, m, d, e = (int(x) for x in rest)
        c = self.call
        return LocalProblem(
            axes=c.axes,
            lengths=c.lengths(self.layout.unbound, n, m),
            batch=b,
            heads=h,
            kv_heads=g,
            head_dim=d,
            value_dim=e,
            dtype=dtype,
            device=device,
            mask=self._slices.get((*rest, *batches), c.planned_mask),
            scale=c.scale,
            softcap=c.softcap,
            return_lse=c.return_lse,
            kernel=c.kernel,
            batches=batches,
            bias=c.bias is not None,
            bias_tensor=c.learned_bias,
            choice=c.choice,
            expanded=c.expanded,
        )

    def travel(self, q: Tensor, k: Tensor, v: Tensor) -> Travel:
        """The choice between latents and what they expand to, by plans; shapes are checked."""
        rest = self.rest_shape(q, k, v)
        problem = self.problem(rest, q.dtype, q.device.type)
        if self.asks_batches:  # other ranks may have others
            problem = replace(problem, batch=1)
        return choose_travel(self.layout.unbound, problem)

    def plan_of(self, rest: Sequence[int], like: Tensor, batches: Tensor | None) -> Plan:
        """The plan that the forward pass agreed on, from the numbers it saved."""
        if batches is None or not self.asks_batches:
            kept = self._plans.get((*rest, like.dtype, like.device.type))
            return kept or self.plan(rest, like.dtype, like.device.type)
        sizes = tuple(batches.tolist()[1 : 1 + self.transport.size])
        return self.plan(rest, like.dtype, like.device.type, sizes)

    def shapes(self, q: Tensor, k: Tensor, v: Tensor) -> Plan:
        """A plan for tensors whose shapes alone matter: nothing is asked of other ranks."""
        checks.check_tensors(q, k, v)
        return self.plan(rest_shape(q, k, v), q.dtype, q.device.type)

    # -- agreeing ------------------------------------------------------------------------------

    def rest_shape(self, q: Tensor, k: Tensor, v: Tensor) -> list[int]:
        """The checked shape of tensors as they rest; see the function of this name."""
        expanded = self.call.expanded
        if expanded is None:
            checks.check_tensors(q, k, v)
            return rest_shape(q, k, v)
        checks.check_latents(q, k, v, expanded)
        return [*rest_shape(q, k, v)[:-1], expanded.value_dim]

    def begin(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None = None,
        chosen: Tensor | None = None,
        parameters: Sequence[Tensor] = (),  # those that expand latents
    ) -> tuple[Plan, Channel, Tensor]:
        """The first part of a forward pass: its plan, its channel, and what backward needs.

        The last is int64, each part where there is one: the pass's number, the batches of all
        ranks, and the digest of the values that the user's functions see.
        """
        gradients = self.gradients or gradients_wanted(q, k, v, bias, *parameters)
        with refused_everywhere(self.refuse):
            rest = self.rest_shape(q, k, v)
            plan = self._checked_plan(rest, q)
            checks.probe_functions(self.call, q.device)
            checks.check_place("the bias", bias, q)
            if bias is not None:
                batch = None if self.asks_batches else plan.compute.query.batch
                checks.check_bias(plan, bias, batch)
            if chosen is not None:
                expanded = self.call.expanded
                heads = k.shape[1] if expanded is None else expanded.heads
                checks.check_choice(plan, chosen, q, heads)
            content = self.content
        described = content, plan, f", gradients {gradients}"
        where = self.origin
        if where is None:
            where = origin() if self.mesh_dims and self.call.name is None else ""
        batches: tuple[int, ...] = ()
        total = rest[0]
        if not self.asks_batches:
            channel = self._channel(_FORWARD, *described, where)
        else:
            local = 1 if bias is None else len(bias)
            channel, batches, samples = self._with_batches(described, rest, local, where)
            total = self._whole_batch(batches)
            plan = self.plan(rest, q.dtype, q.device.type, batches)
            checks.check_samples(plan, samples)
            self._check_content(plan, total)
        if self.asks:
            whole = total, rest[1] * self.layout.size(HEADS)
            slices = slices_of(self.call.mask, content, plan.problem, whole, channel)
            plan = self._plan_by(slices, rest, q, batches)
        numbers = [channel.number, *batches] if self.mesh_dims else [*batches]
        numbers += [number_of(content)] if self.has_functions else []
        return plan, channel, torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def _plan_by(
        self, slices: Slices | None, rest: list[int], like: Tensor, batches: tuple[int, ...]
    ) -> Plan:
        """The plan of a mask that was asked, also for the backward pass."""
        if slices is not None:
            while len(self._slices) >= _KEPT_BATCHES:
                self._slices.pop(next(iter(self._slices)))
            self._slices[(*rest, *batches)] = slices
        plan = self.plan(rest, like.dtype, like.device.type, batches)
        if not batches:
            self._plans[(*rest, like.dtype, like.device.type)] = plan
        return plan

    def _with_batches(
        self, described: tuple[str, Plan, str], rest: list[int], samples: int, where: str
    ) -> tuple[Channel, tuple[int, ...], tuple[int, ...]]:
        """A channel that ranks agreed on, the batches of all, and the samples of their biases.

        Where ranks met with these shapes before, they vote on the batches of then, and exchange
        theirs only if that fails.
        """
        agreed, key = self.transport.batches, (self.mesh_dims, *rest, samples)
        batches = f", batches {agreed.get(key, 'unknown')}"
        channel = self._channel(_FORWARD, *described, where, batches)
        if not channel.agrees() or key not in agreed:
            agreed[key] = self._of_all(channel.exchange((rest[0], samples)))
            if len(agreed) > _KEPT_BATCHES:
                agreed.popitem(last=False)
        return channel, *agreed[key]

    def plan_alone(self, q: Tensor, k: Tensor, v: Tensor) -> Plan:
        """The plan of a call of plain data that exchanges nothing with other ranks."""
        checks.check_tensors(q, k, v)
        return self._checked_plan(rest_shape(q, k, v), q)

    def _checked_plan(self, rest: list[int], like: Tensor) -> Plan:
        """The plan for a rest shape that fits the layout and the mask."""
        key = (*rest, like.dtype, like.device.type)
        plan = self._plans.get(key)
        if plan is None:
            plan = self.plan(rest, like.dtype, like.device.type)
            checks.check_lengths(plan, rest[2], rest[4])
            if not self.asks_batches:
                self._check_content(plan, rest[0])
            while len(self._plans) >= _KEPT_PLANS:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = plan
        return plan

    def refuse(self, error: WeftError) -> None:
        """Tell the ranks that wait for this one that it refuses the call."""
        if self.mesh_dims:
            refuse(self.transport, self.mesh_dims, _FORWARD, error)

    def begin_backward(self, plan: Plan, agreed: Tensor) -> Channel:
        """The channel of the first part of a backward pass, that of the pass `agreed` is from."""
        with refused_everywhere(self.refuse):
            content = self.content
            if self.has_functions and number_of(content) != agreed.tolist()[-1]:
                functions = {
                    "mask": not is_plain(self.call.mask),
                    "bias": self.call.bias is not None,
                }
                named = " and the ".join(name for name, is_used in functions.items() if is_used)
                raise UnsupportedError(
                    f"the backward pass calls the {named} again, and values it refers to have"
                    " changed since the forward pass; give every call separate functions, over"
                    " values that stay until its backward pass has run"
                )
        number = f", of pass {agreed.tolist()[0]}" if self.mesh_dims else ""
        return self._channel(_BACKWARD, content, plan, number)

    def _channel(
        self,
        label: str,
        content: str,
        plan: Plan,
        extra: str,
        where: str = "",
        batches: str = "",
    ) -> Channel:
        if not self.mesh_dims:
            return Channel(self.transport, (), 0, label, str)
        shapes = self._describe(plan)
        on_cuda = plan.problem.device == "cuda"
        digest = number_of(f"{label} {content} {shapes}{extra}")
        return Channel(
            self.transport,
            self.mesh_dims,
            digest,
            label,
            lambda: f"{label}, {self._detail(shapes + extra, content)}",
            vote=number_of(f"{digest}{batches}") if batches else None,
            kind=number_of(f"{label} {content} {shapes}") if on_cuda else None,
            origin=where,
        )

    @property
    def content(self) -> str:
        """The call and its layout by value: of functions, their values as they are now."""
        if self.has_functions or not self._content:
            self._content = f"{self.layout.digest} {self.call.content}"
        return self._content

    def _detail(self, described: str, content: str) -> str:
        """This rank's call for people, with its values' digest: other values may look the same."""
        return (
            f"layout {self.layout.name!r}, {self.call.text}, {described} "
            f"[{number_of(content) & 0xFFFFFFFF:08x}]"
        )

    def _describe(self, plan: Plan) -> str:
        """The part of the tensors' shapes that ranks must have in common."""
        p = plan.problem
        batch = "any" if self.asks_batches else p.batch
        return (
            f"lengths (queries, keys) {p.lengths}, batch {batch}, heads {p.heads} and {p.kv_heads},"
            f" dims {p.head_dim} and {p.value_dim}, {p.dtype}, {p.device}"
        )

    # -- batches -------------------------------------------------------------------------------

    def _of_all(
        self, along: Mapping[int, Sequence[int]]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The local batch of every rank, and how many samples its bias is of.

        `along` maps participating ranks to (batch, bias samples); other ranks copy a peer with the
        same coordinates.
        """
        sizes, by_place = self.transport.sizes, {}
        for rank, numbers in along.items():
            place = coordinates(sizes, rank)
            by_place[tuple(place[d] for d in self.mesh_dims)] = numbers
        places = (coordinates(sizes, rank) for rank in range(self.transport.size))
        of_ranks = [by_place[tuple(place[d] for d in self.mesh_dims)] for place in places]
        return tuple(batch for batch, _ in of_ranks), tuple(of_bias for _, of_bias in of_ranks)

    def _whole_batch(self, batches: tuple[int, ...]) -> int:
        """The global number of sequences; ranks that share sequences must agree on theirs."""
        sizes, split = self.transport.sizes, self.reach.batch
        by_place: dict[tuple[int, ...], int] = {}
        for rank, batch in enumerate(batches):
            coords = coordinates(sizes, rank)
            place = tuple(coords[d] for d in split)
            if by_place.setdefault(place, batch) != batch:
                raise ShapeError(
                    "ranks that attend the same sequences must hold equally many, but the batch "
                    f"sizes by rank are {list(batches)} on mesh {sizes}, split over {split}"
                )
        return sum(by_place.values())

    def _check_content(self, plan: Plan, batch: int) -> None:
        self.call.mask.check(plan.problem.n, plan.problem.m, batch)
        check_grids(self.call.mask, tuple(n for n, _ in plan.problem.lengths))


def gradients_wanted(*tensors: Tensor | None) -> str:
    """ "wanted" if a call will have a backward pass; all ranks must agree, as all take part."""
    return "wanted" if any(t is not None and t.requires_grad for t in tensors) else "none"


def rest_shape(q: Tensor, k: Tensor, v: Tensor) -> list[int]:
    """(b, h, n, g, m, d, e) of tensors as they rest."""
    return [*q.shape[:3], *k.shape[1:3], *q.shape[3:4], *v.shape[3:4]]


# -- by handle ------------------------------------------------------------------------------------


def handle_of(bound: BoundCall, gradients: str | None = None) -> str:
    """Handle of a call, valid while it lives; for a graph, of a copy that fixes `gradients`."""
    if gradients is not None:
        bound = BoundCall(bound.layout, bound.call)  # a separate one: layouts share theirs
        bound.gradients, bound.origin = gradients, ""
        with contextlib.suppress(UnsupportedError):  # is refused when the graph runs, on all ranks
            # torch keeps compiled graphs on disk: those of other calls and layouts are not this.
            bound.handle += f"-{number_of(bound.content):x}"
        return handles.keep_traced(bound)
    handles.name(bound)
    return bound.handle
