"""What a field says of itself without a rule: shape, graph, gradients, and numbers for Python."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft._torch import as_torch_does, tensor_is_all_true
from weft.errors import UnsupportedError

from .dims import Dim, text_of
from .exchange import gathered_chunks, is_made_whole
from .field import Field
from .place import FieldPlace, FieldRegion
from .registry import DIRECT, attribute, both, direct, refused

_SHAPE_ATTRIBUTES = """
    shape ndim dtype device layout is_cuda is_sparse is_mps is_quantized is_meta is_xpu is_nested
    is_cpu is_mkldnn itemsize nbytes names is_leaf
"""
#: Answered by the shape that a field has.
_OF_SHAPE = {
    *both("numel", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg"),
    *(Tensor.size, Tensor.dim, Tensor.__len__, Tensor.ndimension, Tensor.element_size),
    *(Tensor.stride, Tensor.is_contiguous, Tensor.get_device, Tensor.nelement, torch.is_tensor),
    *(Tensor.is_inference, torch.is_inference, Tensor.dim_order, Tensor.__hash__),
    *map(attribute, _SHAPE_ATTRIBUTES.split()),
}


for _func in _OF_SHAPE:
    DIRECT[_func] = functools.partial(as_torch_does, _func)
for _func in map(attribute, ("requires_grad", "grad_fn", "output_nr", "_version")):
    DIRECT[_func] = lambda x, *args, _of=_func: _of(x._local, *args)  # its graph is autograd's


def _local_of(x: Any) -> Any:
    return x._local if isinstance(x, Field) else x


def _setter(name: str) -> Any:
    return getattr(getattr(Tensor, name), "__set__", None)


# -- numbers for Python: every rank reads the whole -----------------------------------------------

for _read in (
    *(Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__),
    *(Tensor.tolist, Tensor.__complex__, Tensor.is_nonzero),
):
    DIRECT[_read] = lambda x, *args, _of=_read, **kw: _of(x.full_tensor().detach(), *args, **kw)


@direct(Tensor.numpy, Tensor.__array__)
def to_numpy(x: Field, *args: Any, **kwargs: Any) -> Any:
    """An array to read: what is written into one of torch's is written into the tensor."""
    whole = x.full_tensor().detach()
    found = whole.__array__(*args) if args or "dtype" in kwargs else whole.numpy()
    found.flags.writeable = False
    return found


@direct(
    *(Tensor.storage_offset, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage),
    *(Tensor.storage_type, Tensor.__dlpack__, Tensor.share_memory_),
)
def refuse_memory(x: Field, *_: Any, **__: Any) -> None:
    """A copy on every rank, which stands for what has no rule, lies elsewhere."""
    raise UnsupportedError(
        f"where the numbers of a weft.Field {text_of(x._dims)} lie in memory: every rank has its"
        " part; ask x.to_local() or x.full_tensor()"
    )


@direct(torch.equal, Tensor.equal)
def equal(x: Tensor, other: Tensor) -> bool:
    return x.shape == other.shape and bool((x == other).all())


