"""What black boxes tell: which rank waits for whom, and where ranks diverged, in words.

`weft.launch.trace` writes them. A rank *answers* another that waits for a message, a vote or a sum
by beginning the same one. The rank that does not answer and waits for nobody is the one that all
others wait for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DeclarationError
from ..launch.rings import read_rings
from ..launch.trace import ranks_in_words, state_of

#: Lines of ranks that wait, beyond which the rest is counted.
_LINES = 24


@dataclass(frozen=True)
class Box:
    """What one rank wrote, or had written for it; `data` is the file's content."""

    data: dict[str, Any]

    @property
    def rank(self) -> int:
        """In the world."""
        return self.data["rank"]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The last steps, oldest first."""
        return self.data["steps"]

    @property
    def waits(self) -> dict[str, Any] | None:
        """The step that the rank waits for, or waited for in vain."""
        held = [s for s in self.steps if s["awaited"] and (s["failed"] or not s["ended"])]
        last = max(held, key=lambda s: s["awaited"], default=None)
        done = max((s["ended"] for s in self.steps if s["ended"] and not s["failed"]), default=0.0)
        return last if last and (not last["ended"] or last["ended"] > done) else None

    @property
    def peers(self) -> list[int]:
        """The ranks that the step waited for goes to or comes from."""
        step = self.waits
        return [] if step is None else sorted({*_senders(step), *_receivers(step)} - {self.rank})

    def answers(self, other: Box) -> bool:
        """Whether this rank has begun what another waits for it with; also where that is unknown.

        A record that does not reach back to the step in question says nothing.
        """
        want = other.waits
        if want is None:
            return True
        turn = want["tag"].startswith("#")
        for step in self.steps:
            if step["payload"] != want["payload"] or step["mesh_dim"] != want["mesh_dim"]:
                continue
            if turn and step["from"] == want["from"]:
                if int(step["tag"][1:]) >= int(want["tag"][1:]):
                    return True
            elif (step["tag"], step["step"]) == (want["tag"], want["step"]) and other.rank in (
                *_senders(step),
                *_receivers(step),
            ):
                return True
        return bool(self.steps) and self.steps[0]["count"] > 1 and self._later(want)

    def _later(self, want: dict[str, Any]) -> bool:
        """Whether all that is left here began after a step, and so may have come after it."""
        return self.steps[0]["began"] > want["began"]


def load(folder: str | Path) -> list[Box]:
    """The boxes of the newest run in a folder, by rank.

    Raises:
        DeclarationError: if the folder has none, or a file is no black box.
    """
    folder = Path(folder)
    found = [_file(path) for path in sorted(folder.glob("weft-rank-*.json"))]
    found += [_rings(path) for path in sorted(folder.glob("rank-*")) if path.is_file()]
    if not found:
        raise DeclarationError(
            f"{folder}: no file weft-rank-N.json; ranks write them when one fails and on SIGUSR1, "
            "into the folder that WEFT_BLACKBOX names, else that of the run (`weft train`), else "
            "one that the error names"
        )
    newest = max(found, key=lambda box: box.data["written"]).data["run"]
    return sorted((b for b in found if b.data["run"] == newest), key=lambda box: box.rank)


def _file(path: Path) -> Box:
    try:
        data = json.loads(path.read_text())
        box = Box(data)
        _ = data["run"], data["written"], data["by"], box.rank, box.peers, data["calls"]
        return box
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DeclarationError(
            f"{path}: no black box that this version of weft wrote ({type(error).__name__}); take "
            "the file away to read the others"
        ) from None


def _rings(path: Path) -> Box:
    try:
        data = read_rings(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DeclarationError(f"{path}: no rings of a rank: {error}") from None
    live = {"written": time.time(), "by": -1, "process": state_of(data["pid"])}
    return Box(data | live)


# -- in words -------------------------------------------------------------------------------------


def describe(boxes: Sequence[Box]) -> str:
    """What some ranks did last: who failed, who waits for whom, where they diverged.

    Args:
        boxes: of one run, see `load`.
    """
    by_rank = {box.rank: box for box in boxes}
    parts = [_head(boxes), *_failures(boxes), *_diverged(boxes)]
    waiting = list(_waiting(by_rank))
    parts += waiting[:_LINES]
    if len(waiting) > _LINES:
        parts.append(f"... and {len(waiting) - _LINES} lines more like these")
    parts += [_idle(box) for box in boxes if box.waits is None and _alone(box, by_rank)]
    return "\n".join([*parts, _verdict(by_rank)])


def _head(boxes: Sequence[Box]) -> str:
    first = boxes[0].data
    when = max(box.data["written"] for box in boxes)
    text = f"run {first['run']}, {first['ranks']} ranks, as of {_clock(when)}"
    missing = sorted(set(range(first["ranks"])) - {box.rank for box in boxes})
    if missing:
        text += (
            f"\nno file of {_who(missing)}: on a machine where nobody noticed, or with another "
            "WEFT_BLACKBOX"
        )
    return text


def _failures(boxes: Sequence[Box]) -> Iterator[str]:
    failed = [box for box in boxes if box.data["failure"]]
    by_text: dict[str, list[int]] = {}
    for box in sorted(failed, key=lambda box: box.data["failure"]["time"]):
        by_text.setdefault(box.data["failure"]["error"], []).append(box.rank)
    for text, ranks in by_text.items():
        when = min(b.data["failure"]["time"] for b in failed if b.rank in ranks)
        yield f"{_clock(when)}  {_who(ranks)} failed: {text}"


def _diverged(boxes: Sequence[Box]) -> Iterator[str]:
    """Where ranks that make calls together began another one, or fewer."""
    groups: dict[str, dict[int, dict[int, str]]] = {}
    for box in boxes:
        for call in box.data["calls"]:
            numbers = groups.setdefault(call["ranks"], {}).setdefault(box.rank, {})
            numbers[call["call"]] = call["detail"]
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
    if len(set(reached.values())) > 1:
        last = max(reached.values())
        behind = {r: n for r, n in reached.items() if n < last}
        detail = next(numbers[last] for numbers in calls.values() if last in numbers)
        yield f"ranks {ranks} did the same until one stopped making calls:"
        for count in sorted(set(behind.values())):
            who = [r for r, n in behind.items() if n == count]
            yield f"  {_who(who)} came to call {count}, others to call {last}: {detail}"


def _waiting(by_rank: dict[int, Box]) -> Iterator[str]:
    """One line for all ranks that wait for the same ranks with the same."""
    lines: dict[tuple[str, str], list[Box]] = {}
    for box in by_rank.values():
        if box.waits is not None:
            lines.setdefault((_awaited_ranks(box, by_rank), _what(box, by_rank)), []).append(box)
    for (whom, what), boxes in lines.items():
        since = max(_seconds(box) for box in boxes)
        verb = "waits" if len(boxes) == 1 else "wait"
        tried = " in vain" if all(box.waits["failed"] for box in boxes) else ""
        who = _who([box.rank for box in boxes])
        yield f"{who} {verb}{tried} for {whom} for {since:.1f} s: {what}{_became(boxes)}"


def _awaited_ranks(box: Box, by_rank: dict[int, Box]) -> str:
    silent = _silent(box, by_rank)
    if silent:
        return _who(silent)
    return f"{_who(box.peers)} (begun there, too: on its way)"


def _silent(box: Box, by_rank: dict[int, Box]) -> list[int]:
    """Peers that have not begun what a rank waits for, that are no more, or that are unknown."""

    def answers(peer: Box | None) -> bool:
        return peer is not None and not _became([peer]) and peer.answers(box)

    return [p for p in box.peers if not answers(by_rank.get(p))]


def _what(box: Box, by_rank: dict[int, Box]) -> str:
    step = box.waits
    text = f"{step['payload']} along mesh dim {step['mesh_dim']!r}"
    if step["bytes"]:
        text += f", {step['bytes']:,} bytes"
    if step["step"] is not None:
        text += f", step {step['step']}"
    call = next((c for c in box.data["calls"] if c["tag"] == step["tag"]), None)
    if call is None and step["payload"] == "a vote":
        call = max((c for c in box.data["calls"] if c["began"] <= step["began"]),
                   key=lambda c: c["count"], default=None)  # fmt: skip
    if call is not None:
        text += f" of {call['what']}, call {call['call']} of ranks {call['ranks']}"
    return f"{text}, layout {step['layout']!r}"


def _idle(box: Box) -> str:
    """A rank that waits for nobody."""
    last = box.steps[-1] if box.steps else None
    text = f"rank {box.rank} waits for nobody{_became([box])}"
    if last is None:
        return f"{text}: it has made no call"
    then = "ended" if last["ended"] else "began"
    when = last["ended"] or last["began"]
    what = _step(last)
    return f"{text}: the last it did was {what}, {then} {_clock(when)}"


def _step(step: dict[str, Any]) -> str:
    number = "" if step["step"] is None else f", step {step['step']}"
    call = "" if step["call"] is None else f" of call {step['call']}"
    return f"{step['payload']} along {step['mesh_dim']!r}{number}{call}"


def _became(boxes: Sequence[Box]) -> str:
    states = {"gone": "has ended or was killed", "stopped": "is stopped"}
    found = [f"{states[s]}" for s in sorted({b.data.get("process") for b in boxes} & {*states})]
    return f" (its process {', '.join(found)})" if found else ""


def _alone(box: Box, by_rank: dict[int, Box]) -> bool:
    """Whether there is something to tell of a rank that waits for nobody."""
    waited = any(box.rank in _silent(other, by_rank) for other in by_rank.values())
    return waited or len(by_rank) <= _LINES


def _verdict(by_rank: dict[int, Box]) -> str:
    edges = {rank: _silent(box, by_rank) for rank, box in by_rank.items()}
    edges = {rank: whom for rank, whom in edges.items() if whom}
    if not edges:
        return "=> no rank waits for one that has not answered"
    ends = sorted({p for whom in edges.values() for p in whom if not edges.get(p)})
    if ends:
        boxes = [by_rank[p] for p in ends if p in by_rank]
        return f"=> all that wait do so, directly or not, for {_who(ends)}{_became(boxes)}"
    circle = _circle(edges)
    return f"=> ranks wait for each other: {' -> '.join(map(str, circle))}"


def _circle(edges: dict[int, list[int]]) -> list[int]:
    rank, path = min(edges), []
    while rank not in path:
        path.append(rank)
        rank = edges[rank][0]
    return [*path[path.index(rank) :], rank]


def _seconds(box: Box) -> float:
    step = box.waits
    return (step["ended"] or box.data["written"]) - step["awaited"]


def _senders(step: dict[str, Any]) -> Iterable[int]:
    return _ranks(step["from"])


def _receivers(step: dict[str, Any]) -> Iterable[int]:
    return _ranks(step["to"])


def _ranks(text: str) -> list[int]:
    """The ranks of `"0-2,5"`."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return found


def _who(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {ranks_in_words(sorted(ranks)).replace(',', ', ')}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{int(seconds * 1000) % 1000:03}"


__all__ = ["Box", "describe", "load"]
