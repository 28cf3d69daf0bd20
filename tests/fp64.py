"""fp64 all through a model, so that what is wrong on ranks is no rounding."""

from torch import Tensor

from weft_integrations.transformers.exactness import InFP64


def whole(t: Tensor) -> Tensor:
    """An output as one device has it."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


__all__ = ["InFP64", "whole"]
