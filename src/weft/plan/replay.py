"""Replays a program step by step: the one order of events for every count of bytes and memory.

What is held, how many chunks live at once, and when a chunk can be let go are read off the same
events. The executor runs these events on tensors.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from .program import CHUNKS, Block, Payload, Program, Transfer

#: A chunk by what it carries and its relative number.
Chunk = tuple[Payload, int]


class Action(enum.Enum):
    """The kind of an event, and its subject."""

    BEGIN = enum.auto()  # a transfer: its buffers are there
    COMPUTE = enum.auto()  # a block
    ARRIVE = enum.auto()  # a transfer: what came is unpacked or merged, its buffers are still there
    END = enum.auto()  # a transfer: buffers that were sent, and results that were merged, are gone
    DROP = enum.auto()  # a received chunk that no later step computes with or passes on


class ReplayEvent(NamedTuple):
    """Something that a program does in a step."""

    step: int
    action: Action
    item: Transfer | Block | Chunk


def replay(program: Program) -> Iterator[ReplayEvent]:
    """All events of a program, in order."""
    for i, (step, dropped) in enumerate(zip(program.steps, drops(program))):
        for t in step.begin:
            yield ReplayEvent(i, Action.BEGIN, t)
        for block in step.blocks:
            yield ReplayEvent(i, Action.COMPUTE, block)
        for t in step.end:
            yield ReplayEvent(i, Action.ARRIVE, t)
            yield ReplayEvent(i, Action.END, t)
        for chunk in dropped:
            yield ReplayEvent(i, Action.DROP, chunk)


def drops(program: Program) -> tuple[tuple[Chunk, ...], ...]:
    """Per step, the received chunks that no later step computes with or passes on."""
    last: dict[Chunk, int] = {}
    for i, step in enumerate(program.steps):
        for t in step.end:
            if t.payload.is_chunk:
                last[t.payload, t.target] = i
        for t in step.begin:
            if t.payload.is_chunk:
                last[t.payload, t.source] = i
        for block in step.blocks:
            for payload, numbers in zip(CHUNKS, block.sides):
                last.update(dict.fromkeys(zip(itertools.repeat(payload), numbers), i))
    dropped: list[list[Chunk]] = [[] for _ in program.steps]
    for (payload, number), i in last.items():
        if number not in program.own(payload.side):
            dropped[i].append((payload, number))
    return tuple(map(tuple, dropped))


def live_chunks(program: Program) -> int:
    """The most chunks of other ranks that a program holds or receives at any one time."""
    live = most = 0
    for _, action, item in replay(program):
        if action is Action.DROP:
            live -= 1
        elif action is Action.BEGIN and isinstance(item, Transfer) and item.payload.is_chunk:
            live += 1
            most = max(most, live)
    return most
