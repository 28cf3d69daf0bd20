"""Hugging Face transformers on a layout: `weft.parallelize(model, layout)`."""

from ..parallelize import parallelize, restore
from .cache import ShardedCache

__all__ = ["ShardedCache", "parallelize", "restore"]
