"""The fastest transport of states, where the layout does not specify one.

Each way is a script per rank, of computing and of the messages of its plan, forward and backward;
`plan/clock.py` plays it on the layout's hardware. Nothing but the layout, the length and
the sizes of the state decides, so that all ranks decide alike, before anything is sent.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .._caching import cached
from ..declare.hardware import Hardware
from ..declare.layout import LayoutDeclaration
from ..declare.mesh import coordinates, index_at, rank_at
from ..declare.rates import rates_for
from ..plan.clock import Gate, Network, Player
from .fragments import (
    ChainExchange,
    Fragments,
    Piece,
    PlannedMessage,
    StateExchange,
    StatesPass,
    fragments,
)
from .tree import TreeExchange

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
    """Seconds and bytes of each transport of states, and the fastest of them.

    Attributes:
        seconds: of both passes, by way.
        received: bytes of the rank that receives most, in both passes, by way.
    """

    seconds: Mapping[str, float]
    received: Mapping[str, int]

    @property
    def way(self) -> str:
        """The fastest transport; of equal ones that whose graph is whole."""
        return min(self.seconds, key=lambda way: self.seconds[way])

    @property
    def of_maps(self) -> str:
        """The fastest of the transports that compose maps."""
        return min((w for w in self.seconds if w != "chain"), key=lambda way: self.seconds[way])


def ways_of(layout: LayoutDeclaration, axis: str, length: int, device: str, of: Carried) -> Ways:
    """The transports of a layout, timed at its rates or at those assumed for a device.

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
    >>> from weft.carry.fragments import fragments
    >>> layout = weft.Layout.parse("tokens: ring=8")
    >>> slow = rates_for("cpu", {"bandwidth": 7.5e6, "latency": 2e-3})
    >>> plan, mesh = fragments(layout, "tokens", 1024), tuple(layout.mesh.items())
    >>> time_ways(plan, mesh, slow, Carried(1 << 17, 1 << 17, 1 << 15)).way
    'chain'
    """
    passes: dict[str, Callable[[int], StatesPass]] = {
        "gather": lambda c: StateExchange(plan, c, of.state + of.matrix),
        "tree": lambda c: TreeExchange(plan, c, of.state, of.state + of.matrix),
        "chain": lambda c: ChainExchange(plan, c, (-(-of.state // GROUPS),) * GROUPS),
    }
    if len(plan.chunks) > MOST_GATHERED:
        del passes["gather"]
    seconds, received = {}, {}
    for way, passing in passes.items():
        each = [passing(chunk) for chunk in range(len(plan.chunks))]
        moved = [[p.traffic(backward).bytes for p in each] for backward in (False, True)]
        received[way] = max(map(sum, zip(*moved)))
        seconds[way] = sum(_play(each, mesh, on, of, backward) for backward in (False, True))
    return Ways(seconds, received)


def _play(
    passes: Sequence[StatesPass],
    mesh: tuple[tuple[str, int], ...],
    on: Hardware,
    of: Carried,
    backward: bool,
) -> float:
    """Seconds of a pass on all chunks."""
    sizes, axis = dict(mesh), dict(passes[0].fragments.mesh)
    places = [
        rank_at(sizes, {**dict.fromkeys(sizes, 0), **coordinates(axis, chunk)})
        for chunk in range(len(passes))
    ]
    network = Network(on, max(places) + 1)
    for passing in passes:
        rank = _Rank(network, places, passing, of, backward)
        rank.play(rank.handed_on(passing) if isinstance(passing, ChainExchange) else rank.at_once())
    return network.clock.run()


class _Rank(Player):
    """The rank of a chunk on its way through a pass."""

    def __init__(
        self,
        network: Network,
        places: Sequence[int],
        passing: StatesPass,
        of: Carried,
        backward: bool,
    ) -> None:
        super().__init__(network, places[passing.chunk])
        self.places, self.passing, self.of, self.backward = places, passing, of, backward
        self.pieces = passing.fragments.chunks[passing.chunk]
        self.sizes = dict(passing.fragments.mesh)
        self.coords = coordinates(self.sizes, passing.chunk)
        self.numbers: Counter[tuple[str, int, bool]] = Counter()

    def at_once(self) -> Iterator[Gate]:
        """Computing and then the messages of all maps; backward, messages first."""
        seconds = sum(self._seconds(piece, maps=True) for piece in self.pieces)
        if not self.backward:
            yield self.work(seconds)
        for messages in self.passing.rounds(self.backward):
            gate = Gate()
            for message in messages:
                self._post(gate, message)
            yield gate
        if self.backward:
            yield self.work(seconds)

    def handed_on(self, passing: ChainExchange) -> Iterator[Gate]:
        """Each piece when its state has come, group of heads by group; nothing waits for sends."""
        for stage in passing.stages(self.backward):
            for nbytes in passing.nbytes:
                if stage.source is not None:
                    gate = Gate()
                    self._post(gate, PlannedMessage(*stage.source, nbytes, False))
                    yield gate
                if stage.piece >= 0:
                    piece = self.pieces[stage.piece]
                    yield self.work(self._seconds(piece, maps=False) / GROUPS)
                if stage.target is not None:
                    self._post(Gate(), PlannedMessage(*stage.target, nbytes, True))

    def _post(self, gate: Gate, message: PlannedMessage) -> None:
        mesh_dim, coordinate, nbytes, sends = message
        self.numbers[mesh_dim, coordinate, sends] += 1
        kind = mesh_dim, self.numbers[mesh_dim, coordinate, sends]
        peer = self.places[index_at(self.sizes, self.sizes, {**self.coords, mesh_dim: coordinate})]
        (self.send if sends else self.receive)(gate, peer, kind, nbytes)

    def _seconds(self, piece: Piece, maps: bool) -> float:
        operations = OPERATIONS * self.of.numbers * piece.count * (BACKWARD if self.backward else 1)
        if maps and not piece.begins:
            operations *= self.of.widened
        return operations / self.network.hardware.device.rate(math.inf)
