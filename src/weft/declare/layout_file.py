"""The schema of a layout file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from ..errors import DeclarationError, did_you_mean
from .choice_rule import ChoiceRule
from .hardware import Levels
from .numbers import AboveZero, Seconds, Share, Whole
from .state_rule import StateRule
from .strategy import Rule, Strategy

HEADS = "heads"
Kind = TypeVar("Kind")
#: No machine has more, and a slip of the keyboard should not be planned for.
MOST_RANKS = 1 << 20
REPRODUCIBLE = (
    "'reproducible', the same bits on every layout, is gone; leave it out, and compare layouts "
    "with `weft diff`, in float64"
)


class Entry(BaseModel):
    """A strategy on an axis.

    strategy: a name in `strategies/`, or a path relative to this file.
    on: the mesh dim of its rule, or a table of rule = mesh dim.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)
    strategy: str
    on: str | dict[str, str] = {}


class MeasuredRates(BaseModel):
    """Measured rates of the machine; a file may leave out those that were not measured.

    flops: floating-point operations per second of a rank.
    bandwidth: bytes per second each way of a rank's link to all others.
    latency: seconds until a message begins to arrive.
    speeds: of the ranks, in mesh order, relative to `flops`; default all 1.
    memory_rate: bytes per second that merges of partial results reach.
    launch: seconds of a kernel launch.
    level: levels of links between ranks, innermost first, as a hardware file has them; in place of
        `bandwidth` and `latency`.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)
    flops: AboveZero | None = None
    bandwidth: AboveZero | None = None
    latency: Seconds | None = None
    speeds: tuple[AboveZero, ...] | None = None
    memory_rate: AboveZero | None = None
    launch: Seconds | None = None
    level: Levels | None = None

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        if self.level is not None and (self.bandwidth, self.latency) != (None, None):
            raise ValueError(
                "bandwidth and latency are those of one level of links; leave them out where "
                "[[rates.level]] names the levels"
            )
        return self


class LayoutFile(BaseModel):
    """The placement of tensors on a mesh, and the strategies by which their axes are attended.

    about: for `weft list` and readers.
    mesh: dims of the device mesh and their sizes, outermost first; one may be -1, the ranks left.
    shard: placement of activations at rest: axis = the mesh dims that split it, in mesh order.
        `heads` splits query and key/value heads.
    replicate: mesh dims that nothing is split over.
    order: of the tokens of a split axis: `contiguous`, `zigzag` or `striped`.
    share: per mesh dim, shares of tokens and of heads by coordinate, for ranks that differ in
        speed; default equal ones.
    attend: per axis, or axes joined by `+`, the strategies that are stacked on it.
    carry: per axis, the strategies of recurrent layers and short convolutions along it: `state`, or
        `ulysses`, by which they run over whole sequences of some heads; default `state`, on all
        mesh dims that split the axis.
    choose: per axis, the strategies by which a model chooses keys along it: `choose_lists`; default
        by whole rows of scores, for which index keys are gathered.
    inside_node: mesh dims whose ranks must share a node.
    rates: measured by `weft rates`, for plans and predictions.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)
    about: str = ""
    mesh: dict[str, Whole] = {}
    shard: dict[str, tuple[str, ...]] = {}
    replicate: tuple[str, ...] = ()
    order: dict[str, str] = {}
    share: dict[str, tuple[Share, ...]] = {}
    attend: dict[str, tuple[Entry, ...]] = {}
    carry: dict[str, tuple[Entry, ...]] = {}
    choose: dict[str, tuple[Entry, ...]] = {}
    inside_node: tuple[str, ...] = ()
    rates: MeasuredRates = MeasuredRates()

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_versions(cls, data: Any) -> Any:
        if "reproducible" in data:
            raise ValueError(REPRODUCIBLE)
        return data

    @field_validator("shard", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: (v,) if isinstance(v, str) else v for k, v in value.items()}
        return value


@dataclass(frozen=True)
class Binding:
    """A strategy stacked on an axis, each of its rules bound to a mesh dim.

    Its rules are of attention, of recurrences, or of choices of keys.
    """

    strategy: Strategy
    on: Mapping[str, str]

    @property
    def rules(self) -> dict[str, Rule]:
        """Mesh dim -> rule of attention."""
        return self._bound(self.strategy.rules)

    @property
    def state_rules(self) -> dict[str, StateRule]:
        """Mesh dim -> rule of a recurrence."""
        return self._bound(self.strategy.state_rules)

    @property
    def choice_rules(self) -> dict[str, ChoiceRule]:
        """Mesh dim -> rule of a choice of keys."""
        return self._bound(self.strategy.choice_rules)

    def _bound(self, rules: Mapping[str, Kind]) -> dict[str, Kind]:
        return {mesh_dim: rules[rule] for rule, mesh_dim in self.on.items() if rule in rules}


def bind(where: str, entry: Entry, mesh: Mapping[str, int]) -> Binding:
    """An entry of a layout file, whose rules are bound to mesh dims; `where` is its key."""
    strategy = Strategy.load(entry.strategy)
    on = entry.on
    if isinstance(on, str):
        if len(strategy.all_rules) != 1:
            raise DeclarationError(
                f"{where}: strategy {strategy.name!r} has rules {', '.join(strategy.all_rules)}; "
                f"'on' must map each to a mesh dim, found {on!r}"
            )
        on = {next(iter(strategy.all_rules)): on}
    if set(on) != set(strategy.all_rules):
        raise DeclarationError(
            f"{where}: strategy {strategy.name!r} has rules {sorted(strategy.all_rules)}, but "
            f"'on' binds {sorted(on)}"
        )
    for mesh_dim in on.values():
        if mesh_dim not in mesh:
            raise DeclarationError(
                f"{where}: no mesh dim {mesh_dim!r}{did_you_mean(mesh_dim, mesh)}"
            )
    return Binding(strategy, dict(on))
