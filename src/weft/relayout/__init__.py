"""Tensors moved from one placement to another, planned and exchanged."""
