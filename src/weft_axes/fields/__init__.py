"""Fields: tensors with their global shape, split over axes, for unmodified models."""

from . import run as _run  # noqa: F401 (what torch's functions do to fields)
from .field import Field, cut, distributed, own_chunk
from .place import WholeReport

__all__ = ["Field", "WholeReport", "cut", "distributed", "own_chunk"]
