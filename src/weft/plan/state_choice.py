"""How states travel where a layout leaves it open: in the way that ends first.

Each way is a script per rank, of computing and of the messages that its plan has, forward and
backward; `plan/clock.py` plays it on the layout's hardware. Nothing but the layout, the length and
the sizes of the state decides, so that all ranks decide alike, before anything is sent.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .._caching import cached
from ..comm import coordinates, index_at, rank_at
from ..declare.hardware import Hardware
from ..declare.layout import LayoutDeclaration
from ..declare.rates import rates_for
from .clock import Network
from .state import ChainExchange, Fragments, Piece, StateExchange, fragments
from .tree import TreeExchange, state_tree

#: In how many groups heads are handed on where states travel in a chain.
GROUPS = 4
#: Operations of a recurrence per token and number of its state, at the rate of attention's kernel:
#: `weft.nn.recurrent.gated_delta_rule` on a CPU core takes 27 at K = V = 64 and 10 at 128.
OPERATIONS = 20
#: Times that of the forward pass, of a backward pass; there, 1.6 to 2.1.
BACKWARD = 2.0
#: Ranks of an axis beyond which all maps to all ranks is no way: a tree moves far less.
MOST_GATHERED = 16


class Carried(NamedTuple):
    """The sizes of a recurrence on a rank.

    Attributes:
        state: bytes of a state, over batch and heads.
        matrix: bytes of A, over batch and heads.
        numbers: of a state, over batch and heads.
        widened: times the work where maps are made, as of values that are widened by A's columns.
    """

    state: int
    matrix: int
    numbers: int
    widened: float = 1.0


@dataclass(frozen=True)
class Ways:
    """What each way takes and moves, and the one that ends first.

    Attributes:
        seconds: of both passes, by way.
        received: bytes of the rank that receives most, in both passes, by way.
    """

    seconds: Mapping[str, float]
    received: Mapping[str, int]

    @property
    def way(self) -> str:
        """The way that ends first; of equal ones that whose graph is whole."""
        return min(self.seconds, key=lambda way: self.seconds[way])

    @property
    def of_maps(self) -> str:
        """The way that ends first of those that compose maps."""
        return min((w for w in self.seconds if w != "chain"), key=lambda way: self.seconds[way])


def ways_of(layout: LayoutDeclaration, axis: str, length: int, device: str, of: Carried) -> Ways:
    """What a layout chooses, at the rates that it has or that are assumed for a device.

    The length is rounded up to a power of two, and documents are taken for one: few choices are
    made, however lengths and packings change.
    """
    plan = fragments(layout, axis, 1 << max(length - 1, 0).bit_length())
    rates = json.dumps(dict(layout.rates), sort_keys=True, default=dict)
    return _timed(plan, tuple(layout.mesh.items()), device, rates, of)


@cached(256)
def _timed(
    plan: Fragments, mesh: tuple[tuple[str, int], ...], device: str, rates: str, of: Carried
) -> Ways:
    return time_ways(plan, mesh, rates_for(device, json.loads(rates)), of)


def time_ways(
    plan: Fragments, mesh: tuple[tuple[str, int], ...], on: Hardware, of: Carried
) -> Ways:
    """Times of all ways in which states may travel.

    Args:
        plan: the fragments of an axis.
        mesh: the layout's, of which that of the plan are some dims; rank i of it is rank i of the
            hardware. Of several lines of ranks along the axis the first is played.
        on: the hardware.
        of: what is carried.

    >>> from weft.declare.rates import rates_for
    >>> from weft.plan.state import fragments
    >>> layout = weft.Layout.parse("tokens: ring=8")
    >>> slow = rates_for("cpu", {"bandwidth": 7.5e6, "latency": 2e-3})
    >>> plan, mesh = fragments(layout, "tokens", 1024), tuple(layout.mesh.items())
    >>> time_ways(plan, mesh, slow, Carried(1 << 17, 1 << 17, 1 << 15)).way
    'chain'
    """
    passes: dict[str, Callable[[int], StateExchange | TreeExchange | ChainExchange]] = {
        "gather": lambda c: StateExchange(plan, c, of.state + of.matrix),
        "tree": lambda c: TreeExchange(plan, c, of.state, of.state + of.matrix),
        "chain": lambda c: ChainExchange(plan, c, _groups(of.state)),
    }
    if len(plan.chunks) > MOST_GATHERED:
        del passes["gather"]
    seconds, received = {}, {}
    for way, passing in passes.items():
        each = [passing(chunk) for chunk in range(len(plan.chunks))]
        moved = [[p.traffic(backward).bytes for p in each] for backward in (False, True)]
        received[way] = max(map(sum, zip(*moved)))
        seconds[way] = sum(_play(plan, mesh, on, of, way, backward) for backward in (False, True))
    return Ways(seconds, received)


def _groups(nbytes: int) -> tuple[int, ...]:
    return (-(-nbytes // GROUPS),) * GROUPS


#: To or from a chunk along a mesh dim, bytes, whether they are sent, and whether that is waited for
_Post = tuple[str, int, int, bool, bool]
_Step = float | list[_Post]


def _play(
    plan: Fragments,
    mesh: tuple[tuple[str, int], ...],
    on: Hardware,
    of: Carried,
    way: str,
    backward: bool,
) -> float:
    """Seconds of a pass."""
    sizes = dict(mesh)
    places = [
        rank_at(sizes, {**dict.fromkeys(sizes, 0), **coordinates(dict(plan.mesh), chunk)})
        for chunk in range(len(plan.chunks))
    ]
    network = Network(on, max(places) + 1)
    script = _SCRIPTS[way]
    for chunk in range(len(plan.chunks)):
        _Player(network, places, chunk, script(plan, on, of, chunk, backward)).go_on()
    return network.clock.run()


class _Player:
    """A rank on its way through its script."""

    def __init__(
        self, network: Network, places: list[int], chunk: int, steps: Iterator[_Step]
    ) -> None:
        self.network, self.places, self.chunk, self.steps = network, places, chunk, steps
        self.numbers: Counter[tuple[str, int, bool]] = Counter()
        self.open = 0

    def go_on(self) -> None:
        """The next step."""
        step = next(self.steps, None)
        if step is None:
            return
        if isinstance(step, float):
            self.network.compute(self.places[self.chunk], step, self.go_on)
            return
        self.open = 1 + sum(waits for *_, waits in step)
        for mesh_dim, peer, nbytes, sends, waits in step:
            self.numbers[mesh_dim, peer, sends] += 1
            kind = mesh_dim, self.numbers[mesh_dim, peer, sends]
            source, target = (self.chunk, peer) if sends else (peer, self.chunk)
            done = self.done if waits else _nothing
            self.network.post(self.places[source], self.places[target], kind, nbytes, done)
        self.done()

    def done(self) -> None:
        """One of the things that are waited for."""
        self.open -= 1
        if not self.open:
            self.network.clock.at(self.network.clock.now, self.go_on)


def _nothing() -> None: ...


def _work(on: Hardware, of: Carried, piece: Piece, backward: bool, maps: bool) -> float:
    operations = OPERATIONS * of.numbers * piece.count * (BACKWARD if backward else 1.0)
    if maps and not piece.begins:
        operations *= of.widened
    return operations / on.device.rate(math.inf)


def _peer(plan: Fragments, chunk: int, mesh_dim: str, coordinate: int) -> int:
    sizes = dict(plan.mesh)
    return index_at(sizes, sizes, {**coordinates(sizes, chunk), mesh_dim: coordinate})


def _all_at_once(
    plan: Fragments, on: Hardware, of: Carried, chunk: int, backward: bool, messages: list[_Step]
) -> Iterator[_Step]:
    """Computing and then messages; backward, messages first."""
    pieces = plan.chunks[chunk]
    work: list[_Step] = [sum(_work(on, of, piece, backward, True) for piece in pieces)]
    yield from (*messages, *work) if backward else (*work, *messages)


def _gather(
    plan: Fragments, on: Hardware, of: Carried, chunk: int, backward: bool
) -> Iterator[_Step]:
    rounds: list[_Step] = []
    for mesh_dim, held in plan.rounds(chunk):
        own = plan.coordinate(chunk, mesh_dim)
        sizes = [(high - low) * (of.state + of.matrix) for low, high in held]
        posts: list[_Post] = []
        for i, size in enumerate(sizes):
            if i != own:
                peer = _peer(plan, chunk, mesh_dim, i)
                out, back = (size, sizes[own]) if backward else (sizes[own], size)
                posts += (mesh_dim, peer, out, True, True), (mesh_dim, peer, back, False, True)
        rounds.append(posts)
    return _all_at_once(plan, on, of, chunk, backward, rounds[::-1] if backward else rounds)


def _tree(
    plan: Fragments, on: Hardware, of: Carried, chunk: int, backward: bool
) -> Iterator[_Step]:
    passing = TreeExchange(plan, chunk, of.state, of.state + of.matrix)
    rounds: list[_Step] = []
    for step in state_tree(plan, backward).rounds[chunk]:
        rounds.append(
            [
                (m.mesh_dim, _peer(plan, chunk, *m[:2]), passing.nbytes(m.value), sends, True)
                for sends, messages in ((True, step.sends), (False, step.receives))
                for m in messages
            ]
        )
    return _all_at_once(plan, on, of, chunk, backward, rounds)


def _chain(
    plan: Fragments, on: Hardware, of: Carried, chunk: int, backward: bool
) -> Iterator[_Step]:
    stages = plan.relay(chunk)
    for stage in reversed(stages) if backward else stages:
        source, target = (stage[2], stage[1]) if backward else stage[1:3]
        for nbytes in _groups(of.state):
            if source is not None:
                yield [(source[0], _peer(plan, chunk, *source), nbytes, False, True)]
            if stage.piece >= 0:
                yield _work(on, of, plan.chunks[chunk][stage.piece], backward, False) / GROUPS
            if target is not None:
                yield [(target[0], _peer(plan, chunk, *target), nbytes, True, False)]


_SCRIPTS = {"gather": _gather, "tree": _tree, "chain": _chain}

__all__ = ["GROUPS", "Carried", "Ways", "time_ways", "ways_of"]
