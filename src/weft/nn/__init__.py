"""Modules over named axes: attention, recurrences, windows, norms, named masks and biases."""

from .attention import MultiAxisAttention
from .recurrent import GatedDeltaNet
from .windows import BatchNorm, Convolution, GroupNorm, Pool, Resample

__all__ = [
    "BatchNorm",
    "Convolution",
    "GatedDeltaNet",
    "GroupNorm",
    "MultiAxisAttention",
    "Pool",
    "Resample",
]
