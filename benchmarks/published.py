"""Published rows against their prediction by the clock.

`published.csv` has every row with its source: a set, a layout and sizes where the clock can express
it, else the reason why not. `published.toml` has what the rows of a set share: hardware file, mask,
which numbers are fitted on the rows to calibrate, and what is assumed.
"""

from __future__ import annotations

import csv
import functools
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft import Causal, Full, Layout, Mask, Window
from weft.declare.hardware import Hardware
from weft.plan.plan import Plan
from weft.plan.problem import Problem
from weft.plan.shifts import Shifts
from weft_planner.beside import Around
from weft_planner.choices import OTHER
from weft_planner.clock import Network
from weft_planner.flow import RankScript, replayed
from weft_planner.groups import Groups, Row
from weft_planner.hf_config import HFModel

HERE = Path(__file__).parent
FREE = ("fixed", "outside", "attention")


@dataclass(frozen=True)
class Set:
    """What rows of one source share; see `published.toml`.

    off: why rows are far off, where some are.
    recompute: of steps and their memory, how layers are recomputed.
    apart: share by which two rows must differ to be told apart.
    around: forward and backward, what the measured program does around its kernel calls; else
        weft's own counts are taken.
    what: that is predicted: attention "call"s and what is fitted beside them, whole "step"s of
        transformers models or their "memory", with nothing fitted.
    """

    name: str
    about: str
    hardware: str
    free: tuple[str, ...]
    assumed: tuple[str, ...]
    off: str = ""
    sequences: int = 1
    steps: int = 1
    mask: str = "causal"
    forward_only: bool = False
    what: str = "call"
    recomputed: bool = False
    recompute: str = "offload"
    apart: float = 0.02
    around: tuple[Mapping[str, float], ...] = ()

    @functools.cached_property
    def machine(self) -> Hardware:
        """Where its rows were measured."""
        beside = HERE / f"{self.hardware}.toml"
        return Hardware.load(beside if beside.is_file() else self.hardware)

    @functools.cached_property
    def script(self) -> Callable[[Network, Plan, int], RankScript]:
        """A rank of the measured program, or of weft's where the set says nothing of it."""
        around = [Around(**each) for each in self.around]  # type: ignore[arg-type]
        return functools.partial(RankScript, around=around)


@dataclass(frozen=True)
class Published:
    """One published row; `reason` says why the clock cannot express it, where it cannot."""

    set: str
    source: str
    what: str
    devices: str
    on: str
    metric: str
    value: str
    unit: str
    use: str
    layout: str
    model: str
    tokens: str
    keys: str
    part: str
    note: str
    reason: str


@dataclass(frozen=True)
class Entry:
    """A row that the clock can express, its value and what was predicted, in the row's unit."""

    row: Published
    measured: float
    predicted: float


@dataclass
class Fitted:
    """The rows of a set, and its free numbers as fitted."""

    set: Set
    entries: list[Entry]
    numbers: dict[str, float] = field(default_factory=dict)


def read() -> tuple[list[Published], dict[str, Set], Mapping[str, Any]]:
    """Every row, every set by its name, and the sizes of models."""
    with open(HERE / "published.csv", newline="") as file:
        rows = [Published(**row) for row in csv.DictReader(file)]
    shared = tomllib.loads((HERE / "published.toml").read_text())
    sets = {
        name: Set(name, **{k: tuple(v) if isinstance(v, list) else v for k, v in table.items()})
        for name, table in shared["set"].items()
    }
    return rows, sets, shared["model"]


def fitted(wanted: Sequence[str] = ()) -> Iterator[Fitted]:
    """Every set with its rows predicted, or some sets."""
    rows, sets, models = read()
    for name, group in sets.items():
        if wanted and name not in wanted:
            continue
        own = [row for row in rows if row.set == name]
        parts = [_parts(row, group, models.get(row.model, {})) for row in own]
        scales = [_scale(row, group, models) for row in own]
        seconds = [(float(row.value) / a) ** p for row, (a, p) in zip(own, scales)]
        numbers = _fit(group.free, own, parts, seconds)
        times = [sum(numbers[f] * part for f, part in zip(FREE, each)) for each in parts]
        entries = [
            Entry(row, float(row.value), a * time**p)
            for row, (a, p), time in zip(own, scales, times)
        ]
        yield Fitted(group, entries, {f: numbers[f] for f in group.free})


def _fit(
    free: Sequence[str],
    rows: Sequence[Published],
    parts: Sequence[tuple[float, float, float]],
    seconds: Sequence[float],
) -> dict[str, float]:
    """The free numbers that make relative errors of the rows to calibrate small, none negative."""
    numbers = {"fixed": 0.0, "outside": 0.0, "attention": 1.0}
    if not free:
        return numbers
    numbers |= dict.fromkeys(free, 0.0)
    used = [i for i, row in enumerate(rows) if row.use == "calibrate"]
    left, right = [], []
    for i in used:
        fixed = sum(numbers[f] * part for f, part in zip(FREE, parts[i]) if f not in free)
        left.append([part / seconds[i] for f, part in zip(FREE, parts[i]) if f in free])
        right.append(1 - fixed / seconds[i])
    names = [f for f in FREE if f in free]
    numbers |= dict(zip(names, np.linalg.lstsq(np.array(left), np.array(right), rcond=None)[0]))
    negative = [f for f in free if numbers[f] < 0]
    if negative:
        return _fit([f for f in free if f not in negative], rows, parts, seconds) | dict.fromkeys(
            negative, 0.0
        )
    return {name: float(number) for name, number in numbers.items()}


