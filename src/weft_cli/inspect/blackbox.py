"""Traces in words: which rank waits for which, and where ranks diverged.

`weft.launch.trace` writes them. A rank *answers* another that waits for a message, a vote or a sum
by beginning the same one. The rank that does not answer and waits for nobody is the one that all
others wait for. Files may be damaged or forged: a line that is no line of a trace is skipped, as
one that was being written is, and no number in a file says how much memory or time it takes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from weft._opening import open_to_read
from weft.errors import DeclarationError
from weft.launch.trace import CALLS, SIZE, STEPS, rank_ranges, root, runs_of, state_of

#: Files of ranks in a folder.
_FILES = 1 << 17
#: Lines of ranks that wait, beyond which the rest is counted.
_LINES = 24

_Rank = Annotated[int, Field(ge=0, lt=1 << 17)]  # more than any run has
_Ranges = Annotated[tuple[tuple[_Rank, _Rank], ...], Field(max_length=12)]
_Count = Annotated[int, Field(ge=0, lt=2**62)]
_Time = Annotated[float, Field(ge=0, lt=4e9, allow_inf_nan=False)]


class RecordedLine(BaseModel):
    """A line of a trace: of a process, its copy, its failure, a call, or a step.

    A step is a message, a vote or a sum: when it began, was waited for and ended, 0.0 for not at
    all. The ranks of a call are those that its steps go to.
    """

    kind: Literal["process", "copy", "failure", "call", "step"]
    run: str = ""
    rank: _Rank = 0
    ranks: Annotated[int, Field(ge=1, le=1 << 17)] = 1  # of the world
    host: str = ""
    pid: Annotated[int, Field(ge=0, lt=2**31)] = 0
    process: str = ""  # the state of the process as it was copied
    written: _Time = 0.0
    at: _Time = 0.0
    error: str = ""
    count: _Count = 0
    number: _Count = 0
    tag: str = "0"
    what: str = ""
    detail: str = ""
    began: _Time = 0.0
    awaited: _Time = 0.0
    ended: _Time = 0.0
    failed: bool = False
    turn: _Count = 0
    step: int = -1
    bytes: _Count = 0
    to: _Ranges = ()
    source: _Ranges = ()
    mesh_dim: str = ""
    payload: str = ""
    layout: str = ""


@dataclass(frozen=True)
class Box:
    """The trace of one rank: its last steps and calls, oldest first, and how it failed, if so."""

    head: RecordedLine
    copy: RecordedLine
    steps: Sequence[RecordedLine] = ()
    calls: Sequence[RecordedLine] = ()
    failure: RecordedLine | None = None

    @property
    def rank(self) -> int:
        """In the world."""
        return self.head.rank

    @property
    def waits(self) -> RecordedLine | None:
        """The step that the rank waits for, or waited for in vain."""
        open_steps = [s for s in self.steps if s.awaited and (s.failed or not s.ended)]
        last = max(open_steps, key=lambda s: s.awaited, default=None)
        done = max((s.ended for s in self.steps if not s.failed), default=0.0)
        return last if last and (not last.ended or last.ended > done) else None

    @property
    def peers(self) -> list[int]:
        """The ranks that the step waited for goes to or comes from."""
        step = self.waits
        return [] if step is None else sorted({*_each(step.to), *_each(step.source)} - {self.rank})

    @property
    def process(self) -> str:
        """The state of its process in words; empty while it runs."""
        states = {"gone": "has ended or was killed", "stopped": "is stopped"}
        return states.get(self.copy.process, "")

    def answers(self, other: Box) -> bool:
        """True if this rank has begun the step that another waits for; also if that is unknown.

        A trace that does not reach back to the step in question says nothing.
        """
        awaited = other.waits
        if awaited is None:
            return True
        for step in self.steps:
            if (step.payload, step.mesh_dim) != (awaited.payload, awaited.mesh_dim):
                continue
            if awaited.turn and step.source == awaited.source:
                if step.turn >= awaited.turn:
                    return True
            elif (step.tag, step.step) == (awaited.tag, awaited.step) and any(
                low <= other.rank <= high for low, high in (*step.to, *step.source)
            ):
                return True
        dropped = bool(self.steps) and self.steps[0].count > 1
        return dropped and self.steps[0].began > awaited.began


def load_records(folder: str | Path | None = None) -> list[Box]:
    """The traces of the newest run in a folder, by rank.

    The folder is one of `weft-rank-N.jsonl`, or of the mapped files of a run that still goes on; by
    default the newest of these on this machine.
    """
    if folder is None:
        runs = runs_of(root())
        if not runs:
            raise DeclarationError(f"no run on this machine has left its steps in {root()}")
        folder = max(runs, key=lambda p: p.stat().st_mtime)
    folder = Path(folder)
    if folder.name.startswith("weft-blackbox-") and folder.is_dir():
        owner = folder.stat().st_uid
        if owner != os.geteuid():
            raise DeclarationError(
                f"{folder} belongs to another user ({owner}), and has a name as weft gives to your"
                " own folders; copy it to read what they wrote there"
            )
    paths = [*folder.glob("weft-rank-*.jsonl"), *folder.glob("rank-*")]
    if len(paths) > _FILES:
        raise DeclarationError(f"{folder}: {len(paths):,} files, of at most {_FILES:,} ranks")
    boxes = [read_records(path) for path in sorted(paths)]
    if not boxes:
        raise DeclarationError(
            f"{folder}: no file weft-rank-N.jsonl; ranks write them when one fails, into the folder"
            " that WEFT_BLACKBOX names, else that of the run (`weft train`), else one that the"
            " error names"
        )
    newest = max(boxes, key=lambda box: box.copy.written).head.run
    return sorted((b for b in boxes if b.head.run == newest), key=lambda box: box.rank)


def read_records(path: Path) -> Box:
    """The trace in a file."""
    try:
        with open_to_read(path, links=True) as file:
            texts = [text.strip(b" \0") for text in file.read(2 * SIZE).split(b"\n")]
    except OSError as error:
        raise _no_trace(path, f" ({error})") from None
    found: defaultdict[str, list[RecordedLine]] = defaultdict(list)
    for text in filter(None, texts):
        with contextlib.suppress(ValidationError):
            line = RecordedLine.model_validate_json(text)
            found[line.kind].append(line)
    head = next(iter(found["process"]), None)
    if head is None or head.rank >= head.ranks:
        raise _no_trace(path)
    if not found["copy"]:  # a mapped file that is read in place, as if it were copied now
        process = state_of(head.pid) if head.host == socket.gethostname()[:64] else "runs"
        found["copy"].append(RecordedLine(kind="copy", written=time.time(), process=process))
    steps, calls = (sorted(found[kind], key=lambda line: line.count) for kind in ("step", "call"))
    failure = next(iter(found["failure"]), None)
    return Box(head, found["copy"][0], steps[-STEPS:], calls[-CALLS:], failure)


def _no_trace(path: Path, reason: str = "") -> DeclarationError:
    return DeclarationError(
        f"{path}: no trace that this version of weft wrote{reason}; remove the file to read the"
        " others"
    )


# -- in words -------------------------------------------------------------------------------------


def describe_run(boxes: Sequence[Box]) -> str:
    """The last steps of ranks of one run: who failed, who waits for whom, where they diverged."""
    by_rank = {box.rank: box for box in boxes}
    silent = {rank: _silent(box, by_rank) for rank, box in by_rank.items()}
    waiting = [*_waiting(by_rank, silent)]
    if len(waiting) > _LINES:
        waiting[_LINES:] = [f"... and {len(waiting) - _LINES} lines more like these"]
    awaited = {peer for peers in silent.values() for peer in peers}
    idle = [box for box in by_rank.values() if box.waits is None]
    idle_lines = [_idle(box) for box in idle if box.rank in awaited or len(by_rank) <= _LINES]
    parts = [_head(boxes), *_failures(boxes), *_diverged(boxes), *waiting, *idle_lines]
    return "\n".join([*parts, _verdict(by_rank, silent)])


def _head(boxes: Sequence[Box]) -> str:
    first, when = boxes[0].head, max(box.copy.written for box in boxes)
    text = f"run {first.run[:8]}, {first.ranks} ranks, as of {_clock(when)}"
    missing = sorted(set(range(first.ranks)) - {box.rank for box in boxes})
    if missing:
        text += (
            f"\nno file of {_who(missing)}: on a machine where nobody noticed, or with another "
            "WEFT_BLACKBOX"
        )
    return text


def _failures(boxes: Sequence[Box]) -> Iterator[str]:
    by_text: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for box in boxes:
        if box.failure:
            by_text[box.failure.error].append((box.failure.at, box.rank))
    for text, failed in sorted(by_text.items(), key=lambda entry: min(entry[1])):
        yield f"{_clock(min(failed)[0])}  {_who([rank for _, rank in failed])} failed: {text}"


def _diverged(boxes: Sequence[Box]) -> Iterator[str]:
    """The first call at which ranks that make calls together differ."""
    made: defaultdict[tuple[_Ranges, int], defaultdict[str, list[int]]]
    made = defaultdict(lambda: defaultdict(list))
    for box in boxes:
        for call in box.calls:
            made[call.to, call.number][call.detail].append(box.rank)
    told = set()
    for (ranks, number), by_text in sorted(made.items()):
        if len(by_text) > 1 and ranks not in told:
            told.add(ranks)
            yield f"{_words(ranks)} diverged at call {number}:"
            yield from (f"  {_who(who)}: {text}" for text, who in by_text.items())


def _silent(box: Box, by_rank: dict[int, Box]) -> list[int]:
    """Peers that have not begun the step a rank waits for, that have ended, or are unknown."""
    found = {peer: by_rank.get(peer) for peer in box.peers}
    return [p for p, peer in found.items() if not peer or peer.process or not peer.answers(box)]


def _waiting(by_rank: dict[int, Box], silent: dict[int, list[int]]) -> Iterator[str]:
    """One line for all ranks that wait for the same step of the same ranks."""
    lines: defaultdict[tuple[str, str], list[tuple[Box, RecordedLine]]] = defaultdict(list)
    for box in by_rank.values():
        if (step := box.waits) is not None:
            whom = _who(silent[box.rank] or box.peers)
            whom += "" if silent[box.rank] else " (begun there, too: on its way)"
            lines[whom, f"{_step(box, step)}, layout {step.layout!r}"].append((box, step))
    for (whom, text), waits in lines.items():
        since = max((step.ended or box.copy.written) - step.awaited for box, step in waits)
        verb = "waits" if len(waits) == 1 else "wait"
        tried = " in vain" if all(step.failed for _, step in waits) else ""
        boxes = [box for box, _ in waits]
        who = _who([box.rank for box in boxes])
        yield f"{who} {verb}{tried} for {whom} for {since:.1f} s: {text}{_became(boxes)}"


def _step(box: Box, step: RecordedLine) -> str:
    """A step, and the call that it is of: by its tag, of a vote or a sum the last one before."""
    text = f"{step.payload} along mesh dim {step.mesh_dim!r}"
    text += f", {step.bytes:,} bytes" * bool(step.bytes) + f", step {step.step}" * (step.step >= 0)
    for call in reversed(box.calls):
        if call.tag == step.tag or (step.tag == "0" and call.began <= step.began):
            return f"{text} of {call.what}, call {call.number} of {_words(call.to)}"
    return text


def _idle(box: Box) -> str:
    """A rank that waits for nobody."""
    text = f"rank {box.rank} waits for nobody{_became([box])}"
    if not box.steps:
        return f"{text}: it has made no call"
    last = box.steps[-1]
    then, when = ("ended", last.ended) if last.ended else ("began", last.began)
    return f"{text}: the last it did was {_step(box, last)}, {then} {_clock(when)}"


def _became(boxes: Iterable[Box]) -> str:
    states = sorted({box.process for box in boxes if box.process})
    return f" (its process {', '.join(states)})" if states else ""


def _verdict(by_rank: dict[int, Box], silent: dict[int, list[int]]) -> str:
    edges = {rank: whom for rank, whom in silent.items() if whom}
    ended = [box for box in by_rank.values() if box.process]
    if not edges and 0 < len(ended) < len(by_rank):
        return (
            f"=> {_who([box.rank for box in ended])}{_became(ended)}; others may wait for it"
            " outside of weft, as in torch's own collectives"
        )
    if not edges:
        return "=> no rank waits for one that has not answered"
    ends = sorted({p for whom in edges.values() for p in whom if p not in edges})
    if not ends:
        return f"=> {_who([*edges])} wait for each other"
    boxes = [by_rank[p] for p in ends if p in by_rank]
    return f"=> all that wait do so, directly or not, for {_who(ends)}{_became(boxes)}"


def _each(ranges: _Ranges) -> Iterator[int]:
    return (rank for low, high in ranges for rank in range(low, high + 1))


def _who(ranks: Sequence[int]) -> str:
    return _words(rank_ranges(sorted(ranks)))


def _words(ranges: _Ranges) -> str:
    """Ranks in words: rank 3; ranks 0-2, 5."""
    plural = "s" * (len(ranges) > 1 or any(low < high for low, high in ranges))
    named = (str(low) if low == high else f"{low}-{high}" for low, high in ranges)
    return f"rank{plural} {', '.join(named)}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{int(seconds * 1000) % 1000:03}"
