"""A layout: a mesh, how activations lie on it, and the strategies stacked on each attended axis."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .comm import Alone, ProcessTransport, Transport, collectives, gradients
from .comm.world import check_inside_node, compare_layouts, init_process_group
from .declare import catalog
from .declare import one_line as parse
from .declare.explain import explain_validation
from .declare.layout_file import HEADS, Binding, LayoutFile, bind, checked
from .declare.placements import BATCH, entry_placement
from .declare.strategy import Role, Rule
from .errors import DeclarationError, ShapeError, did_you_mean, shown
from .plan import order as sequence
from .run.redistribute import redistribute

if TYPE_CHECKING:
    from .inspect.call_plan import CallPlan

_BATCH_RULE = Rule.parse("S(batch)", "S(batch)", "S(batch)")
_HEAD_RULE = Rule.parse("S(head)", "S(head)", "S(head)")
_NONE_RULE = Rule.parse("R", "R", "R")


@dataclass(frozen=True, eq=False)
class Layout:
    """How a model's tensors lie on a mesh and how its axes are attended; load, build, use.

    >>> layout = Layout.load("ring-4")
    >>> dict(layout.mesh), layout.shard_dims("tokens")
    ({'ring': 4}, ('ring',))
    """

    name: str
    mesh: Mapping[str, int]
    sharding: Mapping[str, tuple[str, ...]]
    replicate: tuple[str, ...] = ()
    order: Mapping[str, str] = field(default_factory=dict)
    attend: Mapping[str, tuple[Binding, ...]] = field(default_factory=dict)
    about: str = ""
    source: str = ""
    declaration: Mapping[str, Any] = field(default_factory=dict, repr=False)
    inside_node: tuple[str, ...] = ()
    rates: Mapping[str, Any] = field(default_factory=dict)
    transport: Transport | None = field(default=None, repr=False)
    device_mesh: DeviceMesh | None = field(default=None, repr=False)

    # -- declaring -----------------------------------------------------------------------------

    @classmethod
    def load(cls, name_or_path: str | Path) -> Layout:
        """Read `layouts/NAME.toml`, or the file at a path."""
        data, source = catalog.read("layouts", name_or_path)
        return cls.from_dict(data, name=Path(source).stem, source=source)

    @classmethod
    def parse(cls, line: str) -> Layout:
        """A layout on one line; `to_toml` shows what it stands for.

        `weft.declare.one_line` has the grammar.

        Raises `DeclarationError` that shows the grammar.

        >>> Layout.parse("tokens(zigzag): ulysses=2 x ring=4").mesh
        {'ulysses': 2, 'ring': 4}
        """
        return cls.from_dict(parse.declaration(line), name=line, source=f"layout {shown(line)}")

    @classmethod
    def single(cls) -> Layout:
        """The layout of one device: no mesh, every axis whole."""
        return cls.from_dict({}, name="single")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], name: str = "unnamed", source: str = "") -> Layout:
        """Validate a layout. Raises `DeclarationError` naming file, key, value and the fix."""
        source = source or f"layout {name}"
        try:
            parsed = LayoutFile.model_validate(dict(data))
        except ValidationError as error:
            raise DeclarationError(explain_validation(error, source, LayoutFile)) from None
        try:
            return checked(cls._assemble(parsed, name, source, dict(data)))
        except DeclarationError as error:
            raise DeclarationError(f"{source}: {error}") from None

    @classmethod
    def _assemble(cls, parsed: LayoutFile, name: str, source: str, data: dict) -> Layout:
        attend = {
            axis: tuple(bind(axis, entry, parsed.mesh) for entry in entries)
            for axis, entries in parsed.attend.items()
        }
        layout = cls(
            name,
            dict(parsed.mesh),
            dict(parsed.shard),
            parsed.replicate,
            dict(parsed.order),
            attend,
            parsed.about,
            source,
            data,
            parsed.inside_node,
            parsed.rates.model_dump(exclude_none=True),
        )
        return layout if parsed.mesh else replace(layout, transport=Alone())

    def fingerprint(self) -> str:
        """Text that is equal for equal declarations, whatever their name or comments."""
        return json.dumps(
            {k: v for k, v in self.declaration.items() if k != "about"}, sort_keys=True
        )

    def to_toml(self) -> str:
        """This layout as the content of a layout file."""
        return parse.to_toml(self.declaration)

    # -- asking --------------------------------------------------------------------------------

    def shard_dims(self, axis: str) -> tuple[str, ...]:
        """Mesh dims that split an axis at rest, outermost first."""
        return tuple(self.sharding.get(axis, ()))

    def size(self, axis: str) -> int:
        """Into how many chunks an axis is split."""
        return math.prod(self.mesh[d] for d in self.shard_dims(axis))

    @property
    def data_dims(self) -> tuple[str, ...]:
        """Mesh dims that split data (any axis but heads): parameter gradients are summed there."""
        data = {d for axis, dims in self.sharding.items() if axis != HEADS for d in dims}
        return tuple(d for d in self.mesh if d in data)

    def rules(self, axes: str | Sequence[str]) -> dict[str, Rule]:
        """The rule of every mesh dim when the given axis (or axes jointly) is attended.

        Dims that no strategy claims cut the batch, the heads, or nothing, as they lie.
        Raises `DeclarationError` for an axis this layout does not attend.
        """
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        claimed: dict[str, Rule] = {}
        for binding in self._bindings(axes):
            claimed |= binding.rules
        implied = {d: self._implied(d) for d in self.mesh}
        return {d: claimed.get(d, implied[d]) for d in self.mesh}

    def moves(self, axes: str | Sequence[str]) -> bool:
        """Whether attention over the axes needs any communication."""
        return any(
            rule.role in (Role.QUERY, Role.KEY) or rule.query.rest != rule.query.compute
            for mesh_dim, rule in self.rules(axes).items()
            if self.mesh[mesh_dim] != 1
        )

    def exchanges(self, axes: str | Sequence[str]) -> bool:
        """Whether tensors trade one split for another before and after the tile program."""
        arrows = [
            (arrow, self.mesh[mesh_dim])
            for mesh_dim, rule in self.rules(axes).items()
            for arrow in (rule.query, rule.key)
        ]
        return any(a.rest != entry_placement(a) and size > 1 for a, size in arrows)

    def batch_dims(self, axes: str | Sequence[str]) -> tuple[str, ...]:
        """Mesh dims that split the batch at rest when the axes are attended."""
        rules = self.rules(axes)
        return tuple(d for d, rule in rules.items() if rule.query.rest == Shard(BATCH))

    def _bindings(self, axes: tuple[str, ...]) -> tuple[Binding, ...]:
        if len(set(axes)) < len(axes):
            raise DeclarationError(f"{self.source}: axes {axes}: an axis is named twice")
        joint = "+".join(axes)
        if joint in self.attend:
            return self.attend[joint]
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

    def plan(
        self,
        axis: str | Sequence[str],
        *,
        length: int | tuple[int, int] | Mapping[str, int | tuple[int, int]],
        heads: int,
        **options,
    ) -> CallPlan:
        """What an attention call would move, hold and compute, on one rank; nothing need be built.

        Sizes are those of all ranks together.

        Args:
            axis: the attended axis, or several attended jointly.
            length: the number of tokens, or (queries, keys); per axis where there are several.
            heads: query heads.
            **options: `kv_heads` (default: as many), `head_dim` (64), `value_dim` (as `head_dim`),
                `batch` (1 per rank that the batch is split over), `mask`, `dtype` (float32),
                `device` whose kernels to plan with ("cpu"), and `rank` (0).

        Returns:
            A `CallPlan` with `traffic`, `scores`, `bound` and `program` of both passes,
            `timeline()`, `score_matrix()`, and the plans of all `ranks()`.

        Raises:
            DeclarationError: if the layout does not attend the axis, or has a mesh size of -1.
            ShapeError: if the mask does not fit the lengths, or heads cannot be shared.
            UnsupportedError: if keys are routed by learned weights.

        >>> plan = Layout.load("tile-2x2").plan("tokens", length=4096, heads=8)
        >>> plan.traffic.forward.by_mesh_dim()
        {'col': 4227072, 'row': 4194304}
        """
        from .inspect.call_plan import plan_call  # it draws on all that plans are made of

        return plan_call(self, axis, length=length, heads=heads, **options)

    # -- building ------------------------------------------------------------------------------

    def resolve(self, world_size: int) -> Layout:
        """The same layout with a mesh size of -1 replaced by what `world_size` leaves."""
        known = math.prod(size for size in self.mesh.values() if size != -1)
        if -1 not in self.mesh.values():
            if known != world_size:
                raise DeclarationError(
                    f"{self.source}: mesh {dict(self.mesh)} has {known} ranks, but there are "
                    f"{world_size}; start {known} ranks or set one mesh size to -1"
                )
            return self
        if world_size % known:
            raise DeclarationError(
                f"{self.source}: {world_size} ranks cannot be divided by the {known} of the fixed "
                f"mesh dims in {dict(self.mesh)}"
            )
        sizes = {d: world_size // known if n == -1 else n for d, n in self.mesh.items()}
        return replace(self, mesh=sizes)

    def build(self, device_type: str | None = None, timeout: float = 300.0) -> DeviceMesh | None:
        """Make the `DeviceMesh`, bind this layout to it, check that all ranks agree on the layout.

        device_type: "cpu" (gloo) or "cuda" (NCCL); default cuda where there is one.
        timeout: seconds that any wait for another rank may last.
        Raises `DeclarationError` if the mesh is not the world's size or a mesh dim of
        `inside_node` spans nodes, `ShapeError` if layouts differ, on every rank. Without a mesh
        there is nothing to build and None is returned.
        """
        if not self.mesh:
            return None
        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        limit = datetime.timedelta(seconds=timeout)
        init_process_group(device_type, limit)
        resolved = self.resolve(dist.get_world_size())
        names, sizes = tuple(resolved.mesh), tuple(resolved.mesh.values())
        compare_layouts(self.fingerprint())
        check_inside_node(self.inside_node, resolved.mesh, self.source)
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        object.__setattr__(self, "mesh", resolved.mesh)
        object.__setattr__(self, "device_mesh", mesh)
        object.__setattr__(self, "transport", ProcessTransport(mesh, limit))
        return mesh

    def on(self, transport: Transport) -> Layout:
        """This layout bound to a transport, such as one rank of `weft.comm.run_threads`."""
        if dict(self.mesh) != transport.sizes:
            raise DeclarationError(
                f"{self.source}: mesh {dict(self.mesh)} is not the transport's {transport.sizes}"
            )
        return replace(self, transport=transport)

    @property
    def bound(self) -> Transport:
        """The transport, or `DeclarationError` if the layout was not built yet."""
        if self.transport is None:
            raise DeclarationError(f"{self.source}: call layout.build() first, on every rank")
        return self.transport

    @property
    def rank(self) -> int:
        """This rank's number in the mesh."""
        return self.bound.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.mesh.values())

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate along every mesh dim."""
        return self.bound.coords

    # -- tensors -------------------------------------------------------------------------------

    def _parts(self, axis: str) -> tuple[int, ...]:
        return tuple(self.mesh[d] for d in self.shard_dims(axis))

    def spans(self, axis: str, length: int, coords: Mapping[str, int] | None = None):
        """Global positions of a rank's chunk of an axis, as spans (see `weft.plan.order`)."""
        coords = self.coords if coords is None else coords
        index = 0
        for mesh_dim in self.shard_dims(axis):
            index = index * self.mesh[mesh_dim] + coords[mesh_dim]
        order = self.order.get(axis, "contiguous")
        return sequence.shard_spans(length, self._parts(axis), order)[index]

    def positions(self, axis: str, length: int, device: torch.device | str | None = None) -> Tensor:
        """Global positions of the local tokens of an axis of global `length`: (n_local,) int64."""
        return sequence.positions(self.spans(axis, length), device)

    def local_length(self, axis: str, length: int) -> int:
        """How many of an axis's `length` tokens lie on this rank."""
        return sequence.count(self.spans(axis, length))

    def shard(self, x: Tensor, dims: Mapping[str, int]) -> Tensor:
        """This rank's part of a tensor that every rank holds whole; `dims` maps axis -> dim.

        >>> Layout.single().shard(torch.arange(4), {"tokens": 0})
        tensor([0, 1, 2, 3])
        """
        self._check_axes(dims, x.dim())
        for axis, dim in dims.items():
            if self.shard_dims(axis):
                x = x.index_select(dim, self.positions(axis, x.shape[dim], x.device))
        return x

    def gather(self, x: Tensor, dims: Mapping[str, int]) -> Tensor:
        """The inverse of `shard`: the whole tensor on every rank, in global order (no gradient)."""
        self._check_axes(dims, x.dim())
        x = x.detach()
        for axis, dim in dims.items():
            for mesh_dim in reversed(self.shard_dims(axis)):
                x = collectives.all_gather(x, dim % x.dim(), mesh_dim, self.bound)
            if self.shard_dims(axis):
                order = self.order.get(axis, "contiguous")
                index = sequence.gather_order(x.shape[dim], self._parts(axis), order)
                x = x.index_select(dim, index.to(x.device))
        return x

    def placements(self, dims: Mapping[str, int]) -> tuple[Placement, ...]:
        """DTensor placements of a tensor whose axes lie at the given dims, per mesh dim."""
        self._check_axes(dims, None)
        split = {d: dims[axis] for axis in dims for d in self.shard_dims(axis)}
        return tuple(Shard(split[d]) if d in split else Replicate() for d in self.mesh)

    def distribute(self, x: Tensor, dims: Mapping[str, int]) -> DTensor:
        """A whole tensor as a DTensor that lies as this layout says (in its token order)."""
        if self.device_mesh is None:
            raise DeclarationError(f"{self.source}: DTensors need layout.build() on processes")
        dims = {axis: dim % x.dim() for axis, dim in dims.items()}
        return DTensor.from_local(
            self.shard(x, dims).contiguous(),
            self.device_mesh,
            self.placements(dims),
            run_check=False,
            shape=x.shape,
            stride=x.contiguous().stride(),
        )

    def redistribute(
        self,
        x: Tensor,
        other: Layout,
        dims: Mapping[str, int | None],
        lengths: Mapping[str, int] | None = None,
    ) -> Tensor:
        """A local tensor that lies as this layout says, as it lies on `other`, on the same ranks.

        The meshes may differ. Messages travel along this layout's mesh dims, and `weft.traffic`
        counts them as "redistribute". Differentiable: the gradient goes the same way back.

            rows over 2 ranks                        columns over 2 ranks
            rank 0: rows 0-1, all columns     ->     rank 0: all rows, columns 0-1
            rank 1: rows 2-3, all columns            rank 1: all rows, columns 2-3

        Args:
            x: this rank's part.
            other: bound on the same ranks as this layout.
            dims: axis -> dim of x, for every axis that either layout splits; None if x lacks it.
            lengths: global lengths, needed where the mesh does not divide them.

        Raises:
            DeclarationError: other ranks, or a split axis that `dims` does not name.
            ShapeError: x does not hold this rank's chunks of `lengths`.

        >>> x = torch.zeros(2, 3)
        >>> Layout.single().redistribute(x, Layout.single(), {"rows": 0, "columns": 1}).shape
        torch.Size([2, 3])
        """
        return redistribute(x, self, other, dims, lengths)

    def _check_axes(self, dims: Mapping[str, int], ndim: int | None) -> None:
        for axis, dim in dims.items():
            if ndim is not None and not -ndim <= dim < ndim:
                raise ShapeError(f"axis {axis!r} is said to be dim {dim} of a {ndim}-d tensor")

    # -- sums over ranks -----------------------------------------------------------------------

    def mean(self, local_sum: Tensor, local_count: Tensor | int) -> Tensor:
        """A mean over the tokens of every rank: sum of sums / sum of counts, equal on all ranks.

        `local_sum` may have any shape (several sums over the same tokens). Backward gives each
        rank the gradient of its own tokens, so that `sync_gradients` (a sum) completes parameter
        gradients whatever number of tokens each rank holds.

        >>> Layout.single().mean(torch.tensor([6.0, 9.0]), 3)
        tensor([2., 3.])
        """
        # fp64 on the way: counts stay exact whatever the dtype of the loss.
        count = torch.as_tensor(local_count, device=local_sum.device).detach()
        both = torch.cat([local_sum.double().reshape(-1), count.double().reshape(1)])
        total = collectives.sum_forward(both, self.data_dims, self.bound)
        return (total[:-1] / total[-1]).reshape(local_sum.shape).to(local_sum.dtype)

    def sum(self, x: Tensor, axis: str) -> Tensor:
        """The sum of `x` over the ranks that split `axis`; gradients are summed back likewise."""
        return collectives.sum_both(x, self.shard_dims(axis), self.bound)

    def enter_heads(self, x: Tensor) -> Tensor:
        """Mark the input of head-parallel projections: identity forward, gradient sum backward."""
        return collectives.sum_backward(x, self.shard_dims(HEADS), self.bound)

    def sum_heads(self, x: Tensor) -> Tensor:
        """Complete head-parallel projections: sum forward, identity backward."""
        return collectives.sum_forward(x, self.shard_dims(HEADS), self.bound)

    def sync_gradients(self, module: torch.nn.Module) -> None:
        """Sum parameter gradients over the mesh dims that split data, in one flat message a dtype.

        Call it on every rank once per optimizer step, after the last backward pass. A gradient
        that only some ranks have counts as zero on the others; one that no rank has stays `None`.

        Raises:
            UnsupportedError: gradients that `fully_shard`, DDP or an earlier call reduced.
            ShapeError: on every rank, the first time: ranks have different weights.
        """
        alike = [d for d in self.mesh if d not in self.shard_dims(HEADS)]
        gradients.sync(module, self.data_dims, alike, self.bound)