@direct(torch.allclose, Tensor.allclose)
def allclose(x: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> bool:
    return bool(torch.isclose(x, other, *args, **kwargs).all())


@direct(Tensor.__contains__)
def contains(x: Tensor, element: Any) -> bool:
    return bool((x == element).any())


@direct(Tensor.__format__)
def formatted(x: Field, spec: str) -> str:
    return format(x.full_tensor().detach(), spec) if x.dim() == 0 else repr(x)


@direct(tensor_is_all_true)
def is_all_true(x: Field) -> Any:
    return torch.all(x)


@direct(Tensor.__iter__)
def iterated(x: Field) -> Any:
    if x.dim() == 0:
        raise TypeError("iteration over a 0-d tensor")
    return iter(x.unbind(0))


@direct(Tensor.__reversed__)
def turned(x: Field) -> Any:
    return x.flip(0) if x.dim() else x


# -- gradients ------------------------------------------------------------------------------------


@direct(Tensor.backward)
def run_backward(x: Field, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
    """The backward pass of a loss that all ranks compute."""
    gradient = gradient.full_tensor() if isinstance(gradient, Field) else gradient
    x.full_tensor().backward(gradient, *args, **kwargs)


@direct(torch.autograd.backward)
def backward_of_all(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    several = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    losses = [x.full_tensor() if isinstance(x, Field) else x for x in several]
    torch.autograd.backward(losses, grad_tensors, *args, **kwargs)


@direct(torch.autograd.grad)
def gradients(outputs: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any) -> tuple:
    """`torch.autograd.grad` of losses that all ranks compute; of fields it gives fields."""
    groups = [(x,) if isinstance(x, Tensor) else tuple(x) for x in (outputs, inputs)]
    losses = [x.full_tensor() if isinstance(x, Field) else x for x in groups[0]]
    found = torch.autograd.grad(losses, [_local_of(x) for x in groups[1]], grad_outputs, **kwargs)
    region = next(x._region for x in (*groups[0], *groups[1]) if isinstance(x, Field))

    def of_all(g: Tensor | None, x: Tensor) -> Tensor | None:
        if g is None:
            return None
        if isinstance(x, Field):
            return _whole_gradient(g, x._place)
        return g if is_made_whole(x) else _added(g, (), region)  # of a weight ranks have shares

    return tuple(map(of_all, found, groups[1]))


@direct(attribute("grad"))
def gradient_of(x: Field) -> Field | None:
    grad = x._local.grad
    return None if grad is None else _whole_gradient(grad, x._place)


def _whole_gradient(share: Tensor, place: FieldPlace) -> Field:
    """The gradient of a field, of its local tensor's: shares of what several ranks hold add up."""
    return Field(_added(share, place.dims, place.region), place)


def _added(share: Tensor, dims: Sequence[Dim], region: FieldRegion) -> Tensor:
    for axis in region.missing(dims):
        share = gathered_chunks(share, axis, region, "sum").sum(0)
    return share if region.times == 1 else share / region.times


def _share(gradient: Tensor, place: FieldPlace) -> Tensor:
    """A local tensor's gradient, of that of its field: the inverse of `_whole_gradient`."""
    if not isinstance(gradient, Field) or gradient._place.dims != place.dims:
        raise UnsupportedError(str(refused("a gradient that other ranks hold", gradient)))
    return gradient._local * (place.region.times / place.region.copies(place.dims))


@direct(_setter("grad"))
def set_gradient(x: Field, grad: Any) -> None:
    x._local.grad = None if grad is None else _share(grad, x._place)


@direct(Tensor.register_hook)
def register_hook(x: Field, hook: Any) -> Any:
    """A hook on the gradient of all ranks, which is a field; what it gives goes on."""
    place = x._place

    def run(share: Tensor) -> Tensor | None:
        found = hook(_whole_gradient(share, place))
        return None if found is None else _share(found, place)

    return x._local.register_hook(run)


@direct(Tensor.requires_grad_)
def require_gradient(x: Field, requires_grad: bool = True) -> Field:
    x._local.requires_grad_(requires_grad)
    set_requires = _setter("requires_grad")
    as_torch_does(set_requires, x, requires_grad)  # as a torch.autograd.Function sees it
    return x


@direct(_setter("requires_grad"))
def set_requires_grad(x: Field, requires_grad: bool) -> None:
    require_gradient(x, requires_grad)


@direct(attribute("_base"), Tensor.register_post_accumulate_grad_hook)
def refuse_hooks(x: Field, *_: Any) -> None:
    """A copy on every rank, which stands for what has no rule, has no graph that a loss sees."""
    raise UnsupportedError(
        f"{refused('a hook of FSDP2, or one on gradients that are added,', x)}: weft.parallelize"
        " knows the units of the models that it takes; hook x itself by register_hook"
    )


@direct(_setter("data"))
def set_data(x: Tensor, value: Tensor) -> None:
    alike = isinstance(x, Field) and isinstance(value, Field) and x._place.dims == value._place.dims
    if not alike:
        raise UnsupportedError(str(refused("data of another place", x)))
    _local_of(x).data = _local_of(value)


@direct(Tensor.retain_grad)
def retain_gradient(x: Field) -> None:
    x._local.retain_grad()


@direct(attribute("data"))
def data(x: Field) -> Field:
    return x._holding(x._local.data)
