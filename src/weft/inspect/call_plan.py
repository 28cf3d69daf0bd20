"""`layout.plan`: communication, memory and work of a call, predicted without its mesh."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch

from .._doors import opened
from ..declare.layout import LayoutDeclaration
from ..declare.traffic import Traffic
from ..errors import DeclarationError, ShapeError, UnsupportedError, shown
from ..masks import Full, Mask, describe
from ..masks.given import mask_of
from ..masks.slices import knows_nothing, sliced
from ..plan.memory import MemoryBound, memory_bound
from ..plan.plan import Plan
from ..plan.predict import Forecast, forecast_of, plans_for
from ..plan.problem import Problem
from ..plan.program import Program
from .timeline import Timeline, from_plans

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


class Passes(NamedTuple, Generic[T]):
    """One value for the forward pass and one for the backward pass.

    Attributes:
        forward: of the forward pass.
        backward: of the backward pass.

    >>> weft.Layout.load("ring-4").plan("tokens", length=64, heads=8).scores
    Passes(forward=8192, backward=8192)
    """

    forward: T
    backward: T


class CallPlan:
    """Communication, memory and work of one rank in an attention call; see `Layout.plan`.

    Args:
        layout: which layout.
        problem: the sizes of the call, over all ranks.
        rank: whose plan it is.
        plan: what `weft.plan` made for that rank.

    >>> weft.Layout.load("ring-4").plan("tokens", length=64, heads=8)
    CallPlan(ring-4, tokens, 64 x 64, Full(), rank 0)
    """

    def __init__(self, layout: LayoutDeclaration, problem: Problem, rank: int, plan: Plan) -> None:
        self.layout, self.problem, self.rank, self._plan = layout, problem, rank, plan

    def __repr__(self) -> str:
        p = self.problem
        return (
            f"CallPlan({self.layout.name}, {'+'.join(p.axes)}, {p.n} x {p.m}, "
            f"{describe(p.mask)}, rank {self.rank})"
        )

    @functools.cached_property
    def _forecast(self) -> Forecast:
        return forecast_of(self._plan)

    @property
    def traffic(self) -> Passes[Traffic]:
        """Bytes and messages of this rank per mesh dim and tensor: those that ranks count.

        >>> plan = weft.Layout.load("ring-4").plan("tokens", length=64, heads=8, head_dim=64)
        >>> plan.traffic.forward.by_tensor()
        {'kv': 196608}
        """
        return Passes(self._forecast.forward.traffic, self._forecast.backward.traffic)

    @property
    def scores(self) -> Passes[int]:
        """Entries of the score matrix that this rank computes, over its sequences and heads."""
        return Passes(self._forecast.forward.entries, self._forecast.backward.entries)

    @property
    def rest_bytes(self) -> int:
        """Bytes of this rank's q, k, v, output and logsumexp as they rest."""
        return self._forecast.rest_bytes

    @property
    def bound(self) -> Passes[MemoryBound]:
        """Peak memory that this rank holds for others."""
        return Passes(memory_bound(self._plan.forward), memory_bound(self._plan.backward))

    @property
    def program(self) -> Passes[Program]:
        """The steps of each pass: transfers that begin, blocks computed, transfers that end."""
        return Passes(self._plan.forward.program, self._plan.backward.program)

    def ranks(self) -> Iterator[CallPlan]:
        """The plans of all ranks, in rank order.

        >>> plan = weft.Layout.load("ring-4").plan("tokens", length=64, heads=8)
        >>> [each.traffic.forward.bytes for each in plan.ranks()]
        [196608, 196608, 196608, 196608]
        """
        every = range(self.layout.world_size)
        for rank, plan in zip(every, plans_for(self.layout, self.problem, every)):
            yield CallPlan(self.layout, self.problem, rank, plan)

    def _plans(self) -> list[Plan]:
        return [each._plan for each in self.ranks()]

    def timeline(self) -> Timeline:
        """The programs of all ranks, step by step; it has `draw(path)` and `chrome(path)`."""
        return from_plans(self._plans())

    def score_matrix(self, backward: bool = False) -> ScoreMatrix:
        """The rank that computes each score, as `owners`; `draw(path)` makes a picture.

        Args:
            backward: of the backward pass.
        """
        return ScoreMatrix(self._plans(), backward)


