"""Tensors on disk: checkpoints and caches in one kind of folder, safetensors with a JSON index."""

from .folder import CheckpointError
from .run import Checkpoints, Loaded
from .storage import SafetensorsReader, SafetensorsWriter

__all__ = ["CheckpointError", "Checkpoints", "Loaded", "SafetensorsReader", "SafetensorsWriter"]
