"""Candidates of a search: the degree of each role at each level of the hardware.

    h100-8, 64 devices            node: 8 ranks      cluster: 8 nodes
    tokens: ring=8 x ulysses=8    head 8             query 8

One mesh dim per role and level: the outer levels' dims are the outer ones, so that a level's groups
are boxes of the mesh. Ranks of one level are interchangeable, so how dims are ordered within a
level, or whether one dim spans two levels, only gives the same traffic again or more of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from weft.declare.hardware import Hardware
from weft.declare.layout_file import HEADS
from weft.errors import DeclarationError, did_you_mean
from weft.layout import Layout
from weft.masks import Full
from weft.plan.problem import Problem

from .flow import BALANCED, is_causal

#: Within a level, outermost first.
ROLES = ("batch", "query", "key", "head", "tensor")
#: What carries a query role: keys and values in a ring, in one collective, forward only, or those
#: of them that queries see.
QUERY_STRATEGIES = ("ring", "gather", "burst", "seen")
STRATEGIES = {"batch": "dp", "key": "pass_q", "head": "ulysses", "tensor": "tp"}
#: Orders of tokens that candidates have.
ORDERS = ("contiguous", *BALANCED)
#: What a search may be told to keep to.
NAMES = (*QUERY_STRATEGIES, "pass_q", "ulysses", "tile", "dp", "tp")


class Dim(NamedTuple):
    """A mesh dim of a candidate."""

    role: str  # of ROLES
    strategy: str  # of NAMES
    level: int  # number of the hardware's level, innermost 0
    ways: int


@dataclass(frozen=True)
class Candidate:
    """One way to use devices for an attention call."""

    dims: tuple[Dim, ...]  # the mesh, outermost first
    order: str = "contiguous"

    def ways(self, *roles: str) -> int:
        """Number of ways in which some roles split together."""
        return math.prod(d.ways for d in self.dims if d.role in roles)

    @cached_property
    def strategies(self) -> set[str]:
        """Strategy names used by this candidate; a ring with pass-Q counts as a tile."""
        names = {d.strategy for d in self.dims}
        return names | {"tile"} if {"ring", "pass_q"} <= names else names

    def layout(
        self, axis: str = "tokens", rates: Mapping[str, Any] | None = None, about: str = ""
    ) -> Layout:
        """Its declaration.

        >>> dims = (Dim("query", "ring", 1, 4), Dim("head", "ulysses", 0, 8))
        >>> Candidate(dims).layout().name
        'tokens: ring=4 x ulysses=8'
        """
        mesh: dict[str, int] = {}
        shard: dict[str, list[str]] = {}
        entries: list[dict[str, object]] = []
        terms: dict[str, list[str]] = {"batch": [], axis: [], HEADS: []}
        for d in self.dims:
            name = d.strategy
            if name in mesh:
                name = next(f"{name}{i}" for i in itertools.count(2) if f"{name}{i}" not in mesh)
            mesh[name] = d.ways
            owner = {"batch": "batch", "tensor": HEADS}.get(d.role, axis)
            shard.setdefault(owner, []).append(name)
            terms[owner].append(f"{d.strategy if owner == axis else name}={d.ways}")
            if owner == axis:
                entries.append({"strategy": d.strategy, "on": name})
        data = {"about": about, "mesh": mesh, "shard": shard, "attend": {axis: entries}}
        if rates:
            data["rates"] = rates
        if self.order != "contiguous":
            data["order"] = {axis: self.order}
        line = self._line(axis, terms, mesh)
        return Layout.from_dict(
            {k: v for k, v in data.items() if v or k == "attend"}, line, f"layout {line!r}"
        )

    def _line(self, axis: str, terms: Mapping[str, list[str]], mesh: Iterable[str]) -> str:
        """The layout on one line, and the mesh's order where it is not the line's."""
        ordered = axis if self.order == "contiguous" else f"{axis}({self.order})"
        parts = {name: " x ".join(of) for name, of in terms.items() if of or name == axis}
        line = "; ".join(
            f"{ordered if n == axis else n}: {of or 'local'}" for n, of in parts.items()
        )
        places = [{"batch": 0, "tensor": 2}.get(d.role, 1) for d in self.dims]
        return line if places == sorted(places) else f"{line} (mesh: {' x '.join(mesh)})"


def level_sizes(hardware: Hardware, devices: int) -> tuple[int, ...]:
    """Number of groups of the level below that each level joins, innermost first.

    >>> level_sizes(Hardware.load("h100-8"), 64)
    (8, 8)
    """
    sizes, left = [], devices
    for level in hardware.level:
        size = left if level.ranks == -1 else min(level.ranks, left)
        if size and left % size:
            raise DeclarationError(
                f"{devices} devices do not fill groups of {level.ranks} at level {level.name!r}; "
                f"use a multiple of {devices // left * level.ranks}, or fewer than that"
            )
        sizes.append(size)
        left //= size
    if left > 1:
        most = devices // left
        raise DeclarationError(
            f"{devices} devices are more than the {most} that the outermost level "
            f"{hardware.level[-1].name!r} joins"
        )
    return tuple(sizes)


def factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write a number as a product.

    >>> list(factorisations(4, 2))
    [(1, 4), (2, 2), (4, 1)]
    """
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in factorisations(number // first, parts - 1))


def check_only(only: Iterable[str]) -> frozenset[str]:
    """Strategies to which a search is restricted."""
    wanted = frozenset(only)
    for name in wanted:
        if name not in NAMES:
            raise DeclarationError(f"--only: no strategy {name!r}{did_you_mean(name, NAMES)}")
    return wanted | {"ring", "pass_q"} if "tile" in wanted else wanted


class Refused(dict[str, int]):
    """Why candidates were left out, in words -> how many."""

    def add(self, why: str) -> None:
        """One more for a reason."""
        self[why] = self.get(why, 0) + 1


def candidates(
    problem: Problem,
    hardware: Hardware,
    devices: int,
    only: Iterable[str] = (),
    refused: Refused | None = None,
    orders: Collection[str] = ORDERS,
) -> Iterator[Candidate]:
    """Every candidate for a call that heads, sequences and lengths allow.

    >>> import torch
    >>> p = Problem.of("tokens", 64, heads=4, head_dim=8, dtype=torch.bfloat16)
    >>> for c in candidates(p, Hardware.load("h100-8"), 2, only=["ring", "ulysses"]):
    ...     c.layout().name
    'tokens: ulysses=2'
    'tokens: ring=2'
    """
    refused = Refused() if refused is None else refused
    wanted = check_only(only)
    roles = [role for role in ROLES if _allowed(role, problem, wanted)]
    if not roles:
        roles = ["query"]
    sizes = level_sizes(hardware, devices)
    known = wanted or {*QUERY_STRATEGIES}
    queries = [
        s for s in QUERY_STRATEGIES if s in known and not ("ring" in known and _as_ring(s, problem))
    ]
    per_level = [list(factorisations(size, len(roles))) for size in sizes]
    for levels in itertools.product(*per_level):
        ways = {role: math.prod(level[i] for level in levels) for i, role in enumerate(roles)}
        why = _unfit(problem, ways)
        if why:
            refused.add(why)
            continue
        split = [
            (role, level, levels[level][i])
            for level in reversed(range(len(sizes)))
            for i, role in enumerate(roles)
            if levels[level][i] > 1
        ]
        for query in queries if ways.get("query", 1) > 1 else queries[:1] or ["ring"]:
            dims = tuple(
                Dim(role, query if role == "query" else STRATEGIES[role], level, size)
                for role, level, size in split
            )
            for order in _orders(problem, ways, orders):
                yield Candidate(dims, order)


def _as_ring(strategy: str, problem: Problem) -> bool:
    """True if a strategy is sure to do what a ring does: every chunk that is seen is seen whole."""
    return strategy == "seen" and (isinstance(problem.mask, Full) or is_causal(problem))


def _allowed(role: str, problem: Problem, wanted: frozenset[str]) -> bool:
    names = set(QUERY_STRATEGIES) if role == "query" else {STRATEGIES[role]}
    return (not wanted or bool(names & wanted)) and (role != "batch" or problem.batch > 1)


def _unfit(problem: Problem, ways: dict[str, int]) -> str:
    """Why a call cannot be split so, "" if it can."""
    tensor, head, batch = (ways.get(role, 1) for role in ("tensor", "head", "batch"))
    rows = math.prod(ways.get(role, 1) for role in ("query", "key", "head"))
    if problem.kv_heads % tensor:
        return f"{problem.kv_heads} key/value heads do not divide over the ranks of tp"
    if problem.heads // tensor < head:
        return f"{problem.heads} heads leave some of the ranks of tp and ulysses without one"
    if problem.batch % batch:
        return f"{problem.batch} sequences do not divide over the ranks of dp"
    if rows > 1 and min(problem.n, problem.m) < 2 * rows:
        return "fewer than 2 tokens for some ranks"
    return ""


def _orders(
    problem: Problem, ways: dict[str, int], known: Collection[str] = ORDERS
) -> tuple[str, ...]:
    """Orders that may win: where only heads are split, every rank computes all positions.

    Under a causal mask the last of contiguous chunks has nearly twice the mean work and zigzag is
    within 2 %, so striped pays where ranks compute single chunks: those of several, as heads are
    split, are runs of one token each.
    """
    if ways.get("query", 1) * ways.get("key", 1) == 1 or isinstance(problem.mask, Full):
        return ("contiguous",)
    balanced = BALANCED if ways.get("head", 1) == 1 else BALANCED[:1]
    best = balanced if is_causal(problem) else ("contiguous", *balanced)
    return tuple(order for order in best if order in known) or ("contiguous",)
