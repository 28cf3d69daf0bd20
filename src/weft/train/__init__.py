"""Training: data drawn on the fly, the loop, checkpoints, and real tables at the end."""

from ..checkpoint import CheckpointError, Checkpoints, Loaded
from .data import Batch
from .evaluate import Result, Score, evaluate, real_splits, results_table
from .gradients import clip_grad_norm_
from .monitor import Record
from .parallelize import parallelize
from .streams import stream
from .tables import TrainingTable, draw_training_table
from .trainer import Run, train

__all__ = [
    "Batch",
    "CheckpointError",
    "Checkpoints",
    "Loaded",
    "Record",
    "Result",
    "Run",
    "Score",
    "TrainingTable",
    "clip_grad_norm_",
    "draw_training_table",
    "evaluate",
    "parallelize",
    "real_splits",
    "results_table",
    "stream",
    "train",
]
