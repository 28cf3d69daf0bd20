"""Functions of single positions: a result is local, and dims broadcast; dtypes, new tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .dims import Dim, dim_size, is_split_dim, whole
from .exchange import placed_like
from .field import Field
from .registry import Part, Recipe, both, direct, on_locals, pointwise, refused, rule

_POSITIONWISE = """
    abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2
    arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip clone complex
    contiguous copysign cos cosh deg2rad digamma div divide elu eq erf erfc erfinv exp exp2 expm1
    fix float_power floor floor_divide fmax fmin fmod frac gcd ge gelu greater greater_equal
    gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac isclose isfinite
    isinf isnan isneginf isposinf isreal lcm ldexp le leaky_relu lerp less less_equal lgamma log
    log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit
    logsigmoid lt masked_fill maximum minimum mish mul multiply mvlgamma nan_to_num ne neg negative
    nextafter not_equal polar polygamma positive pow rad2deg real imag conj resolve_conj resolve_neg
    conj_physical reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign signbit
    silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink
    threshold true_divide trunc where xlogy zeros_like ones_like full_like empty_like detach
    special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2 special_expit
    special_expm1 special_gammainc special_gammaincc special_gammaln special_i0 special_i0e
    special_i1 special_i1e special_log1p special_log_ndtr special_logit special_multigammaln
    special_ndtr special_ndtri special_polygamma special_psi special_round special_sinc
    special_xlog1py special_xlogy special_zeta special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_airy_ai
    entr erfcx expit gammainc gammaincc gammaln i0e i1 i1e log_ndtr multigammaln ndtr ndtri psi
    xlog1py zeta fill
"""
_OF_TENSORS = """
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __neg__ __pow__
    __pos__ __rpow__ __abs__ __invert__ __and__ __or__ __xor__ __rand__ __ror__ __rxor__ __lt__
    __le__ __gt__ __ge__ __eq__ __ne__ __mod__ __rmod__ __floordiv__ __rfloordiv__ __lshift__
    __rshift__ __rlshift__ __rrshift__ bfloat16 half float double int long bool short char byte
    cfloat cdouble cpu cuda zero copy
