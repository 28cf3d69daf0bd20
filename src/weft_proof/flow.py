"""Follows a tile program without tensors: the data that every rank holds, computes and sends.

All ranks of a program take the same steps, and number chunks from their own. So what one rank
does shows what all do: whatever it receives in a transfer from the rank `ring_offset` further
along, that rank holds under the number `source` at the very same step. One walk over the program,
with owners counted from the rank at hand, is therefore a proof for any number of ranks.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

from weft.plan.program import CHUNKS, MovingDims, Program, Transfer
from weft.plan.sides import Side

Offset = tuple[int, ...]  # of a rank from the one at hand, per mesh dim along which chunks travel


class Flow:
    """Walks over a program; `defects` lists its errors."""

    def __init__(
        self,
        program: Program,
        dims: MovingDims,
        backward: bool,
    ) -> None:
        self.program, self.backward = program, backward
        self.sides, every = dims, [d for along in dims for d in along]
        self.dims = {d.name: i for i, d in enumerate(every)}
        self.sizes = [d.size for d in every]
        self.defects: list[str] = []
        self.held = {(side, n) for side in Side for n in program.own(side)}
        self.flying: dict[Transfer, list] = defaultdict(list)
        self.computed: Counter = Counter()
        self.results: dict[tuple[Side, int], Counter] = defaultdict(Counter)
        self._walk()

    def _walk(self) -> None:
        for at, step in enumerate(self.program.steps):
            for t in step.begin:
                self._begin(at, t)
            for block in step.blocks:
                for i, j in itertools.product(block.q, block.kv):
                    self._compute(at, i, j)
            for t in step.end:
                self._end(at, t)
        self._finish()

    def _wrong(self, at: int | str, label: str) -> None:
        self.defects.append(f"step {at}: {label}")

    def owner(self, side: Side, number: int) -> tuple[Offset, int]:
        """Whose chunk a number stands for, counted from this rank, and which sub-chunk of it."""
        offset = [0] * len(self.sizes)
        for dim in reversed(self.sides[side]):
            number, offset[self.dims[dim.name]] = divmod(number, dim.size)
        return tuple(offset), number

    def _moved(self, offset: Offset, t: Transfer) -> Offset:
        """An offset counted from the source of a transfer, as counted from this rank."""
        i = self.dims[t.mesh_dim]
        return (*offset[:i], (offset[i] + t.ring_offset) % self.sizes[i], *offset[i + 1 :])

    def _begin(self, at: int, t: Transfer) -> None:
        side = t.payload.side
        if t.mesh_dim not in {d.name for d in self.sides[side]}:
            self._wrong(at, f"{t} travels along a mesh dim that is not for its side")
            return
        content: object = None
        whose, part = self.owner(side, t.source)
        if t.payload.is_chunk:
            if (side, t.source) not in self.held:
                self._wrong(at, f"{t} sends a chunk that is not here yet")
            if (side, t.target) in self.held or any(
                other.payload is t.payload and other.target == t.target and self.flying[other]
                for other in self.flying
            ):
                self._wrong(at, f"{t} receives a chunk a second time")
        else:
            content = self.results.pop((side, t.source), None)
            if not content:
                self._wrong(at, f"{t} sends a result that is not here")
        if (self._moved(whose, t), part) != self.owner(side, t.target):
            self._wrong(at, f"{t} takes one chunk for another")
        self.flying[t].append(content)

    def _compute(self, at: int, i: int, j: int) -> None:
        for side, n in zip(Side, (i, j)):
            if (side, n) not in self.held:
                self._wrong(at, f"block ({i}, {j}) needs a chunk that is not here yet")
        self.computed[i, j] += 1
        here = (0,) * len(self.sizes)
        self.results[Side.QUERY, i][here, i, j] += 1
        if self.backward:
            self.results[Side.KEY, j][here, i, j] += 1

    def _end(self, at: int, t: Transfer) -> None:
        if not self.flying[t]:
            self._wrong(at, f"{t} ends and has not begun: the wait has no end")
            return
        content = self.flying[t].pop(0)
        side = t.payload.side
        if t.payload.is_chunk:
            self.held.add((side, t.target))
            return
        for (offset, i, j), times in (content or {}).items():
            self.results[side, t.target][self._moved(offset, t), i, j] += times

    def _finish(self) -> None:
        for t, left in self.flying.items():
            if left:
                self._wrong("end", f"{t} is never waited for")
        pairs = itertools.product(*map(self.program.chunks, Side))
        often = [(pair, self.computed[pair]) for pair in pairs if self.computed[pair] != 1]
        for pair, times in often[:3]:
            self._wrong("end", f"block {pair} is computed {times} times")
        for side in Side if self.backward else (Side.QUERY,):
            self._check_results(side)

    def _check_results(self, side: Side) -> None:
        """Every block's result is with the owner of its chunk, once."""
        local = self.program.own(side)
        for (of, n), found in self.results.items():
            if of is side and n not in local and found:
                self._wrong("end", f"the result of {CHUNKS[side].value} {n} never leaves")
        a, b = map(self.program.chunks, Side)
        expected: Counter = Counter()
        for i, j in itertools.product(a, b):
            offset, _ = self.owner(side, (i, j)[side])
            back = tuple((-o) % size for o, size in zip(offset, self.sizes))
            expected[back, i, j] += 1
        found = sum((self.results[side, n] for n in local), Counter())
        wrong = [(key, found[key]) for key in {*expected, *found} if expected[key] != found[key]]
        for (offset, i, j), times in sorted(wrong)[:3]:
            rows = ("queries", "keys")[side]
            self._wrong(
                "end",
                f"of block ({i}, {j}) of the rank {offset} away, {times} results reach the owner "
                f"of its {rows}",
            )


def program_defects(
    program: Program,
    dims: MovingDims,
    backward: bool,
) -> list[str]:
    """Defects of a program that all ranks run; empty if there are none.

    Every pair of a query and a key chunk is computed exactly once, with chunks that are there; each
    chunk comes once and from a rank that has it; every result reaches the owner of its chunk
    exactly once; every wait is for a transfer that all ranks have begun before.
    """
    return Flow(program, dims, backward).defects
