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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

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


class RecordHead(BaseModel):
    """The process that a trace is of."""

    kind: Literal["process"] = "process"
    run: str
    rank: _Rank
    ranks: Annotated[int, Field(ge=1, le=1 << 17)]
    host: str
    pid: Annotated[int, Field(ge=0, lt=2**31)]


class RecordCopy(BaseModel):
    """When and by which rank a trace was copied, and the state of its process then."""

    kind: Literal["copy"] = "copy"
    by: int
    written: _Time
    process: str


class RecordedFailure(BaseModel):
    """The failure of a rank."""

    kind: Literal["failure"] = "failure"
    at: _Time
    error: str


class RecordedCall(BaseModel):
    """A pass of a call, which the ranks of a group make together."""

    kind: Literal["call"] = "call"
    count: _Count
    began: _Time
    number: _Count
    tag: str
    ranks: _Ranges
    what: str
    detail: str


class RecordedStep(BaseModel):
    """A message, a vote or a sum: when it began, was waited for and ended, 0.0 for not at all."""

    kind: Literal["step"] = "step"
    count: _Count
    began: _Time
    awaited: _Time
    ended: _Time
    failed: bool
    tag: str
    turn: _Count
    step: int
    bytes: _Count
    to: _Ranges
    source: _Ranges
    mesh_dim: str
    payload: str
    layout: str


_Line = RecordHead | RecordCopy | RecordedFailure | RecordedCall | RecordedStep
_LINE: TypeAdapter[_Line] = TypeAdapter(Annotated[_Line, Field(discriminator="kind")])
_Entry = TypeVar("_Entry", RecordedCall, RecordedStep)


@dataclass(frozen=True)
class Box:
    """The trace of one rank: its last steps and calls, oldest first, and how it failed, if so."""

    head: RecordHead
    copy: RecordCopy
    steps: Sequence[RecordedStep] = ()
    calls: Sequence[RecordedCall] = ()
    failure: RecordedFailure | None = None

    @property
    def rank(self) -> int:
        """In the world."""
        return self.head.rank

    @property
    def waits(self) -> RecordedStep | None:
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
    lines: list[_Line] = []
    for text in filter(None, texts):
        with contextlib.suppress(ValidationError):
            lines.append(_LINE.validate_json(text))
    heads = [line for line in lines if isinstance(line, RecordHead)]
    if not heads or heads[0].rank >= heads[0].ranks:
        raise _no_trace(path)
    copies = [line for line in lines if isinstance(line, RecordCopy)]
    failures = [line for line in lines if isinstance(line, RecordedFailure)]
    return Box(
        heads[0],
        copies[0] if copies else _live(heads[0]),
        _last((line for line in lines if isinstance(line, RecordedStep)), STEPS),
        _last((line for line in lines if isinstance(line, RecordedCall)), CALLS),
        failures[0] if failures else None,
    )


def _no_trace(path: Path, reason: str = "") -> DeclarationError:
    return DeclarationError(
        f"{path}: no trace that this version of weft wrote{reason}; remove the file to read the"
        " others"
    )


def _live(head: RecordHead) -> RecordCopy:
    """A mapped file that is read in place, as if it were copied now."""
    process = state_of(head.pid) if head.host == socket.gethostname()[:64] else "runs"
    return RecordCopy(by=head.rank, written=time.time(), process=process)


def _last(entries: Iterable[_Entry], count: int) -> list[_Entry]:
    return sorted(entries, key=lambda entry: entry.count)[-count:]


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
    plural = "s" * (first.ranks > 1)
    text = f"run {first.run[:8]}, {first.ranks} rank{plural}, as of {_clock(when)}"
    missing = sorted(set(range(first.ranks)) - {box.rank for box in boxes})
    if missing:
        text += (
            f"\nno file of {_who(missing)}: on a machine where nobody noticed, or with another "
            "WEFT_BLACKBOX"
        )
    return text


def _failures(boxes: Sequence[Box]) -> Iterator[str]:
    by_text: dict[str, list[tuple[float, int]]] = {}
    for box in boxes:
        if box.failure:
            by_text.setdefault(box.failure.error, []).append((box.failure.at, box.rank))
    for text, failed in sorted(by_text.items(), key=lambda entry: min(entry[1])):
        yield f"{_clock(min(failed)[0])}  {_who([rank for _, rank in failed])} failed: {text}"


def _diverged(boxes: Sequence[Box]) -> Iterator[str]:
    """The first call at which ranks that make calls together differ."""
    groups: dict[_Ranges, dict[int, dict[int, str]]] = {}
    for box in boxes:
        for call in box.calls:
            groups.setdefault(call.ranks, {}).setdefault(box.rank, {})[call.number] = call.detail
    for ranks, calls in groups.items():
        yield from _differing(_words(ranks), calls)


