"""Layouts: declared, planned, bound to ranks, and applied to tensors."""

from __future__ import annotations

import datetime
import functools
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ._compile import Traceable
from ._doors import opened
from ._torch import in_local_tensor_mode, is_fake, outside_graphs
from .comm import Alone, ProcessTransport, Transport, step_check
from .comm.world import check_inside_node, compare_over_world, init_process_group, world_mesh
from .declare.layout import LayoutDeclaration
from .declare.layout_file import HEADS
from .declare.mesh import index_at
from .declare.orders import TokenOrder
from .errors import DeclarationError, ShapeError, UnsupportedError, did_you_mean, slip_of
from .launch.environment import wait_limit
from .masks import Causal, Documents, Mask, check_mask
from .masks.given import mask_of
from .masks.slices import sliced
from .move import collectives
from .move.redistribute import redistribute
from .packing.assignment import Assignment, fragments_of, slices_of_documents
from .packing.balance import SLACK, balanced_runs
from .packing.blocks import work_of
from .packing.groups import Shares, balance_shares
from .plan import order as sequence
from .plan.held import Held

if TYPE_CHECKING:
    from .inspect.call_plan import CallPlan

#: Attributes that do not outlive the process, as they belong to its process groups.
_OF_THIS_PROCESS = ("unbound", "calls", "by_heads", "_name", "_regions")
#: Questions of the engine: `dir(layout)` leaves them out, as users do not need them.
_OF_THE_ENGINE = {
    "batch_dims",
    "batch_parts",
    "bound",
    "by_heads",
    "calls",
    "check_heads",
    "device_dims",
    "keys_only_dims",
    "moves",
    "reshards",
    "unbound",
}


