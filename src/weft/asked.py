"""What a call of `weft.attention` asks for, as its user wrote it: one value, checked once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from ._digest import is_plain
from ._torch import in_forward_mode, with_tangent
from .bias import Bias
from .choice import ChoiceKind, ChosenKeys
from .comm.channel import refused_everywhere
from .errors import DeclarationError, ShapeError, UnsupportedError, WeftError
from .layout import Layout
from .masks import FULL, Mask, check_mask
from .masks.given import mask_of
from .plan.call import Call, Expanded, axis_names
from .plan.lengths import Length, read_length
from .runtime.calls import BoundCall
from .sinks import check_sinks


class Asked(NamedTuple):
    """The options of a call, on the layout that it is made on; from `axes` on they are its key.

    `learned` says that the bias is a tensor, `want_lse` that the logsumexp is used, and `expanded`
    has the sizes of what latents expand to where these travel.
    """

    layout: Layout
    bias: Bias | None
    learned: bool
    choice: ChosenKeys | ChoiceKind | None
    axes: tuple[str, ...]
    mask: Mask | None
    scale: float | None
    length: Length | None
    want_lse: bool
    softcap: float | None
    kernel: str | None
    name: str | None
    expanded: Expanded | None = None

    def along(self, axes: Sequence[str]) -> Asked:
        """The same along several axes, whose names are checked."""
        check_given_layout(self.layout)
        attended = next((tuple(key.split("+")) for key in self.layout.attend), ("",))
        with refused_everywhere(self._replace(axes=attended).refuse):
            return self._replace(axes=axis_names(axes))

    def bound(self, *tensors: Any) -> BoundCall:
        """The call, checked as far as it can be without the shapes of q, k, v and sinks."""
        layout = self.layout
        plain = (
            layout.__class__ is Layout
            and self.bias is None
            and not self.learned
            and self.choice is None
            and _is_value(self)
        )
        if not plain:
            check_given_layout(layout)
        bound = BoundCall.kept(layout, self[4:]) if plain else None
        if bound is not None and not tensors:
            return bound
        if bound is not None:  # quickly, as every call is here: `_check_kinds` has nothing to say
            q, k, v, sinks = tensors
            if type(q) is type(k) is type(v) is Tensor and sinks is None and not in_forward_mode():
                return bound
        with refused_everywhere(self.refuse):
            if bound is None:
                call = self._checked()
                bound = BoundCall.keep(layout, self[4:], call) if plain else BoundCall(layout, call)
            if tensors:
                _check_kinds(*tensors)
        return bound

    def refuse(self, error: WeftError) -> None:
        """Abort the call on all participating ranks; of unknown axes, on those of any axis."""
        if not self.layout.is_bound:
            return
        asked: dict[str, Any] = {"bias": self.bias if isinstance(self.bias, Bias) else None}
        with contextlib.suppress(WeftError):
            asked["mask"] = self._checked_mask()
        for attended in (self.axes, *(tuple(key.split("+")) for key in self.layout.attend)):
            with contextlib.suppress(WeftError):
                return BoundCall(self.layout, Call(attended, **asked)).refuse(error)

    def _checked_mask(self) -> Mask:
        mask = FULL if self.mask is None else mask_of(self.mask)
        check_mask(mask)
        return mask

    def _checked(self) -> Call:
        mask = self._checked_mask()
        scale, softcap = (
            None if value is None else _number(label, value)
            for label, value in (("scale", self.scale), ("softcap", self.softcap))
        )
        if self.bias is not None and not isinstance(self.bias, Bias):
            found = type(self.bias).__name__
            raise ShapeError(f"bias is a weft.Bias or a tensor, found a {found}")
        kind = self.choice
        if kind is not None and not isinstance(kind, ChoiceKind):
            if not isinstance(kind, ChosenKeys):
                raise ShapeError(
                    f"choice is a weft.ChosenKeys for this call, found a {type(kind).__name__}"
                )
            kind = kind.kind
        return Call(
            self.axes,
            mask,
            scale,
            read_length(self.axes, self.length),
            self.want_lse,
            softcap,
            self.kernel,
            self.bias,
            self.learned,
            name=self.name,
            choice=kind,
            expanded=self.expanded,
        )


def check_given_layout(layout: object) -> None:
    """Raise `DeclarationError` unless it is a layout."""
    if not isinstance(layout, Layout):
        raise DeclarationError(
            f"layout is a bound weft.Layout, found a {type(layout).__name__}; for one device pass"
            " weft.Layout.single()"
        )


def _is_value(asked: Asked) -> bool:
    """True if the options are usable as a cache key (exact types: `True` is not `1`)."""
    _, _, _, _, _, mask, scale, length, _, softcap, kernel, name, _ = asked
    return (
        (scale is None or type(scale) is float)
        and (softcap is None or type(softcap) is float)
        and (length is None or type(length) is int or _is_pair(length))
        and (kernel is None or type(kernel) is str)
        and (name is None or type(name) is str)
        and (mask is None or is_plain(mask))
    )


def _is_pair(length: Length) -> bool:
    return type(length) is tuple and all(n is None or type(n) is int for n in length)


def _number(label: str, value: float) -> float:
    if isinstance(value, Tensor) and value.requires_grad:
        raise UnsupportedError(
            f"{label} is a number of the call and gets no gradient, found a tensor that requires"
            " one; for a learned scale multiply q by it, or pass a number"
        )
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if isinstance(value, str | bool) or not math.isfinite(number):
        raise ShapeError(f"{label} is a finite number, found {value!r:.80}")
    return number


def _check_kinds(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise ShapeError(f"{name} is a tensor, found a {type(t).__name__}")
        if isinstance(t, DTensor):
            raise ShapeError(f"{name} is a DTensor and q is not: pass all three as one kind")
    if carrier := with_tangent(q=q, k=k, v=v):
        raise UnsupportedError(
            f"{carrier} carries a forward-mode tangent, which weft.attention does not compute; use "
            "reverse-mode gradients"
        )
    if sinks is not None:
        check_sinks(sinks, q)
