"""States of a document's pieces in a tree: maps are folded up, states handed down.

The pieces of a document, in order, are the leaves. Every gap between two leaves is a node, at the
rank of the leaf before it. Up: the maps of the leaves before a gap, as far as its subtree reaches,
come together there; from the first leaf on they are a state, as nothing enters. Down: a node
applies its map to the state that enters its subtree, and hands one to each side.

    leaves     0   1   2   3   4   5   6   7        nodes are at the leaf to the left of their gap
    up          0-1     2-3     4-5                 of 4-5 a map, of 0-1 a state
                    0-3
    down                  -> 5, then 0-3 -> 4, 0-5 -> 6, 0-6 -> 7

So a leaf receives a map and two states at most on average, the busiest log2 maps, in about 2 log2
rounds: of scans in log2 rounds this moves the fewest bytes (Brent and Kung, A regular layout for
parallel adders, 1982), and over the slowest links of a hierarchy of mesh dims one state.
The backward pass is the same over the leaves in reverse order, with transposed maps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .._caching import cached
from ..declare.mesh import coordinates, index_at
from .fragments import Fragments, PlannedMessage, StatesPass


class Value(NamedTuple):
    """The map of leaves `low` to `high` - 1 of a chain; with `low` = 0 a state."""

    chain: int
    low: int
    high: int


class Fold(NamedTuple):
    """The value of leaves from `low` on, of those before `mid` and of those after."""

    chain: int
    low: int
    mid: int
    high: int

    @property
    def before(self) -> Value:
        """The map of the leaves before `mid`."""
        return Value(self.chain, self.low, self.mid)

    @property
    def after(self) -> Value:
        """The map of the leaves from `mid` on."""
        return Value(self.chain, self.mid, self.high)

    @property
    def made(self) -> Value:
        """The map of all leaves."""
        return Value(self.chain, self.low, self.high)


class Message(NamedTuple):
    """A value on its way along a mesh dim to or from the rank at a coordinate."""

    mesh_dim: str
    coordinate: int
    value: Value


class Round(NamedTuple):
    """One round of a chunk: folds, in order, then messages, all at once."""

    folds: tuple[Fold, ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@dataclass(frozen=True)
class Tree:
    """The rounds of all chunks.

    Attributes:
        chains: per document of several pieces, (chunk, piece) of its leaves in order.
        rounds: per chunk; those in which it does nothing are left out.

    >>> from weft.carry.fragments import fragments
    >>> made = state_tree(fragments(weft.Layout.parse("tokens: ring=4"), "tokens", 8))
    >>> [[(m.coordinate, *m.value[1:]) for r in rounds for m in r.sends] for rounds in made.rounds]
    [[(1, 0, 1)], [(2, 0, 2)], [(3, 0, 3)], []]
    """

    chains: tuple[tuple[tuple[int, int], ...], ...]
    rounds: tuple[tuple[Round, ...], ...]


@dataclass(frozen=True)
class TreeExchange(StatesPass):
    """A pass in which states reach all pieces in a tree, or their gradients, as planned.

    state_bytes: of one state, over the batch and heads of a rank.
    map_bytes: of one map: A and b.
    """

    state_bytes: int
    map_bytes: int

    def nbytes(self, value: Value) -> int:
        """Bytes of a value."""
        return self.map_bytes if value.low else self.state_bytes

    def rounds(self, backward: bool) -> Iterator[list[PlannedMessage]]:
        for step in state_tree(self.fragments, backward).rounds[self.chunk]:
            yield [
                PlannedMessage(m.mesh_dim, m.coordinate, self.nbytes(m.value), sends)
                for sends, messages in ((True, step.sends), (False, step.receives))
                for m in messages
            ]


@cached(64)
def state_tree(plan: Fragments, backward: bool = False) -> Tree:
    """The tree of maps that gives the state entering each piece, or the gradient leaving it."""
    chains = tuple(c[::-1] if backward else c for c in plan.chains)
    sweep = _Sweep(plan, chains)
    for number, leaves in enumerate(chains):
        sweep.down(number, 0, len(leaves), -1)
    return Tree(chains, sweep.rounds())


class _Sweep:
    """Rounds as they are made: every fold and every message as early as it can be."""

    def __init__(self, plan: Fragments, chains: tuple[tuple[tuple[int, int], ...], ...]) -> None:
        self.sizes, self.chunks, self.chains = dict(plan.mesh), len(plan.chunks), chains
        #: the round before which a value is on a chunk
        self.ready: dict[tuple[Value, int], int] = {
            (Value(c, i, i + 1), chunk): 0
            for c, leaves in enumerate(chains)
            for i, (chunk, _) in enumerate(leaves[:-1])
        }
        self.folds: dict[tuple[int, int], list[Fold]] = defaultdict(list)
        self.sends: dict[tuple[int, int], list[Message]] = defaultdict(list)
        self.receives: dict[tuple[int, int], list[Message]] = defaultdict(list)

    def chunk(self, chain: int, leaf: int) -> int:
        """The chunk of a leaf."""
        return self.chains[chain][leaf][0]

    def up(self, chain: int, low: int, high: int) -> None:
        """The value of some leaves, at the last of them."""
        if high - low > 1:
            mid, here = (low + high) // 2, self.chunk(chain, high - 1)
            self.up(chain, low, mid)
            self.move(Value(chain, low, mid), self.chunk(chain, mid - 1), here)
            self.up(chain, mid, high)
            self.fold(Fold(chain, low, mid, high), here)

    def down(self, chain: int, low: int, high: int, holder: int) -> None:
        """States for some leaves, of the one that enters the first, which a chunk holds."""
        entering = Value(chain, 0, low)
        if high - low == 1:
            if low:
                self.move(entering, holder, self.chunk(chain, low))
            return
        mid = (low + high) // 2
        here = self.chunk(chain, mid - 1)
        self.up(chain, low, mid)
        if low:
            self.move(entering, holder, here)
            self.fold(Fold(chain, 0, low, mid), here)
        self.down(chain, mid, high, here)
        self.down(chain, low, mid, here)

    def fold(self, fold: Fold, chunk: int) -> None:
        if (fold.made, chunk) not in self.ready:
            when = max(self.ready[part, chunk] for part in (fold.before, fold.after))
            self.ready[fold.made, chunk] = when
            self.folds[when, chunk].append(fold)

    def move(self, value: Value, source: int, target: int) -> None:
        """Along one mesh dim after the other, where neighbours share none."""
        here, at, goes = source, *(coordinates(self.sizes, c) for c in (source, target))
        for name in self.sizes:
            if at[name] == goes[name]:
                continue
            came, at = at[name], {**at, name: goes[name]}
            there = index_at(self.sizes, self.sizes, at)
            if (value, there) not in self.ready:
                when = self.ready[value, here]
                self.sends[when, here].append(Message(name, goes[name], value))
                self.receives[when, there].append(Message(name, came, value))
                self.ready[value, there] = when + 1
            here = there

    def rounds(self) -> tuple[tuple[Round, ...], ...]:
        """Per chunk; messages between two ranks in one order on both."""
        parts = self.folds, self.sends, self.receives
        result = []
        for chunk in range(self.chunks):
            times = sorted({when for part in parts for when, at in part if at == chunk})
            result.append(
                tuple(
                    Round(
                        tuple(self.folds.get((when, chunk), ())),
                        *(tuple(sorted(p.get((when, chunk), ()))) for p in parts[1:]),
                    )
                    for when in times
                )
            )
        return tuple(result)
