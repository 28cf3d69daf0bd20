"""Search for a way to train a transformers model: groups, layout, recomputation, sharding, loss.

Devices are groups that split a row each, over one layout, and FSDP2 shards weights over all of them
or over a node. A row of the answer has seconds by part and memory by part:

    seconds  =  attention (on the clock) + products + pointwise + FSDP's messages that show
    memory   =  state + gathered weights + activations (counted) + 4 GB for all else (assumed)
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from weft.declare.hardware import Hardware
from weft.errors import DeclarationError, UnsupportedError, WeftError, shown
from weft.layout import Layout
from weft.masks import FULL, Causal
from weft.plan.problem import Problem

from .candidates import ORDERS, Candidate, Refused, level_sizes
from .choices import BINDABLE, OPTIMIZERS, OTHER, RECOMPUTE
from .flow import replayed
from .hf_config import HFModel
from .hf_step import ModelCount, count_model, count_whole
from .lower_bound import best_rate, link_seconds, longest
from .search import SAME, Choice, Search

#: Bytes of a number in messages of FSDP2: weights twice, fp32 gradients once.
_GATHERED, _REDUCED = 2 + 2, 4
#: Work of the search for each group's layout, and rows of the answer that try full logits.
_WORK, _TRIED = 1.2e4, 2


@dataclass(frozen=True)
class Row:
    """One way to train, on the clock and counted."""

    layout: Layout  # of a group
    groups: int  # each with rows of its own
    recompute: str  # of `choices.RECOMPUTE`
    shards: int  # ranks that FSDP2 shards weights over; of fewer than all there are replicas
    loss: str  # "chunked" or "full" logits
    optimizer: str  # of `choices.OPTIMIZERS`
    tokens: int  # of a row
    #: of a step by part: attention, products, pointwise, and FSDP's messages that other parts do
    #: not hide
    seconds: Mapping[str, float]
    fsdp: float  # seconds of FSDP's messages in all
    memory: Mapping[str, float]  # bytes of a rank by part: state, gathered, activations, other
    host: float  # bytes of a rank that are offloaded to the host

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def nbytes(self) -> float:
        """Memory of a rank in all."""
        return sum(self.memory.values())

    @property
    def rate(self) -> float:
        """Tokens per second and device."""
        return self.tokens / self.layout.world_size / self.step


@dataclass(eq=False)
class Groups:
    """A search over groups, for one model, number of tokens and machine."""

    model: HFModel
    tokens: int
    hardware: Hardware
    devices: int
    losses: Sequence[str] = ("chunked", "full")
    optimizers: Sequence[str] = ("adamw-fp32", "adamw-bf16")
    recompute: Sequence[str] = RECOMPUTE
    only: Iterable[str] = ()
    memory: float | None = None
    layouts: Sequence[Layout] = ()
    refused: Refused = field(default_factory=Refused)

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in (*BINDABLE, "tile"):
                raise DeclarationError(
                    f"--only {shown(name)}: a transformers model is bound to"
                    f" {', '.join(BINDABLE)} and tile"
                )
        self.limit = self.memory or self.hardware.device.memory or math.inf
        self.masks = self._masks()
        self.problem = next(iter(self.masks.values()))
        self._counts: dict[tuple, ModelCount] = {}
        self.tried: list[Row] = []
        self._runs: dict[bool, dict[tuple[str, bool], int]] = {}
        self._clocked: dict[tuple[Layout, str], tuple[float, float]] = {}

    def _masks(self) -> dict[str, Problem]:
        """The attention calls of the model, the widest mask first, by what they are."""
        probe = Layout.parse("tokens: ring=2")  # a call on one rank has no plan
        few = self.model.every_kind
        length = max(2, self.tokens)
        counted = count_model(self.model, probe, length, recompute=False, loss="full", layers=few)
        calls: dict[str, Problem] = {}
        for plan, _ in counted.plans:  # of tokens alone, so batch and heads are those of all ranks
            sizes = {f.name: getattr(plan.problem, f.name) for f in fields(Problem)}
            sizes["device"] = self.hardware.device.kernels
            calls[str(plan.problem.mask)] = Problem(**sizes)
        if not calls:
            raise UnsupportedError(f"{self.model.name}: no layer attends, so no layout is needed")
        full = [key for key, p in calls.items() if p.mask in (FULL, Causal())]
        wide = full[0] if full else max(calls)
        return {wide: calls[wide], **{key: p for key, p in calls.items() if key != wide}}

    def _calls(self, recompute: bool) -> dict[tuple[str, bool], int]:
        """Runs of each attention call in a step: (mask, backward) -> times."""
        if recompute in self._runs:
            return self._runs[recompute]
        probe = Layout.parse("tokens: ring=2")
        length = max(2, self.tokens)  # chunks of a mask are as many as the row has
        counted = count_whole(self.model, probe, length, recompute=recompute, loss="full")
        calls: Counter[tuple[str, bool]] = Counter()
        for (plan, backward), times in counted.plans.items():
            calls[str(plan.problem.mask), backward] += times
        return self._runs.setdefault(recompute, dict(calls))

    @property
    def sizes(self) -> Iterator[int]:
        """Ranks of a group: the divisors of the devices that the hardware's levels take."""
        for size in range(1, self.devices + 1):
            if self.devices % size == 0:
                try:
                    level_sizes(self.hardware, size)
                except DeclarationError as error:
                    self.refused.add(str(error))
                    continue
                yield size

    def rows(self, tell: Callable[[str], None] = lambda text: None) -> list[Row]:
        """Every way that was tried, those that fit first, then the fastest first.

        bf16 states are tried where nothing fits with fp32 ones, since they change the training;
        full logits where chunked ones fit, for the fastest rows.
        """
        found: list[Row] = []
        for optimizer in self.optimizers:
            for layout, choice in self._layouts(tell):
                for recompute in self.recompute:
                    tell(f"{layout.name}, recompute {recompute}")
                    found += self._rows(layout, choice, recompute, self.losses[0], optimizer)
            if any(self.fits(row) for row in found):
                break
        best = sorted(filter(self.fits, found), key=self.order)[:_TRIED]
        for row in best:
            for loss in self.losses[1:]:
                tell(f"{row.layout.name}, {loss} logits")
                choice = self._choices[row.layout]
                rows = self._rows(row.layout, choice, row.recompute, loss, row.optimizer)
                found += [r for r in rows if r.shards == row.shards]
        self.tried = sorted(found, key=lambda row: (not self.fits(row), *self.order(row)))
        return self.tried

    def fits(self, row: Row) -> bool:
        """True if a rank has the memory for it."""
        return row.nbytes <= self.limit

    @staticmethod
    def order(row: Row) -> tuple[float, float, float]:
        """Fastest first; of equals, within 1 %, without offloading, then of less memory."""
        return math.floor(-math.log(row.rate) / SAME), row.host, row.nbytes

    @functools.cached_property
    def _choices(self) -> dict[Layout, Choice | None]:
        return {}

    def _layouts(self, tell: Callable[[str], None]) -> Iterator[tuple[Layout, Choice | None]]:
        if self._choices:
            yield from self._choices.items()
            return
        if self.layouts:
            self._choices.update(dict.fromkeys(self.layouts))
            yield from self._choices.items()
            return
        orders = [o for o in ORDERS if o != "striped"] if self.model.recurrent else ORDERS
        for size in self.sizes:
            tell(f"layouts of {size} ranks")
            if size == 1:
                self._choices[Layout.parse("tokens: local")] = None
                continue
            only = tuple(self.only) or BINDABLE
            search = Search(self.problem, self.hardware, size, only, self.limit, orders=orders)
            try:
                best = search.run(least=3, work=_WORK).best
            except WeftError as error:
                self.refused.add(str(error))
                continue
            self._choices[best.candidate.layout(self.problem.axes[0])] = best
            if len(self.masks) > 1 and "seen" in only:
                self._choices.update(self._of_seen_keys(best.candidate))
        yield from self._choices.items()

    def _of_seen_keys(self, found: Candidate) -> dict[Layout, Choice | None]:
        """The same layout with keys by halo in its rings, for layers of other masks."""
        dims = (d._replace(strategy="seen") if d.strategy == "ring" else d for d in found.dims)
        other = replace(found, dims=tuple(dims))
        return {} if other == found else {other.layout(self.problem.axes[0]): None}

    def _rows(
        self, layout: Layout, choice: Choice | None, recompute: str, loss: str, optimizer: str
    ) -> list[Row]:
        """Rows of a layout, one for every way to shard."""
        try:
            counted = self.count(layout, loss, recompute != "none")
            attention = self._attention(layout, choice, recompute != "none")
        except WeftError as error:
            self.refused.add(f"{layout.name}: {error}")
            return []
        device = self.hardware.device
        seconds = {
            "attention": attention,
            "products": sum(counted.flops) / best_rate(device, math.inf, False),
            "pointwise": sum(counted.moved) / (device.memory_rate or math.inf),
        }
        size = layout.world_size
        inputs = self._inputs(size)
        host = inputs if recompute == "offload" else 0.0
        rows = []
        for shards in self._shards(size):
            fsdp = self._fsdp(counted.numbers, shards)
            shown = max(0.0, fsdp - sum(seconds.values()))
            memory = self._memory(counted, recompute, shards, optimizer, inputs)
            rows.append(
                Row(
                    layout,
                    self.devices // size,
                    recompute,
                    shards,
                    loss,
                    optimizer,
                    self.tokens,
                    seconds | {"FSDP": shown},
                    fsdp,
                    memory,
                    host,
                )
            )
        return rows

    def count(self, layout: Layout, loss: str, recompute: bool, tokens: int = 0) -> ModelCount:
        """The step of a rank, counted once for equal arguments."""
        key = layout, loss, recompute, tokens or self.tokens
        if key not in self._counts:
            options = {"loss": loss, "recompute": recompute}
            self._counts[key] = count_whole(self.model, layout, tokens or self.tokens, **options)
        return self._counts[key]

    def _attention(self, layout: Layout, choice: Choice | None, recompute: bool) -> float:
        seconds = 0.0
        for (mask, backward), times in self._calls(recompute).items():
            if choice is not None and mask == str(self.problem.mask):
                passes = choice.forward, choice.backward
            else:
                passes = self._clock(layout, mask)
            seconds += times * passes[backward]
        return seconds

    def _clock(self, layout: Layout, mask: str) -> tuple[float, float]:
        key = layout, mask
        if key not in self._clocked:
            timing = replayed(layout, self.masks[mask], self.hardware, 8).timing
            self._clocked[key] = timing.forward, timing.backward
        return self._clocked[key]

    def _shards(self, size: int) -> list[int]:
        """All devices, those of a node, or one: FSDP2's meshes, whole or hybrid."""
        node = next((w for w in self.hardware.widths if w > 1), 1)
        return sorted({self.devices, min(node, self.devices), 1}, reverse=True)

    def _fsdp(self, numbers: int, shards: int) -> float:
        """Seconds of gathers of weights and sums of gradients, in rings over the widest level."""
        level = next(
            (i for i, w in enumerate(self.hardware.widths) if shards <= w),
            len(self.hardware.level) - 1,
        )
        sent = {level: (shards - 1) / shards * numbers * (_GATHERED + _REDUCED)}
        seconds = longest(link_seconds(self.hardware, sent, self.devices)) if shards > 1 else 0.0
        if shards < self.devices:  # gradients of shards are summed over replicas as well
            outer = {len(self.hardware.level) - 1: 2 * numbers * _REDUCED / shards}
            if self.devices <= self.hardware.widths[0]:
                outer = {0: 2 * numbers * _REDUCED / shards}
            seconds += longest(link_seconds(self.hardware, outer, self.devices))
        return seconds

    def _inputs(self, size: int, tokens: int = 0) -> float:
        """Bytes of the inputs of all layers, which recomputation keeps."""
        rows = (tokens or self.tokens) // size
        return 2.0 * self.model.layers * rows * self.model.config.hidden_size

    @staticmethod
    def _memory(
        counted: ModelCount, recompute: str, shards: int, optimizer: str, inputs: float
    ) -> dict[str, float]:
        weights, gradients, states = OPTIMIZERS[optimizer]
        early = counted.numbers * (weights + states) / shards
        late = early + counted.numbers * gradients / shards
        # With the last gradient no activation of a later layer is there any more.
        gone = {"none": counted.kept, "layers": inputs, "offload": 0.0}[recompute]
        copies = counted.outside + 2 * counted.of_layer if shards > 1 else counted.numbers
        return {
            "state": max(early, late - gone),
            "gathered": 0.0 if shards == 1 and weights == 2 else 2.0 * copies,
            "activations": counted.peak - (inputs if recompute == "offload" else 0.0),
            "other": OTHER,
        }

    def longest(self, row: Row) -> int | None:
        """Tokens of the longest row that fits as one of the answer does, in whole thousands.

        Activations are linear in tokens, so a second count at half the length tells the slope.
        """
        if math.isinf(self.limit):
            return None
        size, recompute = row.layout.world_size, row.recompute
        half = max(2 * size, self.tokens // 2 // (2 * size) * (2 * size))

        def memory(tokens: int) -> float:
            counted = self.count(row.layout, row.loss, recompute != "none", tokens)
            inputs = self._inputs(size, tokens)
            return sum(self._memory(counted, recompute, row.shards, row.optimizer, inputs).values())

        most, less = memory(self.tokens), memory(half)
        slope = (most - less) / (self.tokens - half) if self.tokens > half else 0.0
        if slope <= 0:
            return self.tokens
        return max(0, int((self.tokens + (self.limit - most) / slope) // 1000) * 1000)
