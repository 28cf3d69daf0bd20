"""Rings of the last steps and calls of a rank, in memory that outlives it.

    header | last failure | the last 32 calls | the last 256 steps

They lie in a small file in the machine's memory, written in place: a step costs a few microseconds,
and what a killed or stopped rank did last can be read by others.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: How many steps and calls are kept, and the bytes of each.
STEPS, STEP_BYTES = 256, 320
CALLS, CALL_BYTES = 32, 768
HEADER_BYTES, FAILURE_BYTES = 1024, 2048

_STEP = struct.Struct("<qdddH")  # number, when begun, awaited and ended, length of what follows
_CALL = struct.Struct("<qdH")  # number, when begun, length of what follows
_TIME = struct.Struct("<d")
_CALLS_AT = HEADER_BYTES + FAILURE_BYTES
_STEPS_AT = _CALLS_AT + CALLS * CALL_BYTES
_SIZE = _STEPS_AT + STEPS * STEP_BYTES


class Step:
    """A step in a box: a context in which this rank waits for it to end."""

    __slots__ = ("at", "count", "rings")

    def __init__(self, rings: mmap.mmap, at: int, count: int) -> None:
        self.rings, self.at, self.count = rings, at, count

    def __enter__(self) -> None:
        _TIME.pack_into(self.rings, self.at + 16, time.time())

    def __exit__(self, failed: object, *_: object) -> None:
        if _STEP.unpack_from(self.rings, self.at)[0] == self.count:
            _TIME.pack_into(self.rings, self.at + 24, -time.time() if failed else time.time())


class Rings:
    """The rings of one process.

    Args:
        rank: in the world.
        ranks: how many there are.
        run: a name that all ranks of the run share.
        path: of the file.
    """

    def __init__(self, rank: int, ranks: int, run: str, path: Path) -> None:
        self.rank, self.run, self.path = rank, run, path
        self._steps, self._calls = itertools.count(1), itertools.count(1)
        self._turns: Counter[tuple[str, str]] = Counter()
        self._map = _mapped(self.path)
        head = {"rank": rank, "ranks": ranks, "run": run, "host": socket.gethostname()}
        self._put(0, json.dumps(head | {"pid": os.getpid()}).encode(), HEADER_BYTES)

    # -- what a transport tells ----------------------------------------------------------------

    def call(self, what: str, number: int, ranks: str, tag: int, detail: str) -> None:
        """A pass of a call begins; its steps have the same tag."""
        text = f"{what}\t{number}\t{ranks}\t{tag}\t{detail}".encode()[: CALL_BYTES - _CALL.size]
        count = next(self._calls)
        at = _CALLS_AT + count % CALLS * CALL_BYTES
        self._map[at + _CALL.size : at + _CALL.size + len(text)] = text
        _CALL.pack_into(self._map, at, count, time.time(), len(text))

    def step(
        self,
        layout: str,
        mesh_dim: str,
        payload: str,
        tag: int | str,
        step: int,
        to: str,
        source: str,
        nbytes: int,
    ) -> Step:
        """Something begins that other ranks take part in.

        Args:
            layout: its name.
            mesh_dim: along which it goes.
            payload: what it is.
            tag: that of its pass; for what all do together, how many of it they have begun.
            step: of the tile program, -1 where there is none.
            to: world ranks that this one sends to, separated by commas.
            source: those it receives from.
            nbytes: both ways.
        """
        line = f"{layout[:80]}\t{mesh_dim}\t{payload}\t{tag}\t{step}\t{nbytes}\t{to}\t{source}"
        text = line.encode()[: STEP_BYTES - _STEP.size]
        count = next(self._steps)
        at = _STEPS_AT + count % STEPS * STEP_BYTES
        self._map[at + _STEP.size : at + _STEP.size + len(text)] = text
        _STEP.pack_into(self._map, at, count, time.time(), 0.0, 0.0, len(text))
        return Step(self._map, at, count)

    def together(self, layout: str, mesh_dim: str, payload: str, ranks: str, nbytes: int) -> Step:
        """Something begins in which some world ranks all wait for all."""
        self._turns[payload, ranks] += 1
        turn = f"#{self._turns[payload, ranks]}"
        return self.step(layout, mesh_dim, payload, turn, -1, ranks, ranks, nbytes)

    def fail(self, error: str) -> None:
        """This rank fails."""
        _TIME.pack_into(self._map, HEADER_BYTES, time.time())
        self._put(HEADER_BYTES + 8, error.encode(), FAILURE_BYTES - 8)

    def read(self) -> dict[str, Any]:
        """What is in them, see `read_rings`."""
        return read_rings(self._map[:])

    def _put(self, at: int, text: bytes, room: int) -> None:
        self._map[at : at + room] = text[: room - 1].ljust(room, b"\0")


def _mapped(path: Path) -> mmap.mmap:
    """Zeros in a file that is there as long as nobody takes it away; else in this process."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path, "w+b") as file:
            file.write(bytes(_SIZE))  # so that it has its room, however full the disk gets
            file.flush()
            return mmap.mmap(file.fileno(), _SIZE)
    except OSError:
        return mmap.mmap(-1, _SIZE)


def read_rings(content: bytes) -> dict[str, Any]:
    """A process's rings as plain data, oldest first. Entries that were being written are left out.

    Raises:
        ValueError: if it is no such file.
    """
    found = json.loads(content[:HEADER_BYTES].rstrip(b"\0"))
    when = _TIME.unpack_from(content, HEADER_BYTES)[0]
    error = content[HEADER_BYTES + 8 : _CALLS_AT].rstrip(b"\0").decode(errors="replace")
    found["failure"] = {"time": when, "error": error} if when else None
    found["calls"] = _entries(content, _CALLS_AT, CALLS, CALL_BYTES, _call)
    found["steps"] = _entries(content, _STEPS_AT, STEPS, STEP_BYTES, _step)
    calls = {call["tag"]: call["call"] for call in found["calls"]}
    for step in found["steps"]:
        step["call"] = calls.get(step["tag"])
    return found


def _entries(content: bytes, start: int, count: int, width: int, read: Callable) -> list[dict]:
    entries = []
    for at in range(start, start + count * width, width):
        with contextlib.suppress(ValueError, struct.error):
            entry = read(content[at : at + width])
            if entry["count"]:
                entries.append(entry)
    return sorted(entries, key=lambda entry: entry["count"])


def _call(entry: bytes) -> dict[str, Any]:
    count, began, length = _CALL.unpack_from(entry)
    text = entry[_CALL.size : _CALL.size + length].decode(errors="replace")
    if not count:
        return {"count": 0}
    what, number, ranks, tag, detail = text.split("\t", 4)
    return {"count": count, "call": int(number), "what": what, "ranks": ranks, "tag": tag,
            "began": began, "detail": detail}  # fmt: skip


def _step(entry: bytes) -> dict[str, Any]:
    count, began, awaited, ended, length = _STEP.unpack_from(entry)
    if not count:
        return {"count": 0}
    text = entry[_STEP.size : _STEP.size + length].decode(errors="replace")
    layout, mesh_dim, payload, tag, step, nbytes, to, source = text.split("\t")[:8]
    return {"count": count, "layout": layout, "mesh_dim": mesh_dim, "payload": payload, "tag": tag,
            "step": int(step) if int(step) >= 0 else None, "to": to, "from": source,
            "bytes": int(nbytes), "began": began, "awaited": awaited or None,
            "ended": abs(ended) or None, "failed": ended < 0}  # fmt: skip


__all__ = ["Rings", "Step", "read_rings"]
