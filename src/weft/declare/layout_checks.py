"""Whether the parts of a layout fit together: mesh, sharding, and what strategies claim."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch.distributed.tensor import Placement, Replicate, Shard

from ..errors import DeclarationError, did_you_mean, shown
from .layout_file import HEADS, MOST_RANKS, Binding, LayoutFile
from .orders import check_order
from .placements import BATCH, HEAD, SEQ, show
from .strategy import Role, Rule


def check(layout: LayoutFile, attend: Mapping[str, tuple[Binding, ...]]) -> None:
    """Raise `DeclarationError` with what does not fit and what would."""
    _check_mesh(layout)
    _check_sharding(layout)
    for key, bindings in attend.items():
        _check_claims(layout, key, bindings)


def _check_mesh(layout: LayoutFile) -> None:
    for name in layout.inside_node:
        if name not in layout.mesh:
            raise DeclarationError(
                f"inside_node: no mesh dim {name!r}{did_you_mean(name, layout.mesh)}"
            )
    for name, size in layout.mesh.items():
        if size < 1 and size != -1:
            found = f"mesh.{name} = {shown(size)}"
            raise DeclarationError(f"{found}: a size is 1 or more, or -1 for the rest")
    if math.prod(map(abs, layout.mesh.values())) > MOST_RANKS:
        raise DeclarationError(f"mesh: more than {MOST_RANKS:,} ranks")
    if list(layout.mesh.values()).count(-1) > 1:
        raise DeclarationError("mesh: only one size may be -1")
    joined = [level.ranks for level in layout.rates.level or ()]
    ranks = math.prod(map(abs, layout.mesh.values()))
    if joined and -1 not in joined and math.prod(joined) < ranks:
        raise DeclarationError(
            f"rates.level: the levels join {math.prod(joined)} ranks, but the mesh has {ranks}; "
            "leave out ranks of the outermost level, which then joins all"
        )


def _check_sharding(layout: LayoutFile) -> None:
    order = {name: i for i, name in enumerate(layout.mesh)}
    used: dict[str, str] = dict.fromkeys(layout.replicate, "replicate")
    for where, names in [*layout.shard.items(), ("replicate", layout.replicate)]:
        for name in names:
            if name not in layout.mesh:
                raise DeclarationError(
                    f"{where}: no mesh dim {name!r}{did_you_mean(name, layout.mesh)}"
                )
    for axis, names in layout.shard.items():
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
    for axis, stored in layout.order.items():
        check_order(stored)
        if axis not in layout.shard:
            raise DeclarationError(
                f"order.{axis}: the axis is not split{did_you_mean(axis, layout.shard)}"
            )


def _check_claims(layout: LayoutFile, key: str, bindings: tuple[Binding, ...]) -> None:
    axes = key.split("+")
    attended = {d for axis in axes for d in layout.shard.get(axis, ())}
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


def _check_rest(layout: LayoutFile, where: str, mesh_dim: str, rule: Rule, attended: bool) -> None:
    lies: Placement = Shard(BATCH)
    if attended:
        lies = Shard(SEQ)
    elif mesh_dim in layout.replicate:
        lies = Replicate()
    elif mesh_dim in layout.shard.get(HEADS, ()):
        lies = Shard(HEAD)
    if rule.query.rest != lies:
        raise DeclarationError(
            f"{where}: the rule bound to mesh dim {mesh_dim!r} has queries at rest as "
            f"{show(rule.query.rest)}, but there the layout has {show(lies)}"
        )
    other: list[Placement] = [Replicate()] if attended else []
    if mesh_dim in layout.replicate:
        other = [Shard(SEQ)]
    if rule.key.rest not in (lies, *other):
        raise DeclarationError(
            f"{where}: the rule bound to mesh dim {mesh_dim!r} has keys at rest as "
            f"{show(rule.key.rest)}, but there the layout has {show(lies)}"
            f"{''.join(f' (or {show(p)})' for p in other)}"
        )
    if rule.role is Role.NONE and attended:
        raise DeclarationError(f"{where}: mesh dim {mesh_dim!r} splits the axis, so R is not so")
