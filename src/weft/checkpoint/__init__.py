"""Checkpoints of any module on a layout, resumed on any other; safetensors, no pickle."""

from .checkpoint import CheckpointError, Checkpoints, Loaded

__all__ = ["CheckpointError", "Checkpoints", "Loaded"]
