"""The scheduler: chooses the tile program of a pass, from the mesh dims that chunks travel along.

Programs are built by `greedy.Scheduler` and `state.Gather`; the quickest one is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from ..._caching import cached
from ..program import CHUNKS, UNCUT, MovingDims, Payload, Program, arrivals, returns
from ..sides import Side, Sides
from ..timing import Costs, duration
from .greedy import Scheduler
from .state import Gather, ProgramParts

_RELAYED = Sides(True, True)
#: How many results may be outstanding where one side travels.
_OUTSTANDING = 4
#: How much longer a program may take that never has more than one result outstanding.
_SLACK = 0.02
#: The most blocks of a tile whose chunks may travel in sub-chunks.
_FEW = 16
#: How many latencies the block of a sub-chunk must last.
_SHORT_BLOCK = 25
#: Tiles of up to this many blocks are tried in every order of arrival and with every look-ahead.
_SMALL = 12
_LOOK_AHEAD = ((0.0, 0.0), (0.5, 0.5), (1.0, 1.0), (1.0, 0.0), (1.0, 0.25), (0.0, 0.25))


@cached(64)
def schedule(
    dims: MovingDims,
    costs: Costs,
    backward: bool,
    relayed: Sides[bool] = _RELAYED,
    sub_chunks: Sides[int] = UNCUT,
) -> Program:
    """The quickest of the greedy program and its variants, by `timing.duration`.

    A tile may also gather everything first, so it is never slower than a gather.
    """
    events = Sides(*map(arrivals, CHUNKS, dims, relayed, sub_chunks))
    results = (Payload.result(side, backward) for side in Side)
    back = Sides(*map(returns, results, dims, sub_chunks))
    if not backward:
        back = back._replace(key={})
    a, b = (p * math.prod(d.size for d in along) for p, along in zip(sub_chunks, dims))
    costs = costs.cut(sub_chunks).normal()
    parts = ProgramParts(events, back, costs, Sides(a, b), sub_chunks)
    if all(d.transport == "gather" for along in dims for d in along):
        return Gather(parts).run()
    one_side = min(a, b) == 1 and any(back)
    small = a * b <= _SMALL
    variants = itertools.product(
        (1, _OUTSTANDING) if one_side else (math.inf,),
        _orders(len(events.query), len(events.key), small),
        (False, True) if any(back) else (False,),
    )
    programs = [  # with how much longer than others each may take
        (program, _SLACK if outstanding == 1 else 0.0)
        for outstanding, order, eager in variants
        for program in _programs(parts, order, eager, outstanding, small)
    ]
    if all(events):
        programs.append((Gather(parts).run(), 0.0))
    if len(programs) == 1:
        return programs[0][0]
    return min(programs, key=lambda p: duration(p[0], costs) / (1 + p[1]))[0]


def _programs(
    parts: ProgramParts, order: tuple[Side, ...], eager: bool, outstanding: float, small: bool
) -> Iterator[Program]:
    """Greedy programs with every look-ahead, those alone that differ."""
    tried: list[Scheduler] = []
    for look_ahead in _LOOK_AHEAD if small else _LOOK_AHEAD[:1]:
        if not any(scheduler.same_with(look_ahead) for scheduler in tried):
            tried.append(Scheduler(parts, order, eager, look_ahead, outstanding))
            yield tried[-1].run()


def choose_sub_chunks(dims: MovingDims, costs: Costs, backward: bool) -> Sides[int]:
    """Into how many sub-chunks chunks are cut: one, or two where that is clearly quicker.

    Nothing overlaps with the first chunk to arrive and the last block to be computed: halves matter
    where chunks are few and take about as long as their blocks, and blocks are not short.
    """
    every = [d for along in dims for d in along]
    halves = Sides(*(2 if along else 1 for along in dims))
    latency = max((costs.latency_of(d.name) for d in every), default=0.0)
    small = costs.cut(halves).block < _SHORT_BLOCK * latency
    many = math.prod(d.size for d in every) > _FEW
    if not every or small or many or any(d.transport == "gather" for d in every):
        return UNCUT
    took = [
        duration(schedule(dims, costs, backward, sub_chunks=p), costs.cut(p))
        for p in (UNCUT, halves)
    ]
    return halves if took[1] < (1 - _SLACK) * took[0] else UNCUT


def _orders(queries: int, keys: int, every: bool) -> list[tuple[Side, ...]]:
    """Orders in which chunks of the two sides may arrive; the empty one leaves it to the rules."""
    if not queries or not keys:
        return [()]
    if not every:
        q, kv = (Side.QUERY,) * queries, (Side.KEY,) * keys
        return [(), kv + q, q + kv]
    places = itertools.combinations(range(queries + keys), keys)
    return [(), *(_order(chosen, queries + keys) for chosen in places)]


def _order(keys: tuple[int, ...], length: int) -> tuple[Side, ...]:
    return tuple(Side(i in keys) for i in range(length))


def live_bound(dims: MovingDims, sub_chunks: Sides[int] = UNCUT) -> int:
    """The most chunks (or sub-chunks) of other ranks that a pass holds or receives at any one time.

    Where only one side travels, that is two per ring (one in use, one arriving), and one more where
    rings turn inside rings; else all remote chunks of both sides.
    """
    a, b = (math.prod(d.size for d in along) for along in dims)
    rings = [d for along in dims for d in along if d.size > 1]
    everything = (a - 1) * sub_chunks[0] + (b - 1) * sub_chunks[1]
    if (a > 1 and b > 1) or any(d.transport == "gather" for d in rings):
        return everything
    return min(2 * len(rings) + (len(rings) > 1), everything)
