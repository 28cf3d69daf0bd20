"""Full rows that are gathered on first use: logits and hidden states as outputs.

    LazyRows (b, n, v)          has the shape, dtype and gradient of full rows
    .local   (b, n/P, v)        this rank's tokens, all that is held

Copies, casts, scaling, `log_softmax`, `argmax` and `gather` over the last dim, `cross_entropy` and
cutting off the first or last tokens work on this rank's tokens; their results of single numbers per
token are gathered. Anything else gathers the rows first, on every rank of the context group.

What shares memory on one device does here: a slice, a flattened view, `.detach()` and `.data` know
the rows that they are of. Once the rows are gathered, all of them read, and change, that tensor.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft._torch import OF_GRADIENTS, as_torch_does, wrapper
from weft.comm.collectives import partial_to_invariant
from weft.comm.once_differentiable import once
from weft.layout import Layout

from ..common import gathered_rows
from .consistency import Entered, recorded

#: Bytes of full rows from which gathering them is worth a warning.
_LARGE = 1 << 30


@dataclass(frozen=True)
class LazyPlace:
    """The full rows that a rank's tokens are a part of.

    Attributes:
        layout: a bound layout.
        axis: its name for the tokens.
        length: tokens of a full row.
        start: the first token that is left.
        stop: the token after the last that is left.
        flat: rows and tokens are one dim.
        entered: records gradients that enter.
    """

    layout: Layout
    axis: str
    length: int
    start: int
    stop: int
    flat: bool
    entered: Entered

    def shape(self, local: Tensor) -> tuple[int, ...]:
        """Shape of the rows that a rank's tokens stand for."""
        rows, kept = local.shape[0], self.stop - self.start
        return (*((rows * kept,) if self.flat else (rows, kept)), *local.shape[2:])

    def part(self, full: Tensor, fill: float = 0.0) -> Tensor:
        """This rank's tokens of a tensor (b, n, ...) or (b n, ...) that every rank has."""
        if self.flat:
            full = full.unflatten(0, (-1, self.stop - self.start))
        ends = (self.start, self.length - self.stop)
        if any(ends):
            full = F.pad(full, (*(0, 0) * (full.dim() - 2), *ends), value=fill)
        return self.layout.shard(full, {self.axis: 1})

    def gather(self, local: Tensor) -> Tensor:
        """Full rows of all ranks' tokens; backward each rank keeps the part of its tokens."""
        rows = gathered_rows(local, self.layout, {self.axis: 1})
        rows = recorded(rows, self.entered)[:, self.start : self.stop]
        return rows.flatten(0, 1) if self.flat else rows


class _Lift(torch.autograd.Function):
    """A rank's tokens as full rows; their gradient may be of full rows or of the tokens."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, place: LazyPlace, strides: Any) -> Tensor:
        ctx.place = place
        return LazyRows(local.detach(), place, strides)

    @staticmethod
    @once("an output of a model with rows='whole'")
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.local if isinstance(grad, LazyRows) else ctx.place.part(grad), None, None


class _Local(torch.autograd.Function):
    """The inverse of `_Lift`: this rank's tokens of full rows, forward and backward."""

    @staticmethod
    def forward(ctx: Any, rows: LazyRows) -> Tensor:
        ctx.place = rows.place
        return rows.local.detach()

    @staticmethod
    @once("an output of a model with rows='whole'")
    def backward(ctx: Any, grad: Tensor) -> Any:
        return LazyRows(grad, ctx.place)


