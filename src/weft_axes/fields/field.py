"""`weft.Field`: a tensor with its global shape, of which every rank holds a part.

    x of 1 x 3 x 13 x 9, height over 2 ranks        rank 0: x[:, :, :7]     rank 1: x[:, :, 7:]
    conv2d(x, weight, padding=1)                    rows 7 and 6 travel; the result is a field, too

Models run on fields unmodified: shapes, masks and views that they compute are those of one device.
A function of torch has a rule (in a file of this room), or is refused by name, on every rank.

A field has no storage of its own: code that reads tensors past torch, such as a kernel bound in
C++, raises instead of taking a part for the whole. Autograd records what happens to the local
tensors.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Self

from torch import Tensor, strided
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from weft._torch import OF_UNPACKED, as_torch_does, make_wrapper, version
from weft._uploads import uploaded
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout
from weft.move.collectives import scale_backward
from weft.plan.held import Held
from weft.plan.lengths import check_axis_lengths
from weft.plan.order import each_position

from .dims import Dim, dim_size, is_split_dim, split_dim, text_of, whole
from .exchange import entered, placed_like, whole_tensor
from .place import FieldPlace, FieldRegion, WholeReport, region_of


class Field(Tensor):
    """A tensor with its global shape, split over the ranks of a layout, for unmodified models.

    Make one with `Field.distribute` or `Field.from_local`. It behaves as the whole tensor does on
    one device: convolutions, pools, norms, resampling, views, reductions and attention exchange
    what they need, and give the values and gradients of one device. A function without a rule is
    refused, on every rank. `weft.parallelize` hands fields to a model and takes them back.

    Plain tensors that meet a field are whole, and the same on all ranks. Gradients of plain
    tensors, such as weights, are shares: `layout.sync_gradients` adds them up. A loss that is
    computed of fields to its end counts once.

    Any order of the layout will do; functions that see neighbours make their axes contiguous. Where
    torch returns a view and positions had to move, in-place functions of the result are refused
    while anything is left that they would change.

    Args:
        local: this rank's part; `distribute` and `from_local` make a field of what users have.
        place: which part of the tensor each rank holds.
        trail: a digest of how it was made.

    >>> layout = weft.Layout.parse("height: gather=2; width: gather=2")
    >>> def blurred(layout):
    ...     x = weft.Field.distribute(torch.ones(1, 1, 5, 7), layout, {"height": 2, "width": 3})
    ...     return torch.nn.functional.avg_pool2d(x, 3, stride=2, padding=1).full_tensor().shape
    >>> weft.on_threads(layout, blurred)[0]
    torch.Size([1, 1, 3, 4])
    """

    __slots__ = ("_local", "_place", "_trail")
    _local: Tensor
    _place: FieldPlace
    #: a digest of the functions that made it, which ranks compare where they exchange
    _trail: int
    _is_unpacked: bool = False
    #: of a copy where torch has a view: what it was copied of, and the version of that
    _copied: Copied | None = None
    # Past torch's dispatch, which takes 2 us; `run.py` sets what functions of torch do.
    shape: Any = property(operator.attrgetter("_place.shape"))
    dtype: Any = property(operator.attrgetter("_local.dtype"))
    device: Any = property(operator.attrgetter("_local.device"))
    ndim: Any = property(lambda self: len(self._place.shape))

    @staticmethod
    def __new__(cls, local: Tensor, place: FieldPlace, trail: int = 0) -> Field:
        """The field of a rank's local tensor; for users, `from_local` checks what this takes."""
        if local.shape != place.local_shape:
            raise ShapeError(
                f"a rank's part of a field {text_of(place.dims)} has shape"
                f" {tuple(place.local_shape)}, found {tuple(local.shape)}"
            )
        shape, strides, dtype, device = place.shape, place.strides, local.dtype, local.device
        # offset, memory format, dtype, layout, device, pinned memory, gradient
        made = make_wrapper(
            cls, shape, strides, None, None, dtype, strided, device, False, local.requires_grad
        )
        made._local, made._place, made._trail = local, place, trail
        return made

    @property
    def _dims(self) -> tuple[Dim, ...]:
        return self._place.dims

    @property
    def _region(self) -> FieldRegion:
        return self._place.region

    # -- in and out ----------------------------------------------------------------------------

    @classmethod
    def distribute(cls, x: Tensor, layout: Layout, dims: Mapping[str, int]) -> Field:
        """The field of a tensor that every rank holds whole (I -> V): the inverse of `full_tensor`.

            before    both:   [x0 | x1]
            after     rank 0: x0                rank 1: x1
            backward  both:   [d0 | d1]    <-   rank 0: d0, rank 1: d1

        Every rank gets the whole gradient of x, where x requires one.

        Args:
            x: the whole tensor, the same on every rank.
            layout: a bound layout.
            dims: axis -> dim of x.

        Raises:
            DeclarationError: a layout that is not bound.
            ShapeError: an axis or a dim that there is not; a DTensor.
        """
        _check_plain("Field.distribute", x)
        return distributed(x, layout, dims)

    @classmethod
    def from_local(
        cls, local: Tensor, layout: Layout, dims: Mapping[str, int], lengths: Mapping[str, int]
    ) -> Field:
        """The field whose part on this rank is a local tensor.

        Args:
            local: this rank's chunk, as `layout.shard` makes it.
            layout: a bound layout.
            dims: axis -> dim.
            lengths: global length of every axis.

        Raises:
            DeclarationError: a layout that is not bound.
            ShapeError: a local tensor of another shape; a DTensor; lengths of other axes.
        """
        _check_plain("Field.from_local", local)
        region, at = _region(layout, dims, local.dim())
        check_axis_lengths("Field.from_local: lengths=", lengths, tuple(dims))
        placed: list[Dim] = [whole(n) for n in local.shape]
        for axis in region.axes:
            if axis not in lengths:
                raise ShapeError(f"Field.from_local: lengths= has no axis {axis!r}")
            placed[at[axis]] = split_dim(region.chunks(axis, lengths[axis]))
        return settled(local, placed, region)

    def to_local(self) -> Tensor:
        """This rank's part; each rank may compute a loss of its own part, whose sum is meant."""
        local = self._checked()._local
        return scale_backward(local, float(times)) if (times := self._region.times) != 1 else local

    def full_tensor(self) -> Tensor:
        """The whole tensor on every rank (V -> I), for a loss that all ranks compute of it.

        As of `layout.gather`, each rank keeps its part of the gradient, and nothing is sent back.
        """
        self._checked()._region.trail = self._trail
        return whole_tensor(self._local, self._dims, self._region)

    def rechunked(self, dims: Mapping[str, int] | None = None) -> Field:
        """The same field in the chunks that its layout makes of every axis, as `layout.shard` does.

        Windows with a stride leave their outputs with the ranks that hold their middles.

        Args:
            dims: axis -> dim, for axes of one position, which all ranks hold; one of them keeps it.
        """
        self._checked()._region.trail = self._trail
        goal = list(self._dims)
        for d, dim in enumerate(goal):
            chunks = dim[0].chunks
            if chunks is None:
                continue
            if len(dim) > 1:
                raise UnsupportedError(f"{self} has a dim of several axes, which no layout makes")
            goal[d] = split_dim(self._region.chunks(chunks.axis, chunks.length))
        for axis, d in (dims or {}).items():
            if axis in self._region.axes and not is_split_dim(goal[d]):
                goal[d] = split_dim(self._region.chunks(axis, dim_size(goal[d])))
        local = placed_like(self._local, self._dims, goal, self._region, "rechunk")
        return Field(local, self._region.place(goal))

    def _checked(self) -> Self:
        """This field, if it may be handed out: autograd's graph is that of its local tensor."""
        if as_torch_does(_GRAPH, self) is not None:
            raise UnsupportedError(OF_FUNCTION.format("a way out of fields"))
        if self._copied is not None:
            self._copied.check()
        return self

    def _holding(self, local: Tensor) -> Field:
        """The same field with another local tensor in place of its own."""
        made = Field(local, self._place, self._trail)
        made._copied = self._copied
        return made

    @property
    def chunks(self) -> dict[str, tuple[int, ...]]:
        """Axis -> the first position of every chunk, and the length, of axes that split a dim.

        Raises `ShapeError` for chunks that are not contiguous, see `positions`.
        """
        found = {}
        for chunks in (f.chunks for dim in self._dims for f in dim if f.chunks is not None):
            if chunks.starts is None:
                raise ShapeError(
                    f"{self}: chunks of {chunks.axis!r} are not contiguous; field.positions"
                    f"({chunks.axis!r}) has those of this rank"
                )
            found[chunks.axis] = chunks.starts
        return found

    def positions(self, axis: str) -> Tensor:
        """The positions of this rank's part along an axis that splits a dim: (n,) int64.

        Args:
            axis: the layout's name of the axis.

        Raises:
            ShapeError: an axis that splits no dim of this field.
        """
        for chunks in (f.chunks for dim in self._dims for f in dim if f.chunks is not None):
            if chunks.axis == axis:
                return uploaded(tuple(each_position(self._region.own(chunks))), self._local.device)
        raise ShapeError(f"{self}: no dim is split by axis {axis!r}")

    # -- torch ---------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Field:
        if func is OF_UNPACKED and isinstance(args[0], Field):
            # Autograd hands out a tensor that a hook kept, such as a checkpoint's within another.
            x = args[0]
            unpacked = Field(x._local.detach(), x._place, x._trail)
            unpacked._is_unpacked = True  # autograd may say that it requires a gradient
            return unpacked
        raise UnsupportedError(
            f"{func} reads a weft.Field past torch's Python functions, where a field has no"
            " numbers: a kernel bound in C++, or a function that weft has no rule for; give it"
            " field.to_local(), where it treats every position by itself, or field.full_tensor()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        layout = self._region.layout.name
        return f"Field({text_of(self._dims)}, dtype={self._local.dtype}, of {layout!r})"

    def __deepcopy__(self, memo: dict) -> Self:
        raise UnsupportedError("a weft.Field is not copied: it belongs to this rank's layout")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError("a weft.Field is not saved: save field.full_tensor()")


#: of the class, not of a tensor: a descriptor
_GRAPH: Any = operator.attrgetter("grad_fn.__get__")(Tensor)
OF_FUNCTION = (
    "{} gets a weft.Field that a torch.autograd.Function returned: one of your own, a checkpoint"
    " with use_reentrant=True, or a unit of FSDP2 in a model that weft.parallelize does not know:"
    " gradients through it would be lost; pass use_reentrant=False, give the function local"
    " tensors, or weft.parallelize the model"
)


#: By where numbers are, what was copied of them.
_copies: weakref.WeakValueDictionary[int, weakref.WeakSet] = weakref.WeakValueDictionary()


class Copied:
    """What a field was copied of, where torch has a view of it."""

    def __init__(self, what: str, base: Tensor, of: Copied | None = None) -> None:
        self.what, self.base, self.version = what, weakref.ref(base), version(base)
        numbers = StorageWeakRef(base.untyped_storage())
        self.numbers: list[Any] = [numbers, *(of.numbers if of is not None else ())]
        found = _copies.setdefault(numbers.cdata, weakref.WeakSet())
        self.copies: weakref.WeakSet[Copied] = found if of is None else of.copies
        self.copies.add(self)

    def is_alone(self) -> bool:
        """True if neither what it was copied of nor another copy of that is left."""
        return all(n.expired() for n in self.numbers) and len(self.copies) == 1

    def check(self) -> None:
        """Raise if what it was copied of has been written since."""
        base = self.base()
        if base is not None and version(base) != self.version:
            raise UnsupportedError(
                f"{self.what} of a weft.Field is a copy, as positions moved between ranks, and what"
                " it was copied of has been written since: torch's would have changed with it; take"
                " it again after the write"
            )


def _check_plain(subject: str, x: object) -> None:
    if not isinstance(x, Tensor) or isinstance(x, DTensor | Field):
        raise ShapeError(
            f"{subject} takes a plain tensor, found a {type(x).__name__}; of a DTensor or a field"
            " pass full_tensor()"
        )


def distributed(
    x: Tensor, layout: Layout, dims: Mapping[str, int], report: WholeReport | None = None
) -> Field:
    """The field of a whole tensor; of functions without a rule a report takes note, if given."""
    region, placed = _chunked(x, layout, dims, report)
    return Field(entered(x, tuple(placed), region), region.place(placed, x.stride()))


def cut(
    x: Tensor,
    layout: Layout,
    dims: Mapping[str, int],
    report: WholeReport | None = None,
    averaged: bool = False,
    beside: Sequence[Held] = (),
) -> Field:
    """The field of a tensor that every rank made whole; its gradients are shares of one.

    With `averaged`, gradients of plain tensors are shares of as many as there are ranks.
    """
    region, placed = _chunked(x, layout, dims, report, averaged, beside=beside)
    y = placed_like(x, [whole(n) for n in x.shape], placed, region)
    return Field(y.clone() if y is not x else y.view_as(y), region.place(placed, x.stride()))


def _chunked(
    x: Tensor, layout: Layout, dims: Mapping[str, int], *rest: Any, beside: Sequence[Held] = ()
) -> tuple:
    """A region, and the dims of a whole tensor that is split; one of one position is whole."""
    region, at = _region(layout, dims, x.dim(), layout.sharding, *rest)
    placed: list[Dim] = [whole(n) for n in x.shape]
    for axis in at.keys() & {*region.axes}:
        if (n := x.shape[at[axis]]) != 1:
            placed[at[axis]] = split_dim(region.chunks_beside(beside, region.chunks(axis, n)))
    return region, placed


def settled(local: Tensor, dims: Sequence[Dim], region: FieldRegion, trail: int = 0) -> Field:
    """The field of a local tensor; a dim of one position comes to every rank, as it broadcasts."""
    goal = settled_dims(dims)
    return Field(placed_like(local, dims, goal, region, "position"), region.place(goal), trail)


def settled_dims(dims: Sequence[Dim]) -> list[Dim]:
    """Dims, those of one position whole."""
    return [whole(1) if dim_size(dim) == 1 else dim for dim in dims]


def _region(
    layout: Layout,
    dims: Mapping[str, int],
    ndim: int,
    whole_on: Iterable[str] = (),
    report: WholeReport | None = None,
    averaged: bool = False,
) -> tuple[FieldRegion, dict[str, int]]:
    """The region of the axes that a layout splits, and the dims of all axes.

    Along `whole_on`, other axes but those of batches and heads, ranks have the same.
    """
    if not isinstance(layout, Layout):
        raise DeclarationError(
            f"layout is a bound weft.Layout, found a {type(layout).__name__}; for one device pass"
            " weft.Layout.single()"
        )
    _ = layout.bound
    layout._check_axes(dims, ndim)
    at = {axis: dim % ndim for axis, dim in dims.items()}
    if len({*at.values()}) < len(at):
        raise ShapeError(f"dims {dict(dims)}: two axes have one dim")
    others = (a for a in whole_on if a not in ("batch", "heads"))
    return region_of(layout, (*dims, *others), report, averaged), at


def own_chunk(x: Tensor, axis: str, dim: int) -> Tensor:
    """This rank's part of a field, split as its layout splits an axis along `dim` alone."""
    if not isinstance(x, Field):
        return x
    region = x._region
    region.trail, region.function = x._trail, "an engine on chunks"
    goal: list[Dim] = [whole(dim_size(d)) for d in x._dims]
    if x.shape[dim] != 1 and axis in region.axes:
        goal[dim] = split_dim(region.chunks(axis, x.shape[dim]))
    return placed_like(x._checked()._local, x._dims, goal, region, "align")


__all__ = ["Field"]
