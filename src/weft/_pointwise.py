"""Functions of single positions, as FlexAttention calls them, on full tensors of positions.

FlexAttention gives a function four indices without dims, so `doc[b][q]` is the document of a token
there. On index tensors that broadcast, `doc[b, q]` means the same, but `doc[b][q]` does not: its
second index selects from the first one's dim. Such a function is mapped over its indices.

    b (B 1 1 1), h (H 1 1), q (n 1), k (m)     fn(b, h, q, k)                  (B H n m), or mapped
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import ShapeError, WeftError

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def value_of(label: str, fn: Callable[..., Any], device: torch.device | str) -> Any:
    """A function's value at one position, without dims.

    >>> value_of("the mask", lambda b, h, q, k: q >= k, "cpu")
    tensor(True)
    """
    zero = torch.zeros((), dtype=torch.int64, device=device)
    try:
        value = fn(zero, zero, zero, zero)
    except WeftError:
        raise
    except Exception as error:
        raise ShapeError(f"{label} raised {type(error).__name__}: {error}") from error
    if isinstance(value, Tensor) and value.dim():
        raise ShapeError(
            f"{label} gives shape {tuple(value.shape)} for one query and one key, where one value"
            " is wanted; its indices have any shape, which is that of its result"
        )
    return value


def takes_tensors(fn: Function, device: torch.device) -> bool:
    """True if a function of positions broadcasts; else its indices have no dims.

    It is asked with zeros of sizes that differ: indices in each other's results show in the shape.

    >>> doc = torch.zeros(2, 9, dtype=torch.int64)
    >>> [takes_tensors(fn, doc.device) for fn in (
    ...     lambda b, h, q, k: doc[b, q] == doc[b, k], lambda b, h, q, k: doc[b][q] == doc[b][k])]
    [True, False]
    """
    shapes = ((2, 1, 1, 1), (3, 1, 1), (5, 1), (7,))
    indices = [torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes]
    try:
        shape = fn(*indices).shape
    except (IndexError, RuntimeError):
        return False
    except Exception:  # of another kind: it is raised where the function is called
        return True
    return len(shape) <= 4 and all(n in (1, m) for n, m in zip(shape[::-1], (7, 5, 3, 2)))


def values_of(owner: Any, *indices: Tensor) -> Tensor:
    """`owner.fn` at indices that broadcast; the owner remembers whether its function does."""
    if all(t.dim() == 0 for t in indices):
        return owner.fn(*indices)
    takes = vars(owner).get("_broadcasts")
    if takes is None:
        takes = takes_tensors(owner.fn, indices[2].device)
        object.__setattr__(owner, "_broadcasts", takes)
    return owner.fn(*indices) if takes else mapped(owner.fn, *indices)


def mapped(fn: Function, *indices: Tensor) -> Tensor:
    """`fn` at every combination of indices that broadcast, each given to it without dims."""
    shape = torch.broadcast_shapes(*(t.shape for t in indices))
    padded = [t.reshape((1,) * (len(shape) - t.dim()) + t.shape) for t in indices]
    function: Callable[..., Tensor] = fn
    for dim in reversed(range(len(shape))):
        if shape[dim] != 1:
            places = tuple(None if t.shape[dim] == 1 else 0 for t in padded)
            function = torch.vmap(function, in_dims=places)
    if 0 in shape:  # nothing to map over
        zero = torch.zeros((), dtype=torch.int64, device=indices[0].device)
        return fn(zero, zero, zero, zero).new_empty(shape)
    return function(*(t.squeeze() for t in padded)).reshape(shape)
