"""One attention call as a value: all of it but the shapes of the tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch.distributed.tensor import Shard

from .._caching import beside, cached
from .._digest import describe_value, is_plain
from ..bias import Bias
from ..choice import ChoiceKind
from ..declare.layout import LayoutDeclaration
from ..declare.orders import TokenOrder
from ..declare.placements import BATCH, entry_placement
from ..declare.strategy import Role
from ..errors import DeclarationError, ShapeError, UnsupportedError
from ..masks import FULL, Mask, describe


def axis_names(axis: object) -> tuple[str, ...]:
    """The names of one axis, or of several that are attended jointly.

    >>> axis_names("rows"), axis_names(["rows", "columns"])
    (('rows',), ('rows', 'columns'))
    """
    names = (axis,) if isinstance(axis, str) else axis if isinstance(axis, Iterable) else ()
    found = tuple(names)
    if not found or not all(isinstance(name, str) for name in found):
        raise DeclarationError(f"axis is the name of an axis, or several, found {axis!r:.80}")
    return found


@dataclass(frozen=True)
class Expanded:
    """The sizes of keys and values that ranks make of what travels in their place."""

    heads: int  # of keys and values, all of those of a rank at rest
    head_dim: int  # of keys
    value_dim: int  # of values
    carried: tuple[int, int]  # head dims of the two tensors that travel
    work: int = 0  # floating-point operations that expand one token


@dataclass(frozen=True)
class Call:
    """The options of a call of `weft.attention`, without its tensors and its layout."""

    axes: tuple[str, ...]
    mask: Mask = FULL
    scale: float | None = None
    #: (queries, keys) per attended axis; None: as many on every rank as there are here
    length: tuple[tuple[int, int], ...] | None = None
    return_lse: bool = False
    softcap: float | None = None
    kernel: str | None = None
    bias: Bias | None = None
    learned_bias: bool = False  # whether a bias tensor comes with the tensors
    routed: str = ""  # for learned routing, its options as text
    name: str | None = None  # which call of the program it is, where that is told by no line of it
    choice: ChoiceKind | None = None  # the kind of a choice of keys that comes with the tensors
    expanded: Expanded | None = None  # of latents that travel

    def __post_init__(self) -> None:
        if self.name is not None and not isinstance(self.name, str):
            raise ShapeError(f"name is a text, the same on every rank, found {self.name!r:.80}")
        if self.softcap is not None and not self.softcap > 0:
            raise ShapeError(f"softcap is above 0, or None for none, found {self.softcap!r:.80}")
        if self.scale is not None and not math.isfinite(self.scale):
            raise ShapeError(f"scale is a finite number, found {self.scale!r:.80}")

    @functools.cached_property
    def text(self) -> str:
        """The call in words, as errors show it."""
        return (
            f"axes {'+'.join(self.axes)}, mask {describe(self.mask)}, scale {self.scale}, softcap "
            f"{self.softcap}, lse {self.return_lse}, kernel {self.kernel}, bias "
            f"{self.bias or self.learned_bias}, routing {self.routed or 'none'}"
            f"{'' if self.choice is None else f', {self.choice}'}"
            f"{'' if self.name is None else f', name {self.name!r}'}"
            f"{'' if self.expanded is None else f', latents of {self.expanded.carried}'}"
        )

    @property
    def content(self) -> str:
        """The call by value: equal texts where calls are equal, on whatever rank."""
        parts = (_content(self.mask), self.scale, self.return_lse, self.softcap, self.kernel)
        bias = "" if self.bias is None else describe_value(self.bias)
        tensors = f"{self.learned_bias} {self.choice} {self.expanded}"
        return f"{self.axes} {parts} {bias} {tensors} {self.routed} {self.name!r}"

    @functools.cached_property
    def has_functions(self) -> bool:
        """True if the mask or bias calls functions of the user, which run in both passes."""
        return self.bias is not None or not is_plain(self.mask)

    @functools.cached_property
    def planned_mask(self) -> Mask:
        """The mask as a plan needs it: without functions, and so without the user's tensors."""
        return self.mask.structure()

    def lengths(self, layout: LayoutDeclaration, n: int, m: int) -> tuple[tuple[int, int], ...]:
        """(queries, keys) per attended axis of the whole, for n and m local tokens."""
        if self.length is not None:
            return self.length
        if len(self.axes) > 1:
            raise ShapeError(
                f"axes {self.axes} attended jointly need length={{axis: length, ...}}: a local "
                "length does not say how its tokens divide"
            )
        participants = reach(layout, self.axes)
        if any(d in layout.share for d in participants.moving):
            raise ShapeError(
                f"{layout.source} splits axis {self.axes[0]!r} in unequal shares; give the global"
                " length: length=..."
            )
        order = layout.order.get(self.axes[0])
        if (
            isinstance(order, TokenOrder)
            and participants.query_chunks == participants.key_chunks > 1
        ):
            return ((order.length, order.length),)  # chunks may be uneven
        return ((n * participants.query_chunks, m * participants.key_chunks),)


