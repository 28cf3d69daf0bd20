"""Training: data drawn on the fly, data parallelism, clipping, the loop and its records."""

from .batches import PackedBatch, PackedReader, TokenDataset, TokenFile
from .data import TrainingBatch, stream
from .gradients import clip_grad_norm_
from .monitor import Record
from .trainer import Run, fit
from .wrappers import data_parallel

__all__ = [
    "PackedBatch",
    "PackedReader",
    "Record",
    "Run",
    "TokenDataset",
    "TokenFile",
    "TrainingBatch",
    "clip_grad_norm_",
    "data_parallel",
    "fit",
    "stream",
]
