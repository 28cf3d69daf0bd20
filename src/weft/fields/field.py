"""`weft.Field`: a tensor with its global shape, of which every rank holds a part.

    x of 1 x 3 x 13 x 9, height over 2 ranks        rank 0: x[:, :, :7]     rank 1: x[:, :, 7:]
    conv2d(x, weight, padding=1)                    rows 7 and 6 travel; the result is a field, too

Models run on fields unmodified: shapes, masks and views that they compute are those of one device.
Every function of torch has a rule (`rules.py`), or is refused by name, on every rank.

A field has no storage of its own: code that reads tensors past torch, such as a kernel bound in
C++, raises instead of taking a part for the whole. Autograd records what happens to the local
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Self

from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch import OF_UNPACKED, wrapper
from ..errors import DeclarationError, ShapeError, UnsupportedError
from ..layout import Layout
from ..plan.lengths import check_axis_lengths
from ..plan.order import count, shard_spans
from .dims import Chunks, Dim, Factor, dim_size, fused_factors, split_dim, text_of, whole
from .exchange import entered, rechunked, whole_tensor
from .region import FieldRegion


class Field(Tensor):
    """A tensor with its global shape, split over the ranks of a layout, for unmodified models.

    Make one with `Field.distribute` or `Field.from_local`. It behaves as the whole tensor does on
    one device: convolutions, pools, norms, resampling, views, reductions and attention exchange
    what they need, and give the values and gradients of one device. A function without a rule is
    refused, on every rank. `weft.parallelize` hands fields to a model and takes them back.

    Plain tensors that meet a field are whole, and the same on all ranks. Gradients of plain
    tensors, such as weights, are shares: `layout.sync_gradients` adds them up. A loss that is
    computed of fields to its end counts once.

    Args:
        local: this rank's part; `distribute` and `from_local` make a field of what users have.
        dims: per dim its factors, some of which are split.
        region: the ranks that share the field.

    >>> layout = weft.Layout.parse("height: gather=2; width: gather=2")
    >>> def blurred(layout):
    ...     x = weft.Field.distribute(torch.ones(1, 1, 5, 7), layout, {"height": 2, "width": 3})
    ...     return torch.nn.functional.avg_pool2d(x, 3, stride=2, padding=1).full_tensor().shape
    >>> weft.on_threads(layout, blurred)[0]
    torch.Size([1, 1, 3, 4])
    """

    _local: Tensor
    _dims: tuple[Dim, ...]
    _region: FieldRegion
    _is_unpacked: bool = False
    #: what functions of torch do to fields; `rules.py` sets it
    _rules: ClassVar[Callable[[Callable, tuple, dict], Any]]

    @staticmethod
    def __new__(cls, local: Tensor, dims: Sequence[Sequence[Factor]], region: FieldRegion) -> Field:
        """The field of a rank's local tensor; for users, `from_local` checks what this takes."""
        placed = tuple(fused_factors(dim) for dim in dims)
        found, expected = tuple(local.shape), tuple(region.local_size(dim) for dim in placed)
        if found != expected:
            raise ShapeError(
                f"a rank's part of a field {text_of(placed)} has shape {expected}, found {found}"
            )
        shape = [dim_size(dim) for dim in placed]
        self: Field = wrapper(cls, shape, local, requires_grad=local.requires_grad)  # type: ignore[assignment]
        self._local, self._dims, self._region = local, placed, region
        return self

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
            dims: axis -> dim of x, for axes in contiguous order.

        Raises:
            DeclarationError: a layout that is not bound, or an axis in another order.
            ShapeError: an axis or a dim that there is not; a DTensor.
        """
        _check_plain("Field.distribute", x)
        region, at = _region(layout, dims, x.dim())
        placed: list[Dim] = [whole(n) for n in x.shape]
        for axis in region.axes:
            placed[at[axis]] = split_dim(_chunks(layout, axis, x.shape[at[axis]]))
        return cls(entered(x, tuple(placed), region), placed, region)

    @classmethod
    def from_local(
        cls, local: Tensor, layout: Layout, dims: Mapping[str, int], lengths: Mapping[str, int]
    ) -> Field:
        """The field whose part on this rank is a local tensor.

        Args:
            local: this rank's chunk, as `layout.shard` makes it.
            layout: a bound layout.
            dims: axis -> dim, for axes in contiguous order.
            lengths: global length of every axis.

        Raises:
            DeclarationError: a layout that is not bound, or an axis in another order.
            ShapeError: a local tensor of another shape; a DTensor; lengths of other axes.
        """
        _check_plain("Field.from_local", local)
        region, at = _region(layout, dims, local.dim())
        check_axis_lengths("Field.from_local: lengths=", lengths, tuple(dims))
        placed: list[Dim] = [whole(n) for n in local.shape]
        for axis in region.axes:
            if axis not in lengths:
                raise ShapeError(f"Field.from_local: lengths= has no axis {axis!r}")
            placed[at[axis]] = split_dim(_chunks(layout, axis, lengths[axis]))
        return cls(local, placed, region)

    def to_local(self) -> Tensor:
        """This rank's part; each rank may compute a loss of its own part, whose sum is meant."""
        return self._local

    def full_tensor(self) -> Tensor:
        """The whole tensor on every rank (V -> I), for a loss that all ranks compute of it.

        As of `layout.gather`, each rank keeps its part of the gradient, and nothing is sent back.
        """
        return whole_tensor(self._local, self._dims, self._region)

    def rechunked(self) -> Field:
        """The same field in the chunks that its layout makes of every axis, as `layout.shard` does.

        Windows with a stride leave their outputs with the ranks that hold their middles.
        """
        local, dims = self._local, list(self._dims)
        for d, dim in enumerate(dims):
            chunks = dim[0].chunks
            if chunks is None:
                continue
            if len(dim) > 1:
                raise UnsupportedError(f"{self} has a dim of several axes, which no layout makes")
            wanted = _chunks(self._region.layout, chunks.axis, chunks.length)
            local, chunks = rechunked(local, d, chunks, wanted.starts, self._region)
            dims[d] = split_dim(chunks)
        return Field(local, dims, self._region)

    @property
    def chunks(self) -> dict[str, tuple[int, ...]]:
        """Axis -> the first position of every chunk, and the length, of axes that split a dim."""
        return {f.chunks.axis: f.chunks.starts for dim in self._dims for f in dim if f.chunks}

    # -- torch ---------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return cls._rules(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Field:
        if func is OF_UNPACKED and isinstance(args[0], Field):
            # Autograd hands out a tensor that a hook kept, such as a checkpoint's within another.
            x = args[0]
            unpacked = Field(x._local.detach(), x._dims, x._region)
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


