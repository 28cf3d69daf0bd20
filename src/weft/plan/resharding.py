"""From rest to compute placement: the all-to-alls, and the positions held afterwards.

Per mesh dim a tensor may have to trade its split of one side for a split of another (Ulysses:
S(seq) -> S(head); axial: S(seq) -> S(batch)). `Resharding` follows a tensor's shape and token
positions through those all-to-alls, for any rank, so that senders and receivers agree on every
size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch.distributed.tensor import Placement, Shard

from ..declare.placements import HEAD
from .heads import nested
from .order import Spans, ascending, chunk_sizes, count, cut_spans, interleaved, join


@dataclass(frozen=True)
class AllToAll:
    """One all-to-all (or slice, where `cat_dim` is None) of a tensor along a mesh dim.

    cut  `split_dim` into `split_sizes`, one part per rank
    join the parts received along `cat_dim`, of sizes `cat_sizes`
    """

    mesh_dim: str
    split_dim: int
    split_sizes: tuple[int, ...]
    cat_dim: int | None
    cat_sizes: tuple[int, ...]

    @property
    def even(self) -> bool:
        """True if all parts that move are of one size; ranks along the mesh dim answer alike."""
        return len({*self.split_sizes}) <= 1 and len({*self.cat_sizes}) <= 1


@dataclass(frozen=True)
class State:
    """Batch entries, heads and global token positions that a rank holds, in memory order."""

    batch_spans: Spans
    head_spans: Spans
    spans: Spans

    @property
    def batch(self) -> int:
        """Local batch size."""
        return count(self.batch_spans)

    @property
    def heads(self) -> int:
        """Local number of heads."""
        return count(self.head_spans)

    def size(self, dim: int) -> int:
        """Local size of the batch, head or seq dim."""
        return count(self.sides[dim])

    @property
    def sides(self) -> tuple[Spans, Spans, Spans]:
        """Spans of the batch, head and seq dims."""
        return self.batch_spans, self.head_spans, self.spans


@dataclass(frozen=True)
class ReshardStep:
    """A resharding step: the split over one mesh dim changes to another dim of the tensor."""

    mesh_dim: str
    source: int | None  # the dim split at rest, None for R
    target: int  # the dim split on entry


def reshard_step(mesh_dim: str, rest: Placement, entry: Placement) -> ReshardStep | None:
    """The all-to-all between two placements on a mesh dim, None if they are the same."""
    if rest == entry:
        return None
    assert isinstance(entry, Shard)  # a side is not replicated on its way to computing
    return ReshardStep(mesh_dim, rest.dim if isinstance(rest, Shard) else None, entry.dim)


@dataclass
class Resharding:
    """A tensor's way from rest to the tile program."""

    sizes: Mapping[str, int]
    steps: tuple[ReshardStep, ...]
    rest: Callable[[Mapping[str, int]], State]  # the state at rest on the rank at these coordinates
    heads: tuple[int, ...]  # of each rank along the mesh dims that split them on the way
    #: positions that come from others after all-to-alls, beside those that the rank at these
    #: coordinates has: keys that its queries see
    received: Callable[[Mapping[str, int]], Spans] | None = None
    _memo: dict = field(default_factory=dict)

    def state(self, level: int, coords: Mapping[str, int]) -> State:
        """State after the first `level` steps on the rank at `coords`."""
        key = (level, *coords.values())
        if key not in self._memo:
            self._memo[key] = self._state(level, coords)
        return self._memo[key]

    def _state(self, level: int, coords: Mapping[str, int]) -> State:
        if level == 0:
            return self.rest(coords)
        move = self.steps[level - 1]
        peers = [{**coords, move.mesh_dim: i} for i in range(self.sizes[move.mesh_dim])]
        before = [self.state(level - 1, peer) for peer in peers]
        index = coords[move.mesh_dim]
        sides = list(before[index].sides)
        if move.source is not None:
            sides[move.source] = join(s for state in before for s in state.sides[move.source])
        sizes = self._cut(move, count(sides[move.target]), coords)
        low = sum(sizes[:index])
        sides[move.target] = cut_spans(sides[move.target], low, low + sizes[index])
        return State(*sides)

    def _cut(self, move: ReshardStep, size: int, coords: Mapping[str, int]) -> list[int]:
        """The parts into which a step cuts its target dim, along its mesh dim."""
        if move.target != HEAD:
            return chunk_sizes(size, self.sizes[move.mesh_dim])
        dims = [step.mesh_dim for step in self.steps if step.target == HEAD]
        before = dims[: dims.index(move.mesh_dim)]
        ways = tuple(self.sizes[d] for d in dims)
        return nested(self.heads, ways, tuple(coords[d] for d in before))

    def entry(self, coords: Mapping[str, int]) -> State:
        """State on entry to the tile program: positions ascend where they can."""
        if self.received is None:
            return self.base(coords)
        key = ("entry", *coords.values())
        if key not in self._memo:
            base = self.base(coords)
            spans = interleaved((*base.spans, *self.received(coords)))
            self._memo[key] = State(base.batch_spans, base.head_spans, spans)
        return self._memo[key]

    def base(self, coords: Mapping[str, int]) -> State:
        """State after the all-to-alls, without what is received beside it."""
        key = ("base", *coords.values())
        if key not in self._memo:
            state = self.state(len(self.steps), coords)
            spans = ascending(state.spans) if self.steps else state.spans
            self._memo[key] = State(state.batch_spans, state.head_spans, spans)
        return self._memo[key]

    def all_to_alls(self, coords: Mapping[str, int]) -> tuple[AllToAll, ...]:
        """The all-to-alls of the rank at `coords`, in order."""
        steps = []
        for level, move in enumerate(self.steps):
            local = self.state(level, coords)
            sizes = self._cut(move, local.size(move.target), coords)
            cat_sizes: tuple[int, ...] = ()
            if move.source is not None:
                peers = [{**coords, move.mesh_dim: i} for i in range(len(sizes))]
                cat_sizes = tuple(self.state(level, p).size(move.source) for p in peers)
            steps.append(AllToAll(move.mesh_dim, move.target, tuple(sizes), move.source, cat_sizes))
        return tuple(steps)

    def arrival(self, coords: Mapping[str, int]) -> Spans | None:
        """Positions as the all-to-alls leave them, None where they are in `entry` order."""
        spans = self.state(len(self.steps), coords).spans
        return None if spans == self.base(coords).spans else spans
