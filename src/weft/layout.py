"""A layout that is used: bound to ranks, it cuts and joins tensors and sums over ranks."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .comm import Alone, ProcessTransport, Transport, collectives, gradients
from .comm.world import check_inside_node, compare_over_world, init_process_group, world_mesh
from .declare.layout import LayoutDeclaration
from .declare.layout_file import HEADS
from .errors import DeclarationError, ShapeError, did_you_mean
from .plan import order as sequence
from .private import is_fake
from .run.redistribute import redistribute

if TYPE_CHECKING:
    from .inspect.call_plan import CallPlan


@dataclass(frozen=True, eq=False)
class Layout(LayoutDeclaration):
    """How a model's tensors lie on a mesh and how its axes are attended: declare, bind, use.

        Layout.load, .parse, .from_dict      a declaration, immutable; equal text is an equal layout
        layout.build(), layout.bind(mesh)    a new layout, bound to this process's rank of a mesh
        bound.shard, .gather, .mean, ...     what takes part in communication

    `Layout.single()` has no mesh and is bound already. `weft.on_threads` binds ranks to threads.

    Attributes:
        name: what the layout was loaded as.
        mesh: mesh dim -> size, outermost first.
        sharding: axis -> the mesh dims that split it at rest.
        replicate: mesh dims that nothing is split over.
        order: axis -> the order of its tokens, where that is not contiguous.
        attend: attended axes -> the strategies on them, bound to mesh dims.
        about: what the file says about itself.
        source: where it was declared, for messages.
        declaration: the content of the layout file.
        inside_node: mesh dims whose ranks must share a node.
        rates: measured speeds of compute and links.
        transport: moves bytes between ranks; None until the layout is bound.
        device_mesh: torch's mesh, where ranks are processes.

    >>> layout = Layout.load("ring-4")
    >>> dict(layout.mesh), layout.shard_dims("tokens"), layout.is_bound
    ({'ring': 4}, ('ring',), False)
    """

    transport: Transport | None = field(default=None, repr=False)
    device_mesh: DeviceMesh | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.mesh and self.transport is None:
            object.__setattr__(self, "transport", Alone())

    def __eq__(self, other: object) -> bool:
        same = LayoutDeclaration.__eq__(self, other)
        return same and getattr(other, "transport", None) is self.transport

    def __hash__(self) -> int:
        return LayoutDeclaration.__hash__(self)

    def __deepcopy__(self, memo: dict) -> Layout:
        return self  # immutable, and process groups cannot be copied

    def __getstate__(self) -> dict[str, Any]:
        """A pickled layout is a declaration: process groups stay in their process."""
        state = {k: v for k, v in vars(self).items() if k not in ("unbound", "_calls")}
        return state | {"transport": None, "device_mesh": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    # -- asking ------------------------------------------------------------------------------

    def plan(
        self,
        axis: str | Sequence[str],
        *,
        length: int | tuple[int, int] | Mapping[str, int | tuple[int, int]],
        heads: int,
        **options: Any,
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

    # -- binding -------------------------------------------------------------------------------

    def build(self, device_type: str | None = None, timeout: float = 300.0) -> Layout:
        """This layout bound to the whole world: makes the `DeviceMesh` and takes this rank's place.

        All ranks call it; it checks that they have the same layout. The process group is joined
        first if nobody has done so.

        Args:
            device_type: "cpu" (gloo) or "cuda" (NCCL); default cuda where there is one.
            timeout: seconds that any wait for another rank may last.

        Raises:
            DeclarationError: on every rank, if the mesh is not the world's size, or a mesh dim of
                `inside_node` spans nodes.
            ShapeError: on every rank, if layouts differ.
        """
        if not self.mesh:
            return self
        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        limit = datetime.timedelta(seconds=timeout)
        init_process_group(device_type, limit)
        resolved = self._resolved_alike(timeout)
        return resolved._bound_to(world_mesh(device_type, resolved.mesh, limit), timeout)

    def _resolved_alike(self, timeout: float) -> Layout:
        """This layout on the world's ranks, after a check that all have the same one.

        It comes before the mesh is made: ranks with other meshes would wait for each other.
        """
        try:
            resolved, wrong = self.resolve(dist.get_world_size()), None
        except DeclarationError as error:
            resolved, wrong = self, error
        if not is_fake(dist.group.WORLD):
            compare_over_world(
                "the layout",
                f"refused: {wrong}" if wrong else resolved.fingerprint,
                datetime.timedelta(seconds=timeout),
            )
        if wrong is not None:
            raise wrong
        return resolved

    def bind(
        self,
        device_mesh: DeviceMesh,
        rename: Mapping[str, str] | None = None,
        timeout: float = 300.0,
    ) -> Layout:
        """This layout bound to a mesh of yours, or to a slice of it; nobody else takes part.

        Mesh dims go by name. Dims of `device_mesh` that the layout does not name (pipeline stages,
        replicas, experts) keep this rank's coordinate, and the ranks there know nothing of it.

            mesh ("pp", "dp", "cp") of 2 x 2 x 2     layout "tokens: ring=2", rename {"ring": "cp"}
            binds 4 pairs of ranks, each a ring of its own; pairs need not bind at the same time

        Args:
            device_mesh: has a dim for every mesh dim of the layout, in the layout's order.
            rename: the layout's name of a mesh dim -> the mesh's name of it.
            timeout: seconds that any wait for another rank may last.

        Raises:
            DeclarationError: a mesh dim is missing or has another size.
            ShapeError: on every rank of the slice, if their layouts differ.
        """
        if not self.mesh:
            return self
        if not isinstance(device_mesh, DeviceMesh):
            raise DeclarationError(
                f"{self.source}: bind takes a DeviceMesh, found a {type(device_mesh).__name__}; "
                "DeviceMesh.from_group makes one of a process group"
            )
        names = [dict(rename or {}).get(d, d) for d in self.mesh]
        self._check_rename(device_mesh, rename or {}, names)
        part = device_mesh[tuple(names)] if device_mesh.ndim > 1 else device_mesh
        sizes = dict(zip(self.mesh, (part.size(i) for i in range(len(names)))))
        for name, size in self.mesh.items():
            if size not in (-1, sizes[name]):
                raise DeclarationError(
                    f"{self.source}: mesh dim {name!r} has size {size}, but the device mesh has "
                    f"{sizes[name]} ranks along it; change the layout, or write -1 to take them all"
                )
        return replace(self, mesh=sizes)._bound_to(part, timeout)

    def _check_rename(self, device_mesh: DeviceMesh, rename: Mapping, names: list[str]) -> None:
        for name in rename:
            if name not in self.mesh:
                raise DeclarationError(
                    f"{self.source}: rename has {name!r}, which is no mesh dim of the layout"
                    f"{did_you_mean(name, self.mesh)}"
                )
        there = device_mesh.mesh_dim_names
        if not there:
            raise DeclarationError(
                "the device mesh has no dim names; make it with init_device_mesh(..., "
                f"mesh_dim_names={tuple(self.mesh)})"
            )
        for own, name in zip(self.mesh, names):
            if name not in there:
                raise DeclarationError(
                    f"{self.source}: mesh dim {own!r} is not among the device mesh's dims {there}"
                    f"{did_you_mean(name, there)}; rename={{{own!r}: ...}} says which it is"
                )
        if sorted(names, key=there.index) != names or len(set(names)) < len(names):
            raise DeclarationError(
                f"{self.source}: the layout's mesh dims {tuple(self.mesh)} are {tuple(names)} on "
                f"the device mesh, whose order is {there}; both must list them in one order"
            )

    def _bound_to(self, mesh: DeviceMesh, timeout: float) -> Layout:
        transport = ProcessTransport(
            mesh,
            tuple(self.mesh),
            datetime.timedelta(seconds=timeout),
            self.fingerprint,
            self.name,
        )
        check_inside_node(self.inside_node, transport.nodes, transport.sizes, self.source)
        return replace(self, device_mesh=mesh, transport=transport)

    def on(self, transport: Transport) -> Layout:
        """This layout bound to a transport, such as one rank of `weft.comm.run_threads`.

        Args:
            transport: has the layout's mesh.

        Raises:
            DeclarationError: it has another mesh.
        """
        if dict(self.mesh) != transport.sizes:
            raise DeclarationError(
                f"{self.source}: mesh {dict(self.mesh)} is not the transport's {transport.sizes}"
            )
        return replace(self, transport=transport)

    @property
    def is_bound(self) -> bool:
        """Whether this layout has a place on a mesh."""
        return self.transport is not None

    @functools.cached_property
    def unbound(self) -> LayoutDeclaration:
        """The declaration alone: what plans are made from."""
        names = (f.name for f in fields(LayoutDeclaration))
        return LayoutDeclaration(**{name: getattr(self, name) for name in names})

    @property
    def bound(self) -> Transport:
        """The transport, or `DeclarationError` if the layout is only declared."""
        if self.transport is None:
            raise DeclarationError(
                f"{self.source}: this layout is only declared; use what layout.build() or "
                "layout.bind(mesh) returns, on every rank"
            )
        return self.transport

    @property
    def rank(self) -> int:
        """This rank's number in the mesh."""
        return self.bound.rank

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate along every mesh dim."""
        return self.bound.coords

    # -- tensors -------------------------------------------------------------------------------

    def _parts(self, axis: str) -> tuple[int, ...]:
        return tuple(self.mesh[d] for d in self.shard_dims(axis))

    def spans(
        self, axis: str, length: int, coords: Mapping[str, int] | None = None
    ) -> sequence.Spans:
        """Global positions of a rank's chunk of an axis, as spans (see `weft.plan.order`).

        Args:
            axis: the axis.
            length: its global length.
            coords: of the rank, default this one's.
        """
        coords = self.coords if coords is None else coords
        index = 0
        for mesh_dim in self.shard_dims(axis):
            index = index * self.mesh[mesh_dim] + coords[mesh_dim]
        order = self.order.get(axis, "contiguous")
        return sequence.shard_spans(length, self._parts(axis), order)[index]

    def positions(self, axis: str, length: int, device: torch.device | str | None = None) -> Tensor:
        """Global positions of this rank's tokens, such as rotary embeddings need: (n_local,) int64.

        Args:
            axis: the axis.
            length: its global length.
            device: of the result, default the CPU.

        >>> Layout.single().positions("tokens", 3)
        tensor([0, 1, 2])
        """
        return sequence.positions(self.spans(axis, length), device)

    def local_length(self, axis: str, length: int) -> int:
        """How many tokens of an axis this rank holds.

        Args:
            axis: the axis.
            length: its global length.
        """
        return sequence.count(self.spans(axis, length))

    def shard(self, x: Tensor, dims: Mapping[str, int]) -> Tensor:
        """This rank's part of a tensor that every rank holds whole.

        Args:
            x: the whole tensor.
            dims: axis -> dim of x, for every axis that the layout splits.

        >>> Layout.single().shard(torch.arange(4), {"tokens": 0})
        tensor([0, 1, 2, 3])
        """
        self._check_axes(dims, x.dim())
        for axis, dim in dims.items():
            if self.shard_dims(axis):
                x = x.index_select(dim, self.positions(axis, x.shape[dim], x.device))
        return x

    def gather(self, x: Tensor, dims: Mapping[str, int]) -> Tensor:
        """The inverse of `shard`: the whole tensor on every rank, in global order.

        Differentiable for a loss of the whole tensor that every rank computes alike, as
        `DTensor.full_tensor()` is: each rank keeps its own chunk of the gradient, and nothing is
        sent. A loss that differs between ranks is computed of this rank's part, without gathering.
        To gather without a gradient, pass `x.detach()`.

        Args:
            x: this rank's part.
            dims: as for `shard`.

            before    rank 0: x0         rank 1: x1
            after     both:   [x0 | x1]
            backward  both:   [d0 | d1]   ->   rank 0: d0, rank 1: d1
        """
        self._check_axes(dims, x.dim())
        for axis, dim in dims.items():
            for mesh_dim in reversed(self.shard_dims(axis)):
                x = collectives.all_gather(x, dim % x.dim(), mesh_dim, self.bound)
            if self.shard_dims(axis):
                order = self.order.get(axis, "contiguous")
                index = sequence.gather_order(x.shape[dim], self._parts(axis), order)
                x = x.index_select(dim, index.to(x.device))
        return x

    def placements(self, dims: Mapping[str, int]) -> tuple[Placement, ...]:
        """DTensor placements of a tensor, per mesh dim.

        Args:
            dims: axis -> dim of the tensor.
        """
        self._check_axes(dims, None)
        split = {d: dims[axis] for axis in dims for d in self.shard_dims(axis)}
        return tuple(Shard(split[d]) if d in split else Replicate() for d in self.mesh)

    def distribute(self, x: Tensor, dims: Mapping[str, int]) -> DTensor:
        """A whole tensor as a DTensor that lies as this layout says, in its token order.

        Args:
            x: the whole tensor, the same on every rank.
            dims: as for `shard`.
        """
        if self.device_mesh is None:
            raise DeclarationError(
                f"{self.source}: DTensors need a layout bound to processes: layout.build() or bind"
            )
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
        return redistribute(x, self, other, (self.bound, other.bound), dims, lengths)

    def _check_axes(self, dims: Mapping[str, int], ndim: int | None) -> None:
        for axis, dim in dims.items():
            if ndim is not None and not -ndim <= dim < ndim:
                raise ShapeError(f"axis {axis!r} is given as dim {dim} of a {ndim}-d tensor")

    # -- sums over ranks -----------------------------------------------------------------------

    def mean(self, local_sum: Tensor, local_count: Tensor | int) -> Tensor:
        """A mean over the tokens of every rank: sum of sums / sum of counts, equal on all ranks.

        Backward gives each rank the gradient of its own tokens. So `sync_gradients`, which is a
        sum, completes parameter gradients whatever number of tokens each rank holds.

        Args:
            local_sum: of any shape: several sums over the same tokens.
            local_count: how many tokens of this rank they are sums of.

        >>> Layout.single().mean(torch.tensor([6.0, 9.0]), 3)
        tensor([2., 3.])
        """
        # fp64 on the way: counts stay exact whatever the dtype of the loss.
        count = torch.as_tensor(local_count, device=local_sum.device).detach()
        both = torch.cat([local_sum.double().reshape(-1), count.double().reshape(1)])
        total = collectives.sum_forward(both, self.data_dims, self.bound)
        return (total[:-1] / total[-1]).reshape(local_sum.shape).to(local_sum.dtype)

    def sum(self, x: Tensor, axis: str) -> Tensor:
        """The sum of a tensor over the ranks that split an axis; gradients are summed likewise.

        Args:
            x: this rank's summand.
            axis: the axis.
        """
        return collectives.sum_both(x, self.shard_dims(axis), self.bound)

    def enter_heads(self, x: Tensor) -> Tensor:
        """Mark the input of head-parallel projections: identity forward, gradient sum backward.

        Args:
            x: the input, whole on every rank that splits the heads.
        """
        return collectives.sum_backward(x, self.shard_dims(HEADS), self.bound)

    def sum_heads(self, x: Tensor) -> Tensor:
        """Complete head-parallel projections: sum forward, identity backward.

        Args:
            x: what the heads of this rank contribute.
        """
        return collectives.sum_forward(x, self.shard_dims(HEADS), self.bound)

    def sync_gradients(self, module: torch.nn.Module) -> None:
        """Sum parameter gradients over the mesh dims that split data, in one flat message a dtype.

        Call it on every rank once per optimizer step, after the last backward pass. A gradient
        that only some ranks have counts as zero on the others; one that no rank has stays `None`.

        Args:
            module: its parameters lie whole on the ranks that split data.

        Raises:
            UnsupportedError: gradients that `fully_shard`, DDP or an earlier call reduced.
            ShapeError: on every rank, the first time: ranks have different weights.
        """
        alike = [d for d in self.mesh if d not in self.shard_dims(HEADS)]
        gradients.sync(module, self.data_dims, alike, self.bound)
