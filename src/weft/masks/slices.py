"""Any mask as slices: rectangles of queries by keys, each cut by a band along the diagonal.

A function of positions is asked about every pair, once and in pieces that never make n x n. What
rows see as runs of keys becomes slices: as many as the mask has parts, and not as it has rows.

    documents of 3 and 2, causal       window of 2 keys, one before its own
    q 0  x . . . .                     x . . . .     rows 0-4, keys 0-4,
      1  x x . . .   rows 0-2,         x x . . .     q - 1 <= k <= q:
      2  x x x . .   keys 0-2, k <= q  . x x . .     one slice
      3  . . . x .   rows 3-4,         . . x x .
      4  . . . x x   keys 3-4, k <= q  . . . x x

Rows that see more runs than can be kept are taken together in blocks: a block of which some pairs
are visible is then one whose mask is asked again where it is computed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .._caching import remembered
from .base import FAR, NOTHING, Interval, Intervals, Mask, common

#: Rows and columns of a block, in which noise is kept.
BLOCK = 128
#: Pairs that a function is asked about at once: on a CPU its temporary tensors stay in a cache.
_PIECE = {"cpu": 1 << 19}
_PIECE_ON_DEVICE = 1 << 24
#: Runs of keys that are kept of all rows; more are kept as blocks.
MOST_RUNS = 1 << 19
#: Pairs that one rank asks a function about; of more nothing is known.
MOST_ASKED = 1 << 37
#: More parts than these on either side of the mask are not told apart.
MOST_CUTS = 1 << 12
#: More intervals than these are given as fewer that hold them.
_MOST_INTERVALS = 1 << 12


@dataclass(frozen=True)
class Slices(Mask):
    """A mask of n queries and m keys as far as it is known; it answers about intervals alone.

    >>> from weft.masks import Causal
    >>> causal = sliced(Causal(), 4, 4)
    >>> causal.slices
    ((0, 3, 0, 3, -1152921504606846976, 0, 1),)
    >>> causal.key_intervals((1, 2)), causal.diagonal((0, 3), (0, 3))
    (((0, 2),), 0)
    """

    n: int
    m: int
    #: int64 rows (q0, q1, k0, k1, low, high, full) as bytes, sorted: queries q0 to q1 see of the
    #: keys k0 to k1 those from q + low to q + high; all of them if `full`, else some. A table for
    #: all sequences, or one for each.
    tables: tuple[bytes, ...] = field(repr=False)

    @property
    def per_sample(self) -> bool:  # type: ignore[override]
        return len(self.tables) > 1

    def of_sequences(self, numbers: tuple[int, ...]) -> Mask:
        if len(self.tables) == 1 or not numbers or max(numbers) >= len(self.tables):
            return self
        return Slices(self.n, self.m, tuple(dict.fromkeys(self.tables[b] for b in numbers)))

    @functools.cached_property
    def _parts(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Every table as an array, with the last row that it or a slice before it reaches."""
        tables = [np.frombuffer(table, np.int64).reshape(-1, 7) for table in self.tables]
        return [(table, np.maximum.accumulate(table[:, 1])) for table in tables]

    @property
    def slices(self) -> tuple[tuple[int, ...], ...]:
        """The slices of all tables."""
        return tuple(tuple(row) for table, _ in self._parts for row in table.tolist())

    def _of_rows(self, q: Interval) -> Iterator[np.ndarray]:
        """The slices of some queries in each table, cut to these."""
        for table, reached in self._parts:
            first = np.searchsorted(reached, q[0])
            found = table[first : np.searchsorted(table[:, 0], q[1], "right")]
            found = found[found[:, 1] >= q[0]].copy()
            np.clip(found[:, :2], *q, out=found[:, :2])
            yield found

    @remembered  # as long as the mask is: others come with every step
    def key_intervals(self, q: Interval) -> Intervals:
        return _intervals(self, q, True)

    @remembered
    def query_intervals(self, k: Interval) -> Intervals:
        return _intervals(self, k, False)

    def keys(self, q: Interval) -> Interval:
        return _ends(self.key_intervals(q))

    def queries(self, k: Interval) -> Interval:
        return _ends(self.query_intervals(k))

    def is_full(self, q: Interval, k: Interval) -> bool:
        for found in self._of_rows(q):
            q0, q1, k0, k1, low, high, full = found.T
            held = (full > 0) & (np.maximum(k0, q1 + low) <= k[0])
            held &= np.minimum(k1, q0 + high) >= k[1]
            if (q1 - q0 + 1)[held].sum() < q[1] - q[0] + 1:
                return False
        return True

    def diagonal(self, q: Interval, k: Interval) -> int | None:
        band = self.band(q, k)
        return band[1] if band is not None and band[0] == -FAR else None

    def band(self, q: Interval, k: Interval) -> Interval | None:
        bands = {_band(found, q, k) for found in self._of_rows(q)}
        return bands.pop() if len(bands) == 1 else None

    def cuts(self, length: int) -> tuple[int, ...]:
        found = [table[:, :4] + [0, 1, 0, 1] for table, _ in self._parts]
        edges = np.unique(np.concatenate([np.empty((0, 4), np.int64), *found]))
        edges = edges[(edges > 0) & (edges < max(self.n, self.m))]
        return tuple(edges.tolist()) if len(edges) <= MOST_CUTS else ()

    def counts(self, of_keys: bool = False) -> np.ndarray:
        """Numbers of keys that queries see, or of queries that see keys; the mean of sequences."""
        kept: dict[bool, np.ndarray] = self.__dict__.setdefault("_counts", {})
        if of_keys in kept:
            return kept[of_keys]
        total = kept[of_keys] = np.zeros(self.m if of_keys else self.n, np.int64)
        for table, _ in self._parts:
            for q0, q1, k0, k1, low, high, _ in table.tolist():
                if of_keys:
                    q0, q1, k0, k1, low, high = k0, k1, q0, q1, -high, -low
                rows = np.arange(q0, q1 + 1)
                seen = np.minimum(k1, rows + high) - np.maximum(k0, rows + low) + 1
                total[q0 : q1 + 1] += np.maximum(seen, 0, out=seen)
        if len(self._parts) > 1:
            total //= len(self._parts)
        return total


