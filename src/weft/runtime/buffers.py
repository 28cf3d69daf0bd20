"""Packing of tensors into flat buffers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..plan.steps import Form


def pack(tensors: Sequence[Tensor], form: Form) -> Tensor:
    """Tensors as one flat buffer, in the dtypes of its form; one alone is copied only if need be.

    Each begins where the form says, so that kernels can read it in place.
    """
    if len(tensors) == 1:
        # `reshape` alone may leave a view with gaps.
        return tensors[0].to(form.places[0].dtype).reshape(-1).contiguous()
    buffer = tensors[0].new_empty(form.numel, dtype=form.dtype)
    for place, t in zip(unpack(buffer, form), tensors):
        place.copy_(t)
    return buffer


def unpack(buffer: Tensor, form: Form) -> tuple[Tensor, ...]:
    """The inverse of `pack`, as views of the buffer."""
    begin = buffer.storage_offset()
    return tuple(
        buffer.as_strided(shape, strides, begin + low)
        if dtype == form.dtype
        else buffer[low:high].view(dtype).view(shape)
        for low, high, shape, strides, dtype in form.places
    )
