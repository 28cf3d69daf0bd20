"""A layout as declared: a mesh, the placement of activations, a strategy per attended axis."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError
from torch.distributed.tensor import Shard

from ..errors import DeclarationError, ShapeError, UnsupportedError, did_you_mean, shown
from . import catalog, one_line
from .explain import explain_validation
from .layout_checks import check_file
from .layout_file import HEADS, Binding, LayoutFile, bind
from .orders import TokenOrder
from .placements import BATCH, SEQ, entry_placement
from .routing import Routing
from .strategy import Role, Rule

_BATCH_RULE = Rule.parse("S(batch)", "S(batch)", "S(batch)")
_HEAD_RULE = Rule.parse("S(head)", "S(head)", "S(head)")
_NONE_RULE = Rule.parse("R", "R", "R")


@dataclass(frozen=True, eq=False)
class LayoutDeclaration:
    """A validated layout file. It knows no ranks; equal ones are equal values."""

    name: str
    mesh: Mapping[str, int]
    sharding: Mapping[str, tuple[str, ...]]
    replicate: tuple[str, ...] = ()
    order: Mapping[str, str | TokenOrder] = field(default_factory=dict)
    attend: Mapping[str, tuple[Binding, ...]] = field(default_factory=dict)
    about: str = ""
    source: str = ""
    declaration: Mapping[str, Any] = field(default_factory=dict, repr=False)
    inside_node: tuple[str, ...] = ()
    rates: Mapping[str, Any] = field(default_factory=dict)
    carry: Mapping[str, tuple[Binding, ...]] = field(default_factory=dict)
    share: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    choose: Mapping[str, tuple[Binding, ...]] = field(default_factory=dict)

    # -- declaring -----------------------------------------------------------------------------

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """Read a layout file.

        Args:
            name_or_path: the name of one that ships in `layouts/`, or a path to a `.toml` file.

        Raises:
            DeclarationError: names file, key, value and the fix.

        >>> weft.Layout.load("ring-4").world_size
        4
        """
        data, source = catalog.read_declaration("layouts", name_or_path)
        return cls.from_dict(data, name=Path(source).stem, source=source)

    @classmethod
    def parse(cls, line: str) -> Self:
        """A layout on one line; `to_toml` shows what it stands for.

        Args:
            line: axes and their strategies, such as `"heads: tp=2; tokens: ulysses=2 x ring=4"`.

        Raises:
            DeclarationError: shows the grammar, which `weft.declare.one_line` has, too.

        >>> LayoutDeclaration.parse("tokens(zigzag): ulysses=2 x ring=4").mesh
        {'ulysses': 2, 'ring': 4}
        """
        return cls.from_dict(one_line.declaration(line), name=line, source=f"layout {shown(line)}")

    @classmethod
    def named(cls, text: str) -> Self:
        """A layout as people name it on a command line: its name, a path, or one line.

        Args:
            text: as for `load`, or as for `parse`.

        Raises:
            DeclarationError: names what is wrong.

        >>> weft.Layout.named("ring-4").mesh, weft.Layout.named("rows: ring=2").mesh
        ({'ring': 4}, {'ring': 2})
        """
        return cls.parse(text) if one_line.is_line(text) else cls.load(text)

    @classmethod
    def single(cls) -> Self:
        """The layout of one device: no mesh, every axis whole."""
        return cls.from_dict({}, name="single")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], name: str = "unnamed", source: str = "") -> Self:
        """Validate a layout.

        Args:
            data: the content of a layout file.
            name: what the layout is called.
            source: where it was declared, for messages.

        Raises:
            DeclarationError: names file, key, value and the fix.
        """
        source = source or f"layout {name}"
        try:
            parsed = LayoutFile.model_validate(dict(data))
        except ValidationError as error:
            raise DeclarationError(explain_validation(error, source, LayoutFile)) from None
        try:
            attend, carry, choose = (
                {
                    axis: tuple(bind(f"{key}.{axis}", entry, parsed.mesh) for entry in entries)
                    for axis, entries in getattr(parsed, key).items()
                }
                for key in ("attend", "carry", "choose")
            )
            check_file(parsed, attend, carry, choose)
        except DeclarationError as error:
            raise DeclarationError(f"{source}: {error}") from None
        return cls(
            name,
            dict(parsed.mesh),
            dict(parsed.shard),
            parsed.replicate,
            dict(parsed.order),
            attend,
            parsed.about,
            source,
            dict(data),
            parsed.inside_node,
            parsed.rates.model_dump(exclude_defaults=True),
            carry,
            dict(parsed.share),
            choose,
        )

    @functools.cached_property
    def _text(self) -> str:
        """Text that is equal for equal layouts, whatever their name, source or comments.

        It holds what was resolved: mesh sizes, and the rules behind the names of strategies.
        """
        attend, carry, choose = (
            {
                axis: [[b.strategy.content, dict(sorted(b.on.items()))] for b in bindings]
                for axis, bindings in table.items()
            }
            for table in (self.attend, self.carry, self.choose)
        )
        content = {
            "mesh": list(self.mesh.items()),
            "shard": dict(self.sharding),
            "replicate": self.replicate,
            "order": {axis: getattr(o, "digest", o) for axis, o in self.order.items()},
            "attend": attend,
            "inside_node": self.inside_node,
            "rates": dict(self.rates),
        }
        content |= {"carry": carry} if carry else {}
        content |= {"choose": choose} if choose else {}
        content |= {"share": dict(self.share)} if self.share else {}
        return json.dumps(content, sort_keys=True)

    @functools.cached_property
    def digest(self) -> str:
        """A short text that is equal for equal layouts."""
        return hashlib.blake2b(self._text.encode(), digest_size=8).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayoutDeclaration) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def to_toml(self) -> str:
        """This layout as the content of a layout file.

        Raises:
            DeclarationError: an axis has an order that is data.
        """
        for axis, order in self.order.items():
            if isinstance(order, TokenOrder):
                raise DeclarationError(
                    f"{self.source}: the order of axis {axis!r} is data, which no file says: write"
                    " the layout that was given to `reorder`"
                )
        return one_line.to_toml(self.declaration)

    # -- asking --------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.mesh.values())

    def shard_dims(self, axis: str) -> tuple[str, ...]:
        """Mesh dims that split an axis at rest, outermost first.

        Args:
            axis: the axis.
        """
        return tuple(self.sharding.get(axis, ()))

    def parts(self, dims: Iterable[str]) -> tuple[int | tuple[float, ...], ...]:
        """Into how many parts each of some mesh dims cuts an axis; where they are unequal, shares.

        Args:
            dims: mesh dims, outermost first.

        >>> weft.Layout.parse("tokens: ulysses=2 x ring=4").parts(["ulysses", "ring"])
        (2, 4)
        """
        return tuple(self.share.get(d) or self.mesh[d] for d in dims)

    def refuse_shares(self, label: str) -> None:
        """Refuses a layout that splits tokens unequally, for what takes equal parts.

        Args:
            label: that cannot be done with it.

        Raises:
            UnsupportedError: it has `[share]`.
        """
        if self.share:
            raise UnsupportedError(
                f"{self.source}: {label} needs equal parts of tokens, and [share] gives"
                f" {dict(self.share)}; leave it out of the layout"
            )

    def size(self, axis: str) -> int:
        """Into how many chunks an axis is split.

        Args:
            axis: the axis.
        """
        return math.prod([self.mesh[d] for d in self.shard_dims(axis)])

    def key_dims(self, axis: str, axes: str | Sequence[str] = ()) -> tuple[str, ...]:
        """Mesh dims that split the keys of an attended axis at rest, in mesh order.

        Where queries are replicated over a mesh dim, keys may be split over it.

        Args:
            axis: the axis.
            axes: all axes that are attended jointly, if it is not alone; the first one is split.

        >>> LayoutDeclaration.load("ring-4").key_dims("tokens")
        ('ring',)
        >>> LayoutDeclaration.load("kv-parallel-4").key_dims("tokens")
        ('kv',)
        """
        axes = (axes,) if isinstance(axes, str) and axes else tuple(axes) or (axis,)
        at_rest = (*self.shard_dims(axis), *(self.replicate if axis == axes[0] else ()))
        rules = self.rules(axes)
        return tuple(d for d in self.mesh if d in at_rest and rules[d].key.rest == Shard(SEQ))

    @property
    def data_dims(self) -> tuple[str, ...]:
        """Mesh dims that split data (any axis but heads): parameter gradients are summed there."""
        data = {d for axis, dims in self.sharding.items() if axis != HEADS for d in dims}
        return tuple(d for d in self.mesh if d in data)

    def batch_parts(self, axes: str | Sequence[str]) -> int:
        """Into how many parts the sequences are split when an axis (or axes jointly) is attended.

        Args:
            axes: the attended axis or axes.

        >>> layout = LayoutDeclaration.load("tabular-2x2")
        >>> layout.batch_parts("rows"), layout.batch_parts("features")
        (1, 4)
        """
        rules = self.rules(axes).items()
        return math.prod(self.mesh[d] for d, rule in rules if rule.role is Role.BATCH)

    @property
    def keys_only_dims(self) -> tuple[str, ...]:
        """Mesh dims of several ranks that split keys, and have queries whole on every rank.

        Every rank computes the same loss there. What made its queries has the whole gradient, what
        made its keys that of its own keys alone.

        >>> LayoutDeclaration.load("kv-parallel-4").keys_only_dims
        ('kv',)
        """
        dims = {
            mesh_dim
            for bindings in self.attend.values()
            for binding in bindings
            for mesh_dim, rule in binding.rules.items()
            if mesh_dim in self.replicate and rule.key.rest == Shard(SEQ)
        }
        return tuple(d for d in self.mesh if d in dims and self.mesh[d] != 1)

    def rules(self, axes: str | Sequence[str]) -> dict[str, Rule]:
        """The rule of every mesh dim when the given axis (or axes jointly) is attended.

        Dims that no strategy claims cut the batch, the heads, or nothing, as they do at rest.

        Args:
            axes: the attended axis, or several attended jointly.

        Raises:
            DeclarationError: an axis that this layout does not attend.
        """
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        claimed: dict[str, Rule] = {}
        for binding in self._bindings(axes):
            claimed |= binding.rules
        implied = {d: self._implied(d) for d in self.mesh}
        return {d: claimed.get(d, implied[d]) for d in self.mesh}

    def moves(self, axes: str | Sequence[str]) -> bool:
        """True if attention over the axes needs any communication.

        Args:
            axes: the attended axis, or several attended jointly.
        """
        return any(
            rule.role in (Role.QUERY, Role.KEY) or rule.query.rest != rule.query.compute
            for mesh_dim, rule in self.rules(axes).items()
            if self.mesh[mesh_dim] != 1
        )

    def reshards(self, axes: str | Sequence[str]) -> bool:
        """True if all-to-alls come before and after attention, as tensors rest split otherwise.

        Args:
            axes: the attended axis, or several attended jointly.
        """
        arrows = [
            (arrow, self.mesh[mesh_dim])
            for mesh_dim, rule in self.rules(axes).items()
            for arrow in (rule.query, rule.key)
        ]
        return any(a.rest != entry_placement(a) and size > 1 for a, size in arrows)

    def check_heads(self, label: str, heads: int) -> None:
        """Refuse heads that the mesh dims of the axis `heads` do not divide.

        Ranks with other numbers of heads would pair queries with other keys than one device does.

        Args:
            label: what they are heads of, for the error.
            heads: over all ranks.

        Raises:
            ShapeError: they do not divide.
        """
        shards = self.size(HEADS)
        if heads % shards:
            raise ShapeError(
                f"{self.source}: {heads} {label} do not divide over the {shards} shards of heads"
                f" (mesh dims {self.shard_dims(HEADS)}); use a multiple of {shards}"
            )

    def carries_by_heads(self, axis: str) -> tuple[str, ...]:
        """Mesh dims of an axis by which recurrent layers split heads instead, as `[carry]` says.

        Args:
            axis: the axis.

        >>> LayoutDeclaration.load("ring-4").carries_by_heads("tokens")
        ()
        """
        dims = {d for binding in self.carry.get(axis, ()) for d in binding.rules}
        return tuple(d for d in self.shard_dims(axis) if d in dims)

    def state_transport(self, axis: str) -> str:
        """The way the states of recurrent layers travel along an axis.

        "gather", "chain", or "auto": gather on up to 8 ranks, a chain on more.

        Args:
            axis: the axis.

        >>> LayoutDeclaration.load("ring-4").state_transport("tokens")
        'auto'
        """
        rules = (r for b in self.carry.get(axis, ()) for r in b.state_rules.values())
        named = {rule.transport for rule in rules} - {"auto"}
        return named.pop() if named else "auto"

    def list_dims(self, axis: str) -> tuple[str, ...]:
        """Mesh dims of an axis along which lists of the best keys merge, as `[choose]` says.

        Along the others that split it index keys are gathered.

        Args:
            axis: the axis.

        >>> LayoutDeclaration.load("lists-4").list_dims("tokens")
        ('ring',)
        """
        rules = {d: r for b in self.choose.get(axis, ()) for d, r in b.choice_rules.items()}
        return tuple(d for d in self.shard_dims(axis) if d in rules and rules[d].lists)

    def routing(self, axes: str | Sequence[str]) -> Routing | None:
        """The `[routing]` table by which a router chooses keys when the axes are attended.

        None where no key is `R(top_k)`, or where the model chooses which are.

        Args:
            axes: the attended axis, or several attended jointly.

        Raises:
            DeclarationError: strategies on these axes have different tables, or one has none.
        """
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        strategies = [binding.strategy for binding in self._bindings(axes)]
        choosing = [s for s in strategies if any(rule.top_k for rule in s.rules.values())]
        tables = {strategy.routing for strategy in choosing}
        if len(tables) > 1:
            raise DeclarationError(
                f"{self.source}: {'+'.join(axes)} is routed by strategies with different [routing]"
                f" tables, or without one: {', '.join(s.name for s in choosing)}; use one"
            )
        return next(iter(tables), None)

    def batch_dims(self, axes: str | Sequence[str]) -> tuple[str, ...]:
        """Mesh dims that split the batch at rest when the axes are attended.

        Args:
            axes: the attended axis, or several attended jointly.
        """
        rules = self.rules(axes)
        return tuple(d for d, rule in rules.items() if rule.query.rest == Shard(BATCH))

    def _bindings(self, axes: tuple[str, ...]) -> tuple[Binding, ...]:
        if len(set(axes)) < len(axes):
            raise DeclarationError(f"{self.source}: axes {axes}: an axis is named twice")
        joint = "+".join(axes)
        if joint in self.attend:
            return self.attend[joint]
        known = {*self.sharding, *(name for key in self.attend for name in key.split("+"))} - {
            HEADS
        }
        for axis in axes:
            hint = did_you_mean(axis, known)
            if axis not in known and "did you mean" in hint.casefold():
                raise DeclarationError(f"{self.source}: the layout knows no axis {axis!r}{hint}")
        unknown = [axis for axis in axes if axis not in self.attend and self.size(axis) > 1]
        if unknown:
            raise DeclarationError(
                f"{self.source}: axis {unknown[0]!r} is split over mesh dims "
                f"{self.shard_dims(unknown[0])} but "
                f"[attend] does not say how{did_you_mean(unknown[0], self.attend)}"
            )
        return tuple(b for axis in axes for b in self.attend.get(axis, ()))

    def _implied(self, mesh_dim: str) -> Rule:
        if mesh_dim in self.replicate:
            return _NONE_RULE
        return _HEAD_RULE if mesh_dim in self.shard_dims(HEADS) else _BATCH_RULE

    def resolve(self, world_size: int) -> Self:
        """The same layout with a mesh size of -1 replaced by the ranks that are left.

        Args:
            world_size: how many ranks there are.

        Raises:
            DeclarationError: the mesh does not fit that many.
        """
        product = math.prod(size for size in self.mesh.values() if size != -1)
        if -1 not in self.mesh.values():
            if product != world_size:
                raise DeclarationError(
                    f"{self.source}: mesh {dict(self.mesh)} has {product} ranks, but there are "
                    f"{world_size}; start {product} ranks or set one mesh size to -1"
                )
            return self
        if world_size % product:
            raise DeclarationError(
                f"{self.source}: {world_size} ranks cannot be divided by the {product} of the fixed"
                f" mesh dims in {dict(self.mesh)}"
            )
        sizes = {d: world_size // product if n == -1 else n for d, n in self.mesh.items()}
        return replace(self, mesh=sizes)