def _parts(row: Published, group: Set, model: Mapping[str, Any]) -> tuple[float, float, float]:
    """By which the three numbers of a set are multiplied: once, weights x tokens, and attention."""
    layout, tokens = Layout.parse(row.layout), int(row.tokens)
    if group.what != "call":
        found = trained(row.model, row.layout, tokens, int(row.devices), row.set)
        if row.part != "step":
            return 1.0, 0.0, found.nbytes - OTHER
        each = found.step - found.seconds["FSDP"]  # of a row; weights are gathered once for all
        return 1.0, 0.0, max(group.sequences * each, found.fsdp)
    if row.part == "shift":
        shifts = Shifts(group.machine, layout.mesh)
        return 1.0, 0.0, shifts.shift("ring", 1).seconds(tokens)
    if row.part == "all-to-all":
        return 1.0, 0.0, all_to_all(group.machine, layout.world_size, tokens)
    keys = int(row.keys or tokens)
    if row.part == "block":
        work = 4 * model["heads"] * tokens * keys * model["head_dim"]
        return 1.0, 0.0, work / group.machine.device.rate(tokens * keys)
    sizes = model["heads"], model["kv_heads"], model["head_dim"], model["head_dim"]
    mask = _mask(group.mask, tokens, keys)
    lengths = ((tokens, keys),)
    problem = Problem(("tokens",), lengths, 1, *sizes, torch.bfloat16, "cuda", mask)
    timing = replayed(layout, problem, group.machine, 64, group.script).timing
    if row.part == "over gather":
        gather = Layout.parse(row.layout.replace("ring", "gather"))
        alone = replayed(gather, problem, group.machine, 64, group.script).timing
        return 1.0, 0.0, timing.forward / alone.forward
    backward = not (group.forward_only or row.part.startswith("forward"))
    forward = (1 + group.recomputed) * (row.part != "backward")
    passes = timing.compute if "alone" in row.part else (timing.forward, timing.backward)
    attention = forward * passes[0] + backward * passes[1]
    times = group.sequences * group.steps * (2 if row.part == "both cfg" else 1)
    outside = model["weights"] * tokens / layout.world_size
    return 1.0, times * outside, times * model["layers"] * attention


def _mask(name: str, tokens: int, keys: int) -> Mask:
    if name == "full":
        return Full()
    if keys == tokens:
        return Causal()
    return Window(keys, keys - tokens)  # after keys that are cached


def _scale(row: Published, group: Set, models: Mapping[str, Any]) -> tuple[float, int]:
    """(a, p) of value = a x seconds^p, in the unit of a row."""
    times = {"x": 1.0, "s": 1.0, "ms": 1e3, "us": 1e6, "GB": 1e-9}
    if row.unit in times:
        return times[row.unit], 1
    if row.unit == "iter/s":
        return 1.0, -1
    ranks, tokens = Layout.parse(row.layout).world_size, int(row.tokens)
    if row.unit == "GB/s":  # NCCL's bus bandwidth of an all-to-all
        return tokens * (ranks - 1) / ranks / 1e9, -1
    each = tokens * group.sequences / ranks  # a device
    if row.unit == "tokens/s":
        return each * int(row.devices), -1
    if row.unit == "tokens/s/GPU":
        return each, -1
    model = models[row.model]
    if row.unit == "attention TFLOP/s/GPU":
        pairs = tokens**2 if group.mask == "full" else tokens * (tokens + 1) / 2
        work = (10 if row.part == "backward" else 4) * pairs * model["heads"] * model["head_dim"]
        return work / ranks / 1e12, -1
    width = model["layers"] * model["heads"] * model["head_dim"]
    flops = 6 * model["weights"] + 12 * width * tokens  # a token, nothing masked
    return flops * each / 1e12, -1


@functools.cache
def trained(config: str, line: str, tokens: int, devices: int, name: str) -> Row:
    """A step of a transformers model as the set-up of a set has it, sharded over all devices."""
    group = read()[1][name]
    search = Groups(
        HFModel.load(HERE / "configs" / config),
        tokens,
        group.machine,
        devices,
        ["chunked"],
        ["adamw-fp32"],
        [group.recompute],
        layouts=[Layout.parse(line)],
    )
    return next(row for row in search.rows() if row.shards == devices)


def all_to_all(machine: Hardware, ranks: int, nbytes: int) -> float:
    """Seconds until every rank has sent its share of some bytes to every other one."""
    width = machine.widths[-2] if len(machine.widths) > 1 else 1
    network = Network(machine, width if ranks > width else ranks)
    for rank in range(network.ranks):
        for other in range(ranks):
            if other != rank:
                for _ in range(2):  # sender and receiver are ready
                    network.post(rank, other, (other,), nbytes // ranks, lambda: None)
    return network.clock.run()
