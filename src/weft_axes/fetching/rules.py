"""The mesh dims along which chosen keys are fetched, and what they go with."""

from __future__ import annotations

from torch.distributed.tensor import Shard

from weft.declare.layout import LayoutDeclaration
from weft.declare.placements import SEQ
from weft.declare.strategy import Role
from weft.errors import UnsupportedError


def check_fetched(layout: LayoutDeclaration, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Mesh dims whose keys are `R(top_k)`, outermost first."""
    rules = {d: rule for d, rule in layout.rules(axes).items() if layout.mesh[d] > 1}
    for mesh_dim, rule in rules.items():
        if rule.role in (Role.QUERY, Role.KEY) and not rule.top_k:
            raise UnsupportedError(
                f"{layout.source}: mesh dim {mesh_dim!r} moves"
                f" {'keys' if rule.role is Role.QUERY else 'queries'} as well as those that fetch"
                " chosen keys, R(top_k); give it a strategy that reshards to heads (ulysses), or"
                " R(top_k) too"
            )
        if rule.top_k and rule.key.rest != Shard(SEQ):
            raise UnsupportedError(
                f"{layout.source}: mesh dim {mesh_dim!r} fetches keys that rest whole on every"
                " rank; chosen keys rest as S(seq)"
            )
    return tuple(d for d, rule in rules.items() if rule.top_k)


def fetches(layout: LayoutDeclaration, axes: tuple[str, ...]) -> bool:
    """True if of the keys only chosen ones travel, whoever chooses."""
    return any(rule.top_k for rule in layout.rules(axes).values())


__all__ = ["check_fetched", "fetches"]
