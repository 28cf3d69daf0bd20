"""diffusers' transformers on a layout: `parallelize(transformer, layout)`."""

from .model import parallelize, restore

__all__ = ["parallelize", "restore"]
