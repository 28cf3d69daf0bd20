"""Training: data drawn on the fly, data parallelism, clipping, the loop and its records."""

from .batches import PackedBatch, PackedReader, TokenDataset, TokenFile
from .data import Batch
from .data_parallel import parallelize
from .gradients import clip_grad_norm_
from .monitor import Record
from .streams import stream
from .trainer import Run, train

__all__ = [
    "Batch",
    "PackedBatch",
    "PackedReader",
    "Record",
    "Run",
    "TokenDataset",
    "TokenFile",
    "clip_grad_norm_",
    "parallelize",
    "stream",
    "train",
]
