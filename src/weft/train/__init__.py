"""Training: data drawn on the fly, the loop, checkpoints, and real tables at the end."""

from .data import Batch, stream
from .evaluate import Result, evaluate, predict, real_splits, results_table
from .monitor import Record
from .prior import draw_table
from .trainer import Run, train

__all__ = [
    "Batch",
    "Record",
    "Result",
    "Run",
    "draw_table",
    "evaluate",
    "predict",
    "real_splits",
    "results_table",
    "stream",
    "train",
]
