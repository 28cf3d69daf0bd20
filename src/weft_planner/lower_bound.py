"""A closed-form lower bound on a candidate's time on the fluid clock.

    pass  >=  host  +  all-to-alls before  +  max(blocks, links, relays)  +  all-to-alls after

Nothing hides all-to-alls, and every rank has its share of the work and of the messages. Bytes are
those that the algebra gives: of n chunks a rank receives n - 1; where dims of one role are stacked,
an inner one turns once for every step of the outer. A chunk that goes round a ring waits for the
latency of every step. Of masks other than full only what surely travels counts, so that there the
bound is looser, never wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.declare.hardware import Device, Hardware
from weft.kernels import accumulate_dtype
from weft.layout import Layout
from weft.masks import Full
from weft.plan.heads import share_heads
from weft.plan.predict import forecast_of, plan_for
from weft.plan.problem import Problem

from .candidates import Candidate, Dim
from .flow import is_causal

#: Shares of the full traffic that a causal mask leaves for certain, by the order of tokens.
_CAUSAL = {"zigzag": 0.7, "striped": 0.95}
#: A node that is replayed for all may have this much less work than the mean, and the clock rounds.
_ALL_RANKS, _ONE_NODE = 0.9999, 0.97
#: Work of any replay, and ranks that are replayed one by one although one node would do.
_REPLAY, _FEW = 1250.0, 8
#: How much more than the mean one rank may see. (One that sees more yet takes longer in any case.)
_UNEVEN = 1.05


@dataclass(frozen=True)
class LowerBound:
    """Seconds that a pass takes at least, and of what."""

    blocks: float  # computing, at the best rate that blocks of the tile can reach
    links: dict[tuple[str, str], float]  # of the program's messages, by level and kind of link
    around: dict[tuple[str, str], float]  # all-to-alls and sums, which nothing hides
    host: float  # of the CPU
    relays: float = 0.0  # latencies of the messages that carry a chunk one after another

    @property
    def total(self) -> float:
        """The pass."""
        within = max(self.blocks, longest(self.links), self.relays)
        return self.host + within + sum(self.around.values())


class Bounds:
    """Lower bounds of candidates for one call on some hardware."""

    def __init__(self, problem: Problem, hardware: Hardware, devices: int) -> None:
        self.problem, self.hardware, self.devices = problem, hardware, devices
        alone = forecast_of(plan_for(Layout.parse("tokens: local"), _over_tokens(problem), 0))
        self.entries = alone.forward.entries  # over batch and heads
        self._full = isinstance(problem.mask, Full)
        alike = self._full or devices <= hardware.widths[0]
        self._certain = _ALL_RANKS if alike else _ONE_NODE

    def guess(self, c: Candidate) -> float:
        """Estimated seconds of both passes, for the order in which candidates are replayed.

        Blocks reach the rate of one chunk by one chunk unless everything is gathered first, which
        nothing hides; else a tenth of the shorter of blocks and messages shows.
        """
        seconds = 0.0
        moving = {d.strategy for d in c.dims if d.role in ("query", "key")}
        side = (self.problem.n * self.problem.m) / c.ways("query", "key") ** 2
        for backward in (False, True):
            bound = self._pass(c, backward, self._likely(c))
            blocks, links = bound.blocks, max(longest(bound.links), self._relays(c, backward))
            within = max(bound.blocks, longest(bound.links), bound.relays)
            if moving and moving <= {"gather", "seen"}:
                seconds += bound.total - within + blocks + links
                continue
            device = self.hardware.device
            best = best_rate(device, self.tile(c, backward), backward)
            blocks *= best / device.rate(side, backward)
            seconds += bound.total - within + max(blocks, links) + 0.1 * min(blocks, links)
        return seconds * (1 + 0.002 * len(c.dims))  # of two that look equal, fewer mesh dims first

    def work(self, c: Candidate) -> float:
        """Cost of replaying a candidate: blocks and runs of tokens that ranks plan.

        An estimate from the question alone, some 40 microseconds of a core each: a budget in it
        ends a search where no clock of the machine does.
        """
        alike = self._full or is_causal(self.problem) or c.ways("query", "key") == 1
        widths = self.hardware.widths
        node = widths[-2] if len(widths) > 1 else self.devices
        ranks = min(node, self.devices) if alike and self.devices > _FEW else self.devices
        blocks, heads = c.ways("query", "key"), c.ways("head")
        runs = 2 * heads if c.order == "zigzag" else heads
        return _REPLAY + ranks * blocks * (8 + runs)

    def held(self, c: Candidate) -> float:
        """Bytes of other ranks' chunks that a rank holds at least in some pass.

        A ring holds two chunks; where both sides travel, or all come at once, everything is held.
        """
        p, item = self.problem, self.problem.dtype.itemsize
        queries, keys = self._rows()
        of_q = queries * p.head_dim * item
        of_kv = keys * kv_repeat(p, c) * (p.head_dim + p.value_dim) * item
        a, b = c.ways("key"), c.ways("query")
        both = min(a, b) > 1 or any(d.strategy == "gather" for d in c.dims)
        chunks = (a - 1, b - 1) if both else (min(a - 1, 2), min(b - 1, 2))
        return (chunks[0] * of_q + chunks[1] * of_kv) * self._share(c)

    def tile(self, c: Candidate, backward: bool) -> float:
        """Score entries per head of a rank's whole tile, no more than the mask lets it see."""
        p, chunks = self.problem, c.ways("query", "key")
        visible = _UNEVEN * self.entries / (p.batch * p.heads) / chunks
        if backward and any(d.strategy == "burst" for d in c.dims):
            return min(visible, p.n * p.m / chunks)
        return min(visible, (p.n / chunks * c.ways("key")) * (p.m / chunks * c.ways("query")))

    def of(self, candidate: Candidate) -> tuple[LowerBound, LowerBound]:
        """Bounds of the forward and of the backward pass."""
        share = self._share(candidate) * self._certain
        return self._pass(candidate, False, share), self._pass(candidate, True, share)

    def _pass(self, c: Candidate, backward: bool, share: float) -> LowerBound:
        """Bounds of a pass in which a share of the full traffic travels."""
        host = self.hardware.device.host.per_pass
        links = link_seconds(self.hardware, self._program(c, backward), self.devices)
        return LowerBound(
            self._blocks(c, backward) * self._certain,
            {k: s * share for k, s in links.items()},
            self._around(c, backward),
            host,
            self._relays(c, backward, certain=True) * self._certain,
        )

    def _blocks(self, c: Candidate, backward: bool) -> float:
        p = self.problem
        work = 2 * self.entries * (p.head_dim + p.value_dim) * (2.5 if backward else 1.0)
        rate = best_rate(self.hardware.device, self.tile(c, backward), backward)
        return work / self.devices / rate

    def _rows(self) -> tuple[float, float]:
        """Queries by heads, and keys by key/value heads, of one rank."""
        p = self.problem
        return p.batch * p.heads * p.n / self.devices, p.batch * p.kv_heads * p.m / self.devices

    def _program(self, c: Candidate, backward: bool) -> dict[int, float]:
        """Bytes that a rank sends per level."""
        p, item = self.problem, self.problem.dtype.itemsize
        accum = accumulate_dtype(p.dtype).itemsize
        d, e = p.head_dim * item, p.value_dim * item
        queries, keys = self._rows()
        keys *= kv_repeat(p, c)
        of_q = queries * (2 * accum + 2 * d + e if backward else d + e + accum)
        of_kv = keys * (d + e) * (2 if backward else 1)
        q_dims = [x for x in c.dims if _moves_queries(x, backward)]
        kv_dims = [x for x in c.dims if x.role == "query" and not _moves_queries(x, backward)]
        sent: defaultdict[int, float] = defaultdict(float)
        for dims, nbytes in ((q_dims, of_q), (kv_dims, of_kv)):
            outer = 1
            for dim in dims:
                sent[dim.level] += (dim.ways - 1) * outer * nbytes
                outer *= dim.ways
        return sent

    def _relays(self, c: Candidate, backward: bool, certain: bool = False) -> float:
        """Latencies of a chunk's way round the rings, the longer of queries' and of keys' ways.

        certain: only where every rank needs all of every chunk, so that neighbours pass them on;
            else chunks may come from their owners, side by side.
        """
        if certain and not self._full:
            return 0.0
        ways = {"q": 0.0, "kv": 0.0}
        for dim in c.dims:
            if dim.role not in ("query", "key") or (certain and dim.strategy == "pass_q"):
                continue
            steps = 1 if dim.strategy in ("gather", "seen") else dim.ways - 1
            side = "q" if _moves_queries(dim, backward) else "kv"
            ways[side] += steps * self.hardware.level[dim.level].latency
        return max(ways.values())

    def _share(self, c: Candidate) -> float:
        """Share of the full traffic that the mask leaves for certain."""
        if self._full:
            return 1.0
        return _CAUSAL.get(c.order, 0.0) if is_causal(self.problem) else 0.0

    def _likely(self, c: Candidate) -> float:
        """Upper bound on the share of traffic that survives the mask."""
        if self._full or is_causal(self.problem):
            return self._share(c)
        p = self.problem
        visible = self.entries / (p.batch * p.heads * p.n * p.m)
        return min(1.0, 2 * visible + 2 / c.ways("query", "key"))

    def _around(self, c: Candidate, backward: bool) -> dict[tuple[str, str], float]:
        p, item = self.problem, self.problem.dtype.itemsize
        queries, keys = self._rows()
        d, e = p.head_dim * item, p.value_dim * item
        qkv = queries * d + keys * kv_repeat(p, c) * (d + e)
        seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        for dim in c.dims:
            level = self.hardware.level[dim.level]
            if dim.role in ("head", "axial"):
                for nbytes in (qkv, queries * e):
                    sent = {dim.level: nbytes * (dim.ways - 1) / dim.ways * self._certain}
                    moved = link_seconds(self.hardware, sent, self.devices)
                    seconds[max(moved, key=lambda link: moved[link])] += longest(moved)
                    seconds[level.name, "latency"] += level.latency
            if dim.role == "tensor":
                for link, lasting in self.tensor_sum(c, dim).items():
                    seconds[link] += lasting
        return seconds

    def tensor_sum(self, c: Candidate, dim: Dim) -> dict[tuple[str, str], float]:
        """The sum of a projection's outputs (backward: of its inputs' gradients) over one mesh dim.

        A tensor-parallel module has one of each per block: a ring's reduce-scatter and all-gather
        of all of a rank's tokens by all heads' numbers.
        """
        p = self.problem
        queries, _ = self._rows()
        nbytes = queries * c.ways("tensor") * p.value_dim * p.dtype.itemsize
        level = self.hardware.level[dim.level]
        sent = {dim.level: 2 * nbytes * (dim.ways - 1) / dim.ways}
        moved = link_seconds(self.hardware, sent, self.devices)
        slowest = max(moved, key=lambda link: moved[link])
        latency = 2 * (dim.ways - 1) * level.latency
        return {slowest: longest(moved), (level.name, "latency"): latency}