def _intervals(mask: Slices, positions: Interval, of_keys: bool) -> Intervals:
    """The positions that an interval sees, or that see one of it, as exact intervals."""
    lows, highs = [], []
    low, high = positions
    for table, _ in mask._parts:
        if of_keys:
            continue
        q0, q1, k0, k1, below, above, _ = table[(table[:, 2] <= high) & (table[:, 3] >= low)].T
        lows.append(np.maximum(q0, low - above))
        highs.append(np.minimum(q1, high - below))
    for found in mask._of_rows(positions) if of_keys else ():
        q0, q1, k0, k1, below, above, _ = found.T
        lows.append(np.maximum(k0, q0 + below))
        highs.append(np.minimum(k1, q1 + above))
    none = np.empty(0, np.int64)  # no sequence, as a rank may hold none
    first, last = np.concatenate([none, *lows]), np.concatenate([none, *highs])
    order = np.argsort(first[first <= last], kind="stable")
    first, last = first[first <= last][order], last[first <= last][order]
    if not len(first):
        return ()
    reached = np.maximum.accumulate(last)
    begins = np.flatnonzero(np.append(True, first[1:] > reached[:-1] + 1))
    if len(begins) > _MOST_INTERVALS:
        begins = begins[:: -(-len(begins) // _MOST_INTERVALS)]
    ends = np.append(begins[1:], len(first)) - 1
    return tuple(zip(first[begins].tolist(), reached[ends].tolist()))


def _ends(intervals: Intervals) -> Interval:
    return (intervals[0][0], intervals[-1][1]) if intervals else NOTHING


def _band(found: np.ndarray, q: Interval, k: Interval) -> Interval | None:
    """The band that slices of some rows make together of some keys, if they make one."""
    q0, q1, k0, k1, low, high, full = found.T
    first, last = np.maximum(q0, k[0] - high), np.minimum(q1, k[1] - low)
    touch = (k0 <= k[1]) & (k1 >= k[0]) & (first <= last)
    if not touch.any() or not full[touch].all():
        return None
    k0, k1, low, high, first, last = (x[touch] for x in (k0, k1, low, high, first, last))
    if (first[1:] != last[:-1] + 1).any():
        return None
    lows, highs = low[np.maximum(k0, last + low) > k[0]], high[np.minimum(k1, first + high) < k[1]]
    begins = [int(lows[0])] if len(lows) else [-FAR, int(low.max())]  # hides none, or as its slice
    ends = [int(highs[0])] if len(highs) else [FAR, int(high.min())]
    for band in itertools.product(begins, ends):
        if first[0] > q[0] and first[0] - 1 + band[1] >= k[0]:
            continue  # rows before those of the slices would see keys, or rows after them
        if last[-1] < q[1] and last[-1] + 1 + band[0] <= k[1]:
            continue
        if all(_agree(rows, k0, k1, low, high, band, k) for rows in (first, last)):
            return band
    return None


def _agree(
    rows: np.ndarray,
    k0: np.ndarray,
    k1: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    band: Interval,
    k: Interval,
) -> bool:
    """True if some rows, one of each slice, see of an interval of keys what a band shows them."""
    begin, end = np.maximum(k0, rows + low), np.minimum(k1, rows + high)
    same = np.maximum(begin, k[0]) == np.maximum(rows + band[0], k[0])
    return bool((same & (np.minimum(end, k[1]) == np.minimum(rows + band[1], k[1]))).all())


# -- asking ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A mask and the pairs that it is asked about: n queries by m keys, of sequences and heads.

    batch, heads: of the whole; 1 where the mask does not depend on them.
    """

    mask: Mask
    n: int
    m: int
    batch: int
    heads: int

    @property
    def pairs(self) -> int:
        """The number of pairs."""
        return self.n * self.m * self.batch * self.heads

    def share(self, part: int, of: int, device: torch.device) -> list[np.ndarray]:
        """The tables of one of some shares of the queries, for each sequence."""
        blocks = -(-self.n // BLOCK)
        first, last = (min(self.n, blocks * i // of * BLOCK) for i in (part, part + 1))
        return [self._table(b, range(first, last, BLOCK), last, device) for b in range(self.batch)]

    def slices(self, shares: Iterable[list[np.ndarray]]) -> Slices:
        """The slices of all shares, in order."""
        tables = (_ordered(_joined(np.concatenate(parts))) for parts in zip(*shares))
        return Slices(self.n, self.m, tuple(table.tobytes() for table in tables))

    def _table(self, b: int, blocks: range, end: int, device: torch.device) -> np.ndarray:
        """The slices of some blocks of rows of a sequence."""
        most = max(MOST_RUNS * BLOCK // max(self.n, 1), 16 * BLOCK)
        exact, coarse = [], []
        for start in blocks:
            rows = range(start, min(start + BLOCK, end))
            runs = self._runs(b, rows, most, device)
            if runs is None:
                coarse.append(self._blocks(b, rows, device))
            else:
                exact.append(runs)
        return np.concatenate([_compressed(_stacked(exact, 4)), _upright(_stacked(coarse, 7))])

    def _pieces(self, b: int, rows: range, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """First keys, and of every pair whether no head (0), some (1) or all (2) see it."""
        q, h = (
            torch.arange(rows.start, rows.stop, device=device),
            torch.arange(self.heads, device=device),
        )
        q, h, sequence = q[:, None], h[:, None, None], torch.full((1, 1, 1, 1), b, device=device)
        size = _PIECE.get(device.type, _PIECE_ON_DEVICE)
        step = max(1, size // (len(rows) * self.heads))
        for low in range(0, self.m, step):
            k = torch.arange(low, min(low + step, self.m), device=device)
            seen = self.mask.allowed(sequence, h, q, k)
            seen = seen.expand(1, self.heads, len(q), len(k))[0]
            yield low, seen[0] if self.heads == 1 else seen.any(0).byte() + seen.all(0).byte()

    def _runs(self, b: int, rows: range, most: int, device: torch.device) -> np.ndarray | None:
        """Runs of keys (row, first, last, full); None if there are more than `most`."""
        found: list[np.ndarray] = []
        for low, state in self._pieces(b, rows, device):
            width = state.shape[1]
            flat = state.reshape(-1)
            changed = flat.new_ones(flat.shape, dtype=torch.bool)
            torch.ne(flat[1:], flat[:-1], out=changed[1:])
            changed[::width] = True
            on_host = device.type == "cpu"  # where NumPy finds them in a fifth of the time
            begin = np.flatnonzero(changed) if on_host else changed.nonzero().view(-1).cpu().numpy()
            values = flat[torch.from_numpy(begin).to(device)].cpu().numpy()
            end = np.append(begin[1:], flat.numel()) - 1
            row, keys = np.divmod(begin, width)
            full = values if values.dtype == bool else values == 2
            runs = np.stack([row + rows.start, keys + low, end - row * width + low, full], 1)
            found.append(runs[values != 0])
            most -= len(found[-1]) - len(rows)  # of each row one may go on from the piece before
            if most < 0:
                return None
        runs = _ordered(_stacked(found, 4), 1)
        goes_on = (runs[1:, [0, 3]] == runs[:-1, [0, 3]]).all(1) & (runs[1:, 1] == runs[:-1, 2] + 1)
        ends = np.flatnonzero(np.append(~goes_on, True))[: len(runs)]
        whole = runs[np.flatnonzero(np.append(True, ~goes_on))[: len(runs)]]
        whole[:, 2] = runs[ends, 2]
        return whole

    def _blocks(self, b: int, rows: range, device: torch.device) -> np.ndarray:
        """Slices of a row of blocks: of whole blocks of keys, full or visible in part."""
        width = -(-self.m // BLOCK) * BLOCK
        some = torch.zeros(width, dtype=torch.bool, device=device)
        every = torch.ones(width, dtype=torch.bool, device=device)
        for low, state in self._pieces(b, rows, device):
            some[low : low + state.shape[1]] = (state != 0).any(0)
            seen = state if state.dtype == torch.bool else state == 2
            every[low : low + state.shape[1]] = seen.all(0)
        counted = some.view(-1, BLOCK).any(1).int() + every.view(-1, BLOCK).all(1).int()
        values = counted.cpu().numpy()
        starts = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
        ends = np.minimum(np.append(starts[1:], len(values)) * BLOCK, self.m) - 1
        slices = np.empty((len(starts), 7), np.int64)
        slices[:] = rows.start, rows.stop - 1, 0, 0, -FAR, FAR, 0
        slices[:, 2], slices[:, 3], slices[:, 6] = starts * BLOCK, ends, values[starts] == 2
        return slices[values[starts] > 0]


def question(mask: Mask, n: int, m: int, batch: int, heads: int, device: torch.device) -> Question:
    """A question about all sequences and heads, or about one where all see alike."""
    by_batch, by_head = (varies(mask, which, device) for which in (0, 1))
    return Question(mask, n, m, batch if by_batch else 1, heads if by_head else 1)


def varies(mask: Mask, which: int, device: torch.device) -> bool:
    """True unless a mask surely gives the same for all sequences (0), or for all heads (1)."""
    if not mask.per_sample:
        return False
    zero = torch.zeros((), dtype=torch.int64, device=device)
    indices = [zero.expand(2) if i == which else zero for i in range(4)]
    places = tuple(0 if i == which else None for i in range(4))
    try:  # torch refuses to call a result the same for all that is made of what differs
        torch.vmap(mask.allowed, in_dims=places, out_dims=None)(*indices)
    except Exception:
        return True
    return False


def knows_nothing(mask: Mask) -> bool:
    """True if a mask, or one that it is made of, answers no question about intervals."""
    inside = [part for part in vars(mask).values() if isinstance(part, Mask)]
    return any(map(knows_nothing, inside)) or (
        not inside and all(getattr(type(mask), name) is getattr(Mask, name) for name in _ANSWERS)
    )


_ANSWERS = ("keys", "queries", "key_intervals", "query_intervals", "is_full", "diagonal", "band")


def sliced(mask: Mask, n: int, m: int, batch: int = 1, heads: int = 1) -> Slices:
    """The slices of a mask, asked on this rank alone: each row where it answers, else every pair.

    >>> from weft.masks import Documents
    >>> [row[:4] for row in sliced(Documents((3, 2)), 5, 5).slices]
    [(0, 2, 0, 2), (3, 4, 3, 4)]
    """
    if not (mask.per_sample or knows_nothing(mask)):
        runs = [
            (q, low, high, 1)
            for q in range(n)
            for low, high in common(mask.key_intervals((q, q)), ((0, m - 1),))
        ]
        if all(mask.is_full((q, q), (low, high)) for q, low, high, _ in runs):
            table = np.array(runs, np.int64).reshape(-1, 4)
            return Slices(n, m, (_compressed(table).tobytes(),))
    whole = question(mask, n, m, batch, heads, torch.device("cpu"))
    return whole.slices([whole.share(0, 1, torch.device("cpu"))])


def _stacked(parts: list[np.ndarray], columns: int) -> np.ndarray:
    return np.concatenate([np.empty((0, columns), np.int64), *parts])


def _joined(table: np.ndarray) -> np.ndarray:
    """Slices of all shares: those that continue across shares as one."""
    whole = (table[:, 4] == -FAR) & (table[:, 5] == FAR) & (table[:, 1] - table[:, 0] >= BLOCK - 1)
    blocks, exact = table[whole], table[~whole]
    count = exact[:, 1] - exact[:, 0] + 1
    q0, _, k0, k1, low, high, full = np.repeat(exact, count, 0).T
    rows = q0 + np.arange(len(q0)) - np.repeat(np.cumsum(count) - count, count)
    runs = np.stack([rows, np.maximum(k0, rows + low), np.minimum(k1, rows + high), full], 1)
    return np.concatenate([_compressed(_ordered(runs, 1)), _upright(blocks)])


def _ordered(table: np.ndarray, then: int = 2) -> np.ndarray:
    """Rows in the order of their first column, equal ones by another."""
    return table[np.lexsort(table.T[[then, 0]])]


def _upright(table: np.ndarray) -> np.ndarray:
    """Rectangles of the same keys in adjacent rows as one."""
    table = table[np.lexsort(table.T[[0, 6, 3, 2]])]
    if len(table) < 2:
        return table
    same = (table[1:, [2, 3, 6]] == table[:-1, [2, 3, 6]]).all(1)
    begins = np.flatnonzero(np.append(True, ~(same & (table[1:, 0] == table[:-1, 1] + 1))))
    ends = np.append(begins[1:], len(table)) - 1
    joined = table[begins]
    joined[:, 1] = table[ends, 1]
    return joined


def _compressed(runs: np.ndarray) -> np.ndarray:
    """Runs of keys (row, first, last, full), sorted, as slices.

    From row to row the first key of a slice stays and then moves on by one, the last moves on and
    then stays: what a rectangle cut by a band does.
    """
    if not len(runs):
        return np.empty((0, 7), np.int64)
    rows, first, per_row = np.unique(runs[:, 0], return_index=True, return_counts=True)
    pair = (per_row[1:] == per_row[:-1]) & (rows[1:] == rows[:-1] + 1)  # of a row and the next
    of_run = np.repeat(np.append(pair, False), per_row)
    here = np.flatnonzero(of_run)
    step = runs[here + np.repeat(per_row, per_row)[here]] - runs[here]
    at = np.repeat(np.arange(len(rows)), per_row)[here]  # the pair of each step
    keeps = np.isin(step[:, 1], (0, 1)) & np.isin(step[:, 2], (0, 1)) & (step[:, 3] == 0)
    pair[at[~keeps]] = False
    now = np.arange(len(at))
    before = np.maximum(now - per_row[at], 0)
    follows = (at[before] == at - 1) & pair[at] & pair[at - 1]
    now, before = now[follows], before[follows]
    pair[at[before[(step[before, 1] == 1) & (step[now, 1] == 0)]]] = False
    pair[at[now[(step[before, 2] == 0) & (step[now, 2] == 1)]]] = False
    begin = np.flatnonzero(np.append(True, ~pair))
    end = np.append(begin[1:], len(rows)) - 1
    many = per_row[begin]
    inside = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
    heads, tails = (runs[np.repeat(first[x], many) + inside] for x in (begin, end))
    slices = np.empty((len(heads), 7), np.int64)
    slices[:, :4] = np.stack([heads[:, 0], tails[:, 0], heads[:, 1], tails[:, 2]], 1)
    slices[:, 4] = np.where(tails[:, 1] > heads[:, 1], tails[:, 1] - tails[:, 0], -FAR)
    slices[:, 5] = np.where(tails[:, 2] > heads[:, 2], heads[:, 2] - heads[:, 0], FAR)
    slices[:, 6] = heads[:, 3]
    return slices
