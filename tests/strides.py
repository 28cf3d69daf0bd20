"""Ways in which the same numbers can lie in memory, as users' tensors do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _permuted(*dims: int) -> Callable[[Tensor], Tensor]:
    """Stored with the dims in another order."""
    back = [dims.index(i) for i in range(4)]
    return lambda t: t.permute(dims).contiguous().permute(back)


def _spaced(dim: int) -> Callable[[Tensor], Tensor]:
    """Every other entry along a dim; what lies between is not a number."""

    def lay(t: Tensor) -> Tensor:
        both = torch.stack([t, torch.full_like(t, float("nan"))], dim + 1).flatten(dim, dim + 1)
        return both[(slice(None),) * dim + (slice(None, None, 2),)]

    return lay


def _sliced(t: Tensor) -> Tensor:
    """Part of wider rows, as a fused projection of q, k and v gives it."""
    return torch.cat([torch.full_like(t, float("nan")), t], -1)[..., t.shape[-1] :]


def _shifted(t: Tensor) -> Tensor:
    """Beginning one entry into its memory, at no address that 16 bytes divide."""
    memory = t.new_full((t.numel() + 1,), float("nan"))
    memory[1:] = t.reshape(-1)
    return memory[1:].view(t.shape)


#: name -> a tensor (b, h, n, d) laid otherwise
LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "transposed": _permuted(0, 1, 3, 2),
    "b n h d": _permuted(0, 2, 1, 3),
    "n b h d": _permuted(2, 0, 1, 3),
    "d n h b": _permuted(3, 2, 1, 0),
    "spaced dims": _spaced(3),
    "spaced rows": _spaced(2),
    "sliced": _sliced,
    "shifted": _shifted,
}

#: name -> the dims along which a tensor has stride 0, and so holds the same numbers
EXPANDED = {
    "expanded batch": (0,),
    "expanded heads": (1,),
    "expanded rows": (2,),
    "expanded dims": (3,),
    "expanded": (0, 1, 2, 3),
}

NAMES = (*LAID, *EXPANDED)


def alike(t: Tensor, name: str) -> Tensor:
    """The numbers of a full tensor as `lay` needs them: equal along dims that it expands."""
    return _expand(t, name).contiguous()


def lay(t: Tensor, name: str) -> Tensor:
    """Numbers that `alike` made, in strides of their own."""
    return LAID[name](t) if name in LAID else _expand(t, name)


def _expand(t: Tensor, name: str) -> Tensor:
    if t.numel():
        for dim in EXPANDED.get(name, ()):
            t = t.narrow(dim, 0, 1).expand_as(t) if t.shape[dim] > 1 else t
    return t


def overlapping(t: Tensor) -> Tensor:
    """Rows and heads that share memory, with numbers of the tensor; see `Tensor.as_strided`."""
    b, h, n, d = t.shape
    memory = t.reshape(-1)[: b + 2 * h + 3 * n + d]
    memory = torch.cat([memory, memory, memory, memory])
    return memory.as_strided(t.shape, (1, 2, 3, 1))
