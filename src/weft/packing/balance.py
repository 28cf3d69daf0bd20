"""Packs documents into chunks of given sizes with balanced attention work.

A token at position p of its document sees p + 1 keys, so long documents hold the work. A chunk
takes from both ends: from the longest documents, as long as its share of the work lasts, then from
the shortest until it has its tokens. Of one document alone that is the zigzag order.

    documents by length   | a | b |  c  |  d   |      e      |         f           |
    chunk 0 takes           a   b                                         [ end of f ]
    chunk 1 takes                  c                          [ further part of f ]

Documents stay whole as far as a chunk has room for them, the longest first. A cut is what makes
ranks talk: a fragment's rank receives the tokens before it. So one that is too much for a chunk
gives it as much of its end as may be, a little more than the mean, and what is left is on few
chunks; a chunk that then misses a little work does not cut another for it. A cut moves to the
border of a document where that leaves the work in balance.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence

from .assignment import Fragment, scores_of

#: Shares of a chunk's work: by how much it may miss its aim,
MISS = 0.003
#: by how much it may exceed the mean so that a document stays whole, or is cut less often,
SLACK = 0.04
#: where work is moved to another chunk, of the slack,
LEVEL = 1.125
#: and how much may be missing before another document is cut for it.
UNDER = 0.1


def assign(
    lengths: Sequence[int],
    sizes: Sequence[int],
    window: int | None = None,
    slack: float = SLACK,
) -> tuple[tuple[Fragment, ...], ...]:
    """Fragments of documents for chunks of given sizes, with as equal work as can be.

    >>> assign([8], [4, 4])[0]
    (Fragment(document=0, start=2, stop=6),)
    """
    pool = _Pool(lengths, window, sum(size > 0 for size in sizes), slack)
    taken: list[list[Fragment]] = [[] for _ in sizes]
    work = [0] * len(sizes)
    left = pool.chunks
    for chunk in reversed(range(len(sizes))):  # DTensor's short chunk, the last, has first choice
        if sizes[chunk]:
            work[chunk] = pool.scores_left
            taken[chunk] = pool.take(sizes[chunk], left)
            work[chunk] -= pool.scores_left
            left -= 1
    _level(taken, work, pool.scores_of, LEVEL * slack)
    return tuple(_in_memory(fragments, lengths) for fragments in taken)


def assign_together(
    lengths: Sequence[int],
    sizes: Sequence[int],
    groups: Sequence[Sequence[int]],
    window: int | None = None,
    by_keys: bool = False,
    slack: float = SLACK,
) -> tuple[tuple[Fragment, ...], ...]:
    """Fragments of documents for chunks of which some are computed together.

    The work of groups is balanced, and each group's fragments are cut into its chunks as they
    follow each other: within a group nothing depends on who holds which.

    >>> assign_together([6, 2], [2, 2, 2, 2], [(0, 1), (2, 3)])[:2]
    ((Fragment(document=0, start=0, stop=2),), (Fragment(document=0, start=2, stop=4),))
    """
    shares = assign(lengths, [sum(sizes[i] for i in group) for group in groups], window, slack)
    chunks: dict[int, tuple[Fragment, ...]] = {}
    for group, fragments in zip(groups, shares, strict=True):
        if by_keys:
            fragments = _in_memory([_mirrored(f, lengths) for f in fragments], lengths)
        parts = _cut(fragments, [sizes[i] for i in group]) if len(group) > 1 else (fragments,)
        chunks.update(zip(group, parts, strict=True))
    return tuple(chunks[i] for i in range(len(sizes)))


def _mirrored(fragment: Fragment, lengths: Sequence[int]) -> Fragment:
    """The fragment as far from its document's end as this one is from the start."""
    document, start, stop = fragment
    return Fragment(document, lengths[document] - stop, lengths[document] - start)


def _cut(fragments: Sequence[Fragment], sizes: Sequence[int]) -> Iterator[tuple[Fragment, ...]]:
    """The fragments one after another, in parts of given numbers of tokens."""
    rest = list(reversed(fragments))
    for room in sizes:
        part: list[Fragment] = []
        while room:
            document, start, stop = rest.pop()
            end = min(stop, start + room)
            part.append(Fragment(document, start, end))
            if end < stop:
                rest.append(Fragment(document, end, stop))
            room -= end - start
        yield tuple(part)