def _content(mask: Mask) -> str:
    """A mask by value."""
    return _content_of_plain(mask) if is_plain(mask) else describe_value(mask)


@beside
def _content_of_plain(mask: Mask) -> str:
    """A mask of plain data, which cannot change, by value."""
    return describe_value(mask)


@dataclass(frozen=True)
class Reach:
    """The mesh dims that take part when some axes of a layout are attended."""

    moving: tuple[str, ...]  # along which ranks communicate
    batch: tuple[str, ...]  # that split the batch at rest
    reshards: bool  # whether tensors change their split before and after the tile program
    reshards_batch: bool  # whether that changes a split of the batch at rest
    routed: tuple[str, ...]  # along which chosen keys alone travel, `R(top_k)`
    by_router: bool  # whether a router chooses these, by learned weights, and not the model
    seen: tuple[str, ...]  # along which only keys that are seen may travel, by the call's mask
    query_chunks: int  # into how many chunks queries are split at rest
    key_chunks: int

    def asks_batches(self, per_sample: bool) -> bool:
        """True if ranks exchange batch sizes: the plan depends on which sequences are theirs."""
        return bool(self.batch) and (per_sample or self.reshards_batch)


@cached(256)
def reach(layout: LayoutDeclaration, axes: tuple[str, ...]) -> Reach:
    """The mesh dims that take part when `axes` are attended. Raises as `layout.rules`."""
    rules, split = layout.rules(axes), layout.shard_dims(axes[0])
    keys = layout.key_dims(axes[0], axes)
    moving, batch, resharded = [], [], []
    for name, rule in rules.items():
        trades = any(a.rest != entry_placement(a) for a in (rule.query, rule.key))
        if layout.mesh[name] == 1:
            continue
        if rule.query.rest == Shard(BATCH):
            batch.append(name)
        if trades:
            resharded.append(name)
        if trades or rule.role in (Role.QUERY, Role.KEY):
            moving.append(name)
    return Reach(
        tuple(moving),
        tuple(batch),
        bool(resharded),
        bool({*batch} & {*resharded}),
        tuple(d for d, rule in rules.items() if rule.top_k),
        layout.routing(axes) is not None,
        tuple(d for d in moving if rules[d].key.seen),
        math.prod(layout.mesh[d] for d in split),
        math.prod(layout.mesh[d] for d in keys),
    )


def refuse_routed(layout: LayoutDeclaration, call: Call) -> None:
    """Raise `UnsupportedError` for plain attention over a layout whose keys a router chooses.

    Where the model chooses and makes no choice, all keys are chosen: they travel as under `R`.
    """
    found = reach(layout, call.axes)
    if found.by_router and not call.routed:
        raise UnsupportedError(
            f"{layout.source}: mesh dim {found.routed[0]!r} routes keys, R(top_k), by learned"
            f" weights that plain attention over {'+'.join(call.axes)} does not have; use "
            "weft.routing.RoutedAttention, or a strategy with key 'S(seq) -> R'"
        )
