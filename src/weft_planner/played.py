"""Every event of a call on the planner's clock: blocks of ranks and messages between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.declare.hardware import Hardware
from weft.plan.plan import Pass, Plan
from weft.plan.program import Block

from .clock import Done, Gate, Network
from .flow import RankScript, Timing, time_call


@dataclass(frozen=True)
class PlayedBlock:
    """A block: its rank, its step in the program of a pass, when it began and ended."""

    rank: int
    backward: bool
    step: int
    block: Block
    begin: float
    end: float


@dataclass(frozen=True)
class PlayedMessage:
    """Bytes from one rank to another along a mesh dim, over links of a level of the hardware."""

    source: int
    target: int
    mesh_dim: str
    nbytes: int
    level: int
    begin: float
    end: float


@dataclass(frozen=True)
class Played:
    """A call as it runs on the clock."""

    blocks: Sequence[PlayedBlock]  # in the order in which they end
    messages: Sequence[PlayedMessage]  # likewise
    timing: Timing  # the same as without recording


def play(plans: Sequence[Plan], hardware: Hardware) -> Played:
    """Replay a call, with everything that happens.

    >>> from weft import Layout
    >>> from weft.plan.predict import plans_for
    >>> from weft.plan.problem import Problem
    >>> problem = Problem.of("tokens", 64, heads=8)
    >>> plans = list(plans_for(Layout.parse("tokens: ring=2"), problem, range(2)))
    >>> played = play(plans, Hardware.load("ethernet-laptops"))
    >>> {message.mesh_dim for message in played.messages}, len(played.blocks) >= 8
    ({'ring'}, True)
    """
    network = _Recorder(hardware, len(plans))
    timing = time_call(plans, hardware, network, _Script)
    return Played(network.blocks, network.messages, timing)


class _Recorder(Network):
    def __init__(self, hardware: Hardware, ranks: int) -> None:
        super().__init__(hardware, ranks)
        self.blocks: list[PlayedBlock] = []
        self.messages: list[PlayedMessage] = []
        self.begun: tuple[bool, int, Block] | None = None

    def compute(self, rank: int, seconds: float, done: Done) -> None:
        begin, block = self.clock.now, self.begun

        def ended() -> None:
            if block is not None:
                self.blocks.append(PlayedBlock(rank, *block, begin, self.clock.now))
            done()

        super().compute(rank, seconds, ended)

    def _move(self, source: int, target: int, level: int, lane: Any) -> None:
        (nbytes, both), begin = self._queues[source, target, level, lane][0], self.clock.now

        def arrived() -> None:
            end = self.clock.now
            self.messages.append(PlayedMessage(source, target, lane[0], nbytes, level, begin, end))

        both.append(arrived)
        super()._move(source, target, level, lane)


class _Script(RankScript):
    def block(self, tile: Pass, step: int, block: Block, seconds: float) -> Gate:
        assert isinstance(self.network, _Recorder)
        self.network.begun = tile.backward, step, block
        try:
            return self.work(seconds)
        finally:
            self.network.begun = None
