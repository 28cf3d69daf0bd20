"""Hugging Face transformers on a layout: `parallelize(model, layout)`; the model is unmodified."""

from .batches import Batch, shard_batch, shift, token_loss
from .model import parallelize, restore
from .verification.verify import Verified, verify

__all__ = [
    "Batch",
    "Verified",
    "parallelize",
    "restore",
    "shard_batch",
    "shift",
    "token_loss",
    "verify",
]
