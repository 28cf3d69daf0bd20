"""Which chunks of an axis compute together; between those that compute apart, work is balanced."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch.distributed.tensor import Shard

from ..declare.layout import LayoutDeclaration
from ..declare.mesh import coordinates
from ..declare.placements import SEQ
from ..declare.strategy import Role
from ..errors import DeclarationError


class Shares(NamedTuple):
    """The numbers of the queries and of the keys that meet, per chunk: ranks are pairs of these."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]


def balance_shares(layout: LayoutDeclaration, axis: str) -> tuple[Shares, ...]:
    """The queries and the keys that meet on ranks in each pass; where calls choose, either way.

    >>> balance_shares(LayoutDeclaration.parse("tokens: tile=2x2"), "tokens")
    (Shares(queries=(0, 0, 1, 1), keys=(0, 1, 0, 1)),)
    """
    joints = (tuple(key.split("+")) for key in layout.attend)
    axes = min((joint for joint in joints if axis in joint), key=len, default=())
    rules = layout.rules(axes) if axes else {}
    alone = [
        d for d, rule in rules.items() if d in layout.replicate and rule.key.rest == Shard(SEQ)
    ]
    if any(layout.mesh[d] > 1 for d in alone):
        raise DeclarationError(
            f"{layout.source} splits the keys of axis {axis!r} over mesh dims {', '.join(alone)}"
            " where queries are whole, in equal parts of the axis; balance and pack for a layout"
            " that splits its queries"
        )
    sizes = {d: layout.mesh[d] for d in layout.shard_dims(axis)}
    places = [coordinates(sizes, chunk) for chunk in range(math.prod(sizes.values()))]
    found: dict[Shares, None] = {}
    for way in ("forward_role", "backward_role"):
        for either in (Role.QUERY, Role.KEY):
            of = {d: getattr(rules[d], way) or either if d in rules else Role.QUERY for d in sizes}
            held = [
                [tuple(place[d] for d in sizes if of[d] is side) for place in places]
                for side in (Role.QUERY, Role.KEY)
            ]
            numbers = (tuple(map(sorted(set(keys)).index, keys)) for keys in held)
            found[Shares(*numbers)] = None
    return tuple(found)
