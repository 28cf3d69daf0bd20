"""Would it end on real GPUs? The logs of all ranks of a run, replayed by NCCL's rules.

Streams are queues and events order them. A group of NCCL's calls on a communicator is one kernel,
which ends when every message of it has met its other end in a kernel that has begun there; per pair
and communicator messages meet in their order, collectives in theirs. The CPU waits at SYNC lines,
votes and texts. With `in_order` all NCCL kernels of a rank run one after another, as where
multiprocessors are scarce.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Messages in one group beyond which NCCL may wait for ever (pytorch#174942).
MOST = 256
#: Streams -> how far each must have come.
Clock = dict[str, int]


def logs_of(folder: Path) -> dict[int, list[str]]:
    """The lines of every rank's log, by its rank in the world."""
    found = {}
    for path in folder.glob("log.*"):
        lines = path.read_text().splitlines()
        first = next((m for line in lines if (m := _WORLD.match(line))), None)
        if first:
            found[int(first[1])] = lines
    return dict(sorted(found.items()))


_WORLD = re.compile(r"COMM init \w+ ranks \d+ rank (\d+)")


def faults(logs: dict[int, list[str]], in_order: bool = False) -> list[str]:
    """What would go wrong on real GPUs, in words; [] if nothing."""
    return _Replay(logs, in_order).run()


@dataclass
class _Call:
    """A message or a collective of a communicator; `peer` is numbered within it."""

    what: str
    comm: str
    peer: int
    nbytes: int
    memory: tuple[tuple[int, str], ...]  # addresses that it reads ("r") or writes ("w")
    stream: str
    kernel: _Kernel | None = None
    number: int = 0  # among those of the pair, or of the communicator


@dataclass(eq=False)
class _Kernel:
    """A kernel of NCCL's on a stream, and what must have ended before it begins."""

    rank: _Rank
    stream: str
    place: int
    after: Clock
    calls: list[_Call]
    where: str
    begun: bool = False
    ended: bool = False


@dataclass
class _Rank:
    """A CPU at its line, its streams, and memory that is in use."""

    number: int
    lines: list[str]
    line: int = 0
    mark: str = ""
    placed: Counter[str] = field(default_factory=Counter)  # per stream, how much was launched
    done: Counter[str] = field(default_factory=Counter)  # and how much of it has ended
    after: dict[str, Clock] = field(default_factory=lambda: defaultdict(dict))
    events: dict[str, Clock] = field(default_factory=dict)
    host: Clock = field(default_factory=dict)
    kernels: dict[tuple[str, int], _Kernel] = field(default_factory=dict)
    clocks: dict[tuple[str, int], Clock] = field(default_factory=dict)
    group: list[_Call] | None = None
    last: _Kernel | None = None
    used: list[tuple[int, int, str, str, int, str]] = field(default_factory=list)
    begun_votes: Counter[str] = field(default_factory=Counter)
    read_votes: Counter[str] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)
    told: int = -1  # the line at which this rank has said its text

    @property
    def where(self) -> str:
        return f"rank {self.number}, line {self.line + 1} ({self.mark})"

    def wait(self, stream: str, clock: Clock) -> None:
        """What is launched on a stream from now on comes after a clock."""
        of = self.after[stream]
        for other, place in clock.items():
            of[other] = max(of.get(other, 0), place)

    def launch(self, stream: str) -> int:
        """Something more on a stream; its place."""
        self.wait(stream, self.host)
        self.placed[stream] += 1
        place = self.placed[stream]
        self.after[stream][stream] = place
        self.clocks[stream, place] = {s: p for s, p in self.after[stream].items() if s != stream}
        return place


