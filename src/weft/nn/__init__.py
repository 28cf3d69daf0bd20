"""Modules over named axes: attention, its parameters, rotary positions, named masks and biases."""

from .attention import MultiAxisAttention

__all__ = ["MultiAxisAttention"]
