"""The chunks of an axis whose ranks compute together, between whose groups work is balanced."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.tensor import Shard

from ..declare.layout import LayoutDeclaration
from ..declare.mesh import coordinates
from ..declare.placements import SEQ
from ..declare.strategy import Role, Rule
from ..errors import DeclarationError
from .blocks import Shares, shares_of

Groups = tuple[tuple[int, ...], ...]


def packing_groups(layout: LayoutDeclaration, axis: str) -> tuple[Groups, bool]:
    """The groups of an axis's chunks that compute apart, and whether their work is that of keys.

    Along a mesh dim of role query a rank computes its own queries with all keys, along one of role
    key its own keys with all queries. Along the others (Ulysses, axial) every rank computes with
    the tokens of all: these are one group, its chunks in the order in which all-to-alls join them.

    >>> packing_groups(LayoutDeclaration.parse("tokens: ring=2 x ulysses=2"), "tokens")
    (((0, 1), (2, 3)), False)
    """
    rules = _rules(layout, axis)
    sizes = {d: layout.mesh[d] for d in layout.shard_dims(axis)}
    roles = {d: _roles(rules[d]) if d in rules else {Role.QUERY} for d in sizes if sizes[d] > 1}
    apart = [d for d, role in roles.items() if role & {Role.QUERY, Role.KEY}]
    met = {role for d in apart for role in roles[d]}
    if len(met) > 1:
        raise DeclarationError(
            f"pack: {layout.source} shares the scores of axis {axis!r} by queries and by keys"
            f" (mesh dims {', '.join(apart)}), and whole documents that balance one unbalance the"
            f" other; layout.balance({axis!r}, mask, length) cuts them and balances both; so does"
            f" the order 'striped': {axis}(striped) on one line"
        )
    _refuse_keys_alone(layout, axis, rules)
    if len(apart) == len(roles):
        return tuple((chunk,) for chunk in range(layout.size(axis))), met == {Role.KEY}
    groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for chunk in range(layout.size(axis)):
        at = coordinates(sizes, chunk)
        joined = tuple(at[d] for d in reversed(sizes) if d not in apart)  # the last joins last
        groups.setdefault(tuple(at[d] for d in apart), []).append((joined, chunk))
    members = tuple(tuple(chunk for _, chunk in sorted(group)) for group in groups.values())
    return members, met == {Role.KEY}


def balance_shares(layout: LayoutDeclaration, axis: str) -> tuple[Shares, ...]:
    """The queries and the keys that meet on ranks in each pass; where calls choose, either way."""
    rules = _rules(layout, axis)
    _refuse_keys_alone(layout, axis, rules)
    sizes = {d: layout.mesh[d] for d in layout.shard_dims(axis)}
    passes = [
        {d: getattr(rules[d], way) or either if d in rules else Role.QUERY for d in sizes}
        for way in ("forward_role", "backward_role")
        for either in (Role.QUERY, Role.KEY)
    ]
    return shares_of(sizes, passes)


def _refuse_keys_alone(layout: LayoutDeclaration, axis: str, rules: Mapping[str, Rule]) -> None:
    alone = [
        d for d, rule in rules.items() if d in layout.replicate and rule.key.rest == Shard(SEQ)
    ]
    if any(layout.mesh[d] > 1 for d in alone):
        raise DeclarationError(
            f"pack: {layout.source} splits the keys of axis {axis!r} over mesh dims"
            f" {', '.join(alone)} where queries are whole, in equal parts of the axis; pack for a"
            " layout that splits its queries"
        )


def _rules(layout: LayoutDeclaration, axis: str) -> Mapping[str, Rule]:
    """Rules of attention over an axis, alone or jointly with others; none if nothing attends it."""
    joints = (tuple(key.split("+")) for key in layout.attend)
    axes = min((joint for joint in joints if axis in joint), key=len, default=())
    return layout.rules(axes) if axes else {}


def _roles(rule: Rule) -> set[Role]:
    """The roles of both passes; where calls choose, either."""
    passes = {rule.forward_role, rule.backward_role}
    return {role for role in passes if role} | ({Role.QUERY, Role.KEY} if None in passes else set())
