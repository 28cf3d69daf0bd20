"""Modules over named axes: attention, recurrences, named masks and biases."""

from .attention import MultiAxisAttention
from .recurrent import GatedDeltaNet

__all__ = ["GatedDeltaNet", "MultiAxisAttention"]
