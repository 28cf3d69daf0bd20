"""Traces in words: which rank waits for which, and where ranks diverged.

`weft.launch.trace` writes them. A rank *answers* another that waits for a message, a vote or a sum
by beginning the same one. The rank that does not answer and waits for nobody is the one that all
others wait for. Files may be damaged or forged: a line that is no line of a trace is left out, as
one that was being written is, and no number in a file says how much memory or time it takes.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from ..errors import DeclarationError
from ..launch.trace import CALLS, SIZE, STEPS, ranks_in_words, root, state_of

#: Lines of ranks that wait, beyond which the rest is counted.
_LINES = 24
#: What a file may say: more ranks than any run has, and the ranges that a step names.
_MOST_RANKS, _RANGES = 1 << 17, 12

_Count = Annotated[int, Field(ge=0, lt=2**62)]
_Seconds = Annotated[float, Field(ge=0, lt=4e9, allow_inf_nan=False)]
_Time = Annotated[int, Field(gt=-(10**16), lt=10**16)]  # microseconds; negative: it failed


class RecordHead(BaseModel):
    """Whose trace it is."""

    run: str
    rank: Annotated[int, Field(ge=0, lt=_MOST_RANKS)]
    ranks: Annotated[int, Field(ge=1, le=_MOST_RANKS)]
    host: str
    pid: Annotated[int, Field(ge=0, lt=2**31)]
    written: _Seconds = 0.0
    by: int = -1
    process: str = "runs"


@dataclass(frozen=True)
class RecordedStep:
    """A message, a vote or a sum: when it began, was waited for and ended, 0.0 for not at all."""

    count: int
    began: float
    awaited: float
    ended: float
    tag: str
    step: int
    bytes: int
    to: str
    source: str
    mesh_dim: str
    payload: str
    layout: str

    @property
    def failed(self) -> bool:
        """True if the wait ended with an error."""
        return self.ended < 0

    @property
    def peers(self) -> list[range]:
        """The ranks that it goes to and comes from."""
        return [*_ranks(self.to), *_ranks(self.source)]


@dataclass(frozen=True)
class RecordedCall:
    """A pass of a call, which the ranks of a group make together."""

    count: int
    began: float
    number: int
    tag: str
    ranks: str
    what: str
    detail: str


_HEAD = TypeAdapter(dict[str, Any])
_LINE = TypeAdapter(
    Annotated[
        tuple[
            Literal["step"], _Count, _Time, _Time, _Time, str, int, _Count, str, str, str, str, str
        ]
        | tuple[Literal["call"], _Count, _Time, _Count, str, str, str, str]
        | tuple[Literal["failed"], _Time, str],
        Field(union_mode="left_to_right"),
    ]
)


@dataclass(frozen=True)
class Box:
    """The trace of one rank: its last steps and calls, oldest first, and how it failed, if so."""

    head: RecordHead
    steps: Sequence[RecordedStep] = ()
    calls: Sequence[RecordedCall] = ()
    failure: tuple[float, str] | None = None

    @property
    def rank(self) -> int:
        """In the world."""
        return self.head.rank

    @property
    def waits(self) -> RecordedStep | None:
        """The step that the rank waits for, or waited for in vain."""
        open_ = [s for s in self.steps if s.awaited and (s.failed or not s.ended)]
        last = max(open_, key=lambda s: s.awaited, default=None)
        done = max((s.ended for s in self.steps), default=0.0)
        return last if last and (not last.ended or -last.ended > done) else None

    @property
    def peers(self) -> list[int]:
        """The ranks that the step waited for goes to or comes from."""
        step = self.waits
        return [] if step is None else sorted({p for r in step.peers for p in r} - {self.rank})

    def answers(self, other: Box) -> bool:
        """True if this rank has begun the step that another waits for; also if that is unknown.

        A trace that does not reach back to the step in question says nothing.
        """
        want = other.waits
        if want is None:
            return True
        for step in self.steps:
            if (step.payload, step.mesh_dim) != (want.payload, want.mesh_dim):
                continue
            if (turn := _turn(want)) is not None and step.source == want.source:
                if (_turn(step) or -1) >= turn:
                    return True
            elif (step.tag, step.step) == (want.tag, want.step) and any(
                other.rank in ranks for ranks in step.peers
            ):
                return True
        lost = bool(self.steps) and self.steps[0].count > 1
        return lost and self.steps[0].began > want.began


def load_records(folder: str | Path | None = None) -> list[Box]:
    """The traces of the newest run in a folder, by rank.

    Args:
        folder: of `weft-rank-N.jsonl`, or of the mapped files of a run that still goes on; default
            the newest of these on this machine.

    Raises:
        DeclarationError: if the folder has none, or a file is no trace.
    """
    if folder is None:
        runs = [p for p in root().glob("weft-steps-*") if p.is_dir()]
        if not runs:
            raise DeclarationError(f"no run on this machine has left its steps in {root()}")
        folder = max(runs, key=lambda p: p.stat().st_mtime)
    folder = Path(folder)
    paths = [*folder.glob("weft-rank-*.jsonl"), *folder.glob("rank-*")]
    boxes = [read_records(path) for path in sorted(paths)]
    if not boxes:
        raise DeclarationError(
            f"{folder}: no file weft-rank-N.jsonl; ranks write them when one fails, into the folder"
            " that WEFT_BLACKBOX names, else that of the run (`weft train`), else one that the"
            " error names"
        )
    newest = max(boxes, key=lambda box: box.head.written).head.run
    return sorted((b for b in boxes if b.head.run == newest), key=lambda box: box.rank)


def read_records(path: Path) -> Box:
    """The trace in a file.

    Raises `DeclarationError` for one that is no trace.
    """
    try:
        if not path.is_file():
            raise ValueError("no regular file")
        with path.open("rb") as file:
            lines = [
                *filter(None, (line.strip(b" \0\n") for line in file.read(4 * SIZE).split(b"\n")))
            ]
        top = {}
        if path.name.endswith(".jsonl"):
            top = _HEAD.validate_json(lines.pop(0))
        head = RecordHead.model_validate({**_HEAD.validate_json(lines.pop(0)), **top})
        if head.rank >= head.ranks:
            raise ValueError(f"rank {head.rank} of {head.ranks}")
    except (OSError, ValueError, IndexError) as error:
        reason = "" if isinstance(error, ValidationError) else f" ({' '.join(str(error).split())})"
        raise DeclarationError(
            f"{path}: no trace that this version of weft wrote{reason}; take the file away to read"
            " the others"
        ) from None
    if not top:
        local = head.host == socket.gethostname()[:64]
        live = {"written": time.time(), "process": state_of(head.pid) if local else "runs"}
        head = head.model_copy(update=live)
    steps: dict[int, RecordedStep] = {}
    calls: dict[int, RecordedCall] = {}
    failure = None
    for line in lines:
        try:
            fields: Any = _LINE.validate_json(line)
        except ValidationError:
            continue
        kind, number, *others = fields
        if kind == "step" and number:
            times = (t / 1e6 for t in others[:3])
            steps[number] = RecordedStep(number, *times, *others[3:])
        elif kind == "call" and number:
            calls[number] = RecordedCall(number, others[0] / 1e6, *others[1:])
        elif kind == "failed":
            failure = (number / 1e6, others[0])
    return Box(head, _last(steps, STEPS), _last(calls, CALLS), failure)


def _last(entries: dict[int, Any], count: int) -> list[Any]:
    return [entries[number] for number in sorted(entries)[-count:]]


# -- in words -------------------------------------------------------------------------------------


def describe_run(boxes: Sequence[Box]) -> str:
    """The last doings of some ranks: who failed, who waits for whom, where they diverged.

    Args:
        boxes: of one run, see `load`.
    """
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
    first, when = boxes[0].head, max(box.head.written for box in boxes)
    text = f"run {first.run}, {first.ranks} ranks, as of {_clock(when)}"
    missing = sorted(set(range(first.ranks)) - {box.rank for box in boxes})
    if missing:
        text += (
            f"\nno file of {_who(missing)}: on a machine where nobody noticed, or with another "
            "WEFT_BLACKBOX"
        )
    return text


def _failures(boxes: Sequence[Box]) -> Iterator[str]:
    failed = sorted((*box.failure, box.rank) for box in boxes if box.failure)
    by_text: dict[str, list[tuple[float, int]]] = {}
    for when, text, rank in failed:
        by_text.setdefault(text, []).append((when, rank))
    for text, those in by_text.items():
        yield f"{_clock(those[0][0])}  {_who([rank for _, rank in those])} failed: {text}"


def _diverged(boxes: Sequence[Box]) -> Iterator[str]:
    """Where ranks that make calls together began another one, or fewer."""
    groups: dict[str, dict[int, dict[int, str]]] = {}
    for box in boxes:
        for call in box.calls:
            groups.setdefault(call.ranks, {}).setdefault(box.rank, {})[call.number] = call.detail
    for ranks, calls in groups.items():
        yield from _differing(ranks, calls)


def _differing(ranks: str, calls: dict[int, dict[int, str]]) -> Iterator[str]:
    for number in sorted({n for numbers in calls.values() for n in numbers}):
        by_text: dict[str, list[int]] = {}
        for rank, numbers in calls.items():
            if number in numbers:
                by_text.setdefault(numbers[number], []).append(rank)
        if len(by_text) > 1:
            yield f"ranks {ranks} diverged at call {number}:"
            yield from (f"  {_who(who)}: {text}" for text, who in by_text.items())
            return
    reached = {rank: max(numbers) for rank, numbers in calls.items()}
    last = max(reached.values())
    behind = {r: n for r, n in reached.items() if n < last}
    if behind:
        detail = next(numbers[last] for numbers in calls.values() if last in numbers)
        yield f"ranks {ranks} did the same until one stopped making calls:"
        for count in sorted(set(behind.values())):
            who = [r for r, n in behind.items() if n == count]
            yield f"  {_who(who)} came to call {count}, others to call {last}: {detail}"


def _silent(box: Box, by_rank: dict[int, Box]) -> list[int]:
    """Peers that have not begun the step a rank waits for, that are no more, or are unknown."""

    def answers(peer: Box | None) -> bool:
        return peer is not None and not _became([peer]) and peer.answers(box)

    return [p for p in box.peers if not answers(by_rank.get(p))]


def _waiting(by_rank: dict[int, Box], silent: dict[int, list[int]]) -> Iterator[str]:
    """One line for all ranks that wait for the same ranks with the same."""
    lines: dict[tuple[str, str], list[tuple[Box, RecordedStep]]] = {}
    for box in by_rank.values():
        if (step := box.waits) is not None:
            whom = _who(silent[box.rank] or box.peers)
            whom += "" if silent[box.rank] else " (begun there, too: on its way)"
            lines.setdefault((whom, _what(box, step)), []).append((box, step))
    for (whom, what), those in lines.items():
        since = max((abs(step.ended) or box.head.written) - step.awaited for box, step in those)
        verb = "waits" if len(those) == 1 else "wait"
        tried = " in vain" if all(step.failed for _, step in those) else ""
        who, became = _who([box.rank for box, _ in those]), _became([box for box, _ in those])
        yield f"{who} {verb}{tried} for {whom} for {since:.1f} s: {what}{became}"


def _what(box: Box, step: RecordedStep) -> str:
    text = f"{step.payload} along mesh dim {step.mesh_dim!r}"
    if step.bytes:
        text += f", {step.bytes:,} bytes"
    if step.step >= 0:
        text += f", step {step.step}"
    call = _call(box, step)
    if call is None and step.payload == "a vote":
        earlier = (c for c in box.calls if c.began <= step.began)
        call = max(earlier, key=lambda c: c.count, default=None)
    if call is not None:
        text += f" of {call.what}, call {call.number} of ranks {call.ranks}"
    return f"{text}, layout {step.layout!r}"


def _call(box: Box, step: RecordedStep) -> RecordedCall | None:
    return next((c for c in box.calls if c.tag == step.tag), None)


def _idle(box: Box) -> str:
    """A rank that waits for nobody."""
    text = f"rank {box.rank} waits for nobody{_became([box])}"
    if not box.steps:
        return f"{text}: it has made no call"
    last, call = box.steps[-1], _call(box, box.steps[-1])
    which = f", step {last.step}" * (last.step >= 0) + (f" of call {call.number}" if call else "")
    then, when = ("ended", abs(last.ended)) if last.ended else ("began", last.began)
    did = f"{last.payload} along {last.mesh_dim!r}{which}"
    return f"{text}: the last it did was {did}, {then} {_clock(when)}"


def _became(boxes: Sequence[Box]) -> str:
    states = {"gone": "has ended or was killed", "stopped": "is stopped"}
    seen = [states[s] for s in sorted({b.head.process for b in boxes} & {*states})]
    return f" (its process {', '.join(seen)})" if seen else ""


def _verdict(by_rank: dict[int, Box], silent: dict[int, list[int]]) -> str:
    edges = {rank: whom for rank, whom in silent.items() if whom}
    if not edges:
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


def _turn(step: RecordedStep) -> int | None:
    """How many of its kind all ranks have begun, of a step that all do together."""
    digits = step.tag.removeprefix("#")
    return int(digits) if re.fullmatch(r"#[0-9]{1,18}", step.tag) else None


def _ranks(text: str) -> list[range]:
    """The ranks of `"0-2,5"`, of numbers that ranks can have."""
    parts = re.findall(r"(?<![^,])([0-9]{1,6})(?:-([0-9]{1,6}))?(?=,|$)", text)[:_RANGES]
    return [range(int(low), min(int(high or low), _MOST_RANKS - 1) + 1) for low, high in parts]


def _who(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {ranks_in_words(sorted(ranks)).replace(',', ', ')}"


def _clock(seconds: float) -> str:
    seconds = abs(seconds)
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{int(seconds * 1000) % 1000:03}"


__all__ = [
    "Box",
    "RecordHead",
    "RecordedCall",
    "RecordedStep",
    "describe_run",
    "load_records",
    "read_records",
]
