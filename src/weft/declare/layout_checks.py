"""Consistency of a layout: mesh, sharding, and the dims that its strategies claim."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from torch.distributed.tensor import Placement, Replicate, Shard

from ..errors import DeclarationError, did_you_mean, shown
from .layout_file import HEADS, MOST_RANKS, Binding, LayoutFile
from .orders import check_order
from .placements import BATCH, HEAD, SEQ, show
from .strategy import Role, Rule


def check_file(
    layout: LayoutFile,
    attend: Mapping[str, tuple[Binding, ...]],
    carry: Mapping[str, tuple[Binding, ...]],
    choose: Mapping[str, tuple[Binding, ...]],
) -> None:
    """Raise `DeclarationError` with what does not fit and what would."""
    _check_mesh(layout)
    _check_sharding(layout)
    _check_shares(layout)
    for key, bindings in attend.items():
        _check_claims(layout, key, bindings)
    for axis, bindings in carry.items():
        _check_carried(layout, axis, bindings)
    for axis, bindings in choose.items():
        _check_chosen(layout, axis, bindings)


def _check_mesh(layout: LayoutFile) -> None:
    for name in layout.inside_node:
        if name not in layout.mesh:
            raise DeclarationError(
                f"inside_node: no mesh dim {name!r}{did_you_mean(name, layout.mesh)}"
            )
    for name, size in layout.mesh.items():
        if size < 1 and size != -1:
            entry = f"mesh.{name} = {shown(size)}"
            raise DeclarationError(f"{entry}: a size is 1 or more, or -1 for the rest")
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


def _check_shares(layout: LayoutFile) -> None:
    """Shares are of mesh dims that split tokens, one per coordinate."""
    for name, shares in layout.share.items():
        entry = f"share.{name} = {list(shares)}"
        if name not in layout.mesh:
            raise DeclarationError(f"share: no mesh dim {name!r}{did_you_mean(name, layout.mesh)}")
        if layout.mesh[name] != len(shares):
            raise DeclarationError(
                f"{entry}: mesh dim {name!r} has {layout.mesh[name]} coordinates; give one share"
                " for each"
            )
        axis = next((axis for axis, dims in layout.shard.items() if name in dims), None)
        if axis in (None, HEADS, "batch"):
            holder = "nothing" if axis is None else repr(axis)
            raise DeclarationError(
                f"{entry}: this mesh dim splits {holder}; shares are of mesh dims that split tokens"
                " (weights are split equally, and so are the sequences of a batch)"
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
                f"mesh dim {name!r} is unused: split an axis over it in [shard], or list "
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
        if binding.state_rules:
            raise DeclarationError(
                f"attend.{key}: strategy {binding.strategy.name!r} carries the state of a"
                " recurrence, and is no attention: name it in [carry]"
            )
        if binding.choice_rules:
            raise DeclarationError(
                f"attend.{key}: strategy {binding.strategy.name!r} chooses keys, and is no"
                " attention: name it in [choose]"
            )
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


def _check_carried(layout: LayoutFile, axis: str, bindings: tuple[Binding, ...]) -> None:
    split, transports = layout.shard.get(axis, ()), set()
    claimed: set[str] = set()
    for binding in bindings:
        where = f"carry.{axis}: strategy {binding.strategy.name!r}"
        if binding.choice_rules:
            raise DeclarationError(f"{where} chooses keys: name it in [choose]")
        _claim(where, binding, split, claimed, "no state crosses its ranks")
        for rule in binding.rules.values():
            if not rule.query.compute == rule.key.compute == Shard(HEAD):
                raise DeclarationError(
                    f"{where}: {rule.describe()}; a recurrence is carried along its tokens"
                    " ('state') or runs over whole sequences of some heads ('ulysses')"
                )
        for state in binding.state_rules.values():
            transports.add(state.transport)
            if layout.order.get(axis) == "striped":
                raise DeclarationError(
                    f"{where}: order.{axis} is striped, so that a state would change ranks at every"
                    " token; use contiguous or zigzag order, or 'ulysses'"
                )
    if len(transports) > 1:
        raise DeclarationError(
            f"carry.{axis}: a state travels in one way, found transports {sorted(transports)}"
        )
    if missing := [d for d in split if d not in claimed]:
        raise DeclarationError(
            f"carry.{axis}: mesh dim {missing[0]!r} splits the axis but no strategy claims it;"
            " states would start anew in each chunk"
        )


def _check_chosen(layout: LayoutFile, axis: str, bindings: tuple[Binding, ...]) -> None:
    split, claimed = layout.shard.get(axis, ()), set[str]()
    for binding in bindings:
        where = f"choose.{axis}: strategy {binding.strategy.name!r}"
        if not binding.choice_rules:
            raise DeclarationError(
                f"{where} chooses no keys; a strategy of [choose] has rules of 'index' and"
                " 'choice', as 'choose_lists' has"
            )
        _claim(where, binding, split, claimed, "no index key is missing along it")


def _claim(
    where: str, binding: Binding, split: Collection[str], claimed: set[str], why: str
) -> None:
    """Add the mesh dims of a binding to the claimed ones; each splits the axis, once."""
    for mesh_dim in binding.on.values():
        if mesh_dim not in split:
            raise DeclarationError(
                f"{where}: mesh dim {mesh_dim!r} does not split the axis, so that {why};"
                f" {list(split)} do"
            )
        if mesh_dim in claimed:
            raise DeclarationError(f"{where}: mesh dim {mesh_dim!r} is claimed twice")
        claimed.add(mesh_dim)


def _check_rest(layout: LayoutFile, where: str, mesh_dim: str, rule: Rule, attended: bool) -> None:
    at_rest: Placement = Shard(BATCH)
    if attended:
        at_rest = Shard(SEQ)
    elif mesh_dim in layout.replicate:
        at_rest = Replicate()
    elif mesh_dim in layout.shard.get(HEADS, ()):
        at_rest = Shard(HEAD)
    if rule.query.rest != at_rest:
        raise DeclarationError(
            f"{where}: the rule bound to mesh dim {mesh_dim!r} has queries at rest as "
            f"{show(rule.query.rest)}, but there the layout has {show(at_rest)}"
        )
    other: list[Placement] = [Replicate()] if attended else []
    if mesh_dim in layout.replicate:
        other = [Shard(SEQ)]
    if rule.key.rest not in (at_rest, *other):
        raise DeclarationError(
            f"{where}: the rule bound to mesh dim {mesh_dim!r} has keys at rest as "
            f"{show(rule.key.rest)}, but there the layout has {show(at_rest)}"
            f"{''.join(f' (or {show(p)})' for p in other)}"
        )
    if rule.role is Role.NONE and attended:
        raise DeclarationError(f"{where}: mesh dim {mesh_dim!r} splits the axis, so R is not so")
