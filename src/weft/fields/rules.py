"""Runs the rule of a function of torch; functions of single positions have one for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from .._torch import as_torch_does
from ..errors import UnsupportedError
from . import attention, norms, reduce, views, windows  # noqa: F401 (they register their rules)
from .dims import is_split_dim, text_of, whole
from .field import Field
from .registry import RULES, aligned_part, attribute, both, local_of, pointwise, refused, rule

#: Functions of single positions: their results are local, and dims broadcast.
_POSITIONWISE = """
    abs acos add addcdiv addcmul arctan arctan2 asin atan atan2 bitwise_and bitwise_not bitwise_or
    ceil celu clamp clamp_max clamp_min clone contiguous copysign cos cosh deg2rad detach div divide
    elu eq erf erfc exp exp2 expm1 float_power floor floor_divide fmod frac ge gelu gt hardshrink
    hardsigmoid hardswish hardtanh hypot isfinite isinf isnan isneginf le leaky_relu lerp log log10
    log1p log2 logical_and logical_not logical_or logical_xor logit logsigmoid lt masked_fill
    maximum minimum mish mul multiply nan_to_num ne neg negative pow reciprocal relu relu6 remainder
    round rsqrt rsub selu sgn sigmoid sign silu sin sinh softplus softshrink softsign sqrt square
    sub subtract tan tanh tanhshrink threshold true_divide trunc where xlogy zeros_like ones_like
    full_like empty_like
"""
_OF_TENSORS = """
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __neg__ __pow__
    __rpow__ __abs__ __invert__ __and__ __or__ __xor__ __lt__ __le__ __gt__ __ge__ __eq__ __ne__
    __mod__ __floordiv__ bfloat16 half float double int long bool cpu cuda
"""
_IN_PLACE = """
    add sub mul div clamp masked_fill relu exp sqrt rsqrt neg sigmoid tanh pow abs copy zero fill
"""
_IN_PLACE_OPERATORS = "__iadd__ __isub__ __imul__ __itruediv__"
_SHAPE_ATTRIBUTES = """
    shape ndim dtype device layout is_cuda is_sparse is_mps is_quantized is_meta is_xpu is_nested
    is_cpu is_mkldnn itemsize nbytes names is_leaf
"""


#: Answered by the shape that a field has.
_OF_SHAPE = {
    *both("numel", "is_floating_point", "is_complex", "is_tensor"),
    *(Tensor.size, Tensor.dim, Tensor.__len__, Tensor.ndimension, Tensor.element_size),
    *(Tensor.stride, Tensor.is_contiguous, Tensor.get_device, Tensor.type, Tensor.nelement),
    *map(attribute, _SHAPE_ATTRIBUTES.split()),
}
_GRAPH, _WANTS_GRADIENT = attribute("grad_fn"), attribute("requires_grad")
#: Asked of the local tensor, whose graph is that of autograd.
_OF_LOCAL = {_WANTS_GRADIENT, _GRAPH, attribute("output_nr")}


def _names(text: str, *places: Any) -> set[Any]:
    return {getattr(p, name) for name in text.split() for p in places if hasattr(p, name)}


POSITIONWISE = _names(_POSITIONWISE, torch, Tensor, F) | _names(_OF_TENSORS, Tensor)
IN_PLACE = _names(" ".join(f"{n}_" for n in _IN_PLACE.split()), Tensor)
IN_PLACE |= _names(_IN_PLACE_OPERATORS, Tensor)


def run_function(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a function of torch on the local tensors of fields."""
    if func in OF_AUTOGRAD:
        return OF_AUTOGRAD[func](*args, **kwargs)
    return as_torch_does(_run, func, args, kwargs)