def _check_plain(subject: str, x: object) -> None:
    if not isinstance(x, Tensor) or isinstance(x, DTensor | Field):
        raise ShapeError(
            f"{subject} takes a plain tensor, found a {type(x).__name__}; of a DTensor or a field"
            " pass full_tensor()"
        )


def _region(
    layout: Layout, dims: Mapping[str, int], ndim: int
) -> tuple[FieldRegion, dict[str, int]]:
    """The region of the axes that a layout splits, and the dims of all axes."""
    if not isinstance(layout, Layout):
        raise DeclarationError(
            f"layout is a bound weft.Layout, found a {type(layout).__name__}; for one device pass"
            " weft.Layout.single()"
        )
    _ = layout.bound
    layout._check_axes(dims, ndim)
    for axis in dims:
        if layout.order.get(axis, "contiguous") != "contiguous" and layout.size(axis) > 1:
            raise DeclarationError(
                f"{layout.source}: axis {axis!r} of a field must be in contiguous order, as windows"
                " see neighbours; drop its order"
            )
    at = {axis: dim % ndim for axis, dim in dims.items()}
    if len({*at.values()}) < len(at):
        raise ShapeError(f"dims {dict(dims)}: two axes have one dim")
    return FieldRegion(
        layout, tuple(a for a in layout.sharding if a in dims and layout.size(a) > 1)
    ), at


def _chunks(layout: Layout, axis: str, length: int) -> Chunks:
    """The chunks of an axis as the layout makes them."""
    parts = tuple(layout.mesh[d] for d in layout.shard_dims(axis))
    starts = [0]
    for spans in shard_spans(length, parts):
        starts.append(starts[-1] + count(spans))
    return Chunks(axis, tuple(starts))


__all__ = ["Field"]
