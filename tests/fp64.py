"""fp64 all through a model, so that what is wrong on ranks is no rounding."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class InFP64(TorchFunctionMode):
    """Casts to fp32 are casts to fp64: in norms, softmax, scans and rotary angles."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        func = Tensor.double if func is Tensor.float else func
        if func in (Tensor.to, Tensor.type):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


def whole(t: Tensor) -> Tensor:
    """An output as one device has it."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t