class _Required(torch.autograd.Function):
    """Gathered rows with the gradient that lazy ones were given afterwards."""

    @staticmethod
    def forward(ctx: Any, rows: LazyRows, gathered: Tensor) -> Tensor:
        return gathered.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class LazyRows(Tensor):
    """Full rows (b, n, ...), of which this rank holds its tokens until all are needed.

    Attributes:
        local: this rank's tokens (b, n/P, ...), without a gradient; nobody writes to them.
        place: which rows they are of.
    """

    local: Tensor
    place: LazyPlace
    _whole: Tensor | None
    _of_rows: LazyRows | None  # the rows that these are a view of
    _again: Callable[[Tensor], Tensor] | None  # makes these of the gathered ones

    @staticmethod
    def __new__(cls, local: Tensor, place: LazyPlace, strides: Any = None) -> LazyRows:
        rows: Any = wrapper(cls, place.shape(local), local, strides)
        rows.local, rows.place = local, place
        rows._whole = rows._of_rows = rows._again = None
        return rows

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"LazyRows({tuple(self.shape)}, {self.dtype}, {tuple(self.local.shape)} here)"

    def whole(self) -> Tensor:
        """All rows as an ordinary tensor, gathered once; every rank of the group calls it."""
        if self._whole is None and self._of_rows is not None:
            self._whole = self._viewing(self._of_rows)
        elif self._whole is None:
            with torch.set_grad_enabled(self.requires_grad):
                self._whole = self._gather()
        elif self.requires_grad and not self._whole.requires_grad:  # since `requires_grad_`
            with torch.enable_grad():
                self._whole = _Required.apply(self, self._whole)
        return self._whole

    @property
    def gathered(self) -> bool:
        """True if the rows that these share memory with are an ordinary tensor by now."""
        return self._whole is not None if self._of_rows is None else self._of_rows.gathered

    def _gather(self) -> Tensor:
        nbytes = self.numel() * self.element_size()
        if nbytes >= _LARGE:
            warnings.warn(
                f"full rows {tuple(self.shape)} are gathered on every rank,"
                f" {nbytes / 2**30:.1f} GiB; log_softmax, gather and cross_entropy over the"
                " last dim are not, and give the model labels where its loss will do",
                stacklevel=4,
            )
        return self.place.gather(_Local.apply(self)).contiguous()  # as these say they are

    def _viewing(self, base: LazyRows) -> Tensor:
        """A view of the gathered rows of another, which is changed in place where this one is."""
        assert self._again is not None  # with every base
        # One that was made without gradient, of rows that have one, has none.
        with torch.set_grad_enabled(self.requires_grad or not base.requires_grad):
            return self._again(base.whole())

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        of = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _ABOUT or (name in ("__get__", "__set__") and of not in _VIEWS):
            return as_torch_does(func, *args, **kwargs)
        first, rule = args[0] if args else None, _RULES.get(of if name == "__get__" else name)
        if rule is not None and isinstance(first, LazyRows) and not first.gathered:
            result = rule(func, first, *args[1:], **kwargs)
            if result is not NotImplemented:
                return result
        return func(*_gathered(args), **_gathered(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it on the class
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Below autograd, where gradients are added up, copied and cast."""
        rows = next((a for a in args if isinstance(a, LazyRows)), None)
        if func in OF_GRADIENTS and rows is not None and all(_fits(a, rows) for a in args):
            parts = [_part_of(a, rows.place) for a in args]
            return LazyRows(func(*parts, **(kwargs or {})), rows.place)
        return func(*_gathered(args), **_gathered(kwargs or {}))


def lazy(local: Tensor, place: LazyPlace, strides: Any = None) -> Tensor:
    """Full rows (b, n, ...) of this rank's tokens, not gathered yet."""
    return _Lift.apply(local, place, strides)


def _viewed(rows: Tensor, base: LazyRows, func: Callable, *args: Any) -> Tensor:
    """Rows that share memory with others, as what a function makes of these does."""
    assert isinstance(rows, LazyRows)
    rows._of_rows, rows._again = base, lambda full: func(full, *args)
    return rows


def _fits(value: Any, rows: LazyRows) -> bool:
    """True if an argument is split as these rows are, or the same for all ranks."""
    if isinstance(value, LazyRows):
        return value.place == rows.place
    return not isinstance(value, Tensor) or value.dim() == 0 or value.shape == rows.shape


def _part_of(value: Any, place: LazyPlace) -> Any:
    if isinstance(value, LazyRows):
        return value.local
    return place.part(value) if isinstance(value, Tensor) and value.dim() else value


def _gathered(value: Any) -> Any:
    """The same arguments, with full rows in the place of lazy ones."""
    if isinstance(value, LazyRows):
        return value.whole()
    if type(value) in (tuple, list):
        return type(value)(map(_gathered, value))
    if type(value) is dict:
        return {name: _gathered(v) for name, v in value.items()}
    return value


# -- rules for a rank's tokens --------------------------------------------------------------------


def _map(func: Callable, rows: LazyRows, *args: Any, **kwargs: Any) -> Any:
    """Apply a function to every number, or to every token's numbers."""
    if any(isinstance(a, Tensor) and a.dim() for a in (*args, *kwargs.values())):
        return NotImplemented
    local = _Local.apply(rows)
    result = func(local, *args, **kwargs)
    if result is local and (func.__name__ != "contiguous" or rows.is_contiguous()):
        return rows  # as torch does where there is nothing to do
    return lazy(result, rows.place) if result.device == rows.device else NotImplemented


def _detach(func: Callable, rows: LazyRows) -> Tensor:
    return _viewed(LazyRows(rows.local, rows.place, rows.stride()), rows, func)


def _last(rows: LazyRows, dim: int | None) -> bool:
    return dim is not None and dim % rows.dim() == rows.dim() - 1


def _over_last(
    func: Callable, rows: LazyRows, dim: int | None = None, *args: Any, **kwargs: Any
) -> Any:
    return _map(func, rows, -1, *args, **kwargs) if _last(rows, dim) else NotImplemented


def _argmax(func: Callable, rows: LazyRows, dim: int | None = None, keepdim: bool = False) -> Any:
    if not _last(rows, dim):
        return NotImplemented
    return rows.place.gather(rows.local.argmax(-1, keepdim))


def _pick(
    func: Callable, rows: LazyRows, dim: int, index: Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not _last(rows, dim) or index.shape[:-1] != rows.shape[:-1] or isinstance(index, LazyRows):
        return NotImplemented
    picked = func(_Local.apply(rows), -1, rows.place.part(index), *args, **kwargs)
    return rows.place.gather(picked)


def _cross_entropy(
    func: Callable,
    rows: LazyRows,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    place = rows.place
    other = weight is not None or size_average is not None or reduce is not None
    if other or not place.flat or target.shape != rows.shape[:1] or target.is_floating_point():
        return NotImplemented
    labels = place.part(target, ignore_index)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    logits = _Local.apply(rows).flatten(0, 1)
    if reduction == "none":
        losses = func(logits, labels.flatten(), reduction="none", **options)
        return place.gather(losses.view(labels.shape))
    total = func(logits, labels.flatten(), reduction="sum", **options)
    dims = place.layout.shard_dims(place.axis)
    # fp64 on the way, as in `layout.mean`.
    total = partial_to_invariant(total.double(), dims, place.layout.bound)
    count = (target != ignore_index).sum() if reduction == "mean" else 1
    return recorded((total / count).to(rows.dtype), place.entered)


def _index(func: Callable, rows: LazyRows, index: Any) -> Any:
    """`x[:, a:b]`, `x[:, a:b, :]` and `x[..., a:b, :]`."""
    index = index if isinstance(index, tuple) else (index,)
    if rows.place.flat or rows.dim() != 3 or len(index) < 2:
        return NotImplemented
    if Ellipsis in [i for i in index if not isinstance(i, Tensor)]:
        at = next(n for n, i in enumerate(index) if i is Ellipsis)
        index = (*index[:at], *(slice(None),) * (4 - len(index)), *index[at + 1 :])
    everything = slice(None)
    plain = all(isinstance(i, slice) and i.step in (None, 1) for i in index)
    if (
        not plain
        or len(index) > 3
        or index[0] != everything
        or index[2:] not in ((), (everything,))
    ):
        return NotImplemented
    start, stop, _ = index[1].indices(rows.shape[1])
    place = replace(
        rows.place, start=rows.place.start + start, stop=rows.place.start + max(start, stop)
    )
    return _viewed(lazy(_Local.apply(rows), place, rows.stride()), rows, func, index)


def _view(func: Callable, rows: LazyRows, *shape: Any) -> Any:
    """`x.view(-1, v)`, `x.reshape(-1, v)` and `x.flatten(0, 1)`."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    flattens = func.__name__ == "flatten" and tuple(sizes) in ((0, 1), (0, -2))
    tokens = math.prod(rows.shape[:-1])
    flat = len(sizes) == 2 and sizes[0] in (-1, tokens) and sizes[1] in (rows.shape[-1], -1)
    if rows.dim() != 3 or not (flattens or (flat and func.__name__ != "flatten")):
        return NotImplemented
    contiguous = rows.is_contiguous()
    if tuple(sizes) == (-1, -1) or (func.__name__ == "view" and not contiguous):
        return NotImplemented
    result = lazy(_Local.apply(rows), replace(rows.place, flat=True))
    return _viewed(result, rows, func, *shape) if contiguous else result  # torch copies


#: Methods that read no numbers.
_ABOUT = frozenset(
    {
        *("size", "dim", "numel", "nelement", "ndimension", "is_floating_point", "is_complex"),
        *("element_size", "register_hook", "retain_grad", "requires_grad_", "get_device"),
        *("__hash__", "__len__", "stride", "is_contiguous", "__repr__"),
    }
)
#: Properties that have its numbers.
_VIEWS = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
_RULES: dict[str, Callable] = {
    **dict.fromkeys(("clone", "contiguous", "float", "double", "half", "bfloat16", "to"), _map),
    **dict.fromkeys(("mul", "div", "true_divide", "__mul__", "__truediv__", "__rmul__"), _map),
    **dict.fromkeys(("detach", "data"), _detach),
    **dict.fromkeys(("log_softmax", "softmax"), _over_last),
    "argmax": _argmax,
    "gather": _pick,
    "cross_entropy": _cross_entropy,
    "__getitem__": _index,
    **dict.fromkeys(("view", "reshape", "flatten"), _view),
}
__all__ = ["LazyPlace", "LazyRows", "lazy"]