def _level(
    taken: list[list[Fragment]], work: list[int], scores: Callable[[int], int], over: float
) -> None:
    """Swap ends of heavy fragments for starts of light ones where chunks are out of balance."""
    share = sum(work) / max(1, sum(map(bool, taken)))
    ranked = sorted((i for i, fragments in enumerate(taken) if fragments), key=work.__getitem__)
    low = 0
    for high in reversed(ranked):
        while work[high] > (1 + over) * share and low < len(ranked) and ranked[low] != high:
            heavy = max(taken[high], key=lambda f: f.stop)
            light = min(taken[ranked[low]], key=lambda f: (f.start, f.stop))
            most = min(heavy.stop - heavy.start, light.stop - light.start)
            most = min(most, max(0, heavy.stop - light.start) // 2)  # `moved` grows that far

            def moved(tokens: int, end: int = heavy.stop, start: int = light.start) -> int:
                gain = scores(end) - scores(end - tokens)
                return gain - scores(start + tokens) + scores(start)

            excess = min(work[high] - share, max(share - work[ranked[low]], MISS * share))
            tokens = bisect_left(range(most), excess, key=moved)
            if moved(tokens) <= 0:  # it has no lighter tokens: the next one may
                low += 1
                continue
            for chunk, gives, gets in (
                (high, heavy, Fragment(light.document, light.start, light.start + tokens)),
                (ranked[low], light, Fragment(heavy.document, heavy.stop - tokens, heavy.stop)),
            ):
                taken[chunk].remove(gives)
                taken[chunk].append(gets)
            if tokens < heavy.stop - heavy.start:
                taken[high].append(heavy._replace(stop=heavy.stop - tokens))
            if tokens < light.stop - light.start:
                taken[ranked[low]].append(light._replace(start=light.start + tokens))
            work[high] -= moved(tokens)
            work[ranked[low]] += moved(tokens)
            if work[ranked[low]] >= (1 - MISS) * share:
                low += 1


def _in_memory(taken: list[Fragment], lengths: Sequence[int]) -> tuple[Fragment, ...]:
    """Place whole documents first, so that each peer needs one contiguous range of rows."""
    joined: list[Fragment] = []
    cut: list[Fragment] = []
    for fragment in sorted(taken):
        document, start, stop = fragment
        if cut and cut[-1].document == document and cut[-1].stop == start:
            fragment = Fragment(document, cut.pop().start, stop)
        (joined if fragment.stop - fragment.start == lengths[document] else cut).append(fragment)
    return (*joined, *cut)


def _triangle(tokens: int) -> int:
    """`scores_of` without a window."""
    return tokens * (tokens + 1) // 2


class _Pool:
    """The rest of the documents, by where each ends: the lightest first, the heaviest last.

    `tokens` and `scores` are the sums before each document; they are made as far as is asked.
    """

    def __init__(
        self, lengths: Sequence[int], window: int | None, chunks: int, slack: float
    ) -> None:
        self.window = None if window is None or window >= max(lengths, default=0) else window
        self.scores_of = (
            _triangle if self.window is None else functools.partial(scores_of, window=self.window)
        )
        self.chunks = chunks
        self.line = sorted((n, i, 0) for i, n in enumerate(lengths))  # (stop, document, start)
        self.first, self.eaten = 0, 0  # the lightest document, and how much of it is gone
        self.tokens, self.scores = [0], [0]
        self.tokens_left = sum(lengths)
        self.scores_left = sum(map(self.scores_of, lengths))
        self.limit = (1 + slack) * self.scores_left / max(1, chunks)
        self.under = UNDER if slack < UNDER else 1.0  # who may exceed the mean by more may miss all

    def take(self, need: int, chunks: int) -> list[Fragment]:
        """Fragments of `need` tokens and one of `chunks` equal shares of the work that is left."""
        share = self.scores_left / chunks
        most, over, tries = MISS * share, max(self.limit - share, MISS * share), 0
        taken: list[Fragment] = []
        work = share
        stop, _, start = self.line[self.first]
        if stop - start - self.eaten > need:  # all light tokens would be one document's, not whole
            self._turn()
        while self.tokens_left > need:
            light, last, until = self._light(need)
            gap = work - light
            if gap <= most:
                break
            at = len(self.line) - 1
            if not self._fits(at, need, work + over):
                if taken:
                    at = self._closing(until, gap) if tries < 8 else at
                    tries += 1
                if not taken or not self._fits(at, need, work + over):
                    if not taken or gap > self.under * share:
                        aim = work if taken or at == self.first else work + over
                        need -= self._cut(at, need, aim, (light, last), share, taken)
                    break
            fragment = self._whole(at)
            taken.append(fragment)
            need -= fragment.stop - fragment.start
            work -= self.scores_of(fragment.stop) - self.scores_of(fragment.start)
        self._fill(need, taken)
        return taken

    # -- the light end -------------------------------------------------------------------------

    def _reach(self, tokens: int) -> None:
        """Sums as far as some tokens past the first document's start."""
        line, scores_of = self.line, self.scores_of
        reached, scores = self.tokens[-1], self.scores[-1]
        for at in range(len(self.tokens) - 1, len(line)):
            if reached >= tokens:
                break
            stop, _, start = line[at]
            reached += stop - start
            scores += scores_of(stop) - (scores_of(start) if start else 0)
            self.tokens.append(reached)
            self.scores.append(scores)

    def _end(self, tokens: int) -> tuple[int, int]:
        """The document, by its place in line, in which the lightest tokens end, and where in it."""
        end = self.tokens[self.first] + self.eaten + tokens
        if self.tokens[-1] < end:
            self._reach(end)
        at = min(bisect_right(self.tokens, end, self.first) - 1, len(self.line) - 1)
        return at, end - self.tokens[at]

    def _light(self, tokens: int) -> tuple[int, int, int]:
        """Scores of the lightest tokens, the scores of the last of them, and the place it is at."""
        if not tokens:
            return 0, 0, self.first
        first, eaten, scores = self.first, self.eaten, self.scores_of
        at, inside = self._end(tokens)
        start = self.line[at][2]
        last = start + inside
        until = self.scores[at] - self.scores[first] + scores(last)
        if start:
            until -= scores(start)
        if eaten:
            start = self.line[first][2]
            until -= scores(start + eaten) - scores(start)
        return until, last, at

    def _turn(self) -> None:
        """Let the document whose first token is the lightest be the first in line."""
        stop, document, start = self.line[self.first]
        starts = [item[2] for item in self.line[self.first + 1 : -1]]  # the last loses its end
        if starts and min(starts) < start + self.eaten:
            at = self.first + 1 + starts.index(min(starts))
            self._forget(self.first)
            self.line[self.first] = self.line.pop(at)
            # Not the next either: what is left of it may be heavy.
            insort(self.line, (stop, document, start + self.eaten), self.first + 2)
            self.eaten = 0

    def _fill(self, need: int, taken: list[Fragment]) -> None:
        """Take the lightest tokens; the last document whole, if one of just that length is left."""
        self.tokens_left -= need
        self.scores_left -= self._light(need)[0]
        while need:
            stop, document, start = self.line[self.first]
            start += self.eaten
            if stop - start > need:
                at = bisect_left(self.line, (need, -1, 0), self.first + 1)
                if at < len(self.line) and self.line[at][0] == need and not self.line[at][2]:
                    # It is counted as the tokens that it takes the place of.
                    self.scores_left += self.scores_of(start + need) - self.scores_of(start)
                    self.tokens_left += need
                    taken.append(self._whole(at))
                else:
                    taken.append(Fragment(document, start, start + need))
                    self.eaten += need
                return
            taken.append(Fragment(document, start, stop))
            need -= stop - start
            self.first, self.eaten = self.first + 1, 0
            if len(self.tokens) <= self.first:
                self._reach(self.tokens[-1] + 1)

    # -- the heavy end -------------------------------------------------------------------------

    def _count(self, fragment: Fragment) -> None:
        self.tokens_left -= fragment.stop - fragment.start
        self.scores_left -= self.scores_of(fragment.stop) - self.scores_of(fragment.start)

    def _forget(self, at: int) -> None:
        """The line changes from a place on: sums before it stay."""
        del self.tokens[at + 1 :], self.scores[at + 1 :]

    def _whole(self, at: int) -> Fragment:
        """Take all that is left of a document."""
        self._forget(at)
        stop, document, start = self.line.pop(at)
        fragment = Fragment(document, start, stop)
        self._count(fragment)
        return fragment

    def _fits(self, at: int, need: int, work: float) -> bool:
        """True if a document, with the lightest tokens to fill up, is within need and work."""
        stop, _, start = self.line[at]
        tokens = stop - start
        if tokens > need or at == self.first:
            return False
        work -= self.scores_of(stop) - self.scores_of(start)
        if work < 0:
            return False
        light, _, until = self._light(need - tokens)
        return until < at and light <= work

    def _closing(self, at: int, gap: float) -> int:
        """The place of the longest document that may close a gap in work: k^2 / 2 - light k.

        The last place where that would be among the light ones.

        at: the place where the tokens end that fill the chunk without it.
        """
        light = self.line[at][0] / 2
        if self.window is not None:
            light = min(light, self.window)
        longest = light + math.sqrt(light * light + 2 * gap)
        place = bisect_right(self.line, (longest, math.inf, 0)) - 1
        return place if place > at else len(self.line) - 1

    def _cut(
        self,
        at: int,
        need: int,
        aim: float,
        light: tuple[int, int],
        share: float,
        taken: list[Fragment],
    ) -> int:
        """Take so many tokens from the end of a document that the work is as is aimed.

        light: of the `need` tokens that would fill the chunk without it.
        """
        stop, document, start = self.line[at]
        alone = at == self.first
        start += self.eaten if alone else 0
        rest, scores = self.tokens_left - (stop - start), self.scores_of
        most, window = min(need, stop - start), self.window
        before = scores(stop) - aim

        def miss(tokens: int) -> tuple[float, int]:
            """Excess work, and its derivative by one token."""
            fill, local = need - tokens, 0
            if fill > rest:  # then the rest is from this document's own start
                fill, local = rest, fill - rest
            filled, last, _ = self._light(fill)
            if local:
                last = start + local
                filled += scores(last) - scores(start)
            heaviest = stop - tokens
            error = before - scores(heaviest) + filled
            if window is not None:
                heaviest, last = min(heaviest, window), min(last, window)
            return error, heaviest - last

        tokens, error, slope = 0, light[0] - aim, stop - light[1]
        best = abs(error), tokens
        for _ in range(8):  # both ends are near enough to parabolas
            step = -error / max(slope, 1)
            if window is None and slope * slope + 2 * error > 0:
                step = slope - math.sqrt(slope * slope + 2 * error)
            tokens = min(max(tokens + round(step), 0), most)
            error, slope = miss(tokens)
            if abs(error) >= best[0]:
                break
            best = abs(error), tokens
            if best[0] <= MISS * share:
                break
        tokens = best[1]
        if need - tokens <= rest:
            tokens = self._to_border(need, tokens, most, MISS * share / max(slope, 1))
        if tokens:
            self._forget(at)
            self.line.pop(at)
            taken.append(Fragment(document, stop - tokens, stop))
            self._count(taken[-1])
            self._put_back(document, start, stop - tokens, alone)
        return tokens

    def _put_back(self, document: int, start: int, stop: int, alone: bool) -> None:
        """The rest of a document whose end was taken; `alone`: it is the first, too."""
        if start == stop:
            self.eaten = 0 if alone else self.eaten
            return
        item = (stop, document, start - self.eaten if alone else start)
        at = self.first if alone else bisect_left(self.line, item, self.first + 1)
        self._forget(at)
        self.line.insert(at, item)

    def _to_border(self, need: int, tokens: int, most: int, change: float) -> int:
        """As many tokens of a heavy document, or a few more or less that cut no light one.

        change: tokens more or less that leave the work in balance.
        """
        at, inside = self._end(need - tokens)
        stop, _, start = self.line[at]
        eaten = self.eaten if at == self.first else 0
        extra, less = tokens + inside - eaten, tokens - (stop - start - inside)
        if inside in (eaten, stop - start):
            return tokens
        way = min(extra, less, key=lambda way: abs(way - tokens))
        return way if 0 <= way <= most and abs(way - tokens) <= change else tokens