def _moves_queries(dim: Dim, backward: bool) -> bool:
    return dim.role == "key" or (backward and dim.strategy == "burst")


def kv_repeat(problem: Problem, c: Candidate) -> float:
    """Mean copies of each key/value head that give whole heads to ranks that split heads."""
    heads, kv_heads = (n // c.ways("tensor") for n in (problem.heads, problem.kv_heads))
    return len(share_heads(heads, kv_heads, c.ways("head")).sent) / kv_heads


def best_rate(device: Device, entries: float, backward: bool) -> float:
    """The most operations per second that a block of at most this many score entries reaches."""
    rates = device.flops if device.backward is None or not backward else device.backward
    sides = sorted(rates) if isinstance(rates, dict) else []
    smaller = [float(side) ** 2 for side in sides if side * side <= entries]
    return max(device.rate(size, backward) for size in (*smaller, entries))


def _over_tokens(problem: Problem) -> Problem:
    """The same call over one axis, as one rank computes it."""
    return replace(problem, axes=("tokens",), lengths=((problem.n, problem.m),))


def link_seconds(
    hardware: Hardware, nbytes: Mapping[int, float], ranks: int
) -> dict[tuple[str, str], float]:
    """Seconds that every link is busy where each of some ranks sends so many bytes per level.

    A card carries what the ranks that share it send, an uplink what a whole group of the level
    below sends, all side by side: the largest is a lower bound of the time.

    >>> two = Hardware.from_dict({"device": {"flops": 1e12}, "level": [
    ...     {"name": "node", "ranks": 4, "rate": 8e9},
    ...     {"name": "cluster", "through": True, "uplink": 2e9}]})
    >>> link_seconds(two, {1: 4e9}, 16)
    {('cluster', 'uplink'): 8.0, ('node', 'card'): 0.5}
    """
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for number, sent in nbytes.items():
        for i in range(number, -1, -1):
            level = hardware.level[i]
            if level.uplink:
                below = min(hardware.widths[i - 1] if i else 1, ranks)
                seconds[level.name, "uplink"] += below * sent / level.uplink
            if level.rate is not None:
                seconds[level.name, "card"] += min(level.card_ranks, ranks) * sent / level.rate
            if not level.through:
                break
    return dict(seconds)


def longest(seconds: Mapping[tuple[str, str], float]) -> float:
    """Seconds of the link that is busy longest."""
    return max(seconds.values(), default=0.0)
