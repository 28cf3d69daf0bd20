"""Layouts, as users know them: declared, asked for a plan, and bound to the ranks of a mesh."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._torch import is_fake
from .comm import ProcessTransport, Transport
from .comm.world import check_inside_node, compare_over_world, init_process_group, world_mesh
from .declare.orders import TokenOrder
from .errors import DeclarationError, ShapeError, did_you_mean
from .masks import Causal, Documents
from .placed import PlacedLayout
from .plan.assignment import Assignment
from .plan.balance import assign
from .plan.order import shard_sizes

if TYPE_CHECKING:
    from .inspect.call_plan import CallPlan

_CUTS_BLOCKS = (
    "{}: an order as data cuts blocks, which a reproducible layout keeps whole; use contiguous or "
    "zigzag order, or a layout that is not reproducible"
)


@dataclass(frozen=True, eq=False)
class Layout(PlacedLayout):
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

        Sizes are those of all ranks together. The call has no bias: with one that looks at samples
        (`per_sample`, the default), ranks of a batch that the mesh does not divide plan by the
        largest part.

        Args:
            axis: the attended axis, or several attended jointly.
            length: the number of tokens, or (queries, keys); per axis where there are several.
            heads: query heads.
            **options: `kv_heads` (default: as many), `head_dim` (64), `value_dim` (as `head_dim`),
                `batch` (1 per rank that the batch is split over), `mask`, `dtype` (float32),
                `device` whose kernels to plan with ("cpu"; of a `torch.device` the type counts),
                and `rank` (0).

        Returns:
            A `CallPlan` with `traffic`, `scores`, `bound` and `program` of both passes,
            `timeline()`, `score_matrix()`, and the plans of all `ranks()`.

        Raises:
            DeclarationError: if the layout does not attend the axis, or has a mesh size of -1.
            ShapeError: if the mask does not fit the lengths, heads cannot be shared, or the device
                is unknown.
            UnsupportedError: if keys are routed by learned weights.

        >>> plan = Layout.load("tile-2x2").plan("tokens", length=4096, heads=8)
        >>> plan.traffic.forward.by_mesh_dim()
        {'col': 4227072, 'row': 4194304}
        """
        from .inspect.call_plan import plan_call  # it draws on all that plans are made of

        return plan_call(self.unbound, axis, length=length, heads=heads, **options)

    # -- the order of tokens -------------------------------------------------------------------

    def pack(
        self, lengths: Documents | Iterable[int], axis: str = "tokens", window: int | None = None
    ) -> Assignment:
        """Packed documents on the ranks that split an axis, their attention balanced.

        Every rank has as many tokens as DTensor would give it, and as many causal scores as any
        other. Short documents lie on one rank whole where that leaves both so. Pure data, computed
        alike on every rank without a message; `reorder` makes a layout of it.

        Args:
            lengths: of the documents, in the order in which their tokens are numbered; or
                `Documents`, such as `Documents.from_cu_seqlens`.
            axis: the axis of their tokens.
            window: keys that a query of sliding-window attention sees; None: its whole document.

        Returns:
            The fragments of each rank, their order, their mask, and what a loss divides by.

        Raises:
            ShapeError: no lengths, one below 1, or rows that are packed differently: an order is
                that of an axis, so pack documents of a batch into one row.
            DeclarationError: a mesh size of -1.

        >>> layout = Layout.parse("tokens: ring=2")
        >>> packed = layout.pack([3, 1, 8])
        >>> layout.reorder("tokens", packed.order).spans("tokens", 12, {"ring": 0})
        (Span(start=4, count=6, step=1),)
        """
        if not isinstance(lengths, Documents):
            lengths = Documents(lengths)  # type: ignore[arg-type]
        documents = lengths
        if documents.per_sample:
            raise ShapeError(
                "pack: these documents differ by row, and an axis has one order for all rows; pack "
                "the documents of a batch into one row"
            )
        if self.reproducible:
            raise DeclarationError(_CUTS_BLOCKS.format("pack"))
        if -1 in self.mesh.values():
            raise DeclarationError(f"{self.source}: build or resolve a mesh size of -1 first")
        whole: tuple[int, ...] = documents.lengths  # type: ignore[assignment]
        limit = Causal(window).window
        sizes = shard_sizes(sum(whole), tuple(self.mesh[d] for d in self.shard_dims(axis)))
        return Assignment(whole, assign(whole, sizes, limit), limit)

    def reorder(self, axis: str, order: TokenOrder) -> Layout:
        """This layout with the tokens of an axis in an order that is data; bound as this one is.

        `shard`, `gather`, `positions` and attention follow the order, and ranks communicate by what
        it leaves between them. It fits one length of the axis. Making it is cheap, and moves
        nothing.

        Args:
            axis: the axis.
            order: such as `pack(lengths).order`.

        Raises:
            DeclarationError: no order, or one whose chunks are not those that DTensor makes of its
                length on this mesh, or do not have every position once.

        >>> layout = Layout.parse("tokens: ring=2")
        >>> layout.reorder("tokens", layout.pack([4]).order).spans("tokens", 4, {"ring": 1})
        (Span(start=0, count=1, step=1), Span(start=3, count=1, step=1))
        """
        if not isinstance(order, TokenOrder):
            raise DeclarationError(
                "reorder takes an order as data, such as layout.pack(lengths).order, found "
                f"{order!r:.80}"
            )
        if self.reproducible:
            raise DeclarationError(_CUTS_BLOCKS.format("reorder"))
        parts = tuple(self.mesh[d] for d in self.shard_dims(axis))
        order.check(shard_sizes(order.length, parts))
        if not parts:
            return self
        name = f"{self.name.partition(' ordered ')[0]} ordered {order.digest[:8]}"  # for errors
        return replace(self, name=name, order={**self.order, axis: order})

    # -- binding -------------------------------------------------------------------------------

    def build(self, device_type: str | None = None, timeout: float = 300.0) -> Layout:
        """This layout bound to the whole world: makes the `DeviceMesh` and takes this rank's place.

        All ranks call it; it checks that they have the same layout. The process group is joined
        first if nobody has done so: of the ranks that torchrun or srun started, else of this one.

        Args:
            device_type: "cpu" (gloo) or "cuda" (NCCL); default cuda where there is one.
            timeout: seconds that any wait for another rank may last.

        Raises:
            DeclarationError: on every rank, if the mesh is not the world's size, or a mesh dim of
                `inside_node` spans nodes.
            ShapeError: on every rank, if layouts differ; on GPUs, if timeouts do.
        """
        if not self.mesh:
            return self
        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        limit = datetime.timedelta(seconds=timeout)
        init_process_group(device_type, limit)
        # On GPUs a timeout is the groups': ranks with others would make other meshes.
        groups = f", timeout {timeout:g} s" if device_type == "cuda" else ""
        resolved = self._resolved_alike(timeout, groups)
        return resolved._bound_to(world_mesh(device_type, resolved.mesh, limit), timeout)

    def _resolved_alike(self, timeout: float, groups: str) -> Layout:
        """This layout on the world's ranks, after a check that all have the same one, and `groups`.

        It comes before the mesh is made: ranks with other meshes would wait for each other.
        """
        try:
            resolved, wrong = self.resolve(dist.get_world_size()), None
        except DeclarationError as error:
            resolved, wrong = self, error
        if not is_fake(dist.group.WORLD):
            compare_over_world(
                "the layout",
                f"refused: {wrong}" if wrong else resolved.fingerprint + groups,
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
            timeout: seconds that any wait for another rank may last. Groups of the mesh keep the
                timeout that they were made with: over NCCL all that moves between GPUs waits by
                that one instead, and over gloo sums end by whichever is shorter.

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
