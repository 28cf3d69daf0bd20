"""Hugging Face transformers on a layout: `weft.parallelize(model, layout)`."""

from ..parallelize import parallelize, restore
from .cache import ShardedCache
from .exactness import Verified, verify

__all__ = ["ShardedCache", "Verified", "parallelize", "restore", "verify"]
