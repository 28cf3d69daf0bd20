"""diffusers' transformers on a layout: `weft.parallelize(transformer, layout)`."""

from ..parallelize import parallelize, restore

__all__ = ["parallelize", "restore"]