class ScoreMatrix:
    """The group of ranks that computes each entry of the score matrix.

    Args:
        plans: one per rank, in rank order.
        backward: of the backward pass.

    >>> plan = weft.Layout.load("ring-2").plan("tokens", length=4, heads=1, mask=weft.Causal())
    >>> plan.score_matrix().owners.tolist()
    [[0, -1, -1, -1], [0, 0, -1, -1], [1, 1, 1, -1], [1, 1, 1, 1]]
    """

    def __init__(self, plans: Sequence[Plan], backward: bool) -> None:
        self._made, self.backward = plans, backward

    @functools.cached_property
    def _found(self) -> tuple[np.ndarray, list[list[int]]]:
        found: tuple[np.ndarray, list[list[int]]] = opened("owners")(self._made, self.backward)
        return found

    @property
    def owners(self) -> np.ndarray:
        """(queries, keys), sampled where they are many: a number in `groups`, -1 where masked."""
        return self._found[0]

    @property
    def groups(self) -> list[list[int]]:
        """The ranks that compute the same entries, of other heads or sequences, together."""
        return self._found[1]

    def draw(self, path: str | Path, title: str = "") -> None:
        """A picture (.png, .pdf or .svg), coloured by rank.

        Args:
            path: the file to write.
            title: above the picture.

        Raises:
            WeftError: a path of another ending, or in a folder that does not exist.
        """
        opened("draw_score_matrix")(self._made, path, title, self.backward)


def plan_call(
    layout: LayoutDeclaration,
    axis: str | Sequence[str],
    *,
    length: int | tuple[int, int] | Mapping[str, int | tuple[int, int]],
    heads: int,
    kv_heads: int | None = None,
    head_dim: int = 64,
    value_dim: int | None = None,
    batch: int | None = None,
    mask: Mask = Full(),  # noqa: B008 (frozen)
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    rank: int = 0,
) -> CallPlan:
    """See `Layout.plan`."""
    asked = _problem(
        layout, axis, length, heads, kv_heads, head_dim, value_dim, batch, mask, dtype, device
    )
    if not 0 <= rank < layout.world_size:
        raise ShapeError(f"rank {rank} is none of the {layout.world_size} ranks of {layout.source}")
    return CallPlan(layout, asked, rank, next(plans_for(layout, asked, [rank])))


def _problem(
    layout: LayoutDeclaration,
    axis: str | Sequence[str],
    length: int | tuple[int, int] | Mapping[str, int | tuple[int, int]],
    heads: int,
    kv_heads: int | None,
    head_dim: int,
    value_dim: int | None,
    batch: int | None,
    mask: Mask,
    dtype: torch.dtype,
    device: str | torch.device,
) -> Problem:
    """A call's sizes over all ranks, checked, with what is not given filled in."""
    axes = tuple(axis.split("+")) if isinstance(axis, str) else tuple(axis)
    if -1 in layout.mesh.values():
        raise DeclarationError(
            f"{layout.source}: the mesh {dict(layout.mesh)} has a size of -1; say for how many "
            "ranks, with layout.resolve(world_size)"
        )
    rules = layout.rules(axes)
    for mesh_dim, rule in rules.items():
        if rule.top_k:
            raise UnsupportedError(
                f"{layout.source}: along mesh dim {mesh_dim!r} only those keys of {'+'.join(axes)}"
                " travel that a router or the model chooses, R(top_k), so its bytes depend on them"
            )
    if batch is None:
        batch = layout.batch_parts(axes)
    mask = mask_of(mask)
    problem = Problem.of(
        axes,
        length,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        batch=batch,
        dtype=dtype,
        device=device_type(device),
        mask=mask,
    )
    describe(mask)
    mask.check(problem.n, problem.m, batch)
    if not knows_nothing(mask):
        return problem
    return replace(problem, mask=sliced(mask, problem.n, problem.m, batch, heads))


def device_type(device: str | torch.device) -> str:
    """The type of a device, by which calls are planned.

    >>> device_type("cuda:1"), device_type(torch.device("cpu"))
    ('cuda', 'cpu')
    """
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        kind = None
    if kind not in ("cpu", "cuda", "meta"):
        raise ShapeError(f"device {shown(device)}: known are cpu, cuda and meta")
    return kind
