"""Keys and values of encoded rows, kept over a mesh, for any number of queries to attend to.

encode         training rows -> keys and values of every block, as the layout has keys at rest
attend         test rows, in batches of any size -> queries of every block, same keys and values
to             the same keys and values on another layout
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.declare.layout_file import HEADS
from weft.errors import DeclarationError, ShapeError
from weft.layout import Layout
from weft.move.fetch import fetch
from weft.move.plan import Placed, plan_redistribution
from weft_axes.checkpoint.shards import gathered, shards
from weft_axes.nn.sequences import gathered_lengths
from weft_axes.same_ranks import bind_on_same_ranks

from ..declare.model_file import ModelSpec
from .model import Model


@dataclass(frozen=True)
class CachedTensor:
    """One tensor of a cache: this rank's part, and which axis each of its dims is, None for none.

    >>> CachedTensor(torch.zeros(2, 3), ("batch", None)).axes
    ('batch', None)
    """

    local: Tensor
    axes: tuple[str | None, ...]


@dataclass(frozen=True, eq=False)
class KeyValueCache:
    """Keys and values per block of the rows that a model has encoded, sharded over a mesh.

    Rows that were encoded are never encoded again: further rows attend to their keys and values.
    Every rank holds its keys at rest, so memory per rank falls as 1/P with the
    ranks that split the rows. A cache belongs to the weights that made it.

    Made by `weft.models.Trunk.encode` and `weft.models.TableModel.fit`.

    Attributes:
        layout: of its tensors, bound.
        axis: whose positions were encoded, such as "rows".
        lengths: global lengths of the axes. That of one that ranks split and no block attends, such
            as a batch, is here where the call had it, or once `to` asked the ranks.
        tensors: this rank's parts by name: `block.1.key`, `block.1.value`, and those of the
            model's head.
        model: digest of the model file and the weights that made it.

    >>> import weft
    >>> model = weft.compose("tabular")
    >>> cache = model.fit(torch.zeros(1, 20, 4))        # batch, rows, 3 features and the class
    >>> cache.lengths["rows"], sorted(cache.tensors)[:2]
    (20, ['block.1.key', 'block.1.value'])
    >>> cache.nbytes == cache.bytes_per_rank[0]
    True
    """

    layout: Layout
    axis: str
    lengths: Mapping[str, int]
    tensors: Mapping[str, CachedTensor] = field(repr=False)
    model: str

    def keys_values(self, block: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a block as `weft.attention` takes them: (b, kv heads, n, head dim).

        Args:
            block: its number in the model's `spec.blocks`.
        """
        k, v = (self.tensors[f"block.{block}.{label}"].local for label in ("key", "value"))
        return _sequences(k), _sequences(v)

    def only(self, axis: str, position: int) -> KeyValueCache:
        """The keys and values of one position of an axis that no rank splits.

        Args:
            axis: another than the encoded one.
            position: along it.

        >>> import weft
        >>> cache = weft.compose("tabular").fit(torch.zeros(1, 20, 4))
        >>> cache.only("features", 3).keys_values(1)[0].shape    # batch, heads, rows, head dim
        torch.Size([1, 4, 20, 24])
        """
        narrowed = {
            name: CachedTensor(kept.local.narrow(kept.axes.index(axis), position, 1), kept.axes)
            for name, kept in self.tensors.items()
            if axis in kept.axes
        }
        lengths = {**self.lengths, axis: 1}
        return dataclasses.replace(self, lengths=lengths, tensors={**self.tensors, **narrowed})

    def check_fit(
        self, spec: ModelSpec, layout: Layout, shape: Sequence[int], lengths: Mapping[str, int]
    ) -> None:
        """Refuses a model, a layout or a tensor that this cache does not belong to.

        Args:
            spec: the model file.
            layout: of the model.
            shape: of the model's activations, local.
            lengths: global lengths of its axes; of others, this rank's parts are compared.

        Raises:
            DeclarationError: another model or layout.
            ShapeError: an axis that is not the encoded one has another length.
        """
        if self.model[:16] != spec_digest(spec):
            raise DeclarationError(f"the cache was made by another model than {spec.name!r}")
        if (self.layout.unbound, self.layout.rank) != (layout.unbound, layout.rank):
            raise DeclarationError(
                f"the cache is sharded on layout {self.layout.name!r}, the model on"
                f" {layout.name!r}; cache.to(model.layout) takes it there"
            )
        held = self._held()
        for axis, here in zip(spec.axes[:-1], shape):
            found, wanted, where = lengths.get(axis), self.lengths.get(axis), ""
            if found is None or wanted is None:
                found, wanted = here, held[axis]
                where = " on this rank" if layout.size(axis) > 1 else ""
            if axis != self.axis and found != wanted:
                raise ShapeError(f"axis {axis!r} is {found} long{where}, and {wanted} in the cache")

    # -- how much ----------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(kept.local.nbytes for kept in self.tensors.values())

    @property
    def bytes_per_rank(self) -> tuple[int, ...]:
        """Bytes that every rank holds, in rank order, as the layout and the lengths say.

        Raises:
            ShapeError: `lengths` lacks one.
        """
        unknown = [axis for axis in self._held() if axis not in self.lengths]
        if unknown:
            raise ShapeError(
                f"this rank does not know how long axis {unknown[0]!r} is on all; give its length"
                f" where the cache is made, lengths={{{unknown[0]!r}: ...}}, or ask for nbytes"
            )
        ranks = range(self.layout.world_size)
        return tuple(
            sum(self._bytes(kept, rank) for kept in self.tensors.values()) for rank in ranks
        )

    def _bytes(self, kept: CachedTensor, rank: int) -> int:
        placed, dims, lengths = self._placed(kept, self.layout)
        sizes = list(kept.local.shape)
        for i, dim in enumerate(dims):
            sizes[dim] = placed.local_length(i, lengths[i], rank)
        return math.prod(sizes) * kept.local.dtype.itemsize

    # -- elsewhere ---------------------------------------------------------------------------------

    def to(self, layout: Layout) -> KeyValueCache:
        """The same cache on another layout on the same ranks; all of them call this.

        Messages travel along this layout's mesh dims, and `weft.traffic` counts them as
        "redistribute".

        Args:
            layout: bound on these ranks, or declared for as many.

        Raises:
            DeclarationError: other ranks, or a layout that does not know the axis.
            ShapeError: on every rank, if the ranks' parts do not form one tensor: tables of other
                rows or columns, or a batch that is not split into DTensor's chunks.
        """
        if layout.transport is None:
            layout = bind_on_same_ranks(self.layout, layout)
        if (layout.world_size, layout.rank) != (self.layout.world_size, self.layout.rank):
            raise DeclarationError(
                f"the cache is sharded over {self.layout.world_size} ranks, and layout"
                f" {layout.name!r} has {layout.world_size} or another order of them; encode the"
                " rows there"
            )
        self._ask_lengths()
        moved = {name: self._moved(kept, layout) for name, kept in self.tensors.items()}
        return dataclasses.replace(self, layout=layout, tensors=moved)

    def _ask_lengths(self) -> None:
        """Learns the lengths that this rank lacks, once; all ranks call this."""
        here = self._held()
        if here.keys() <= self.lengths.keys():
            return
        try:
            whole = gathered_lengths(self.layout, here, self.lengths)
        except ShapeError as error:
            raise ShapeError(
                f"{error}\nthe parts on these ranks do not form one tensor: the cache can be used"
                " for prediction but not moved"
            ) from None
        object.__setattr__(self, "lengths", whole)

    def _held(self) -> dict[str, int]:
        """Number of positions of each axis on this rank; of the encoded one, at rest."""
        kept = next(kept for name, kept in self.tensors.items() if name.startswith("block."))
        here = zip(kept.axes, kept.local.shape)
        return {axis: n for axis, n in here if axis not in (HEADS, None)}

    def _moved(self, kept: CachedTensor, layout: Layout) -> CachedTensor:
        before, dims, lengths = self._placed(kept, self.layout)
        after, _, _ = self._placed(kept, layout)
        if _alike(before, after, lengths):
            return kept
        plan = plan_redistribution(before, after, lengths, self.layout.rank)
        return CachedTensor(fetch(kept.local, dims, plan, self.layout.bound), kept.axes)

    def _placed(
        self, kept: CachedTensor, layout: Layout
    ) -> tuple[Placed, tuple[int, ...], tuple[int, ...]]:
        """The placement of a tensor on a layout, the dims that it places, and their lengths."""
        named = [(i, axis) for i, axis in enumerate(kept.axes) if axis is not None]
        lengths = tuple(  # blocks may differ in their heads
            kept.local.shape[i] * self.layout.size(HEADS) if axis == HEADS else self.lengths[axis]
            for i, axis in named
        )
        axes = tuple(axis for _, axis in named)
        return placed(layout, axes, self.axis), tuple(i for i, _ in named), lengths


