"""What a layout file may say, and whether its parts fit together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, field_validator
from torch.distributed.tensor import Placement, Replicate, Shard

from ..errors import DeclarationError, did_you_mean, shown
from .orders import check_order
from .placements import BATCH, HEAD, SEQ, show
from .strategy import Role, Rule, Strategy

if TYPE_CHECKING:
    from .layout import LayoutDeclaration

HEADS = "heads"
#: No machine has more, and a slip of the keyboard should not be planned for.
MOST_RANKS = 1 << 20


class Entry(BaseModel):
    """A strategy on an attended axis.

    strategy: a name in `strategies/`, or a path relative to this file.
    on: the mesh dim of its rule, or a table of rule = mesh dim.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)
    strategy: str
    on: str | dict[str, str] = {}


class MeasuredRates(BaseModel):
    """What the machine does, of which a file may leave out what was not measured.

    flops: floating-point operations per second of a rank.
    bandwidth: bytes per second of a link.
    latency: seconds until a message begins to arrive.
    links: bytes per second, per mesh dim.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)
    flops: PositiveFloat | None = None
    bandwidth: PositiveFloat | None = None
    latency: NonNegativeFloat | None = None
    links: dict[str, PositiveFloat] | None = None


class LayoutFile(BaseModel):
    """How tensors lie on a mesh, and how their axes are attended.

    about: for `weft list` and readers.
    mesh: dims of the device mesh and their sizes, outermost first; one may be -1, the ranks left.
    shard: how activations lie at rest: axis = the mesh dims that split it, in mesh order. `heads`
        splits query and key/value heads.
    replicate: mesh dims that nothing is split over.
    order: of the tokens of a split axis: `contiguous`, `zigzag` or `striped`.
    attend: per axis, or axes joined by `+`, the strategies that are stacked on it.
    inside_node: mesh dims whose ranks must share a node.
    rates: measured by `weft rates`, for plans and predictions.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)
    about: str = ""
    mesh: dict[str, int] = {}
    shard: dict[str, tuple[str, ...]] = {}
    replicate: tuple[str, ...] = ()
    order: dict[str, str] = {}
    attend: dict[str, tuple[Entry, ...]] = {}
    inside_node: tuple[str, ...] = ()
    rates: MeasuredRates = MeasuredRates()

    @field_validator("shard", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: (v,) if isinstance(v, str) else v for k, v in value.items()}
        return value


@dataclass(frozen=True)
class Binding:
    """A strategy stacked on an axis, each of its rules bound to a mesh dim."""

    strategy: Strategy
    on: Mapping[str, str]

    @property
    def rules(self) -> dict[str, Rule]:
        """Mesh dim -> rule."""
        return {mesh_dim: self.strategy.rules[rule] for rule, mesh_dim in self.on.items()}


def bind(axis: str, entry: Entry, mesh: Mapping[str, int]) -> Binding:
    strategy = Strategy.load(entry.strategy)
    on = entry.on
    if isinstance(on, str):
        if len(strategy.rules) != 1:
            raise DeclarationError(
                f"attend.{axis}: strategy {strategy.name!r} has rules {', '.join(strategy.rules)}; "
                f"'on' must map each to a mesh dim, found {on!r}"
            )
        on = {next(iter(strategy.rules)): on}
    if set(on) != set(strategy.rules):
        raise DeclarationError(
            f"attend.{axis}: strategy {strategy.name!r} has rules {sorted(strategy.rules)}, but "
            f"'on' binds {sorted(on)}"
        )
    for mesh_dim in on.values():
        if mesh_dim not in mesh:
            raise DeclarationError(
                f"attend.{axis}: no mesh dim {mesh_dim!r}{did_you_mean(mesh_dim, mesh)}"
            )
    return Binding(strategy, dict(on))


def checked(layout: LayoutDeclaration) -> LayoutDeclaration:
    """The layout, or `DeclarationError` with what does not fit and what would."""
    _check_mesh(layout)
    _check_sharding(layout)
    for key, bindings in layout.attend.items():
        _check_claims(layout, key, bindings)
    return layout


