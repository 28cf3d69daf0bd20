"""Tokens assigned to ranks so that the work of any mask is equal and few keys travel.

Where a rank computes its own queries with all keys, a token's work is the keys that it sees; where
its own keys with all queries, the queries that see it. A causal document's last token sees p + 1
keys, so long documents hold the work. A chunk takes from both ends of the line of all segments (the
documents, or what else lies between drops of the work): from the heaviest, as long as its share of
the work lasts, then from the lightest until it has its tokens. Of one sequence that is zigzag.

    segments by mean work   | a | b |  c  |  d   |      e      |         f           |
    chunk 0 takes             a   b                                         [ end of f ]
    chunk 1 takes                    c                          [ further part of f ]

Segments stay whole as far as a chunk has room for them. A cut is what makes ranks talk: a
fragment's rank receives the tokens before it. So one that is too much for a chunk gives it as much
of its end as may be, a little more than the mean, and what is left is on few chunks; a chunk that
then misses a little work does not cut another for it. A cut moves to the border of a segment where
that leaves the work in balance. Ranks that compute together take as one, and their tokens are cut
evenly. Work of pairs, as on tiles, is balanced in blocks (blocks.py), and so is what this leaves
unequal. Of orders with equal work, the plain one among them, that is taken which sends least.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np

from ..masks.slices import Slices
from .blocks import Runs, balanced_blocks, travel_of, work_of
from .groups import Shares

#: Shares of a chunk's work: by how much it may miss its aim,
MISS = 0.003
#: by how much it may exceed the mean so that a segment stays whole, or is cut less often,
SLACK = 0.04
#: where work is moved to another chunk, of the slack,
LEVEL = 1.125
#: and how much may be missing before another segment is cut for it.
UNDER = 0.1

_Taken = list[tuple[int, int]]  # [start, stop)


def balanced_runs(
    mask: Slices, sizes: Sequence[int], shares: Sequence[Shares], slack: float = SLACK
) -> Runs:
    """Runs (start, tokens) of each chunk, of given sizes, so that every rank computes as much.

    >>> from weft.masks import Causal
    >>> from weft.masks.slices import sliced
    >>> ring = Shares((0, 1), (0, 0))
    >>> balanced_runs(sliced(Causal(), 8, 8), (4, 4), [ring])
    (((2, 4),), ((0, 2), (6, 2)))
    """
    queries, keys = shares[0]
    starts = [0, *itertools.accumulate(sizes)]
    found: list[Runs] = [tuple(((a, n),) if n else () for a, n in zip(starts, sizes))]
    if len(shares) == 1 and not (any(queries) and any(keys)):
        found.append(_one_sided(mask, sizes, queries if any(queries) else keys, any(keys), slack))
    fullest = [_fullest(work_of(mask, runs, shares)) for runs in found]
    equal = [runs for runs, most in zip(found, fullest) if most <= 1.005 + LEVEL * slack]
    if len(equal) == 1:
        return equal[0]
    if equal:
        return min(equal, key=lambda runs: travel_of(mask, runs, shares))
    found.append(balanced_blocks(mask, sizes, shares))
    return min(found, key=lambda runs: _fullest(work_of(mask, runs, shares)))


def _fullest(work: list[int]) -> float:
    """The work of the fullest rank, of the mean."""
    return max(work) * len(work) / max(1, sum(work))


def _one_sided(
    mask: Slices, sizes: Sequence[int], group_of: Sequence[int], by_keys: bool, slack: float
) -> Runs:
    """The runs of chunks of which those of one group compute together; `by_keys`, in reverse."""
    work, edges = mask.counts(by_keys), _edges(mask, by_keys)
    ends = dict(itertools.pairwise(edges.tolist()))
    if by_keys:  # what is seen by most comes first
        work, edges = work[::-1], mask.n - edges[::-1]
    totals = np.bincount(group_of, sizes).astype(int).tolist()
    runs: list[_Taken] = [[] for _ in sizes]
    for group, taken in enumerate(_dealt(work, edges, totals, slack)):
        if by_keys:
            taken = [(mask.n - stop, mask.n - start) for start, stop in taken]
        rest = _in_memory(taken, ends)
        for chunk, its_group in enumerate(group_of):
            if its_group == group:
                runs[chunk] = _cut(rest, sizes[chunk])
    return tuple(map(tuple, runs))


def _edges(mask: Slices, by_keys: bool) -> np.ndarray:
    """The ends of segments: where nothing is seen across, and where work drops by an eighth."""
    table = np.array(mask.slices, np.int64).reshape(-1, 7)
    first, last = np.minimum(table[:, 0], table[:, 2]), np.maximum(table[:, 1], table[:, 3])
    order = np.argsort(first, kind="stable")
    first, reached = first[order], np.maximum.accumulate(last[order])
    apart = np.append(True, first[1:] > reached[:-1])[: len(first)]
    ends = [first[apart], reached[np.append(apart[1:], True)[: len(first)]] + 1, [0, mask.n]]
    work, side = mask.counts(by_keys), table[:, 2:4] if by_keys else table[:, :2]
    inner = np.unique(np.append(side[:, 0], side[:, 1] + 1))
    inner = inner[(inner > 0) & (inner < mask.n)]
    low, high = work[inner - by_keys], work[inner - (not by_keys)]
    return np.unique(np.concatenate([*ends, inner[8 * low < 7 * high]])).astype(np.int64)


class _Line:
    """The segments that are left, by mean work, with the sums before each; ends are taken.

    sums: of the work before each token.
    """

    def __init__(self, sums: np.ndarray, rows: np.ndarray) -> None:
        self.sums = sums
        self._sort(rows)

    def _sort(self, rows: np.ndarray) -> None:
        rows = rows[rows[:, 1] > rows[:, 0]]
        tokens, work = rows[:, 1] - rows[:, 0], self.sums[rows[:, 1]] - self.sums[rows[:, 0]]
        order = np.argsort(work / tokens, kind="stable")
        self.rows, self.tokens, self.work = rows[order], tokens[order], work[order]
        self.tokens_before = np.append(0, np.cumsum(self.tokens))
        self.work_before = np.append(0, np.cumsum(self.work))

    def light(self, tokens: np.ndarray | int) -> np.ndarray:
        """Work of the lightest tokens."""
        at = np.searchsorted(self.tokens_before[1:-1], tokens, "right")
        start, inside = self.rows[at, 0], tokens - self.tokens_before[at]
        return self.work_before[at] + self.sums[start + inside] - self.sums[start]

    def _whole(self, which: np.ndarray) -> _Taken:
        taken = [(start, stop) for start, stop in self.rows[which].tolist()]
        self._sort(np.delete(self.rows, which, 0))
        return taken

    def take(self, need: int, share: float, limit: float) -> _Taken:
        """Fragments of `need` tokens and a share of the work, or a little more, to a limit."""
        if need == self.tokens_before[-1]:
            return self._whole(np.arange(len(self.rows)))
        enough = (1 - MISS) * share
        tokens = self.tokens_before[-1] - self.tokens_before[::-1]  # of the heaviest
        tokens = tokens[tokens <= need]
        heavy = (self.work_before[-1] - self.work_before[::-1])[: len(tokens)]
        total = heavy + self.light(need - tokens)
        fits = (total[1:] <= limit) & (total[:-1] < enough)
        many = int(np.argmin(np.append(fits, False)))
        need, work = need - int(tokens[many]), heavy[many]
        taken = self._whole(np.arange(len(self.rows) - many, len(self.rows)))
        for _ in range(8 if many else 0):  # tries to fill up with a whole segment
            now = work + self.light(need)
            apart = self.tokens_before[:-1] >= need - self.tokens  # what fills up is before it
            which = np.flatnonzero((self.tokens <= need) & apart)
            total = work + self.work[which] + self.light(need - self.tokens[which])
            which, total = (x[(total <= limit) & (total > now)] for x in (which, total))
            if now >= enough or not len(which):
                break
            at = which[np.argmin(np.abs(total - share))]
            need, work = need - int(self.tokens[at]), work + self.work[at]
            taken += self._whole(np.array([at]))
        if share - work - self.light(need) > (UNDER if many else MISS) * share:
            aim = share if many or len(self.rows) == 1 else limit
            end = self._end(need, aim - work, MISS * share)
            return [*taken, end, *self._light_ones(need - (end[1] - end[0]))]
        return taken + self._light_ones(need)

    def _end(self, need: int, aim: float, miss: float) -> tuple[int, int]:
        """The end of the heaviest segment with which `need` tokens have as much work as aimed."""
        start, stop = self.rows[-1].tolist()
        most = min(need, stop - start)

        def work(tokens: int) -> float:
            return self.sums[stop] - self.sums[stop - tokens] + self.light(need - tokens)

        tokens = bisect_left(range(most), aim, key=work)
        tokens = min(tokens, max(tokens - 1, 0), key=lambda n: abs(work(n) - aim))
        at = np.searchsorted(self.tokens_before[1:-1], need - tokens, "right")
        more = need - int(self.tokens_before[at])
        for way in (more, more - int(self.tokens[at])):  # without a cut at the light end
            if 0 <= way <= most and abs(work(way) - work(tokens)) <= miss:
                tokens = way
                break
        self.rows[-1, 1] -= tokens
        self._sort(self.rows)
        return stop - tokens, stop

    def _light_ones(self, need: int) -> _Taken:
        """The lightest tokens; the last segment whole, if one has just the tokens that lack."""
        at = int(np.searchsorted(self.tokens_before[1:-1], need, "right"))
        inside = need - int(self.tokens_before[at])
        same = at + np.flatnonzero(self.tokens[at:] == inside)[:1]
        if len(same) or not inside:
            return self._whole(np.append(np.arange(at), same))
        start = int(self.rows[at, 0])
        self.rows[at, 0] += inside
        return [*self._whole(np.arange(at)), (start, start + inside)]


def _dealt(work: np.ndarray, edges: np.ndarray, sizes: Sequence[int], slack: float) -> list[_Taken]:
    """What chunks of given sizes take of the segments between edges."""
    sums = np.append(0, np.cumsum(work))
    line, left = _Line(sums, np.stack([edges[:-1], edges[1:]], 1)), sum(size > 0 for size in sizes)
    limit = (1 + slack) * sums[-1] / max(1, left)
    taken: list[_Taken] = [[] for _ in sizes]
    for chunk in reversed(range(len(sizes))):  # DTensor's short chunk, the last, has first choice
        if sizes[chunk]:
            share = line.work_before[-1] / left
            taken[chunk] = line.take(sizes[chunk], share, max(limit, (1 + MISS) * share))
            left -= 1
    _level(taken, sums, LEVEL * slack)
    return taken


def _level(taken: list[_Taken], sums: np.ndarray, over: float) -> None:
    """Swap ends of heavy fragments for starts of light ones where chunks are out of balance."""
    work = np.array([sum(int(sums[b] - sums[a]) for a, b in chunk) for chunk in taken])
    share = sums[-1] / max(1, sum(map(bool, taken)))
    ranked = [chunk for chunk in np.argsort(work) if taken[chunk]]
    low = 0
    for high in reversed(ranked):
        while work[high] > (1 + over) * share and ranked[low] != high:
            to = ranked[low]
            first, end = max(taken[high], key=lambda run: sums[run[1]] - sums[run[1] - 1])
            start, last = min(taken[to], key=lambda run: sums[run[0] + 1] - sums[run[0]])

            def moved(n: int, end: int = end, start: int = start) -> float:
                return sums[end] - sums[end - n] - sums[start + n] + sums[start]

            longest = range(min(end - first, last - start))
            most = bisect_left(longest, True, key=lambda n: moved(n + 1) <= moved(n))
            excess = min(work[high] - share, max(share - work[to], MISS * share))
            n = bisect_left(range(most), excess, key=moved)
            if moved(n) <= 0:  # it has no lighter tokens: the next one may
                low += 1
                continue
            taken[high].remove((first, end))
            taken[to].remove((start, last))
            taken[high] += [(start, start + n), (first, end - n)]
            taken[to] += [(end - n, end), (start + n, last)]
            for chunk in (high, to):
                taken[chunk] = [run for run in taken[chunk] if run[0] < run[1]]
            work[high] -= moved(n)
            work[to] += moved(n)
            low += work[to] >= (1 - MISS) * share


def _in_memory(taken: _Taken, ends: Mapping[int, int]) -> _Taken:
    """Place whole segments first, so that each peer needs one contiguous range of rows."""
    joined: _Taken = []
    for start, stop in sorted(taken):
        if joined and joined[-1][1] == start and start not in ends:
            start = joined.pop()[0]
        joined.append((start, stop))
    return sorted(joined, key=lambda run: ends.get(run[0]) != run[1])


def _cut(rest: _Taken, tokens: int) -> _Taken:
    """Runs (start, tokens) of the first tokens of what is left, which are taken from it."""
    runs: _Taken = []
    while tokens:
        start, stop = rest.pop(0)
        if stop - start > tokens:
            rest.insert(0, (start + tokens, stop))
            stop = start + tokens
        tokens -= stop - start
        if runs and sum(runs[-1]) == start:
            start -= runs.pop()[1]
        runs.append((start, stop - start))
    return runs
