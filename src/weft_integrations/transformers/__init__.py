"""Hugging Face transformers on a layout: `weft.parallelize(model, layout)`."""

from ..parallelize import parallelize, restore
from .batches import Batch, shard_batch, token_loss
from .cache import ShardedCache
from .verification.verify import Verified, verify

__all__ = [
    "Batch",
    "ShardedCache",
    "Verified",
    "parallelize",
    "restore",
    "shard_batch",
    "token_loss",
    "verify",
]