class _Replay:
    def __init__(self, logs: dict[int, list[str]], in_order: bool) -> None:
        self.in_order = in_order
        self.ranks = {number: _Rank(number, lines) for number, lines in logs.items()}
        self.found: Counter[str] = Counter()
        #: communicator -> (its numbering -> rank in the world)
        self.members: dict[str, dict[int, int]] = defaultdict(dict)
        for number, lines in logs.items():
            for line in lines:
                if m := re.match(r"COMM \w+ (\w+) ranks \d+ rank (\d+)", line):
                    self.members[m[1]][int(m[2])] = number
        self.own = {(c, w): n for c, of in self.members.items() for n, w in of.items()}
        #: (communicator, from, to) -> sends, receives; (communicator, rank) -> collectives
        self.sends: dict[tuple, list[_Call]] = defaultdict(list)
        self.receives: dict[tuple, list[_Call]] = defaultdict(list)
        self.collectives: dict[tuple, list[_Call]] = defaultdict(list)

    def run(self) -> list[str]:
        moved = True
        while moved:
            moved = False
            for rank in self.ranks.values():
                while rank.line < len(rank.lines) and self._line(rank):
                    rank.line += 1
                    moved = True
            for rank in self.ranks.values():
                moved |= self._device(rank)
        for rank in self.ranks.values():
            if rank.line < len(rank.lines):
                self._say("the CPU waits for ever", f"{rank.where}: {rank.lines[rank.line]}")
            waiting = next((k for k in rank.kernels.values() if not k.ended), None)
            if waiting:
                calls = [f"{c.what} {c.peer} {c.nbytes}" for c in waiting.calls]
                self._say("the GPU waits for ever", f"{waiting.where}: {', '.join(calls)}")
        return [text if n == 1 else f"{text} ({n} times)" for text, n in self.found.items()]

    def _say(self, kind: str, where: str) -> None:
        """Note a fault; of a kind the first place is enough."""
        known = next((text for text in self.found if text.startswith(kind)), f"{kind}: {where}")
        self.found[known] += 1

    # -- the CPU -----------------------------------------------------------------------------------

    def _line(self, rank: _Rank) -> bool:
        """Do a line of the log; False where the CPU waits."""
        word, _, rest = rank.lines[rank.line].partition(" ")
        names = rest.split()
        if word == "mark":
            return self._marked(rank, names, rest)
        if word == "SYNC":
            return self._synchronized(rank, names)
        if word == "record":
            rank.events[names[3]] = dict(rank.after[names[1]])
        elif word == "wait":
            rank.wait(names[1], rank.events.get(names[3], {}))
        elif word == "launch":
            rank.launch(names[-1])
        elif word in ("copy", "memset"):
            named = dict(itertools.pairwise(names))
            self._copied(rank, named, int(names[2 if word == "copy" else 0]))
        elif word == "GROUP":
            if names[0] == "start":
                rank.group = []
            else:
                self._launch(rank, rank.group or [])
                rank.group = None
        elif word == "NCCL":
            self._called(rank, names[0], dict(zip(names[1::2], names[2::2])))
        elif word == "alloc":
            rank.used = [u for u in rank.used if not _meet(u, int(names[0], 16), int(names[1]))]
        elif word == "free":
            self._freed(rank, int(names[0], 16), int(names[1]), names[3])
        elif word in ("IMPOSSIBLE", "NOWHERE"):
            self._say(word, f"{rank.where}: {rest}")
        return True

    def _marked(self, rank: _Rank, names: list[str], text: str) -> bool:
        if names[0] == "vote-begin":
            rank.begun_votes[names[1]] += 1
            return True
        if names[0] not in ("vote-wait", "text"):
            rank.mark = text
            return True
        others = [self.ranks[int(r)] for r in names[1].split(",")]
        if names[0] == "vote-wait":
            number = rank.read_votes[names[1]] + 1
            if any(other.begun_votes[names[1]] < number for other in others):
                return False
            rank.read_votes[names[1]] = number
            return True
        if rank.told != rank.line:
            rank.told = rank.line
            rank.texts[names[1]] += 1
        return all(other.texts[names[1]] >= rank.texts[names[1]] for other in others)

    def _synchronized(self, rank: _Rank, names: list[str]) -> bool:
        clock: Clock = dict(rank.placed)
        if names[0] == "stream":
            clock = dict(rank.after[names[1]])
        elif names[0] == "event":
            clock = rank.events.get(names[1], {})
        if any(rank.done[stream] < place for stream, place in clock.items()):
            return False
        for stream, place in clock.items():
            rank.host[stream] = max(rank.host.get(stream, 0), place)
        return True

    def _called(self, rank: _Rank, what: str, of: dict[str, str]) -> None:
        places = (("src", "r"), ("dst", "w"))
        memory = tuple((int(of[k], 16), access) for k, access in places if of[k] != "(nil)")
        numbers = int(of["peer"]), int(of["bytes"])
        call = _Call(what, of["comm"], *numbers, memory, of["stream"])
        if rank.group is None:
            self._launch(rank, [call])
        else:
            rank.group.append(call)

    def _launch(self, rank: _Rank, calls: list[_Call]) -> None:
        """A group ends: a kernel per communicator and stream."""
        groups: dict[tuple[str, str], list[_Call]] = defaultdict(list)
        for call in calls:
            groups[call.comm, call.stream].append(call)
        for (comm, stream), members in groups.items():
            messages = sum(call.what in ("send", "recv") for call in members)
            if messages > MOST:
                self._say(f"more than {MOST} messages in a group", f"{rank.where}: {messages}")
            place = rank.launch(stream)
            if self.in_order and rank.last is not None and rank.last.stream != stream:
                rank.clocks[stream, place][rank.last.stream] = rank.last.place
            clock = rank.clocks[stream, place]
            kernel = _Kernel(rank, stream, place, clock, members, rank.where)
            rank.kernels[stream, place] = rank.last = kernel
            here = self.own[comm, rank.number]
            for call in members:
                call.kernel = kernel
                if call.what == "send":
                    of = self.sends[comm, here, call.peer]
                elif call.what == "recv":
                    of = self.receives[comm, call.peer, here]
                else:
                    of = self.collectives[comm, here]
                call.number = len(of)
                of.append(call)
                for address, access in call.memory:
                    self._use(rank, address, call.nbytes, access, stream, place, call.what)

    # -- memory ------------------------------------------------------------------------------------

    def _copied(self, rank: _Rank, of: dict[str, str], nbytes: int) -> None:
        stream = of["stream"]
        place = rank.launch(stream)
        for name, access in (("src", "r"), ("dst", "w")):
            if name in of:
                self._clash(rank, int(of[name], 16), nbytes, access, stream, place, "a copy")

    def _use(
        self, rank: _Rank, at: int, nbytes: int, access: str, stream: str, place: int, what: str
    ) -> None:
        self._clash(rank, at, nbytes, access, stream, place, what)
        rank.used.append((at, nbytes, access, stream, place, f"{what} at line {rank.line + 1}"))

    def _clash(
        self, rank: _Rank, at: int, nbytes: int, access: str, stream: str, place: int, what: str
    ) -> None:
        """Memory that NCCL uses, and that another stream reads or writes without coming after."""
        clock = rank.clocks[stream, place]
        for used in rank.used:
            _, _, before, other, its_place, by = used
            unordered = other != stream and clock.get(other, 0) < its_place
            if unordered and "w" in (access, before) and _meet(used, at, nbytes):
                self._say("two streams use memory at once", f"{rank.where}: {what}, and {by}")

    def _freed(self, rank: _Rank, at: int, nbytes: int, stream: str) -> None:
        for used in rank.used:
            _, _, _, other, place, by = used
            seen = max(rank.after[stream].get(other, 0), rank.host.get(other, 0))
            if other != stream and seen < place and _meet(used, at, nbytes):
                self._say("memory ends that NCCL may still use", f"{rank.where}: of {by}")
        rank.used = [u for u in rank.used if not _meet(u, at, nbytes)]

    # -- the GPU -----------------------------------------------------------------------------------

    def _device(self, rank: _Rank) -> bool:
        """End what can end on a rank's streams; True if something has."""
        moved = False
        for stream, launched in rank.placed.items():
            while rank.done[stream] < launched:
                place = rank.done[stream] + 1
                kernel = rank.kernels.get((stream, place))
                clock = rank.clocks[stream, place]
                ready = all(rank.done[s] >= p for s, p in clock.items())
                if kernel is None and ready:
                    rank.done[stream] = place
                    moved = True
                    continue
                if kernel is None:
                    break
                if ready and not kernel.begun:
                    kernel.begun = moved = True
                if not kernel.begun or not all([*self._complete(kernel)]):
                    break
                kernel.ended = moved = True
                rank.done[stream] = place
        return moved

    def _complete(self, kernel: _Kernel) -> Iterator[bool]:
        """For each call of a kernel, whether its other ends have begun."""
        rank = kernel.rank.number
        for call in kernel.calls:
            here = self.own[call.comm, rank]
            for other in self._other_ends(call, here):
                begun = other is not None and other.kernel is not None and other.kernel.begun
                yield begun
                if begun and other is not None and other.nbytes != call.nbytes:
                    sizes = f"{call.what} {call.nbytes}, {other.what} {other.nbytes}"
                    self._say("sizes differ", f"{kernel.where}: {sizes}")
                if begun and call.peer < 0 and other is not None and other.what != call.what:
                    self._say("collectives differ", f"{kernel.where}: {call.what}, {other.what}")

    def _other_ends(self, call: _Call, here: int) -> list[Any]:
        if call.what == "send":
            found = [self.receives[call.comm, here, call.peer]]
        elif call.what == "recv":
            found = [self.sends[call.comm, call.peer, here]]
        else:
            found = [self.collectives[call.comm, n] for n in self.members[call.comm]]
        return [of[call.number] if call.number < len(of) else None for of in found]


def _meet(used: tuple, at: int, nbytes: int) -> bool:
    return used[0] < at + nbytes and at < used[0] + used[1]
