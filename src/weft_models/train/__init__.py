"""Training: data drawn on the fly, data parallelism, clipping, the loop and its records."""

from weft_axes.gradients.clip import clip_grad_norm_
from weft_axes.gradients.data_parallel import data_parallel

from .data import TrainingBatch, stream
from .monitor import Record
from .trainer import Run, fit

__all__ = [
    "Record",
    "Run",
    "TrainingBatch",
    "clip_grad_norm_",
    "data_parallel",
    "fit",
    "stream",
]