def _run(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Result of a function of torch for arguments among which are fields."""
    _check(func, (*args, *kwargs.values()))
    if func in _OF_SHAPE:
        return func(*args, **kwargs)
    if func in _OF_LOCAL:
        return func(*(local_of(a) for a in args), **kwargs)
    if func in RULES:
        return RULES[func](*args, **kwargs)
    if func in POSITIONWISE:
        return pointwise(func, args, kwargs)
    if func in IN_PLACE:
        return _in_place(func, args, kwargs)
    name = function_name(func)
    raise UnsupportedError(
        f"{name} has no rule for a weft.Field {_described((*args, *kwargs.values()))};"
        " where it treats every position by itself, give it field.to_local() and make a field of"
        " the result by weft.Field.from_local, or give it field.full_tensor()"
    )


def function_name(func: Any) -> str:
    """A function of torch by its name."""
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or str(func)
    if name == "__get__":
        name = f"the attribute {getattr(func.__self__, '__name__', '')}"
    return f"torch's {name}"


def _check(func: Any, values: tuple) -> None:
    name = function_name(func)
    fields = [v for v in values if isinstance(v, Field)]
    for group in values:
        if isinstance(group, list | tuple):
            fields += [v for v in group if isinstance(v, Field)]
    for field in fields:
        if field._is_unpacked and _WANTS_GRADIENT(field):
            field._local.requires_grad_()
        if _GRAPH(field) is not None:
            raise UnsupportedError(
                f"{name} gets a weft.Field that a torch.autograd.Function returned, such"
                " as a checkpoint with use_reentrant=True: gradients through it would be lost; pass"
                " use_reentrant=False, or give the function local tensors"
            )
        if field._region.layout is not fields[0]._region.layout:
            raise UnsupportedError(
                f"{name} gets weft.Fields of two layouts: distribute both on one"
            )
    if any(isinstance(v, DTensor) for v in values):
        raise UnsupportedError(
            f"{name} gets a weft.Field and a DTensor: pass the DTensor's full_tensor(); of"
            " weights that FSDP2 shards, call the module that FSDP2 wraps"
        )


def _described(values: tuple) -> str:
    return next((text_of(v._dims) for v in values if isinstance(v, Field)), "in a list")


def _in_place(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, *rest = args
    if not isinstance(x, Field):
        name = function_name(func)
        raise UnsupportedError(
            f"{name} writes a weft.Field into a plain tensor, which every rank has whole"
        )
    goal = list(x._dims)

    def placed(t: Any) -> Any:
        if isinstance(t, Tensor) and t.dim():
            return aligned_part(t, goal[len(goal) - t.dim() :], x._region)
        return local_of(t)

    func(x._local, *map(placed, rest), **{name: placed(t) for name, t in kwargs.items()})
    return x


# -- dtype, gradients, and functions along one dim ------------------------------------------------


@rule(Tensor.to, Tensor.type_as)
def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Convert; of another tensor only the dtype and device are taken."""

    def kind(value: Any) -> Any:
        return local_of(value).new_empty(()) if isinstance(value, Tensor) else value

    result = local_of(x).to(*map(kind, args), **{name: kind(v) for name, v in kwargs.items()})
    return Field(result, x._dims, x._region) if isinstance(x, Field) else result


for _made in (
    Tensor.new_zeros,
    Tensor.new_ones,
    Tensor.new_full,
    Tensor.new_empty,
    Tensor.new_tensor,
):
    RULES[_made] = lambda x, *args, _of=_made, **kwargs: _of(local_of(x), *args, **kwargs)


def _run_backward(x: Field, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
    """The backward pass of a loss that all ranks compute."""
    x.full_tensor().backward(gradient, *args, **kwargs)


def _gradients(outputs: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any) -> tuple:
    """`torch.autograd.grad` of losses that all ranks compute; of fields it gives fields."""
    groups = [(x,) if isinstance(x, Tensor) else tuple(x) for x in (outputs, inputs)]
    losses = [x.full_tensor() if isinstance(x, Field) else x for x in groups[0]]
    found = torch.autograd.grad(losses, [local_of(x) for x in groups[1]], grad_outputs, **kwargs)
    pairs = zip(found, groups[1])
    return tuple(
        Field(g, x._dims, x._region) if g is not None and isinstance(x, Field) else g
        for g, x in pairs
    )


#: Functions that run backward passes, in which checkpoints call models on fields again.
OF_AUTOGRAD: dict[Any, Callable] = {Tensor.backward: _run_backward, torch.autograd.grad: _gradients}


for _read in (Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.tolist):
    RULES[_read] = lambda x, _of=_read: _of(x.full_tensor().detach())


def _setter(name: str) -> Any:
    return getattr(getattr(Tensor, name), "__set__", None)


@rule(attribute("grad"))
def gradient_of(x: Field) -> Field | None:
    grad = x._local.grad
    return None if grad is None else Field(grad, x._dims, x._region)


@rule(_setter("grad"))
def set_gradient(x: Field, grad: Any) -> None:
    x._local.grad = local_of(grad)


@rule(Tensor.requires_grad_)
def require_gradient(x: Field, requires_grad: bool = True) -> Field:
    x._local.requires_grad_(requires_grad)
    x.requires_grad = requires_grad  # as a torch.autograd.Function sees it
    return x


@rule(_setter("requires_grad"))
def set_requires_grad(x: Field, requires_grad: bool) -> None:
    require_gradient(x, requires_grad)


@rule(attribute("_base"), Tensor.register_hook)
def _refuse_hooks(x: Field, *_: Any) -> None:
    raise refused(
        "a hook on gradients, such as that of a unit of FSDP2 inside the model,",
        x,
        "; give weft.data_parallel(model, layout, 'ddp') the model, or sync_gradients",
    )


@rule(Tensor.retain_grad)
def retain_gradient(x: Field) -> None:
    x._local.retain_grad()


@rule(attribute("data"))
def data(x: Field) -> Field:
    return Field(x._local.data, x._dims, x._region)


def _along_dim(func: Callable, default: int | None = None) -> Callable:
    def run(x: Field, *args: Any, **kwargs: Any) -> Field:
        dim = kwargs.get("dim", args[0] if args else default)
        if not isinstance(dim, int) or is_split_dim(x._dims[dim]):
            raise refused(f"{function_name(func)} along dim {dim}", x)
        y = func(x._local, *args, **kwargs)
        dims = list(x._dims)
        if y.dim() != x.dim():
            dims.pop(dim % x.dim())
        elif y.shape[dim] != x._local.shape[dim]:
            dims[dim] = whole(y.shape[dim])
        return Field(y, dims, x._region)

    return run


for _name in ("softmax", "log_softmax", "cumsum", "cumprod", "logsumexp", "glu", "softmin"):
    for _func in both(_name):
        RULES[_func] = _along_dim(_func, -1 if _name == "glu" else None)


def _dropped(name: str) -> Callable:
    def dropout(x: Field, p: float = 0.5, training: bool = True, inplace: bool = False) -> Field:
        if training and p > 0:
            raise refused(
                f"{name} while training",
                x,
                ": ranks would drop other positions than one device does; set its probability to 0,"
                " or call model.eval()",
            )
        return x

    return dropout


for _name in [
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
]:
    RULES[getattr(F, _name)] = _dropped(_name)
    for _func in both(_name):
        RULES[_func] = _dropped(_name)

Field._rules = run_function
