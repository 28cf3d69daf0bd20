"""Hugging Face transformers on a layout: `parallelize(model, layout)`; the model is unmodified."""

from .batches import Batch, shard_batch, token_loss
from .cache import ShardedCache
from .model import parallelize, restore
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