"""


def _names(text: str, *places: Any) -> set[Any]:
    found = (getattr(p, name) for name in text.split() for p in places if hasattr(p, name))
    return {f for f in found if callable(f)}


POSITIONWISE = _names(_POSITIONWISE, torch, Tensor, F, torch.special) | _names(_OF_TENSORS, Tensor)


@rule(torch.where)
def where(condition: Part, *values: Any, out: None = None, **named: Any) -> Recipe:
    if not values and not named:
        raise refused("where of a condition alone, which is nonzero,", condition)
    return pointwise(torch.where, (condition, *values), named)


@rule(torch.frexp, Tensor.frexp)
def frexp(x: Part) -> Recipe:
    return on_locals(torch.frexp, (x,), [x.dims, x.dims])


@rule(torch.bucketize)
def bucketize(x: Any, boundaries: Part, **kwargs: Any) -> Recipe:
    if not isinstance(x, Part):
        raise refused("bucketize of a number", boundaries)
    goals = {boundaries.index: [whole(n) for n in boundaries.shape]}
    return on_locals(torch.bucketize, (x, boundaries), x.dims, goals, kwargs)


@rule(F.prelu, torch.prelu)
def prelu(x: Part, weight: Part) -> Recipe:
    if x.ndim > 1 and x.is_split(1) and weight.shape.numel() > 1:
        return on_locals(F.prelu, (x, weight), x.dims, {weight.index: [x.dims[1]]})
    return on_locals(F.prelu, (x, weight), x.dims, {weight.index: [whole(n) for n in weight.shape]})


@rule(torch.view_as_real)
def view_as_real(x: Part) -> Recipe:
    return on_locals(torch.view_as_real, (x,), (*x.dims, whole(2)))


@rule(torch.view_as_complex)
def view_as_complex(x: Part) -> Recipe:
    return on_locals(
        torch.view_as_complex, (x,), x.dims[:-1], {x.index: x.whole_along([x.ndim - 1])}
    )


# -- dtypes and devices ---------------------------------------------------------------------------


@rule(Tensor.to, Tensor.type_as)
def to(x: Part, *args: Any, **kwargs: Any) -> Recipe:
    def run(t: list[Any]) -> Tensor:
        def kind(value: Any) -> Any:  # of another tensor only the dtype and the device are taken
            return t[value.index].new_empty(()) if isinstance(value, Part) else value

        return t[x.index].to(*map(kind, args), **{name: kind(v) for name, v in kwargs.items()})

    return Recipe(run, x.dims)


@rule(Tensor.type)
def as_type(x: Part, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Recipe:
    if dtype is None:
        return Recipe(lambda t: t[x.index].type(), None)
    return on_locals(Tensor.type, (x, dtype), x.dims)


# -- new tensors, where their source is -----------------------------------------------------------


def _new(name: str) -> None:
    of = getattr(Tensor, name)
    has_value = name == "new_full"

    @rule(of)
    def made(x: Part, *args: Any, size: Any = None, **kwargs: Any) -> Recipe:
        rest: tuple[Any, ...] = ()
        if size is None and has_value:
            size, rest = args[0], args[1:]
        elif size is None:
            size = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        elif has_value:
            rest = args
        size = [size] if isinstance(size, int) else size
        if any(isinstance(n, Part) for n in size):
            raise refused(f"{name} of sizes that are tensors", x)
        size = [int(n) for n in size]
        dims = _like(x.dims, size)
        shape = [x.region.local_size(dim) for dim in dims]
        return on_locals(of, (x, shape, *rest), dims, None, kwargs)


def _like(dims: Sequence[Dim], size: Sequence[int]) -> list[Dim]:
    """Dims of some sizes, split where those of another tensor at the same place are."""
    same = len(dims) == len(size)
    return [
        dims[d] if same and n == dim_size(dims[d]) and is_split_dim(dims[d]) else whole(n)
        for d, n in enumerate(size)
    ]


for _name in ("new_zeros", "new_ones", "new_full", "new_empty"):
    _new(_name)


@direct(Tensor.new_tensor)
def new_tensor(x: Any, *args: Any, **kwargs: Any) -> Tensor:
    return (x._local if isinstance(x, Field) else x).new_tensor(*args, **kwargs)


@rule(F.one_hot)
def one_hot(x: Part, num_classes: int = -1) -> Recipe:
    if num_classes < 0:
        raise refused("one_hot without num_classes, which is the largest of all ranks,", x)
    return on_locals(F.one_hot, (x, num_classes), (*x.dims, whole(num_classes)))


@rule(F.embedding)
def _embedding(
    x: Part,
    weight: Part,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Recipe:
    if max_norm is not None or scale_grad_by_freq:
        raise refused("embedding with max_norm or scale_grad_by_freq, which count indices,", x)
    if weight.is_split(0) or weight.is_split(1):
        raise refused("embedding by a table that is split", weight)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return on_locals(
        F.embedding,
        (x, weight, padding_idx),
        (*x.dims, whole(weight.shape[1])),
        None,
        {"sparse": sparse},
    )


def _dropout(func: Any) -> None:
    """Dropout of a mask that every rank draws whole, as one device does, and cuts."""

    @rule(func)
    def dropped(x: Part, p: float = 0.5, training: bool = True, inplace: bool = False) -> Recipe:
        if not training or not p or not x.shape.numel():
            return Recipe(lambda t: t[x.index].view_as(t[x.index]), x.dims)

        def run(t: list[Any]) -> Tensor:
            local = t[x.index]
            like = torch.empty_strided(x.shape, x.strides, dtype=local.dtype, device="meta")
            mask = func(torch.empty_like(like, device=local.device).fill_(1), p, True)
            return local * placed_like(mask, [whole(n) for n in x.shape], x.dims, x.region)

        return Recipe(run, x.dims, writes=inplace, draws=None)


for _func in both("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"):
    _dropout(_func)


@rule(*both("alpha_dropout", "feature_alpha_dropout"))
def alpha_dropout(x: Part, p: float = 0.5, training: bool = False, inplace: bool = False) -> Recipe:
    if training and p:
        raise refused("alpha_dropout while training", x)
    return Recipe(lambda t: t[x.index].view_as(t[x.index]), x.dims)