def _check_mesh(layout: LayoutDeclaration) -> None:
    for name in layout.inside_node:
        if name not in layout.mesh:
            raise DeclarationError(
                f"inside_node: no mesh dim {name!r}{did_you_mean(name, layout.mesh)}"
            )
    for name in layout.rates.get("links", ()):
        if name not in layout.mesh:
            raise DeclarationError(
                f"rates.links: no mesh dim {name!r}{did_you_mean(name, layout.mesh)}"
            )
    for name, size in layout.mesh.items():
        if size < 1 and size != -1:
            found = f"mesh.{name} = {shown(size)}"
            raise DeclarationError(f"{found}: a size is 1 or more, or -1 for the rest")
    if math.prod(map(abs, layout.mesh.values())) > MOST_RANKS:
        raise DeclarationError(f"mesh: more than {MOST_RANKS:,} ranks")
    if list(layout.mesh.values()).count(-1) > 1:
        raise DeclarationError("mesh: only one size may be -1")


def _check_sharding(layout: LayoutDeclaration) -> None:
    order = {name: i for i, name in enumerate(layout.mesh)}
    used: dict[str, str] = dict.fromkeys(layout.replicate, "replicate")
    for where, names in [*layout.sharding.items(), ("replicate", layout.replicate)]:
        for name in names:
            if name not in layout.mesh:
                raise DeclarationError(
                    f"{where}: no mesh dim {name!r}{did_you_mean(name, layout.mesh)}"
                )
    for axis, names in layout.sharding.items():
        if sorted(names, key=order.__getitem__) != list(names):
            raise DeclarationError(
                f"shard.{axis} = {list(names)}: list mesh dims in mesh order, as DTensor splits"
            )
        for name in names:
            if name in used:
                raise DeclarationError(
                    f"shard.{axis}: mesh dim {name!r} is already used by {used[name]!r}; a mesh "
                    "dim splits one axis"
                )
            used[name] = axis
    for name in layout.mesh:
        if name not in used:
            raise DeclarationError(
                f"mesh dim {name!r} is named by nobody: split an axis over it in [shard], or list "
                "it in replicate"
            )
    for axis, name in layout.order.items():
        check_order(name)
        if axis not in layout.sharding:
            raise DeclarationError(
                f"order.{axis}: the axis is not split{did_you_mean(axis, layout.sharding)}"
            )


def _check_claims(layout: LayoutDeclaration, key: str, bindings: tuple[Binding, ...]) -> None:
    axes = key.split("+")
    attended = {d for axis in axes for d in layout.shard_dims(axis)}
    claimed: dict[str, str] = {}
    for binding in bindings:
        for mesh_dim, rule in binding.rules.items():
            where = f"attend.{key}: strategy {binding.strategy.name!r}"
            if mesh_dim in claimed:
                raise DeclarationError(
                    f"{where}: mesh dim {mesh_dim!r} is claimed twice (also by "
                    f"{claimed[mesh_dim]!r}); it plays one role"
                )
            claimed[mesh_dim] = binding.strategy.name
            _check_rest(layout, where, mesh_dim, rule, mesh_dim in attended)
    missing = sorted(attended - set(claimed))
    if missing:
        raise DeclarationError(
            f"attend.{key}: mesh dim {missing[0]!r} splits the axis but no strategy claims it; "
            "attention would stay within each chunk"
        )


def _check_rest(
    layout: LayoutDeclaration, where: str, mesh_dim: str, rule: Rule, attended: bool
) -> None:
    lies: Placement = Shard(BATCH)
    if attended:
        lies = Shard(SEQ)
    elif mesh_dim in layout.replicate:
        lies = Replicate()
    elif mesh_dim in layout.shard_dims(HEADS):
        lies = Shard(HEAD)
    if rule.query.rest != lies:
        raise DeclarationError(
            f"{where}: the rule bound to mesh dim {mesh_dim!r} has queries at rest as "
            f"{show(rule.query.rest)}, but there the layout has {show(lies)}"
        )
    whole = (Replicate(),) if attended or mesh_dim in layout.replicate else ()
    if rule.key.rest not in (lies, *whole):
        raise DeclarationError(
            f"{where}: the rule bound to mesh dim {mesh_dim!r} has keys at rest as "
            f"{show(rule.key.rest)}, but there the layout has {show(lies)}"
            f"{' (or R)' if attended else ''}"
        )
    if rule.role is Role.NONE and attended:
        raise DeclarationError(f"{where}: mesh dim {mesh_dim!r} splits the axis, so R is not so")