class CacheRecording:
    """A cache that is being made: it takes the keys and values of blocks as they run.

    `axes` are those of the model's activations, the embedding last; `axis` is encoded, by `blocks`,
    in ascending order. `lengths` are global, as far as they are known; that of `axis` is.
    """

    def __init__(
        self,
        layout: Layout,
        axes: Sequence[str],
        axis: str,
        blocks: Sequence[int],
        lengths: Mapping[str, int],
    ) -> None:
        self.layout, self.axes, self.axis, self.blocks = layout, tuple(axes), axis, tuple(blocks)
        self.lengths = dict(lengths)
        self.tensors: dict[str, CachedTensor] = {}

    def keep(self, name: str, t: Tensor, axes: Sequence[str | None]) -> None:
        """Keeps a tensor of the model's head, whose dims are these axes."""
        self.tensors[name] = CachedTensor(t.detach().contiguous(), tuple(axes))

    def take(
        self, number: int, k: Tensor, v: Tensor, shared: Sequence[str], x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keeps keys and values (b g m d) of a block, whose b are the `shared` axes of x.

        Returns them as the layout has keys at rest, moved where x is placed otherwise.
        """
        axes = (*shared, HEADS, self.axis)
        sizes = [x.shape[self.axes.index(a)] for a in shared]
        for label, t in (("key", k), ("value", v)):
            t = self._at_rest(t.reshape(*sizes, *t.shape[1:]), axes)
            self.keep(f"block.{number}.{label}", t, (*axes, None))
        k, v = (self.tensors[f"block.{number}.{label}"].local for label in ("key", "value"))
        return _sequences(k), _sequences(v)

    def _at_rest(self, t: Tensor, axes: Sequence[str]) -> Tensor:
        before, after = placed(self.layout, axes), placed(self.layout, axes, self.axis)
        if before == after:
            return t
        even = {a: n * self.layout.size(a) for a, n in zip(axes, t.shape)}  # the same in both
        lengths = tuple(self.lengths.get(a, even[a]) for a in axes)
        plan = plan_redistribution(before, after, lengths, self.layout.rank)
        return fetch(t, tuple(range(len(axes))), plan, self.layout.bound)

    def finished(self, model: Model) -> KeyValueCache:
        """The cache, once the model has run."""
        lengths = {a: n for a, n in self.lengths.items() if a != self.axes[-1]}
        return KeyValueCache(
            self.layout, self.axis, lengths, self.tensors, model_fingerprint(model)
        )


def _sequences(t: Tensor) -> Tensor:
    """All axes but heads, positions and head dim as one batch."""
    return t.reshape(math.prod(t.shape[:-3]), *t.shape[-3:])


def placed(layout: Layout, axes: Sequence[str], keys: str | None = None) -> Placed:
    """The placement of a tensor of these axes; the axis `keys` as keys at rest."""
    dims = {a: layout.key_dims(a) if a == keys else layout.shard_dims(a) for a in axes}
    splits = tuple((a, dims[a], layout.order.get(a, "contiguous")) for a in axes)
    return Placed(tuple(layout.mesh.items()), splits)


def _alike(before: Placed, after: Placed, lengths: Sequence[int]) -> bool:
    """True if every rank holds the same positions either way, on meshes of any names."""

    def held(there: Placed, rank: int) -> list:
        coords = there.coords(rank)
        return [there.chunks(a, n)[there.chunk(a, coords)] for a, n in enumerate(lengths)]

    return all(held(before, rank) == held(after, rank) for rank in range(before.ranks))


def model_fingerprint(model: Model) -> str:
    """Digests of a model's file and of its weights, equal on all layouts; all ranks call this.

    >>> import weft
    >>> one, other = weft.compose("tabular"), weft.compose("tabular", seed=1)
    >>> texts = model_fingerprint(one), model_fingerprint(other)
    >>> texts[0] == texts[1], texts[0][:16] == texts[1][:16]
    (False, True)
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, part in shards(model, None, model.layout).items():
        tensor = gathered(part, model.layout)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return f"{spec_digest(model.spec)}{digest.hexdigest()}"


def spec_digest(spec: ModelSpec) -> str:
    """16 hex digits of the fields of a model file that define its function."""
    text = spec.model_dump_json(
        include={"head", "axes", "sizes", "context", "norm", "repeat", "block"}
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