def _differing(ranks: str, calls: dict[int, dict[int, str]]) -> Iterator[str]:
    for number in sorted({n for numbers in calls.values() for n in numbers}):
        by_text: dict[str, list[int]] = {}
        for rank, numbers in calls.items():
            if number in numbers:
                by_text.setdefault(numbers[number], []).append(rank)
        if len(by_text) > 1:
            yield f"{ranks} diverged at call {number}:"
            yield from (f"  {_who(who)}: {text}" for text, who in by_text.items())
            return
    reached = {rank: max(numbers) for rank, numbers in calls.items()}
    last = max(reached.values())
    behind = sorted({number for number in reached.values() if number < last})
    if behind:
        detail = next(numbers[last] for numbers in calls.values() if last in numbers)
        yield f"{ranks} did the same until one stopped making calls:"
        for count in behind:
            who = [rank for rank, number in reached.items() if number == count]
            yield f"  {_who(who)} came to call {count}, others to call {last}: {detail}"


def _silent(box: Box, by_rank: dict[int, Box]) -> list[int]:
    """Peers that have not begun the step a rank waits for, that have ended, or are unknown."""

    def answers(peer: Box | None) -> bool:
        return peer is not None and not peer.process and peer.answers(box)

    return [p for p in box.peers if not answers(by_rank.get(p))]


def _waiting(by_rank: dict[int, Box], silent: dict[int, list[int]]) -> Iterator[str]:
    """One line for all ranks that wait for the same step of the same ranks."""
    lines: dict[tuple[str, str], list[tuple[Box, RecordedStep]]] = {}
    for box in by_rank.values():
        if (step := box.waits) is not None:
            whom = _who(silent[box.rank] or box.peers)
            whom += "" if silent[box.rank] else " (begun there, too: on its way)"
            lines.setdefault((whom, _step(box, step)), []).append((box, step))
    for (whom, text), waits in lines.items():
        since = max((step.ended or box.copy.written) - step.awaited for box, step in waits)
        verb = "waits" if len(waits) == 1 else "wait"
        tried = " in vain" if all(step.failed for _, step in waits) else ""
        boxes = [box for box, _ in waits]
        who = _who([box.rank for box in boxes])
        yield f"{who} {verb}{tried} for {whom} for {since:.1f} s: {text}{_became(boxes)}"


def _step(box: Box, step: RecordedStep) -> str:
    text = f"{step.payload} along mesh dim {step.mesh_dim!r}"
    if step.bytes:
        text += f", {step.bytes:,} bytes"
    if step.step >= 0:
        text += f", step {step.step}"
    call = _call(box, step)
    if call is None and step.payload == "a vote":
        call = next((c for c in reversed(box.calls) if c.began <= step.began), None)
    if call is not None:
        text += f" of {call.what}, call {call.number} of {_words(call.ranks)}"
    return f"{text}, layout {step.layout!r}"


def _call(box: Box, step: RecordedStep) -> RecordedCall | None:
    """The call that a step is of; of a vote or a sum, whose tag is 0, that is not on record."""
    return next((c for c in box.calls if c.tag == step.tag != "0"), None)


def _idle(box: Box) -> str:
    """A rank that waits for nobody."""
    text = f"rank {box.rank} waits for nobody{_became([box])}"
    if not box.steps:
        return f"{text}: it has made no call"
    last, call = box.steps[-1], _call(box, box.steps[-1])
    which = f", step {last.step}" * (last.step >= 0) + (f" of call {call.number}" if call else "")
    then, when = ("ended", last.ended) if last.ended else ("began", last.began)
    did = f"{last.payload} along {last.mesh_dim!r}{which}"
    return f"{text}: the last it did was {did}, {then} {_clock(when)}"


def _became(boxes: Iterable[Box]) -> str:
    states = sorted({box.process for box in boxes if box.process})
    return f" (its process {', '.join(states)})" if states else ""


def _verdict(by_rank: dict[int, Box], silent: dict[int, list[int]]) -> str:
    edges = {rank: whom for rank, whom in silent.items() if whom}
    if not edges:
        ended = [rank for rank, box in by_rank.items() if box.process]
        if ended and len(ended) < len(by_rank):
            boxes = [by_rank[rank] for rank in ended]
            return (
                f"=> {_who(ended)}{_became(boxes)}; others may wait for it outside of weft, as in"
                " torch's own collectives"
            )
        return "=> no rank waits for one that has not answered"
    ends = sorted({p for whom in edges.values() for p in whom if p not in edges})
    if ends:
        boxes = [by_rank[p] for p in ends if p in by_rank]
        return f"=> all that wait do so, directly or not, for {_who(ends)}{_became(boxes)}"
    rank, path = min(edges), []
    while rank not in path:
        path.append(rank)
        rank = edges[rank][0]
    circle = [*path[path.index(rank) :], rank]
    return f"=> ranks wait for each other: {' -> '.join(map(str, circle))}"


def _each(ranges: _Ranges) -> Iterator[int]:
    return (rank for low, high in ranges for rank in range(low, high + 1))


def _who(ranks: Sequence[int]) -> str:
    return _words(rank_ranges(sorted(ranks)))


def _words(ranges: _Ranges) -> str:
    """Ranks in words: rank 3; ranks 0-2, 5."""
    plural = "s" * (len(ranges) > 1 or any(low < high for low, high in ranges))
    return f"rank{plural} {as_text(ranges, ', ')}"


def as_text(ranges: _Ranges, separator: str = ",") -> str:
    """Ranks as ranges.

    >>> as_text(((0, 2), (5, 5)))
    '0-2,5'
    """
    return separator.join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{int(seconds * 1000) % 1000:03}"
