"""Fields: tensors with their global shape, split over axes, for unmodified models."""

from . import run as _run  # noqa: F401 (what torch's functions do to fields)
from .chunked import cut, of_chunk, on_chunks, own_chunk, split_at
from .field import Field, distributed
from .place import WholeReport

__all__ = [
    "Field",
    "WholeReport",
    "cut",
    "distributed",
    "of_chunk",
    "on_chunks",
    "own_chunk",
    "split_at",
]
