"""Searches layouts for a full model: strategy and degree of every axis at every level.

Candidates are guessed at in closed form, block by block; a training step of the promising ones is
then counted with the model's own code, and attention put on the clock. So what is shown is what the
model does; what was not counted is only guessed to be slower.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weft.declare.hardware import Hardware
from weft.declare.layout_file import HEADS
from weft.declare.rates import rates_of
from weft.errors import UnsupportedError, WeftError
from weft.layout import Layout
from weft.masks import FULL, Causal
from weft.plan.problem import Problem
from weft_axes.nn.named import build_mask
from weft_models.declare.model_blocks import AttendBlock
from weft_models.declare.model_file import ModelSpec
from weft_models.models import check_fit

from .candidates import Candidate, Dim, Refused, factorisations, level_sizes
from .lower_bound import Bounds
from .step_count import StepCount, busiest, count_steps
from .step_time import StepTime, step_time
from .work import masks_of_call

#: Roles of an axis that is split: strategies of its own attention.
STRATEGIES = {"query": "ring", "key": "pass_q", "head": "ulysses", "axial": "axial"}
#: Uses of one level of the hardware at most, and candidates that are counted.
_USES, COUNTED = 2, 12


@dataclass(frozen=True)
class Use:
    """The role of the ranks of one level of the hardware.

    They split `axis` (an attended axis, the first of several attended jointly; the batch; or heads)
    into `ways`, in a role of STRATEGIES, or as "batch" or "tensor".
    """

    axis: str
    role: str
    level: int
    ways: int


@dataclass(frozen=True)
class ModelChoice:
    """A layout of a model, counted: a step of its busiest rank, and its time."""

    layout: Layout
    count: StepCount
    time: StepTime

    @property
    def memory(self) -> int:
        """Bytes of a rank."""
        return sum(self.count.memory.values())


@dataclass
class ModelSearch:
    """A search for a model's layout on `devices` ranks of some hardware."""

    spec: ModelSpec
    batch: int  # of all ranks together
    lengths: Mapping[str, int]  # global, of every axis
    hardware: Hardware
    devices: int
    dtype: torch.dtype = torch.bfloat16
    gradients: str = "sync"  # summed by "sync", "ddp" or "fsdp"
    memory: float | None = None  # bytes of a rank, default the device's
    refused: Refused = field(default_factory=Refused)

    def __post_init__(self) -> None:
        self.sizes = {self.spec.axes[0]: self.batch, **self.lengths}
        if self.spec.head == "table":  # the class column is one more feature
            self.sizes[self.spec.axes[2]] += 1
        self.limit = self.hardware.device.memory if self.memory is None else self.memory
        kinds = {block.attend: block for block in self.spec.attends}
        self.kinds = {a: b for a, b in kinds.items() if all(x in self.spec.axes for x in a)}
        names = [axis for attend in self.kinds for axis in attend]
        if len(set(names)) < len(names):
            raise UnsupportedError(
                f"model {self.spec.name!r} attends {', '.join(map('+'.join, self.kinds))}: an axis"
                " in several of them is not planned for; write its layouts, and compare them with"
                " weft explain model"
            )
        self._bounds = {
            a: Bounds(self._problem(b), self.hardware, self.devices) for a, b in self.kinds.items()
        }

    def run(
        self, counted: int = COUNTED, tell: Callable[[str], None] = lambda text: None
    ) -> list[ModelChoice]:
        """The layouts of the `counted` most promising candidates, the fastest first.

        `tell` is given the number of the candidate that is counted, and of how many.
        """
        guesses = sorted(
            ((self._guess(uses), self._layout(uses)) for uses in self._candidates()),
            key=lambda one: one[0],
        )[:counted]
        result = []
        for number, (_, layout) in enumerate(guesses, 1):
            tell(f"{number} of {len(guesses)}")
            choice = self._choice(layout)
            if choice is not None:
                result.append(choice)
        if not result:
            why = "; ".join(f"{n}: {reason}" for reason, n in self.refused.items())
            raise UnsupportedError(
                f"no layout of {self.devices:,} devices fits model {self.spec.name!r}: "
                f"{why or 'no axis is long enough'}"
            )
        return sorted(result, key=lambda choice: choice.time.total)

    def _choice(self, layout: Layout) -> ModelChoice | None:
        try:
            check_fit(self.spec, layout)
            ranks = sorted({0, self.devices - 1})
            sizes = (self.batch, self.lengths, self.dtype, self.gradients, ranks)
            count = busiest(count_steps(layout, self.spec, *sizes))
            time = step_time(count, layout, self.hardware)
        except WeftError as error:
            self.refused.add(str(error))
            return None
        choice = ModelChoice(layout, count, time)
        if self.limit is not None and choice.memory > self.limit:
            self.refused.add(f"more memory than {self.limit:.3g} bytes")
            return None
        return choice

    # -- candidates ----------------------------------------------------------------------------

    def _uses(self) -> list[tuple[str, str]]:
        """All (axis, role)."""
        uses = [(self.spec.axes[0], "batch")] if self.batch > 1 else []
        roles = [role for role in STRATEGIES if role != "axial" or len(self.kinds) > 1]
        uses += [(attend[0], role) for attend in self.kinds for role in roles]
        return [*uses, (HEADS, "tensor")]

    def _candidates(self) -> Iterator[tuple[Use, ...]]:
        """Every way to use the levels, outermost first, that lengths and heads allow."""
        per_level = [
            list(self._level(level, size))
            for level, size in enumerate(level_sizes(self.hardware, self.devices))
        ]
        for levels in itertools.product(*reversed(per_level)):
            uses = tuple(use for level in levels for use in level)
            why = self._unfit(uses)
            if why:
                self.refused.add(why)
            else:
                yield uses

    def _level(self, level: int, size: int) -> Iterator[tuple[Use, ...]]:
        if size == 1:
            yield ()
            return
        for number in range(1, _USES + 1):
            for named in itertools.combinations(self._uses(), number):
                for ways in factorisations(size, number):
                    if min(ways) > 1:
                        yield tuple(
                            Use(axis, role, level, n) for (axis, role), n in zip(named, ways)
                        )

    def _unfit(self, uses: Sequence[Use]) -> str:
        """Why the model cannot be split so, "" if it can."""
        ways: dict[str, int] = {}
        for use in uses:
            ways[use.axis] = ways.get(use.axis, 1) * use.ways
        for axis, n in ways.items():
            if axis == HEADS:
                continue
            if n > self.sizes[axis]:
                return f"{self.sizes[axis]:,} {axis} are fewer than the ranks that would split them"
        for use in uses:
            if use.role == "axial":  # trades places with sequences of the other axes
                rest = [axis for axis in self.spec.axes[:-1] if axis != use.axis]
                traded = math.prod(u.ways for u in uses if (u.axis, u.role) == (use.axis, "axial"))
                local = math.prod(-(-self.sizes[axis] // ways.get(axis, 1)) for axis in rest)
                if local % traded:
                    return f"sequences of {use.axis} do not divide over the ranks of axial"
        tensor = ways.get(HEADS, 1)
        for attend, block in self.kinds.items():
            heads, kv_heads = self._heads(block)
            head = math.prod(u.ways for u in uses if u.axis == attend[0] and u.role == "head")
            if kv_heads % tensor or heads % (tensor * head):
                return f"{heads} heads, {kv_heads} of keys and values, do not divide over the ranks"
        return ""

    def _heads(self, block: AttendBlock) -> tuple[int, int]:
        sizes = self.spec.sizes
        heads = block.heads or sizes.heads
        return heads, block.kv_heads or (None if block.heads else sizes.kv_heads) or heads

    def _problem(self, block: AttendBlock) -> Problem:
        heads, kv_heads = self._heads(block)
        attended = tuple(self.sizes[axis] for axis in block.attend)
        grid = math.prod(self.sizes[axis] for axis in self.spec.axes[:-1])
        width = self.spec.sizes.embed // self.spec.sizes.heads
        lengths = dict(zip(block.attend, attended))
        mask = build_mask(block.mask, masks_of_call(self.spec, self.sizes), lengths)
        return Problem.of(
            block.attend,
            lengths,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=width,
            batch=grid // math.prod(attended),
            dtype=self.dtype,
            mask=Causal() if isinstance(mask, Causal) and mask.window is None else FULL,
        )

    def _guess(self, uses: Sequence[Use]) -> float:
        """Seconds of a step, roughly: attention of every block, and matrix products."""
        seconds = 0.0
        for block in self.spec.attends:
            if block.attend not in self.kinds:
                continue
            dims = tuple(
                Dim(role, STRATEGIES.get(role, role), use.level, use.ways)
                for use in uses
                for role in (self._role(use, block),)
            )
            order = "zigzag" if isinstance(self._bounds[block.attend].problem.mask, Causal) else ""
            seconds += self._bounds[block.attend].guess(Candidate(dims, order or "contiguous"))
        return seconds

    def _role(self, use: Use, block: AttendBlock) -> str:
        """Role of a mesh dim for a block: another axis' ranks have sequences of their own."""
        if use.role == "tensor" or use.axis == block.attend[0]:
            return use.role
        return "batch"

    def _layout(self, uses: Sequence[Use]) -> Layout:
        mesh: dict[str, int] = {}
        shard: dict[str, list[str]] = {}
        attend: dict[str, list] = {"+".join(a): [] for a in self.kinds}
        text: dict[str, list[str]] = {}
        of_axis = {a[0]: "+".join(a) for a in self.kinds}
        for use in uses:
            strategy = {"batch": "dp", "tensor": "tp"}.get(use.role) or STRATEGIES[use.role]
            name = strategy
            if name in mesh:
                name = next(f"{name}{i}" for i in itertools.count(2) if f"{name}{i}" not in mesh)
            mesh[name] = use.ways
            shard.setdefault(use.axis, []).append(name)
            text.setdefault(of_axis.get(use.axis, use.axis), []).append(f"{strategy}={use.ways}")
            if use.role in STRATEGIES:
                attend[of_axis[use.axis]].append({"strategy": strategy, "on": name})
        causal = {a[0] for a, b in self._bounds.items() if isinstance(b.problem.mask, Causal)}
        order = {
            use.axis: "zigzag"
            for use in uses
            if use.axis in causal and use.role in ("query", "key")
        }
        data = {"mesh": mesh, "shard": shard, "attend": attend, "rates": rates_of(self.hardware)}
        if order:
            data["order"] = order
        line = "; ".join(
            f"{axis}{'(zigzag)' if axis in order else ''}: {' x '.join(terms)}"
            for axis, terms in text.items()
        )
        return Layout.from_dict(data, line or "single", f"layout {line!r}")