@dataclass(frozen=True, eq=False)
class Layout(LayoutDeclaration, Traceable):
    """Placement of a model's tensors on a mesh, and the strategy of each attended axis.

        Layout.load, .parse, .from_dict      a declaration, immutable; equal text is an equal layout
        layout.build(), layout.bind(mesh)    a new layout, bound to this process's rank of a mesh
        bound.shard, .gather, .mean, ...     what takes part in communication

    `Layout.single()` has no mesh and is bound already. `weft.on_threads` binds ranks to threads.

    Attributes:
        name: under which the layout was loaded.
        mesh: mesh dim -> size, outermost first.
        sharding: axis -> the mesh dims that split it at rest.
        replicate: mesh dims that nothing is split over.
        order: axis -> the order of its tokens, where that is not contiguous.
        attend: attended axes -> the strategies on them, bound to mesh dims.
        about: the description in its file.
        source: where it was declared, for messages.
        declaration: the content of the layout file.
        inside_node: mesh dims whose ranks must share a node.
        rates: measured speeds of compute and links.
        carry: axes that recurrent layers run along -> the strategies on them; by default states are
            carried along all mesh dims that split an axis.
        choose: axes along which a model chooses keys -> the strategies on them; by default by whole
            rows, for which index keys are gathered.
        share: mesh dim -> shares of tokens and heads by coordinate, where these are not equal.
        transport: moves bytes between ranks; None until the layout is bound.
        device_mesh: torch's mesh, where ranks are processes.

    >>> layout = Layout.load("ring-4")
    >>> dict(layout.mesh), layout.shard_dims("tokens"), layout.is_bound
    ({'ring': 4}, ('ring',), False)
    """

    transport: Transport | None = field(default=None, repr=False)
    device_mesh: DeviceMesh | None = field(default=None, repr=False)
    #: The latest calls of plain data on this layout, by value; see `runtime.calls`.
    calls: OrderedDict[tuple, Any] = field(
        default_factory=OrderedDict, init=False, repr=False, compare=False
    )
    #: Axis -> the layout on which its recurrent layers have more tokens of fewer heads.
    by_heads: dict[str, Layout] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.mesh and self.transport is None:
            object.__setattr__(self, "transport", Alone())
        if self.transport is not None:
            step_check.is_on()  # from the first forward pass on

    def __eq__(self, other: object) -> bool:
        same = LayoutDeclaration.__eq__(self, other)
        return same and getattr(other, "transport", None) is self.transport

    def __hash__(self) -> int:
        return LayoutDeclaration.__hash__(self)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self)} - _OF_THE_ENGINE)

    def __copy__(self) -> Self:
        return self  # immutable, and process groups cannot be copied

    def __deepcopy__(self, memo: dict) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A pickled layout is a declaration: process groups stay in their process."""
        state = {k: v for k, v in vars(self).items() if k not in _OF_THIS_PROCESS}
        return state | {
            "transport": None,
            "device_mesh": None,
            "calls": OrderedDict(),
            "by_heads": {},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    @property
    def is_bound(self) -> bool:
        """True if this layout has a place on a mesh."""
        return self.transport is not None

    @functools.cached_property
    def unbound(self) -> LayoutDeclaration:
        """The declaration alone, from which plans are made."""
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

    def device_dims(self, dims: Iterable[str]) -> tuple[str, ...]:
        """The names of mesh dims on `device_mesh`, which `bind` may have renamed.

        Args:
            dims: the layout's names.
        """
        device_names = self.device_mesh.mesh_dim_names if self.device_mesh is not None else None
        names = dict(zip(self.mesh, device_names or self.mesh))
        return tuple(names[d] for d in dims)

    # -- asking ------------------------------------------------------------------------------

    def plan(
        self,
        axis: str | Sequence[str],
        *,
        length: int | tuple[int, int] | Mapping[str, int | tuple[int, int]],
        heads: int,
        **options: Any,
    ) -> CallPlan:
        """Predicted communication, memory and work of a call on one rank; no mesh is needed.

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
            UnsupportedError: if only those keys travel that a router or the model chooses.

        >>> plan = Layout.load("tile-2x2").plan("tokens", length=4096, heads=8)
        >>> plan.traffic.forward.by_mesh_dim()
        {'col': 4227072, 'row': 4194304}
        """
        from .inspect.call_plan import plan_call  # it draws on all that plans are made of

        return plan_call(self.unbound, axis, length=length, heads=heads, **options)

    # -- the order of tokens -------------------------------------------------------------------

    def pack(
        self,
        lengths: Documents | Iterable[int],
        axis: str = "tokens",
        window: int | None = None,
        slack: float = SLACK,
    ) -> Assignment:
        """Packed documents on the ranks that split an axis, their attention balanced.

        Every rank has as many tokens as DTensor would give it, and computes as many causal scores
        as any other, in both passes. Ranks that compute together (along a mesh dim of Ulysses) are
        one group: groups are balanced, and the tokens of each are cut evenly. Short documents stay
        in one group where that leaves both so. Pure data, computed identically on every rank
        without a message; `reorder` makes a layout of it.

            documents a of 6 tokens and b of 2 on gather=2 x ulysses=2
            ranks 0 and 1: a[0:2] | a[2:4]    10 scores together, and nothing to receive
            ranks 2 and 3: b      | a[4:6]    14 scores together, with a's first 4 tokens

        Args:
            lengths: of the documents, in the order in which their tokens are numbered; or
                `Documents`, such as `Documents.from_cu_seqlens`.
            axis: the axis of their tokens.
            window: keys that a query of sliding-window attention sees; None: its whole document.
            slack: share of the mean work by which a group may exceed it, so that fewer documents
                are cut and fewer tokens travel.

        Returns:
            The fragments of each rank, their order, their mask, and what a loss divides by.

        Raises:
            ShapeError: no lengths, one below 1, or rows that are packed differently: an order is
                that of an axis, so pack documents of a batch into one row; or a negative slack.
            DeclarationError: an axis that the layout neither splits nor attends, though it attends
                others; a mesh size of -1; keys that are split beside whole queries.

        >>> layout = Layout.parse("tokens: ring=2")
        >>> packed = layout.pack([3, 1, 8])
        >>> layout.reorder("tokens", packed.order).spans("tokens", 12, {"ring": 0})
        (Span(start=4, count=6, step=1),)
        """
        attended = {a for joint in self.attend for a in joint.split("+")}
        if attended and axis not in {*self.sharding, *attended}:
            raise DeclarationError(
                f"pack: {self.source} has no axis {axis!r}{did_you_mean(axis, attended)}"
            )
        if not isinstance(lengths, Documents):
            lengths = Documents(lengths)  # type: ignore[arg-type]
        if lengths.per_sample:
            raise ShapeError(
                "pack: these documents differ by row, and an axis has one order for all rows; pack "
                "the documents of a batch into one row"
            )
        counts: tuple[int, ...] = lengths.lengths  # type: ignore[assignment]
        if not slack >= 0:
            raise ShapeError(f"pack: slack is a share of the mean work, 0 or more, found {slack!r}")
        limit = Causal(window).window
        sizes, shares = self._cut("packing", axis, sum(counts))
        mask = slices_of_documents(counts, limit)
        runs = balanced_runs(mask, sizes, shares, slack)
        work = tuple(work_of(mask, runs, shares))
        return Assignment(counts, fragments_of(runs, counts), limit, work)

    def balance(self, axis: str, mask: Mask, length: int) -> TokenOrder:
        """An order of an axis's tokens in which every rank computes as much of any mask.

        Tokens go to ranks so that the visible scores are equal, in both passes, along every mesh
        dim: of a ring by queries, of pass-Q by keys, of a tile by both. What sees nothing outside
        itself stays whole where that leaves it so. Of one causal sequence that is zigzag, of
        documents `pack`. Pure data, computed identically on every rank without a message; a
        function is asked about every pair.

        Args:
            axis: the axis.
            mask: any, also a boolean tensor or a BlockMask; of a mask that differs by sequence or
                by head the mean.
            length: tokens of the axis.

        Returns:
            The order, for `reorder`.

        Raises:
            ShapeError: the mask does not fit the length.
            DeclarationError: an axis that the layout does not split, a mesh size of -1, unequal
                shares, or keys that are split beside whole queries.

        >>> layout = Layout.parse("tokens: ring=2")
        >>> layout.balance("tokens", Causal(), 8).chunks
        (((2, 4),), ((0, 2), (6, 2)))
        """
        sizes, shares = self._cut("balancing", axis, length)
        mask = mask_of(mask)
        check_mask(mask)
        mask.check(length, length, 1)
        return TokenOrder(balanced_runs(sliced(mask, length, length), sizes, shares))

    def _cut(self, what: str, axis: str, length: int) -> tuple[tuple[int, ...], tuple[Shares, ...]]:
        """The sizes of an axis's chunks, and who computes with whom."""
        self.refuse_shares(what)
        if -1 in self.mesh.values():
            raise DeclarationError(f"{self.source}: build or resolve a mesh size of -1 first")
        sizes = sequence.shard_sizes(length, self._parts(axis, keys=False))
        return sizes, balance_shares(self, axis)

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
        parts = self._parts(axis, keys=False)
        order.check(sequence.shard_sizes(order.length, parts))
        if not parts:
            return self
        name = f"{self.name.partition(' ordered ')[0]} ordered {order.digest[:8]}"  # for errors
        return replace(self, name=name, order={**self.order, axis: order})

    # -- binding -------------------------------------------------------------------------------

    def build(self, device_type: str | None = None, timeout: float | None = None) -> Layout:
        """This layout bound to the whole world: makes the `DeviceMesh` and takes this rank's place.

        All ranks call it; it checks that they have the same layout. The process group is joined
        first if nobody has done so: of the ranks that torchrun or srun started, else of this one.

        Args:
            device_type: "cpu" (gloo) or "cuda" (NCCL); default cuda where there is one.
            timeout: seconds that a wait for another rank may last; default 300, or `WEFT_TIMEOUT`.

        Raises:
            DeclarationError: on every rank, if the mesh is not the world's size, or a mesh dim of
                `inside_node` spans nodes.
            ShapeError: on every rank, if layouts differ; on GPUs, if timeouts do.
        """
        if not self.mesh:
            return self
        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        timeout = wait_limit(timeout)
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
                f"refused: {wrong}" if wrong else resolved._text + groups,
                datetime.timedelta(seconds=timeout),
            )
        if wrong is not None:
            raise wrong
        return resolved

    def bind(
        self,
        device_mesh: DeviceMesh,
        rename: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Layout:
        """This layout bound to a mesh of yours, or to a slice of it; nobody else takes part.

        Mesh dims go by name. Dims of `device_mesh` that the layout does not name (pipeline stages,
        replicas, experts) keep this rank's coordinate, and the ranks there know nothing of it.

            mesh ("pp", "dp", "cp") of 2 x 2 x 2     layout "tokens: ring=2", rename {"ring": "cp"}
            binds 4 pairs of ranks, each a separate ring; pairs need not bind at the same time

        Args:
            device_mesh: has a dim for every mesh dim of the layout, in the layout's order.
            rename: the layout's name of a mesh dim -> the mesh's name of it.
            timeout: seconds that a wait for another rank may last; default 300, or `WEFT_TIMEOUT`.
                Groups of the mesh keep the timeout that they were made with: over NCCL all that
                moves between GPUs waits by that one, and over gloo sums end by the shorter.

        Raises:
            DeclarationError: a mesh dim is missing or has another size.
            ShapeError: on every rank of the slice, if their layouts differ.
            UnsupportedError: within torch's `LocalTensorMode`.
        """
        if not self.mesh:
            return self
        if not isinstance(device_mesh, DeviceMesh):
            raise DeclarationError(
                f"{self.source}: bind takes a DeviceMesh, found a {type(device_mesh).__name__}; "
                "DeviceMesh.from_group makes one of a process group"
            )
        if in_local_tensor_mode():
            raise UnsupportedError(
                f"{self.source}: within LocalTensorMode one process stands for all ranks, whose"
                " tensors weft cannot tell apart; weft.on_threads(layout, function) runs ranks as"
                " threads"
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
        return replace(self, mesh=sizes)._bound_to(part, wait_limit(timeout))

    def _check_rename(self, device_mesh: DeviceMesh, rename: Mapping, names: list[str]) -> None:
        for name in rename:
            if name not in self.mesh:
                raise DeclarationError(
                    f"{self.source}: rename has {name!r}, which is no mesh dim of the layout"
                    f"{did_you_mean(name, self.mesh)}"
                )
        device_names = device_mesh.mesh_dim_names
        if not device_names:
            raise DeclarationError(
                "the device mesh has no dim names; make it with init_device_mesh(..., "
                f"mesh_dim_names={tuple(self.mesh)})"
            )
        for local, name in zip(self.mesh, names):
            if name not in device_names:
                raise DeclarationError(
                    f"{self.source}: mesh dim {local!r} is not among the device mesh's dims"
                    f" {device_names}{did_you_mean(name, device_names)}; rename={{{local!r}: ...}}"
                    " says which it is"
                )
        if sorted(names, key=device_names.index) != names or len(set(names)) < len(names):
            raise DeclarationError(
                f"{self.source}: the layout's mesh dims {tuple(self.mesh)} are {tuple(names)} on "
                f"the device mesh, whose order is {device_names}; both must list them in one order"
            )

    def _bound_to(self, mesh: DeviceMesh, timeout: float) -> Layout:
        transport = ProcessTransport(
            mesh,
            tuple(self.mesh),
            datetime.timedelta(seconds=timeout),
            self._text,
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

    # -- tensors -------------------------------------------------------------------------------

    def _dims(self, axis: str, keys: bool) -> tuple[str, ...]:
        return self.key_dims(axis) if keys else self.shard_dims(axis)

    def _parts(self, axis: str, keys: bool) -> sequence.Parts:
        return self.parts(self._dims(axis, keys))

    def spans(
        self,
        axis: str,
        length: int,
        coords: Mapping[str, int] | None = None,
        *,
        keys: bool = False,
    ) -> sequence.Spans:
        """Global positions of a rank's chunk of an axis, as spans (see `weft.plan.order`).

        Args:
            axis: the axis.
            length: its global length.
            coords: of the rank, default this one's.
            keys: whether of the keys and values of attention over the axis, which some strategies
                have whole where queries are split, or split where queries are whole.
        """
        coords = self.coords if coords is None else coords
        dims = self._dims(axis, keys)
        return Held.of(self, axis, length, dims).spans[index_at(self.mesh, dims, coords)]

    def chunk(self, axis: str) -> int:
        """The number of this rank's chunk of an axis, among `size(axis)`.

        Args:
            axis: the axis.

        >>> weft.Layout.single().chunk("tokens")
        0
        """
        return index_at(self.mesh, self.shard_dims(axis), self.coords)

    def positions(
        self,
        axis: str,
        length: int,
        device: torch.device | str | None = None,
        *,
        keys: bool = False,
    ) -> Tensor:
        """Global positions of this rank's tokens, such as rotary embeddings need: (n_local,) int64.

        Args:
            axis: the axis.
            length: its global length.
            device: of the result, default the CPU.
            keys: as for `spans`.

        >>> weft.Layout.single().positions("tokens", 3)
        tensor([0, 1, 2])
        """
        return sequence.positions(self.spans(axis, length, keys=keys), device)

    def local_length(self, axis: str, length: int) -> int:
        """The number of tokens of an axis that this rank holds.

        Args:
            axis: the axis.
            length: its global length.
        """
        return sequence.count(self.spans(axis, length))

    def shard(self, x: Tensor, dims: Mapping[str, int], *, keys: Collection[str] = ()) -> Tensor:
        """This rank's part of a tensor that every rank holds whole (R -> V).

            before    both:   [x0 | x1]
            after     rank 0: x0                rank 1: x1
            backward  rank 0: [d0 | 0]          rank 1: [0 | d1]   <-   rank 0: d0, rank 1: d1

        Args:
            x: the full tensor.
            dims: axis -> dim of x, for every axis that the layout splits.
            keys: attended axes of which x has keys or values, as for `spans`.

        Raises:
            ShapeError: heads that do not divide over the ranks that split them.

        >>> weft.Layout.single().shard(torch.arange(4), {"tokens": 0})
        tensor([0, 1, 2, 3])
        """
        self._check_axes(dims, x.dim(), keys)
        if step_check.is_on():
            step_check.note(x, dims, sum((self._dims(a, a in keys) for a in dims), ()), self.bound)
        for axis, dim in dims.items():
            if axis == HEADS:
                self.check_heads("heads", x.shape[dim])
            if self._dims(axis, axis in keys):
                positions = self.positions(axis, x.shape[dim], x.device, keys=axis in keys)
                x = x.index_select(dim, positions)
        return x

    def gather(
        self,
        x: Tensor,
        dims: Mapping[str, int],
        *,
        keys: Collection[str] = (),
        name: str | None = None,
    ) -> Tensor:
        """The inverse of `shard`: the full tensor on every rank, in global order (V -> I).

            before    rank 0: x0         rank 1: x1
            after     both:   [x0 | x1]
            backward  both:   [d0 | d1]   ->   rank 0: d0, rank 1: d1

        Differentiable for a loss of the full tensor that all ranks compute, as
        `DTensor.full_tensor()` is: each rank keeps its own chunk of the gradient, and nothing is
        sent. Where each rank makes something else of the full tensor, such as scores of its own
        tokens against all, `layout.enter(layout.gather(x, ...), axis)` adds up their gradients. To
        gather without a gradient, pass `x.detach()`.

        Args:
            x: this rank's part.
            dims: as for `shard`.
            keys: as for `shard`.
            name: which call of the program this is, as for `weft.attention`.

        Raises:
            ShapeError: on every rank that takes part: shapes, dtypes or `dims` differ between
                ranks, or they make different calls of the program. On this rank, of an axis that is
                not in contiguous order: its part is no chunk of the whole.

        >>> weft.on_threads(weft.Layout.load("ring-2"), lambda layout: layout.gather(
        ...     torch.tensor([layout.rank]), {"tokens": 0}).tolist())
        [[0, 1], [0, 1]]
        """
        self._check_axes(dims, x.dim(), keys)
        for axis, dim in dims.items():
            mesh_dims, local = self._dims(axis, axis in keys), x.shape[dim]
            for mesh_dim in reversed(mesh_dims):
                x = collectives.varying_to_invariant(x, dim % x.dim(), mesh_dim, self.bound, name)
            if mesh_dims:
                order = self.order.get(axis, "contiguous")
                parts = self._parts(axis, axis in keys)
                if order != "contiguous":
                    chunk = sequence.count(self.spans(axis, x.shape[dim], keys=axis in keys))
                    if local != chunk:
                        raise ShapeError(
                            f"gather of axis {axis!r}, whose tokens are in an order: this rank has"
                            f" {local} of {x.shape[dim]}, and its chunk holds {chunk}; cut whole"
                            " tensors with layout.shard"
                        )
                index = sequence.gather_order(x.shape[dim], parts, order, x.device)
                x = x.index_select(dim, index)
        return x

    def placements(
        self, dims: Mapping[str, int], *, keys: Collection[str] = ()
    ) -> tuple[Placement, ...]:
        """DTensor placements of a tensor, per mesh dim.

        Args:
            dims: axis -> dim of the tensor.
            keys: as for `shard`.
        """
        self._check_axes(dims, None, keys)
        self.refuse_shares("a DTensor")
        split = {d: dims[axis] for axis in dims for d in self._dims(axis, axis in keys)}
        return tuple(Shard(split[d]) if d in split else Replicate() for d in self.mesh)

    def distribute(
        self, x: Tensor, dims: Mapping[str, int], *, keys: Collection[str] = ()
    ) -> DTensor:
        """A full tensor as a DTensor, placed as this layout says, in its token order (R -> V).

        What each rank holds, and its gradient, are as for `shard`.

        Args:
            x: the full tensor, the same on every rank.
            dims: as for `shard`.
            keys: as for `shard`.
        """
        if self.device_mesh is None:
            raise DeclarationError(
                f"{self.source}: DTensors need a layout bound to processes: layout.build() or bind"
            )
        dims = {axis: dim % x.dim() for axis, dim in dims.items()}
        return DTensor.from_local(
            self.shard(x, dims, keys=keys).contiguous(),
            self.device_mesh,
            self.placements(dims, keys=keys),
            run_check=False,
            shape=x.shape,
            stride=x.contiguous().stride(),
        )

    def redistribute(
        self,
        x: Tensor,
        other: Self,
        dims: Mapping[str, int | None],
        lengths: Mapping[str, int] | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Redistributes a local tensor from this layout to `other`, on the same ranks.

        The meshes may differ. Messages travel along this layout's mesh dims, and `weft.traffic`
        counts them as "redistribute". Differentiable (V -> V): the gradient goes the same way back.

            rows over 2 ranks                        columns over 2 ranks
            rank 0: rows 0-1, all columns     ->     rank 0: all rows, columns 0-1
            rank 1: rows 2-3, all columns            rank 1: all rows, columns 2-3

        Ranks that split data hold an x that lacks the split axis (None in `dims`) in full, as they
        hold a weight. Its gradient is then summed over the ranks of `other` that use the same part,
        and each rank gets an equal share of the sum, which `sync_gradients` adds up.

        Args:
            x: this rank's part.
            other: bound on the same ranks as this layout.
            dims: axis -> dim of x, for every axis that either layout splits; None if x lacks it.
            lengths: global lengths, needed where the mesh does not divide them.
            name: which call of the program this is, as for `weft.attention`.

        Raises:
            DeclarationError: other ranks, or a split axis that `dims` does not name.
            ShapeError: on every rank that takes part: x does not hold a rank's chunks of `lengths`;
                shapes, dtypes, layouts or lengths differ between ranks; or they make different
                calls of the program.

        >>> x, single = torch.zeros(2, 3), weft.Layout.single()
        >>> single.redistribute(x, single, {"rows": 0, "columns": 1}).shape
        torch.Size([2, 3])
        """
        axes = [axis for axis, dim in dims.items() if dim is not None]
        shares = math.prod(self.mesh[d] for d in self._data_dims_without(axes))
        if shares > 1:
            x = collectives.scale_backward(x, 1.0 / shares)
        x = redistribute(x, self, other, (self.bound, other.bound), dims, lengths, name)
        return collectives.invariant_to_replicate(x, other._data_dims_without(axes), other.bound)

    def _data_dims_without(self, axes: Collection[str]) -> tuple[str, ...]:
        """Mesh dims that split data, but none of these axes."""
        split = {d for axis in axes for d in self.shard_dims(axis)}
        return tuple(d for d in self.data_dims if d not in split)

    def _check_axes(
        self, dims: Mapping[str, int], ndim: int | None, keys: Collection[str] = ()
    ) -> None:
        for axis, dim in dims.items():
            meant = None if axis in (*self.sharding, *keys) else slip_of(axis, self.sharding)
            if meant is not None:
                raise ShapeError(
                    f"axis {axis!r} is not split by {self.source}, but {meant!r} is; name the dims "
                    "as the layout does"
                )
            if ndim is not None and not -ndim <= dim < ndim:
                raise ShapeError(f"axis {axis!r} is given as dim {dim} of a {ndim}-d tensor")

    # -- sums over ranks -----------------------------------------------------------------------
    #
    # Results are invariant: all ranks have the same value and use it in the same way, for one loss.

    def mean(
        self, local_sum: Tensor, local_count: Tensor | int, *, axis: str | None = None
    ) -> Tensor:
        """A mean over the tokens of every rank: sum of sums / sum of counts (P -> I).

            before    rank 0: s0, n0           rank 1: s1, n1
            after     both:   (s0 + s1) / (n0 + n1)
            backward  both:   d   ->           both: d / (n0 + n1)

        Each rank has the gradient of its own tokens. So `sync_gradients`, which is a sum, completes
        parameter gradients whatever number of tokens each rank holds.

        Args:
            local_sum: of any shape: several sums over the same tokens. A mean of whole numbers has
                torch's default dtype.
            local_count: how many tokens of this rank they are sums of.
            axis: the axis whose ranks have different summands; default all that split data. Of
                sequences whose scores were summed over the tokens' ranks (`layout.sum`), it is
                "batch".

        Raises:
            ShapeError: ranks have other shapes or dtypes, or are in another call; on all of them.

        >>> weft.Layout.single().mean(torch.tensor([6.0, 9.0]), 3)
        tensor([2., 3.])
        """
        # fp64 on the way: counts stay exact whatever the dtype of the loss.
        count = torch.as_tensor(local_count, device=local_sum.device).detach()
        both = torch.cat([local_sum.double().reshape(-1), count.double().reshape(1)])
        self._agree_on_sum("layout.mean", local_sum, axis)
        total = collectives.partial_to_invariant(both, self._along(axis), self.bound)
        floats = local_sum.is_floating_point() or local_sum.is_complex()
        dtype = local_sum.dtype if floats else torch.get_default_dtype()
        return (total[:-1] / total[-1].detach()).reshape(local_sum.shape).to(dtype)

    def sum(self, x: Tensor, axis: str) -> Tensor:
        """The sum of the tensors of the ranks that split an axis (P -> I).

            before    rank 0: x0        rank 1: x1
            after     both:   x0 + x1
            backward  both:   d    ->   both: d

        For a loss that all ranks compute of the sum: the log-probabilities of a sequence (DPO,
        GRPO), a pooled embedding (contrastive losses), head-parallel projections (axis "heads").
        Where each rank uses the sum with its own tokens, such as a mean that is subtracted from
        them, `layout.enter(layout.sum(x, axis), axis)` adds up their gradients.

        Args:
            x: this rank's summand.
            axis: the axis.

        Raises:
            ShapeError: ranks have other shapes or dtypes, or are in another call; on all of them.

        >>> weft.on_threads(weft.Layout.load("ring-2"), lambda layout: layout.sum(
        ...     torch.ones(2), "tokens").tolist())
        [[2.0, 2.0], [2.0, 2.0]]
        """
        self._agree_on_sum("layout.sum", x, axis)
        return collectives.partial_to_invariant(x, self._along(axis), self.bound)

    def _agree_on_sum(self, label: str, x: Tensor, axis: str | None) -> None:
        """Raise on every rank where summands do not fit: gloo ends a process of other sizes."""
        if not torch.compiler.is_compiling():
            self.bound.agree(label, f"{x.dtype} {tuple(x.shape)}", self._along(axis))

    def enter(self, x: Tensor, axis: str) -> Tensor:
        """A replicated tensor, for use with each rank's own part of an axis (I -> R).

            before    both:   x
            after     both:   x
            backward  rank 0: d0        rank 1: d1   ->   both: d0 + d1

        Between a sum or gather and what a rank's own tokens make of it; before head-parallel
        projections (axis "heads"), each of which uses the whole input.

        Args:
            x: the same on all ranks that split the axis.
            axis: the axis.

        >>> def centred(layout):
        ...     x = torch.tensor([1.0 + 2.0 * layout.rank], requires_grad=True)
        ...     mean = layout.enter(layout.sum(x, "tokens"), "tokens") / 2
        ...     (x - mean).square().sum().backward()    # this rank's part of the squares
        ...     return x.grad.item()                    # of the sum of both parts
        >>> weft.on_threads(weft.Layout.load("ring-2"), centred)
        [-2.0, 2.0]
        """
        return collectives.invariant_to_replicate(x, self._along(axis), self.bound)

    def once(self, x: Tensor, axis: str | None = None) -> Tensor:
        """A loss that all ranks compute, counted once by sums of gradients (R -> I).

            before    both:   x
            after     both:   x
            backward  both:   d    ->   both: d / 2

        Weights are the same on all ranks, and `sync_gradients`, `"ddp"` and `"fsdp"` sum their
        gradients: a penalty of weights alone (L2, their distance from others') would count once per
        rank. `layout.mean` and `layout.sum` of ranks' own tokens do not need it.

        Weights that FSDP2 has sharded get the gradient of their shards from x itself, and nothing
        sums it: x of such weights alone is left as it is.

        Args:
            x: the same on all ranks that split data, computed of the same. Of a DTensor the whole
                is returned.
            axis: the axis along whose ranks it is the same; default all that split data. Logits of
                a table model are the same on the ranks of "features".

        Raises:
            UnsupportedError: x is of weights that are sharded and of others that are not, as
                FSDP2 has those of its root between forward and backward.

        >>> def weight_decay(layout):
        ...     weight = torch.tensor([3.0], requires_grad=True)
        ...     layout.once(weight.square().sum()).backward()
        ...     return layout.sum(weight.grad, "tokens").item()    # as sync_gradients does
        >>> weft.on_threads(weft.Layout.load("ring-2"), weight_decay)
        [6.0, 6.0]
        """
        along = self._along(axis)
        ranks = math.prod(self.mesh[d] for d in along)
        if self.device_mesh is not None and ranks > 1:
            dims = self.device_dims([d for d in self.mesh if d in along])
            line = self.device_mesh[dims].mesh.flatten().tolist()
            sharded = opened("is_of_shards")(x, line)
            x = x.full_tensor() if isinstance(x, DTensor) else x
            if sharded:
                return x
        return collectives.scale_backward(x, 1.0 / ranks) if ranks > 1 else x

    def _along(self, axis: str | None) -> tuple[str, ...]:
        """Mesh dims that split an axis, or data; a slip of an axis' name is refused."""
        if axis is None:
            return self.data_dims
        self._check_axes({axis: 0}, None)
        return self.shard_dims(axis)

    @outside_graphs
    def sync_gradients(self, module: torch.nn.Module) -> None:
        """Sum parameter gradients over the mesh dims that split data, in flat messages.

            before    rank 0: d0        rank 1: d1        gradients of a weight that both use (R)
            after     both:   d0 + d1

        Call it on every rank once per optimizer step, after the last backward pass. A gradient
        that only some ranks have counts as zero on the others; one that no rank has stays `None`.
        A sparse one (`Embedding(sparse=True)`) becomes dense: a sum has rows of all ranks.
        Of a transformers model on a layout the sum is divided by the ranks.

        Where a mesh dim splits keys and has queries whole (`keys_only_dims`, as `kv_parallel`
        does), all ranks along it compute the same loss. What made queries, or comes after
        attention, has its whole gradient there and is left as it is. What made keys, or a learned
        bias, has only the part of a rank's own keys, which is refused: train it on another layout,
        or sum the gradients of these parameters over that mesh dim before this call.

        Args:
            module: its parameters are replicated on the ranks that split data.

        Raises:
            DeclarationError: the module is on a layout that splits data over other ranks.
            UnsupportedError: gradients that `fully_shard`, DDP or an earlier call reduced; on every
                rank: no rank has a gradient; or gradients differ along `keys_only_dims`.
            ShapeError: on every rank: ranks have other parameters; the first time, and after
                gradients that were not finite: other weights (`GradScaler.unscale_` comes after
                this call, or ranks skip steps by themselves).
        """
        check_same_data_ranks(module, self)
        same_dims = [d for d in self.mesh if d not in self.shard_dims(HEADS)]
        opened("sync")(module, self.data_dims, same_dims, self.keys_only_dims, self.bound)

    def _data_ranks(self) -> list[int]:
        """Numbers in the world of the ranks whose data differ from each other's, with this one."""
        return sorted(self.bound.world_ranks[r] for r in self.bound.ranks_along(self.data_dims))


def check_same_data_ranks(module: torch.nn.Module, layout: Layout) -> None:
    """Refuse gradients that would be summed over other ranks than a module's data is split over.

    The module and its children are searched for a `layout`.
    """
    other = getattr(module, "layout", None)
    if not isinstance(other, Layout) or not other.is_bound:
        for child in module.children():
            check_same_data_ranks(child, layout)
    elif other._data_ranks() != layout._data_ranks():
        raise DeclarationError(
            f"{layout.source}: gradients would be summed over ranks {layout._data_ranks()}, but"
            f" this {type(module).__name__} is on {other.source}, which splits data over"
            f" ranks {other._data_ranks()}; call it on the layout that the model was made for"
        )
